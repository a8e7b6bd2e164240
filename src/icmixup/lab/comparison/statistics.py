"""Statistics of a comparison: means, paired differences to a baseline, intervals, and a verdict."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from icmixup.lab.training.run_folder import Row
from icmixup.methods import find_method

CONFIDENCE_LEVEL = 0.95
MEASURES = (
    "many",
    "medium",
    "few",
    "nll",
    "nll_scaled",
    "calibration_error",
    "calibration_error_scaled",
    "fitted_temperature",
    "loss",
    "minutes",
    "images_per_second",
)
"""Columns of a row, besides its accuracy, that are averaged over seeds."""


@dataclass(frozen=True)
class Difference:
    """Accuracy of one method minus that of another, paired by seed, in percentage points."""

    mean: float
    pairs: int  # seeds for which both methods have a result
    low: float | None = None  # ends of the 95 % confidence interval; None if it is undefined
    high: float | None = None
    p: float | None = None  # two-sided paired t-test
    p_corrected: float | None = None  # Holm correction over all methods of the comparison

    @property
    def above(self) -> bool:
        return self.low is not None and self.low > 0

    @property
    def below(self) -> bool:
        return self.high is not None and self.high < 0

    @property
    def clear(self) -> bool:
        """Whether the confidence interval excludes 0."""
        return self.above or self.below

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{signed(self.mean)} (no interval)"
        return f"{signed(self.mean)} [{signed(self.low)}, {signed(self.high)}]"


@dataclass(frozen=True)
class Standing:
    """Results of one method over all seeds."""

    method: str
    accuracies: tuple[float | None, ...]  # by seed; None where the run has no result
    metrics: Mapping[str, tuple[float | None, ...]]  # each of MEASURES, by seed
    difference: Difference | None = None  # to the baseline; None for the baseline itself

    @property
    def finished(self) -> tuple[float, ...]:
        return without_none(self.accuracies)

    @property
    def mean(self) -> float | None:
        return fmean(self.finished) if self.finished else None

    @property
    def std(self) -> float | None:
        """Sample standard deviation over seeds."""
        return stdev(self.finished) if len(self.finished) > 1 else None

    @property
    def is_infinite_class(self) -> bool:
        """Whether the method trains with the Infinite Class loss."""
        return bool(find_method(self.method).axes)

    def average(self, measure: str) -> float | None:
        values = without_none(self.metrics[measure])
        return fmean(values) if values else None


def without_none(values: Sequence[float | None]) -> tuple[float, ...]:
    return tuple(value for value in values if value is not None)


def signed(points: float) -> str:
    """Format as +1.3, with more decimals where a non-zero difference would be printed as 0."""
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
    if not gaps:
        return None
    mean, count = fmean(gaps), len(gaps)
    if count < 2 or (error := stdev(gaps) / math.sqrt(count)) < 1e-9:
        return Difference(mean, count)
    # Imported here because importing SciPy takes longer than `icmixup --help`.
    from scipy.stats import t as student

    margin = float(student.ppf((1 + CONFIDENCE_LEVEL) / 2, count - 1)) * error
    p = float(2 * student.sf(abs(mean) / error, count - 1))
    return Difference(mean, count, mean - margin, mean + margin, p)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction (1979): the k-th smallest of m p-values times m - k + 1, kept monotone."""
    corrected = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = highest
    return corrected


def rank_methods(
    rows: Sequence[Row], methods: Sequence[str], seeds: Sequence[int], baseline: str
) -> tuple[Standing, ...]:
    """The standing of every method, highest mean accuracy first; methods without a result come last."""
    found = {(row["method"], row["seed"]): row for row in rows}
    columns = {method: [found.get((method, seed), {}) for seed in seeds] for method in methods}
    accuracies = {m: tuple(row.get("accuracy") for row in column) for m, column in columns.items()}
    standings = [
        Standing(
            method,
            accuracies[method],
            {name: tuple(row.get(name) for row in columns[method]) for name in MEASURES},
            None if method == baseline else paired_difference(accuracies[method], accuracies[baseline]),
        )
        for method in methods
    ]
    return tuple(
        sorted(
            with_corrected_p_values(standings),
            key=lambda s: -math.inf if s.mean is None else s.mean,
            reverse=True,
        )
    )


def with_corrected_p_values(standings: Sequence[Standing]) -> list[Standing]:
    """The same standings, with p-values corrected for the number of comparisons."""
    p_values = {
        s.method: s.difference.p for s in standings if s.difference is not None and s.difference.p is not None
    }
    corrected = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    return [
        dataclasses.replace(
            s, difference=dataclasses.replace(s.difference, p_corrected=corrected.get(s.method))
        )
        if s.difference is not None
        else s
        for s in standings
    ]


def verdict(standings: Sequence[Standing], baseline: str) -> str:
    """One line: the best method, whether its lead is clear, and the best method of the other family.

    The two families are the methods that train with the Infinite Class loss and those that do not.

    Args:
        standings: as returned by rank_methods.
    """
    scored = [s for s in standings if s.mean is not None]
    if not scored:
        return "no run has a result; if the loss diverged, reduce --lr tenfold or set --clip-norm 1"
    best, base = scored[0], next(s for s in standings if s.method == baseline)
    if base.mean is None:
        return f"the baseline {baseline} has no result, so there are no differences; {describe_best(scored)}"
    if len(scored) == 1:
        return f"{describe_best(scored)}; no other method has a result"
    if max(len(s.finished) for s in scored) < 2:
        lead = "" if best.difference is None else f", {signed(best.difference.mean)} against {baseline}"
        return f"{describe_best(scored)}{lead}; one seed gives no confidence interval, use --seeds 3 or more"
    return baseline_verdict(scored, base) + family_verdict(scored, base)


def describe_best(scored: Sequence[Standing]) -> str:
    best = [s.method for s in scored if s.mean == scored[0].mean]
    subject = f"{best[0]} has" if len(best) == 1 else f"{' and '.join(best)} share"
    return f"{subject} the highest accuracy, {scored[0].mean:.1f} %"


def describe_difference(difference: Difference | None, other: Standing) -> str:
    return f"{'no seed in common' if difference is None else difference} against {other.method}"


def unclear_suffix(difference: Difference | None) -> str:
    return "" if difference is not None and difference.clear else ", no clear difference"


def baseline_verdict(scored: Sequence[Standing], base: Standing) -> str:
    """First half of the verdict: the best method and its difference to the baseline."""
    best, runner_up = scored[:2]
    if best is base:
        gap = describe_difference(runner_up.difference, base) + unclear_suffix(runner_up.difference)
        return f"the baseline {base.method} is best: {base.mean:.1f} %; next is {runner_up.method}, {gap}"
    gap = describe_difference(best.difference, base)
    if best.difference is not None and best.difference.above:
        return f"{best.method} is best: {best.mean:.1f} %, {gap}"
    clear = next((s for s in scored if s.difference is not None and s.difference.above), None)
    if clear is None:
        return f"no clear difference: {describe_best(scored)}, {gap}"
    better = f"{clear.method} is clearly better than {base.method}, {clear.difference}"
    return f"{describe_best(scored)}, {gap}, no clear difference; {better}"


def family_verdict(scored: Sequence[Standing], base: Standing) -> str:
    """Second half: the best method of the family that the best method does not belong to."""
    best = scored[0]
    other = next((s for s in scored if s.is_infinite_class != best.is_infinite_class), None)
    if other is None or other is base or (best is base and other is scored[1]):
        return ""
    family = "Infinite Class method" if other.is_infinite_class else "other method"
    gap = paired_difference(other.accuracies, best.accuracies)
    return f"; the best {family} is {other.method}, {describe_difference(gap, best)}{unclear_suffix(gap)}"


def footnote(standings: Sequence[Standing], baseline: str) -> str:
    """What the intervals mean, and what they do not cover."""
    gaps = {
        s.method: s.difference for s in standings if s.difference is not None and s.difference.p is not None
    }
    if not gaps:
        return "No confidence intervals: they need at least two seeds whose differences are not all equal."
    text = (
        f"Brackets: 95 % confidence interval (Student's t) of the difference to {baseline}, paired by seed. "
        "It covers variation between seeds, not between datasets."
    )
    if len(gaps) == 1:
        return text
    alpha = 1 - CONFIDENCE_LEVEL
    chance = min(100, round(100 * alpha * len(gaps)))
    kept = [m for m, gap in gaps.items() if gap.p_corrected is not None and gap.p_corrected < alpha]
    return (
        f"{text} The {len(gaps)} intervals are not corrected for multiple comparisons: if no method differed "
        f"from {baseline}, the chance that any interval excludes 0 would be up to {chance} %. Significant "
        f"after Holm's correction: {', '.join(kept) or 'none'}."
    )
