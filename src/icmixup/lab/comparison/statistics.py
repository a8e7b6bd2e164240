"""Statistics of a comparison: differences of all pairs of methods, their intervals, and the best group."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from icmixup.lab.comparison.correction import ERROR, pair_p_values
from icmixup.lab.comparison.variance import (
    Sample,
    balanced_sample,
    crossed_sample,
    is_testable,
    margin,
    p_value,
    seed_sample,
)
from icmixup.lab.training.evaluate import balanced_accuracy
from icmixup.lab.training.run_folder import Row
from icmixup.methods import find_method

CONFIDENCE_LEVEL = 1 - ERROR
COMPARED = ("accuracy", "balanced-accuracy")
"""What methods can be compared in: the share of all test images that are right, or its mean over classes."""
MEASURES = (
    "many",
    "medium",
    "few",
    "nll",
    "nll_scaled",
    "calibration_error",
    "calibration_error_scaled",
    "adaptive_calibration_error",
    "brier_score",
    "risk_coverage_area",
    "coverage_at_5_risk",
    "fitted_temperature",
    "loss",
    "minutes",
    "images_per_second",
)
"""Columns of a row, besides its accuracy, that are averaged over seeds."""


Pair = tuple[str, str]
UNEVEN_POINTS = 0.5  # between accuracy and balanced accuracy, from which on both are shown
# With this little of the variance due to seeds, more of them narrow an interval by at most 5 %.
FEW_SEED_VARIANCE = 0.1


class Answers(NamedTuple):
    """What runs, by method and seed, say to the same test images."""

    correct: Mapping[tuple[str, int], npt.NDArray[np.bool_]]  # (N,) each
    labels: npt.NDArray[np.integer]  # (N,)


@dataclass(frozen=True)
class Difference:
    """Accuracy of one method minus that of another, paired by seed, in percentage points."""

    mean: float
    pairs: int  # seeds for which both methods have a result
    low: float | None = None  # ends of the 95 % confidence interval; None if it is undefined
    high: float | None = None
    p: float | None = None  # two-sided, of this pair alone
    p_corrected: float | None = None  # for all pairs and all looks of the comparison

    @property
    def side(self) -> str:
        """On which side of 0 it clearly is: "above", "below", or "" if that is not clear."""
        return "" if not self.clear else "above" if self.mean > 0 else "below"

    @property
    def clear(self) -> bool:
        """Whether the interval excludes 0, and the p-value that is corrected for other pairs is below 5 %."""
        return self.excludes_zero and (self.p_corrected is None or self.p_corrected < ERROR)

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval excludes 0, regardless of other comparisons."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high

    def reversed(self) -> Difference:
        """The second method minus the first."""
        low, high = (None if end is None else -end for end in (self.high, self.low))
        return Difference(-self.mean, self.pairs, low, high, self.p, self.p_corrected)

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{signed(self.mean)} (no interval)"
        return f"{signed(self.mean)} [{signed(self.low)}, {signed(self.high)}]"


@dataclass(frozen=True)
class Standing:
    """Results of one method over all seeds."""

    method: str
    accuracies: tuple[float | None, ...]  # by seed, in the measure compared; None where there is no result
    metrics: Mapping[str, tuple[float | None, ...]]  # by seed: each of MEASURES, accuracy, balanced_accuracy
    difference: Difference | None = None  # to the baseline; None for the baseline itself
    to_best: Difference | None = None  # to the method with the highest accuracy; None for that one
    in_best_group: bool = False  # not clearly behind the leader
    stopped_after: int | None = None  # seeds after which it got no more, with --seeds auto
    failed: int = 0  # seeds whose run was started and has no result
    measure: str = "accuracy"  # one of COMPARED: what accuracies, mean and differences are of
    level: float | None = None  # what methods are ranked by, of means_of_all_seeds

    @property
    def finished(self) -> tuple[float, ...]:
        return without_none(self.accuracies)

    @property
    def mean(self) -> float | None:
        return known_mean(self.accuracies)

    @property
    def std(self) -> float | None:
        """Sample standard deviation over seeds."""
        return spread(self.finished)

    @property
    def is_infinite_class(self) -> bool:
        """Whether the method trains with the Infinite Class loss."""
        return bool(find_method(self.method).axes)

    def average(self, measure: str) -> float | None:
        return known_mean(self.metrics[measure])


class Look(NamedTuple):
    """What is known after a number of seeds, and the error that claims at this point may have."""

    seeds: int
    error: float
    means: dict[str, float]  # accuracy of each method that has a result, by means_of_all_seeds
    samples: dict[Pair, Sample]  # first method minus second, in the order of the methods
    measure: str = "accuracy"  # one of COMPARED: what all of these numbers are


class Decision(NamedTuple):
    """Which methods may be the best, after one or several looks."""

    group: tuple[str, ...]  # methods not clearly behind the leader
    stopped: dict[str, int]  # the others, and the seeds after which they were clearly behind
    p_corrected: dict[Pair, float]
    limited_by_images: bool  # more seeds would hardly narrow an interval


def known_mean(values: Sequence[float | None]) -> float | None:
    """Mean of the values that are there; None if there are none."""
    known = without_none(values)
    return fmean(known) if known else None


def spread(values: Collection[float]) -> float | None:
    """Sample standard deviation; None for fewer than two values."""
    return stdev(values) if len(values) > 1 else None


def without_none(values: Sequence[float | None]) -> tuple[float, ...]:
    return tuple(value for value in values if value is not None)


def means_of_all_seeds(values: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """The mean of every method, as if it had a value with every seed that any method has.

    A seed can be bad for all methods. One that lacks it, because its run failed or was deleted, would be
    ahead of methods that are better with every seed. So a value is taken as the sum of an effect of the
    method and one of the seed, by least squares. Two methods then differ by what they differ with the seeds
    they share, and if all methods have the same seeds, these are the plain means.

    Args:
        values: by method and seed; every method has one or more.

    Returns:
        Means, rounded to 9 decimals, so that sums of the same values in another order are equal.
    """
    if not values:
        return {}
    seeds = sorted({seed for found in values.values() for seed in found})
    table = np.array([[found.get(seed, np.nan) for seed in seeds] for found in values.values()])  # (M, S)
    known = ~np.isnan(table)
    shares = known / known.sum(axis=1, keepdims=True)
    means = (np.nan_to_num(table) * shares).sum(axis=1)
    # The normal equations of the seeds, from which the methods are eliminated: singular, as only differences
    # of seeds are known, and those not at all between methods that share no seed.
    products = np.diag(known.sum(axis=0)) - known.T @ shares
    deviations = np.where(known, table - means[:, None], 0.0).sum(axis=0)
    effects = np.linalg.pinv(products, rcond=1e-9, hermitian=True) @ deviations
    return dict(zip(values, np.round(means - shares @ effects, 9).tolist(), strict=True))


def signed(points: float) -> str:
    """Format as +1.3, with more decimals where a non-zero difference would be printed as 0."""
    points = 0.0 if abs(points) < 1e-9 else points  # rounding errors, and -0
    return f"{points:+.1f}" if abs(points) >= 0.05 or points == 0 else f"{points:+.1g}"


def paired_difference(
    accuracies: Sequence[float | None], baseline: Sequence[float | None]
) -> Difference | None:
    """Mean difference over the seeds that both methods finished, with a 95 % confidence interval (paired t).

    A single pair has no interval. Neither do pairs that all differ by the same amount: accuracies come in
    steps of one test image, so equal differences indicate too few seeds rather than perfect certainty.
    """
    pairs = zip(accuracies, baseline, strict=True)
    gaps = [own - reference for own, reference in pairs if own is not None and reference is not None]
    return describe_sample(seed_sample(np.array(gaps))) if gaps else None


def describe_sample(sample: Sample, p_corrected: float | None = None) -> Difference:
    """The difference with its 95 % confidence interval, from the variance of this pair alone."""
    mean, seeds = float(sample.mean), int(sample.seeds)
    if not is_testable(sample):
        return Difference(mean, seeds)
    of_seeds, of_images, least = sample.seed_variance, sample.image_variance, sample.least
    width = margin(float(of_seeds), float(of_images), seeds - 1, CONFIDENCE_LEVEL, float(least))
    p = float(p_value(sample.mean, of_seeds, of_images, seeds - 1, least))
    return Difference(mean, seeds, mean - width, mean + width, p, p_corrected)


def take_look(
    rows: Sequence[Row],
    methods: Sequence[str],
    seeds: Sequence[int],
    answers: Answers | None = None,
    error: float = ERROR,
    measure: str = "accuracy",
) -> Look:
    """Means of all methods and samples of all their pairs, from the rows with these seeds.

    Args:
        answers: of every run; None where only accuracies are known, and then samples cover seeds alone.
        measure: one of COMPARED.
    """
    values = {(row["method"], row["seed"]): row_value(row, measure_key(measure)) for row in rows}
    accuracy = {run: value for run, value in values.items() if value is not None}
    finished = {method: [seed for seed in seeds if (method, seed) in accuracy] for method in methods}
    means = means_of_all_seeds(
        {m: {seed: accuracy[m, seed] for seed in done} for m, done in finished.items() if done}
    )
    samples = {}
    for first, second in combinations(means, 2):
        common = [seed for seed in finished[first] if seed in finished[second]]
        if not common:
            continue
        if answers is None:
            gaps = [accuracy[first, seed] - accuracy[second, seed] for seed in common]
            samples[first, second] = seed_sample(np.array(gaps))
        else:
            ours, theirs = (np.stack([answers.correct[m, seed] for seed in common]) for m in (first, second))
            samples[first, second] = (
                balanced_sample(ours, theirs, answers.labels)
                if measure == "balanced-accuracy"
                else crossed_sample(ours, theirs)
            )
    return Look(len(seeds), error, means, samples, measure)


def measure_key(measure: str) -> str:
    """One of COMPARED as row_value and the metrics of a standing have it."""
    return measure.replace("-", "_")


def measure_name(measure: str) -> str:
    """One of COMPARED in a sentence."""
    return measure.replace("-", " ")


def row_value(row: Mapping[str, Any], name: str) -> float | None:
    """A column of a run's row, or balanced_accuracy, which has none of its own; None if it is not known."""
    return row_balanced_accuracy(row) if name == "balanced_accuracy" else row.get(name)


def decide(looks: Sequence[Look]) -> Decision:
    """Which methods may be the best: at every look, those clearly behind the leader are dropped.

    One look with the whole error is a comparison with a fixed number of seeds. With several looks, each
    spends its own share: a p-value counts as p * ERROR / share, and the smallest one over looks counts.
    """
    return functools.reduce(decide_next, looks, Decision(tuple(looks[0].means), {}, {}, False))


def decide_next(before: Decision, look: Look) -> Decision:
    """The decision after one more look."""
    group = tuple(method for method in before.group if method in look.means)
    p_corrected = dict(before.p_corrected)
    for pair, p in look_p_values(look, group).items():
        p_corrected[pair] = min(p_corrected.get(pair, 1.0), p * ERROR / look.error)
    behind = clearly_behind(look, group, p_corrected)
    group = tuple(method for method in group if method not in behind)
    stopped = before.stopped | dict.fromkeys(behind, look.seeds)
    return Decision(group, stopped, p_corrected, is_limited_by_images(look, group))


def look_p_values(look: Look, group: Sequence[str]) -> dict[Pair, float]:
    """P-values of all pairs of the group, corrected for their number."""
    tested = {
        pair: sample
        for pair, sample in look.samples.items()
        if set(pair) <= set(group) and is_testable(sample)
    }
    if not tested:
        return {}
    stacked = Sample(*(np.array(column, dtype=float) for column in zip(*tested.values(), strict=True)))
    _, corrected = pair_p_values(stacked, len(group))
    return dict(zip(tested, corrected.tolist(), strict=True))


def clearly_behind(look: Look, group: Sequence[str], p_corrected: Mapping[Pair, float]) -> set[str]:
    """Methods of the group whose difference to the group's leader is significant after correction."""
    leader = max(group, key=look.means.__getitem__, default="")
    return {
        first if leader == second else second
        for (first, second), p in p_corrected.items()
        if p < ERROR
        and {first, second} <= set(group)
        and (leader in (first, second))
        and (float(look.samples[first, second].mean) > 0) == (leader == first)
    }


def is_limited_by_images(look: Look, group: Sequence[str]) -> bool:
    """Whether nearly all the variance within the group comes from the choice of test images."""
    within = [sample for pair, sample in look.samples.items() if set(pair) <= set(group)]
    of_seeds = sum(float(sample.seed_variance) for sample in within)
    of_images = sum(float(sample.image_variance) for sample in within)
    return of_images > 0 and of_seeds < FEW_SEED_VARIANCE * (of_seeds + of_images)


def rank_methods(
    rows: Sequence[Row],
    methods: Sequence[str],
    seeds: Sequence[int],
    baseline: str,
    looks: Sequence[Look] | None = None,
    failed: Collection[tuple[str, int]] = (),
) -> tuple[Standing, ...]:
    """The standing of every method, highest mean accuracy first; methods without a result come last.

    Args:
        looks: the last one with all seeds; by default one, from the rows alone.
        failed: method and seed of runs that failed; others without a row are not finished.
    """
    looks = looks or [take_look(rows, methods, seeds)]
    decision, last = decide(looks), looks[-1]
    leader = max(decision.group, key=last.means.__getitem__, default=None)
    found = {(row["method"], row["seed"]): row for row in rows}

    def standing(method: str) -> Standing:
        column = [found.get((method, seed), {}) for seed in seeds]
        stopped = decision.stopped.get(method) if len(looks) > 1 else None
        return Standing(
            method,
            tuple(row_value(row, measure_key(last.measure)) for row in column),
            {
                name: tuple(row_value(row, name) for row in column)
                for name in (*MEASURES, *map(measure_key, COMPARED))
            },
            difference_between(last, decision, method, baseline),
            None if leader is None else difference_between(last, decision, method, leader),
            method in decision.group,
            stopped,
            len({seed for name, seed in failed if name == method}),
            last.measure,
            last.means.get(method),
        )

    standings = sorted(
        map(standing, methods), key=lambda s: -math.inf if s.level is None else s.level, reverse=True
    )
    # A method that got no more seeds because it was clearly behind is not first, whatever its mean.
    return tuple(sorted(standings, key=lambda s: s.method != leader))


def row_balanced_accuracy(row: Mapping[str, Any]) -> float | None:
    """The balanced accuracy of a run; None for a row without accuracies of classes."""
    per_class = row.get("class_accuracies")
    return balanced_accuracy(per_class) if per_class else None


def are_classes_uneven(standings: Sequence[Standing]) -> bool:
    """Whether the balanced accuracy of any method differs from its accuracy, which counts images."""
    return any(
        (plain := standing.average("accuracy")) is not None
        and (balanced := standing.average("balanced_accuracy")) is not None
        and abs(balanced - plain) >= UNEVEN_POINTS
        for standing in standings
    )


def difference_between(look: Look, decision: Decision, method: str, other: str) -> Difference | None:
    """The difference of two methods with its corrected p-value; None for a method and itself."""
    for pair in ((method, other), (other, method)):
        if pair in look.samples:
            found = describe_sample(look.samples[pair], decision.p_corrected.get(pair, 1.0))
            return found if pair == (method, other) else found.reversed()
    return None
