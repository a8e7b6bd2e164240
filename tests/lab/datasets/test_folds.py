"""Folds of cross-validation: a stratified partition of all images, and datasets with one fold as test set."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from icmixup.lab.datasets import DataSpec, Photos, load_dataset, take_fold
from icmixup.lab.datasets.folds import fold_numbers

COUNTS = (7, 12, 5)
LABELS = torch.repeat_interleave(torch.arange(3), torch.tensor(COUNTS))[torch.randperm(24)]
SPEC = DataSpec("digits", folds=4, fold=1)


@pytest.mark.parametrize("folds", [2, 3, 5])
def test_folds_share_every_class_evenly_and_are_equally_large(folds: int) -> None:
    numbers = fold_numbers(LABELS, folds, seed=3)
    assert set(numbers.tolist()) == set(range(folds))
    for label in (0, 1, 2):
        sizes = torch.bincount(numbers[label == LABELS], minlength=folds)
        assert sizes.max() - sizes.min() <= 1
    sizes = torch.bincount(numbers)
    assert sizes.max() - sizes.min() <= 1


def test_a_seed_has_one_partition_and_another_seed_another() -> None:
    assert torch.equal(fold_numbers(LABELS, 3, 1), fold_numbers(LABELS, 3, 1))
    assert not torch.equal(fold_numbers(LABELS, 3, 1), fold_numbers(LABELS, 3, 2))


def test_every_image_is_tested_in_one_fold_and_trained_on_in_all_others() -> None:
    whole = load_dataset(replace(SPEC, fold=None), Path("nowhere"))
    assert (len(whole.train), len(whole.test)) == (1198, 599)
    folds = [take_fold(whole, replace(SPEC, fold=fold)) for fold in (1, 2, 3, 4)]
    tested = [name for fold in folds for name in fold.test.file_names]
    assert len(tested) == len(set(tested)) == 1797
    for fold in folds:
        assert not set(fold.train.file_names) & set(fold.test.file_names)
        assert len(fold.train) + len(fold.test) == 1797
        assert set(fold.test.labels.tolist()) == set(range(10))
    # A name belongs to the same image in every fold.
    pixels = {n: image for n, image in zip(folds[0].train.file_names, folds[0].train.images, strict=True)}
    for name, image in zip(folds[1].test.file_names, folds[1].test.images, strict=True):
        assert torch.equal(pixels[name], image)


def test_subsets_are_drawn_from_the_training_images_of_a_fold() -> None:
    fold = load_dataset(replace(SPEC, per_class=9), Path("nowhere"))
    assert fold.class_counts.tolist() == [9] * 10
    assert len(fold.test) == 450
    assert not set(fold.train.file_names) & set(fold.test.file_names)


def test_a_fold_is_identified_by_its_number_the_number_of_folds_and_the_seed() -> None:
    whole = load_dataset(replace(SPEC, fold=None), Path("nowhere"))
    specs = [SPEC, replace(SPEC, fold=2), replace(SPEC, folds=5), replace(SPEC, fold_seed=1)]
    prints = {take_fold(whole, spec).fingerprint for spec in (*specs, replace(SPEC, per_class=3))}
    assert len({whole.fingerprint, *prints}) == 6
    fold = take_fold(whole, SPEC)
    assert fold.fingerprint == load_dataset(SPEC, Path("elsewhere")).fingerprint
    assert len(fold.fingerprint) == len(whole.fingerprint)
    assert take_fold(fold, SPEC) is fold


def test_more_folds_than_images_of_a_class_are_an_error_with_the_numbers(tmp_path: Path) -> None:
    for name, number in (("cat", 3), ("dog", 6)):
        (tmp_path / name).mkdir()
        for k in range(number):
            Image.new("RGB", (8, 8), (40 * k, 0, 0)).save(tmp_path / name / f"{k}.png")
    message = r"--folds 4 is more than the 3 images of the smallest class, 'cat'.*--folds 3 or fewer"
    with pytest.raises(ValueError, match=message):
        load_dataset(DataSpec(str(tmp_path), folds=4, fold=1), tmp_path)
    data = load_dataset(DataSpec(str(tmp_path), folds=3, fold=1), tmp_path)
    assert (len(data.train), len(data.test)) == (6, 3)
    assert all(name.startswith(("cat/", "dog/")) for name in data.test.file_names)


def test_a_single_image_of_a_class_is_an_error_that_suggests_no_number_of_folds(tmp_path: Path) -> None:
    for part, name, number in (("train", "cat", 1), ("train", "dog", 3), ("test", "dog", 2)):
        (tmp_path / part / name).mkdir(parents=True)
        for k in range(number):
            Image.new("RGB", (8, 8), (40 * k, 0, 0)).save(tmp_path / part / name / f"{k}.png")
    message = "class 'cat' must have at least 2 images, got 1.*add images, or remove the class"
    with pytest.raises(ValueError, match=message):
        load_dataset(DataSpec(str(tmp_path), folds=2, fold=1), tmp_path)


def test_photos_are_folded_without_copying_them(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "set" / name).mkdir(parents=True)
        for k in range(4):
            Image.new("RGB", (90, 80), (60 * k, 9, 9)).save(tmp_path / "set" / name / f"{k}.png")
    spec = DataSpec(str(tmp_path / "set"), image_size=72, folds=2, fold=2)
    data = load_dataset(spec, tmp_path)
    assert isinstance(data.train.images, Photos)
    assert isinstance(data.test.images, Photos)
    assert data.train.images.store is data.test.images.store
    assert (len(data.train), len(data.test)) == (4, 4)
