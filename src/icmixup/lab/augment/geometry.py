"""Random crop, flip and rotation of a batch of images on its device.

N images of (channels, H, W) bytes. Each of the three only determines which source pixel an output pixel
shows, so they are composed as coordinates and the pixels are gathered once. The result equals, bit for bit, a
crop, a flip and Pillow's `rotate(angle, NEAREST)` one after another.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from icmixup.lab.augment.affine import affine_pixels, gather_pixels, inside_image, rotation_matrix


class Geometry(NamedTuple):
    """Crop, flip and rotation of each image: all (N,)."""

    top: Tensor  # row of the padded image where the crop begins, int64
    left: Tensor  # column of the padded image where the crop begins, int64
    flipped: Tensor  # bool
    angle: Tensor  # degrees, counter-clockwise, float64


def draw_geometry(
    count: int, *, padding: int, flip: bool, rotation: float, generator: torch.Generator
) -> Geometry:
    """Draw the geometry of `count` images, on the generator's device.

    The same numbers are drawn for all settings, so that one setting does not change the draws of another.
    """
    device = generator.device
    offsets = torch.randint(2 * padding + 1, (2, count), generator=generator, device=device)
    flipped = torch.rand(count, generator=generator, device=device) < 0.5
    turn = torch.rand(count, generator=generator, device=device, dtype=torch.float64)
    return Geometry(offsets[0], offsets[1], flipped & flip, (2 * turn - 1) * rotation)


def apply_geometry(images: Tensor, geometry: Geometry, padding: int, padding_mode: str) -> Tensor:
    """Crop, flip and rotate (N, channels, H, W) images with one gather; the shape stays the same."""
    height, width = images.shape[2:]
    row, column = affine_pixels(rotation_matrix(geometry.angle, height, width), height, width)
    # Pixels that the rotation brings in from outside the crop are black, whatever the padding.
    visible = inside_image(row, column, height, width)
    column = torch.where(geometry.flipped[:, None, None], width - 1 - column, column)
    row = row + (geometry.top - padding).int()[:, None, None]
    column = column + (geometry.left - padding).int()[:, None, None]
    if padding_mode == "reflect":
        row, column = _reflect(row, height), _reflect(column, width)
    return gather_pixels(images, torch.where(visible, row, -1), column)


def _reflect(index: Tensor, size: int) -> Tensor:
    """Mirror indices that are up to size - 1 outside [0, size) at the edge pixels."""
    index = index.abs()
    return torch.where(index < size, index, 2 * (size - 1) - index)
