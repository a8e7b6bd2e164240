"""features.npz: arrays in, a standardised dataset out, and a message for every file that cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from icmixup.lab.datasets import DataSpec, load_dataset
from icmixup.lab.datasets.inspect import describe_dataset


def arrays(**changed: Any) -> dict[str, Any]:
    random = np.random.default_rng(0)
    whole = {
        "train_features": random.normal(3, 2, (60, 5)),
        "train_labels": np.arange(60) % 3,
        "test_features": random.normal(3, 2, (30, 5)).astype(np.float16),
        "test_labels": (np.arange(30) % 3).astype(np.uint8),
        "class_names": np.array(["cat", "dog", "owl"]),
    }
    return {name: value for name, value in {**whole, **changed}.items() if value is not None}


def write(path: Path, **changed: Any) -> Path:
    np.savez(path, **arrays(**changed))
    return path


def test_features_are_standardised_by_the_training_set(tmp_path: Path) -> None:
    path = write(tmp_path / "made.npz")
    data = load_dataset(DataSpec(str(path)), tmp_path)
    expected = arrays()["train_features"]
    mean, std = expected.mean(axis=0), expected.std(axis=0)
    torch.testing.assert_close(data.train.images, torch.tensor((expected - mean) / std).float())
    test = (arrays()["test_features"].astype(np.float64) - mean) / std
    torch.testing.assert_close(data.test.images, torch.tensor(test).float(), rtol=1e-4, atol=1e-4)
    assert data.is_features
    assert data.class_names == ("cat", "dog", "owl")


def test_a_constant_column_becomes_zero_and_not_nan(tmp_path: Path) -> None:
    features = arrays()["train_features"]
    features[:, 1] = 7.0
    data = load_dataset(DataSpec(str(write(tmp_path / "made.npz", train_features=features))), tmp_path)
    assert not data.train.images[:, 1].any()
    assert data.test.images.isfinite().all()


def test_a_column_in_other_units_does_not_keep_the_others_from_being_standardised(tmp_path: Path) -> None:
    given = arrays()["train_features"].copy()
    given[:, 0] *= 1e9  # for example a time in nanoseconds beside shares of one
    data = load_dataset(DataSpec(str(write(tmp_path / "made.npz", train_features=given))), tmp_path)
    spread = data.train.images.std(dim=0, correction=0)
    torch.testing.assert_close(spread, torch.ones_like(spread), rtol=1e-4, atol=0)


def test_a_description_names_the_number_of_features_and_not_the_mean_of_each(tmp_path: Path) -> None:
    path = write(tmp_path / "made.npz")
    found = dict(describe_dataset(load_dataset(DataSpec(str(path)), tmp_path)))
    assert found["features"] == "5"
    assert "mean" not in found


def test_names_of_classes_may_be_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "made.npz", class_names=np.array([b"cat", b"dog", b"emu"]))
    assert load_dataset(DataSpec(str(path)), tmp_path).class_names == ("cat", "dog", "emu")


def test_subsets_are_taken_as_of_images(tmp_path: Path) -> None:
    path = str(write(tmp_path / "made.npz"))
    assert load_dataset(DataSpec(path, per_class=4), tmp_path).class_counts.tolist() == [4, 4, 4]
    assert load_dataset(DataSpec(path, imbalance=0.25), tmp_path).class_counts.tolist() == [20, 10, 5]


def test_without_names_classes_are_numbers(tmp_path: Path) -> None:
    data = load_dataset(DataSpec(str(write(tmp_path / "made.npz", class_names=None))), tmp_path)
    assert data.class_names == ("0", "1", "2")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"test_features": np.zeros((30, 4))}, "train_features have 5 columns and test_features 4"),
        ({"test_labels": None}, r"no array test_labels \(it has .*class_names\); it needs train_features"),
        ({"train_labels": np.arange(59) % 3}, r"train_labels must be \(60,\) integers.* got \(59,\)"),
        ({"train_labels": np.arange(60) % 3 + 0.5}, r"train_labels must be \(60,\) integers.*float64"),
        ({"train_labels": np.arange(60) % 3 - 1}, "train_labels must be 0 or more"),
        (
            {"train_features": np.zeros((60, 5, 2))},
            r"train_features must be \(N, D\) numbers, got \(60, 5, 2\)",
        ),
        ({"train_features": np.full((60, 5), np.nan)}, "60 of 60 rows of train_features are not finite"),
        (
            {"train_features": np.full((60, 5), 1e300)},
            "60 of 60 rows of train_features are not finite in float32",
        ),
        ({"class_names": np.array(["cat", "dog"])}, "highest label is 2, but there are 2 class_names"),
        ({"class_names": np.array(["a", "b", "c", "d"])}, "1 of 4 classes have no training example.*'d'"),
        ({"class_names": np.array(["a", "b", None], dtype=object)}, "save class_names as text"),
        ({"class_names": np.array(["cat", "dog", "cat"])}, "class_names has 'cat' more than once"),
        ({"class_names": np.array([["a", "b"], ["c", "d"]])}, r"class_names must be \(C,\).*got \(2, 2\)"),
        ({"train_features": np.full((60, 5), -1e30)}, r"train_features has values up to 1e\+30"),
    ],
)
def test_a_file_that_cannot_be_used_is_explained(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "made.npz", **changed)
    with pytest.raises(ValueError, match=message):
        load_dataset(DataSpec(str(path)), tmp_path)


def test_a_missing_or_damaged_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no file .*nowhere\.npz"):
        load_dataset(DataSpec(str(tmp_path / "nowhere.npz")), tmp_path)
    (tmp_path / "text.npz").write_text("no zip")
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "array.npy").rename(tmp_path / "array.npz")
    for name in ("text.npz", "array.npz"):
        with pytest.raises(ValueError, match=rf"{name} is not .* zip archive\); write it with numpy\.savez"):
            load_dataset(DataSpec(str(tmp_path / name)), tmp_path)
