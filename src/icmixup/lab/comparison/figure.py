"""Pictures from rows. Every plot_ function returns a Matplotlib Figure and touches no global state."""

from __future__ import annotations

import io
import textwrap
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from icmixup.lab.comparison.compare import Comparison
from icmixup.lab.comparison.statistics import Standing, signed
from icmixup.lab.training.run_folder import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS, OTHERS, FAINT = "#c2410c", "#334155", "#94a3b8"
ROW_INCHES = 0.42


def plot_comparison(comparison: Comparison) -> Figure:
    """Accuracies on the left, paired differences to the baseline on the right; best method on top."""
    from matplotlib.figure import Figure

    standings = [standing for standing in comparison.standings if standing.mean is not None]
    figure = Figure(figsize=(10, 2.3 + ROW_INCHES * len(standings)), layout="constrained", dpi=150)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1, 1.25))
    baseline = next((s for s in standings if s.method == comparison.baseline), None)
    for place, standing in enumerate(standings):
        plot_accuracies(left, standing, place)
        plot_difference(right, standing, baseline, place)
    label_rows(left, standings)
    seeds = len(comparison.seeds)
    finish_axes(left, f"test accuracy, % (mean of {seeds} seed{'s' * (seeds > 1)})")
    finish_axes(right, f"difference to {comparison.baseline}, points (95 % interval)")
    right.axvline(0, color=FAINT, linewidth=1.5, zorder=1)
    title = "\n".join(textwrap.wrap(comparison.verdict, 110))
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    figure.supxlabel(caption(comparison), fontsize=8, color=OTHERS, x=0.01, ha="left")
    return figure


def caption(comparison: Comparison) -> str:
    recipe = comparison.recipe
    part = recipe.name.split(f".{recipe.model.replace('/', '-')}.")[0]
    return (
        f"{part}, {recipe.model}, {recipe.epochs} epochs. Small dots: seeds. Orange: Infinite Class methods. "
        "Intervals cover new seeds, not other data."
    )


def colour(standing: Standing) -> str:
    return OURS if standing.ours else OTHERS


def plot_accuracies(axes: Axes, standing: Standing, place: int) -> None:
    """A faint dot a seed, a bar at the mean."""
    seeds = standing.finished
    axes.scatter(seeds, [place] * len(seeds), s=22, color=colour(standing), alpha=0.45, linewidths=0)
    axes.plot([fmean(seeds)], [place], marker="|", markersize=16, markeredgewidth=2.2, color=colour(standing))


def plot_difference(axes: Axes, standing: Standing, baseline: Standing | None, place: int) -> None:
    """A faint dot a pair, the mean, its interval, and the number beside it."""
    if standing.difference is None or baseline is None:
        if standing is baseline:
            axes.annotate(
                "baseline", (0, place), (6, 0), textcoords="offset points", va="center", color=OTHERS
            )
        return
    both = zip(standing.accuracies, baseline.accuracies, strict=True)
    gaps = [a - b for a, b in both if a is not None and b is not None]
    axes.scatter(gaps, [place] * len(gaps), s=16, color=colour(standing), alpha=0.4, linewidths=0)
    low, mean, high = (standing.difference.low, standing.difference.mean, standing.difference.high)
    reach = None if low is None or high is None else [[mean - low], [high - mean]]
    axes.errorbar(
        [mean], [place], xerr=reach, fmt="o", markersize=6, capsize=4, linewidth=1.8, color=colour(standing)
    )
    axes.annotate(signed(mean), (mean, place), (0, 7), textcoords="offset points", ha="center", fontsize=8)


def label_rows(axes: Axes, standings: list[Standing]) -> None:
    names = [f"{standing.method}   {standing.mean:.1f}" for standing in standings]
    axes.set_yticks(range(len(standings)), names)
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
    """The figure as a PNG, written beside and renamed."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor="white")
    write_atomically(path, buffer.getvalue())
    return path
