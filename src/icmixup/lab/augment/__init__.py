"""Augmentation and normalisation of whole batches of images on their device."""

from __future__ import annotations

import torch
from torch import Tensor

from icmixup.lab.augment.geometry import Geometry, apply_geometry, draw_geometry
from icmixup.lab.augment.trivial import DrawnOperations, apply_operations, draw_operations

__all__ = ["augment", "normalise", "normaliser"]

PADDING_MODES = ("zeros", "reflect")
# Pixels of one channel per block: their coordinates should fit the cache of a CPU, or a few 100 MB of a GPU.
BLOCK_PIXELS = {"cpu": 1 << 18, "cuda": 1 << 23}


def augment(
    images: Tensor,
    *,
    padding: int,
    padding_mode: str,
    flip: bool,
    rotation: float,
    trivial: bool = False,
    generator: torch.Generator,
) -> Tensor:
    """Randomly crop, flip and rotate each image; with `trivial`, also apply one random operation to it.

    Args:
        images: (N, channels, H, W) uint8.
        padding: pixels added on each side before a uniformly random H x W crop.
        padding_mode: "zeros" or "reflect" (the edge pixel is not repeated).
        flip: mirror left and right with probability 1/2.
        rotation: degrees; the angle is uniform within +- rotation, about the centre. Pixels are the nearest
            ones, and black outside the image.
        trivial: apply one random operation of random strength to each image (`icmixup.lab.augment.trivial`).
        generator: on any device; the same state gives the same images.

    Returns:
        (N, channels, H, W) uint8, new memory.
    """
    check_settings(images, padding, padding_mode, rotation)
    geometry = draw_geometry(len(images), padding=padding, flip=flip, rotation=rotation, generator=generator)
    geometry = Geometry(*(part.to(images.device) for part in geometry))
    operations = None
    if trivial:
        drawn = draw_operations(len(images), generator)
        operations = DrawnOperations(*(part.to(images.device) for part in drawn))
    return _augment_blocks(images, geometry, operations, padding, padding_mode)


def check_settings(images: Tensor, padding: int, padding_mode: str, rotation: float) -> None:
    """Raise an error for images or settings that `augment` does not support."""
    if images.dtype != torch.uint8 or images.ndim != 4:
        raise ValueError(
            f"images must be (N, channels, H, W) uint8, got {tuple(images.shape)} {images.dtype}"
        )
    if padding_mode not in PADDING_MODES:
        raise ValueError(f"padding_mode must be {' or '.join(PADDING_MODES)}, got {padding_mode!r}")
    side = min(images.shape[2:])
    if padding < 0:
        raise ValueError(f"padding must be at least 0, got {padding}")
    if padding_mode == "reflect" and padding >= side:
        raise ValueError(
            f"padding must be at most {side - 1} to reflect images of {side} pixels, got {padding}"
        )
    if not 0 <= rotation <= 180:
        raise ValueError(f"rotation must be from 0 to 180 degrees, got {rotation}")


def _augment_blocks(
    images: Tensor, geometry: Geometry, operations: DrawnOperations | None, padding: int, padding_mode: str
) -> Tensor:
    augmented = torch.empty_like(images, memory_format=torch.contiguous_format)
    step = max(1, BLOCK_PIXELS.get(images.device.type, 1 << 23) // (images.shape[2] * images.shape[3]))
    for start in range(0, len(images), step):
        rows = slice(start, start + step)
        block = apply_geometry(
            images[rows], Geometry(*(part[rows] for part in geometry)), padding, padding_mode
        )
        if operations is not None:
            block = apply_operations(block, DrawnOperations(*(part[rows] for part in operations)))
        augmented[rows] = block
    return augmented


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Normalise (N, channels, H, W) uint8 images to float32.

    Args:
        mean, std: (channels,) of pixels in [0, 1].
    """
    shift, scale = normaliser(mean.to(images.device), std.to(images.device))
    return torch.addcmul(shift, images, scale)


def normaliser(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """(1, channels, 1, 1) shift and scale of bytes: (x / 255 - mean) / std = shift + scale x."""
    mean, std = (part.float().view(1, -1, 1, 1) for part in (mean, std))
    return -mean / std, 1 / (255 * std)
