"""Paired differences, their intervals, the verdict in words, budgets, and a real comparison on digits."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from icmixup.lab.comparison.compare import (
    EVEN_METHODS,
    LONG_TAIL_METHODS,
    Comparison,
    Failure,
    compare,
    comparison_recipes,
    default_methods,
    delete_runs,
    pick_baseline,
    read_comparison,
    summarise,
    write_comparison,
)
from icmixup.lab.comparison.statistics import MEASURES, holm, paired_difference, signed
from icmixup.lab.sweep import budget
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.loop import load_recipe_data
from icmixup.lab.training.recipe import QUICK, Recipe
from icmixup.methods import METHODS, find_method

TINY = dataclasses.replace(QUICK, dataset="digits", per_class=20, epochs=1)


def make_rows(accuracies: dict[str, list[float | None]]) -> list[dict[str, object]]:
    """Rows as train returns them; None is a run without a result."""
    return [
        {"method": method, "seed": seed, "accuracy": value, **dict.fromkeys(MEASURES, 1.0)}
        for method, values in accuracies.items()
        for seed, value in enumerate(values)
        if value is not None
    ]


def judge(baseline: str = "mixup", **accuracies: list[float | None]) -> Comparison:
    named = {name.replace("_", "-"): values for name, values in accuracies.items()}
    seeds = range(len(next(iter(named.values()))))
    return summarise(TINY, list(named), seeds, baseline, make_rows(named))


def test_the_interval_is_that_of_a_paired_t_test():
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


def test_a_seed_that_one_of_the_two_did_not_finish_is_left_out():
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
def test_a_difference_is_never_printed_as_none(points: float, text: str):
    assert signed(points) == text


def test_standings_are_sorted_by_accuracy_with_the_spread_over_seeds():
    found = judge(erm=[70.0, 72.0], mixup=[80.0, 81.0], ic_mixup=[75.0, 79.0])
    assert [s.method for s in found.standings] == ["mixup", "ic-mixup", "erm"]
    assert found.standings[1].mean == 77
    assert found.standings[1].std == pytest.approx(math.sqrt(8))


def test_verdict_names_our_method_where_it_clearly_wins():
    found = judge(mixup=[70.0, 71.0, 72.0], ic_mixup=[80.0, 81.5, 82.0], erm=[60.0, 62.0, 61.0])
    assert found.verdict.startswith("ic-mixup is best: 81.2 %, +10.2 [")
    assert "no clear difference" not in found.verdict


def test_verdict_names_a_rival_that_wins_and_where_ours_stands():
    found = judge(mixup=[70.0, 71.0, 72.0], ic_mixup=[80.0, 81.5, 82.0], balanced_mixup=[85.0, 86.0, 87.4])
    assert found.verdict.startswith("balanced-mixup is best: 86.1 %, +15.1 [")
    assert "the best Infinite Class method, ic-mixup, has -5.0 [" in found.verdict
    assert "no clear difference" not in found.verdict


def test_verdict_says_that_the_lead_over_a_rival_is_not_clear():
    found = judge(mixup=[70.0, 71.0, 72.0], ic_mixup=[86.0, 85.9, 87.1], balanced_mixup=[85.0, 86.5, 87.0])
    assert found.verdict.startswith("ic-mixup is best")
    assert "the best other method, balanced-mixup, has" in found.verdict
    assert found.verdict.endswith("against ic-mixup, no clear difference")


def test_verdict_says_no_clear_difference_where_every_interval_includes_zero():
    found = judge(mixup=[70.0, 73.0, 72.0], ic_mixup=[72.0, 71.0, 73.5], erm=[71.0, 70.0, 74.0])
    assert found.verdict.startswith("no clear difference: ic-mixup has the highest accuracy, 72.2 %")


def test_verdict_names_a_clear_second_behind_an_unclear_first():
    found = judge(mixup=[70.0, 71.0, 72.0], ic_mixup=[60.0, 88.0, 90.0], remix=[73.0, 74.1, 75.0])
    assert "ic-mixup has the highest accuracy" in found.verdict
    assert "clearly better than mixup is remix, +3.0 [" in found.verdict


def test_verdict_names_the_baseline_where_nothing_beats_it():
    found = judge(mixup=[90.0, 91.0, 92.0], ic_mixup=[80.0, 81.5, 82.0])
    assert found.verdict.startswith("mixup, the baseline, is best: 91.0 %; the next, ic-mixup, has -9.8 [")


def test_verdict_of_one_seed_proves_nothing():
    found = judge(mixup=[70.0], ic_mixup=[80.0])
    assert "one seed gives no interval" in found.verdict
    assert "ic-mixup has the highest accuracy, 80.0 %, +10.0 against mixup" in found.verdict
    assert found.footnote.startswith("No intervals")


def test_methods_that_tie_share_the_first_place():
    assert (
        "mixup and erm share the highest accuracy" in judge(mixup=[70.0], erm=[70.0], ic_mixup=[60.0]).verdict
    )


def test_verdict_of_a_baseline_that_diverged():
    found = judge(mixup=[None, None], ic_mixup=[80.0, 81.0])
    assert "mixup, the baseline, has no result" in found.verdict
    assert "ic-mixup has the highest accuracy" in found.verdict


@pytest.mark.parametrize("baseline", list(METHODS)[:4])
def test_every_verdict_is_one_line_with_the_best_method(baseline: str):
    rows = {name: [60.0 + 3 * k, 61.0 + 2 * k, 62.0] for k, name in enumerate(METHODS)}
    found = summarise(TINY, list(rows), range(3), baseline, make_rows(rows))
    assert "\n" not in found.verdict
    assert found.standings[0].method in found.verdict


def test_the_footnote_counts_the_comparisons_and_says_which_survive_correction():
    found = judge(mixup=[70.0, 71.0, 72.0], ic_mixup=[80.0, 81.1, 82.0], erm=[73.0, 71.5, 72.0])
    assert "2 intervals are not corrected" in found.footnote
    assert "up to 10 %" in found.footnote
    assert found.footnote.endswith("Clear also after Holm's correction: ic-mixup.")


def test_a_comparison_comes_back_from_its_json(tmp_path: Path):
    rows = make_rows({"mixup": [70.0, 71.5], "ic-mixup": [80.0, None]})
    lost = [Failure("ic-mixup", 1, "the loss became nan")]
    found = summarise(TINY, ("mixup", "ic-mixup"), (0, 1), "mixup", rows, lost)
    json_path, _ = write_comparison(found, tmp_path)
    assert read_comparison(json_path) == found
    stored = json.loads(json_path.read_text())
    assert stored["methods"]["ic-mixup"]["accuracies"] == [80.0, None]
    assert stored["methods"]["mixup"]["metrics"]["nll"] == [1.0, 1.0]


def test_the_csv_has_a_row_a_run_and_names_those_without_a_result(tmp_path: Path):
    rows = make_rows({"mixup": [70.0, 71.5], "ic-mixup": [80.0, None]})
    lost = [Failure("ic-mixup", 1, "the loss became nan")]
    _, path = write_comparison(summarise(TINY, ("mixup", "ic-mixup"), (0, 1), "mixup", rows, lost), tmp_path)
    with path.open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["method"], line["seed"], line["accuracy"], line["status"]) for line in lines] == [
        ("mixup", "0", "70.0", "finished"),
        ("mixup", "1", "71.5", "finished"),
        ("ic-mixup", "0", "80.0", "finished"),
        ("ic-mixup", "1", "", "no result"),
    ]


def test_runs_of_a_plan_differ_in_method_and_seed_alone():
    plan = comparison_recipes(TINY, ("erm", "mixup"), range(2))
    assert [(r.seed, r.method) for r in plan] == [(0, "erm"), (0, "mixup"), (1, "erm"), (1, "mixup")]
    assert {dataclasses.replace(r, method="erm", seed=0) for r in plan} == {
        dataclasses.replace(TINY, method="erm", seed=0)
    }


def test_the_baseline_is_mixup_or_the_first_or_the_one_asked_for():
    assert pick_baseline(("erm", "mixup")) == "mixup"
    assert pick_baseline(("erm", "ic-mixup")) == "erm"
    assert pick_baseline(("erm", "mixup"), "erm") == "erm"
    with pytest.raises(ValueError, match="'remix' is not among the methods: erm, mixup"):
        pick_baseline(("erm", "mixup"), "remix")


def test_the_default_methods_follow_the_class_sizes():
    assert default_methods(torch.tensor([116, 122, 120])) == EVEN_METHODS
    assert default_methods(torch.tensor([100, 10, 1])) == LONG_TAIL_METHODS
    assert default_methods(torch.tensor([5, 0])) == LONG_TAIL_METHODS
    for name in (*EVEN_METHODS, *LONG_TAIL_METHODS):
        find_method(name)


def test_a_comparison_on_digits_pairs_runs_and_is_not_trained_twice(tmp_path: Path):
    data = load_recipe_data(TINY, tmp_path)
    first = compare(
        TINY,
        ("mixup", "ic-mixup"),
        range(2),
        execution=Execution(out=tmp_path, data_dir=tmp_path, dataset=data, workers=1),
    )
    assert len(first.rows) == 4
    assert all(len(s.accuracies) == 2 and s.std is not None for s in first.standings)
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/result.json")}
    again = compare(
        TINY,
        ("mixup", "ic-mixup"),
        range(2),
        execution=Execution(out=tmp_path, data_dir=tmp_path, dataset=data, workers=1),
    )
    assert again == first
    assert stamps == {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/result.json")}
    delete_runs(tmp_path, comparison_recipes(TINY, ("mixup",), (0,)))
    assert len(list(tmp_path.glob("*/result.json"))) == 3


def test_two_at_once_come_to_what_they_come_to_in_turn(tmp_path: Path):
    in_turn, at_once = (
        compare(
            TINY,
            ("mixup", "ic-mixup"),
            (0,),
            execution=Execution(out=tmp_path / str(k), data_dir=tmp_path, workers=k),
        )
        for k in (1, 2)
    )
    assert [s.accuracies for s in in_turn.standings] == [s.accuracies for s in at_once.standings]
    assert [row["loss"] for row in in_turn.rows] == [row["loss"] for row in at_once.rows]


def test_a_run_that_diverges_does_not_stop_the_others(tmp_path: Path):
    # Scores over 1e-38 overflow, and only the Infinite Class loss divides by the temperature.
    recipe = dataclasses.replace(TINY, temperature=1e-38)
    found = compare(
        recipe, ("ic-mixup", "mixup"), (0, 1), execution=Execution(out=tmp_path, data_dir=tmp_path, workers=1)
    )
    assert [(failure.method, failure.seed) for failure in found.failures] == [
        ("ic-mixup", 0),
        ("ic-mixup", 1),
    ]
    assert [row["method"] for row in found.rows] == ["mixup", "mixup"]
    assert found.standings[-1].mean is None


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("5m", 300), ("1h30m", 5400), ("1.5H", 5400), ("1m5s", 65)]
)
def test_budgets_are_read(text: str, seconds: float):
    assert budget.parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "soon", "-5m", "0s", "5m1h", "5 m"])
def test_what_is_no_budget_is_refused_with_examples(text: str):
    with pytest.raises(ValueError, match="90s, 5m or 1h30m"):
        budget.parse_budget(text)


def test_epochs_fill_the_budget_and_are_never_none():
    # 0.9 x 200 s for 10 runs is 18 s each; 3 s of them start the run, and 15 s hold 7 epochs of 2 s.
    assert budget.fit_epochs(200, runs=10, start_up=3, epoch=2) == 7
    assert budget.fit_epochs(1, runs=10, start_up=3, epoch=2) == 1


def test_the_speed_of_an_epoch_is_measured_between_progress_reports():
    # Two seconds an epoch after four of warm-up.
    assert budget.epoch_seconds([(5.0, 0.5), (6.0, 1.0), (8.0, 2.0)], total=8.5) == pytest.approx((4.5, 2.0))
    assert budget.epoch_seconds([(5.0, 1.0)], total=6.0) == (0.0, 6.0)


def test_the_slowest_method_has_two_forwards():
    assert budget.slowest(LONG_TAIL_METHODS) == "ic-regmixup"
    assert budget.slowest(("erm", "mixup", "ic-mixup")) == "ic-mixup"


def test_a_budget_is_measured_once_and_leaves_the_same_recipes(tmp_path: Path):
    data = load_recipe_data(TINY, tmp_path)
    execution = Execution(out=tmp_path / "runs", data_dir=tmp_path, dataset=data, device="cpu")

    def plan(recipe: Recipe, seconds: float) -> int:
        return budget.plan_epochs(recipe, ("erm", "mixup"), 2, seconds, execution)

    epochs = plan(TINY, 20.0)
    assert epochs > 1
    assert plan(dataclasses.replace(TINY, epochs=9), 20.0) == epochs  # from the file, to the epoch
    assert plan(TINY, 0.001) == 1
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["budgets.json"]
