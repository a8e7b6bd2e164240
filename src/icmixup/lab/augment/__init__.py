"""Crop, flip and rotation of a whole set of images on its device, and their normalisation.

N images of (channels, H, W) bytes. All three moves only say from which pixel each pixel comes, so they are
composed as coordinates and the images are gathered once. The result equals, bit for bit, a crop, a flip and
Pillow's `rotate(angle, NEAREST)` one after another.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from icmixup.lab.augment.affine import affine_pixels, gather_pixels, inside, rotation_matrix
from icmixup.lab.augment.trivial import Changes, change, draw_changes

PADDING_MODES = ("zeros", "reflect")
# Pixels of one channel at once: on a CPU their coordinates should fit its cache, on a GPU take a few 100 MB.
BLOCK_PIXELS = {"cpu": 1 << 18, "cuda": 1 << 23}


class Moves(NamedTuple):
    """Where each image goes: all (N,)."""

    down: Tensor  # rows of the padded image above the crop, int64
    right: Tensor  # columns of the padded image left of the crop, int64
    flipped: Tensor  # bool
    angle: Tensor  # degrees, counter-clockwise, float64


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
    """Move each image at random: crop from its padding, flip, rotation; then one change if `trivial`.

    Args:
        images: (N, channels, H, W) uint8.
        padding: pixels on each side before an H x W crop, at every place alike.
        padding_mode: "zeros" or "reflect" (the edge pixel is not repeated).
        flip: mirror left and right every second time.
        rotation: degrees; the angle is uniform within +- rotation, about the centre; nearest, black fill.
        trivial: apply one random operation of random strength to each image (`icmixup.lab.augment.trivial`).
        generator: on any device; the same state gives the same images.

    Returns:
        (N, channels, H, W) uint8, new memory.
    """
    _check(images, padding, padding_mode, rotation)
    moves = draw_moves(len(images), padding=padding, flip=flip, rotation=rotation, generator=generator)
    moves = Moves(*(part.to(images.device) for part in moves))
    changes = (
        Changes(*(p.to(images.device) for p in draw_changes(len(images), generator))) if trivial else None
    )
    return _in_blocks(images, moves, changes, padding, padding_mode)


def _check(images: Tensor, padding: int, padding_mode: str, rotation: float) -> None:
    if images.dtype != torch.uint8 or images.ndim != 4:
        raise ValueError(f"images are {tuple(images.shape)} {images.dtype}; give (N, channels, H, W) uint8")
    if padding_mode not in PADDING_MODES:
        raise ValueError(f"no padding_mode {padding_mode!r}; give {' or '.join(PADDING_MODES)}")
    side = min(images.shape[2:])
    if padding < 0 or (padding_mode == "reflect" and padding >= side):
        raise ValueError(f"padding is {padding} for images of {side} pixels; give 0 to {side - 1}")
    if not 0 <= rotation <= 180:
        raise ValueError(f"rotation is {rotation}; give the largest angle in degrees, 0 to 180")


def draw_moves(count: int, *, padding: int, flip: bool, rotation: float, generator: torch.Generator) -> Moves:
    """Moves for `count` images; all draws are made always, so that no setting shifts another's draws."""
    device = generator.device
    offsets = torch.randint(2 * padding + 1, (2, count), generator=generator, device=device)
    flipped = torch.rand(count, generator=generator, device=device) < 0.5
    turn = torch.rand(count, generator=generator, device=device, dtype=torch.float64)
    return Moves(offsets[0], offsets[1], flipped & flip, (2 * turn - 1) * rotation)


def _in_blocks(
    images: Tensor, moves: Moves, changes: Changes | None, padding: int, padding_mode: str
) -> Tensor:
    moved = torch.empty_like(images, memory_format=torch.contiguous_format)
    step = max(1, BLOCK_PIXELS.get(images.device.type, 1 << 23) // (images.shape[2] * images.shape[3]))
    for start in range(0, len(images), step):
        rows = slice(start, start + step)
        block = move(images[rows], Moves(*(part[rows] for part in moves)), padding, padding_mode)
        moved[rows] = block if changes is None else change(block, Changes(*(part[rows] for part in changes)))
    return moved


def move(images: Tensor, moves: Moves, padding: int, padding_mode: str) -> Tensor:
    """Crop, flip, rotate: (N, channels, H, W) in and out, one gather."""
    height, width = images.shape[2:]
    row, column = affine_pixels(rotation_matrix(moves.angle, height, width), height, width)
    # What the rotation brings in from outside the crop is black, whatever the padding.
    seen = inside(row, column, height, width)
    column = torch.where(moves.flipped[:, None, None], width - 1 - column, column)
    row = row + (moves.down - padding).int()[:, None, None]
    column = column + (moves.right - padding).int()[:, None, None]
    if padding_mode == "reflect":
        row, column = _reflect(row, height), _reflect(column, width)
    return gather_pixels(images, torch.where(seen, row, -1), column)


def _reflect(place: Tensor, size: int) -> Tensor:
    """Places up to size - 1 outside, mirrored at the edge pixels."""
    place = place.abs()
    return torch.where(place < size, place, 2 * (size - 1) - place)


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """(N, channels, H, W) uint8 to float32, by (channels,) mean and std of pixels in [0, 1]."""
    shift, scale = normaliser(mean.to(images.device), std.to(images.device))
    return torch.addcmul(shift, images, scale)


def normaliser(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """(1, channels, 1, 1) shift and scale of bytes: (x / 255 - mean) / std = shift + scale x."""
    mean, std = (part.float().view(1, -1, 1, 1) for part in (mean, std))
    return -mean / std, 1 / (255 * std)
