"""Sphinx: the pages of docs/ as a site. `make docs` builds it in build/site."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from icmixup.integrations import _versions

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCE = PROJECT["urls"]["Source"]

project = "icmixup"
author = "The icmixup developers"
copyright = f"2026, {author}"
release = version = PROJECT["version"]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
html_theme = "furo"
html_title = f"icmixup {release}"
html_theme_options = {"source_repository": SOURCE, "source_branch": "main", "source_directory": "docs/"}
templates_path = ["_templates"]
exclude_patterns = ["_build", "_templates"]
html_extra_path = ["_extra"]  # the report of make demo-page, a page of its own

# Pages use GitHub's Markdown, so headings have GitHub's anchors.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
# The tutorial runs in every build; an exception in it fails the build.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120

default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# The frameworks are not installed where the site is built; the modules for them are documented all the same.
autodoc_mock_imports = ["fastai", "timm", "torchvision"]
_versions.require = lambda *_: None
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def adapt_docstring(
    _app: object, _what: str, _name: str, _obj: object, _options: object, lines: list[str]
) -> None:
    """Our docstrings as reStructuredText: formulas are literal blocks, and calls such as f(*x) are code."""
    sections = ("Args:", "Returns:", "Yields:", "Raises:")
    end = next((n for n, line in enumerate(lines) if line.strip() in sections), len(lines))
    text = [*mark_formulas(lines[:end]), *lines[end:]]
    lines[:] = [re.sub(r"(?<![`\w])[\w.]+\(\*{1,2}\w+\)", r"``\g<0>``", line) for line in text]


def mark_formulas(lines: list[str]) -> list[str]:
    """Indented lines behind an empty one are formulas or drawings; a code example starts with >>>."""
    marked: list[str] = []
    inside = False
    for before, line in zip(["", *lines], lines, strict=False):
        if line.startswith("    ") and not before.strip() and not inside:
            marked += ["::", ""]
            inside = True
        inside = inside and (line.startswith("    ") or not line.strip())
        marked.append(line)
    return marked


def link_to_source(_app: object, docname: str, source: list[str]) -> None:
    """Links to files outside docs/ lead to the repository: they are not pages of the site."""
    folder = (DOCS / docname).parent
    if docname == "changelog":
        # Its links start from the root of the repository.
        text = re.sub(r"\]\((?!https?://|#|docs/)", "](../", (ROOT / "CHANGELOG.md").read_text())
        source[0] = text.replace("](docs/", "](")

    def repository_link(found: re.Match[str]) -> str:
        target = (folder / found[1]).resolve()
        outside = target.exists() and not target.is_relative_to(DOCS)
        return f"]({SOURCE}/blob/main/{target.relative_to(ROOT).as_posix()})" if outside else found[0]

    source[0] = re.sub(r"\]\((\.\./[^)#\s]+)\)", repository_link, source[0])


def setup(app: object) -> None:
    app.connect("autodoc-process-docstring", adapt_docstring, priority=400)  # type: ignore[attr-defined]
    app.connect("source-read", link_to_source)  # type: ignore[attr-defined]
