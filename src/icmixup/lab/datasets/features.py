"""Features instead of images: an .npz file, or what a frozen network makes of images.

    train_features   (N, D) floats        test_features   (M, D)
    train_labels     (N,) integers        test_labels     (M,)
    class_names      (C,) text, optional

N training and M test examples, D features, C classes.
"""

from __future__ import annotations

import zipfile
from collections import Counter
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
LARGEST = 1e15  # of a feature: standard deviations are computed in float32
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
        with path.open("rb") as opened:
            if not zipfile.is_zipfile(opened):  # np.load takes it for a pickle, or returns an array
                raise zipfile.BadZipFile("it is not a zip archive")
            opened.seek(0)
            with np.load(opened, allow_pickle=False) as file:
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
    if (largest := float(np.abs(features).max(initial=0))) > LARGEST:
        raise ValueError(
            f"{path}: {part}_features has values up to {largest:.2g}, whose squares are not finite in "
            f"float32; scale them to {LARGEST:g} at most"
        )
    if len(labels) == 0 or labels.min() < 0:
        raise ValueError(f"{path}: {part}_labels must be 0 or more, and there must be at least one")
    return Split(torch.from_numpy(features), torch.from_numpy(labels.astype(np.int64)))


def read_names(path: Path, arrays: Arrays, train: Split, test: Split) -> tuple[str, ...]:
    """The names of the classes, numbers by default; every class needs a training example."""
    highest = int(torch.cat([train.labels, test.labels]).max())
    names = given_names(path, arrays["class_names"]) if "class_names" in arrays else ()
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


def given_names(path: Path, array: npt.NDArray[np.generic]) -> tuple[str, ...]:
    """The names in a file, each once: tables by class could not tell two of the same name apart."""
    if array.ndim != 1:
        raise ValueError(f"{path}: class_names must be (C,), one name for each class, got {array.shape}")
    if array.dtype.kind == "S":
        array = np.char.decode(array.astype(np.bytes_), "utf-8", "backslashreplace")
    names = tuple(map(str, array.tolist()))
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise ValueError(
            f"{path}: class_names has {twice[0]!r} more than once; give every class its own name"
        )
    return names


def standardise(dataset: Dataset) -> Dataset:
    """The features with mean 0 and standard deviation 1 in each column of the training set."""
    train = dataset.train.images
    assert isinstance(train, Tensor)
    mean = train.mean(dim=0)
    spread = train.std(dim=0, correction=0)
    # A constant column stays as it is. One of network features that is nearly constant, too: noise. What is
    # usual is the median, since one column of a table may be in other units than all the others.
    usual = spread[spread > 0].median() if spread.any() else spread.new_ones(())
    scale = torch.where(spread > 1e-6 * usual, spread, torch.ones_like(spread))

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
