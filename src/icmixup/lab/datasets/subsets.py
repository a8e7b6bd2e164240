"""Labelled images, and subsets of them: N per class, a fraction, a long tail.

N images, C classes. A subset is chosen in two steps: how many images of each class it has (`subset_counts`,
deterministic), and which ones (`draw_subset`, from a seed). The seed fixes one ranking of the images of each
class, so a smaller subset is contained in a larger one with the same seed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from icmixup.lab.datasets.examples import Examples
from icmixup.lab.datasets.photos import Photos
from icmixup.lab.wording import first_few

HOLD_OUT_SEED = 20231120  # must never change: all runs have to be tested on the same held-out images
MEASURED_PHOTOS = 512
VALIDATION_PARTS = 4  # of the training images; tuning holds out one of them, or each in turn
DEIC_IMAGES = 50  # per class in a split of the DEIC benchmark, the 20 for validation included


@dataclass(frozen=True)
class DataSpec:
    """Which images a run trains on. Equal specs describe the same images; a spec is hashable."""

    dataset: str
    """digits, cifar10, cifar100, cifair10, cifair100, a folder of images, or hf:owner/name."""
    _: KW_ONLY
    fraction: float = 1.0
    """Share of the training images of each class, applied after per_class."""
    per_class: int | None = None
    """Training images per class; None for all of them."""
    imbalance: float = 1.0
    """Size of the smallest class over that of the largest (0.01 or 100), applied last: see subset_counts."""
    data_seed: int = 0
    """Seed of the choice of training images, independent of the seed of training."""
    split: int | None = None
    """Split of the DEIC benchmark: train on its 50 images per class, those for validation included."""
    image_size: int | None = None
    """Side of the square images in pixels; None keeps the size of small images, and chooses one for photos
    (see `choose_image_size`)."""
    folds: int | None = None
    """Number of folds of cross-validation, over all images: see folds.take_fold."""
    fold: int | None = None
    """The fold to test on, from 1; None for all images as the reader separates them, without a subset."""
    fold_seed: int = 0
    """Seed of the partition into folds."""
    held_out: float = 0.0
    """Share of the chosen images of each class that is not trained on, but kept as `Dataset.held_out`."""
    tail_draw: str = "seeded"
    """Which images are kept: "seeded" as in `draw_subset`, "ldam" as in `draw_ldam_subset`."""


@dataclass(frozen=True, eq=False)
class Split:
    """Images, (N, channels, H, W) uint8 or photos of different sizes, their labels, (N,) int64, and N file
    names if they are files.

    In a dataset of features, `images` are (N, D) float32. Data given in Python can be (N, ...) float32 of any
    shape, or the examples of a torch Dataset.
    """

    images: Tensor | Photos | Examples
    labels: Tensor
    file_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: Tensor) -> Split:
        names = tuple(self.file_names[row] for row in rows.tolist()) if self.file_names else ()
        return Split(self.images[rows], self.labels[rows], names)

    def to(self, device: torch.device | str) -> Split:
        return Split(self.images.to(device), self.labels.to(device), self.file_names)

    def square(self) -> Tensor:
        """(N, channels, H, W) uint8: the images as a network is tested on them, the centre of each photo."""
        return self.images if isinstance(self.images, Tensor) else self.images.square()

    def blocks(self, size: int) -> Iterator[Tensor]:
        """The images of `square` in blocks of `size`: photos are too large to have all of them in memory."""
        for start in range(0, len(self), size):
            yield Split(self.images[start : start + size], self.labels[start : start + size]).square()

    def contents(self) -> Iterator[Tensor]:
        """All pixels in parts: blocks of images, or photos with all that training can see of them."""
        if isinstance(self.images, Photos):
            yield from self.images.whole()
        elif isinstance(self.images, Examples):
            yield from self.images.blocks()
        else:
            yield from torch.split(self.images, 1024)


class Source(NamedTuple):
    """All images of a dataset, as its reader returns them."""

    train: Split
    test: Split
    class_names: tuple[str, ...]
    skipped: tuple[str, ...] = ()  # files that could not be read, each with the reason
    split_by: str = "publisher"  # how training and test images were separated
    original_size: str = ""  # of the image files, where it differs from that of the tensors


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training subset and test set as tensors, with their class names and normalisation constants.

    `mean` and `std` are per channel, of pixels in [0, 1].
    """

    name: str
    train: Split
    test: Split
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    skipped: tuple[str, ...] = ()
    split_by: str = ""  # how training and test images were separated
    original_size: str = ""  # of the image files
    fold: DataSpec | None = None  # which fold of cross-validation it is, if it is one
    held_out: Split | None = None  # training images that are not trained on, for choices after training

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @cached_property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits of what is trained, tested and held out: pixels, labels, class names and
        normalisation. Where the images come from is not part of it."""
        content = hashlib.blake2b(json.dumps([self.class_names, self.mean, self.std]).encode())
        held = () if self.held_out is None else (self.held_out,)
        for split in (self.train, self.test, *held):
            content.update(f"{split.images.dtype} {tuple(split.images.shape)}".encode())
            for part in split.contents():
                content.update(part.cpu().contiguous().numpy().data)
            content.update(split.labels.cpu().contiguous().numpy().data)
        return content.hexdigest()[:12]

    @property
    def class_counts(self) -> Tensor:
        """(C,) int64, training images of each class."""
        return torch.bincount(self.train.labels, minlength=self.num_classes)

    @property
    def is_features(self) -> bool:
        """Whether `images` are (N, D) features."""
        return len(self.train.images.shape) == 2

    def to(self, device: torch.device | str) -> Dataset:
        held = None if self.held_out is None else self.held_out.to(device)
        moved = replace(self, train=self.train.to(device), test=self.test.to(device), held_out=held)
        if "fingerprint" in self.__dict__:  # already computed, and the same on every device
            moved.__dict__["fingerprint"] = self.fingerprint
        return moved


def take_subset(train: Split, spec: DataSpec, class_names: Sequence[str]) -> Split:
    """The training images that a spec keeps."""
    counts = subset_counts(
        torch.bincount(train.labels, minlength=len(class_names)),
        per_class=spec.per_class,
        fraction=spec.fraction,
        imbalance=spec.imbalance,
        class_names=class_names,
    )
    draw = draw_ldam_subset if spec.tail_draw == "ldam" else draw_subset
    return train[draw(train.labels, counts, spec.data_seed)]


def subset_counts(
    class_counts: Tensor,
    *,
    per_class: int | None = None,
    fraction: float = 1.0,
    imbalance: float = 1.0,
    class_names: Sequence[str] | None = None,
) -> Tensor:
    """Number of images that each class keeps: per_class is applied first, then fraction, then imbalance.

    The long tail is n_c = int(n_max f^(c/(C-1))), with c in label order and n_max the size of the largest
    class after the first two steps. The paper states no rule; this one gives the known sizes of the LT-CIFAR
    sets it trains on. f = 0.01 and f = 100 mean the same, and f = 1 changes nothing. A class with fewer than
    n_c images keeps all of them.

    Args:
        class_counts: (C,) images of each class.
        class_names: C names for error messages; label numbers by default.

    Returns:
        (C,) int64, none above class_counts.
    """
    counts = class_counts.cpu().long()
    names = class_names or [str(label) for label in range(len(counts))]
    if per_class is not None:
        counts = _cap_counts(counts, per_class, names)
    counts = _scale_counts(counts, fraction)
    return _long_tail_counts(counts, imbalance, names)


def _cap_counts(counts: Tensor, per_class: int, names: Sequence[str]) -> Tensor:
    smallest = int(counts.argmin())
    most = int(counts[smallest])
    if not 1 <= per_class <= most:
        raise ValueError(
            f"per_class must be from 1 to {most}, got {per_class}: "
            f"the smallest class, {names[smallest]!r}, has {most} training images"
        )
    return torch.full_like(counts, per_class)


def _scale_counts(counts: Tensor, fraction: float) -> Tensor:
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must be above 0 and up to 1, got {fraction} (0.1 keeps a tenth)")
    kept = (counts * fraction + 0.5).floor().long()
    return torch.minimum(kept.clamp(min=1), counts)


def _long_tail_counts(counts: Tensor, imbalance: float, names: Sequence[str]) -> Tensor:
    if not (imbalance > 0 and math.isfinite(imbalance)):
        raise ValueError(
            "imbalance must be the size of the smallest class over that of the largest, above 0 and finite "
            f"(0.01 and 100 mean the same), got {imbalance}"
        )
    factor = imbalance if imbalance <= 1 else 1 / imbalance
    if factor == 1:
        return counts
    largest, last = int(counts.max()), len(counts) - 1
    tail = [round_down(largest * factor ** (label / last)) for label in range(len(counts))]
    if tail[-1] < 1:
        raise ValueError(
            f"imbalance {imbalance} leaves no image of class {names[-1]!r}: the largest class has {largest} "
            f"images, so use {round_up(1 / largest):g} or more (or {largest} at most), or more images"
        )
    return torch.minimum(counts, torch.tensor(tail))


def round_down(number: float) -> int:
    """The largest integer up to a number, which floats may have put just below one: 49 / 49 or 100 x 0.29."""
    return int(number * (1 + 1e-12))


def round_up(number: float) -> float:
    """The smallest number of three digits that is not below a positive number."""
    unit = 10.0 ** (2 - math.floor(math.log10(number)))
    return math.ceil(number * unit) / unit


def class_ranks(labels: Tensor) -> Tensor:
    """Index of each image within its class, in the order given: (N,) labels to (N,) int64."""
    by_class = labels.argsort(stable=True)
    counts = torch.bincount(labels)
    first = (counts.cumsum(0) - counts)[labels[by_class]]
    ranks = torch.empty_like(labels)
    ranks[by_class] = torch.arange(len(labels)) - first
    return ranks


def draw_subset(labels: Tensor, counts: Tensor, seed: int) -> Tensor:
    """Rows of `counts[c]` random images of each class c, in their original order.

    Args:
        labels: (N,) int64.
        counts: (C,) images to keep of each class.

    Returns:
        (counts.sum(),) rows, ascending.
    """
    return (shuffled_ranks(labels, seed) < counts[labels]).nonzero().squeeze(1)


def shuffled_ranks(labels: Tensor, seed: int) -> Tensor:
    """The place of each image in a random order of its class, from 0: (N,) int64 in and out."""
    shuffle = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    ranks = torch.empty_like(labels)
    ranks[shuffle] = class_ranks(labels[shuffle])
    return ranks


def draw_ldam_subset(labels: Tensor, counts: Tensor, seed: int) -> Tensor:
    """The rows that the code of LDAM (Cao et al., 2019) keeps of a long tail, in their original order.

    NumPy's generator is seeded once; the rows of class 0, then those of class 1 and so on, are shuffled with
    it, and the first `counts[c]` are kept. With seed 0 and the images of CIFAR in the order of their
    files, these are the images of LDAM's LT-CIFAR.
    """
    generator = np.random.RandomState(seed)
    values, kept = labels.numpy(), []
    for label, count in enumerate(counts.tolist()):
        rows = np.where(values == label)[0]
        generator.shuffle(rows)
        kept.append(rows[:count])
    return torch.from_numpy(np.sort(np.concatenate(kept)))


def keep_out(split: Split, num_classes: int, share: float) -> tuple[Split, Split]:
    """Training images without a share of each class, and those; always the same ones.

    A class keeps at least one image, and of a class with two or more at least one is held out.
    """
    counts = torch.bincount(split.labels, minlength=num_classes)
    held = torch.minimum((counts * share + 0.5).floor().long().clamp(min=1), (counts - 1).clamp(min=0))
    if not int(held.sum()):
        raise ValueError(
            f"held_out={share:g} leaves no image to hold out: no class has two training images; add images"
        )
    return split_off(split, shuffled_ranks(split.labels, HOLD_OUT_SEED) < held[split.labels])


def hold_out(split: Split, class_names: Sequence[str], parts: int) -> tuple[Split, Split]:
    """Split images into train and test: one in `parts` of each class is held out, always the same ones."""
    counts = torch.bincount(split.labels, minlength=len(class_names))
    label = int(counts.argmin())
    if counts[label] < 2:
        raise ValueError(
            f"class {class_names[label]!r} must have at least 2 images, got {int(counts[label])}, "
            "because one is held out for testing: add images, or a val/ folder or a test split"
        )
    held = (counts / parts).round().long().clamp(min=1)
    return split_off(split, shuffled_ranks(split.labels, HOLD_OUT_SEED) < held[split.labels])


def split_off(split: Split, taken: Tensor) -> tuple[Split, Split]:
    """The images where (N,) `taken` is False, and those where it is True."""
    return split[(~taken).nonzero().squeeze(1)], split[taken.nonzero().squeeze(1)]


def validation_dataset(data: Dataset, part: int = 0) -> Dataset:
    """The training images alone: one of their VALIDATION_PARTS parts is for testing, the others for training.

    Every class has images to train on, and to test on in part 0; of a class with fewer than VALIDATION_PARTS
    images some parts have none. The normalisation is that of all training images.

    Args:
        part: from 0. Each training image is in one of the parts.
    """
    counts = data.class_counts.cpu()
    single = (counts < 2).nonzero().flatten().tolist()
    if single:
        named = first_few([repr(data.class_names[label]) for label in single], 5)
        raise ValueError(
            f"a validation part would leave {len(single)} of {data.num_classes} classes empty, because they "
            f"have a single training image: {named} (the largest class has {int(counts.max())}); "
            "tuning needs at least 2 images of each class: add images, or leave out these classes"
        )
    images = data.train.to("cpu")
    first = (counts / VALIDATION_PARTS).round().long().clamp(min=1)
    others = (counts - first) / (VALIDATION_PARTS - 1)
    start = first + ((part - 1) * others).round().long() if part else torch.zeros_like(first)
    stop = first + (part * others).round().long()
    ranks = shuffled_ranks(images.labels, HOLD_OUT_SEED)
    held = (start[images.labels] <= ranks) & (ranks < stop[images.labels])
    train, test = split_off(images, held)
    return replace(
        data,
        train=train,
        test=read_as_test(test, data.test),
        split_by=f"part {part + 1} of {VALIDATION_PARTS} of the training images held out",
    )


def read_as_test(split: Split, test: Split) -> Split:
    """Training examples with the transform of the test examples, which is not random, if both have one; as
    they are if that does not give them the same form."""
    ours, theirs = split.images, test.images
    if not (
        isinstance(ours, Examples) and isinstance(theirs, Examples) and ours.transform and theirs.transform
    ):
        return split
    plain = replace(ours, transform=theirs.transform)
    try:
        plain[:1].square()
    except (ValueError, RuntimeError):
        return split
    return replace(split, images=plain)


def deic_rows(labels: Tensor, index: int) -> Tensor:
    """(50 C,) rows of split i of the DEIC benchmark: images [50i, 50i + 50) of each class, in the publisher's
    order."""
    most = int(torch.bincount(labels).min()) // DEIC_IMAGES
    if not 0 <= index < most:
        raise ValueError(
            f"no split {index}: this dataset has {most} splits of {DEIC_IMAGES} images per class, "
            "numbered from 0"
        )
    return (class_ranks(labels) // DEIC_IMAGES == index).nonzero().squeeze(1)


def measure_statistics(images: Tensor | Photos | Examples) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of (N, channels, H, W) uint8 images, pixels in [0, 1].

    For photos they are those of the centres of up to 512 photos, evenly spaced.
    """
    if not isinstance(images, Tensor):
        images = images[:: math.ceil(len(images) / MEASURED_PHOTOS)].square()
    values = torch.arange(256, dtype=torch.float64) / 255
    shares = [torch.bincount(c.flatten().cpu(), minlength=256).double() / c.numel() for c in images.unbind(1)]
    mean = [float(share @ values) for share in shares]
    spread = [float(share @ (values - m) ** 2) ** 0.5 for share, m in zip(shares, mean, strict=True)]
    # A constant channel would divide by zero.
    return tuple(mean), tuple(max(s, 1 / 255) for s in spread)
