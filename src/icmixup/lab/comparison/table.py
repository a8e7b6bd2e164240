"""A comparison as a table in the terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from icmixup.lab.comparison.compare import Comparison
from icmixup.lab.comparison.statistics import Standing
from icmixup.lab.sweep.progress import duration

NOTHING = "-"
FILE_WIDTH = 132  # columns where nobody's terminal says how many there are


class Column(NamedTuple):
    """One column: its heading, and the cell of a method."""

    heading: str
    cell: Callable[[Standing], str]


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Table, verdict and footnote; two tables where the terminal is too narrow for one."""
    groups = [accuracy_columns(comparison), honesty_columns()]
    tables = [comparison_table(comparison, [column for group in groups for column in group])]
    wide = console.options.update(width=10 * FILE_WIDTH)
    if console.measure(tables[0], options=wide).maximum > console.width:
        tables = [comparison_table(comparison, columns) for columns in groups]
    for table in tables:
        console.print(table)
    console.print(Text(f"Verdict: {comparison.verdict}.", "bold"))
    console.print(Text(comparison.footnote, "dim"))


def comparison_table(comparison: Comparison, columns: list[Column]) -> Table:
    """Methods in rows, highest accuracy first, the names of ours in bold."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("method", overflow="fold")
    for column in columns:
        # "70.1 ± 0.3 (1 lost)" may take two lines where there is little room; numbers stay whole.
        table.add_column(column.heading, justify="right", no_wrap=column.cell is not accuracy_cell)
    for standing in comparison.standings:
        cells = [column.cell(standing) for column in columns]
        name = Text(standing.method, "bold" if standing.ours else "")
        table.add_row(name, *cells, style=row_style(standing))
    return table


def row_style(standing: Standing) -> str:
    """Green is clearly above the baseline, red clearly below."""
    if standing.difference is None or not standing.difference.clear:
        return ""
    return "green" if standing.difference.above else "red"


def accuracy_columns(comparison: Comparison) -> list[Column]:
    def difference(standing: Standing) -> str:
        if standing.method == comparison.baseline:
            return "baseline"
        return NOTHING if standing.difference is None else str(standing.difference)

    groups = [name for name in ("many", "medium", "few") if has(comparison, name)]
    # One group alone is the accuracy over again.
    shown = groups if len(groups) > 1 else []
    return [
        Column("accuracy %", accuracy_cell),
        Column(f"against {comparison.baseline}\n[95 % interval]", difference),
        *(Column(name, lambda s, name=name: number(s.average(name), ".1f")) for name in shown),  # type: ignore[misc]
    ]


def has(comparison: Comparison, measure: str) -> bool:
    return any(standing.average(measure) is not None for standing in comparison.standings)


def honesty_columns() -> list[Column]:
    """How good the probabilities are, before and after one temperature; and what it took."""
    return [
        Column("NLL\n→ scaled", lambda s: pair(s, "nll", ".2f")),
        Column("calibration error\n% → scaled", lambda s: pair(s, "calibration_error", ".1f")),
        Column("a run", run_time),
    ]


def accuracy_cell(standing: Standing) -> str:
    """Mean ± spread over seeds, and how many runs have no result."""
    lost = len(standing.accuracies) - len(standing.finished)
    if standing.mean is None:
        return "no result"
    spread = "" if standing.std is None else f" ± {standing.std:.1f}"
    note = f" ({lost} lost)" if lost else ""
    return f"{standing.mean:.1f}{spread}{note}"


def pair(standing: Standing, measure: str, form: str) -> str:
    raw, scaled = standing.average(measure), standing.average(f"{measure}_scaled")
    return NOTHING if raw is None else f"{raw:{form}} → {number(scaled, form)}"


def run_time(standing: Standing) -> str:
    minutes = standing.average("minutes")
    return NOTHING if minutes is None else duration(60 * minutes)


def number(value: float | None, form: str) -> str:
    return NOTHING if value is None else f"{value:{form}}"


def stdout_console() -> Console:
    """Standard output; a file gets room for the whole table."""
    console = Console()
    return console if console.is_terminal else Console(width=FILE_WIDTH)
