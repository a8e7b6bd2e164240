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
def _tap(centre, reach, tap, size):
    """The source pixel of a tap of each output pixel along one axis, and its weight: 0 outside the box."""
    pixel = tl.ceil(centre - reach - 0.5).to(tl.int32) + tap
    # A product, since a division takes as long as all the rest.
    weight = tl.maximum(1 - tl.abs(pixel.to(tl.float32) + 0.5 - centre) * (1 / reach), 0.0)
    return pixel, tl.where((pixel >= 0) & (pixel < size), weight, 0.0)


@triton.jit
def _taps(reach):
    """The most pixels that an output pixel averages along one axis."""
    return tl.ceil(2 * reach).to(tl.int32) + 1


@triton.jit
def crop_kernel(pixels, boxes, flipped, out, side, HAS_FLIPS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    photo = tl.program_id(1)
    box = boxes + 6 * photo
    # 32 bits within a photo, since 64 take twice as long.
    top, left = tl.load(box).to(tl.int32), tl.load(box + 1).to(tl.int32)
    height, width = tl.load(box + 2).to(tl.int32), tl.load(box + 3).to(tl.int32)
    stride, first = tl.load(box + 4).to(tl.int32), pixels + 3 * tl.load(box + 5)
    inside = place < side * side
    row, column = place // side, place % side
    scale_y, scale_x = height.to(tl.float32) / side, width.to(tl.float32) / side
    reach_y, reach_x = tl.maximum(scale_y, 1.0), tl.maximum(scale_x, 1.0)
    shown = column
    if HAS_FLIPS:
        shown = tl.where(tl.load(flipped + photo), side - 1 - column, column)
    centre_y, centre_x = (row.to(tl.float32) + 0.5) * scale_y, (shown.to(tl.float32) + 0.5) * scale_x
    red = tl.zeros((BLOCK,), tl.float32)
    green = tl.zeros((BLOCK,), tl.float32)
    blue = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for tap_y in range(_taps(reach_y)):
        y, weight_y = _tap(centre_y, reach_y, tap_y, height)
        line = (top + y) * stride + left
        for tap_x in range(_taps(reach_x)):
            x, weight_x = _tap(centre_x, reach_x, tap_x, width)
            weight = weight_y * weight_x
            source = first + 3 * (line + x)
            seen = inside & (weight > 0)
            red += weight * tl.load(source, mask=seen, other=0).to(tl.float32)
            green += weight * tl.load(source + 1, mask=seen, other=0).to(tl.float32)
            blue += weight * tl.load(source + 2, mask=seen, other=0).to(tl.float32)
            total += weight
    share = 1 / tl.where(inside, total, 1.0)
    target = out + photo.to(tl.int64) * 3 * side * side + place
    tl.store(target, tl.floor(red * share + 0.5).to(tl.uint8), mask=inside)
    tl.store(target + side * side, tl.floor(green * share + 0.5).to(tl.uint8), mask=inside)
    tl.store(target + 2 * side * side, tl.floor(blue * share + 0.5).to(tl.uint8), mask=inside)


def crop_resized(pixels: Tensor, boxes: Tensor, side: int, flipped: Tensor | None = None) -> Tensor:
    """Crop and resize photos that lie one after another.

    Args:
        pixels: (P, 3) uint8 of all photos, contiguous.
        boxes: (B, 6) int64 on the same device: top, left, height and width of the box, width of the photo,
            and its first pixel.
        side: of the result, S.
        flipped: (B,) bool on the same device: whether left and right are swapped; not by default.

    Returns:
        (B, 3, S, S) uint8.
    """
    out = torch.empty(len(boxes), 3, side, side, dtype=torch.uint8, device=pixels.device)
    crop_kernel[(triton.cdiv(side**2, BLOCK), len(boxes))](
        *(pixels, boxes.contiguous(), flipped, out, side), HAS_FLIPS=flipped is not None, BLOCK=BLOCK
    )
    return out
