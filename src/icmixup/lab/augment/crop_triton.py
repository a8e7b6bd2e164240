"""RandomResizedCrop of photos on a GPU, in one kernel that reads the photos where they lie.

B photos    S side of the result    h, w height and width of a box

Output pixel (i, j) is the mean of the pixels (y, x) of the box, weighted by the antialiased bilinear filter
of Pillow and torch: w_y w_x, with w_y = 1 - |y + 1/2 - (i + 1/2) h / S| / max(h / S, 1) where that is
positive. The result is that of `crop.resize_windows`, up to rounding.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256  # output pixels of a program


@triton.jit
def _tap(place, tap, size, side):
    """The source pixel of a tap of each output pixel along one axis, and its weight: 0 outside the box."""
    scale = size.to(tl.float32) / side
    reach = tl.maximum(scale, 1.0)
    centre = (place.to(tl.float32) + 0.5) * scale
    pixel = tl.ceil(centre - reach - 0.5).to(tl.int32) + tap
    weight = tl.maximum(1 - tl.abs(pixel.to(tl.float32) + 0.5 - centre) / reach, 0.0)
    return pixel, tl.where((pixel >= 0) & (pixel < size), weight, 0.0)


@triton.jit
def _taps(size, side):
    """The most pixels that an output pixel averages along one axis."""
    return tl.ceil(2 * tl.maximum(size.to(tl.float32) / side, 1.0)).to(tl.int32) + 1


@triton.jit
def crop_kernel(pixels, boxes, out, side, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    photo = tl.program_id(1)
    box = boxes + 6 * photo
    top, left, height, width = tl.load(box), tl.load(box + 1), tl.load(box + 2), tl.load(box + 3)
    stride, first = tl.load(box + 4), tl.load(box + 5)
    inside = place < side * side
    row, column = place // side, place % side
    red = tl.zeros((BLOCK,), tl.float32)
    green = tl.zeros((BLOCK,), tl.float32)
    blue = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for tap_y in range(_taps(height, side)):
        y, weight_y = _tap(row, tap_y, height, side)
        for tap_x in range(_taps(width, side)):
            x, weight_x = _tap(column, tap_x, width, side)
            weight = weight_y * weight_x
            source = pixels + 3 * (first + (top + y) * stride + left + x)
            seen = inside & (weight > 0)
            red += weight * tl.load(source, mask=seen, other=0).to(tl.float32)
            green += weight * tl.load(source + 1, mask=seen, other=0).to(tl.float32)
            blue += weight * tl.load(source + 2, mask=seen, other=0).to(tl.float32)
            total += weight
    total = tl.where(inside, total, 1.0)
    target = out + photo.to(tl.int64) * 3 * side * side + place
    tl.store(target, tl.floor(red / total + 0.5).to(tl.uint8), mask=inside)
    tl.store(target + side * side, tl.floor(green / total + 0.5).to(tl.uint8), mask=inside)
    tl.store(target + 2 * side * side, tl.floor(blue / total + 0.5).to(tl.uint8), mask=inside)


def crop_resized(pixels: Tensor, boxes: Tensor, side: int) -> Tensor:
    """Crop and resize photos that lie one after another.

    Args:
        pixels: (P, 3) uint8 of all photos, contiguous.
        boxes: (B, 6) int64 on the same device: top, left, height and width of the box, width of the photo,
            and its first pixel.
        side: of the result, S.

    Returns:
        (B, 3, S, S) uint8.
    """
    out = torch.empty(len(boxes), 3, side, side, dtype=torch.uint8, device=pixels.device)
    crop_kernel[(triton.cdiv(side**2, BLOCK), len(boxes))](pixels, boxes.contiguous(), out, side, BLOCK=BLOCK)
    return out
