"""What `icmixup data list | get | check` say of datasets: values here, words and tables there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from icmixup.lab.datasets import STATISTICS, Dataset, load_dataset, measure_statistics
from icmixup.lab.datasets.cifar import CLASSES, LAYOUTS, find_layout

TRAIN_IMAGES, TEST_IMAGES = 50_000, 10_000  # of CIFAR-10, CIFAR-100 and both ciFAIR
MEAN_TOLERANCE = 1e-4


class Listing(NamedTuple):
    """One known dataset and where it is."""

    name: str
    train: int
    test: int
    classes: int
    size: str
    where: str
    here: bool


class Check(NamedTuple):
    """One claim about a dataset, what was found, and whether it holds (None: it does not, as published)."""

    claim: str
    found: str
    holds: bool | None


def list_datasets(data_dir: Path) -> list[Listing]:
    """The datasets that have a name, and whether each lies in data_dir."""
    digits = Listing("digits", 1198, 599, 10, "1 x 8 x 8", "comes with scikit-learn", True)
    return [digits, *(_listing(name, Path(data_dir)) for name in LAYOUTS)]


def _listing(name: str, data_dir: Path) -> Listing:
    layout = find_layout(name, data_dir)
    packed = [data_dir / other.archive.file_name for other in LAYOUTS[name]]
    archive = next((path for path in packed if path.exists()), None)
    found = data_dir / layout.archive.folder if layout else archive
    where = str(found) if found else f"not in {data_dir}: icmixup data get {name}"
    sizes = (TRAIN_IMAGES, TEST_IMAGES, CLASSES[name])
    return Listing(name, *sizes, "3 x 32 x 32", where, found is not None)


def get_dataset(name: str, data_dir: Path, *, show_progress: bool = False) -> Dataset:
    """Bring a dataset into data_dir if it is not there, and read it once."""
    return load_dataset(name, data_dir=Path(data_dir), show_progress=show_progress)


def describe_dataset(dataset: Dataset) -> list[tuple[str, str]]:
    """Rows (what, how much) of a dataset, to print as a table."""
    counts = dataset.class_counts
    large, small = int(counts.argmax()), int(counts.argmin())
    shape = " x ".join(str(side) for side in dataset.train.images.shape[1:])
    rows = [
        ("dataset", dataset.name),
        ("train images", f"{len(dataset.train):,}"),
        ("test images", f"{len(dataset.test):,}"),
        ("classes", str(dataset.num_classes)),
        ("image", shape),
        ("largest class", f"{dataset.class_names[large]}, {int(counts[large]):,} train images"),
        ("smallest class", f"{dataset.class_names[small]}, {int(counts[small]):,} train images"),
        ("mean", " ".join(f"{value:.4f}" for value in dataset.mean)),
        ("std", " ".join(f"{value:.4f}" for value in dataset.std)),
    ]
    if dataset.skipped:
        rows.append(("files skipped", f"{len(dataset.skipped)}, first {dataset.skipped[0]}"))
    return rows


def check_dataset(name: str, data_dir: Path, *, show_progress: bool = False) -> list[Check]:
    """Read a dataset from disk, without downloading it, and test what must be true of it."""
    dataset = load_dataset(name, data_dir=Path(data_dir), download=False, show_progress=show_progress)
    return [*_general_checks(dataset), *(_published_checks(dataset) if name in STATISTICS else [])]


def _general_checks(dataset: Dataset) -> Iterator[Check]:
    train, test = dataset.train, dataset.test
    shapes = {tuple(split.images.shape[1:]) for split in (train, test)}
    yield Check("train and test images have one shape", str(sorted(shapes)), len(shapes) == 1)
    for what, split in (("train", train), ("test", test)):
        counts = torch.bincount(split.labels, minlength=dataset.num_classes)
        found = f"{int(counts.min()):,} to {int(counts.max()):,} images a class"
        whole = len(counts) == dataset.num_classes and int(counts.min()) > 0
        yield Check(f"every class has {what} images", found, whole)
    skipped = f"{len(dataset.skipped)} could not" + (
        f", first {dataset.skipped[0]}" if dataset.skipped else ""
    )
    yield Check("every file could be read", skipped, not dataset.skipped)
    shared = count_shared(dataset)
    # CIFAR-100 as published shares ten; ciFAIR was made to mend that.
    excuse = None if dataset.name in STATISTICS else False
    yield Check("no test image is a train image, bit for bit", f"{shared} are", shared == 0 or excuse)


def _published_checks(dataset: Dataset) -> Iterator[Check]:
    found = (len(dataset.train), len(dataset.test))
    whole = found == (TRAIN_IMAGES, TEST_IMAGES)
    yield Check(
        f"{TRAIN_IMAGES:,} train and {TEST_IMAGES:,} test images", f"{found[0]:,} and {found[1]:,}", whole
    )
    counts = dataset.class_counts
    even = bool((counts == TRAIN_IMAGES // dataset.num_classes).all())
    yield Check("train classes are equally large", f"{int(counts.min()):,} to {int(counts.max()):,}", even)
    mean, _ = measure_statistics(dataset.train.images)
    far = max(abs(a - b) for a, b in zip(mean, dataset.mean, strict=True))
    yield Check(
        f"means are the published ones to {MEAN_TOLERANCE}",
        " ".join(f"{m:.5f}" for m in mean),
        far < MEAN_TOLERANCE,
    )


def count_shared(dataset: Dataset) -> int:
    """Test images that are also train images, bit for bit."""
    train = {image.tobytes() for image in dataset.train.images.numpy()}
    return sum(image.tobytes() in train for image in dataset.test.images.numpy())
