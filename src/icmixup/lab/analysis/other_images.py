"""Images of other classes than a network knows: does its confidence separate them from test images?

The score of an image is the maximum softmax probability, the baseline of Hendrycks and Gimpel (2017),

    A Baseline for Detecting Misclassified and Out-of-Distribution Examples in Neural Networks, ICLR 2017,

of the scores as they are, without a temperature. N test images, M other images, C classes.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from icmixup.lab.training.inputs import InputFormat
from icmixup.lab.training.trained import list_images

TRUE_POSITIVE_RATE = 0.95


class OtherImages(NamedTuple):
    """The image files of a folder."""

    name: str
    files: tuple[Path, ...]
    fingerprint: str


def list_others(folders: Sequence[Path]) -> tuple[OtherImages, ...]:
    """The image files of each folder; a ValueError names a folder without any."""
    unique = list(dict.fromkeys(Path(folder) for folder in folders))
    names = [folder.resolve().name for folder in unique]
    found = []
    for folder, name in zip(unique, names, strict=True):
        if folder.is_file():
            raise ValueError(f"{folder} is a file; --ood takes folders of images")
        files = tuple(list_images([folder]))
        shown = name if names.count(name) == 1 else str(folder)
        found.append(OtherImages(shown, files, hash_files(folder, files)))
    return tuple(found)


def hash_files(folder: Path, files: Sequence[Path]) -> str:
    """Twelve hexadecimal digits of the names and contents of files; a file that cannot be opened has none."""
    content = hashlib.blake2b()
    for file in files:
        try:
            found = file.read_bytes()
        except OSError:  # reported when it is to be shown to a network
            found = b""
        name = file.relative_to(folder).as_posix().encode(errors="surrogateescape")
        content.update(name + f"\0{len(found)}\0".encode())
        content.update(found)
    return content.hexdigest()[:12]


def read_blocks(other: OtherImages, inputs: InputFormat, size: int) -> Iterator[Tensor]:
    """Blocks of up to `size` images as the network expects them; files that cannot be read are reported."""
    found = 0
    for start in range(0, len(other.files), size):
        images = list(read_images(other.files[start : start + size], inputs))
        found += len(images)
        if images:
            yield torch.stack(images)
    if not found:
        raise ValueError(f"none of the {len(other.files)} image files of {other.name} could be read")


def read_images(files: Sequence[Path], inputs: InputFormat) -> Iterator[Tensor]:
    for file in files:
        try:
            yield inputs.read(file)
        except ValueError as error:
            warnings.warn(f"left out: {error}", stacklevel=2)


def confidence(scores: Tensor) -> Tensor:
    """(N,) float64, the maximum softmax probability of (N, C) scores."""
    return scores.double().softmax(dim=1).amax(dim=1)


def separation(known: Tensor, other: Tensor) -> dict[str, float]:
    """How well a score separates known images from others, in percent.

    Args:
        known: (N,) scores of test images, which should be high.
        other: (M,) scores of other images, which should be low.

    Returns:
        auroc: probability that a known image has a higher score than another one; a tie counts half.
        fpr95: share of the other images that are accepted by the highest threshold which accepts at least
            95 % of the known images.
    """
    ordered = known.sort().values
    lower = torch.searchsorted(ordered, other, right=False)  # known images with a lower score
    up_to = torch.searchsorted(ordered, other, right=True)
    higher = len(known) - up_to + (up_to - lower) / 2
    threshold = ordered[len(known) - math.ceil(TRUE_POSITIVE_RATE * len(known))]
    return {
        "auroc": 100 * higher.double().mean().item() / len(known),
        "fpr95": 100 * (other >= threshold).double().mean().item(),
    }
