"""Cross-validation: all images of a dataset in K folds, each of which is the test set once.

Training and test images are merged. Folds are stratified: every class is spread evenly over them. One seed
gives one partition; runs that are compared have the same.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace

import torch
from torch import Tensor

from icmixup.lab.datasets.photos import Photos
from icmixup.lab.datasets.subsets import Dataset, DataSpec, Split, split_off, take_subset


def take_fold(dataset: Dataset, spec: DataSpec) -> Dataset:
    """The dataset with fold `spec.fold` of all its images as the test set, and the others for training.

    Subsets of the spec are drawn from the training images of the fold. Mean and std stay those of the
    dataset. A dataset that already is this fold is returned as it is.
    """
    if dataset.fold == spec:
        return dataset
    assert spec.folds is not None
    assert spec.fold is not None
    assert dataset.fold is None
    images = merge(dataset.train, dataset.test)
    check_folds(images.labels, spec.folds, dataset.class_names)
    numbers = fold_numbers(images.labels, spec.folds, spec.fold_seed)
    train, test = split_off(images, numbers == spec.fold - 1)
    fold = replace(
        dataset,
        train=take_subset(train, spec, dataset.class_names),
        test=test,
        split_by=f"fold {spec.fold} of {spec.folds}",
        fold=spec,
    )
    # All that the fold depends on; hashing its pixels again for every fold and seed would take long.
    parts = json.dumps([dataset.fingerprint, asdict(replace(spec, dataset=""))])
    fold.__dict__["fingerprint"] = hashlib.blake2b(parts.encode()).hexdigest()[: len(dataset.fingerprint)]
    return fold


def merge(first: Split, second: Split) -> Split:
    """The images of both. Those that are not files are named by their number, so that each has a name."""
    if isinstance(first.images, Photos):
        assert isinstance(second.images, Photos)
        assert first.images.store is second.images.store
        images: Tensor | Photos = replace(
            first.images, rows=torch.cat([first.images.rows, second.images.rows])
        )
    else:
        assert isinstance(first.images, Tensor)
        assert isinstance(second.images, Tensor)
        images = torch.cat([first.images, second.images])
    labels = torch.cat([first.labels, second.labels])
    names = (*first.file_names, *second.file_names)
    if len(set(names)) < len(labels):
        names = tuple(f"{row:0{len(str(len(labels)))}}" for row in range(len(labels)))
    return Split(images, labels, names)


def check_folds(labels: Tensor, folds: int, class_names: tuple[str, ...]) -> None:
    """Raise a ValueError if a class has fewer images than there are folds."""
    counts = torch.bincount(labels, minlength=len(class_names))
    smallest = int(counts.argmin())
    most = int(counts[smallest])
    if most < 2:
        raise ValueError(
            f"class {class_names[smallest]!r} must have at least 2 images, got {most}, because every fold "
            "tests every class and trains on it: add images, or remove the class"
        )
    if folds > most:
        raise ValueError(
            f"--folds {folds} is more than the {most} images of the smallest class, "
            f"{class_names[smallest]!r}, and every fold tests every class; use --folds {most} or fewer, or "
            "add images"
        )


def fold_numbers(labels: Tensor, folds: int, seed: int) -> Tensor:
    """The fold of each image: (N,) labels to (N,) int64 from 0 to folds - 1.

    Images are dealt out class by class in random order, so that the sizes of folds, and the numbers of images
    of each class in them, differ by one at most.
    """
    shuffle = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    order = shuffle[labels[shuffle].argsort(stable=True)]
    numbers = torch.empty_like(labels)
    numbers[order] = torch.arange(len(labels)) % folds
    return numbers
