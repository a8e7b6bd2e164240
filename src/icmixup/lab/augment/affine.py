"""Affine maps in Pillow's 16.16 fixed-point numbers: source coordinates of each pixel, and one gather.

Integers give the same pixels on every device, equal to those of Pillow's `Image.transform(..., NEAREST)`.
"""

from __future__ import annotations

import torch
from torch import Tensor

FIXED_POINT_ONE = 1 << 16


def rotation_matrix(angle: Tensor, height: int, width: int) -> Tensor:
    """Matrices of rotations about the centre: (N,) degrees, counter-clockwise, to (N, 6) rows a b c d e f.

    The source of output pixel (x, y) is at column a x + b y + c and row d x + e y + f.
    """
    turn = angle.double().deg2rad()
    cos, sin = turn.cos(), turn.sin()
    x, y = width / 2, height / 2
    return torch.stack([cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y], dim=1)


def affine_pixels(matrix: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Row and column of the nearest source pixel of each output pixel: (N, 6) to two (N, H, W) int32."""
    a, b, c, d, e, f = matrix.double().unbind(1)
    # A pixel is sampled at its centre, half a pixel from its corner.
    exact = torch.stack([a, b, c + (a + b) / 2, d, e, f + (d + e) / 2], dim=1)
    a, b, c, d, e, f = (exact * FIXED_POINT_ONE + 0.5).floor().int()[:, :, None, None].unbind(1)
    x = torch.arange(width, dtype=torch.int32, device=matrix.device)
    y = torch.arange(height, dtype=torch.int32, device=matrix.device)[:, None]
    return (d * x + e * y + f) >> 16, (a * x + b * y + c) >> 16


def inside_image(row: Tensor, column: Tensor, height: int, width: int) -> Tensor:
    """Whether each pair of coordinates lies inside the image."""
    return (row >= 0) & (row < height) & (column >= 0) & (column < width)


def gather_pixels(images: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Pixels of (N, channels, H, W) images at (N, H, W) coordinates, black outside the image."""
    count, channels, height, width = images.shape
    visible = inside_image(row, column, height, width)
    index = torch.where(visible, row * width + column, 0).long().flatten(1)
    pixels = images.reshape(count, channels, height * width).gather(
        2, index[:, None].expand(-1, channels, -1)
    )
    return pixels.view_as(images) * visible[:, None]
