"""The result of a comparison in Python: table, verdict, data frame, and a readable form in notebooks."""

from __future__ import annotations

import html
import io
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from icmixup.lab.comparison.compare import Comparison
from icmixup.lab.comparison.statistics import Standing, measure_key
from icmixup.lab.comparison.table import (
    FILE_WIDTH,
    accuracy_columns,
    calibration_columns,
    print_comparison,
    tuned_columns,
)
from icmixup.lab.training.definitions import Definitions

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


@dataclass(frozen=True)
class ComparisonResult:
    """What `icmixup.lab.compare` found.

    `comparison` has everything as plain data: standings, rows of all runs, failures. `folder` contains
    comparison.json, comparison.csv, accuracies and confusions by class, and tuning.csv after tuning.
    """

    comparison: Comparison
    folder: Path
    definitions: Definitions = field(repr=False)  # methods of the comparison that only it knows

    @property
    def verdict(self) -> str:
        """One sentence: the best method or the best group, and what would settle the question."""
        return self.comparison.verdict

    @property
    def warnings(self) -> tuple[str, ...]:
        """Why data or settings may not answer which method is better, for example test data that was trained
        on; empty if nothing was found."""
        found = self.comparison.overview.get("warnings", ())
        assert isinstance(found, tuple | list)
        return tuple(map(str, found))

    def table(self, width: int = FILE_WIDTH) -> str:
        """The table that `icmixup compare` prints, with verdict and footnote.

        Args:
            width: characters per line; a narrow table is split in two.
        """
        console = Console(file=io.StringIO(), width=width)
        with self.definitions.registered():
            print_comparison(self.comparison, console)
        written: str = console.file.getvalue()  # type: ignore[attr-defined]
        return "\n".join(line.rstrip() for line in written.strip("\n").splitlines())

    def frame(self, *, runs: bool = False) -> DataFrame:
        """A pandas data frame: one row per method, highest accuracy first, or one row per run.

        Args:
            runs: one row per run, with recipe, all metrics, time and versions.
        """
        try:
            pandas = import_module("pandas")
        except ImportError as error:
            raise ImportError("frame() needs pandas: pip install pandas") from error
        if runs:
            return pandas.DataFrame(list(self.comparison.rows))
        rows = [summary_row(self.comparison, standing) for standing in self.comparison.standings]
        return pandas.DataFrame(rows).set_index("method")

    def figure(self) -> Figure:
        """Accuracies and differences as a Matplotlib figure."""
        from icmixup.lab.comparison.figure import plot_comparison

        with self.definitions.registered():
            return plot_comparison(self.comparison)

    def __repr__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        """The table for notebooks."""
        with self.definitions.registered():
            return comparison_as_html(self.comparison)


def summary_row(comparison: Comparison, standing: Standing) -> dict[str, object]:
    """One method: what is compared, the difference to the baseline, tuned values, and all other metrics."""
    difference, measure = standing.difference, measure_key(comparison.measure)
    return {
        "method": standing.method,
        measure: standing.mean,
        "std": standing.std,
        "seeds": len(standing.finished),
        "in_best_group": standing.in_best_group,
        "difference": None if difference is None else difference.mean,
        "low": None if difference is None else difference.low,
        "high": None if difference is None else difference.high,
        "clear": None if difference is None else difference.clear,
        **comparison.tuned.get(standing.method, {}),
        **{name: standing.average(name) for name in standing.metrics if name != measure},
    }


def comparison_as_html(comparison: Comparison) -> str:
    """Table, verdict and footnote as HTML without styles of its own."""
    columns = [*accuracy_columns(comparison), *tuned_columns(comparison), *calibration_columns()]
    headings = [html.escape(column.heading.strip()).replace("\n", "<br>") for column in columns]
    lines = ["<table><thead><tr><th>method</th>", *(f"<th>{one}</th>" for one in headings), "</tr></thead>"]
    for standing in comparison.standings:
        cells = [html.escape(column.cell(standing).strip()) for column in columns]
        name = html.escape(standing.method)
        name = f"<b>{name}</b>" if standing.is_infinite_class else name
        lines += [f"<tr><td>{name}</td>", *(f"<td>{cell}</td>" for cell in cells), "</tr>"]
    verdict, footnote = html.escape(comparison.verdict), html.escape(comparison.footnote)
    return "".join([*lines, f"</table><p><b>Verdict: {verdict}.</b></p><p><small>{footnote}</small></p>"])
