"""How far a difference of two methods would move with new seeds and with new test images.

Two methods are trained with the same S seeds and tested on the same N images. d[s, i] is +100, 0 or -100:
only the first is right, both or neither, only the second. Seeds and images are crossed random effects,

    d[s, i] = difference + seed[s] + image[i] + residual[s, i],

and the mean of d has the variance

    seed variance    (between seeds + residual / N) / S    estimated with S - 1 degrees of freedom
    image variance   between images / N                    estimated from N images, which is plenty

so that (mean - difference) is taken as the sum of a Student t and a normal variable (Behrens and Fisher).
With two or three seeds this covers what it claims to; Satterthwaite's approximation by one Student t does not
(docs/statistics.md has both). Two or three seeds that agree by chance would give an interval that is narrower
than so few test images allow, so no interval is narrower than the one without an effect of seeds, which has
the variance residual / N / S + image variance. All functions accept leading axes, so a simulation is one
call.

Balanced accuracy is the mean over C classes of their accuracies. Its difference is the mean over classes of
the mean of d within each, new test images are new ones of the same classes, and both variances follow from
those within classes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
# Trapezoids in log(chi squared): the integrand is smooth there, and what lies beyond has no weight.
LOG_CHI_SQUARED = np.linspace(-42.0, 8.0, 200)


class Sample(NamedTuple):
    """A mean difference in percentage points, and what is known about its variance."""

    mean: Floats
    seeds: int | Floats  # seeds for which both methods have a result
    seed_variance: Floats  # of the mean
    image_variance: Floats  # of the mean; 0 if test images are not accounted for
    residual: Floats  # variance of d that neither seeds nor images explain; 0 if images are not accounted for
    images: int | Floats  # 0 if test images are not accounted for

    @property
    def least(self) -> Floats:
        """What the residual contributes to the seed variance, which is at least that."""
        cells = np.asarray(self.seeds * self.images, dtype=float)
        return np.where(cells > 0, self.residual / np.maximum(cells, 1.0), 0.0)


def is_testable(sample: Sample) -> bool:
    """Whether a single sample has an interval: two seeds or more, and some variance."""
    return bool(sample.seeds > 1 and sample.seed_variance + sample.image_variance > 0)


def seed_sample(gaps: Floats) -> Sample:
    """A sample from differences by seed alone.

    Args:
        gaps: (..., S) difference of the accuracies with each seed, in points.
    """
    seeds, none = gaps.shape[-1], np.zeros(gaps.shape[:-1])
    variance = gaps.var(axis=-1, ddof=1) / seeds if seeds > 1 else none
    # Differences that are all equal, up to rounding, have no variance.
    return Sample(gaps.mean(axis=-1), seeds, np.where(variance < 1e-18, 0.0, variance), none, none, 0)


def crossed_sample(first: npt.NDArray[np.bool_], second: npt.NDArray[np.bool_]) -> Sample:
    """A sample from what two methods got right, by the mean squares of a two-way layout.

    Args:
        first: (..., S, N) whether the first method is right with seed s about image i.
        second: (..., S, N) the same of the second method.
    """
    gaps = first.astype(np.int8) - second.astype(np.int8)
    *_, seeds, images = gaps.shape
    by_seed = 100 * gaps.mean(axis=-1, dtype=np.float64)
    by_image = 100 * gaps.sum(axis=-2, dtype=np.int32) / seeds
    mean = by_seed.mean(axis=-1)
    of_seeds = images * ((by_seed - mean[..., None]) ** 2).sum(axis=-1)
    of_images = seeds * ((by_image - mean[..., None]) ** 2).sum(axis=-1)
    discordant = np.count_nonzero(gaps, axis=(-2, -1))
    of_residuals = np.maximum(1e4 * discordant - seeds * images * mean**2 - of_seeds - of_images, 0.0)
    if seeds == 1 or images == 1:
        return seed_sample(by_seed)
    residual = of_residuals / ((seeds - 1) * (images - 1))
    # Equal differences are a matter of steps of one image, so the residual stands in for them.
    between_seeds = np.where(of_seeds < 1e-9, residual, of_seeds / (seeds - 1))
    between_images = np.maximum(of_images / (images - 1) - residual, 0.0)
    cells = seeds * images
    return Sample(mean, seeds, between_seeds / cells, between_images / cells, residual, images)


def balanced_sample(
    first: npt.NDArray[np.bool_], second: npt.NDArray[np.bool_], labels: npt.NDArray[np.integer]
) -> Sample:
    """A sample of the balanced accuracy: as crossed_sample, with every class of the same weight.

    Args:
        first, second: (..., S, N) as in crossed_sample.
        labels: (N,) classes of the images. One image says nothing of the variance within its class: its
            distance from the mean of all classes stands in, which is larger on average.
    """
    gaps = 100.0 * (first.astype(np.int8) - second.astype(np.int8))
    *_, seeds, images = gaps.shape
    of_class = (labels[:, None] == np.unique(labels)).astype(np.float64)  # (N, C)
    sizes = of_class.sum(axis=0)  # (C,)
    by_class = gaps @ (of_class / sizes)  # (..., S, C)
    by_seed = by_class.mean(axis=-1)
    mean = by_seed.mean(axis=-1)
    if seeds == 1 or images == 1:
        return seed_sample(by_seed)
    alone = sizes == 1
    centre = np.where(alone, mean[..., None], by_class.mean(axis=-2))  # (..., C) of images
    moved = np.where(alone, by_seed[..., None], by_class) - centre[..., None, :]  # (..., S, C) by seeds
    by_image = gaps.mean(axis=-2)  # (..., N)
    residuals = gaps - by_image[..., None, :] - moved @ of_class.T
    freedom = np.maximum(sizes - 1, 1)
    within = (by_image - centre @ of_class.T) ** 2 @ of_class / freedom  # (..., C)
    noise = (residuals**2).sum(axis=-2) @ of_class / (freedom * (seeds - 1))  # (..., C)
    weights = 1 / (len(sizes) ** 2 * sizes)  # of a variance of one image, in that of the balanced accuracy
    of_noise, of_images = (noise * weights).sum(axis=-1), (within * weights).sum(axis=-1)
    between_seeds = by_seed.var(axis=-1, ddof=1)
    # Equal differences are a matter of steps of one image, so the residual stands in for them.
    between_seeds = np.where(between_seeds < 1e-9, of_noise, between_seeds)
    image_variance = np.maximum(of_images - of_noise / seeds, 0.0)
    return Sample(mean, seeds, between_seeds / seeds, image_variance, of_noise * images, images)


def p_value(
    mean: Floats,
    seed_variance: Floats,
    image_variance: Floats,
    freedom: Floats | float,
    least: Floats | float = 0.0,
) -> Floats:
    """Two-sided p-value of a mean: the chance of one at least as far from 0 if the difference is 0.

    A Student t is a normal variable divided by the root of a chi squared over its degrees of freedom. Given
    that chi squared the sum is normal, so the p-value is the average of normal ones over chi squared.

    Args:
        mean: (...) as all others.
        freedom: degrees of freedom of the seed variance.
        least: what the seed variance is at least.

    Returns:
        (...) p-values; 1 where both variances are 0.
    """
    from scipy.special import ndtr  # here, because importing SciPy takes longer than `icmixup --help`

    chi_squared, weights = chi_squared_weights(np.asarray(freedom, dtype=float))
    variance = np.asarray(seed_variance)[..., None] / chi_squared + np.asarray(image_variance)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        tails = 2 * ndtr(-np.abs(mean)[..., None] / np.sqrt(variance))
        of_images = 2 * ndtr(-np.abs(mean) / np.sqrt(least + image_variance))
    known = np.asarray(seed_variance + image_variance) > 0
    found: Floats = np.where(known, (np.nan_to_num(tails) * weights).sum(axis=-1), 1.0)
    found = np.minimum(np.maximum(found, np.nan_to_num(of_images)), 1.0)
    return found


def chi_squared_weights(freedom: Floats) -> tuple[Floats, Floats]:
    """Values of chi squared over its degrees of freedom, and the weight of each: both (..., 200)."""
    from scipy.special import gammaln

    half = freedom[..., None] / 2
    log_density = half * (LOG_CHI_SQUARED - math.log(2)) - np.exp(LOG_CHI_SQUARED) / 2 - gammaln(half)
    weights = np.exp(log_density)
    values = np.exp(LOG_CHI_SQUARED) / freedom[..., None]
    return values, weights / weights.sum(axis=-1, keepdims=True)


def margin(
    seed_variance: float, image_variance: float, freedom: float, level: float, least: float = 0.0
) -> float:
    """Half the width of the confidence interval: the distance from 0 whose p-value is 1 - level."""
    from scipy.optimize import brentq
    from scipy.stats import norm, t

    quantile = float(norm.ppf((1 + level) / 2))
    normal, narrowest = (quantile * math.sqrt(image_variance + part) for part in (0.0, least))
    if seed_variance == 0:
        return narrowest
    student = float(t.ppf((1 + level) / 2, freedom)) * math.sqrt(seed_variance)
    if image_variance == 0:
        return max(student, narrowest)
    seeds, images = np.asarray(seed_variance), np.asarray(image_variance)

    def excess(distance: float) -> float:
        return float(p_value(np.asarray(distance), seeds, images, freedom)) - (1 - level)

    return max(narrowest, float(brentq(excess, 0.5 * max(normal, student), 2 * (normal + student))))
