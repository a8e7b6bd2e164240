"""Weather: snow, frost, fog, and the brightness of the light.

All take (B, C, H, W) images in [0, 1], and lengths in pixels at the reference size, which are multiplied by
`length`.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from icmixup.lab.analysis.corruptions.draws import Draws, draws_of
from icmixup.lab.analysis.corruptions.filters import luma, motion_blur, take_pixels, zoom
from icmixup.lab.analysis.corruptions.ice import ice

FOG_MAP = 256  # side of the fractals from which fog is cut, at least
CLOUD_MAPS = 16
FROST_TINT = (0.88, 0.95, 1.0)  # a cold white


def snow(
    images: Tensor,
    draws: Draws,
    length: float,
    mean: float,
    deviation: float,
    size: float,
    threshold: float,
    radius: float,
    sigma: float,
    kept: float,
) -> Tensor:
    """Whiten the image, and add flakes that fall at an angle, and the same flakes turned by 180 degrees."""
    flakes = mean + deviation * draws.normal(0, 1, *images.shape[-2:])
    flakes = zoom(flakes, max(1.0, length * size))
    flakes = torch.where(flakes < threshold, 0.0, flakes.clamp(0, 1))
    angle = math.radians(-90) + math.radians(45) * (2 * draws.uniform(1) - 1)
    flakes = motion_blur(flakes, angle, length * radius, length * sigma)
    whitened = torch.maximum(images, 1.5 * luma(images) + 0.5)
    return kept * images + (1 - kept) * whitened + flakes + flakes.flip(-2, -1)


def frost(images: Tensor, draws: Draws, length: float, kept: float, added: float) -> Tensor:
    """kept * x + added * ice: a random part of a computed texture of ice crystals, flipped at random."""
    height, width = images.shape[-2:]
    place = draws.uniform(0, 4)  # of each image: top, left, and whether rows and columns are reversed
    rows, columns = (
        (place[:, axis] * size).long()[:, None] + random_direction(size, place[:, 2 + axis])
        for axis, size in enumerate((height, width))
    )
    texture = ice(2 * max(height, width)).to(images.device).expand(len(images), 1, -1, -1)
    covered = take_pixels(texture, rows[:, :, None].expand(-1, -1, width), columns[:, None])
    tinted = covered * torch.tensor(FROST_TINT, device=images.device)[:, None, None]
    return kept * images + added * (tinted if images.shape[1] == 3 else luma(tinted))


def random_direction(size: int, uniform: Tensor) -> Tensor:
    """(B, size): 0 to size - 1, reversed for half of the images."""
    steps = torch.arange(size, device=uniform.device)
    return torch.where(uniform[:, None] < 0.5, steps, steps.flip(0))


def fog(images: Tensor, draws: Draws, length: float, density: float, decay: float) -> Tensor:
    """(x + density * clouds) * m / (m + density), where m is the largest pixel of the image.

    The clouds are a random part of one of a few fractals. Those are periodic, so every part is seamless.
    """
    height, width = images.shape[-2:]
    side = max(FOG_MAP, 2 ** math.ceil(math.log2(max(height, width))))
    maps = clouds(side, decay).to(images.device)
    place = draws.uniform(0, 3)
    rows, columns = (
        ((place[:, axis] * side).long()[:, None] + torch.arange(size, device=images.device)) % side
        for axis, size in enumerate((height, width))
    )
    number = (place[:, 2] * len(maps)).long()[:, None, None]
    added = density * maps[number, rows[:, :, None], columns[:, None, :]][:, None]
    largest = images.amax(dim=(1, 2, 3), keepdim=True)
    return (images + added) * largest / (largest + density)


@functools.lru_cache(maxsize=16)
def clouds(side: int, decay: float) -> Tensor:
    """(16, side, side) in [0, 1] on the CPU: fractals by the diamond-square algorithm on a torus.

    Each level halves the distance of the points, and the amplitude of what is added to their mean is divided
    by decay^2.
    """
    draws = draws_of("clouds", torch.arange(CLOUD_MAPS))
    heights, amplitude = torch.zeros(CLOUD_MAPS, 1, 1), 1.0
    for level in range(int(math.log2(side))):
        heights = refine(heights, draws, 3 * level, amplitude)
        amplitude /= decay**2
    low, high = (part(heights, dim=(1, 2), keepdim=True) for part in (torch.amin, torch.amax))
    return (heights - low) / (high - low)


def refine(heights: Tensor, draws: Draws, stream: int, amplitude: float) -> Tensor:
    """(B, n, n) to (B, 2n, 2n): points between four others get their mean and a uniform number."""
    size = heights.shape[1]

    def wobble(total: Tensor, number: int) -> Tensor:
        return total / 4 + amplitude * (2 * draws.uniform(stream + number, size, size) - 1)

    right, below = heights.roll(-1, dims=2), heights.roll(-1, dims=1)
    centres = wobble(heights + right + below + right.roll(-1, dims=1), 0)
    edges = wobble(heights + right + centres + centres.roll(1, dims=1), 1)
    sides = wobble(heights + below + centres + centres.roll(1, dims=2), 2)
    finer = heights.new_empty(len(heights), 2 * size, 2 * size)
    finer[:, ::2, ::2], finer[:, 1::2, 1::2] = heights, centres
    finer[:, ::2, 1::2], finer[:, 1::2, ::2] = edges, sides
    return finer


def brightness(images: Tensor, draws: Draws, length: float, added: float) -> Tensor:
    """Add to the value of HSV, the largest channel; hue and saturation stay."""
    value = images.amax(dim=1, keepdim=True)
    brighter = (value + added).clamp(max=1)
    return torch.where(value > 0, images * brighter / value.clamp(min=1e-6), brighter)
