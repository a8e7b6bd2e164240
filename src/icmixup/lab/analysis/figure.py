"""The paper's last figure: confidence and class difference as functions of lam, from rows of analyse_runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import fmean, pvariance
from typing import TYPE_CHECKING

from icmixup.lab.training.run_folder import Row
from icmixup.methods import find_method

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Infinite Class methods have warm colours, other methods cold ones.
WARM = ("#c2410c", "#d97706", "#be123c", "#a16207")
COLD = ("#334155", "#0284c7", "#0f766e", "#6d28d9")
GRID = "#e2e8f0"
NORMS = {
    "squared_norm": "the scores",
    "centred_norm": "the scores minus their mean",
    "feature_norm": "the features",
}


@dataclass(frozen=True)
class Line:
    """One line of a figure: all runs with the same name and all their choices of images, pooled."""

    name: str
    method: str
    curves: int  # runs x choices of images
    lams: list[float]
    norms: dict[str, list[float]]  # by column of NORMS; only those that were measured
    means: list[float]
    stds: list[float]


def pooled_lines(rows: Sequence[Row]) -> list[Line]:
    """Lines in the order of the rows; rows with the same line and lam have equal weight."""
    return [
        pooled_line([row for row in rows if row["line"] == name])
        for name in dict.fromkeys(row["line"] for row in rows)
    ]


def pooled_line(rows: Sequence[Row]) -> Line:
    lams = sorted({row["lam"] for row in rows})
    groups = [[row for row in rows if row["lam"] == lam] for lam in lams]
    return Line(
        name=rows[0]["line"],
        method=rows[0]["method"],
        curves=len(groups[0]),
        lams=lams,
        norms={
            name: [fmean(row[name] for row in group) for group in groups]
            for name in NORMS
            if all(is_measured(row, name) for row in rows)
        },
        means=[fmean(row["difference_mean"] for row in group) for group in groups],
        stds=[pooled_std(group) for group in groups],
    )


def is_measured(row: Row, name: str) -> bool:
    return name in row and not math.isnan(row[name])


def pooled_std(group: Sequence[Row]) -> float:
    """Standard deviation over all pairs, from the variance within curves and that of their means."""
    within = fmean(row["difference_std"] ** 2 for row in group)
    return math.sqrt(within + pvariance([row["difference_mean"] for row in group]))


def plot_confidence(rows: Sequence[Row]) -> Figure:
    """Mean squared norms against lam: one panel per norm, one line per method."""
    lines = pooled_lines(rows)
    shown = [name for name in NORMS if all(name in line.norms for line in lines)]
    figure, panels = make_panels([f"mean squared norm of {NORMS[name]}" for name in shown], rows)
    for name, axes in zip(shown, panels, strict=True):
        for line, colour in coloured(lines):
            axes.plot(
                line.lams, line.norms[name], marker="o", markersize=4, color=colour, label=legend_label(line)
            )
        axes.set_ylim(bottom=0)
    panels[0].legend(frameon=False)
    return figure


def plot_difference(rows: Sequence[Row]) -> Figure:
    """Mean class difference against lam: one line per method, with a band of one standard deviation."""
    figure, (axes,) = make_panels(["score of the first class minus the second"], rows)
    for line, colour in coloured(pooled_lines(rows)):
        low = [mean - std for mean, std in zip(line.means, line.stds, strict=True)]
        high = [mean + std for mean, std in zip(line.means, line.stds, strict=True)]
        axes.fill_between(line.lams, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(line.lams, line.means, marker="o", markersize=4, color=colour, label=legend_label(line))
    axes.axhline(0, color="#94a3b8", linewidth=1, zorder=1)
    axes.legend(frameon=False)
    return figure


def coloured(lines: Sequence[Line]) -> list[tuple[Line, str]]:
    warm, cold = cycle(WARM), cycle(COLD)
    return [(line, next(warm if find_method(line.method).axes else cold)) for line in lines]


def legend_label(line: Line) -> str:
    return line.name if line.curves == 1 else f"{line.name} ({line.curves} curves)"


def make_panels(names: Sequence[str], rows: Sequence[Row]) -> tuple[Figure, list[Axes]]:
    """One panel per name, side by side, titled with the data and the models of the rows."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(0.8 + 4.8 * len(names), 4.2), layout="constrained", dpi=150)
    panels = figure.subplots(1, len(names), squeeze=False)[0].tolist()
    for axes, name in zip(panels, names, strict=True):
        axes.set_xlabel("lam (share of the first image)")
        axes.set_ylabel(name)
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    subjects = sorted({f"{row['dataset']}, {row['model']}" for row in rows})
    pairs = sorted({row["images"] for row in rows})
    mixed = " or ".join(f"{number:,}" for number in pairs)
    panels[0].set_title(f"{'; '.join(subjects)}: {mixed} pairs of test images", fontsize=9, loc="left")
    return figure, panels
