"""The table of a comparison: no number is cut off at any width, and colours show clear differences."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from icmixup.lab.comparison.compare import Comparison, Failure, summarise
from icmixup.lab.comparison.statistics import MEASURES
from icmixup.lab.comparison.table import print_comparison
from icmixup.lab.training.recipe import QUICK

ACCURACIES = {
    "mixup": [70.0, 71.0, 72.0],
    "ic-balanced-mixup-cutmix": [80.0, 81.5, 82.0],
    "remix": [60.0, 61.0, 61.5],
    "cutmix": [71.0, None, 74.0],
    "erm": [None, None, None],
}


def make_comparison(few: float | None = 42.25) -> Comparison:
    values = dict.fromkeys(MEASURES, 1.0) | {"few": few, "many": None, "nll": 1.26, "nll_scaled": 0.75}
    values |= {"calibration_error": 12.34, "calibration_error_scaled": 3.21, "minutes": 0.1}
    rows = [
        {"method": method, "seed": seed, "accuracy": accuracy, **values}
        for method, accuracies in ACCURACIES.items()
        for seed, accuracy in enumerate(accuracies)
        if accuracy is not None
    ]
    failures = [
        Failure(method, seed, "its loss became nan")
        for method, accuracies in ACCURACIES.items()
        for seed, accuracy in enumerate(accuracies)
        if accuracy is None
    ]
    return summarise(QUICK, list(ACCURACIES), range(3), "mixup", rows, failures)


def printed(comparison: Comparison, width: int = 140, colours: bool = False) -> str:
    text = io.StringIO()
    print_comparison(comparison, Console(file=text, width=width, force_terminal=colours))
    return text.getvalue()


def test_a_row_shows_every_number_of_its_method():
    row = next(line for line in printed(make_comparison()).splitlines() if line.startswith(" ic-balanced"))
    for cell in ("81.2 ± 1.0", "+10.2 [+9.4, +10.9]", "1.0", "42.2", "1.26 → 0.75", "12.3 → 3.2", "6.0 s"):
        assert cell in row


def test_rows_are_sorted_by_accuracy_with_diverged_methods_last():
    text = printed(make_comparison())
    positions = [
        text.index(f"\n {name} ") for name in ("ic-balanced-mixup-cutmix", "cutmix", "mixup", "remix", "erm")
    ]
    assert positions == sorted(positions)
    assert "72.5 ± 2.1 (1 failed)" in text
    assert "no result" in text[positions[-1] :].splitlines()[1]


@pytest.mark.parametrize("width", [80, 100, 140])
def test_nothing_is_cut_off_at_any_width(width: int):
    text = printed(make_comparison(), width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for cell in ("+10.2 [+9.4, +10.9]", "42.2", "12.3 → 3.2", "6.0 s"):
        assert cell in text


def test_accuracy_by_class_size_is_shown_only_for_groups_that_exist():
    assert "few" in printed(make_comparison())
    assert "many" not in printed(make_comparison())
    assert "medium" not in printed(make_comparison(few=None))  # a single group repeats the accuracy


def test_green_is_clearly_above_the_baseline_and_red_clearly_below():
    lines = printed(make_comparison(), colours=True).splitlines()

    def colour(cell: str) -> set[str]:
        row = next(line for line in lines if cell in line)
        return {name for name, code in (("red", "31m"), ("green", "32m")) if code in row}

    assert colour("81.2 ± 1.0") == {"green"}  # ic-balanced-mixup-cutmix
    assert colour("60.8 ± 0.8") == {"red"}  # remix
    assert colour("72.5 ± 2.1") == set()  # cutmix, whose interval includes 0


def test_balanced_accuracy_is_a_column_where_it_is_another_number():
    def table(*class_accuracies: float) -> str:
        rows = [
            {
                "method": method,
                "seed": seed,
                "accuracy": 60.0 + seed,
                "class_accuracies": list(class_accuracies),
            }
            for method in ("erm", "balanced")
            for seed in range(2)
        ]
        return printed(summarise(QUICK, ["erm", "balanced"], range(2), "erm", rows))

    uneven = table(90.0, 43.0, 20.0)
    assert "balanced" in uneven.split("erm")[0]
    assert "51.0" in uneven
    assert "accuracy %" in uneven
    assert "balanced" not in table(61.0, 60.0, 60.0).split("erm")[0]
