"""Sphinx: the pages of docs/ as a site. `make docs` builds it in build/site."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCE = PROJECT["urls"]["Source"]

project = "icmixup"
author = "The icmixup developers"
copyright = f"2026, {author}"
release = version = PROJECT["version"]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
html_theme = "furo"
html_title = f"icmixup {release}"
html_theme_options = {"source_repository": SOURCE, "source_branch": "main", "source_directory": "docs/"}
templates_path: list[str] = []
exclude_patterns = ["_build"]

# Pages use GitHub's Markdown, so headings have GitHub's anchors.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
# The tutorial runs each time it changes; an exception in it fails the build.
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_timeout = 120

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# The frameworks are not installed where the site is built; their modules are documented all the same.
autodoc_mock_imports = ["fastai", "timm", "torchvision"]
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def mark_formulas(_app: object, _what: str, _name: str, _obj: object, _options: object, lines: list[str]) -> None:
    """Indented lines between paragraphs are formulas or drawings: make them literal blocks."""
    sections = ("Args:", "Returns:", "Yields:", "Raises:")
    marked, inside = [], False
    for before, line in zip(["", *lines], lines, strict=False):
        if line.strip() in sections or line.startswith((":param", ".. ")):
            break
        starts = line.startswith("    ") and not before.strip()
        if starts and not inside and not line.lstrip().startswith((">>>", "...")):
            marked += ["::", ""]
            inside = True
        elif line.strip() and not line.startswith("    "):
            inside = False
        marked.append(line)
    lines[:] = marked + lines[len([m for m in marked if m != "::"]) - marked.count("::") :]


def link_to_source(_app: object, _docname: str, source: list[str]) -> None:
    """Links to files outside docs/ lead to the repository: they are not pages of the site."""
    source[0] = re.sub(r"\]\(\.\./(?!\.\.)([^)\s]+)\)", rf"]({SOURCE}/blob/main/\1)", source[0])


def setup(app: object) -> None:
    app.connect("autodoc-process-docstring", mark_formulas, priority=400)  # type: ignore[attr-defined]
    app.connect("source-read", link_to_source)  # type: ignore[attr-defined]
