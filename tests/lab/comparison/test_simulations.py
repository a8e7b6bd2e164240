"""Error rates of intervals, verdicts and --seeds auto on data with known differences.

The full simulations are in tools/simulate_statistics.py, with more settings and their rates in
results/statistics.csv. Random generators are seeded, so these tests give the same rates every time.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools"))

from simulate_statistics import (  # noqa: E402
    Setting,
    draw_chunk,
    simulate_auto,
    simulate_best,
    simulate_coverage,
)


def generator() -> np.random.Generator:
    return np.random.default_rng(2024)


def test_simulated_data_have_the_accuracies_and_the_seed_effect_that_they_are_drawn_with() -> None:
    setting = Setting((80.0, 95.0), seeds=100, images=4000, seed_effect=2.0)
    correct = 100 * draw_chunk(setting, 10, generator()).mean(axis=-1)  # (trials, methods, seeds)
    np.testing.assert_allclose(correct.mean(axis=(0, 2)), [80, 95], atol=0.8)
    # Within a trial images are the same, so accuracies vary with the seed and with chance only.
    chance = 100 * (0.16 / 4000) ** 0.5
    assert correct[:, 0].std(axis=-1).mean() == pytest.approx(2.0, abs=0.2 + chance)


@pytest.mark.parametrize("effect", [0.3, 3.0])
@pytest.mark.parametrize("seeds", [2, 3, 10])
@pytest.mark.parametrize(("images", "trials"), [(100, 2000), (1000, 1000), (10_000, 300)])
def test_intervals_cover_the_true_difference(images: int, trials: int, seeds: int, effect: float) -> None:
    setting = Setting((80.0, 79.0), seeds, images, effect)
    covered = simulate_coverage(setting, trials, generator())["covered"]
    assert covered >= 90 if seeds == 2 else 93 <= covered <= 99


def test_intervals_from_seeds_alone_miss_the_uncertainty_of_test_images() -> None:
    measured = simulate_coverage(Setting((80.0, 79.0), 10, 300, 0.3), 1000, generator())
    assert measured["covered by seeds only"] < 88 < 93 <= measured["covered"]


def test_satterthwaite_covers_too_little_with_two_seeds() -> None:
    measured = simulate_coverage(Setting((80.0, 79.0), 2, 3000, 1.0), 1000, generator())
    assert measured["covered by Satterthwaite"] < 90 <= measured["covered"]


def test_eight_equal_methods_have_no_winner() -> None:
    measured = simulate_best(Setting((80.0,) * 8, 3, 150, 1.0), 2000, generator())
    assert measured["sole winner"] <= 5
    assert measured["wrong claim"] <= 5


def test_one_better_method_is_found_given_enough_seeds_and_images() -> None:
    better = (83.0, *(80.0,) * 7)
    few, many = (
        simulate_best(Setting(better, seeds, images, 0.3), 60, generator())["found"]
        for seeds, images in ((3, 300), (5, 6000))
    )
    assert few < 20
    assert many > 80


def test_looking_after_every_seed_makes_no_more_wrong_claims_and_saves_runs() -> None:
    equal = simulate_auto(Setting((80.0,) * 4, 8, 200, 1.0), 250, generator())
    assert equal["wrong claim"] <= 5
    apart = simulate_auto(Setting((86.0, 80.0, 78.0, 76.0), 8, 500, 0.5), 100, generator())
    assert apart["wrong claim"] <= 5
    assert apart["runs saved"] > 30


def stored(simulation: str, measure: str) -> list[tuple[dict[str, str], float]]:
    with (ROOT / "results" / "statistics.csv").open(newline="") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if (row["simulation"], row["measure"]) == (simulation, measure)
        ]
    return [(row, float(row["percent"])) for row in rows]


def allowed(percent: float, trials: str) -> float:
    """A rate plus three standard errors of its simulation."""
    return percent + 300 * (percent / 100 * (1 - percent / 100) / int(trials)) ** 0.5


def test_the_full_simulations_hold_what_is_promised() -> None:
    for row, percent in stored("coverage", "covered"):
        assert percent >= 100 - allowed(10 if row["seeds"] == "2" else 7, row["trials"]), row
        assert percent <= 99 or row["seeds"] == "2", row
    for row, percent in stored("best", "sole winner"):
        if row["scenario"] == "equal":
            assert percent <= 5, row
    for row, percent in [*stored("best", "wrong claim"), *stored("auto", "wrong claim")]:
        if "10 times" not in row["scenario"]:
            assert percent <= allowed(5, row["trials"]), row
    assert len(stored("coverage", "covered")) == 72
