"""A filled table for the terminal, as Markdown, LaTeX or JSON; the paper's numbers always under "paper"."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from icmixup.lab.comparison.table import NOTHING
from icmixup.lab.paper.fill import MARK, Entry, FilledTable, Ours

LATEX = {"%": r"\%", "&": r"\&", "_": r"\_", "±": r"$\pm$", MARK: r"$\dagger$", "#": r"\#"}


class Group(NamedTuple):
    """A column of the table: the paper's numbers, ours, and differences side by side, row by row."""

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
    return NOTHING if entry.paper is None else number(entry.paper, entry.gain)


def ours_text(entry: Entry, ours: Ours | None) -> str:
    """Mean ± standard deviation (n)."""
    if ours is None or ours.mean is None:
        return NOTHING
    spread = "" if ours.std is None else f" ± {ours.std:.2f}"
    return f"{number(ours.mean, entry.gain)}{spread} ({ours.n}){MARK if ours.dataset else ''}"


def difference_text(entry: Entry, ours: Ours | None) -> str:
    gap = None if ours is None else entry.difference(ours)
    return NOTHING if gap is None else number(gap, True)


def number(value: float, signed: bool) -> str:
    return f"{value:+.2f}" if signed else f"{value:.2f}"


def row_labels(filled: FilledTable) -> list[str]:
    return list(dict.fromkeys(entry.row for entry in (*filled.entries, *filled.gains)))


def print_table(filled: FilledTable, console: Console) -> None:
    """The table, folded where the terminal is too narrow, and what there is to say under it."""
    console.print(Text(filled.table.title, "bold"))
    left = table_groups(filled)
    while left:
        fits = next(k for k in range(len(left), 0, -1) if k == 1 or fit(filled, left[:k], console))
        console.print(rich_table(filled, left[:fits]))
        left = left[fits:]
    for note in filled.notes:
        console.print(Text(note), soft_wrap=False)
    console.print()


def fit(filled: FilledTable, groups: Sequence[Group], console: Console) -> bool:
    endless = console.options.update(max_width=10_000)
    return Measurement.get(console, endless, rich_table(filled, groups)).maximum <= console.width


def rich_table(filled: FilledTable, groups: Sequence[Group]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("\n", no_wrap=True)
    for group in groups:
        for place, heading in enumerate(group.headings):
            table.add_column(
                Text(f"{group.title if place == 0 else ''}\n{heading}"), justify="right", no_wrap=True
            )
    labels, gains = row_labels(filled), {entry.row for entry in filled.gains}
    for place, label in enumerate(labels):
        cells = [Text(cell) for group in groups for cell in group.cells[place]]
        last = label not in gains and place + 1 < len(labels) and labels[place + 1] in gains
        table.add_row(Text(label), *cells, end_section=last, style="dim" if label in gains else "")
    return table


def as_markdown(filled: FilledTable) -> str:
    """One line a cell: wide tables are hard to read, and harder to compare between commits."""
    variants = list(filled.table.variants)
    head = ["", "", "paper", *(text for name in variants for text in (name, f"{name} - paper"))]
    lines = [markdown_row(head), markdown_row(["---"] * 2 + ["---:"] * (len(head) - 2))]
    for entry in (*filled.entries, *filled.gains):
        lines.append(markdown_row([entry.row, entry.column, *entry_cells(entry, filled, True)]))
    notes = [f"- {note}" for note in filled.notes]
    return "\n".join([f"### {filled.table.title}", "", *lines, "", *notes]) + "\n"


def markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def as_latex(filled: FilledTable) -> str:
    """A tabular for booktabs, with the notes as small print."""
    groups = table_groups(filled)
    spans = [rf"\multicolumn{{{len(g.headings)}}}{{c}}{{{escape(g.title)}}}" for g in groups]
    headings = [escape(heading) for group in groups for heading in group.headings]
    body = [
        latex_row([label, *(cell for group in groups for cell in group.cells[place])])
        for place, label in enumerate(row_labels(filled))
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
        *(rf"\par{{\footnotesize {escape(note)}}}" for note in filled.notes),
    ]
    return "\n".join(lines) + "\n"


def latex_row(cells: Sequence[str]) -> str:
    return " & ".join(escape(cell) for cell in cells) + r" \\"


def escape(text: str) -> str:
    return "".join(LATEX.get(letter, letter) for letter in text)


def as_json(filled: FilledTable) -> dict[str, Any]:
    return {
        "name": filled.table.name,
        "title": filled.table.title,
        "in_paper": filled.table.in_paper,
        "cells": len(filled.trainable),
        "cells_with_runs": filled.filled,
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
    yield "tested_on", ours.dataset
    if not entry.gain:
        recipe = filled.table.recipe(entry.row, entry.column, ours.variant)
        assert recipe is not None
        yield "recipe", recipe.fields()


def listing(tables: Sequence[FilledTable]) -> Table:
    """Every table and figure, and how many of its cells have runs of ours."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for heading, justify in (("", "left"), ("cells with runs", "right"), ("runs", "right"), ("what", "left")):
        table.add_column(heading, justify=justify, no_wrap=heading != "what")  # type: ignore[arg-type]
    for place, filled in enumerate(tables):
        ends = filled.table.in_paper and place + 1 < len(tables) and not tables[place + 1].table.in_paper
        table.add_row(*map(Text, listing_cells(filled)), end_section=ends)
    return table


def listing_cells(filled: FilledTable) -> tuple[str, str, str, str]:
    runs = sum(ours.n for ours in filled.trainable)
    return filled.table.name, f"{filled.filled} of {len(filled.trainable)}", str(runs), filled.table.title
