"""How many seeds, or test images, it takes to find a difference of a given size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from icmixup.lab.comparison.correction import ERROR, PRIOR_FREEDOM
from icmixup.lab.comparison.variance import Sample, is_testable, margin

TARGET = 1.0  # percentage points
POWER = 0.8
MOST_SEEDS, MOST_IMAGES = 1000, 10_000_000


class Design(NamedTuple):
    """Variance components of a difference, averaged over pairs, and the size of the comparison."""

    between_seeds: float
    between_images: float
    residual: float
    methods: int
    seeds: int
    images: int  # 0 if test images are not accounted for


class Requirement(NamedTuple):
    """What finds the target with the wanted probability; None where no number does."""

    seeds: int | None  # with the test images there are
    images: int | None  # with the seeds there are; None if images are not accounted for
    both: tuple[int, int] | None  # seeds and images, where neither alone is enough


def estimate_design(samples: Sequence[Sample], methods: int) -> Design | None:
    """Components averaged over the samples; None without a sample of two seeds or more."""
    usable = [sample for sample in samples if is_testable(sample)]
    if not usable:
        return None
    images = int(usable[0].images)
    of_residuals = [float(s.residual) for s in usable]
    of_images = [float(s.image_variance) * images for s in usable]
    of_seeds = [
        max(0.0, float(s.seed_variance * s.seeds) - (float(s.residual) / images if images else 0.0))
        for s in usable
    ]
    seeds = max(int(s.seeds) for s in usable)
    count = len(usable)
    return Design(
        sum(of_seeds) / count, sum(of_images) / count, sum(of_residuals) / count, methods, seeds, images
    )


def chance_to_find(design: Design, seeds: int, images: int) -> float:
    """Probability that a true difference of TARGET is significant after correction for all pairs."""
    from scipy.stats import norm

    per_image = 1 / images if images else 0.0
    of_seeds = (design.between_seeds + design.residual * per_image) / seeds
    of_images = design.between_images * per_image
    prior = min(PRIOR_FREEDOM, (seeds - 1) * (design.methods - 2) / 2)
    level = 1 - ERROR / math.comb(design.methods, 2)
    critical = margin(of_seeds, of_images, seeds - 1 + prior, level, design.residual * per_image / seeds)
    return float(norm.cdf((TARGET - critical) / math.sqrt(of_seeds + of_images)))


def requirement(design: Design) -> Requirement:
    """Seeds at the present number of test images, images at the present number of seeds, or both."""
    now = design.images

    def enough(seeds: int, images: int) -> bool:
        return chance_to_find(design, seeds, images) >= POWER

    seeds = smallest(lambda n: enough(n, now), 2, MOST_SEEDS)
    if not now:
        return Requirement(seeds, None, None)
    images = smallest(lambda n: enough(design.seeds, n), 2, MOST_IMAGES)
    if seeds is not None or images is not None:
        return Requirement(seeds, images, None)
    for more in (5, 10, 20, 50, 100):
        images_then = smallest(lambda n, more=more: enough(more, n), 2, MOST_IMAGES)  # type: ignore[misc]
        if more > design.seeds and images_then is not None:
            return Requirement(None, None, (more, images_then))
    return Requirement(None, None, None)


def smallest(holds: Callable[[int], bool], low: int, high: int) -> int | None:
    """The smallest number from low to high that holds, if larger ones hold as well; None if none does."""
    if not holds(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
