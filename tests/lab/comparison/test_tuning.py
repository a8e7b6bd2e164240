"""--tune: the same number of trials for each method, on training images alone, resumable."""

from __future__ import annotations

import csv
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from icmixup.lab.cli import main
from icmixup.lab.comparison.compare import compare, comparison_name, read_comparison
from icmixup.lab.comparison.tuning import (
    ROUND,
    SPANS,
    Search,
    Trial,
    Tuner,
    count_unfinished,
    pick_best,
    tune_methods,
    tuned_values,
    write_tuning,
)
from icmixup.lab.datasets import load_dataset
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.recipe import QUICK

RECIPE = dataclasses.replace(QUICK, dataset="digits", per_class=8, epochs=2, batch_size=20, eval_every=2)
METHODS = ("erm", "mixup")


@pytest.fixture
def execution(tmp_path: Path) -> Execution:
    data = load_dataset(RECIPE.data, tmp_path)
    return Execution(out=tmp_path / "runs", data_dir=tmp_path, device="cpu", workers=1, dataset=data)


def result_times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("result.json")}


def scores(trials: Sequence[Trial]) -> list[float | None]:
    return [trial.score for trial in trials]


def test_every_method_gets_the_same_number_of_trials_and_starts_with_the_recipe(execution: Execution) -> None:
    tuning = tune_methods(RECIPE, METHODS, 3, execution=execution)
    for method in METHODS:
        trials = [trial for trial in tuning.trials if trial.method == method]
        assert [trial.number for trial in trials] == [0, 1, 2]
        assert trials[0].recipe == dataclasses.replace(RECIPE, method=method)
        assert len({trial.recipe for trial in trials}) == 3
    assert set(tuning.trials[0].values) == {"lr", "weight_decay"}
    assert set(tuning.trials[1].values) == {"lr", "weight_decay", "alpha"}
    assert (tuning.train_images, tuning.validation_images) == (60, 20)


def test_trials_see_no_test_image(execution: Execution) -> None:
    tuning = tune_methods(RECIPE, ("erm",), 1, execution=execution)
    row = tuning.trials[0].row
    assert row is not None
    assert row["train_images"] == 60
    assert execution.dataset is not None
    assert row["fingerprint"] != execution.dataset.fingerprint
    test_images = {image.numpy().tobytes() for image in execution.dataset.test.square()}
    part = Tuner(RECIPE, ("erm",), 1, execution).part
    seen = {image.numpy().tobytes() for split in (part.train, part.test) for image in split.square()}
    assert len(seen) == 80
    assert not seen & test_images


def test_a_second_call_trains_nothing_and_chooses_the_same(execution: Execution) -> None:
    first = tune_methods(RECIPE, METHODS, 3, execution=execution)
    before = result_times(execution.out)
    assert len(before) == 6
    assert count_unfinished(RECIPE, METHODS, 3, execution) == (0, first.best)
    again = tune_methods(RECIPE, METHODS, 3, execution=execution)
    assert again.best == first.best
    assert scores(again.trials) == scores(first.trials)
    assert result_times(execution.out) == before


def test_an_interrupted_tuning_trains_only_what_is_missing(execution: Execution) -> None:
    whole = tune_methods(RECIPE, ("mixup",), 3, execution=execution)
    lost = next((execution.out / "trials").rglob("result.json"))
    kept = {path: time for path, time in result_times(execution.out).items() if path != lost}
    lost.unlink()
    assert count_unfinished(RECIPE, ("mixup",), 3, execution) == (1, None)
    assert tune_methods(RECIPE, ("mixup",), 3, execution=execution).best == whole.best
    assert kept.items() <= result_times(execution.out).items()


def test_more_trials_continue_the_search(execution: Execution) -> None:
    few = tune_methods(RECIPE, ("mixup",), 3, execution=execution)
    before = result_times(execution.out)
    more = tune_methods(RECIPE, ("mixup",), ROUND + 1, execution=execution)
    assert [trial.recipe for trial in more.trials[:3]] == [trial.recipe for trial in few.trials]
    assert before.items() <= result_times(execution.out).items()
    assert len(result_times(execution.out)) == ROUND + 1


def test_chosen_values_are_used_with_all_seeds_on_all_training_images(execution: Execution) -> None:
    tuned = {"erm": {"lr": 0.02}, "mixup": {"lr": 0.1, "alpha": 0.7}}
    comparison = compare(RECIPE, METHODS, (0, 1), execution=execution, tuned=tuned)
    assert [row["train_images"] for row in comparison.rows] == [80] * 4
    used = {(row["method"], row["lr"], row["alpha"]) for row in comparison.rows}
    assert used == {("erm", 0.02, None), ("mixup", 0.1, 0.7)}
    assert comparison.recipe_of("mixup").alpha == 0.7


def trial(number: int, score: float | None) -> Trial:
    recipe = dataclasses.replace(RECIPE, method="mixup", lr=0.05 + number)
    return Trial("mixup", number, recipe, None, score)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "lr"),
    [
        ([50.0, 60.0, 55.0], 1.05),
        ([50.0, 60.0, 60.0], 1.05),  # the first of equals
        ([60.0, 60.0, 50.0], None),  # the recipe's own
        ([None, 20.0, None], 1.05),  # diverged trials are never chosen
        ([None, None, None], None),
    ],
)
def test_the_first_of_the_best_trials_is_chosen(given: list[float | None], lr: float | None) -> None:
    best = pick_best([trial(number, score) for number, score in enumerate(given)])
    assert best.get("lr") == lr


def test_values_stay_within_their_span_and_those_that_are_zero_or_unused_are_not_searched() -> None:
    search = Search(dataclasses.replace(RECIPE, method="mixup"))
    for _ in range(4):
        asked = search.ask(ROUND)
        search.tell([dataclasses.replace(one, score=50.0) for one in asked])
        for one in asked:
            for name, default in tuned_values(search.recipe).items():
                factor = one.values[name] / default
                assert 0.99 / SPANS[name] <= factor <= 1.01 * SPANS[name]
    without = dataclasses.replace(RECIPE, method="erm", weight_decay=0.0)
    assert tuned_values(without) == {"lr": RECIPE.lr}


def test_logit_adjustment_is_tuned_in_the_methods_that_adjust_and_starts_with_the_strength_given() -> None:
    def searched(method: str, tau: float | None = None) -> dict[str, float]:
        found = tuned_values(dataclasses.replace(RECIPE, method=method, adjust_tau=tau))
        return {name: value for name, value in found.items() if name not in ("lr", "weight_decay")}

    assert searched("balanced") == {"adjust_tau": 1.0}
    assert searched("balanced", 1.5) == {"adjust_tau": 1.5}
    assert searched("balanced-ic-regmixup") == {"alpha": 1.0, "adjust_tau": 1.0}
    assert searched("ic-mixup", 1.5) == {"alpha": 0.2}
    assert searched("balanced", 0.0) == {}


def test_the_table_has_the_tau_that_was_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--tune", "3", "--methods", "erm", "balanced", "--imbalance", "0.5") == 0
    out = capsys.readouterr().out
    comparison = read_comparison(tmp_path / "tuned" / "comparison.json")
    recipe = comparison.recipe_of("balanced")
    tau = recipe.method_at(0).adjust_tau
    assert "decay, alpha, tau" in out
    assert re.search(rf"{recipe.lr:.3g} {recipe.weight_decay:.3g} . {tau:.3g}", out)
    assert {row["adjust_tau"] for row in comparison.rows if row["method"] == "erm"} == {None}
    with (tmp_path / "tuned" / "tuning.csv").open() as file:
        tried = {line["adjust_tau"] for line in csv.DictReader(file) if line["method"] == "balanced"}
    assert len(tried) == 3


def test_the_search_uses_its_results() -> None:
    """If only small learning rates score, later suggestions are smaller than those of the first rounds."""
    search = Search(dataclasses.replace(RECIPE, method="erm"))
    asked: list[Trial] = []
    for _ in range(6):
        trials = search.ask(ROUND)
        search.tell([dataclasses.replace(one, score=1 / one.recipe.lr) for one in trials])
        asked += trials
    late = sorted(one.recipe.lr for one in asked[-10:])[5]
    early = sorted(one.recipe.lr for one in asked[1:10])[4]
    assert late < early / 2


def test_the_file_lists_every_trial_and_marks_one_per_method(execution: Execution, tmp_path: Path) -> None:
    tuning = tune_methods(RECIPE, METHODS, 2, execution=execution)
    with write_tuning(tuning, tmp_path).open() as file:
        lines = list(csv.DictReader(file))
    assert [line["method"] for line in lines] == ["erm", "erm", "mixup", "mixup"]
    for method in METHODS:
        own = [line for line in lines if line["method"] == method]
        chosen = [line for line in own if line["chosen"] == "True"]
        assert len(chosen) == 1
        assert float(chosen[0]["mean_class_accuracy"]) == max(
            float(line["mean_class_accuracy"]) for line in own
        )
        for line in own:
            assert (execution.out / line["folder"] / "predictions.npz").exists()
            assert line["commit"]
            assert line["torch"]


FLAGS = [
    *("--per-class", "8", "--epochs", "2", "--batch-size", "20", "--seeds", "2"),
    *("--methods", "erm", "mixup", "--device", "cpu", "--workers", "1"),
]


def run(folder: Path, *flags: str) -> int:
    return main(["compare", "digits", *FLAGS, "--out", str(folder), "--name", "tuned", *flags])


def test_trials_in_processes_have_the_results_of_trials_in_this_one(execution: Execution) -> None:
    """A worker loads the images by name, and has to hold out the same ones."""
    apart = dataclasses.replace(execution, out=execution.out.parent / "apart")
    here = tune_methods(RECIPE, METHODS, 1, execution=execution)
    tune_methods(RECIPE, METHODS[:1], 1, execution=apart)  # so that one process is started, not two
    there = tune_methods(RECIPE, METHODS, 1, execution=dataclasses.replace(apart, workers=2))
    assert scores(here.trials) == scores(there.trials)
    for one, other in zip(here.trials, there.trials, strict=True):
        assert one.row is not None
        assert other.row is not None
        assert one.row["fingerprint"] == other.row["fingerprint"]
    assert other.row["at_once"] == 2  # not in this process


def test_the_command_tunes_then_compares_and_a_second_one_trains_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--tune", "2") == 0
    out, err = capsys.readouterr()
    assert "tuned: lr," in out
    assert "2 trials per method, on 60 training images and 20 for validation" in err
    assert "mixup trial 2 of 2: accuracy" in err
    comparison = read_comparison(tmp_path / "tuned" / "comparison.json")
    assert set(comparison.tuned) == {"erm", "mixup"}
    for row in comparison.rows:
        assert row["lr"] == comparison.recipe_of(row["method"]).lr
    before = result_times(tmp_path)
    assert len(before) == 8
    assert run(tmp_path, "--tune", "2") == 0
    assert "all runs are finished" in capsys.readouterr().err
    assert result_times(tmp_path) == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tune", "0"], "tune must be at least 1 trial per method, got 0"),
        (["--tune", "-3"], "tune must be at least 1 trial per method, got -3"),
        (["--tune", "2", "--budget", "5m"], "--tune 2 and --budget 5m cannot be combined"),
        (["--tune", "2", "--folds", "3"], "--tune 2 and --folds 3 cannot be combined"),
        (
            ["--tune", "2", "--imbalance", "0.125"],
            "3 of 10 classes empty, .* image: '7', '8', '9'",
        ),
        (
            ["--tune", "2", "--batch-size", "70"],
            "tuning trains on 60 of 80 training images, and validates on 20",
        ),
    ],
)
def test_numbers_that_cannot_be_tuned_are_refused(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, *flags) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not list(tmp_path.rglob("result.json"))


def test_the_name_of_a_comparison_depends_on_tuning() -> None:
    given: tuple[Any, ...] = (RECIPE, "quick", METHODS, (0, 1), "mixup", "0" * 12)
    names = {comparison_name(*given), comparison_name(*given, 5), comparison_name(*given, 10)}
    assert len(names) == 3


def test_starting_over_deletes_trials_and_tuned_runs_but_no_others(tmp_path: Path) -> None:
    assert run(tmp_path, "--seeds", "1", "--methods", "mixup", "--name", "untuned") == 0
    untuned = result_times(tmp_path)
    assert run(tmp_path, "--seeds", "1", "--methods", "mixup", "--tune", "2") == 0
    before = result_times(tmp_path)
    assert run(tmp_path, "--seeds", "1", "--methods", "mixup", "--tune", "2", "--fresh") == 0
    after = result_times(tmp_path)
    assert after.keys() == before.keys()
    trials = {path for path in after if "trials" in path.parts}
    tuned = {path for path in after if path not in trials and path not in untuned}
    assert len(trials) == 2
    assert all(after[path] > before[path] for path in trials | tuned)
    if tuned:  # otherwise the recipe's own values were chosen, and these are the tuned runs
        assert untuned.items() <= after.items()
