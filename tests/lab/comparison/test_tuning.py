"""--tune: the same number of trials for each method, on training images alone, resumable."""

from __future__ import annotations

import csv
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp

from icmixup.lab.cli import main
from icmixup.lab.cli.tuning import describe_tuning
from icmixup.lab.comparison import tuning as tuning_module
from icmixup.lab.comparison.compare import compare, comparison_name, read_comparison
from icmixup.lab.comparison.tuning import (
    ENOUGH_IMAGES,
    ROUND,
    SPANS,
    Search,
    Trial,
    count_unfinished,
    held_out_parts,
    pick_best,
    run_trials,
    tune_methods,
    tuned_values,
    write_tuning,
)
from icmixup.lab.datasets import VALIDATION_PARTS, Split, load_dataset, validation_dataset
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.predictions import read_predictions
from icmixup.lab.training.recipe import QUICK, Recipe
from icmixup.lab.training.run_folder import TRIALS_FOLDER

RECIPE = dataclasses.replace(QUICK, dataset="digits", per_class=8, epochs=2, batch_size=20, eval_every=2)
METHODS = ("erm", "mixup")


@pytest.fixture
def execution(tmp_path: Path) -> Execution:
    data = load_dataset(RECIPE.data, tmp_path)
    return Execution(out=tmp_path / "runs", data_dir=tmp_path, device="cpu", workers=1, dataset=data)


def result_times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("result.json")}


def losses(trials: Sequence[Trial]) -> list[float | None]:
    return [trial.loss for trial in trials]


def test_every_method_gets_the_same_number_of_trials_and_starts_with_the_recipe(execution: Execution) -> None:
    tuning = tune_methods(RECIPE, METHODS, 3, execution=execution)
    for method in METHODS:
        trials = [trial for trial in tuning.trials if trial.method == method]
        assert [trial.number for trial in trials] == [0, 1, 2]
        assert trials[0].recipe == dataclasses.replace(RECIPE, method=method)
        assert len({trial.recipe for trial in trials}) == 3
    assert set(tuning.trials[0].values) == {"lr", "weight_decay"}
    assert set(tuning.trials[1].values) == {"lr", "weight_decay", "alpha"}


@pytest.mark.parametrize("parts", [1, 3, None], ids=lambda parts: f"{parts or 'default'} parts")
def test_trials_see_no_test_image(parts: int | None, execution: Execution) -> None:
    tuning = tune_methods(RECIPE, ("erm",), 1, execution=execution, parts=parts)
    data = execution.dataset
    assert data is not None
    rows = tuning.trials[0].rows
    assert [row["train_images"] for row in rows] == [60] * (parts or 4)
    assert len({data.fingerprint, *(row["fingerprint"] for row in rows)}) == len(rows) + 1
    test_images = pixels(data.test)
    for part in tuning.parts:
        trained, validated = pixels(part.train), pixels(part.test)
        assert trained | validated == pixels(data.train)
        assert not trained & validated
        assert not (trained | validated) & test_images
    assert sum(len(pixels(part.test)) for part in tuning.parts) == 20 * len(rows)
    assert len(set().union(*(pixels(part.test) for part in tuning.parts))) == 20 * len(rows)  # none twice


def pixels(split: Split) -> set[bytes]:
    return {image.numpy().tobytes() for image in split.square()}


def test_results_are_means_over_classes_of_the_validation_images_of_all_parts(execution: Execution) -> None:
    recipe = dataclasses.replace(RECIPE, imbalance=0.4, batch_size=10)
    data = load_dataset(recipe.data, execution.data_dir)
    tuning = tune_methods(recipe, ("erm",), 1, execution=dataclasses.replace(execution, dataset=data))
    (trial,) = tuning.trials
    scores: list[list[np.ndarray]] = [[] for _ in range(10)]  # of the images of each class
    for part, row in zip(tuning.parts, trial.rows, strict=True):
        found = read_predictions(execution.out / TRIALS_FOLDER / row["folder"])
        for label, each in zip(found.labels.tolist(), found.scores.astype(np.float64), strict=True):
            scores[label].append(each)
        assert found.labels.tolist() == part.test.labels.tolist()
    images = [len(of_class) for of_class in scores]
    assert images == data.class_counts.tolist()
    assert max(images) > min(images)
    right = [sum(int(each.argmax()) == label for each in of_class) for label, of_class in enumerate(scores)]
    assert trial.balanced_accuracy == pytest.approx(
        100 * sum(r / n for r, n in zip(right, images, strict=True)) / 10
    )
    assert trial.accuracy == pytest.approx(100 * sum(right) / sum(images))

    def loss(log_temperature: float) -> float:
        """Of softmax(scores / T), averaged over classes."""
        scaled = [np.stack(of_class) / np.exp(log_temperature) for of_class in scores]
        return float(np.mean([(logsumexp(s, 1) - s[:, c]).mean() for c, s in enumerate(scaled)]))

    assert trial.loss == pytest.approx(minimize_scalar(loss, bounds=(-5, 5), method="bounded").fun, abs=1e-6)
    assert trial.loss < loss(0.0)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.3, 0.5, 1.0])
def test_every_training_image_is_in_one_part_and_every_class_can_be_trained_in_each(share: float) -> None:
    data = load_dataset(dataclasses.replace(RECIPE, per_class=20, imbalance=share).data, Path())
    parts = [validation_dataset(data, part) for part in range(VALIDATION_PARTS)]
    assert sum((part.test.labels.bincount(minlength=10) for part in parts), torch.zeros(10)).tolist() == (
        data.class_counts.tolist()
    )
    assert sorted(b for part in parts for b in pixels(part.test)) == sorted(pixels(data.train))
    for part in parts:
        assert int(part.class_counts.min()) > 0
        assert (part.class_counts - data.class_counts * 0.75).abs().max() <= 1
    assert len(parts[0].test.labels.unique()) == 10


def test_all_parts_are_held_out_where_one_has_few_images(execution: Execution) -> None:
    data = execution.dataset
    assert data is not None
    assert list(held_out_parts(data)) == [0, 1, 2, 3]
    enough = dataclasses.replace(data, train=data.train[torch.arange(4 * ENOUGH_IMAGES) % len(data.train)])
    assert list(held_out_parts(enough)) == [0]
    assert [len(held_out_parts(data, parts)) for parts in (1, 2, 4)] == [1, 2, 4]


@pytest.mark.parametrize(("images", "parts"), [(2, 2), (3, 3), (4, 4), (5, 4)])
def test_parts_without_images_are_left_out(images: int, parts: int, tmp_path: Path) -> None:
    """Photos of few images per class: tuning was refused, since a part of them could not be tested on."""
    recipe = dataclasses.replace(RECIPE, per_class=images, epochs=1, batch_size=10)
    data = load_dataset(recipe.data, tmp_path)
    where = Execution(out=tmp_path, data_dir=tmp_path, device="cpu", workers=1, dataset=data)
    tuning = tune_methods(recipe, ("erm",), 1, execution=where)
    assert len(tuning.parts) == len(tuning.trials[0].rows) == parts
    held_out = sorted(b for part in tuning.parts for b in pixels(part.test))
    assert held_out == sorted(pixels(data.train))  # each image once
    assert count_unfinished(recipe, ("erm",), 1, where) == (0, tuning.best)


def test_the_overview_has_the_sizes_of_all_parts(execution: Execution) -> None:
    data = load_dataset(dataclasses.replace(RECIPE, per_class=6, imbalance=0.4).data, Path())
    sizes = [len(part.test) for part in held_out_parts(data).values()]
    assert min(sizes) < max(sizes)
    line = describe_tuning(3, None, dataclasses.replace(execution, dataset=data))
    few, many = len(data.train) - max(sizes), len(data.train) - min(sizes)
    assert f"4 times {few} to {many} training images, the other {min(sizes)} to {max(sizes)} for" in line
    assert "4 times 60 training images, the other 20 for validation" in describe_tuning(3, None, execution)


def test_the_batch_of_the_recipe_fits_the_smallest_trial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """80 images are enough for batches of 64, the 60 of a trial are not."""
    args = ["compare", "digits", "--per-class", "8", "--epochs", "1", "--seeds", "1", "--methods", "erm"]
    args += ["--device", "cpu", "--workers", "1", "--out", str(tmp_path), "--no-report"]
    assert main([*args, "--tune", "1"]) == 0
    assert "instead of 64: there are only 60 to train on" in capsys.readouterr().err
    assert main([*args, "--tune", "1", "--batch-size", "64"]) == 2  # a batch that was given stays
    assert "tuning trains on 60 of 80 training images" in capsys.readouterr().err


def test_the_report_repeats_the_comparison_with_its_parts(tmp_path: Path) -> None:
    assert run(tmp_path, "--tune", "1", "--tune-parts", "1") == 0
    assert " --tune 1 --tune-parts 1<" in (tmp_path / "tuned" / "report.html").read_text()


def test_a_trial_that_is_lost_in_one_part_has_no_result_and_is_not_continued(
    execution: Execution, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss of fewer images would be compared with those of all of them."""
    trained: list[Recipe] = []

    def train_most(recipes: Sequence[Recipe], where: Execution, display: object) -> tuple[Any, Any]:
        trained.extend(recipes)
        rows, lost = run_trials(recipes, where, None)
        if where.validation == 1:
            lost = {recipe: "diverged" for recipe in rows if recipe.lr == RECIPE.lr}
        return {recipe: row for recipe, row in rows.items() if recipe not in lost}, lost

    monkeypatch.setattr(tuning_module, "run_trials", train_most)
    first, second = tune_methods(RECIPE, ("erm",), 2, execution=execution).trials
    assert (first.loss, first.rows, first.reason) == (None, (), "diverged")
    assert second.loss is not None
    assert [trained.count(one.recipe) for one in (first, second)] == [2, 4]


def test_a_second_call_trains_nothing_and_chooses_the_same(execution: Execution) -> None:
    first = tune_methods(RECIPE, METHODS, 3, execution=execution)
    before = result_times(execution.out)
    assert len(before) == 2 * 3 * 4
    assert count_unfinished(RECIPE, METHODS, 3, execution) == (0, first.best)
    again = tune_methods(RECIPE, METHODS, 3, execution=execution)
    assert again.best == first.best
    assert losses(again.trials) == losses(first.trials)
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
    assert len(result_times(execution.out)) == 4 * (ROUND + 1)


def test_chosen_values_are_used_with_all_seeds_on_all_training_images(execution: Execution) -> None:
    tuned = {"erm": {"lr": 0.02}, "mixup": {"lr": 0.1, "alpha": 0.7}}
    comparison = compare(RECIPE, METHODS, (0, 1), execution=execution, tuned=tuned)
    assert [row["train_images"] for row in comparison.rows] == [80] * 4
    used = {(row["method"], row["lr"], row["alpha"]) for row in comparison.rows}
    assert used == {("erm", 0.02, None), ("mixup", 0.1, 0.7)}
    assert comparison.recipe_of("mixup").alpha == 0.7


def trial(number: int, loss: float | None) -> Trial:
    recipe = dataclasses.replace(RECIPE, method="mixup", lr=0.05 + number)
    return Trial("mixup", number, recipe, None, loss)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "lr"),
    [
        ([0.5, 0.4, 0.45], 1.05),
        ([0.5, 0.4, 0.4], 1.05),  # the first of equals
        ([0.4, 0.4, 0.5], None),  # the recipe's own
        ([None, 2.0, None], 1.05),  # diverged trials are never chosen
        ([None, None, None], None),
    ],
)
def test_the_first_of_the_best_trials_is_chosen(given: list[float | None], lr: float | None) -> None:
    best = pick_best([trial(number, loss) for number, loss in enumerate(given)])
    assert best.get("lr") == lr


def test_values_stay_within_their_span_and_those_that_are_zero_or_unused_are_not_searched() -> None:
    search = Search(dataclasses.replace(RECIPE, method="mixup"))
    for _ in range(4):
        asked = search.ask(ROUND)
        search.tell([dataclasses.replace(one, loss=0.5) for one in asked])
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
    """If small learning rates have the lowest loss, later suggestions are smaller than the first ones."""
    search = Search(dataclasses.replace(RECIPE, method="erm"))
    asked: list[Trial] = []
    for _ in range(6):
        trials = search.ask(ROUND)
        search.tell([dataclasses.replace(one, loss=one.recipe.lr) for one in trials])
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
        assert float(chosen[0]["mean_class_nll"]) == min(float(line["mean_class_nll"]) for line in own)
        for line in own:
            assert len(folders := line["folder"].split()) == 4
            assert all((execution.out / folder / "predictions.npz").exists() for folder in folders)
            assert line["commit"]
            assert line["torch"]


FLAGS = [
    *("--per-class", "8", "--epochs", "2", "--batch-size", "20", "--seeds", "2"),
    *("--methods", "erm", "mixup", "--device", "cpu", "--workers", "1"),
]


def run(folder: Path, *flags: str) -> int:
    return main(["compare", "digits", *FLAGS, "--out", str(folder), "--name", "tuned", *flags])


@pytest.mark.usefixtures("forked_workers")
def test_trials_in_processes_have_the_results_of_trials_in_this_one(execution: Execution) -> None:
    """A worker loads the images by name, and has to hold out the same ones."""
    apart = dataclasses.replace(execution, out=execution.out.parent / "apart")
    here = tune_methods(RECIPE, METHODS, 1, execution=execution, parts=2)
    there = tune_methods(RECIPE, METHODS, 1, execution=dataclasses.replace(apart, workers=2), parts=2)
    assert losses(here.trials) == losses(there.trials)
    for one, other in zip(here.trials, there.trials, strict=True):
        assert [row["fingerprint"] for row in one.rows] == [row["fingerprint"] for row in other.rows]
    assert {row["at_once"] for row in other.rows} == {2}  # not in this process


def test_the_command_tunes_then_compares_and_a_second_one_trains_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--tune", "2") == 0
    out, err = capsys.readouterr()
    assert "tuned: lr," in out
    assert "2 trials per method, each trained on 4 times 60 training images, the other 20 for val" in err
    assert "mixup trial 2 of 2 part 4: accuracy" in err
    comparison = read_comparison(tmp_path / "tuned" / "comparison.json")
    assert set(comparison.tuned) == {"erm", "mixup"}
    for row in comparison.rows:
        assert row["lr"] == comparison.recipe_of(row["method"]).lr
    before = result_times(tmp_path)
    assert len(before) == 2 * 2 * 4 + 4
    assert run(tmp_path, "--tune", "2") == 0
    assert "all runs are finished" in capsys.readouterr().err
    assert result_times(tmp_path) == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tune", "0"], "tune must be at least 1 trial per method, got 0"),
        (["--tune", "-3"], "tune must be at least 1 trial per method, got -3"),
        (["--tune-parts", "2"], "--tune-parts 2 is a setting of --tune; add --tune 10"),
        (["--tune", "2", "--tune-parts", "5"], "--tune-parts must be from 1 to 4, got 5"),
        (["--tune", "2", "--tune-parts", "0"], "--tune-parts must be from 1 to 4, got 0"),
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
    names = {comparison_name(*given, *tuning) for tuning in ((), (5,), (10,), (10, 4))}
    assert len(names) == 4
    assert comparison_name(*given, 10, 1) == comparison_name(*given, 10)


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
    assert len(trials) == 2 * 4
    assert all(after[path] > before[path] for path in trials | tuned)
    if tuned:  # otherwise the recipe's own values were chosen, and these are the tuned runs
        assert untuned.items() <= after.items()
