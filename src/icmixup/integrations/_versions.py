"""The oldest version of each framework that the integrations are tested with."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

OLDEST = {
    "fastai": "2.7.19",
    "lightning": "2.4.0",
    "pytorch-lightning": "2.4.0",
    "timm": "1.0.9",
    "torchvision": "0.21.0",
    "transformers": "4.48.3",  # earlier ones do not divide an accumulated loss
}


def require(*packages: str) -> None:
    """Raise ImportError unless one of the packages is installed in the version that is needed, or later."""
    found = {package: number for package in packages if (number := installed_version(package))}
    if any(release(number) >= release(OLDEST[package]) for package, number in found.items()):
        return
    name, needed = packages[0], OLDEST[packages[0]]
    module = f"icmixup.integrations.{name.replace('-', '_')}"
    hint = f"pip install '{name}>={needed}'"
    if not found:
        raise ModuleNotFoundError(
            f"{module} needs {name} {needed} or later, which is not installed: {hint}", name=name
        )
    which = " and ".join(f"{package} {number}" for package, number in found.items())
    raise ImportError(f"{module} needs {name} {needed} or later, found {which}: {hint}", name=name)


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def release(number: str) -> tuple[int, ...]:
    """ "2.6.0+cu124" or "2.6.0rc1" to (2, 6, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", number)
    return tuple(map(int, found[0].split("."))) if found else ()
