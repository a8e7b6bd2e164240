"""Blur: out of focus, through frosted glass, by a moving camera, by zooming.

All take (B, C, H, W) images in [0, 1], and lengths in pixels at the reference size, which are multiplied by
`length`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from icmixup.lab.analysis.corruptions.draws import Draws
from icmixup.lab.analysis.corruptions.filters import (
    convolve,
    gaussian_blur,
    gaussian_weights,
    motion_blur,
    sample,
    zoom,
)

LARGE_RADIUS = 8  # of a disk, above which its edge is smoothed over 5 pixels instead of 3


def defocus_blur(images: Tensor, draws: Draws, length: float, radius: float, smoothing: float) -> Tensor:
    """Average over a disk whose edge is smoothed by a small Gaussian."""
    taps = max(1, round(length * (1 if radius <= LARGE_RADIUS else 2)))
    return convolve(images, disk(length * radius, length * smoothing, taps))


def disk(radius: float, smoothing: float, taps: int) -> Tensor:
    """(k, k) weights of a disk, smoothed with a Gaussian of 2 taps + 1 pixels."""
    reach = math.floor(radius) + taps
    squares = torch.arange(-reach, reach + 1, dtype=torch.float64) ** 2
    inside = (squares[:, None] + squares <= radius**2).double()
    weights = gaussian_weights(smoothing, taps)
    smoothed = torch.nn.functional.conv2d(
        inside[None, None], (weights[:, None] * weights)[None, None], padding=taps
    )[0, 0]
    return smoothed / smoothed.sum()


def glass_blur(
    images: Tensor, draws: Draws, length: float, sigma: float, distance: int, rounds: int
) -> Tensor:
    """Blur, replace each pixel by a random one up to `distance` away, several times, and blur again."""
    size = images.shape[-2:]
    rows, columns = torch.meshgrid(
        *(torch.arange(side, device=images.device) for side in size), indexing="ij"
    )
    blurred = gaussian_blur(images, length * sigma)
    for number in range(rounds):
        down, right = (
            length * ((2 * distance * draws.uniform(2 * number + axis, *size)).floor() - distance)
            for axis in range(2)
        )
        blurred = sample(blurred, rows + down, columns + right)
    return gaussian_blur(blurred, length * sigma)


def moving_camera(images: Tensor, draws: Draws, length: float, radius: float, sigma: float) -> Tensor:
    """Motion blur at an angle of up to 45 degrees to the horizontal."""
    angle = math.radians(45) * (2 * draws.uniform(0) - 1)
    return motion_blur(images, angle, length * radius, length * sigma)


def zoom_blur(images: Tensor, draws: Draws, length: float, largest: float, step: float) -> Tensor:
    """Mean of the image and of its centre, enlarged by 1, 1 + step, ..., largest."""
    count = round((largest - 1) / step) + 1
    total = images + sum(zoom(images, 1 + number * step) for number in range(count))
    return total / (count + 1)
