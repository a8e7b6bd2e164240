"""Noise: Gaussian, shot and impulse noise, independent for every pixel and channel.

All take (B, C, H, W) images in [0, 1] and return images that may exceed that range.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from icmixup.lab.analysis.corruptions.draws import Draws

LEVELS = 256


def gaussian_noise(images: Tensor, draws: Draws, length: float, deviation: float) -> Tensor:
    """x + deviation * n, n standard normal."""
    return images + deviation * draws.normal(0, *images.shape[1:])


def shot_noise(images: Tensor, draws: Draws, length: float, photons: float) -> Tensor:
    """Poisson(photons * x) / photons: a white pixel counts `photons` photons on average."""
    table = poisson_table(photons).to(images.device)  # (256, K)
    uniform, width = draws.uniform(0, *images.shape[1:]), table.shape[1]
    first = (images * (LEVELS - 1)).round().long() * width
    flat = table.flatten()
    # Binary search for the smallest k with P(count <= k) >= u, for all pixels at once.
    low, high = torch.zeros_like(first), torch.full_like(first, width - 1)
    for _ in range(math.ceil(math.log2(width))):
        middle = (low + high) // 2
        above = flat[first + middle] >= uniform
        low, high = torch.where(above, low, middle + 1), torch.where(above, middle, high)
    return high / photons


@functools.lru_cache(maxsize=16)
def poisson_table(photons: float) -> Tensor:
    """(256, K) float32: P(count <= k) for the rate of each grey level, up to a k that is never exceeded."""
    most = math.ceil(photons + 8 * math.sqrt(photons) + 10)
    rates = photons * torch.arange(LEVELS, dtype=torch.float64)[:, None] / (LEVELS - 1)
    # P(count <= k) is the regularised upper incomplete gamma function of (k + 1, rate).
    counts = torch.arange(most, dtype=torch.float64)
    table: Tensor = torch.special.gammaincc(counts + 1, rates)
    return table.float()


def impulse_noise(images: Tensor, draws: Draws, length: float, share: float) -> Tensor:
    """A share of the pixels of each channel becomes black or white, with equal probability."""
    uniform = draws.uniform(0, *images.shape[1:])
    white = (uniform < share / 2).to(images)
    return torch.where(uniform < share, white, images)
