"""Intervals from the predictions of real runs, and from seeds alone where predictions cannot be used."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from icmixup.lab.comparison.compare import compare, read_answers, read_comparison, write_comparison
from icmixup.lab.comparison.statistics import paired_difference, take_look
from icmixup.lab.training.data import load_recipe_data
from icmixup.lab.training.evaluate import balanced_accuracy
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.predictions import PREDICTIONS_FILE, read_predictions, write_predictions
from icmixup.lab.training.recipe import QUICK
from icmixup.lab.training.run_folder import Row

TINY = dataclasses.replace(QUICK, dataset="digits", per_class=20, epochs=2)
METHODS = ("mixup", "erm")


@pytest.fixture(scope="module")
def execution(tmp_path_factory: pytest.TempPathFactory) -> Execution:
    folder = tmp_path_factory.mktemp("runs")
    return Execution(out=folder, data_dir=folder, dataset=load_recipe_data(TINY, folder), workers=1)


@pytest.fixture(scope="module")
def rows(execution: Execution) -> tuple[Row, ...]:
    return compare(TINY, METHODS, range(3), execution=execution).rows


def test_a_comparison_counts_the_test_images_of_its_runs(execution: Execution, rows: tuple[Row, ...]):
    found = compare(TINY, METHODS, range(3), execution=execution)
    assert execution.dataset is not None
    assert f"new test images like these {len(execution.dataset.test):,}" in found.footnote
    answers, reason = read_answers(rows, execution.out)
    assert answers is not None
    assert reason == ""
    for row in rows:  # the accuracies of the table are those of the predictions
        right = answers.correct[row["method"], row["seed"]]
        assert 100 * right.mean() == pytest.approx(row["accuracy"], abs=1e-4)


def test_intervals_for_seeds_alone_are_those_of_a_paired_t_test(execution: Execution):
    seeds, both = (
        compare(TINY, METHODS, range(3), execution=execution, intervals=kind) for kind in ("seeds", "both")
    )
    narrow, wide = (next(s.difference for s in one.standings if s.method == "erm") for one in (seeds, both))
    ours, theirs = (next(s.accuracies for s in seeds.standings if s.method == m) for m in ("erm", "mixup"))
    expected = paired_difference(ours, theirs)
    assert narrow is not None
    assert wide is not None
    assert expected is not None
    assert (narrow.low, narrow.high) == pytest.approx((expected.low, expected.high))
    assert wide.mean == pytest.approx(narrow.mean, abs=1e-4)
    assert "not new test images (--intervals seeds)" in seeds.footnote
    with pytest.raises(ValueError, match="intervals"):
        compare(TINY, METHODS, range(3), execution=execution, intervals="images")


def test_methods_are_compared_in_the_balanced_accuracy_if_asked(
    execution: Execution, rows: tuple[Row, ...], tmp_path: Path
):
    found = compare(TINY, METHODS, range(3), execution=execution, measure="balanced-accuracy")
    assert found.measure == "balanced-accuracy"
    for standing in found.standings:
        own = [row for row in rows if row["method"] == standing.method]
        assert standing.accuracies == tuple(balanced_accuracy(row["class_accuracies"]) for row in own)
        assert standing.metrics["accuracy"] == tuple(row["accuracy"] for row in own)
    best, other = found.standings
    assert best.mean is not None
    assert other.mean is not None
    assert best.mean >= other.mean
    assert other.to_best is not None
    assert other.to_best.mean == pytest.approx(other.mean - best.mean, abs=1e-4)
    assert f"balanced accuracy, {best.mean:.1f} %" in found.verdict
    assert "difference in balanced accuracy to mixup" in found.footnote
    assert execution.dataset is not None
    assert f"new test images like these {len(execution.dataset.test):,}" in found.footnote
    path, _ = write_comparison(found, tmp_path)
    assert read_comparison(path) == found
    with pytest.raises(ValueError, match="measure"):
        compare(TINY, METHODS, range(3), execution=execution, measure="few")


def test_a_comparison_with_predictions_comes_back_without_them(execution: Execution, tmp_path: Path):
    found = compare(TINY, METHODS, range(3), execution=execution)
    path, _ = write_comparison(found, tmp_path)
    assert read_comparison(path) == found


def test_missing_or_other_predictions_leave_intervals_for_seeds(execution: Execution, rows: tuple[Row, ...]):
    folder = execution.out / rows[0]["folder"]
    kept = read_predictions(folder)
    try:
        write_predictions(folder, kept._replace(labels=np.roll(kept.labels, 1)))
        assert read_answers(rows, execution.out) == (None, "runs were tested on different images")
        (folder / PREDICTIONS_FILE).write_bytes(b"damaged")
        answers, reason = read_answers(rows, execution.out)
        assert answers is None
        assert str(folder / PREDICTIONS_FILE) in reason
    finally:
        write_predictions(folder, kept)
    without_folder = [{name: value for name, value in row.items() if name != "folder"} for row in rows]
    assert read_answers(without_folder, execution.out) == (None, "no predictions of test images")


def test_files_that_were_renamed_between_runs_are_the_same_images(
    execution: Execution, rows: tuple[Row, ...]
):
    folder = execution.out / rows[0]["folder"]
    kept = read_predictions(folder)
    renamed = kept._replace(file_names=tuple(f"{row}.png" for row in range(len(kept.labels))))
    try:
        write_predictions(folder, renamed)
        answers, reason = read_answers(rows, execution.out)
        assert answers is not None
        assert reason == ""
        other = [{**rows[0], "fingerprint": "0" * 12}, *rows[1:]]
        assert read_answers(other, execution.out) == (None, "runs were tested on different images")
    finally:
        write_predictions(folder, kept)


def test_seeds_that_one_method_lacks_are_left_out_of_its_pairs(execution: Execution, rows: tuple[Row, ...]):
    answers, _ = read_answers(rows, execution.out)
    fewer = [row for row in rows if (row["method"], row["seed"]) != ("erm", 1)]
    found = take_look(fewer, METHODS, range(3), answers).samples["mixup", "erm"]
    alone = take_look([row for row in rows if row["seed"] != 1], METHODS, (0, 2), answers)
    assert found == alone.samples["mixup", "erm"]
    assert found.seeds == 2
