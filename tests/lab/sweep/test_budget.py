"""--budget: the number of epochs is that which fits all runs, methods times seeds, into the time."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from icmixup.lab.datasets import load_dataset
from icmixup.lab.datasets.subsets import DataSpec, Split, hold_out, subset_counts
from icmixup.lab.sweep import budget
from icmixup.lab.sweep.budget import MARGIN, epoch_seconds, fit_epochs, parse_budget, plan_epochs
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.recipe import QUICK

RECIPE = dataclasses.replace(QUICK, dataset="digits", per_class=5, batch_size=10)


@pytest.fixture
def execution(tmp_path: Path) -> Execution:
    return Execution(out=tmp_path, data_dir=tmp_path, device="cpu")


@pytest.fixture(autouse=True)
def known_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that needs 2 s to start and 0.5 s for an epoch, without measuring it."""
    monkeypatch.setattr(budget, "measure_epoch", lambda *_: (2.0, 0.5))


@pytest.mark.parametrize(("methods", "seeds"), [(1, 1), (2, 2), (3, 4), (5, 3), (1, 6)])
@pytest.mark.parametrize("lanes", [1, 2])
def test_epochs_are_those_that_fit_methods_times_seeds_into_the_time(
    methods: int, seeds: int, lanes: int, execution: Execution
) -> None:
    names: Sequence[str] = ("erm", "mixup", "ic-mixup", "cutmix", "remix")[:methods]
    seconds = 600.0
    found = plan_epochs(RECIPE, names, seeds, seconds, dataclasses.replace(execution, concurrent=lanes))
    in_turn = -(-methods * seeds // lanes)
    # The measurement itself took next to no time here, so that the answer may only be one epoch below.
    wanted = math.floor((MARGIN * seconds / in_turn - 2.0) / 0.5)
    assert wanted - 1 <= found <= wanted


def test_all_planned_runs_end_within_the_time_and_one_more_epoch_would_not() -> None:
    for runs in (1, 2, 7, 12):
        epochs = fit_epochs(300, runs, start_up=1.5, epoch=0.7)
        assert runs * (1.5 + epochs * 0.7) <= MARGIN * 300 < runs * (1.5 + (epochs + 1) * 0.7)


def test_at_least_one_epoch_is_trained_however_short_the_time() -> None:
    assert fit_epochs(0.001, 10, start_up=5.0, epoch=3.0) == 1
    assert fit_epochs(-5, 10, start_up=5.0, epoch=3.0) == 1


def test_a_stored_answer_is_used_and_measured_again_on_request(
    execution: Execution, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = plan_epochs(RECIPE, ["erm"], 2, 100.0, execution)
    monkeypatch.setattr(budget, "measure_epoch", lambda *_: (0.0, 5.0))
    assert plan_epochs(RECIPE, ["erm"], 2, 100.0, execution) == first
    assert plan_epochs(RECIPE, ["erm"], 2, 100.0, execution, remeasure=True) < first
    assert len(json.loads((execution.out / "budgets.json").read_text())) == 1
    plan_epochs(RECIPE, ["erm"], 3, 100.0, execution)  # another question
    assert len(json.loads((execution.out / "budgets.json").read_text())) == 2


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("5m", 300), ("1h", 3600), ("1h30m", 5400), ("1h1m1s", 3661), ("1.5m", 90), (" 2M ", 120)],
)
def test_a_duration_is_read_in_hours_minutes_and_seconds(text: str, seconds: float) -> None:
    assert parse_budget(text) == seconds


def test_the_time_of_an_epoch_is_that_between_the_first_and_the_last_report() -> None:
    start_up, epoch = epoch_seconds([(3.0, 1.0), (5.0, 2.0), (9.0, 4.0)], 10.0)
    assert epoch == 2.0  # 6 s for 3 epochs
    assert start_up == 2.0  # 10 s, of which 4 epochs took 8
    assert epoch_seconds([(3.0, 1.0)], 10.0) == (0.0, 10.0)
    assert epoch_seconds([(3.0, 1.0), (4.0, 1.0)], 10.0) == (0.0, 10.0)


def split_of(counts: Sequence[int]) -> Split:
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return Split(torch.zeros(len(labels), 1, 2, 2, dtype=torch.uint8), labels)


def test_a_class_of_exactly_two_images_keeps_one_and_is_tested_on_the_other() -> None:
    train, test = hold_out(split_of([2, 9]), ["a", "b"], parts=5)
    assert torch.bincount(train.labels).tolist() == [1, 7]
    assert torch.bincount(test.labels).tolist() == [1, 2]
    with pytest.raises(ValueError, match="class 'a' must have at least 2 images, got 1"):
        hold_out(split_of([1, 9]), ["a", "b"], parts=5)


@pytest.mark.parametrize(("per_class", "allowed"), [(0, False), (1, True), (3, True), (4, False)])
def test_images_per_class_are_from_one_to_the_size_of_the_smallest_class(
    per_class: int, allowed: bool
) -> None:
    counts = torch.tensor([3, 8])
    if allowed:
        assert subset_counts(counts, per_class=per_class).tolist() == [per_class] * 2
    else:
        with pytest.raises(ValueError, match=f"per_class must be from 1 to 3, got {per_class}"):
            subset_counts(counts, per_class=per_class)


def test_one_image_per_class_is_a_dataset_of_as_many_images_as_classes(tmp_path: Path) -> None:
    data = load_dataset(DataSpec("digits", per_class=1), tmp_path)
    assert data.class_counts.tolist() == [1] * 10
    assert subset_counts(torch.tensor([1, 1]), fraction=0.01).tolist() == [1, 1]


def test_the_long_tail_ends_with_exactly_one_image_where_the_factor_allows_one() -> None:
    assert subset_counts(torch.tensor([100, 100, 100]), imbalance=0.01).tolist() == [100, 10, 1]
    with pytest.raises(ValueError, match="leaves no image"):
        subset_counts(torch.tensor([99, 99, 99]), imbalance=0.01)
