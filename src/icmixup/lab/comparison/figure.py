"""A comparison as a Matplotlib figure. Figures are created without pyplot, so no global state changes."""

from __future__ import annotations

import io
import textwrap
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from icmixup.lab.comparison.compare import Comparison
from icmixup.lab.comparison.statistics import Standing, measure_name, signed
from icmixup.lab.training.run_folder import write_atomically
from icmixup.lab.wording import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INFINITE_CLASS_COLOUR, OTHER_COLOUR, ZERO_LINE_COLOUR = "#c2410c", "#334155", "#94a3b8"
ROW_INCHES = 0.42


def plot_comparison(comparison: Comparison) -> Figure:
    """Accuracies on the left, paired differences to the baseline on the right; best method at the top."""
    from matplotlib.figure import Figure

    standings = [standing for standing in comparison.standings if standing.mean is not None]
    figure = Figure(figsize=(10, 2.3 + ROW_INCHES * len(standings)), layout="constrained", dpi=150)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1, 1.25))
    baseline = next((s for s in standings if s.method == comparison.baseline), None)
    for y, standing in enumerate(standings):
        draw_accuracies(left, standing, y)
        draw_difference(right, standing, baseline, y)
    label_rows(left, standings)
    seeds = count(len(comparison.seeds), "seed")
    finish_axes(left, f"test {measure_name(comparison.measure)}, % (mean of {seeds})")
    finish_axes(right, f"difference to {comparison.baseline}, points (95 % CI)")
    right.axvline(0, color=ZERO_LINE_COLOUR, linewidth=1.5, zorder=1)
    title = "\n".join(textwrap.wrap(comparison.verdict, 110))
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    figure.supxlabel(caption(comparison), fontsize=8, color=OTHER_COLOUR, x=0.01, ha="left")
    return figure


def caption(comparison: Comparison) -> str:
    recipe = comparison.recipe
    data = recipe.title.split(f".{recipe.model.replace('/', '-')}.")[0]
    return (
        f"{data}, {recipe.model}, {recipe.epochs} epochs. Small dots: seeds. Orange: Infinite Class methods. "
        f"Intervals cover new {'seeds' if comparison.seeds_only else 'seeds and test images'}."
    )


def colour(standing: Standing) -> str:
    return INFINITE_CLASS_COLOUR if standing.is_infinite_class else OTHER_COLOUR


def draw_accuracies(axes: Axes, standing: Standing, y: int) -> None:
    """A small dot per seed, and a bar at the mean."""
    seeds = standing.finished
    axes.scatter(seeds, [y] * len(seeds), s=22, color=colour(standing), alpha=0.45, linewidths=0)
    axes.plot([fmean(seeds)], [y], marker="|", markersize=16, markeredgewidth=2.2, color=colour(standing))


def draw_difference(axes: Axes, standing: Standing, baseline: Standing | None, y: int) -> None:
    """A small dot per pair of runs, and the mean with its interval and its value."""
    if standing.difference is None or baseline is None:
        if standing is baseline:
            axes.annotate(
                "baseline", (0, y), (6, 0), textcoords="offset points", va="center", color=OTHER_COLOUR
            )
        return
    both = zip(standing.accuracies, baseline.accuracies, strict=True)
    gaps = [a - b for a, b in both if a is not None and b is not None]
    axes.scatter(gaps, [y] * len(gaps), s=16, color=colour(standing), alpha=0.4, linewidths=0)
    low, mean, high = (standing.difference.low, standing.difference.mean, standing.difference.high)
    error = None if low is None or high is None else [[mean - low], [high - mean]]
    axes.errorbar(
        [mean], [y], xerr=error, fmt="o", markersize=6, capsize=4, linewidth=1.8, color=colour(standing)
    )
    axes.annotate(signed(mean), (mean, y), (0, 7), textcoords="offset points", ha="center", fontsize=8)


def label_rows(axes: Axes, standings: list[Standing]) -> None:
    labels = [f"{standing.method}   {standing.mean:.1f}" for standing in standings]
    axes.set_yticks(range(len(standings)), labels)
    axes.set_ylim(len(standings) - 0.4, -0.7)
    for label, standing in zip(axes.get_yticklabels(), standings, strict=True):
        label.set_color(colour(standing))


def finish_axes(axes: Axes, label: str) -> None:
    axes.set_xlabel(label)
    axes.grid(axis="x", color="#e2e8f0", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def write_png(figure: Figure, path: Path) -> Path:
    """Write the figure as a PNG; an interrupted write leaves no partial file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor="white")
    write_atomically(path, buffer.getvalue())
    return path
