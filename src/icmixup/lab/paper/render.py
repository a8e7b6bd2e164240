"""How filled tables are shown: in the terminal, as Markdown, LaTeX or JSON, and on results/README.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from icmixup.lab.paper.fill import (
    STAND_IN_MARK,
    Entry,
    FilledTable,
    Ours,
    describe_result,
    fill_table,
    index_results,
)
from icmixup.lab.paper.published import TABLES
from icmixup.lab.paper.results import Result, Results, conflicting_results
from icmixup.lab.training.run_folder import write_atomically
from icmixup.lab.wording import NO_VALUE

PAGE_GUIDE = """`icmixup paper --write` generates this page from [runs.csv](runs.csv); do not edit it.

- **paper**: the number in [Mensink and Mettes, BMVC 2023](https://arxiv.org/abs/2305.10293), verbatim.
- **ours**: test accuracy in percent after the last epoch, mean ± standard deviation (number of seeds).
- **A minus B**: difference of two rows, of the paper's numbers and of our runs paired by seed.

`icmixup paper NAME` shows one table; `icmixup paper NAME --run-missing` trains its missing runs."""
LATEX_ESCAPES = {"%": r"\%", "&": r"\&", "_": r"\_", "±": r"$\pm$", STAND_IN_MARK: r"$\dagger$", "#": r"\#"}


class Group(NamedTuple):
    """A column of the table, split into the paper's numbers, ours, and their difference; cells by row."""

    title: str
    headings: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]


def table_groups(filled: FilledTable) -> list[Group]:
    return [column_group(filled, column) for column in filled.table.columns]


def column_group(filled: FilledTable, column: str) -> Group:
    entries = [entry for entry in (*filled.entries, *filled.gains) if entry.column == column]
    published = any(entry.paper is not None for entry in entries)
    headings = ["paper"] if published else []
    for variant in filled.table.variants:
        headings += [variant, "- paper"] if published else [variant]
    return Group(column, tuple(headings), tuple(entry_cells(entry, filled, published) for entry in entries))


def entry_cells(entry: Entry, filled: FilledTable, published: bool) -> tuple[str, ...]:
    cells = [paper_text(entry)] if published else []
    by_variant = {ours.variant: ours for ours in entry.ours}
    for variant in filled.table.variants:
        ours = by_variant.get(variant)
        cells.append(ours_text(entry, ours))
        if published:
            cells.append(difference_text(entry, ours))
    return tuple(cells)


def paper_text(entry: Entry) -> str:
    return NO_VALUE if entry.paper is None else format_percent(entry.paper, entry.is_gain)


def ours_text(entry: Entry, ours: Ours | None) -> str:
    """Mean ± standard deviation (number of runs)."""
    if ours is None or ours.mean is None:
        return NO_VALUE
    mark = STAND_IN_MARK if ours.stand_in else ""
    spread = "" if ours.std is None else f" ± {ours.std:.2f}"
    return f"{format_percent(ours.mean, entry.is_gain)}{spread} ({ours.n}){mark}"


def difference_text(entry: Entry, ours: Ours | None) -> str:
    gap = None if ours is None else entry.difference(ours)
    return NO_VALUE if gap is None else format_percent(gap, True)


def format_percent(value: float, signed: bool) -> str:
    return f"{value:+.2f}" if signed else f"{value:.2f}"


def row_labels(filled: FilledTable) -> list[str]:
    return list(dict.fromkeys(entry.row for entry in (*filled.entries, *filled.gains)))


def print_table(filled: FilledTable, console: Console) -> None:
    """Print the table, split into several where the terminal is too narrow, and its notes."""
    console.print(Text(filled.table.title, "bold"))
    remaining = table_groups(filled)
    while remaining:
        count = next(
            k for k in range(len(remaining), 0, -1) if k == 1 or fits_width(filled, remaining[:k], console)
        )
        console.print(rich_table(filled, remaining[:count]))
        remaining = remaining[count:]
    for note in filled.notes:
        console.print(Text(note), soft_wrap=False)
    console.print()


def fits_width(filled: FilledTable, groups: Sequence[Group], console: Console) -> bool:
    unlimited = console.options.update(max_width=10_000)
    return Measurement.get(console, unlimited, rich_table(filled, groups)).maximum <= console.width


def rich_table(filled: FilledTable, groups: Sequence[Group]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("\n", no_wrap=True)
    for group in groups:
        for position, heading in enumerate(group.headings):
            title = group.title if position == 0 else ""
            table.add_column(Text(f"{title}\n{heading}"), justify="right", no_wrap=True)
    labels, gains = row_labels(filled), {entry.row for entry in filled.gains}
    for row, label in enumerate(labels):
        cells = [Text(cell) for group in groups for cell in group.cells[row]]
        last = label not in gains and row + 1 < len(labels) and labels[row + 1] in gains
        table.add_row(Text(label), *cells, end_section=last, style="dim" if label in gains else "")
    return table


def table_as_markdown(filled: FilledTable) -> str:
    """One line per cell, since wide tables are hard to read and to compare between commits."""
    variants = list(filled.table.variants)
    head = ["", "", "paper", *(text for name in variants for text in (name, f"{name} - paper"))]
    lines = [markdown_row(head), markdown_row(["---"] * 2 + ["---:"] * (len(head) - 2))]
    for entry in (*filled.entries, *filled.gains):
        lines.append(markdown_row([entry.row, entry.column, *entry_cells(entry, filled, True)]))
    notes = [f"- {note}" for note in filled.notes]
    return "\n".join([f"### {filled.table.title}", "", *lines, "", *notes]) + "\n"


def markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def table_as_latex(filled: FilledTable) -> str:
    """A tabular that uses booktabs, with the notes in footnote size."""
    groups = table_groups(filled)
    spans = [rf"\multicolumn{{{len(g.headings)}}}{{c}}{{{escape_latex(g.title)}}}" for g in groups]
    headings = [escape_latex(heading) for group in groups for heading in group.headings]
    body = [
        latex_row([label, *(cell for group in groups for cell in group.cells[row])])
        for row, label in enumerate(row_labels(filled))
    ]
    lines = [
        f"% {filled.table.title}",
        rf"\begin{{tabular}}{{@{{}}l{'r' * len(headings)}@{{}}}}",
        r"\toprule",
        " & ".join(["", *spans]) + r" \\",
        " & ".join(["", *headings]) + r" \\",
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
        *(rf"\par{{\footnotesize {escape_latex(note)}}}" for note in filled.notes),
    ]
    return "\n".join(lines) + "\n"


def latex_row(cells: Sequence[str]) -> str:
    return " & ".join(escape_latex(cell) for cell in cells) + r" \\"


def escape_latex(text: str) -> str:
    return "".join(LATEX_ESCAPES.get(character, character) for character in text)


def table_as_json(filled: FilledTable) -> dict[str, Any]:
    return {
        "name": filled.table.name,
        "title": filled.table.title,
        "in_paper": filled.table.in_paper,
        "cells": len(filled.trainable),
        "cells_with_runs": filled.cells_with_runs,
        "entries": [entry_as_json(entry, filled) for entry in filled.entries],
        "gains": [entry_as_json(entry, filled) for entry in filled.gains],
        "notes": list(filled.notes),
    }


def entry_as_json(entry: Entry, filled: FilledTable) -> dict[str, Any]:
    return {
        "row": entry.row,
        "column": entry.column,
        "paper": None if entry.paper is None else round(entry.paper, 2),
        "ours": [dict(ours_as_json(entry, ours, filled)) for ours in entry.ours],
    }


def ours_as_json(entry: Entry, ours: Ours, filled: FilledTable) -> Iterator[tuple[str, Any]]:
    yield "variant", ours.variant
    yield "mean", ours.mean
    yield "std", ours.std
    yield "n", ours.n
    yield "by_seed", {str(seed): value for seed, value in ours.by_seed.items()}
    yield "difference", entry.difference(ours)
    yield "tested_on", ours.stand_in
    if not entry.is_gain:
        recipe = filled.table.recipe(entry.row, entry.column, ours.variant)
        assert recipe is not None
        yield "recipe", recipe.fields()


def overview_table(tables: Sequence[FilledTable]) -> Table:
    """Every table and figure for the terminal, with the number of its cells that have runs."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("cells with runs", justify="right", no_wrap=True)
    table.add_column("runs", justify="right", no_wrap=True)
    table.add_column("title")
    for filled, following in zip_longest(tables, tables[1:]):
        ends_paper = following is not None and filled.table.in_paper and not following.table.in_paper
        table.add_row(*map(Text, overview_row(filled)), end_section=ends_paper)
    return table


def overview_row(filled: FilledTable) -> tuple[str, str, str, str]:
    runs = sum(ours.n for ours in filled.trainable)
    mark = f" {STAND_IN_MARK}" if filled.stand_in_cells else ""
    cells = f"{filled.cells_with_runs} of {len(filled.trainable)}{mark}"
    return filled.table.name, cells, str(runs), filled.table.title


def overview_as_markdown(tables: Sequence[FilledTable]) -> str:
    """One line per table, with the number of its cells that have runs."""
    head = [("`icmixup paper`", "cells with runs", "runs", "title"), ("---", "---:", "---:", "---")]
    return "\n".join(markdown_row(row) for row in (*head, *map(overview_row, tables)))


def write_page(results: Results, path: Path) -> Path:
    """Write results_page to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, results_page(results).encode())
    return path


def results_page(results: Results) -> str:
    """results/README.md: every table and figure with our results; equal results give equal pages."""
    index = index_results(results.rows)
    filled = [fill_table(table, index) for table in TABLES.values()]
    paper = [table for table in filled if table.table.in_paper]
    others = [table for table in filled if not table.table.in_paper]
    parts = ["# Results", describe_coverage(paper, "the paper's tables and figures", "in the paper")]
    parts += [
        overview_as_markdown(paper),
        describe_coverage(others, "our ablations and extensions", "planned"),
    ]
    parts += [overview_as_markdown(others), describe_runs(results.rows), PAGE_GUIDE]
    parts += ["## The paper's tables and figures", *(table_as_markdown(table).rstrip() for table in paper)]
    parts += ["## Ablations and extensions", *(table_as_markdown(table).rstrip() for table in others)]
    parts += list(conflict_notes(results.rows))
    if results.damaged:
        lines = "\n".join(f"- line {damage.line}: {damage.reason}" for damage in results.damaged)
        parts.append(f"## Rows that could not be read\n\n{lines}")
    return "\n\n".join(parts) + "\n"


def describe_coverage(tables: Sequence[FilledTable], what: str, seeds: str) -> str:
    """How many cells of these tables have runs, and how many have all the seeds that their table needs."""
    cells = sum(len(table.trainable) for table in tables)
    with_runs = sum(table.cells_with_runs for table in tables)
    complete = sum(table.complete_cells for table in tables)
    stand_ins = sum(table.stand_in_cells for table in tables)
    note = f" {stand_ins} used a stand-in test set ({STAND_IN_MARK})." if stand_ins else ""
    return (
        f"**{with_runs} of {cells} cells of {what} have runs**, {complete} of them with as many seeds as "
        f"{seeds}.{note} A cell that appears in several tables is counted in each."
    )


def describe_runs(rows: Sequence[Result]) -> str:
    if not rows:
        return "There are no runs yet."
    devices = sorted({str(row.numbers["device"]) for row in rows})
    hours = sum(row.device_minutes for row in rows) / 60
    unknown = sum(row.numbers.get("fingerprint") is None for row in rows)
    note = f" {unknown} have no fingerprint of their images, which was added later." if unknown else ""
    return f"{len(rows)} runs, {hours:.1f} hours of {', '.join(devices)}.{note}"


def conflict_notes(rows: Sequence[Result]) -> Iterator[str]:
    """A section with all results of the recipes that were run several times with different results."""
    conflicts = conflicting_results(rows)
    if conflicts:
        lines = [
            f"- {group[0].recipe.name}: {' and '.join(describe_result(row) for row in group)}"
            for group in conflicts
        ]
        yield "## Recipes with different results\n\n" + "\n".join(lines)
