"""results/README.md: every table and figure with our numbers, made from the rows of runs.csv alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from icmixup.lab.paper.fill import describe_result, fill_table, index_results
from icmixup.lab.paper.published import TABLES
from icmixup.lab.paper.render import as_markdown, listing_cells, markdown_row
from icmixup.lab.paper.results import Result, Results, conflicts
from icmixup.lab.training.run_folder import write_atomically

HEAD = """# Results

Made by `icmixup paper --write` from [runs.csv](runs.csv), a row a run; do not edit this page. The numbers
under "paper" are those of [Mensink and Mettes, BMVC 2023](https://arxiv.org/abs/2305.10293), verbatim. Ours
are test accuracies in percent after the last epoch: mean ± standard deviation over seeds (how many). A line
"A less B" is the difference of two rows: of the paper's own cells, and of our runs paired by seed.

`icmixup paper NAME` shows one table, `icmixup paper NAME --run-missing` trains what it lacks."""


def results_page(results: Results) -> str:
    """The page, the same for the same rows."""
    index = index_results(results.rows)
    filled = [fill_table(table, index) for table in TABLES.values()]
    parts = [HEAD, overview(results.rows), markdown_listing([listing_cells(table) for table in filled])]
    parts += [as_markdown(table).rstrip() for table in filled]
    parts += list(say_conflicts(results.rows))
    if results.damaged:
        lines = "\n".join(f"- line {damage.line}: {damage.reason}" for damage in results.damaged)
        parts.append(f"## Rows that could not be read\n\n{lines}")
    return "\n\n".join(parts) + "\n"


def overview(rows: Sequence[Result]) -> str:
    if not rows:
        return "There are no runs yet."
    devices = sorted({str(row.numbers["device"]) for row in rows})
    hours = sum(row.device_minutes for row in rows) / 60
    return f"{len(rows)} runs, {hours:.1f} hours of {', '.join(devices)}."


def markdown_listing(rows: Sequence[tuple[str, ...]]) -> str:
    head = [("`icmixup paper`", "cells with runs", "runs", "what"), ("---", "---:", "---:", "---")]
    return "\n".join(markdown_row(row) for row in (*head, *rows))


def say_conflicts(rows: Sequence[Result]) -> Iterator[str]:
    """Recipes that were run more than once, to different numbers: all of them."""
    found = conflicts(rows)
    if found:
        lines = [
            f"- {same[0].recipe.name}: {' and '.join(describe_result(row) for row in same)}" for same in found
        ]
        yield "## One recipe, different results\n\n" + "\n".join(lines)


def write_page(results: Results, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, results_page(results).encode())
    return path
