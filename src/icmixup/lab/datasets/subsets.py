"""Images with labels, and parts of them: so many a class, a fraction, a long tail.

N images, C classes. A part is decided in two steps: how many images each class keeps (`part_counts`, no
randomness), and which ones (`draw_part`, from a seed). The second ranks the images of a class once, so with
one seed the smaller part lies inside the larger one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

HOLD_OUT_SEED = 20231120  # fixed for good: a held-out part must be the same in every run of every recipe
DEIC_TRAIN, DEIC_TOTAL = 30, 50  # images a class in a split of the DEIC benchmark; the other 20 validate


@dataclass(frozen=True, eq=False)
class Split:
    """Images of one part: (N, channels, H, W) uint8, and their labels, (N,) int64."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: Tensor) -> Split:
        return Split(self.images[rows], self.labels[rows])

    def to(self, device: torch.device | str) -> Split:
        return Split(self.images.to(device), self.labels.to(device))


class Source(NamedTuple):
    """What a reader hands over: all its images, before any part is taken."""

    train: Split
    test: Split
    class_names: tuple[str, ...]
    skipped: tuple[str, ...] = ()  # files that could not be read, each with the reason


@dataclass(frozen=True, eq=False)
class Dataset:
    """A train part and a test set as tensors, with what is needed to feed them to a network.

    `mean` and `std` are per channel, of pixels in [0, 1].
    """

    name: str
    train: Split
    test: Split
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    skipped: tuple[str, ...] = ()

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def class_counts(self) -> Tensor:
        """(C,) int64, images of each class in the train part."""
        return torch.bincount(self.train.labels, minlength=self.num_classes)

    def to(self, device: torch.device | str) -> Dataset:
        return replace(self, train=self.train.to(device), test=self.test.to(device))


def part_counts(
    class_counts: Tensor,
    *,
    per_class: int | None = None,
    fraction: float = 1.0,
    imbalance: float = 1.0,
    class_names: Sequence[str] | None = None,
) -> Tensor:
    """How many images of each class stay: per_class first, then fraction, then imbalance.

    The long tail is n_c = int(n_max f^(c/(C-1))), c in label order, n_max the largest class that the first
    two leave. The paper prints no rule; this one gives the known sizes of the LT-CIFAR sets it trains on.
    f = 0.01 and f = 100 mean the same, and f = 1 leaves the classes as they are. A class that has fewer than
    n_c images keeps them all.

    Args:
        class_counts: (C,) images of each class.

    Returns:
        (C,) int64, none above class_counts.
    """
    counts = class_counts.cpu().long()
    names = class_names or [str(label) for label in range(len(counts))]
    if per_class is not None:
        counts = _cap(counts, per_class, names)
    counts = _shrink(counts, fraction)
    return _bend(counts, imbalance, names)


def _cap(counts: Tensor, per_class: int, names: Sequence[str]) -> Tensor:
    smallest = int(counts.argmin())
    most = int(counts[smallest])
    if not 1 <= per_class <= most:
        raise ValueError(
            f"per_class is {per_class}, but class {names[smallest]!r} has {most} train images: "
            f"give a whole number from 1 to {most}"
        )
    return torch.full_like(counts, per_class)


def _shrink(counts: Tensor, fraction: float) -> Tensor:
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction is {fraction}; give a number above 0 and up to 1 (0.1 keeps a tenth)")
    kept = (counts * fraction + 0.5).floor().long()
    return torch.minimum(kept.clamp(min=1), counts)


def _bend(counts: Tensor, imbalance: float, names: Sequence[str]) -> Tensor:
    if not (imbalance > 0 and math.isfinite(imbalance)):
        raise ValueError(
            f"imbalance is {imbalance}; give the smallest class's share of the largest, "
            "above 0 and up to 1 (0.01 and 100 mean the same)"
        )
    factor = imbalance if imbalance <= 1 else 1 / imbalance
    if factor == 1:
        return counts
    largest, last = int(counts.max()), len(counts) - 1
    tail = [int(largest * factor ** (label / last)) for label in range(len(counts))]
    if tail[-1] < 1:
        raise ValueError(
            f"imbalance {imbalance} leaves class {names[-1]!r} empty: the largest has {largest} images, "
            f"which allow {1 / largest:.3g} (or {largest}) at most, so give a milder one or more images"
        )
    return torch.minimum(counts, torch.tensor(tail))


def class_ranks(labels: Tensor) -> Tensor:
    """Place of each image among those of its class, in the order given: (N,) to (N,) int64."""
    by_class = labels.argsort(stable=True)
    counts = torch.bincount(labels)
    first = (counts.cumsum(0) - counts)[labels[by_class]]
    ranks = torch.empty_like(labels)
    ranks[by_class] = torch.arange(len(labels)) - first
    return ranks


def draw_part(labels: Tensor, counts: Tensor, seed: int) -> Tensor:
    """Rows of `counts[c]` images of each class c, drawn from the seed, in the order they had.

    Args:
        labels: (N,) int64.
        counts: (C,) images to keep of each class.

    Returns:
        (counts.sum(),) rows, ascending.
    """
    shuffle = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    ranks = torch.empty_like(labels)
    ranks[shuffle] = class_ranks(labels[shuffle])
    return (ranks < counts[labels]).nonzero().squeeze(1)


def hold_out(split: Split, class_names: Sequence[str], parts: int) -> tuple[Split, Split]:
    """Train and test from one split: one image in `parts` of each class is held out, the same ones always."""
    counts = torch.bincount(split.labels, minlength=len(class_names))
    label = int(counts.argmin())
    if counts[label] < 2:
        raise ValueError(
            f"class {class_names[label]!r} has {int(counts[label])} image, and one must be held out for "
            "testing: add images, or give a val/ folder or a test split"
        )
    held = (counts / parts).round().long().clamp(min=1)
    rows = draw_part(split.labels, held, HOLD_OUT_SEED)
    kept = torch.ones(len(split), dtype=torch.bool)
    kept[rows] = False
    return split[kept.nonzero().squeeze(1)], split[rows]


def deic_rows(labels: Tensor, index: int) -> tuple[Tensor, Tensor]:
    """Rows of DEIC's split i: per class, in the publisher's order, images [50i, 50i + 50).

    Returns:
        (30 C,) rows to train on and (20 C,) rows to validate on.
    """
    most = int(torch.bincount(labels).min()) // DEIC_TOTAL
    if not 0 <= index < most:
        raise ValueError(
            f"deic_split is {index}; this dataset has {most} splits of {DEIC_TOTAL} images a class, "
            "counted from 0"
        )
    place = class_ranks(labels) - index * DEIC_TOTAL
    train = (place >= 0) & (place < DEIC_TRAIN)
    validation = (place >= DEIC_TRAIN) & (place < DEIC_TOTAL)
    return train.nonzero().squeeze(1), validation.nonzero().squeeze(1)


def measure_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of (N, channels, H, W) uint8 images, pixels in [0, 1]."""
    values = torch.arange(256, dtype=torch.float64) / 255
    shares = [torch.bincount(c.flatten().cpu(), minlength=256).double() / c.numel() for c in images.unbind(1)]
    mean = [float(share @ values) for share in shares]
    spread = [float(share @ (values - m) ** 2) ** 0.5 for share, m in zip(shares, mean, strict=True)]
    # A channel of one value would divide by zero.
    return tuple(mean), tuple(max(s, 1 / 255) for s in spread)
