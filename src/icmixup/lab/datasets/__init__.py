"""Datasets as tensors: `load_dataset` turns a `DataSpec` into training and test images.

A dataset is named by one of these:

    digits                                 ships with scikit-learn
    cifar10 cifar100 cifair10 cifair100    read from data_dir, or downloaded from the publisher
    cifar10-notwins                        cifar10 without the test images that ciFAIR lists as duplicates
    path/to/features.npz                   features instead of images, see `icmixup.lab.datasets.features`
    path/to/folder                         class/*.png, or train/ and test/ (or val/) with class folders
    hf:owner/name  hf:path/to/folder       through the `datasets` library of Hugging Face
"""

from __future__ import annotations

import difflib
import os
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from icmixup.lab.datasets.cache import cache_folder
from icmixup.lab.datasets.cifar import LAYOUTS, NO_TWINS, read_cifar, read_no_twins
from icmixup.lab.datasets.digits import read_digits
from icmixup.lab.datasets.examples import Examples
from icmixup.lab.datasets.features import is_features_file, read_features, standardise
from icmixup.lab.datasets.folder import (
    LARGEST_OWN_SIZE,
    ReadOptions,
    choose_size,
    list_folder,
    read_folder,
    sample_shapes,
    typical_side,
)
from icmixup.lab.datasets.folds import take_fold
from icmixup.lab.datasets.hub import PREFIX, list_hub, read_hub
from icmixup.lab.datasets.photos import Photos
from icmixup.lab.datasets.preprocessing import Preprocessing
from icmixup.lab.datasets.subsets import (
    VALIDATION_PARTS,
    Dataset,
    DataSpec,
    Source,
    Split,
    deic_rows,
    draw_ldam_subset,
    draw_subset,
    hold_out,
    keep_out,
    measure_statistics,
    subset_counts,
    take_subset,
    validation_dataset,
)

__all__ = [
    "DATASETS",
    "STATISTICS",
    "VALIDATION_PARTS",
    "DataSpec",
    "Dataset",
    "Examples",
    "Photos",
    "Preprocessing",
    "Source",
    "Split",
    "choose_image_size",
    "deic_rows",
    "draw_ldam_subset",
    "draw_subset",
    "hold_out",
    "is_named",
    "keep_out",
    "load_dataset",
    "measure_statistics",
    "read_dataset",
    "subset_counts",
    "take_fold",
    "validation_dataset",
]

DATASETS = ("digits", *LAYOUTS)

BLOCK = 1024  # images that are resized at a time
# Mean and std of the authors' code (the paper gives none). ciFAIR's training images are CIFAR's.
_CIFAR10 = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
_CIFAR100 = ((0.50708, 0.48655, 0.44092), (0.26733, 0.25644, 0.27615))
STATISTICS = {"cifar10": _CIFAR10, "cifar100": _CIFAR100, "cifair10": _CIFAR10, "cifair100": _CIFAR100}


def load_dataset(
    spec: DataSpec,
    data_dir: Path,
    *,
    preprocessing: Preprocessing | None = None,
    download: bool = True,
    show_progress: bool = False,
) -> Dataset:
    """Load the images that `spec` describes: a subset of the training images and the whole test set.

    With `spec.folds`, all images are loaded, and `spec.fold` of them is the test set.

    Mean and std are the usual constants for CIFAR and ciFAIR. They are measured on the training subset for
    other datasets and for the splits of the DEIC benchmark. Pretrained weights have their own.

    Args:
        spec: dataset and subset.
        data_dir: folder of the named datasets; downloads and decoded photos are stored there.
        preprocessing: of pretrained weights; its size replaces that of the spec.
        download: whether a dataset that is not in data_dir may be downloaded.
        show_progress: show progress bars on stderr.
    """
    source = read_dataset(
        spec.dataset,
        data_dir,
        image_size=spec.image_size,
        preprocessing=preprocessing,
        download=download,
        show_progress=show_progress,
    )
    size = spec.image_size if preprocessing is None else preprocessing.image_size
    if spec.folds is not None:  # subsets are drawn from the training images of a fold
        source = resize_source(source, size)
        whole = make_dataset(spec, source.train, source, preprocessing)
        return whole if spec.fold is None else take_fold(whole, spec)
    train = source.train
    if spec.split is not None:
        train = train[deic_rows(train.labels, spec.split)]
    # Only what was drawn is resized: all images of CIFAR at 224 pixels take 9 GB.
    drawn = source._replace(train=take_subset(train, spec, source.class_names))
    source = resize_source(drawn, size)
    train, held = source.train, None
    if spec.held_out:
        train, held = keep_out(train, len(source.class_names), spec.held_out)
    return make_dataset(spec, train, source, preprocessing, held)


def make_dataset(
    spec: DataSpec,
    train: Split,
    source: Source,
    preprocessing: Preprocessing | None,
    held: Split | None = None,
) -> Dataset:
    """Training images, those held out of them, and the test set of a source, with constants to normalise."""
    if is_features_file(spec.dataset):
        whole = Dataset(spec.dataset, train, source.test, source.class_names, (), (), held_out=held)
        return standardise(whole)
    if preprocessing is not None:
        channels = int(train.images.shape[1])
        mean, std = (fit_channels(values, channels) for values in (preprocessing.mean, preprocessing.std))
    else:
        mean, std = _known_statistics(spec) or measure_statistics(train.images)
    about = (source.skipped, source.split_by, source.original_size)
    return Dataset(spec.dataset, train, source.test, source.class_names, mean, std, *about, held_out=held)


def fit_channels(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    """Constants of pretrained weights for that many channels: grey images get their mean, as the filters of
    the first layer are summed for them."""
    return values if len(values) == channels else (sum(values) / len(values),) * channels


def _known_statistics(spec: DataSpec) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    if spec.split is not None:
        return None
    return STATISTICS.get("cifar10" if spec.dataset == NO_TWINS else spec.dataset)


def read_dataset(
    name: str,
    data_dir: Path,
    *,
    image_size: int | None = None,
    preprocessing: Preprocessing | None = None,
    download: bool = True,
    show_progress: bool = False,
) -> Source:
    """Read all images of a dataset, before `load_dataset` takes a subset of them.

    Args:
        image_size: side of the square images in pixels, which folders and datasets of the hub are read with;
            None keeps the size of small images, and chooses one for photos (see `choose_image_size`).
        preprocessing: of pretrained weights; its size replaces image_size.
    """
    if image_size is not None and image_size < 1:
        raise ValueError(f"image_size must be a number of pixels, 1 or more, got {image_size}")
    if is_features_file(name):
        return read_features(Path(name))
    data_dir = Path(data_dir)
    on_gpu = torch.cuda.is_available()
    options = ReadOptions(cache_folder(data_dir), image_size, preprocessing, on_gpu, show_progress)
    if name.startswith(PREFIX):
        return read_hub(name, data_dir, options, download=download)
    if not is_named(name) and name.strip() and Path(name).is_dir():
        return read_folder(Path(name), options)
    return _read_named(name, data_dir, download=download, show_progress=show_progress)


def is_named(name: str) -> bool:
    """Whether the dataset is one of those with a name of their own, not a folder or hf:owner/name."""
    return name in (*DATASETS, NO_TWINS)


def _read_named(name: str, data_dir: Path, *, download: bool, show_progress: bool) -> Source:
    if name == "digits":
        return read_digits()
    if name in LAYOUTS:
        return read_cifar(name, data_dir, download=download, show_progress=show_progress)
    if name == NO_TWINS:
        return read_no_twins(data_dir, download=download, show_progress=show_progress)
    raise ValueError(_describe_unknown(name))


def choose_image_size(name: str, data_dir: Path, *, on_gpu: bool) -> int | None:
    """The size that suits a folder or hub dataset and the device; None for images with one small size."""
    if is_named(name) or not (name.startswith(PREFIX) or Path(name).is_dir()):
        return None
    listed = list_hub(name, Path(data_dir)) if name.startswith(PREFIX) else list_folder(Path(name))
    shapes = sample_shapes([*listed.train, *listed.test])
    if not shapes:  # read_source names the files
        return None
    sides = {side for shape in shapes for side in shape}
    if len(sides) == 1 and max(sides) <= LARGEST_OWN_SIZE:
        return None
    return choose_size(typical_side(shapes), on_gpu=on_gpu)


def _describe_unknown(name: str) -> str:
    similar = difflib.get_close_matches(name, (*DATASETS, NO_TWINS), n=2, cutoff=0.5)
    hint = f" (did you mean {' or '.join(similar)}?)" if similar else ""
    known = ", ".join(DATASETS)
    return f"no dataset or folder {name!r}{hint}: use {known}, the path of a folder, or hf:owner/name"


def resize_source(source: Source, image_size: int | None) -> Source:
    """Resize all images; they stay as they are if image_size is None or already their size."""
    if image_size in (None, source.train.images.shape[-1]):
        return source
    _check_memory(source, image_size)
    height, width = source.train.images.shape[-2:]
    return source._replace(
        train=_resize(source.train, image_size),
        test=_resize(source.test, image_size),
        original_size=f"{width} x {height}",
    )


def _check_memory(source: Source, size: int) -> None:
    """Refuse a size whose images do not fit into the machine's memory, before anything is allocated."""
    needed = (len(source.train) + len(source.test)) * source.train.images.shape[1] * size * size
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else needed
    if needed > memory:
        raise ValueError(
            f"image_size {size} needs {needed / 1e9:.0f} GB of memory for the images, and this machine has "
            f"{memory / 1e9:.0f} GB; use a smaller --image-size"
        )


def _resize(split: Split, size: int) -> Split:
    images = torch.empty(len(split), split.images.shape[1], size, size, dtype=torch.uint8)
    # In blocks, because the bilinear filter needs floats: CIFAR at 224 pixels in one call would take 30 GB.
    for target, block in zip(torch.split(images, BLOCK), split.blocks(BLOCK), strict=True):
        target.copy_(_resize_images(block, size))
    return replace(split, images=images)


def _resize_images(images: Tensor, size: int) -> Tensor:
    resized = F.interpolate(images.float(), size=(size, size), mode="bilinear", antialias=True)
    return resized.round().clamp(0, 255).to(torch.uint8)
