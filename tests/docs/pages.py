"""Parse the documentation pages: code blocks, tables and sections."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
# Code of these runs with the real framework, by make test-integrations.
FRAMEWORK_GUIDES = [page for page in (ROOT / "docs" / "guides").glob("*.md") if page.stem != "pytorch"]
# A block of the tutorial is a cell of a notebook, which also runs when the site is built.
PYTHON = ("python", "{code-cell} python")
README = ROOT / "README.md"
PAPER, CARDS, FINDINGS, SPEED, ARCHITECTURE, LOG = (
    ROOT / "docs" / f"{name}.md" for name in ("paper", "methods", "findings", "speed", "architecture", "log")
)


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, *languages: str) -> list[tuple[int, str]]:
    """The line number and text of each fenced block in one of the languages ("" for a bare fence)."""
    found: list[tuple[int, str]] = []
    opened, language, lines = 0, "", []
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        if not line.startswith("```"):
            lines.append(line)
        elif opened:
            found += [(opened, "\n".join(lines))] if language in languages else []
            opened = 0
        else:
            opened, language, lines = number, line[3:].strip(), []
    assert not opened, f"{page_name(page)}:{opened} opens a block that is never closed"
    return found


def rows(text: str) -> list[list[str]]:
    """The cells of every table row, header rows included."""
    lines = [
        line for line in text.splitlines() if line.startswith("|") and not re.fullmatch(r"[|\-: ]+", line)
    ]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def section(page: Path, title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page.read_text(), re.M | re.S)
    assert found, f"{page_name(page)} has no section {title!r}"
    return found[1]
