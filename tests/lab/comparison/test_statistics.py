"""Paired differences, confidence intervals, the correction for several comparisons, and the verdict."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from icmixup.lab.comparison.compare import Comparison, summarise
from icmixup.lab.comparison.statistics import (
    MEASURES,
    decide,
    means_of_all_seeds,
    paired_difference,
    signed,
    take_look,
)
from icmixup.lab.training.recipe import QUICK
from icmixup.methods import METHODS


def make_rows(accuracies: dict[str, list[float | None]]) -> list[dict[str, object]]:
    """Rows as train returns them; None is a run without a result."""
    return [
        {"method": method, "seed": seed, "accuracy": value, **dict.fromkeys(MEASURES, 1.0)}
        for method, values in accuracies.items()
        for seed, value in enumerate(values)
        if value is not None
    ]


def compare_made(baseline: str = "mixup", **accuracies: list[float | None]) -> Comparison:
    named = {name.replace("_", "-"): values for name, values in accuracies.items()}
    seeds = range(len(next(iter(named.values()))))
    return summarise(QUICK, list(named), seeds, baseline, make_rows(named))


def test_the_interval_matches_a_paired_t_test():
    ours, theirs = [81.2, 83.9, 82.4, 85.0], [80.1, 81.7, 82.6, 83.2]
    found = paired_difference(ours, theirs)
    test = stats.ttest_rel(ours, theirs)
    low, high = test.confidence_interval(0.95)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((low, high))
    assert found.p == pytest.approx(test.pvalue)


def test_the_interval_of_three_seeds_by_hand():
    # Differences 1, 2, 3: mean 2, standard error 1 / sqrt(3), and t is 4.3027 with two degrees of freedom.
    found = paired_difference([11.0, 22.0, 33.0], [10.0, 20.0, 30.0])
    assert found is not None
    assert (found.mean, found.pairs) == (2, 3)
    assert found.low == pytest.approx(2 - 4.3027 / math.sqrt(3), abs=1e-4)
    assert found.high == pytest.approx(2 + 4.3027 / math.sqrt(3), abs=1e-4)


@given(
    pairs=st.lists(st.tuples(st.integers(0, 600), st.integers(0, 600)), min_size=2, max_size=8),
)
def test_an_interval_without_zero_is_a_p_value_below_five_percent(pairs: list[tuple[int, int]]):
    found = paired_difference([a / 6 for a, _ in pairs], [b / 6 for _, b in pairs])
    assert found is not None
    assert found.clear == (found.p is not None and found.p < 0.05)


def test_a_seed_that_only_one_method_finished_is_ignored():
    found = paired_difference([80.0, None, 84.0, 90.0], [79.0, 20.0, 82.0, None])
    alone = paired_difference([80.0, 84.0], [79.0, 82.0])
    assert found == alone


@pytest.mark.parametrize("ours", [[85.0], [85.0, 86.0], [80.0, 81.0]], ids=["one pair", "all +5", "all 0"])
def test_one_pair_or_equal_differences_have_no_interval(ours: list[float]):
    found = paired_difference(ours, [80.0, 81.0][: len(ours)])
    assert found is not None
    assert found.low is None
    assert not found.clear
    assert "no interval" in str(found)


@pytest.mark.parametrize("points", [0.02, 0.5, 30.0])
@pytest.mark.parametrize("methods", [("better", "worse"), ("worse", "better")])
def test_a_clear_difference_of_any_size_drops_the_worse_method_in_any_order(
    methods: tuple[str, str], points: float
):
    worse = [60.0, 61.0, 59.0, 60.5, 60.2]
    noise = [0.001, -0.001, 0.0005, -0.0005, 0.0]  # so that the difference is clear
    better = [value + points + error for value, error in zip(worse, noise, strict=True)]
    rows = make_rows({"better": better, "worse": worse})
    decision = decide([take_look(rows, methods, range(5))])
    assert decision.group == ("better",)
    assert decision.stopped == {"worse": 5}


def test_methods_without_a_common_seed_have_no_difference():
    assert paired_difference([80.0, None], [None, 81.0]) is None


@pytest.mark.parametrize(
    ("points", "text"), [(1.26, "+1.3"), (-0.02, "-0.02"), (0.0, "+0.0"), (0.004, "+0.004")]
)
def test_a_non_zero_difference_is_never_printed_as_zero(points: float, text: str):
    assert signed(points) == text


@pytest.mark.parametrize("points", [0.0, -0.0, 1.4e-14, -1.4e-14])
def test_equal_accuracies_differ_by_nothing(points: float):
    """-0 is the reverse of no difference, and sums of equal accuracies may differ by rounding."""
    assert signed(points) == "+0.0"


def test_standings_are_sorted_by_accuracy_with_the_standard_deviation_over_seeds():
    found = compare_made(erm=[70.0, 72.0], mixup=[80.0, 81.0], ic_mixup=[75.0, 79.0])
    assert [s.method for s in found.standings] == ["mixup", "ic-mixup", "erm"]
    assert found.standings[1].mean == 77
    assert found.standings[1].std == pytest.approx(math.sqrt(8))


SPREAD = {"erm": [60.0, 62.1, 61.0, 60.4, 61.3], "mixup": [70.0, 71.0, 72.0, 71.2, 70.5]}


def test_verdict_names_an_infinite_class_method_that_is_better_than_all_others():
    found = compare_made(**SPREAD, ic_mixup=[80.0, 81.5, 82.0, 81.1, 80.9])
    assert found.verdict.startswith("ic-mixup is best: 81.1 %, +10.2 [")
    assert "no clear difference" not in found.verdict
    assert best_group(found) == ["ic-mixup"]


def test_verdict_names_another_method_that_is_best_and_the_best_infinite_class_method():
    found = compare_made(
        **SPREAD, ic_mixup=[80.0, 81.5, 82.0, 81.1, 80.9], balanced_mixup=[85.0, 86.0, 87.4, 86.1, 85.7]
    )
    assert found.verdict.startswith("balanced-mixup is best: 86.0 %, +15.1 [")
    assert "the best Infinite Class method is ic-mixup, -4.9 [" in found.verdict
    assert "no clear difference" not in found.verdict


def test_a_lead_over_the_baseline_alone_does_not_make_a_method_best():
    # The case of 80.2 against 80.1: both are clearly better than the baseline, neither than the other.
    found = compare_made(
        **SPREAD, ic_mixup=[80.1, 80.3, 80.2, 79.6, 80.8], balanced_mixup=[80.2, 80.0, 80.1, 80.4, 79.8]
    )
    assert found.verdict.startswith(
        "no single best method: ic-mixup has the highest accuracy, 80.2 %, +9.3 ["
    )
    assert "but is not clearly better than balanced-mixup; mixup and erm are clearly behind" in found.verdict
    assert "the best other method is balanced-mixup, -0.1 [" in found.verdict
    assert "against ic-mixup (no clear difference)" in found.verdict
    assert best_group(found) == ["ic-mixup", "balanced-mixup"]


def test_an_interval_without_zero_that_is_not_clear_among_many_methods_says_so():
    others = {name.replace("-", "_"): [80.0, 83.0, 77.0] for name in ("erm", "remix", "cutmix", "regmixup")}
    found = compare_made(**others, mixup=[80.0, 80.4, 79.9], ic_mixup=[82.3, 83.0, 81.2])
    best = found.standings[0]
    assert best.difference is not None
    assert best.difference.excludes_zero
    assert not best.difference.clear
    assert "against mixup" in found.verdict
    assert "ic-mixup is best" not in found.verdict


def test_verdict_reports_no_clear_difference_if_nothing_is_clear():
    found = compare_made(mixup=[70.0, 73.0, 72.0], ic_mixup=[72.0, 71.0, 73.5], erm=[71.0, 70.0, 74.0])
    assert found.verdict.startswith("no clear difference: ic-mixup has the highest accuracy, 72.2 %")
    assert best_group(found) == ["ic-mixup", "mixup", "erm"]
    assert "seeds instead of 3 would find a difference of 1 point with 80 % probability" in found.verdict


def test_verdict_names_the_baseline_if_it_is_best():
    found = compare_made(mixup=[90.0, 91.0, 92.0], ic_mixup=[80.0, 81.5, 82.0])
    assert found.verdict.startswith("the baseline mixup is best: 91.0 %; next is ic-mixup, -9.8 [")


def test_verdict_of_one_seed_asks_for_more_seeds():
    found = compare_made(mixup=[70.0], ic_mixup=[80.0])
    assert "one seed gives no confidence interval, use --seeds 3" in found.verdict
    assert "ic-mixup has the highest accuracy, 80.0 %, +10.0 against mixup" in found.verdict
    assert found.footnote.startswith("No confidence intervals")


def test_a_leader_with_one_seed_takes_no_interval_from_the_others():
    found = compare_made(mixup=[70.0, 73.0, 71.0], erm=[60.0, 60.5, 63.0], ic_mixup=[90.0, None, None])
    assert "ic-mixup shares fewer than two seeds with any other" in found.verdict
    assert found.footnote.startswith("Brackets: 95 % confidence interval")


def test_tied_methods_share_the_highest_accuracy():
    assert (
        "mixup and erm share the highest accuracy"
        in compare_made(mixup=[70.0], erm=[70.0], ic_mixup=[60.0]).verdict
    )


def test_methods_whose_means_differ_by_rounding_share_the_highest_accuracy():
    # 47 and 48 against 50 and 45 of 60 images: the same mean, as different floats.
    found = compare_made(
        mixup=[100 * (47 / 60), 100 * (48 / 60)], ic_mixup=[100 * (50 / 60), 100 * (45 / 60)]
    )
    assert found.standings[0].mean != found.standings[1].mean
    assert "mixup and ic-mixup share the highest accuracy, 79.2 %" in found.verdict


def test_a_method_that_lacks_a_bad_seed_does_not_lead_one_that_is_better_with_every_seed():
    found = compare_made(
        mixup=[80.0, 81.0, 82.0, 20.0], erm=[70.2, 71.0, 72.0, None], ic_mixup=[60.0, 62.0, 61.0, 15.0]
    )
    assert [s.method for s in found.standings] == ["mixup", "erm", "ic-mixup"]
    assert best_group(found) == ["mixup"]
    assert found.verdict.startswith(
        "the baseline mixup is best: 65.8 %; next is erm, -9.9 [-10.2, -9.6]; erm has"
    )
    assert "erm has a higher mean, but over other seeds" in found.verdict


@given(
    gaps=st.lists(st.integers(-200, 200), min_size=2, max_size=4),
    seeds=st.lists(st.integers(-200, 200), min_size=2, max_size=6),
    lost=st.sets(st.tuples(st.integers(0, 3), st.integers(1, 5))),
)
def test_missing_seeds_change_no_difference_of_methods_that_differ_equally_with_every_seed(
    gaps: list[int], seeds: list[int], lost: set[tuple[int, int]]
):
    values = {
        str(m): {s: 50 + (gap + effect) / 10 for s, effect in enumerate(seeds) if (m, s) not in lost}
        for m, gap in enumerate(gaps)
    }  # every method has seed 0
    means = means_of_all_seeds(values)
    for m, gap in enumerate(gaps):
        assert means[str(m)] - means["0"] == pytest.approx((gap - gaps[0]) / 10, abs=1e-6)


def test_verdict_if_the_baseline_diverged():
    found = compare_made(mixup=[None, None], ic_mixup=[80.0, 81.0])
    assert "the baseline mixup has no result" in found.verdict
    assert "ic-mixup has the highest accuracy" in found.verdict
    others = compare_made(mixup=[None] * 3, ic_mixup=[80.0, 81.0, 80.3], erm=[70.0, 71.0, 71.1])
    assert others.verdict.startswith("the baseline mixup has no result, so there are no differences to it; ")
    assert "ic-mixup is best: 80.4 %" in others.verdict


@pytest.mark.parametrize(
    ("classes", "accuracy", "guessing"),
    [
        (10, 9.9, True),
        (10, 11.9, True),
        (10, 12.1, False),
        (2, 54.9, True),
        (2, 55.1, False),
        (50, 18, False),
    ],
)
def test_a_verdict_on_methods_that_hardly_beat_guessing_says_so_first(
    classes: int, accuracy: float, guessing: bool
):
    rows = make_rows({"mixup": [60.0, 61.0], "ic-mixup": [60.0, 62.0]})  # as if most images were of one class
    for row in rows:
        row["class_accuracies"] = [None, 2 * accuracy, *[accuracy] * (classes - 2), 0.0]
    found = summarise(QUICK, ["mixup", "ic-mixup"], range(2), "mixup", rows).verdict
    assert found.startswith("no method is much better than guessing") == guessing
    assert not guessing or f"guessing has {100 / classes:.1f} %" in found
    rows[0]["class_accuracies"] = [100.0] * classes  # one run of one method has learnt something
    found = summarise(QUICK, ["mixup", "ic-mixup"], range(2), "mixup", rows).verdict
    assert "guessing" not in found


def test_a_method_that_shares_no_seed_with_the_leader_stays_in_the_best_group():
    found = compare_made(mixup=[70.0, 71.0, None, None], ic_mixup=[None, None, 80.0, 81.1])
    assert best_group(found) == ["ic-mixup", "mixup"]


@pytest.mark.parametrize("baseline", list(METHODS)[:4])
def test_every_verdict_is_one_line_with_the_best_method(baseline: str):
    rows = {name: [60.0 + 3 * k, 61.0 + 2 * k, 62.0] for k, name in enumerate(METHODS)}
    found = summarise(QUICK, list(rows), range(3), baseline, make_rows(rows))
    assert "\n" not in found.verdict
    assert found.standings[0].method in found.verdict


@given(
    st.lists(st.lists(st.integers(0, 400), min_size=3, max_size=3), min_size=2, max_size=6, unique_by=tuple)
)
def test_verdict_footnote_and_marks_agree(accuracies: list[list[int]]):
    names = list(METHODS)[: len(accuracies)]
    rows = dict(zip(names, ([value / 4 for value in line] for line in accuracies), strict=True))
    found = summarise(QUICK, names, range(3), names[0], make_rows(rows))
    group = best_group(found)
    assert found.standings[0].method in group
    assert (" is best: " in found.verdict) == (len(group) == 1)
    for standing in found.standings[1:]:
        is_behind = standing.to_best is not None and standing.to_best.side == "below"
        assert (standing.method not in group) == is_behind
    clear = [s.method for s in found.standings if s.difference is not None and s.difference.clear]
    if len(names) > 2 and "after correction" in found.footnote:
        assert found.footnote.endswith(f"after correction: {', '.join(clear) or 'none'}.")
    for one in (s.difference for s in found.standings):
        if one is not None and one.clear:  # a claim never contradicts the interval that is printed
            assert one.low is not None
            assert one.high is not None
            assert one.low > 0 or one.high < 0


def test_the_footnote_counts_the_pairs_and_lists_those_different_from_the_baseline():
    found = compare_made(**SPREAD, ic_mixup=[80.0, 81.1, 82.0, 80.7, 81.2])
    assert "corrected for all 3 pairs of methods" in found.footnote
    assert "It covers new seeds, not new test images (no predictions of test images)." in found.footnote
    assert found.footnote.endswith("Different from mixup after correction: ic-mixup, erm.")


def test_the_footnote_says_that_tuning_may_change_the_order_or_that_its_choice_may_change():
    rows = make_rows({"mixup": [70.0, 71.0, 72.5], "erm": [70.5, 70.0, 73.0]})
    for tuned, expected in ((None, True), ({"mixup": {"lr": 0.1}, "erm": {}}, False)):
        found = summarise(QUICK, ["mixup", "erm"], range(3), "mixup", rows, tuned=tuned)
        assert ("(--tune 10) or other epochs they may rank differently" in found.footnote) == expected
        assert ("cover the choice of each method's values" in found.footnote) != expected


def best_group(comparison: Comparison) -> list[str]:
    return [standing.method for standing in comparison.standings if standing.in_best_group]


def compare_classes(measure: str = "accuracy", **class_accuracies: list[list[float | None]]) -> Comparison:
    """Two seeds of each method, tested on 9 images of the first class and 1 of each other one."""
    rows = [
        {
            "method": method,
            "seed": seed,
            "accuracy": (9 * found[0] + sum(x for x in found[1:] if x)) / 11,  # type: ignore[operator]
            "class_accuracies": found,
        }
        for method, by_seed in class_accuracies.items()
        for seed, found in enumerate(by_seed)
    ]
    methods = list(class_accuracies)
    looks = [take_look(rows, methods, range(2), measure=measure)]
    return summarise(QUICK, methods, range(2), "erm", rows, looks=looks)


def test_the_verdict_names_the_method_that_is_best_over_classes_where_test_classes_differ_in_size():
    """On a test set with a long tail, erm was the best, and nothing said that it is not on rare classes."""
    found = compare_classes(
        erm=[[100.0, 20.0, 10.0, None], [99.0, 20.0, 12.0, None]],
        balanced=[[80.0, 80.0, 60.0, None], [78.0, 70.0, 60.0, None]],
    )
    assert "erm has the highest accuracy" in found.verdict
    gap = paired_difference((220 / 3, 208 / 3), (130 / 3, 131 / 3))
    words = "test classes differ in size: balanced has the highest balanced accuracy, 71.3 %"
    hint = "(--measure balanced-accuracy compares methods in it)"
    assert f"{words}, {gap} against erm for new seeds alone {hint}" in found.verdict
    both = compare_classes(
        erm=[[90.0, 20.0, 10.0], [91.0, 20.0, 12.0]], balanced=[[95.0, 80.0, 60.0], [96.0, 70.0, 60.0]]
    )
    assert "balanced has the highest balanced accuracy, too" in both.verdict


def test_compared_in_the_balanced_accuracy_the_leader_is_that_over_classes():
    found = compare_classes(
        measure="balanced-accuracy",
        erm=[[100.0, 20.0, 10.0, None], [99.0, 20.0, 12.0, None]],
        balanced=[[80.0, 80.0, 60.0, None], [78.0, 70.0, 60.0, None]],
    )
    assert [standing.method for standing in found.standings] == ["balanced", "erm"]
    gap = paired_difference((220 / 3, 208 / 3), (130 / 3, 131 / 3))
    assert str(found.standings[0].difference) == str(gap)
    assert found.verdict.startswith(f"balanced is best: 71.3 % balanced accuracy, {gap} against erm")
    assert "erm has the highest accuracy over images, 84.2 %" in found.verdict
    assert "--measure" not in found.verdict


def test_a_test_set_of_equal_classes_needs_no_second_accuracy():
    equal = [
        {
            "method": method,
            "seed": seed,
            "accuracy": 50.0 + seed + add,
            "class_accuracies": [50.0 + seed + add] * 3,
        }
        for method, add in (("erm", 0.0), ("mixup", 2.0))
        for seed in range(2)
    ]
    verdict = summarise(QUICK, ["erm", "mixup"], range(2), "erm", equal).verdict
    assert "classes" not in verdict
    assert "balanced" not in verdict
