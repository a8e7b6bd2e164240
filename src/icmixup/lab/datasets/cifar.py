"""CIFAR and ciFAIR, in every file layout of their publishers."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from icmixup.lab.datasets.download import Archive, fetch_archive
from icmixup.lab.datasets.pickles import read_pickle
from icmixup.lab.datasets.subsets import Source, Split

PIXELS = 3 * 32 * 32
TRAIN_IMAGES, TEST_IMAGES = 50_000, 10_000  # of CIFAR-10, CIFAR-100 and both ciFAIR datasets
TORONTO = "https://www.cs.toronto.edu/~kriz/"
JENA = "https://github.com/cvjena/cifair/releases/download/v1.0/"
NO_TWINS = "cifar10-notwins"
TWINS_URL = "https://github.com/cvjena/cifair/tree/master/meta"
TWINS_TRAIN, TWINS_TEST = "duplicates_cifar10.csv", "duplicates_cifar10_test.csv"

Bytes = npt.NDArray[np.uint8]


class Layout(NamedTuple):
    """File names and record format of one published version of a dataset.

    In binary files a record is `header` bytes, the last of which is the label, followed by the pixels. In
    pickles (header 0) the labels are a list under the key `labels`, the class names under `names_key`.
    """

    archive: Archive
    train: tuple[str, ...]
    test: str
    names: str
    header: int = 0
    labels: str = ""
    names_key: str = ""


BATCHES = tuple(f"data_batch_{k}" for k in range(1, 6))


def _pickles10(archive: Archive) -> Layout:
    return Layout(archive, BATCHES, "test_batch", "batches.meta", labels="labels", names_key="label_names")


def _pickles100(archive: Archive) -> Layout:
    return Layout(archive, ("train",), "test", "meta", labels="fine_labels", names_key="fine_label_names")


# The first layout of each dataset is the one that is downloaded. MD5 sums are the publishers'.
LAYOUTS = {
    "cifar10": (
        Layout(
            Archive(
                TORONTO + "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", "cifar-10-batches-bin"
            ),
            tuple(f"{name}.bin" for name in BATCHES),
            "test_batch.bin",
            "batches.meta.txt",
            header=1,
        ),
        _pickles10(
            Archive(
                TORONTO + "cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a", "cifar-10-batches-py"
            )
        ),
    ),
    "cifar100": (
        Layout(
            Archive(
                TORONTO + "cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8", "cifar-100-binary"
            ),
            ("train.bin",),
            "test.bin",
            "fine_label_names.txt",
            header=2,
        ),
        _pickles100(
            Archive(
                TORONTO + "cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85", "cifar-100-python"
            )
        ),
    ),
    "cifair10": (
        _pickles10(Archive(JENA + "ciFAIR-10.zip", "ca08fd390f0839693d3fc45c4e49585f", "ciFAIR-10")),
    ),
    "cifair100": (
        _pickles100(Archive(JENA + "ciFAIR-100.zip", "ddc236ab4b12eeb8b20b952614861a33", "ciFAIR-100")),
    ),
}
NUM_CLASSES = {"cifar10": 10, "cifar100": 100, "cifair10": 10, "cifair100": 100}


def read_cifar(name: str, data_dir: Path, *, download: bool = True, show_progress: bool = False) -> Source:
    """Read CIFAR or ciFAIR from any of its published layouts in data_dir; download it if there is none."""
    layout = find_layout(name, data_dir) or _fetch_layout(name, data_dir, download, show_progress)
    folder = data_dir / layout.archive.folder
    names = _read_class_names(folder, layout, NUM_CLASSES[name])
    train = _read_split(folder, layout.train, layout, len(names))
    test = _read_split(folder, (layout.test,), layout, len(names))
    return Source(train, test, names)


def read_no_twins(data_dir: Path, *, download: bool = True, show_progress: bool = False) -> Source:
    """Read CIFAR-10 without the test images that ciFAIR lists as duplicates; the training set is unchanged.

    ciFAIR-10 replaces the listed images by new ones; all others are in its test set too. So this dataset is
    a substitute for ciFAIR-10 where the new images are not available, under a name of its own. The lists
    refer to images by their index in the publisher's files. There is no such variant of CIFAR-100, because
    copies of it are ordered differently: the wrong images would be removed without any error.
    """
    source = read_cifar("cifar10", data_dir, download=download, show_progress=show_progress)
    kept = torch.ones(len(source.test), dtype=torch.bool)
    kept[read_twins(data_dir, source)] = False
    return source._replace(test=source.test[kept.nonzero().squeeze(1)])


def read_twins(data_dir: Path, source: Source) -> torch.Tensor:
    """Rows of the test images that have a duplicate among the training or test images (329 as published).

    Rows may repeat. The publisher does not say which of two duplicates within the test set was replaced, so
    both are listed.
    """
    across = _read_pairs(find_twins(data_dir, TWINS_TRAIN), source.test, source.train)
    within = _read_pairs(find_twins(data_dir, TWINS_TEST), source.test, source.test)
    return torch.cat([across[:, 0], within.flatten()])


def find_twins(data_dir: Path, file: str) -> Path:
    """Path of one of ciFAIR's lists of duplicates, in data_dir/cifair or in data_dir."""
    candidates = (data_dir / "cifair" / file, data_dir / file)
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        raise ValueError(
            f"{NO_TWINS} needs ciFAIR's list {file}, which is not in {candidates[0].parent}: "
            f"download it from {TWINS_URL} and save it there"
        )
    return found


def _read_pairs(path: Path, first: Split, second: Split) -> torch.Tensor:
    """(P, 2) rows of the P pairs of duplicates in a list: of `first`, and of `second`."""
    try:
        with path.open(newline="") as file:
            pairs = [(int(row["TestID"]), int(row["TrainID"])) for row in csv.DictReader(file)]
        if not pairs:
            raise ValueError("empty")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} must be a CSV file with columns TestID and TrainID: download it again from {TWINS_URL}"
        ) from error
    rows = torch.tensor(pairs)
    sizes = torch.tensor([len(first), len(second)])
    in_range = bool(((rows >= 0) & (rows < sizes)).all())
    # The images of each published pair have the same class; in another order one pair in ten does.
    if not in_range or (first.labels[rows[:, 0]] != second.labels[rows[:, 1]]).double().mean() > 0.1:
        raise ValueError(
            f"{path} does not match the CIFAR-10 files, which are not in the publisher's order: "
            "remove them and run `icmixup data get cifar10`"
        )
    return rows


def find_layout(name: str, data_dir: Path) -> Layout | None:
    """First layout of the dataset whose folder is in data_dir, None if there is none."""
    found = (layout for layout in LAYOUTS[name] if (data_dir / layout.archive.folder).is_dir())
    return next(found, None)


def _fetch_layout(name: str, data_dir: Path, download: bool, show_progress: bool) -> Layout:
    """Unpack an archive of the dataset that is in data_dir, else download the first."""
    found = [layout for layout in LAYOUTS[name] if (data_dir / layout.archive.file_name).exists()]
    layout = (found or LAYOUTS[name])[0]
    if not found and not download:
        raise ValueError(
            f"{name} is not in {data_dir}: run `icmixup data get {name}`, or download {layout.archive.url} "
            "and save it there"
        )
    fetch_archive(layout.archive, data_dir, show_progress=show_progress)
    return layout


def _read_class_names(folder: Path, layout: Layout, num_classes: int) -> tuple[str, ...]:
    """Class names from the publisher's list; numbers if that list is missing."""
    path = folder / layout.names
    if not path.exists():
        return tuple(str(label) for label in range(num_classes))
    names = path.read_text().split() if layout.header else read_pickle(path).get(layout.names_key)
    if not isinstance(names, list) or len(names) != num_classes or not all(map(_is_text, names)):
        raise ValueError(
            f"{path} does not list {num_classes} class names: remove {folder} and run the same command again"
        )
    return tuple(name.decode("latin1") if isinstance(name, bytes) else str(name) for name in names)


def _is_text(name: object) -> bool:
    return isinstance(name, str | bytes)


def _read_split(folder: Path, files: tuple[str, ...], layout: Layout, num_classes: int) -> Split:
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise ValueError(
            f"{folder} has no {', '.join(missing)}: remove that folder and run the same command again"
        )
    parts = [_read_file(folder / file, layout, num_classes) for file in files]
    images = np.concatenate([pixels for pixels, _ in parts]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([labels for _, labels in parts])
    return Split(torch.from_numpy(images), torch.from_numpy(labels))


def _read_file(path: Path, layout: Layout, num_classes: int) -> tuple[Bytes, npt.NDArray[np.int64]]:
    """(N, 3072) pixels and (N,) labels of one file."""
    found = _read_binary(path, layout.header) if layout.header else _read_pickled(path, layout.labels)
    pixels, labels = found
    if len(labels) == 0 or labels.min() < 0 or labels.max() >= num_classes:
        content = f"labels from {labels.min()} to {labels.max()}" if len(labels) else "no images"
        raise ValueError(
            f"{path} has {content}, expected labels from 0 to {num_classes - 1}: "
            f"remove {path.parent} and run the same command again"
        )
    return pixels, labels


def _read_binary(path: Path, header: int) -> tuple[Bytes, npt.NDArray[np.int64]]:
    content = np.fromfile(path, np.uint8)
    if len(content) % (header + PIXELS):
        raise ValueError(
            f"{path} is truncated: its {len(content):,} bytes are not a multiple of {header + PIXELS}, "
            f"the size of a record; remove {path.parent} and run the same command again"
        )
    records = content.reshape(-1, header + PIXELS)
    return records[:, header:], records[:, header - 1].astype(np.int64)


def _read_pickled(path: Path, key: str) -> tuple[Bytes, npt.NDArray[np.int64]]:
    content = read_pickle(path)
    pixels, labels = content.get("data"), content.get(key)
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or labels is None:
        raise ValueError(
            f"{path} must have a uint8 array under 'data' and labels under {key!r}: "
            f"remove {path.parent} and run the same command again"
        )
    numbers = _label_array(path, labels)
    if pixels.size != len(numbers) * PIXELS:
        raise ValueError(
            f"{path} has {pixels.size:,} pixel values for {len(numbers):,} labels, expected {PIXELS} each: "
            f"remove {path.parent} and run the same command again"
        )
    return pixels.reshape(-1, PIXELS), numbers


def _label_array(path: Path, labels: object) -> npt.NDArray[np.int64]:
    """(N,) labels from a list or an array of integers; other numbers are refused, not truncated."""
    if isinstance(labels, np.ndarray) and labels.ndim == 1 and labels.dtype.kind in "iu":
        labels = labels.tolist()
    if not isinstance(labels, list) or not all(type(label) is int and abs(label) < 2**31 for label in labels):
        raise ValueError(
            f"{path} must have a list of integers as labels: "
            f"remove {path.parent} and run the same command again"
        )
    return np.array(labels, dtype=np.int64)
