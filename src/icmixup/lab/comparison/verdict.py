"""The result of a comparison in words: a verdict in one line, and a footnote on what the intervals mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from icmixup.lab.comparison.correction import ERROR
from icmixup.lab.comparison.power import POWER, TARGET, Design, estimate_design, requirement
from icmixup.lab.comparison.statistics import (
    Difference,
    Look,
    Standing,
    are_classes_uneven,
    decide,
    means_of_all_seeds,
    measure_name,
    paired_difference,
    row_balanced_accuracy,
    signed,
    without_none,
)

GUESSING = 1.2, 5.0  # times the accuracy of guessing, and points above it, that are hardly better
UNCORRECTED = 2  # methods: a single comparison needs no correction
# Percent of simulated comparisons of eight methods with any wrong claim, at most (docs/statistics.md): if all
# vary equally over seeds, and if one varies ten times as much as the others.
WRONG_IF_EQUAL, WRONG_IF_UNSTABLE = 3.3, 7.9


def verdict(standings: Sequence[Standing], baseline: str, looks: Sequence[Look]) -> str:
    """One line: the best method or the best group, the difference to the baseline, and what would settle it.

    Args:
        standings: as returned by rank_methods.
        looks: those that the standings were computed from.
    """
    scored = [s for s in standings if s.mean is not None]
    if not scored:
        return "no run has a result; if the loss diverged, reduce --lr tenfold or set --clip-norm 1"
    best, base = scored[0], next(s for s in standings if s.method == baseline)
    if len(scored) == 1:
        lost = "" if base.mean is not None else f"the baseline {baseline} has no result; "
        return f"{lost}{describe_best(scored)}; no other method has a result"
    if all(s.to_best is None or s.to_best.low is None for s in scored):
        parts = (
            f"{describe_best(scored)}{against(best, base)}",
            higher_means(scored),
            why_no_interval(scored),
        )
        return "; ".join(part for part in parts if part)
    group = [s for s in scored if s.in_best_group]
    sentences = [
        headline(scored, group, base),
        higher_means(scored),
        best_in_other_measure(scored),
        other_family(scored, group, base),
    ]
    if len(group) > 1:
        sentences.append(what_it_takes(group, looks))
    if base.mean is None:
        sentences.insert(0, f"the baseline {baseline} has no result, so there are no differences to it")
    return "; ".join(sentence for sentence in sentences if sentence)


def cut_short(epochs: int, full_epochs: int | None) -> str:
    """The first words of a verdict on runs that had fewer epochs than their recipe; empty otherwise."""
    if full_epochs is None or epochs >= full_epochs:
        return ""
    return f"runs were cut short, to {epochs} of the recipe's {full_epochs} epochs; "


def hardly_learnt(rows: Sequence[Mapping[str, Any]]) -> str:
    """The first words of a verdict on methods that are all hardly better than guessing; empty otherwise.

    Accuracies are averaged over the C classes of the test set, so that always answering the most frequent
    one has 1 / C, as guessing has.
    """
    by_method: dict[object, list[float]] = {}
    classes = 0
    for row in rows:
        found = row_balanced_accuracy(row)
        if found is not None:
            by_method.setdefault(row["method"], []).append(found)
            classes = len(without_none(row["class_accuracies"]))
    if not by_method:
        return ""
    best, guessing = max(map(fmean, by_method.values())), 100 / classes
    times, points = GUESSING
    if best > min(times * guessing, guessing + points):
        return ""
    return (
        f"no method is much better than guessing, with a balanced accuracy of at most {best:.1f} % where "
        f"guessing has {guessing:.1f} %, so nothing can be concluded: train longer, or with another --lr; "
    )


def headline(scored: Sequence[Standing], group: Sequence[Standing], base: Standing) -> str:
    """The best method if there is one, otherwise the methods among which it is."""
    best, others = scored[0], scored[1:]
    if len(group) == 1 and best is base:
        next_best = f"next is {others[0].method}, {others[0].difference}"
        return f"the baseline {best.method} is best: {best.mean:.1f} %{in_measure(best)}; {next_best}"
    if len(group) == 1:
        return f"{best.method} is best: {best.mean:.1f} %{in_measure(best)}{against(best, base)}"
    if len(group) == len(scored):
        return f"no clear difference: {describe_best(scored)}{against(best, base, suffix=False)}"
    names = join_names([s.method for s in group[1:]])
    behind = join_names([s.method for s in scored if not s.in_best_group])
    verb = "is" if len(scored) - len(group) == 1 else "are"
    return (
        f"no single best method: {describe_best(scored)}{against(best, base)}, but is not clearly better "
        f"than {names}; {behind} {verb} clearly behind"
    )


def best_in_other_measure(scored: Sequence[Standing]) -> str:
    """The method with the highest accuracy in the measure not compared, where test classes differ in size.

    Accuracy counts images: on a test set with a long tail, what helps rare classes looks worse than it is.
    """
    if not are_classes_uneven(scored):
        return ""
    plain = scored[0].measure == "accuracy"
    key, name = ("balanced_accuracy", "balanced accuracy") if plain else ("accuracy", "accuracy over images")
    columns = {s.method: {k: v for k, v in enumerate(s.metrics[key]) if v is not None} for s in scored}
    levels = means_of_all_seeds({method: column for method, column in columns.items() if column})
    best = max(scored, key=lambda s: levels.get(s.method, 0.0))
    if best is scored[0]:
        return f"{best.method} has the highest {name}, too"
    gap = paired_difference(*(s.metrics[key] for s in (best, scored[0])))
    against_leader = "" if gap is None else f", {gap} against {scored[0].method} for new seeds alone"
    hint = " (--measure balanced-accuracy compares methods in it)" if plain else ""
    return (
        f"test classes differ in size: {best.method} has the highest {name}, {best.average(key):.1f} %"
        f"{against_leader}{hint}"
    )


def higher_means(scored: Sequence[Standing]) -> str:
    """Methods whose mean is above that of the best one because they lack seeds; usually none."""
    best = scored[0]
    names = [s.method for s in scored[1:] if (s.mean or 0.0) > (best.mean or 0.0) and s.level != best.level]
    if not names:
        return ""
    verb = "has a higher mean" if len(names) == 1 else "have higher means"
    return f"{join_names(names)} {verb}, but over other seeds: methods are ranked by those that they share"


def in_measure(standing: Standing) -> str:
    """What a percentage is of, if it is not the accuracy over images."""
    return "" if standing.measure == "accuracy" else f" {measure_name(standing.measure)}"


def join_names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def describe_best(scored: Sequence[Standing]) -> str:
    best = [s.method for s in scored if s.level == scored[0].level]
    subject = f"{best[0]} has" if len(best) == 1 else f"{join_names(best)} share"
    return f"{subject} the highest {measure_name(scored[0].measure)}, {scored[0].mean:.1f} %"


def against(one: Standing, base: Standing, suffix: bool = True) -> str:
    """The difference to the baseline, as the end of a clause; nothing for the baseline itself."""
    if one is base or base.mean is None:
        return ""
    if one.difference is None:
        return f", no seed in common with {base.method}"
    if one.difference.low is None:
        return f", {signed(one.difference.mean)} against {base.method}"
    note = unclear_suffix(one.difference) if suffix else ""
    return f", {one.difference} against {base.method}{note}"


def unclear_suffix(difference: Difference | None) -> str:
    if difference is None or not difference.excludes_zero:
        return " (no clear difference)"
    return "" if difference.clear else " (not clear after correction)"


def why_no_interval(scored: Sequence[Standing]) -> str:
    if max(len(s.finished) for s in scored) < 2:
        return "one seed gives no confidence interval, use --seeds 3 or more"
    if all(s.to_best is None or s.to_best.pairs < 2 for s in scored):
        return f"no confidence interval, since {scored[0].method} shares fewer than two seeds with any other"
    return "no confidence interval, since differences are equal for all common seeds; use more --seeds"


def other_family(scored: Sequence[Standing], group: Sequence[Standing], base: Standing) -> str:
    """The best method of the family that the best method does not belong to, if not named already.

    The two families are the methods that train with the Infinite Class loss and those that do not.
    """
    best = scored[0]
    other = next((s for s in scored if s.is_infinite_class != best.is_infinite_class), None)
    if other is None or other is base or (len(group) == 1 and best is base and other is scored[1]):
        return ""
    family = "Infinite Class method" if other.is_infinite_class else "other method"
    gap = "no seed in common with" if other.to_best is None else f"{other.to_best} against"
    return f"the best {family} is {other.method}, {gap} {best.method}{unclear_suffix(other.to_best)}"


def what_it_takes(group: Sequence[Standing], looks: Sequence[Look]) -> str:
    """How many seeds or test images would find a difference of one point within the best group."""
    names = {standing.method for standing in group}
    last = looks[-1]
    samples = [sample for pair, sample in last.samples.items() if set(pair) <= names]
    design = estimate_design(samples, methods=len(last.means))
    return "" if design is None else describe_requirement(design)


def describe_requirement(design: Design) -> str:
    """The sentence for a design; numbers are rounded, since the variance is only estimated."""
    found = requirement(design)
    finds = f"a difference of {TARGET:g} point with {100 * POWER:.0f} % probability"
    if found.seeds is not None and found.seeds <= design.seeds:
        return f"this comparison finds {finds}"
    options = []
    if found.seeds is not None:
        options.append(f"{rounded(found.seeds)} seeds instead of {design.seeds}")
    if found.images is not None:
        options.append(f"{rounded(found.images)} test images instead of {design.images:,}")
    if found.both is not None:
        options.append(f"{found.both[0]} seeds and {rounded(found.both[1])} test images")
    if not options:
        return f"no number of seeds would find {finds}"
    limited = found.seeds is None and design.images > 0 and found.both is None
    alone = ", and no number of seeds alone" if limited else ""
    return f"about {' or '.join(options)} would find {finds}{alone}"


def rounded(number: int) -> str:
    """Two significant digits, rounded up, with thousands separators."""
    step = 10 ** max(0, len(str(number)) - 2)
    return f"{math.ceil(number / step) * step:,}"


def footnote(
    standings: Sequence[Standing],
    baseline: str,
    looks: Sequence[Look],
    reason: str = "",
    folds: int | None = None,
    *,
    tuned: bool | None = None,
) -> str:
    """What the intervals and the marks mean, and what they do not cover.

    Args:
        reason: why test images are not accounted for, where they are not.
        folds: of cross-validation.
        tuned: whether each method has values of its own, from --tune; None if that is not known.
    """
    shown = [found for s in standings for found in (s.difference, s.to_best) if found is not None]
    if all(found.low is None for found in shown):
        return "No confidence intervals: they need at least two seeds whose differences are not all equal."
    images = max(int(sample.images) for sample in looks[-1].samples.values())
    covers = (
        f"It covers new seeds and new test images like these {images:,}, not other training images."
        if images
        else f"It covers new seeds, not new test images{f' ({reason})' if reason else ''}."
    )
    of = "" if looks[-1].measure == "accuracy" else f" in {measure_name(looks[-1].measure)}"
    text = f"Brackets: 95 % confidence interval of the difference{of} to {baseline}, paired by seed. {covers}"
    if folds is not None:
        text += (
            f" Every image was tested once per seed, in one of {folds} folds, which are drawn anew for every "
            "seed; the training images of folds overlap."
        )
    if tuned:
        text += (
            " Nor does it cover the choice of each method's values: other training images may choose others."
        )
    if tuned is False:
        text += (
            " All methods were trained with the same learning rate, weight decay and epochs; with values of "
            "their own (--tune 10) or other epochs they may rank differently."
        )
    methods = len(looks[0].means)
    if methods <= UNCORRECTED and len(looks) == 1:
        return text
    times = f" and {len(looks)} looks at the results" if len(looks) > 1 else ""
    return (
        f"{text} Each interval is for one comparison alone; the verdict, the best group and * are corrected "
        f"for all {math.comb(methods, 2)} pairs of methods{times}, to be wrong about any of them with a "
        f"probability of at most {100 * ERROR:.0f} %; in simulations it was {WRONG_IF_EQUAL:g} %, and "
        f"{WRONG_IF_UNSTABLE:g} % if one method varied ten times as much over seeds as the others. "
        f"{significant_methods(standings, baseline)}"
    )


def significant_methods(standings: Sequence[Standing], baseline: str) -> str:
    names = [s.method for s in standings if s.difference is not None and s.difference.clear]
    return f"Different from {baseline} after correction: {', '.join(names) or 'none'}."


def describe_stop(looks: Sequence[Look], max_seeds: int, out_of_time: bool = False) -> str:
    """Why --seeds auto added no more seeds."""
    decision = decide(looks)
    if len(decision.group) <= 1:
        return "the question is settled"
    if looks[-1].seeds >= max_seeds:
        return f"--max-seeds {max_seeds} is reached"
    if decision.limited_by_images:
        return "more seeds would hardly help, the uncertainty is that of the test images"
    return "the budget is used up" if out_of_time else "no reason to stop"
