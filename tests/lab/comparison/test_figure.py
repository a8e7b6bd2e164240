"""The figure of a comparison shows its numbers, and plotting changes no global state."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.figure import Figure

from icmixup.lab.comparison.compare import Comparison, summarise, write_comparison
from icmixup.lab.comparison.figure import INFINITE_CLASS_COLOUR, OTHER_COLOUR, plot_comparison, write_png
from icmixup.lab.comparison.statistics import MEASURES
from icmixup.lab.training.recipe import QUICK

ACCURACIES = {
    "mixup": [70.0, 71.0, 72.0],
    "ic-mixup": [80.0, 81.5, 82.0],
    "balanced-mixup": [85.0, 86.0, 87.4],
    "erm": [None, None, None],
}


@pytest.fixture
def comparison() -> Comparison:
    rows = [
        {"method": method, "seed": seed, "accuracy": value, **dict.fromkeys(MEASURES, 1.0)}
        for method, values in ACCURACIES.items()
        for seed, value in enumerate(values)
        if value is not None
    ]
    return summarise(QUICK, list(ACCURACIES), range(3), "mixup", rows)


def dots(axes: object) -> list[list[float]]:
    return [sorted(c.get_offsets()[:, 0]) for c in axes.collections if isinstance(c, PathCollection)]


def test_every_seed_is_a_dot_and_the_best_method_is_at_the_top(comparison: Comparison):
    left, right = plot_comparison(comparison).axes
    assert dots(left) == [ACCURACIES["balanced-mixup"], ACCURACIES["ic-mixup"], ACCURACIES["mixup"]]
    assert dots(right) == [pytest.approx([15.0, 15.0, 15.4]), pytest.approx([10.0, 10.0, 10.5])]


def test_the_error_bars_on_the_right_are_the_confidence_intervals(comparison: Comparison):
    right = plot_comparison(comparison).axes[1]
    bars = [c.get_segments()[0][:, 0] for c in right.collections if isinstance(c, LineCollection)]
    expected = [(s.difference.low, s.difference.high) for s in comparison.standings[:2] if s.difference]
    np.testing.assert_allclose(bars, expected)


def test_rows_are_labelled_and_infinite_class_methods_are_coloured(comparison: Comparison):
    figure = plot_comparison(comparison)
    labels = figure.axes[0].get_yticklabels()
    assert [(label.get_text().split()[0], label.get_color()) for label in labels] == [
        ("balanced-mixup", OTHER_COLOUR),
        ("ic-mixup", INFINITE_CLASS_COLOUR),
        ("mixup", OTHER_COLOUR),
    ]
    assert "balanced-mixup is best" in figure.get_suptitle()


def test_one_seed_is_plotted_without_intervals(comparison: Comparison):
    single = summarise(QUICK, ("mixup", "ic-mixup"), (0,), "mixup", comparison.rows)
    right = plot_comparison(single).axes[1]
    assert not any(isinstance(c, LineCollection) for c in right.collections)
    assert len(dots(right)) == 1


def test_the_png_has_the_size_of_the_figure(comparison: Comparison, tmp_path: Path):
    from PIL import Image

    figure = plot_comparison(comparison)
    with Image.open(write_png(figure, tmp_path / "comparison.png")) as image:
        assert image.format == "PNG"
        assert image.size == pytest.approx(tuple(figure.get_size_inches() * figure.dpi), abs=1)
        assert len(image.convert("RGB").getcolors(maxcolors=1 << 24)) > 50


def test_no_label_is_cut_off_or_overlaps_another(comparison: Comparison):
    figure: Figure = plot_comparison(comparison)
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for axes in figure.axes for label in axes.get_yticklabels()[:3]]
    boxes += [text.get_window_extent() for text in (figure._suptitle, figure._supxlabel)]
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for box in boxes)
    rows = figure.axes[0].get_yticklabels()
    assert all(a.get_window_extent().y0 > b.get_window_extent().y1 for a, b in pairwise(rows))


def test_plotting_does_not_import_pyplot(comparison: Comparison, tmp_path: Path):
    path, _ = write_comparison(comparison, tmp_path)
    code = (
        "import sys; from pathlib import Path; from icmixup.lab.comparison.compare import read_comparison; "
        "from icmixup.lab.comparison.figure import plot_comparison, write_png; "
        "write_png(plot_comparison(read_comparison(Path(sys.argv[1]))), Path(sys.argv[2])); "
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(path), str(tmp_path / "comparison.png")], check=True)
    assert (tmp_path / "comparison.png").exists()
