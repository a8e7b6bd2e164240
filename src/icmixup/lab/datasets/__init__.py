"""Datasets as tensors: one name in, a train part and a test set out.

digits                                     scikit-learn's, embedded
cifar10 cifar100 cifair10 cifair100        found in data_dir, or downloaded from their publishers
cifar10-notwins                            cifar10, its test set without the twins that ciFAIR lists
path/of/a/folder                           class/*.png, or train/ and test/ (or val/) of those
hf:owner/name  hf:path/of/a/folder         through the `datasets` library
"""

from __future__ import annotations

import difflib
from pathlib import Path

import torch
import torch.nn.functional as F

from icmixup.lab.datasets.hub import PREFIX, read_hub
from icmixup.lab.datasets.folder import read_folder
from icmixup.lab.datasets.subsets import (
    Dataset,
    Source,
    Split,
    deic_rows,
    draw_part,
    hold_out,
    measure_statistics,
    part_counts,
)
from icmixup.lab.datasets.cifar import LAYOUTS, NO_TWINS, read_cifar, read_digits, read_no_twins

__all__ = [
    "DATASETS",
    "STATISTICS",
    "Dataset",
    "Source",
    "Split",
    "deic_rows",
    "draw_part",
    "hold_out",
    "load_dataset",
    "measure_statistics",
    "part_counts",
    "read_dataset",
]

DATASETS = ("digits", *LAYOUTS)

# Mean and std of the authors' code (the paper gives none). ciFAIR's train images are CIFAR's.
_CIFAR10 = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
_CIFAR100 = ((0.50708, 0.48655, 0.44092), (0.26733, 0.25644, 0.27615))
STATISTICS = {"cifar10": _CIFAR10, "cifar100": _CIFAR100, "cifair10": _CIFAR10, "cifair100": _CIFAR100}


def load_dataset(
    name: str,
    *,
    data_dir: Path,
    fraction: float = 1.0,
    per_class: int | None = None,
    imbalance: float = 1.0,
    seed: int = 0,
    deic_split: int | None = None,
    image_size: int | None = None,
    download: bool = True,
    show_progress: bool = False,
) -> Dataset:
    """A dataset, or a part of its train images; the test set is always whole.

    `per_class` caps each class, then `fraction` keeps a share of each, then `imbalance` bends them into a
    long tail (`part_counts`). The same seed draws the same part. Mean and std are the known ones for CIFAR
    and ciFAIR, measured on the train part otherwise.

    Args:
        seed: of the part; the seed of training is another one.
        deic_split: train on the 50 images a class of this split of the DEIC benchmark, and measure mean and
            std on those (`deic_rows` parts them into 30 to train and 20 to validate on, for tuning).
        image_size: side of the square images; None is the dataset's own (see `read_folder` for files).
    """
    if image_size is not None and image_size < 1:
        raise ValueError(
            f"image_size is {image_size}; give the side of the square images in pixels, 1 or more"
        )
    source = read_dataset(
        name, data_dir, image_size=image_size, download=download, show_progress=show_progress
    )
    train = source.train
    if deic_split is not None:
        train = train[torch.cat(deic_rows(train.labels, deic_split)).sort().values]
    counts = part_counts(
        torch.bincount(train.labels, minlength=len(source.class_names)),
        per_class=per_class,
        fraction=fraction,
        imbalance=imbalance,
        class_names=source.class_names,
    )
    train = train[draw_part(train.labels, counts, seed)]
    known = STATISTICS.get("cifar10" if name == NO_TWINS else name) if deic_split is None else None
    mean, std = known or measure_statistics(train.images)
    return Dataset(name, train, source.test, source.class_names, mean, std, source.skipped)


def read_dataset(
    name: str,
    data_dir: Path,
    *,
    image_size: int | None = None,
    download: bool = True,
    show_progress: bool = False,
) -> Source:
    """All images of a dataset, as `load_dataset` finds them before it takes a part."""
    if name == "digits":
        return resize_source(read_digits(), image_size)
    if name in LAYOUTS:
        found = read_cifar(name, Path(data_dir), download=download, show_progress=show_progress)
        return resize_source(found, image_size)
    if name == NO_TWINS:
        found = read_no_twins(Path(data_dir), download=download, show_progress=show_progress)
        return resize_source(found, image_size)
    if name.startswith(PREFIX):
        return read_hub(
            name, Path(data_dir), image_size=image_size, download=download, show_progress=show_progress
        )
    if Path(name).is_dir():
        return read_folder(Path(name), image_size=image_size, show_progress=show_progress)
    raise ValueError(_unknown(name))


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, (*DATASETS, NO_TWINS), n=2, cutoff=0.5)
    guess = f" (did you mean {' or '.join(near)}?)" if near else ""
    known = ", ".join(DATASETS)
    return f"no dataset or folder {name!r}{guess}: give {known}, the path of a folder, or hf:owner/name"


def resize_source(source: Source, image_size: int | None) -> Source:
    """The same images at another size; as they are where image_size is None or their own."""
    if image_size in (None, source.train.images.shape[-1]):
        return source
    return source._replace(train=_resize(source.train, image_size), test=_resize(source.test, image_size))


def _resize(split: Split, size: int) -> Split:
    # In blocks, since the bilinear filter works on floats: CIFAR at 224 would need 30 GB at once.
    blocks = [_scale(block, size) for block in torch.split(split.images, 1024)]
    return Split(torch.cat(blocks), split.labels)


def _scale(images: torch.Tensor, size: int) -> torch.Tensor:
    scaled = F.interpolate(images.float(), size=(size, size), mode="bilinear", antialias=True)
    return scaled.round().clamp(0, 255).to(torch.uint8)
