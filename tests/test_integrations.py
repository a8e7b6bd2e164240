"""Frameworks that are missing or too old: the error names the framework, the version found and the one
needed.

The integrations themselves are tested with the real frameworks, by `make test-integrations`.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from icmixup._install import install_hint
from icmixup.integrations._versions import OLDEST, release

ROOT = Path(__file__).parents[1]
FRAMEWORKS = ("fastai", "lightning", "timm", "torchvision", "transformers")


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_missing_framework_is_named_with_the_version_that_is_needed(name: str) -> None:
    if find_spec(name):
        pytest.skip(f"{name} is installed")
    message = f"icmixup.integrations.{name} needs {name} {OLDEST[name]} or later, which is not installed"
    with pytest.raises(ModuleNotFoundError, match=re.escape(message)):
        importlib.import_module(f"icmixup.integrations.{name}")


# All in one process, which imports torch once: an integration that is refused leaves nothing behind.
IMPORT_ALL = """
import importlib, json, sys

folder, *names = sys.argv[1:]
sys.path.insert(0, folder)
errors = {}
for name in names:
    try:
        importlib.import_module(f"icmixup.integrations.{name}")
    except ImportError as error:
        errors[name] = str(error)
print(json.dumps(errors))
"""


@pytest.fixture(scope="module")
def import_errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of every integration, beside distributions of version 0.1 in front of what is installed."""
    folder = tmp_path_factory.mktemp("old")
    for package in (*FRAMEWORKS, "pytorch-lightning"):  # Lightning has two names
        info = folder / f"{package.replace('-', '_')}-0.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1\n")
    command = [sys.executable, "-c", IMPORT_ALL, str(folder), *FRAMEWORKS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_that_is_too_old_is_named_with_both_versions(
    name: str, import_errors: dict[str, str]
) -> None:
    found = f"{name} 0.1" + (" and pytorch-lightning 0.1" if name == "lightning" else "")
    assert f"needs {name} {OLDEST[name]} or later, found {found}: pip install" in import_errors[name]


@pytest.mark.parametrize(
    ("older", "newer"), [("2.9", "2.10"), ("0.21.0", "1.0"), ("2.6.0rc1", "2.7"), ("4.48.2", "4.48.3+cu1")]
)
def test_versions_are_compared_as_numbers(older: str, newer: str) -> None:
    assert release(older) < release(newer)


def test_the_versions_that_are_needed_tested_and_declared_are_the_same() -> None:
    pinned = dict(re.findall(r"^([\w-]+)==([\w.]+)$", (ROOT / "tools" / "oldest.txt").read_text(), re.M))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for name in FRAMEWORKS:
        assert pinned[name] == OLDEST[name]
        assert extras[name][0].split(">=")[1] == OLDEST[name]
    floor = next(line for line in project["dependencies"] if line.startswith("torch>="))
    assert release(pinned["torch"]) == (*release(floor.removeprefix("torch>=")), 0)


def test_importing_the_package_of_integrations_imports_no_framework() -> None:
    code = "import sys, icmixup.integrations; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", *FRAMEWORKS} & set(done.stdout.split())


def test_a_hint_says_what_to_install_from_an_index_and_from_a_clone() -> None:
    assert install_hint("lab") == "pip install 'icmixup[lab]', or pip install '.[lab]' in a clone"


def test_every_message_that_names_an_extra_comes_from_the_hint() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text()
        assert path.name == "_install.py" or "pip install icmixup[" not in text.replace("'", ""), path
        for extra in re.findall(r"install_hint\([\"'](\w+)[\"']\)", text):
            assert extra in extras
