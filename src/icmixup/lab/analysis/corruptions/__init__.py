"""Fifteen common corruptions of images at five strengths, after Hendrycks and Dietterich (2019).

    Benchmarking Neural Network Robustness to Common Corruptions and Perturbations, ICLR 2019.

`corrupt` takes a batch of bytes on any device. What happens to an image depends on its number in the dataset
alone, so all networks see the same corrupted images, in batches of any size. The random numbers of an image
are the same at all strengths.

The parameters are the published ones of CIFAR-10-C (32 pixels) and ImageNet-C (224 pixels). Images of fewer
than 96 pixels use the former, others the latter. Lengths in pixels are multiplied by side / 32 or side / 224,
but not shortened below 32 pixels, where blur over a fraction of a pixel would change nothing.

B images, C channels (3, or 1 for grey).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import NamedTuple

import torch
from torch import Tensor

from icmixup.lab.analysis.corruptions.blur import defocus_blur, glass_blur, moving_camera, zoom_blur
from icmixup.lab.analysis.corruptions.digital import (
    contrast,
    elastic_transform,
    jpeg_compression,
    pixelate,
)
from icmixup.lab.analysis.corruptions.draws import draws_of
from icmixup.lab.analysis.corruptions.noise import gaussian_noise, impulse_noise, shot_noise
from icmixup.lab.analysis.corruptions.weather import brightness, fog, frost, snow

VERSION = 1  # increased whenever a corrupted image changes, so that stored results are computed again
STRENGTHS = (1, 2, 3, 4, 5)
SMALL_SIDE, LARGE_SIDE = 32, 224  # of the images for which parameters were published
LARGE_FROM = 96

Parameters = Sequence[tuple[float, ...]]


class Corruption(NamedTuple):
    """A function of images in [0, 1], and its parameters at strengths 1 to 5."""

    apply: Callable[..., Tensor]  # (images, draws, length, *parameters) to images
    small: Parameters  # of images with 32 pixels
    large: Parameters  # of images with 224 pixels


def each(*values: float) -> Parameters:
    return [(value,) for value in values]


def shares(side: int, *lengths: tuple[float, ...]) -> Parameters:
    """Lengths in pixels as shares of the side."""
    return [tuple(length / side for length in group) for group in lengths]


CORRUPTIONS = {
    "gaussian_noise": Corruption(
        gaussian_noise, each(0.04, 0.06, 0.08, 0.09, 0.10), each(0.08, 0.12, 0.18, 0.26, 0.38)
    ),
    "shot_noise": Corruption(shot_noise, each(500, 250, 100, 75, 50), each(60, 25, 12, 5, 3)),
    "impulse_noise": Corruption(
        impulse_noise, each(0.01, 0.02, 0.03, 0.05, 0.07), each(0.03, 0.06, 0.09, 0.17, 0.27)
    ),
    "defocus_blur": Corruption(  # radius, smoothing of the edge
        defocus_blur,
        [(0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)],
        [(3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)],
    ),
    "glass_blur": Corruption(  # sigma, distance, rounds
        glass_blur,
        [(0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)],
        [(0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)],
    ),
    "motion_blur": Corruption(  # radius, sigma
        moving_camera,
        [(6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)],
        [(10, 3), (15, 5), (15, 8), (15, 12), (20, 15)],
    ),
    "zoom_blur": Corruption(  # largest factor, step
        zoom_blur,
        [(1.05, 0.01), (1.10, 0.01), (1.15, 0.01), (1.20, 0.01), (1.25, 0.01)],
        [(1.10, 0.01), (1.15, 0.01), (1.20, 0.02), (1.24, 0.02), (1.30, 0.03)],
    ),
    "snow": Corruption(  # mean, deviation, size, threshold, radius and sigma of the blur, share kept
        snow,
        [
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ],
        [
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ],
    ),
    "frost": Corruption(  # share kept, share of ice
        frost,
        [(1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)],
        [(1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)],
    ),
    "fog": Corruption(  # density, decay
        fog,
        [(0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)],
        [(1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)],
    ),
    "brightness": Corruption(brightness, each(0.05, 0.1, 0.15, 0.2, 0.3), each(0.1, 0.2, 0.3, 0.4, 0.5)),
    "contrast": Corruption(contrast, each(0.75, 0.5, 0.4, 0.3, 0.15), each(0.4, 0.3, 0.2, 0.1, 0.05)),
    "elastic_transform": Corruption(  # strength, sigma and shift, as shares of the side
        elastic_transform,
        [(0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)],
        shares(
            LARGE_SIDE,
            (244 * 2, 244 * 0.7, 244 * 0.1),
            (244 * 2, 244 * 0.08, 244 * 0.2),
            (244 * 0.05, 244 * 0.01, 244 * 0.02),
            (244 * 0.07, 244 * 0.01, 244 * 0.02),
            (244 * 0.12, 244 * 0.01, 244 * 0.02),
        ),
    ),
    "pixelate": Corruption(pixelate, each(0.95, 0.9, 0.85, 0.75, 0.65), each(0.6, 0.5, 0.4, 0.3, 0.25)),
    "jpeg_compression": Corruption(jpeg_compression, each(80, 65, 58, 50, 40), each(25, 18, 15, 10, 7)),
}
"""Parameters of CIFAR-10-C and ImageNet-C, as their authors published them."""


@torch.no_grad()
def corrupt(images: Tensor, name: str, strength: int, rows: Tensor | None = None) -> Tensor:
    """Corrupt a batch of images.

    Args:
        images: (B, C, H, W) uint8, on any device.
        name: one of CORRUPTIONS.
        strength: 1 to 5.
        rows: (B,) numbers of the images in their dataset, which seed what is random; by default 0 to B - 1.

    Returns:
        (B, C, H, W) uint8, on the same device.
    """
    check_images(images)
    check_corruptions([name])
    check_strengths([strength])
    rows = torch.arange(len(images)) if rows is None else rows
    if len(images) == 0:
        return images
    corruption, side = CORRUPTIONS[name], min(images.shape[-2:])
    parameters = (corruption.small if side < LARGE_FROM else corruption.large)[strength - 1]
    changed = corruption.apply(
        images.float() / 255, draws_of(name, rows.to(images.device)), length_factor(side), *parameters
    )
    return (255 * changed).round().clamp(0, 255).to(torch.uint8)


def length_factor(side: int) -> float:
    """What lengths in pixels are multiplied by, for images of this side."""
    return max(1.0, side / SMALL_SIDE) if side < LARGE_FROM else side / LARGE_SIDE


def check_images(images: Tensor) -> None:
    if images.dim() != 4 or images.shape[1] not in (1, 3) or images.dtype != torch.uint8:
        raise ValueError(
            "images must be (B, 3, H, W) or (B, 1, H, W) uint8, "
            f"got {tuple(images.shape)} {str(images.dtype).removeprefix('torch.')}"
        )


def check_corruptions(names: Sequence[str]) -> None:
    """Raise an error that suggests a name if one is unknown."""
    for name in names:
        if name not in CORRUPTIONS:
            similar = get_close_matches(name, CORRUPTIONS, n=1)
            hint = f"did you mean {similar[0]}? " if similar else ""
            raise ValueError(
                f"unknown corruption {name!r}; {hint}the corruptions are {', '.join(CORRUPTIONS)}"
            )


def check_strengths(strengths: Sequence[int]) -> None:
    for strength in strengths:
        if strength not in STRENGTHS:
            raise ValueError(f"strengths are 1 (weakest) to 5 (strongest), got {strength}")
