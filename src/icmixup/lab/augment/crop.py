"""RandomResizedCrop of photos of different sizes.

B photos    S side of the result    H, W largest height and width of the boxes

On a CPU each crop is resized by torch's own function. On a GPU a batch is resized by two matrix products:
resizing is linear and separable: a window X (H, W) becomes A_y X A_x^T, where row i of A_y (S, H) holds the
weights of the pixels that output row i averages. A flip reverses the rows of A_x. The weights are those of
the antialiased bilinear filter of Pillow and torch: a triangle of the width of an output pixel, at least.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

ATTEMPTS = 10
RATIO = (3 / 4, 4 / 3)  # width over height


def draw_boxes(sizes: Tensor, smallest: float, generator: torch.Generator) -> Tensor:
    """Draw a random rectangle in each photo, as torchvision's RandomResizedCrop does.

    Its area is uniform in [smallest, 1] of the photo, and the logarithm of its aspect ratio is uniform. If
    ten attempts do not fit into the photo, it is the largest centred rectangle of an allowed ratio.

    Args:
        sizes: (N, 2) height and width, on the device of the generator.
        smallest: least share of the area, above 0 and up to 1.

    Returns:
        (N, 4) int64: top, left, height and width.
    """
    shape = (4, ATTEMPTS, len(sizes))
    draws = torch.rand(shape, generator=generator, device=sizes.device, dtype=torch.float64)
    height, width = sizes.unbind(1)
    area = (smallest + (1 - smallest) * draws[0]) * height * width
    low, high = (math.log(bound) for bound in RATIO)
    ratio = (low + (high - low) * draws[1]).exp()
    w, h = (area * ratio).sqrt().round().long(), (area / ratio).sqrt().round().long()
    fits = (w > 0) & (h > 0) & (w <= width) & (h <= height)
    first = fits.int().argmax(dim=0, keepdim=True)  # the first attempt that fits
    top, left = (draws[2] * (height - h + 1)).long(), (draws[3] * (width - w + 1)).long()
    drawn = torch.stack([part.gather(0, first)[0] for part in (top, left, h, w)], dim=1)
    return torch.where(fits.any(dim=0)[:, None], drawn, centre_boxes(sizes))


def centre_boxes(sizes: Tensor) -> Tensor:
    """(N, 4) largest centred rectangles whose aspect ratio is allowed."""
    height, width = sizes.unbind(1)
    w = torch.minimum(width, (height * RATIO[1]).round().long()).clamp(min=1)
    h = torch.minimum(height, (width / RATIO[0]).round().long()).clamp(min=1)
    return torch.stack([(height - h) // 2, (width - w) // 2, h, w], dim=1)


def resize_each(crops: Iterable[Tensor], side: int) -> Tensor:
    """Resize (height, width, 3) uint8 crops of different sizes on a CPU: (B, 3, S, S) uint8."""
    # As bytes with the channels last, for which torch has vector instructions.
    resized = [
        F.interpolate(crop.permute(2, 0, 1)[None], size=(side, side), mode="bilinear", antialias=True)
        for crop in crops
    ]
    return torch.cat(resized)


def resize_windows(windows: Tensor, boxes: Tensor, side: int) -> Tensor:
    """Resize the upper left box of each window to a square.

    Args:
        windows: (B, H, W, channels) uint8; pixels beyond the box are ignored.
        boxes: (B, 4), of which the last two numbers are the height and width of the box.
        side: of the result, S.

    Returns:
        (B, channels, S, S) uint8.
    """
    _, height, width, channels = windows.shape
    sizes = boxes[:, 2:].to(windows.device)
    rows = filter_weights(sizes[:, 0], height, side)
    columns = filter_weights(sizes[:, 1], width, side)
    # (B, H, W C): the rows of all channels in one product, then the columns of each.
    resized = rows @ windows.view(len(windows), height, width * channels).float()
    resized = resized.view(len(windows), side, width, channels).permute(0, 3, 1, 2)
    resized = resized @ columns.transpose(1, 2)[:, None]
    return resized.round_().clamp_(0, 255).to(torch.uint8)


def filter_weights(length: Tensor, longest: int, side: int) -> Tensor:
    """(B, S, longest) weights that resize the first `length` of `longest` pixels to S pixels; rows sum to 1.

    Args:
        length: (B,) int64, from 1 to `longest`.
    """
    scale = length[:, None, None] / side
    centre = (torch.arange(side, device=length.device)[:, None] + 0.5) * scale
    pixel = torch.arange(longest, device=length.device)
    weights = (1 - (pixel + 0.5 - centre).abs() / scale.clamp(min=1)).clamp(min=0)
    weights = weights * (pixel < length[:, None, None])
    return weights / weights.sum(dim=2, keepdim=True)
