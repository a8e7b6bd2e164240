"""Features instead of images: an .npz file, or what a frozen network makes of images.

    train_features   (N, D) floats        test_features   (M, D)
    train_labels     (N,) integers        test_labels     (M,)
    class_names      (C,) text, optional

N training and M test examples, D features, C classes.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from icmixup.lab.datasets.subsets import Dataset, Source, Split

FEATURES_SUFFIX = ".npz"
ARRAYS = ("train_features", "train_labels", "test_features", "test_labels")
Arrays = Mapping[str, npt.NDArray[np.generic]]


def is_features_file(name: str) -> bool:
    return name.endswith(FEATURES_SUFFIX)


def read_features(path: Path) -> Source:
    """Read and check an .npz file; nothing in it is executed."""
    if not path.is_file():
        raise ValueError(f"no file {str(path)!r}; pass an .npz file with the arrays {', '.join(ARRAYS)}")
    arrays = read_arrays(path)
    missing = [name for name in ARRAYS if name not in arrays]
    if missing:
        raise ValueError(
            f"{path} has no array {', '.join(missing)} (it has {', '.join(arrays) or 'none'}); it needs "
            f"{', '.join(ARRAYS)}, and optionally class_names"
        )
    train, test = (read_split(path, part, arrays) for part in ("train", "test"))
    widths = [int(split.images.shape[1]) for split in (train, test)]
    if widths[0] != widths[1]:
        raise ValueError(
            f"{path}: train_features have {widths[0]} columns and test_features {widths[1]}; compute both "
            "with the same network"
        )
    return Source(train, test, read_names(path, arrays, train, test))


def read_arrays(path: Path) -> Arrays:
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (zipfile.BadZipFile, ValueError, OSError, EOFError) as error:
        hint = (
            "save class_names as text, not objects" if "pickle" in str(error) else "write it with numpy.savez"
        )
        raise ValueError(f"{path} is not an .npz file of plain arrays ({error}); {hint}") from error


def read_split(path: Path, part: str, arrays: Arrays) -> Split:
    features, labels = arrays[f"{part}_features"], arrays[f"{part}_labels"]
    if features.ndim != 2 or not np.issubdtype(features.dtype, np.number) or np.iscomplexobj(features):
        raise ValueError(
            f"{path}: {part}_features must be (N, D) numbers, got {features.shape} {features.dtype}"
        )
    if labels.shape != features.shape[:1] or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"{path}: {part}_labels must be {features.shape[:1]} integers, one for each row of "
            f"{part}_features, got {labels.shape} {labels.dtype}"
        )
    with np.errstate(over="ignore"):
        features = features.astype(np.float32)
    rows = np.flatnonzero(~np.isfinite(features).all(axis=1))
    if len(rows):
        raise ValueError(
            f"{path}: {len(rows)} of {len(features)} rows of {part}_features are not finite in float32, the "
            f"first is row {rows[0]}"
        )
    if len(labels) == 0 or labels.min() < 0:
        raise ValueError(f"{path}: {part}_labels must be 0 or more, and there must be at least one")
    return Split(torch.from_numpy(features), torch.from_numpy(labels.astype(np.int64)))


def read_names(path: Path, arrays: Arrays, train: Split, test: Split) -> tuple[str, ...]:
    """The names of the classes, numbers by default; every class needs a training example."""
    highest = int(torch.cat([train.labels, test.labels]).max())
    names = tuple(map(str, arrays["class_names"].tolist())) if "class_names" in arrays else ()
    names = names or tuple(str(label) for label in range(highest + 1))
    if highest >= len(names):
        raise ValueError(f"{path}: the highest label is {highest}, but there are {len(names)} class_names")
    empty = (torch.bincount(train.labels, minlength=len(names)) == 0).nonzero().flatten().tolist()
    if empty:
        raise ValueError(
            f"{path}: {len(empty)} of {len(names)} classes have no training example, the first is "
            f"{names[empty[0]]!r}; add examples, or number the labels without gaps"
        )
    if len(names) < 2:
        raise ValueError(f"{path} has {len(names)} class; a comparison needs at least 2")
    return names


def standardise(dataset: Dataset) -> Dataset:
    """The features with mean 0 and standard deviation 1 in each column of the training set."""
    train = dataset.train.images
    assert isinstance(train, Tensor)
    mean = train.mean(dim=0)
    spread = train.std(dim=0, correction=0)
    scale = torch.where(spread > 1e-6 * spread.max(), spread, torch.ones_like(spread))  # a constant column

    def scaled(split: Split) -> Split:
        assert isinstance(split.images, Tensor)
        return replace(split, images=(split.images - mean) / scale)

    return replace(
        dataset,
        train=scaled(dataset.train),
        test=scaled(dataset.test),
        held_out=None if dataset.held_out is None else scaled(dataset.held_out),
        mean=tuple(mean.tolist()),
        std=tuple(scale.tolist()),
    )
