"""From which pixel each pixel comes: affine maps in Pillow's 16.16 fixed-point numbers, and one gather.

Integers give the same pixels on every device, and bit for bit those of `Image.transform(..., NEAREST)`.
"""

from __future__ import annotations

import torch
from torch import Tensor

ONE = 1 << 16


def rotation_matrix(angle: Tensor, height: int, width: int) -> Tensor:
    """(N,) degrees, counter-clockwise about the centre, to (N, 6) rows a b c d e f.

    The source of output pixel (x, y) is at column a x + b y + c and row d x + e y + f.
    """
    turn = angle.double().deg2rad()
    cos, sin = turn.cos(), turn.sin()
    x, y = width / 2, height / 2
    return torch.stack([cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y], dim=1)


def affine_pixels(matrix: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Source row and column of each output pixel, the nearest: (N, 6) to two (N, H, W) int32."""
    a, b, c, d, e, f = matrix.double().unbind(1)
    # A pixel is looked up at its middle, half a pixel from its corner.
    exact = torch.stack([a, b, c + (a + b) / 2, d, e, f + (d + e) / 2], dim=1)
    a, b, c, d, e, f = (exact * ONE + 0.5).floor().int()[:, :, None, None].unbind(1)
    x = torch.arange(width, dtype=torch.int32, device=matrix.device)
    y = torch.arange(height, dtype=torch.int32, device=matrix.device)[:, None]
    return (d * x + e * y + f) >> 16, (a * x + b * y + c) >> 16


def inside(row: Tensor, column: Tensor, height: int, width: int) -> Tensor:
    """Which places lie in the image."""
    return (row >= 0) & (row < height) & (column >= 0) & (column < width)


def gather_pixels(images: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """(N, channels, H, W) images at (N, H, W) places; black where the place is outside."""
    count, channels, height, width = images.shape
    seen = inside(row, column, height, width)
    place = torch.where(seen, row * width + column, 0).long().flatten(1)
    found = images.reshape(count, channels, height * width).gather(2, place[:, None].expand(-1, channels, -1))
    return found.view_as(images) * seen[:, None]
