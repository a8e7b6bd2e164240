"""The tools behind make docs and make dist find what they look for."""

from __future__ import annotations

import importlib
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def check_site(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("check_site")


@pytest.fixture
def check_dist(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("check_dist")


def write_site(folder: Path, **pages: str) -> Path:
    for name, body in pages.items():
        (folder / f"{name}.html").write_text(f"<html><body>{body}</body></html>")
    return folder


def test_links_to_pages_and_anchors_that_exist_pass(check_site: ModuleType, tmp_path: Path) -> None:
    other = "<h1 id='top'>b</h1><a href='https://example.org/x#y'>away</a>"
    site = write_site(
        tmp_path, index="<a href='other.html#top'>a</a><a href='#here' id='here'>b</a>", other=other
    )
    assert check_site.broken_links(site) == []
    assert check_site.main(str(site)) == 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("<a href='gone.html'>a</a>", "index.html: gone.html does not exist"),
        ("<img src='gone.png'>", "index.html: gone.png does not exist"),
        ("<a href='#gone'>a</a>", "index.html: #gone has no such anchor"),
        ("<a href='other.html#gone'>a</a>", "index.html: other.html#gone has no such anchor"),
    ],
)
def test_a_broken_link_is_named_with_its_page(
    check_site: ModuleType, tmp_path: Path, body: str, message: str
) -> None:
    site = write_site(tmp_path, index=body, other="<h1 id='top'>b</h1>")
    assert check_site.broken_links(site) == [message]
    assert check_site.main(str(site)) == 1


def pack(folder: Path, leave_out: str = "", add: str = "") -> Path:
    """A wheel and an sdist of the real source, without one file or with one too many."""
    with zipfile.ZipFile(folder / "icmixup-0-py3-none-any.whl", "w") as wheel:
        for path in (ROOT / "src").rglob("*"):
            name = path.relative_to(ROOT / "src").as_posix()
            if path.is_file() and "__pycache__" not in name and name != leave_out:
                wheel.write(path, name)
        if add:
            wheel.writestr(add, "")
    with tarfile.open(folder / "icmixup-0.tar.gz", "w:gz") as sdist:
        for name in ("README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "tests/conftest.py"):
            sdist.add(ROOT / name, f"icmixup-0/{name}")
    return folder


def test_a_complete_wheel_and_sdist_pass(check_dist: ModuleType, tmp_path: Path) -> None:
    assert check_dist.problems(pack(tmp_path)) == []


def test_files_that_are_missing_or_too_many_are_named(check_dist: ModuleType, tmp_path: Path) -> None:
    folder = pack(tmp_path, leave_out="icmixup/py.typed", add="tests/test_loss.py")
    assert check_dist.problems(folder) == [
        "icmixup/py.typed is missing in the wheel",
        "tests/test_loss.py does not belong in the wheel",
    ]
    assert check_dist.problems(tmp_path / "empty") != []
