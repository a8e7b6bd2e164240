"""Readers of the datasets that have a name: digits, CIFAR, ciFAIR. Files in, `Source` out."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from icmixup.lab.datasets.download import Archive, fetch_archive, read_pickle
from icmixup.lab.datasets.subsets import Source, Split, hold_out

PIXELS = 3 * 32 * 32
TORONTO = "https://www.cs.toronto.edu/~kriz/"
JENA = "https://github.com/cvjena/cifair/releases/download/v1.0/"
NO_TWINS = "cifar10-notwins"
TWINS_URL = "https://github.com/cvjena/cifair/tree/master/meta"
TWINS_TRAIN, TWINS_TEST = "duplicates_cifar10.csv", "duplicates_cifar10_test.csv"

Bytes = npt.NDArray[np.uint8]


class Layout(NamedTuple):
    """How a publisher lays out a dataset: its files, and where a label stands in them.

    In binary files a record is `header` bytes, the last of which is the label, then the pixels. In pickles
    (header 0) the labels are a list under the key `labels`, the class names under `names_key`.
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


# The first layout of each is the one that is downloaded. Sums are the publishers'.
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
CLASSES = {"cifar10": 10, "cifar100": 100, "cifair10": 10, "cifair100": 100}


def read_digits() -> Source:
    """Scikit-learn's digits: 1,797 grey images of 8 x 8, a third of each class held out."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.from_numpy(np.rint(found.images * (255 / 16)).astype(np.uint8))[:, None]
    names = tuple(str(name) for name in found.target_names)
    train, test = hold_out(Split(images, torch.from_numpy(found.target).long()), names, parts=3)
    return Source(train, test, names)


def read_cifar(name: str, data_dir: Path, *, download: bool = True, show_progress: bool = False) -> Source:
    """CIFAR or ciFAIR from whichever of its publisher's layouts lies in data_dir, else downloaded."""
    layout = find_layout(name, data_dir) or _bring_layout(name, data_dir, download, show_progress)
    folder = data_dir / layout.archive.folder
    names = _class_names(folder, layout, CLASSES[name])
    train = _read_split(folder, layout.train, layout, len(names))
    test = _read_split(folder, (layout.test,), layout, len(names))
    return Source(train, test, names)


def read_no_twins(data_dir: Path, *, download: bool = True, show_progress: bool = False) -> Source:
    """CIFAR-10, its test set without the images that ciFAIR lists as twins; the train set is the same.

    What stays is part of ciFAIR-10's test set too, where a new image replaces a listed one. So it stands in
    for ciFAIR-10 where those are not to be had, under its own name. The lists name images by their place in
    the publisher's files. There is no such variant of CIFAR-100: copies of it come in other orders, where a
    list would throw out the wrong images without a sign.
    """
    source = read_cifar("cifar10", data_dir, download=download, show_progress=show_progress)
    twins = read_twins(data_dir, source)
    kept = torch.ones(len(source.test), dtype=torch.bool)
    kept[twins] = False
    return source._replace(test=source.test[kept.nonzero().squeeze(1)])


def read_twins(data_dir: Path, source: Source) -> torch.Tensor:
    """Rows of the test images with a twin among train or test images, some twice: 329 images, as published.

    The publisher does not say which of two twins within the test set it replaced, so neither stays.
    """
    across = _read_pairs(find_twins(data_dir, TWINS_TRAIN), source.test, source.train)
    within = _read_pairs(find_twins(data_dir, TWINS_TEST), source.test, source.test)
    return torch.cat([across[:, 0], within.flatten()])


def find_twins(data_dir: Path, file: str) -> Path:
    """One of ciFAIR's lists, in data_dir/cifair or in data_dir."""
    places = (data_dir / "cifair" / file, data_dir / file)
    found = next((path for path in places if path.is_file()), None)
    if found is None:
        raise ValueError(
            f"{NO_TWINS} needs ciFAIR's list {file}, which is not in {places[0].parent}: "
            f"put it there from {TWINS_URL}"
        )
    return found


def _read_pairs(path: Path, first: Split, second: Split) -> torch.Tensor:
    """(P, 2) rows of images that the list calls twins, in `first` and in `second`."""
    try:
        with path.open(newline="") as file:
            pairs = [(int(row["TestID"]), int(row["TrainID"])) for row in csv.DictReader(file)]
        if not pairs:
            raise ValueError("empty")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is not a list of TestID,TrainID,...: fetch it again from {TWINS_URL}"
        ) from error
    rows = torch.tensor(pairs)
    sizes = torch.tensor([len(first), len(second)])
    fits = bool(((rows >= 0) & (rows < sizes)).all())
    # Every pair that was published shares its class; in another order one pair in ten does.
    if not fits or (first.labels[rows[:, 0]] != second.labels[rows[:, 1]]).double().mean() > 0.1:
        raise ValueError(
            f"{path} does not fit these images, whose order is not the publisher's: "
            "fetch CIFAR-10 anew with `icmixup data get cifar10`"
        )
    return rows


def find_layout(name: str, data_dir: Path) -> Layout | None:
    """The first layout of the dataset whose folder stands in data_dir."""
    there = (layout for layout in LAYOUTS[name] if (data_dir / layout.archive.folder).is_dir())
    return next(there, None)


def _bring_layout(name: str, data_dir: Path, download: bool, show_progress: bool) -> Layout:
    """Unpack an archive that someone put into data_dir, or else download the first."""
    there = [layout for layout in LAYOUTS[name] if (data_dir / layout.archive.file_name).exists()]
    layout = (there or LAYOUTS[name])[0]
    if not there and not download:
        raise ValueError(
            f"{name} is not in {data_dir}: put {layout.archive.file_name} from {layout.archive.url} there, "
            f"or let `icmixup data get {name}` bring it"
        )
    fetch_archive(layout.archive, data_dir, show_progress=show_progress)
    return layout


def _class_names(folder: Path, layout: Layout, count: int) -> tuple[str, ...]:
    """Names from the publisher's list, numbers where that list is missing."""
    path = folder / layout.names
    if not path.exists():
        return tuple(str(label) for label in range(count))
    names = path.read_text().split() if layout.header else read_pickle(path).get(layout.names_key)
    if not isinstance(names, list) or len(names) != count:
        raise ValueError(
            f"{path} does not list {count} class names: remove {folder} and fetch the dataset again"
        )
    return tuple(name.decode() if isinstance(name, bytes) else str(name) for name in names)


def _read_split(folder: Path, files: tuple[str, ...], layout: Layout, num_classes: int) -> Split:
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise ValueError(
            f"{folder} lacks {', '.join(missing)}: remove that folder and fetch the dataset again"
        )
    parts = [_read_file(folder / file, layout, num_classes) for file in files]
    images = np.concatenate([pixels for pixels, _ in parts]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([labels for _, labels in parts])
    return Split(torch.from_numpy(images), torch.from_numpy(labels))


def _read_file(path: Path, layout: Layout, num_classes: int) -> tuple[Bytes, npt.NDArray[np.int64]]:
    """(N, 3072) pixels and (N,) labels of one of the publisher's files."""
    read = _read_binary(path, layout.header) if layout.header else _read_python(path, layout.labels)
    pixels, labels = read
    if len(labels) == 0 or labels.min() < 0 or labels.max() >= num_classes:
        span = f"labels from {labels.min()} to {labels.max()}" if len(labels) else "no images"
        raise ValueError(f"{path} has {span} where 0 to {num_classes - 1} belong: fetch the dataset again")
    return pixels, labels


def _read_binary(path: Path, header: int) -> tuple[Bytes, npt.NDArray[np.int64]]:
    content = np.fromfile(path, np.uint8)
    if len(content) % (header + PIXELS):
        raise ValueError(
            f"{path} has {len(content):,} bytes, which is no whole number of {header + PIXELS}-byte images, "
            "so it is truncated: remove it and fetch the dataset again"
        )
    records = content.reshape(-1, header + PIXELS)
    return records[:, header:], records[:, header - 1].astype(np.int64)


def _read_python(path: Path, key: str) -> tuple[Bytes, npt.NDArray[np.int64]]:
    content = read_pickle(path)
    pixels, labels = content.get("data"), content.get(key)
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or labels is None:
        raise ValueError(
            f"{path} has no bytes under 'data' or nothing under {key!r}: fetch the dataset again"
        )
    numbers = np.asarray(labels, dtype=np.int64)
    if pixels.size != len(numbers) * PIXELS:
        raise ValueError(
            f"{path} has {pixels.size:,} pixel values for {len(numbers):,} labels, not {PIXELS} each: "
            "remove it and fetch the dataset again"
        )
    return pixels.reshape(-1, PIXELS), numbers
