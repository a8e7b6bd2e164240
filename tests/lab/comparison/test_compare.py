"""Comparisons: what is planned, stored and read back, budgets, and a real comparison on digits."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path

import pytest
import torch

from icmixup.lab.comparison.compare import (
    EVEN_METHODS,
    LONG_TAIL_METHODS,
    Failure,
    compare,
    comparison_recipes,
    default_methods,
    pick_baseline,
    read_comparison,
    summarise,
    write_comparison,
)
from icmixup.lab.comparison.statistics import MEASURES
from icmixup.lab.sweep import budget, delete_runs
from icmixup.lab.sweep.cost import slowest
from icmixup.lab.training.data import load_recipe_data
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.recipe import QUICK
from icmixup.methods import find_method

TINY = dataclasses.replace(QUICK, dataset="digits", per_class=20, epochs=1)


def make_rows(accuracies: dict[str, list[float | None]]) -> list[dict[str, object]]:
    """Rows as train returns them; None is a run without a result."""
    return [
        {"method": method, "seed": seed, "accuracy": value, **dict.fromkeys(MEASURES, 1.0)}
        for method, values in accuracies.items()
        for seed, value in enumerate(values)
        if value is not None
    ]


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
    with pytest.raises(ValueError, match="'remix' is not among the methods \\(erm, mixup\\)"):
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
    execution = Execution(out=tmp_path, data_dir=tmp_path, dataset=data)
    delete_runs(comparison_recipes(TINY, ("mixup",), (0,)), execution)
    assert len(list(tmp_path.glob("*/result.json"))) == 3


@pytest.mark.usefixtures("forked_workers")
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


def test_the_slowest_method_has_two_forwards():
    assert slowest(LONG_TAIL_METHODS) == "ic-regmixup"
    assert slowest(("erm", "mixup", "ic-mixup")) == "ic-mixup"
