"""The page: a Jinja2 template with styles, scripts and data inside, so that one file is all there is."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from icmixup.lab.analysis.report.data import (
    Parts,
    commands,
    data_titles,
    facts,
    models,
    report_data,
    result_table,
    warnings_of,
)
from icmixup.lab.analysis.report.study import Study
from icmixup.lab.training.identity import package_version
from icmixup.lab.training.output import write_output

if TYPE_CHECKING:
    from jinja2 import Environment

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("charts.js", "sections.js", "page.js")
RELOAD_SECONDS = 20  # of the page of a comparison that is in progress
# That may start a sentence, and are not names of methods.
WORDS = ("no", "the", "this", "none", "so", "one", "about", "test", "runs")
# What must not appear inside <script>: the end of the element or of a line, and the start of a comment.
ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def render_page(study: Study, parts: Parts) -> str:
    """The page as HTML. Jinja2 escapes every name; the scripts only set text, never markup."""
    from markupsafe import Markup

    data = report_data(study, parts) | {"reload": RELOAD_SECONDS if parts.progress else 0}
    return (
        make_environment()
        .get_template("page.html.j2")
        .render(
            title=f"{data_titles(study)}, {models(study)}",
            verdicts=[headline(f"so far: {text}" if parts.progress else text) for text in study.verdicts],
            footnote=study.footnote,
            table=result_table(study),
            warnings=[sentence(text) for text in warnings_of(study, parts)],
            facts=facts(study, parts),
            commands=commands(study),
            progress=parts.progress,
            written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            version=package_version(),
            css=Markup((ASSETS / "page.css").read_text()),
            script=Markup(read_scripts()),
            data=Markup(script_json(data)),
        )
    )


def read_scripts() -> str:
    """All scripts as one function, which leaves no names behind."""
    return "\n".join(
        ["(() => {", '"use strict";', *((ASSETS / name).read_text() for name in SCRIPTS), "})();"]
    )


def headline(verdict: str) -> tuple[str, str]:
    """The first clause of a verdict, and the others."""
    head, _, rest = verdict.partition("; ")
    return sentence(head), sentence(rest) if rest else ""


def sentence(text: str) -> str:
    """With a full stop, and a capital where it starts with a word that is not a name."""
    first = text.partition(" ")[0].rstrip(":;,")
    text = text[:1].upper() + text[1:] if first in WORDS else text
    text = text.replace(" %", "\u00a0%")
    return text if text.endswith((".", "!", "?")) else f"{text}."


def script_json(data: object) -> str:
    """JSON that can stand inside <script>: no name in it can end the element."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for character, escape in ESCAPES.items():
        text = text.replace(character, escape)
    return text


@cache
def make_environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def write_page(path: Path, study: Study, parts: Parts) -> Path:
    """Write the page; a reader never sees a part of it."""
    content = render_page(study, parts).encode()
    write_output(path, content)
    return path
