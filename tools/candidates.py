"""What the searches on long tails share: images to choose on, and the file of all candidates."""

from __future__ import annotations

import argparse
import csv
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from icmixup.lab.datasets import Dataset, DataSpec, Split, draw_subset, load_dataset, subset_counts
from icmixup.lab.training.definitions import Definitions
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.run_folder import Row

PER_CLASS = 50  # of the validation part
# Behind the columns of a search: where and with what a row was made.
MADE = ("minutes", "device", "torch", "commit", "date")


def hold_out_balanced(train: Split, num_classes: int, seed: int = 0) -> tuple[Split, Split]:
    """The training images without PER_CLASS of each class, and those."""
    counts = torch.full((num_classes,), PER_CLASS)
    rows = draw_subset(train.labels, counts, seed)
    kept = torch.ones(len(train), dtype=torch.bool)
    kept[rows] = False
    return train[kept.nonzero().squeeze(1)], train[rows]


def validation_data(data_dir: Path) -> Dataset:
    """CIFAR-100 with 50 training images of each class as its test set, and a long tail of the other 450."""
    whole = load_dataset(DataSpec("cifar100"), data_dir)
    train, validation = hold_out_balanced(whole.train, whole.num_classes)
    counts = subset_counts(torch.bincount(train.labels), imbalance=0.01)
    return dataclasses.replace(whole, train=train[draw_subset(train.labels, counts, 0)], test=validation)


def validation_execution(args: argparse.Namespace) -> Execution:
    """Runs on these images, in the folder and with the workers that a command names."""
    return Execution(
        out=args.out / "validation",
        data_dir=args.data_dir,
        device=args.device,
        workers=args.workers,
        dataset=validation_data(args.data_dir),
        definitions=Definitions(),  # so that workers are sent the data: by its name they would load all of it
    )


def show(row: Row) -> None:
    """Print the result of a run."""
    print(
        f"{row['model']} {row['method']} alpha {row['alpha']} seed {row['seed']}: {row['accuracy']:.2f}, "
        f"few {row['few']}",
        flush=True,
    )


def write_candidates(path: Path, columns: Sequence[str], rows: Sequence[Row]) -> None:
    """Replace the file; what a row has besides the columns is left out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
