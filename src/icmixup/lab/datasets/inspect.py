"""What `icmixup data list | get | check` print about datasets, as values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from icmixup.lab.datasets import STATISTICS, Dataset, DataSpec, load_dataset, measure_statistics
from icmixup.lab.datasets.cifar import LAYOUTS, NUM_CLASSES, TEST_IMAGES, TRAIN_IMAGES, find_layout
from icmixup.lab.datasets.duplicates import count_duplicates

MEAN_TOLERANCE = 1e-4


class Listing(NamedTuple):
    """A named dataset and where it is."""

    name: str
    train: int
    test: int
    classes: int
    size: str
    where: str


class Check(NamedTuple):
    """A claim about a dataset, what was found, and whether it holds.

    `holds` is None if the claim is false for the dataset as published, which is not an error.
    """

    claim: str
    found: str
    holds: bool | None


def list_datasets(data_dir: Path) -> list[Listing]:
    """All named datasets, and whether each is in data_dir."""
    digits = Listing("digits", 1198, 599, 10, "1 x 8 x 8", "ships with scikit-learn")
    return [digits, *(_listing(name, Path(data_dir)) for name in LAYOUTS)]


def _listing(name: str, data_dir: Path) -> Listing:
    layout = find_layout(name, data_dir)
    packed = [data_dir / other.archive.file_name for other in LAYOUTS[name]]
    archive = next((path for path in packed if path.exists()), None)
    found = data_dir / layout.archive.folder if layout else archive
    where = str(found) if found else f"not in {data_dir}: icmixup data get {name}"
    sizes = (TRAIN_IMAGES, TEST_IMAGES, NUM_CLASSES[name])
    return Listing(name, *sizes, "3 x 32 x 32", where)


def get_dataset(name: str, data_dir: Path, *, download: bool = True, show_progress: bool = False) -> Dataset:
    """Load a dataset; if it is not in data_dir, it is downloaded or, without `download`, an error."""
    return load_dataset(DataSpec(name), Path(data_dir), download=download, show_progress=show_progress)


def describe_dataset(dataset: Dataset) -> list[tuple[str, str]]:
    """Rows (property, value) that describe a dataset, to print as a table."""
    counts = dataset.class_counts
    largest, smallest = int(counts.argmax()), int(counts.argmin())
    shape = " x ".join(str(side) for side in dataset.train.images.shape[1:])
    rows = [
        ("dataset", dataset.name),
        ("train images", f"{len(dataset.train):,}"),
        ("test images", f"{len(dataset.test):,}"),
        ("separated by", dataset.split_by or "given"),
        ("classes", str(dataset.num_classes)),
        *([("image files", dataset.original_size)] if dataset.original_size else []),
        ("features" if dataset.is_features else "image", shape),
        ("largest class", f"{dataset.class_names[largest]}, {int(counts[largest]):,} train images"),
        ("smallest class", f"{dataset.class_names[smallest]}, {int(counts[smallest]):,} train images"),
    ]
    if not dataset.is_features:  # of which there are as many means as features
        rows.append(("mean", " ".join(f"{value:.4f}" for value in dataset.mean)))
        rows.append(("std", " ".join(f"{value:.4f}" for value in dataset.std)))
    if dataset.skipped:
        rows.append(("files skipped", f"{len(dataset.skipped)}, first {dataset.skipped[0]}"))
    return rows


def check_dataset(dataset: Dataset) -> list[Check]:
    """Check the properties of a dataset; of a published one, also that it is complete."""
    return [*_general_checks(dataset), *(_published_checks(dataset) if dataset.name in STATISTICS else [])]


def _general_checks(dataset: Dataset) -> Iterator[Check]:
    train, test = dataset.train, dataset.test
    shapes = {tuple(split.images.shape[1:]) for split in (train, test)}
    yield Check("train and test images have the same shape", str(sorted(shapes)), len(shapes) == 1)
    for kind, split in (("train", train), ("test", test)):
        counts = torch.bincount(split.labels, minlength=dataset.num_classes)
        found = f"{int(counts.min()):,} to {int(counts.max()):,} images per class"
        complete = len(counts) == dataset.num_classes and int(counts.min()) > 0
        yield Check(f"every class has {kind} images", found, complete)
    skipped = f"{len(dataset.skipped)} could not" + (
        f", first {dataset.skipped[0]}" if dataset.skipped else ""
    )
    yield Check("every file could be read", skipped, not dataset.skipped)
    duplicates = count_duplicates(dataset)
    # CIFAR-100 as published has ten; ciFAIR was made to remove them.
    otherwise = None if dataset.name in STATISTICS else False
    yield Check(
        "no test image is identical to a train image",
        f"{duplicates.leaked} are",
        duplicates.leaked == 0 or otherwise,
    )
    conflicts = duplicates.conflicts
    yield Check(
        "no image is identical to one of another class", f"{conflicts} are", conflicts == 0 or otherwise
    )


def _published_checks(dataset: Dataset) -> Iterator[Check]:
    found = (len(dataset.train), len(dataset.test))
    complete = found == (TRAIN_IMAGES, TEST_IMAGES)
    yield Check(
        f"{TRAIN_IMAGES:,} train and {TEST_IMAGES:,} test images", f"{found[0]:,} and {found[1]:,}", complete
    )
    counts = dataset.class_counts
    equal = bool((counts == TRAIN_IMAGES // dataset.num_classes).all())
    yield Check("train classes have equal size", f"{int(counts.min()):,} to {int(counts.max()):,}", equal)
    mean, _ = measure_statistics(dataset.train.images)
    deviation = max(abs(a - b) for a, b in zip(mean, dataset.mean, strict=True))
    yield Check(
        f"means are the published ones to within {MEAN_TOLERANCE}",
        " ".join(f"{m:.5f}" for m in mean),
        deviation < MEAN_TOLERANCE,
    )
