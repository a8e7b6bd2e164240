"""A comparison as a table in the terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from icmixup.lab.comparison.compare import Comparison
from icmixup.lab.comparison.statistics import Standing, are_classes_uneven, measure_key
from icmixup.lab.sweep.progress import duration
from icmixup.lab.wording import NO_VALUE, format_or_dash, with_spread

ROW_STYLES = {"above": "green", "below": "red", "": ""}
FILE_WIDTH = 132  # characters per line where the output is not a terminal


class Ranked(Protocol):
    """What the columns are made from: a comparison, or the runs of a report."""

    @property
    def baseline(self) -> str: ...

    @property
    def standings(self) -> tuple[Standing, ...]: ...


class Column(NamedTuple):
    """One column: its heading, and the function that formats the cell of a method."""

    heading: str
    cell: Callable[[Standing], str]


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the table, the verdict and the footnote; two tables where the terminal is too narrow for one."""
    groups = [accuracy_columns(comparison), [*tuned_columns(comparison), *calibration_columns()]]
    tables = [comparison_table(comparison, [column for group in groups for column in group])]
    wide = console.options.update(width=10 * FILE_WIDTH)
    if console.measure(tables[0], options=wide).maximum > console.width:
        tables = [comparison_table(comparison, columns) for columns in groups]
    for table in tables:
        console.print(table)
    console.print(Text(f"Verdict: {comparison.verdict}.", "bold"))
    console.print(Text(comparison.footnote, "dim"))


def comparison_table(comparison: Comparison, columns: list[Column]) -> Table:
    """One row per method, highest accuracy first; names of Infinite Class methods in bold."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("method", overflow="fold")
    for column in columns:
        # "70.1 ± 0.3 (1 failed)" may wrap in a narrow terminal; a number alone never does.
        table.add_column(column.heading, justify="right", no_wrap=column.cell is not accuracy_cell)
    for standing in comparison.standings:
        cells = [column.cell(standing) for column in columns]
        name = Text(standing.method, "bold" if standing.is_infinite_class else "")
        table.add_row(name, *cells, style=row_style(standing))
    return table


def row_style(standing: Standing) -> str:
    """Green if clearly above the baseline, red if clearly below, after correction for all comparisons."""
    return "" if standing.difference is None else ROW_STYLES[standing.difference.side]


def accuracy_columns(comparison: Ranked) -> list[Column]:
    """Accuracy, the best group, the difference to the baseline (* if clear), and accuracy by class size.

    Where the balanced accuracy, the average over classes, is another number than the accuracy over images,
    the one that methods are not compared in is shown, too.
    """

    def difference(standing: Standing) -> str:
        if standing.method == comparison.baseline:
            return "baseline"
        if standing.difference is None:
            return NO_VALUE
        return f"{standing.difference} {'*' if standing.difference.clear else ' '}"

    groups = [name for name in ("many", "medium", "few") if has_measure(comparison, name)]
    # A single group repeats the accuracy.
    shown = groups if len(groups) > 1 else []
    names = {"accuracy": "accuracy %", "balanced_accuracy": "balanced\naccuracy %"}
    measure = measure_key(comparison.standings[0].measure)
    (other,) = set(names) - {measure}
    unmeasured = Column(names[other], lambda s: format_or_dash(s.average(other), ".1f"))
    return [
        Column(names[measure], accuracy_cell),
        *([unmeasured] if are_classes_uneven(comparison.standings) else []),
        Column("best\ngroup", lambda s: "yes" if s.in_best_group else NO_VALUE),
        Column(f"against {comparison.baseline}\n[95 % interval]  ", difference),
        *(Column(name, lambda s, name=name: format_or_dash(s.average(name), ".1f")) for name in shown),  # type: ignore[misc]
    ]


def tuned_columns(comparison: Comparison) -> list[Column]:
    """Values of each method, if they were tuned; tau only if there is a method that adjusts logits."""
    if not comparison.tuned:
        return []
    shown = ["alpha"]
    if any(comparison.recipe_of(name).whole_method.uses("adjust_tau") for name in comparison.tuned):
        shown.append("adjust_tau")

    def values(standing: Standing) -> str:
        recipe = comparison.recipe_of(standing.method)
        method = recipe.whole_method
        own = [getattr(method, name) if method.uses(name) else None for name in shown]
        return " ".join(format_or_dash(value, ".3g") for value in (recipe.lr, recipe.weight_decay, *own))

    names = ", ".join(("decay", *shown)).replace("adjust_tau", "tau")
    return [Column(f"tuned: lr,\n{names}", values)]


def has_measure(comparison: Ranked, measure: str) -> bool:
    return any(standing.average(measure) is not None for standing in comparison.standings)


def calibration_columns() -> list[Column]:
    """Quality of the probabilities before and after temperature scaling, and the time of a run."""
    return [
        Column("NLL\n→ scaled", lambda s: raw_and_scaled(s, "nll", ".2f")),
        Column("calib. error\n% → scaled", lambda s: raw_and_scaled(s, "calibration_error", ".1f")),
        Column("time\nper run", run_time),
    ]


def accuracy_cell(standing: Standing) -> str:
    """Mean ± standard deviation over seeds, and how many runs failed or were not needed."""
    if standing.mean is None:
        return "no result"
    notes = [f"{standing.failed} failed"] if standing.failed else []
    if standing.stopped_after is not None and standing.stopped_after < len(standing.accuracies):
        notes.append(f"{standing.stopped_after} seeds")
    return with_spread(standing.mean, standing.std) + (f" ({', '.join(notes)})" if notes else "")


def raw_and_scaled(standing: Standing, measure: str, form: str) -> str:
    raw, scaled = standing.average(measure), standing.average(f"{measure}_scaled")
    return NO_VALUE if raw is None else f"{raw:{form}} → {format_or_dash(scaled, form)}"


def run_time(standing: Standing) -> str:
    minutes = standing.average("minutes")
    return NO_VALUE if minutes is None else duration(60 * minutes)


def stdout_console() -> Console:
    """Standard output; wide enough for the whole table if it is redirected to a file."""
    console = Console()
    return console if console.is_terminal else Console(width=FILE_WIDTH)
