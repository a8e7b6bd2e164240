"""Check what the wheel and the sdist contain.

python tools/check_dist.py dist
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def wheel_names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def sdist_names(sdist: Path) -> set[str]:
    with tarfile.open(sdist) as archive:
        return {member.name.split("/", 1)[1] for member in archive.getmembers() if member.isfile()}


def problems(folder: Path) -> list[str]:
    wheels, sdists = list(folder.glob("*.whl")), list(folder.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sdists) != 1:
        return [f"{folder} has {len(wheels)} wheels and {len(sdists)} sdists; expected one of each"]
    source = {
        path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*") if path.is_file()
    }
    source = {name for name in source if "__pycache__" not in name}
    packed = {name for name in wheel_names(wheels[0]) if ".dist-info/" not in name}
    found = [f"{name} is missing in the wheel" for name in sorted(source - packed)]
    found += [f"{name} does not belong in the wheel" for name in sorted(packed - source)]
    needed = {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "tests/conftest.py"}
    found += [f"{name} is missing in the sdist" for name in sorted(needed - sdist_names(sdists[0]))]
    return found


def main(folder: str) -> int:
    found = problems(Path(folder))
    print(*found or [f"{folder}: complete"], sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
