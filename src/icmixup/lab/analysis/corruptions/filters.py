"""Filters and resampling of batches of images, which the corruptions share.

Outside the image, pixels are mirrored with the edge pixel repeated (c b a | a b c), unless stated otherwise.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

NEGLIGIBLE = 1e-4  # weight of a kernel that changes no byte


def mirror(index: Tensor, size: int) -> Tensor:
    """Indices of any integer position in a line of `size` pixels that is mirrored at both ends."""
    index = index % (2 * size)
    return torch.minimum(index, 2 * size - 1 - index)


def gaussian_weights(sigma: float, radius: int) -> Tensor:
    """(2 radius + 1,) weights of a normal distribution, which sum to 1."""
    offsets = torch.arange(-radius, radius + 1, dtype=torch.float64)
    weights = torch.exp(-0.5 * (offsets / sigma) ** 2) if radius else torch.ones(1, dtype=torch.float64)
    return weights / weights.sum()


def filter_matrix(size: int, weights: Tensor) -> Tensor:
    """(size, size) float32: a line of pixels to the filtered line, for a kernel of any length."""
    radius = len(weights) // 2
    target = torch.arange(size)[:, None]
    source = mirror(target + torch.arange(-radius, radius + 1), size)
    matrix = torch.zeros(size, size, dtype=torch.float64)
    return matrix.scatter_add_(1, source, weights.double().expand(size, -1)).float()


def apply_to_lines(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Apply a linear map to every column of pixels and another one to every row of pixels.

    Args:
        images: (..., H, W)
        rows: (H', H)
        columns: (W', W)

    Returns:
        (..., H', W')
    """
    return rows.to(images) @ images @ columns.to(images).T


def gaussian_blur(images: Tensor, sigma: float, truncate: float = 4.0) -> Tensor:
    """Blur (..., H, W) with a Gaussian that is cut off after `truncate` standard deviations."""
    radius = int(truncate * sigma + 0.5)
    if radius == 0:
        return images
    weights = gaussian_weights(sigma, radius)
    return apply_to_lines(images, *(filter_matrix(size, weights) for size in images.shape[-2:]))


def convolve(images: Tensor, kernel: Tensor) -> Tensor:
    """Filter every channel of (B, C, H, W) with one (k, k) kernel, k odd."""
    radius, (height, width) = len(kernel) // 2, images.shape[-2:]
    rows, columns = (
        mirror(torch.arange(-radius, size + radius, device=images.device), size) for size in (height, width)
    )
    padded = images[:, :, rows][:, :, :, columns].flatten(0, 1)[:, None]
    return F.conv2d(padded, kernel.to(images)[None, None]).view(images.shape)


def sample(images: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Interpolate (B, C, H, W) linearly at (B, H', W') positions; mirrored, the edge is not repeated."""
    height, width = images.shape[-2:]
    grid = torch.stack([2 * x / max(width - 1, 1) - 1, 2 * y / max(height - 1, 1) - 1], dim=-1)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=True)


def zoom(images: Tensor, factor: float) -> Tensor:
    """Enlarge the centre of (B, C, H, W) by a factor of 1 or more, to the same size."""
    height, width = images.shape[-2:]
    y, x = (
        (torch.arange(size, device=images.device) - (size - 1) / 2) / factor + (size - 1) / 2
        for size in (height, width)
    )
    y, x = torch.meshgrid(y, x, indexing="ij")
    return sample(images, y.expand(len(images), -1, -1), x.expand(len(images), -1, -1))


def take_pixels(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Pixels of (B, C, H, W) at integer (B, H', W') positions; the edge is repeated outside."""
    height, width = images.shape[-2:]
    index = rows.clamp(0, height - 1) * width + columns.clamp(0, width - 1)
    flat = index.flatten(1)[:, None].expand(-1, images.shape[1], -1)
    return images.flatten(2).gather(2, flat).view(*images.shape[:2], *index.shape[1:])


def motion_blur(images: Tensor, angle: Tensor, radius: float, sigma: float) -> Tensor:
    """Average along a line that starts at each pixel, with weights exp(-i^2 / 2 sigma^2) of its i-th pixel.

    This is ImageMagick's motion blur; the edge is repeated.

    Args:
        images: (B, C, H, W)
        angle: (B,) in radians.
        radius: the line has 2 radius + 1 pixels.
    """
    steps = torch.arange(2 * math.ceil(radius) + 1, dtype=torch.float64)
    weights = torch.exp(-0.5 * (steps / sigma) ** 2)
    weights = weights / weights.sum()
    y = torch.arange(images.shape[-2], device=images.device)[None, :, None]
    x = torch.arange(images.shape[-1], device=images.device)[None, None, :]
    blurred = torch.zeros_like(images)
    for step, weight in enumerate(weights.tolist()):
        if weight > NEGLIGIBLE:
            down, right = (
                (step * part(angle)).round().long()[:, None, None] for part in (torch.sin, torch.cos)
            )
            blurred += weight * take_pixels(images, y + down, x + right)
    return blurred / weights[weights > NEGLIGIBLE].sum().item()


def luma(images: Tensor) -> Tensor:
    """(B, 1, H, W) brightness of (B, 3, H, W) colours (ITU-R 601); grey images are returned as they are."""
    if images.shape[1] == 1:
        return images
    weights = torch.tensor([0.299, 0.587, 0.114], device=images.device)
    return (images * weights[:, None, None]).sum(dim=1, keepdim=True)
