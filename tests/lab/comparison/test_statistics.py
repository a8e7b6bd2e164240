"""Paired differences, confidence intervals, the correction for several comparisons, and the verdict."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from icmixup.lab.comparison.compare import Comparison, summarise
from icmixup.lab.comparison.statistics import MEASURES, holm, paired_difference, signed
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


def test_methods_without_a_common_seed_have_no_difference():
    assert paired_difference([80.0, None], [None, 81.0]) is None


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9))
def test_holm_lies_between_no_correction_and_bonferroni(p_values: list[float]):
    for raw, corrected in zip(p_values, holm(p_values), strict=True):
        assert raw <= corrected <= 1
        assert corrected >= min(1.0, len(p_values) * min(p_values))
    assert holm(p_values)[p_values.index(min(p_values))] == min(1.0, len(p_values) * min(p_values))


@pytest.mark.parametrize(
    ("points", "text"), [(1.26, "+1.3"), (-0.02, "-0.02"), (0.0, "+0.0"), (0.004, "+0.004")]
)
def test_a_non_zero_difference_is_never_printed_as_zero(points: float, text: str):
    assert signed(points) == text


def test_standings_are_sorted_by_accuracy_with_the_standard_deviation_over_seeds():
    found = compare_made(erm=[70.0, 72.0], mixup=[80.0, 81.0], ic_mixup=[75.0, 79.0])
    assert [s.method for s in found.standings] == ["mixup", "ic-mixup", "erm"]
    assert found.standings[1].mean == 77
    assert found.standings[1].std == pytest.approx(math.sqrt(8))


def test_verdict_names_an_infinite_class_method_that_is_clearly_best():
    found = compare_made(mixup=[70.0, 71.0, 72.0], ic_mixup=[80.0, 81.5, 82.0], erm=[60.0, 62.0, 61.0])
    assert found.verdict.startswith("ic-mixup is best: 81.2 %, +10.2 [")
    assert "no clear difference" not in found.verdict


def test_verdict_names_another_method_that_is_best_and_the_best_infinite_class_method():
    found = compare_made(
        mixup=[70.0, 71.0, 72.0], ic_mixup=[80.0, 81.5, 82.0], balanced_mixup=[85.0, 86.0, 87.4]
    )
    assert found.verdict.startswith("balanced-mixup is best: 86.1 %, +15.1 [")
    assert "the best Infinite Class method is ic-mixup, -5.0 [" in found.verdict
    assert "no clear difference" not in found.verdict


def test_verdict_reports_a_lead_over_the_best_other_method_that_is_not_clear():
    found = compare_made(
        mixup=[70.0, 71.0, 72.0], ic_mixup=[86.0, 85.9, 87.1], balanced_mixup=[85.0, 86.5, 87.0]
    )
    assert found.verdict.startswith("ic-mixup is best")
    assert "the best other method is balanced-mixup, " in found.verdict
    assert found.verdict.endswith("against ic-mixup, no clear difference")


def test_verdict_reports_no_clear_difference_if_every_interval_includes_zero():
    found = compare_made(mixup=[70.0, 73.0, 72.0], ic_mixup=[72.0, 71.0, 73.5], erm=[71.0, 70.0, 74.0])
    assert found.verdict.startswith("no clear difference: ic-mixup has the highest accuracy, 72.2 %")


def test_verdict_names_a_clearly_better_second_behind_an_unclear_first():
    found = compare_made(mixup=[70.0, 71.0, 72.0], ic_mixup=[60.0, 88.0, 90.0], remix=[73.0, 74.1, 75.0])
    assert "ic-mixup has the highest accuracy" in found.verdict
    assert "remix is clearly better than mixup, +3.0 [" in found.verdict


def test_verdict_names_the_baseline_if_it_is_best():
    found = compare_made(mixup=[90.0, 91.0, 92.0], ic_mixup=[80.0, 81.5, 82.0])
    assert found.verdict.startswith("the baseline mixup is best: 91.0 %; next is ic-mixup, -9.8 [")


def test_verdict_of_one_seed_asks_for_more_seeds():
    found = compare_made(mixup=[70.0], ic_mixup=[80.0])
    assert "one seed gives no confidence interval, use --seeds 3" in found.verdict
    assert "ic-mixup has the highest accuracy, 80.0 %, +10.0 against mixup" in found.verdict
    assert found.footnote.startswith("No confidence intervals")


def test_tied_methods_share_the_highest_accuracy():
    assert (
        "mixup and erm share the highest accuracy"
        in compare_made(mixup=[70.0], erm=[70.0], ic_mixup=[60.0]).verdict
    )


def test_verdict_if_the_baseline_diverged():
    found = compare_made(mixup=[None, None], ic_mixup=[80.0, 81.0])
    assert "the baseline mixup has no result" in found.verdict
    assert "ic-mixup has the highest accuracy" in found.verdict


@pytest.mark.parametrize("baseline", list(METHODS)[:4])
def test_every_verdict_is_one_line_with_the_best_method(baseline: str):
    rows = {name: [60.0 + 3 * k, 61.0 + 2 * k, 62.0] for k, name in enumerate(METHODS)}
    found = summarise(QUICK, list(rows), range(3), baseline, make_rows(rows))
    assert "\n" not in found.verdict
    assert found.standings[0].method in found.verdict


def test_the_footnote_counts_the_comparisons_and_lists_those_significant_after_correction():
    found = compare_made(mixup=[70.0, 71.0, 72.0], ic_mixup=[80.0, 81.1, 82.0], erm=[73.0, 71.5, 72.0])
    assert "2 intervals are not corrected for multiple comparisons" in found.footnote
    assert "up to 10 %" in found.footnote
    assert found.footnote.endswith("Significant after Holm's correction: ic-mixup.")
