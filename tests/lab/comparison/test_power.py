"""How many seeds or test images it takes: the answers are checked by drawing differences."""

from __future__ import annotations

import math

import numpy as np
import pytest

from icmixup.lab.comparison.correction import pair_p_values
from icmixup.lab.comparison.power import Design, chance_to_find, estimate_design, requirement, smallest
from icmixup.lab.comparison.variance import Sample, crossed_sample
from icmixup.lab.comparison.verdict import describe_requirement, rounded

TWO = Design(between_seeds=1.0, between_images=500.0, residual=800.0, methods=2, seeds=3, images=1000)


def simulated_power(design: Design, seeds: int, images: int, trials: int = 40_000) -> float:
    """How often a difference of one point of two methods is significant, with normal data."""
    rng = np.random.default_rng(0)
    by_seed = rng.normal(0, math.sqrt(design.between_seeds + design.residual / images), (trials, seeds))
    by_image = rng.normal(0, math.sqrt(design.between_images / images), (trials, 1))
    gaps = 1 + by_seed + by_image
    zeros = np.zeros(trials)
    sample = Sample(
        gaps.mean(axis=1),
        seeds,
        gaps.var(axis=1, ddof=1) / seeds,
        zeros + design.between_images / images,
        zeros,
        images,
    )
    p = pair_p_values(Sample(*(v[:, None] if isinstance(v, np.ndarray) else v for v in sample)), methods=2)[1]
    return float((p[:, 0] < 0.05).mean())


def test_the_required_seeds_have_the_power_they_promise():
    found = requirement(TWO._replace(images=10_000))
    assert found.seeds is not None
    assert simulated_power(TWO, found.seeds, 10_000) == pytest.approx(0.8, abs=0.03)
    assert simulated_power(TWO, found.seeds - 2, 10_000) < 0.8


def test_the_required_test_images_have_the_power_they_promise():
    design = TWO._replace(between_seeds=0.1, seeds=5)
    found = requirement(design)
    assert found.images is not None
    assert simulated_power(design, 5, found.images) == pytest.approx(0.8, abs=0.03)


def test_no_number_of_seeds_replaces_test_images():
    few = requirement(TWO._replace(between_images=5000.0))
    assert few.seeds is None
    assert few.images is None  # three seeds are too few as well
    assert few.both is not None
    seeds, images = few.both
    assert chance_to_find(TWO._replace(between_images=5000.0), seeds, images) >= 0.8


def test_more_methods_need_more_seeds():
    design = TWO._replace(images=20_000)
    two, eight = requirement(design).seeds, requirement(design._replace(methods=8)).seeds
    assert two is not None
    assert eight is not None
    assert eight > two


def test_without_predictions_only_seeds_are_counted():
    found = requirement(Design(1.0, 0.0, 0.0, methods=2, seeds=3, images=0))
    assert found.images is None
    # A paired t-test needs (2.8 / 1)^2 = 8 pairs for one standard deviation, and two more for small samples.
    assert found.seeds == 10


def test_the_design_averages_the_components_of_its_samples():
    rng = np.random.default_rng(1)
    samples = [crossed_sample(rng.random((4, 300)) < 0.8, rng.random((4, 300)) < 0.7) for _ in range(3)]
    design = estimate_design(samples, methods=3)
    assert design is not None
    assert (design.seeds, design.images, design.methods) == (4, 300, 3)
    assert design.residual == pytest.approx(np.mean([s.residual for s in samples]))
    assert design.between_images == pytest.approx(np.mean([s.image_variance * 300 for s in samples]))


def test_smallest_is_the_first_number_that_holds():
    assert smallest(lambda n: n >= 37, 2, 1000) == 37
    assert smallest(lambda n: n > 1000, 2, 1000) is None


@pytest.mark.parametrize(
    ("design", "text"),
    [
        (TWO._replace(images=10_000), "seeds instead of 3"),
        (TWO._replace(between_seeds=0.1, seeds=5), "test images instead of 1,000"),
        (TWO._replace(between_images=5000.0), "seeds and "),
        (
            TWO._replace(between_seeds=0.01, residual=10.0, images=100_000),
            "this comparison finds a difference of 1",
        ),
    ],
)
def test_the_sentence_names_what_would_help(design: Design, text: str):
    assert text in describe_requirement(design)


def test_numbers_are_rounded_up_to_two_digits():
    assert [rounded(number) for number in (7, 38, 101, 4210)] == ["7", "38", "110", "4,300"]
