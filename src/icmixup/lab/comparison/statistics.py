"""How methods stand against a baseline: means, paired differences, intervals, and a verdict in words."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from icmixup.methods import find_method

Row = dict[str, Any]

LEVEL = 0.95
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
"""What a row holds besides its accuracy, and what is averaged over seeds."""


@dataclass(frozen=True)
class Difference:
    """Accuracy of one method less that of another, paired by seed, in points."""

    mean: float
    pairs: int  # seeds that both have finished
    low: float | None = None  # of the 95 % interval; None where there can be none
    high: float | None = None
    p: float | None = None  # of Student's t, two-sided
    p_corrected: float | None = None  # by Holm's rule, over all methods of the comparison

    @property
    def above(self) -> bool:
        return self.low is not None and self.low > 0

    @property
    def below(self) -> bool:
        return self.high is not None and self.high < 0

    @property
    def clear(self) -> bool:
        return self.above or self.below

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{signed(self.mean)} (no interval)"
        return f"{signed(self.mean)} [{signed(self.low)}, {signed(self.high)}]"


@dataclass(frozen=True)
class Standing:
    """One method over all seeds."""

    method: str
    accuracies: tuple[float | None, ...]  # by seed; None where the run has no result
    metrics: Mapping[str, tuple[float | None, ...]]  # each of MEASURES, by seed
    difference: Difference | None = None  # to the baseline; None for itself

    @property
    def finished(self) -> tuple[float, ...]:
        return present(self.accuracies)

    @property
    def mean(self) -> float | None:
        return fmean(self.finished) if self.finished else None

    @property
    def std(self) -> float | None:
        """Sample standard deviation over seeds."""
        return stdev(self.finished) if len(self.finished) > 1 else None

    @property
    def ours(self) -> bool:
        """Whether it trains with the Infinite Class loss."""
        return bool(find_method(self.method).axes)

    def average(self, measure: str) -> float | None:
        values = present(self.metrics[measure])
        return fmean(values) if values else None


def present(values: Sequence[float | None]) -> tuple[float, ...]:
    return tuple(value for value in values if value is not None)


def signed(points: float) -> str:
    """+1.3, or as many decimals as it takes not to print a difference as none."""
    return f"{points:+.1f}" if abs(points) >= 0.05 or points == 0 else f"{points:+.1g}"


def paired_difference(
    accuracies: Sequence[float | None], baseline: Sequence[float | None]
) -> Difference | None:
    """Mean difference over the seeds that both finished, with the 95 % interval of Student's t.

    One pair has no interval. Nor have pairs that all differ by the same: accuracies come in steps of one test
    image, so equal differences mean too few seeds, not perfect certainty.
    """
    pairs = zip(accuracies, baseline, strict=True)
    gaps = [ours - theirs for ours, theirs in pairs if ours is not None and theirs is not None]
    if not gaps:
        return None
    mean, count = fmean(gaps), len(gaps)
    if count < 2 or (error := stdev(gaps) / math.sqrt(count)) < 1e-9:
        return Difference(mean, count)
    # Imported here: SciPy takes longer to import than the command line to answer.
    from scipy.stats import t as student

    reach = float(student.ppf((1 + LEVEL) / 2, count - 1)) * error
    p = float(2 * student.sf(abs(mean) / error, count - 1))
    return Difference(mean, count, mean - reach, mean + reach, p)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number m (Holm, 1979): the k-th smallest times m - k + 1, in order."""
    corrected = [0.0] * len(p_values)
    highest = 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = highest
    return corrected


def rank_methods(
    rows: Sequence[Row], methods: Sequence[str], seeds: Sequence[int], baseline: str
) -> tuple[Standing, ...]:
    """Every method's standing, highest mean accuracy first; those without a finished run last."""
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
        sorted(correct(standings), key=lambda s: -math.inf if s.mean is None else s.mean, reverse=True)
    )


def correct(standings: Sequence[Standing]) -> list[Standing]:
    """The same standings, their p-values corrected for the number of comparisons."""
    tested = [s for s in standings if s.difference is not None and s.difference.p is not None]
    p_values = [s.difference.p for s in tested if s.difference is not None and s.difference.p is not None]
    corrected = {s.method: p for s, p in zip(tested, holm(p_values), strict=True)}
    return [
        dataclasses.replace(
            s, difference=dataclasses.replace(s.difference, p_corrected=corrected.get(s.method))
        )
        if s.difference is not None
        else s
        for s in standings
    ]


def verdict(standings: Sequence[Standing], baseline: str) -> str:
    """One line: which method is best, whether that is clear, and how ours and the others' best compare.

    Args:
        standings: as rank_methods gives them.
    """
    scored = [s for s in standings if s.mean is not None]
    if not scored:
        return "no run has a result; where losses diverged, try a tenth of the --lr, or --clip-norm 1"
    best, base = scored[0], next(s for s in standings if s.method == baseline)
    if base.mean is None:
        return (
            f"{baseline}, the baseline, has no result, so nothing can be compared with it; {leader(scored)}"
        )
    if len(scored) == 1:
        return f"{leader(scored)}, and nothing to compare it with"
    if max(len(s.finished) for s in scored) < 2:
        ahead = "" if best.difference is None else f", {signed(best.difference.mean)} against {baseline}"
        return f"{leader(scored)}{ahead}; but one seed gives no interval and proves nothing: give --seeds 3"
    return against_baseline(scored, base) + against_the_others(scored, base)


def leader(scored: Sequence[Standing]) -> str:
    top = [s.method for s in scored if s.mean == scored[0].mean]
    who = f"{top[0]} has" if len(top) == 1 else f"{' and '.join(top)} share"
    return f"{who} the highest accuracy, {scored[0].mean:.1f} %"


def against(difference: Difference | None, other: Standing) -> str:
    return f"{'no seed in common' if difference is None else difference} against {other.method}"


def unclear(difference: Difference | None) -> str:
    return "" if difference is not None and difference.clear else ", no clear difference"


def against_baseline(scored: Sequence[Standing], base: Standing) -> str:
    """The first half of the verdict."""
    best, runner_up = scored[:2]
    if best is base:
        behind = against(runner_up.difference, base) + unclear(runner_up.difference)
        head = f"{base.method}, the baseline, is best: {base.mean:.1f} %"
        return f"{head}; the next, {runner_up.method}, has {behind}"
    gap = against(best.difference, base)
    if best.difference is not None and best.difference.above:
        return f"{best.method} is best: {best.mean:.1f} %, {gap}"
    clear = next((s for s in scored if s.difference is not None and s.difference.above), None)
    if clear is None:
        return f"no clear difference: {leader(scored)}, {gap}"
    above = f"clearly better than {base.method} is {clear.method}, {clear.difference}"
    return f"{leader(scored)}, {gap}, no clear difference; {above}"


def against_the_others(scored: Sequence[Standing], base: Standing) -> str:
    """The second half: the best Infinite Class method beside the best of the others, whichever leads."""
    best = scored[0]
    second = next((s for s in scored if s.ours != best.ours), None)
    if second is None or second is base or (best is base and second is scored[1]):
        return ""
    camp = "Infinite Class method" if second.ours else "other method"
    gap = paired_difference(second.accuracies, best.accuracies)
    return f"; the best {camp}, {second.method}, has {against(gap, best)}{unclear(gap)}"


def footnote(standings: Sequence[Standing], baseline: str) -> str:
    """What the intervals are, and what they are not."""
    gaps = {
        s.method: s.difference for s in standings if s.difference is not None and s.difference.p is not None
    }
    if not gaps:
        return "No intervals: they need two seeds or more that do not all agree to the last image."
    text = (
        f"Brackets: 95 % interval (Student's t) of the difference to {baseline}, paired by seed; "
        "it covers new seeds, not other data."
    )
    if len(gaps) == 1:
        return text
    chance = min(100, round(100 * (1 - LEVEL) * len(gaps)))
    kept = [m for m, gap in gaps.items() if gap.p_corrected is not None and gap.p_corrected < 1 - LEVEL]
    return (
        f"{text} The {len(gaps)} intervals are not corrected for their number: were there no differences, "
        f"the chance of a bracket without 0 would be up to {chance} %. Clear also after Holm's correction: "
        f"{', '.join(kept) or 'none'}."
    )
