"""The search of the recipe head: what it trains and validates on, and when it changes a value."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from icmixup.lab.datasets import Dataset, DataSpec, load_dataset
from icmixup.lab.training.recipe import HEAD

ROOT = Path(__file__).parents[2]
CLASSES, PER_CLASS = 3, 60


@pytest.fixture(scope="module", autouse=True)
def _tools() -> None:
    sys.path.insert(0, str(ROOT / "tools"))


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Features whose first column numbers the examples: training examples from 0, test examples below 0."""
    random = np.random.default_rng(0)
    labels = np.arange(CLASSES * PER_CLASS) % CLASSES
    rows = random.normal(size=(len(labels), 6)) + 3 * np.eye(CLASSES, 6)[labels]
    numbers = np.arange(len(labels))
    path = tmp_path_factory.mktemp("features") / "features.npz"
    np.savez(
        path,
        train_features=np.column_stack([numbers, rows]),
        train_labels=labels,
        test_features=np.column_stack([-1 - numbers, rows]),
        test_labels=labels,
    )
    return path


@pytest.fixture(scope="module")
def whole(features: Path) -> Dataset:
    return load_dataset(DataSpec(str(features)), Path("none"))


def numbers(data: Dataset, part: str, whole: Dataset) -> set[int]:
    """Which examples a part has: both standardisations undone."""
    column = getattr(data, part).images[:, 0].double() * data.std[0] + data.mean[0]
    return set((column * whole.std[0] + whole.mean[0]).round().long().tolist())


@pytest.mark.parametrize("imbalance", [1.0, 0.1])
def test_folds_cover_the_training_examples_once_and_are_not_trained_on(
    whole: Dataset, imbalance: float
) -> None:
    from head_recipe import FOLDS, validation_data

    held: list[int] = []
    for fold in range(FOLDS):
        data = validation_data(whole, fold, imbalance)
        train, validation = (numbers(data, part, whole) for part in ("train", "test"))
        assert not train & validation
        assert min(train) >= 0  # no test example
        held += validation
    assert sorted(held) == list(range(CLASSES * PER_CLASS))


def test_the_long_tail_is_drawn_from_the_other_folds_and_standardised_alone(whole: Dataset) -> None:
    from head_recipe import FOLDS, validation_data

    largest = PER_CLASS * (FOLDS - 1) // FOLDS
    data = validation_data(whole, 1, 0.1)
    assert data.class_counts.tolist() == [largest, int(largest * 0.1**0.5), int(largest * 0.1)]
    assert torch.bincount(data.test.labels).tolist() == [PER_CLASS // FOLDS] * CLASSES
    torch.testing.assert_close(data.train.images.mean(dim=0), torch.zeros(7), atol=1e-4, rtol=0)
    torch.testing.assert_close(data.train.images.std(dim=0, correction=0), torch.ones(7))


@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        ([[70, 72, 74], [69, 71, 73.5]], 0),  # the present value is the best
        ([[70, 72, 74], [70.1, 75, 73]], 0),  # better on average, but not in every fold
        ([[70, 72, 74], [71, 73.1, 75], [72, 74.1, 76]], 2),  # better by the same amount in every fold
        ([[70, 72, 74], [71, 73.2, 75.4]], 1),
        ([[70, 72, 74], *([[71, 73.2, 75.4]] * 8)], 0),  # the same, as the best of eight that were tried
    ],
)
def test_a_value_is_replaced_only_by_a_significantly_better_one(
    candidates: list[list[float]], chosen: int
) -> None:
    from head_recipe import choose

    assert choose(candidates)[0] == chosen


def test_every_stage_starts_with_the_value_of_the_recipe() -> None:
    from head_recipe import STAGES

    for candidates in STAGES.values():
        assert candidates[0] == {name: getattr(HEAD, name) for name in candidates[0]}
        assert len({str(settings) for settings in candidates}) == len(candidates)


def test_the_search_writes_a_row_for_every_candidate_method_fold_and_distribution(
    features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    import head_recipe

    short = {"epochs": 1, "min_steps": 0, "batch_size": 16}
    monkeypatch.setattr(head_recipe, "STAGES", {"lr": ({"lr": 1e-3, **short}, {"lr": 1e-1, **short})})
    rows = tmp_path / "rows.csv"
    args = [str(features), "--methods", "erm", "ic-mixup", "--seeds", "2", "--stages", "lr"]
    monkeypatch.setattr(sys, "argv", ["head_recipe", *args, "--out", str(tmp_path), "--rows", str(rows)])
    head_recipe.main()
    with rows.open(newline="") as file:
        found = list(csv.DictReader(file))
    kinds = {(row["lr"], row["imbalance"], row["method"], row["seed"]) for row in found}
    assert len(kinds) == len(found) == 2 * 2 * 2 * 2
    assert all(row["commit"] and row["device"] and row["torch"] for row in found)
    assert "found: lr=" in capsys.readouterr().out


def test_photos_without_weights_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import head_recipe

    monkeypatch.setattr(sys, "argv", ["head_recipe", str(tmp_path)])
    with pytest.raises(SystemExit, match="pass --weights for photos"):
        head_recipe.main()
