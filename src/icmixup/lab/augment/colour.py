"""Colour jitter and random erasing of a batch of images on its device."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from icmixup.lab.augment.trivial import grey_image

ERASED_AREA, ERASED_RATIO = (0.02, 1 / 3), (0.3, 10 / 3)  # of Zhong et al. (2020), as in timm


class Jitter(NamedTuple):
    """Factors of each image: all (N,) float32, 1 for no change."""

    brightness: Tensor
    contrast: Tensor
    saturation: Tensor


def draw_jitter(count: int, strength: float, generator: torch.Generator) -> Jitter:
    """Draw factors uniform in [1 - strength, 1 + strength], on the generator's device."""
    draws = torch.rand(3, count, generator=generator, device=generator.device)
    return Jitter(*(1 + strength * (2 * draws - 1)).unbind())


def apply_jitter(images: Tensor, jitter: Jitter) -> Tensor:
    """Change brightness, then contrast, then saturation: (N, channels, H, W) uint8 in and out."""
    brightness, contrast, saturation = (part[:, None, None, None] for part in jitter)
    values = (images.float() * brightness).clamp_(0, 255)
    values = torch.lerp(grey_image(values).mean(dim=(2, 3), keepdim=True), values, contrast).clamp_(0, 255)
    values = torch.lerp(grey_image(values), values, saturation).clamp_(0, 255)
    return values.round_().to(torch.uint8)


class Erased(NamedTuple):
    """A rectangle of each image and the colour it gets; height 0 leaves an image as it is."""

    box: Tensor  # (N, 4) int64: top, left, height, width
    colour: Tensor  # (N, channels) uint8


def draw_erased(
    count: int, channels: int, height: int, width: int, probability: float, generator: torch.Generator
) -> Erased:
    """Draw the rectangles of random erasing, on the generator's device.

    The area is uniform from 2 % to a third of the image, and the logarithm of the aspect ratio is uniform.
    A rectangle that does not fit is made smaller.
    """
    device = generator.device
    draws = torch.rand(5, count, generator=generator, device=device, dtype=torch.float64)
    colour = torch.randint(256, (count, channels), generator=generator, device=device)
    area = (ERASED_AREA[0] + (ERASED_AREA[1] - ERASED_AREA[0]) * draws[1]) * height * width
    low, high = (math.log(bound) for bound in ERASED_RATIO)
    ratio = (low + (high - low) * draws[2]).exp()
    h = (area * ratio).sqrt().round().long().clamp(1, height) * (draws[0] < probability)
    w = (area / ratio).sqrt().round().long().clamp(1, width)
    top, left = (draws[3] * (height - h + 1)).long(), (draws[4] * (width - w + 1)).long()
    return Erased(torch.stack([top, left, h, w], dim=1), colour.to(torch.uint8))


def apply_erased(images: Tensor, erased: Erased) -> Tensor:
    """Fill the rectangle of each image with its colour: (N, channels, H, W) uint8 in and out."""
    top, left, h, w = erased.box[:, :, None].unbind(1)
    y = torch.arange(images.shape[2], device=images.device)
    x = torch.arange(images.shape[3], device=images.device)
    rows, columns = (y >= top) & (y < top + h), (x >= left) & (x < left + w)
    inside = (rows[:, :, None] & columns[:, None, :])[:, None]
    return torch.where(inside, erased.colour[:, :, None, None], images)
