"""Max pooling of 3 x 3 pixels with stride 2 and padding 1, of channels-last maps on a GPU.

B images    C channels    H, W height and width of the input, OUT_H, OUT_W of the output

The stem of a ResNet ends with it. Forward stores which of the nine pixels was the largest in one byte, not in
the eight of torch. Backward, each input pixel looks at the four windows that may contain it, so that every
gradient is written once, and sums do not depend on the order of threads.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

PIXELS, CHANNELS, WARPS = 32, 64, 4  # of a program
NOTHING = tl.constexpr(9)  # none of the nine places


@triton.jit(do_not_specialize=["pixels", "units", "height", "width", "out_height", "out_width"])
def pool_forward_kernel(
    maps, out, places, pixels, units, height, width, out_height, out_width,
    UNIT: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    channels = units * UNIT
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)[:, None]
    column, row = pixel % out_width, pixel // out_width % out_height
    image = pixel // (out_width * out_height)
    inside = (pixel < pixels) & (channel < channels)
    best = tl.full((PIXELS, CHANNELS), float("-inf"), tl.float32)
    place = tl.full((PIXELS, CHANNELS), NOTHING, tl.int32)
    for tap in tl.static_range(9):
        y, x = 2 * row + tap // 3 - 1, 2 * column + tap % 3 - 1
        seen = inside & (y >= 0) & (y < height) & (x >= 0) & (x < width)
        source = maps + ((image * height + y) * width + x) * channels + channel
        value = tl.load(source, mask=seen, other=float("-inf")).to(tl.float32)
        # As in torch, NaN is larger than any number, and the first of equal pixels counts.
        better = seen & ((value > best) | (value != value) | (place == NOTHING))
        best = tl.where(better, value, best)
        place = tl.where(better, tap, place)
    target = pixel * channels + channel
    tl.store(out + target, best.to(out.dtype.element_ty), mask=inside)
    tl.store(places + target, place.to(tl.int8), mask=inside)


@triton.jit(do_not_specialize=["pixels", "units", "height", "width", "out_height", "out_width"])
def pool_backward_kernel(
    grads, places, out, pixels, units, height, width, out_height, out_width,
    UNIT: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    channels = units * UNIT
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)[:, None]
    column, row = pixel % width, pixel // width % height
    image = pixel // (width * height)
    inside = (pixel < pixels) & (channel < channels)
    total = tl.zeros((PIXELS, CHANNELS), tl.float32)
    for window in tl.static_range(4):
        # Window v covers rows 2 v - 1 to 2 v + 1: an even row is in one, an odd row in two.
        y, x = (row + window // 2) // 2, (column + window % 2) // 2
        tap_y, tap_x = row + 1 - 2 * y, column + 1 - 2 * x
        new = ((window // 2 == 0) | (row % 2 == 1)) & ((window % 2 == 0) | (column % 2 == 1))
        seen = inside & new & (y < out_height) & (x < out_width)
        source = ((image * out_height + y) * out_width + x) * channels + channel
        place = tl.load(places + source, mask=seen, other=NOTHING).to(tl.int32)
        grad = tl.load(grads + source, mask=seen, other=0.0).to(tl.float32)
        total += tl.where(place == 3 * tap_y + tap_x, grad, 0.0)
    tl.store(out + pixel * channels + channel, total.to(out.dtype.element_ty), mask=inside)


def max_pool(maps: Tensor) -> Tensor:
    """(B, C, H, W) to (B, C, ceil(H / 2), ceil(W / 2)), channels-last, as F.max_pool2d(maps, 3, 2, 1)."""
    if maps.numel() >= 2**31:
        raise ValueError(f"maps of {tuple(maps.shape)} have more than 2^31 elements; use a smaller batch")
    out: Tensor = MaxPool.apply(maps)
    return out


class MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, maps):
        maps = maps.contiguous(memory_format=torch.channels_last)
        batch, channels, height, width = maps.shape
        shape = batch, channels, (height + 1) // 2, (width + 1) // 2
        out = torch.empty(shape, dtype=maps.dtype, device=maps.device, memory_format=torch.channels_last)
        places = torch.empty_like(out, dtype=torch.int8)
        launch(pool_forward_kernel, (maps, out, places), out, maps)
        ctx.save_for_backward(places)
        ctx.shape = maps.shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (places,) = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        maps_grad = torch.empty(
            ctx.shape, dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last
        )
        launch(pool_backward_kernel, (grad, places, maps_grad), maps_grad, maps_grad)
        return maps_grad


def launch(kernel, tensors: tuple[Tensor, ...], written: Tensor, maps: Tensor) -> None:
    """Run a kernel with a program for each block of pixels and channels of the tensor that it writes."""
    channels = maps.shape[1]
    pixels = written.numel() // channels
    unit = gcd(channels, 16)
    out_height, out_width = (maps.shape[2] + 1) // 2, (maps.shape[3] + 1) // 2
    kernel[(triton.cdiv(pixels, PIXELS), triton.cdiv(channels, CHANNELS))](
        *tensors,
        *(pixels, channels // unit, *maps.shape[2:], out_height, out_width),
        UNIT=unit,
        PIXELS=PIXELS,
        CHANNELS=CHANNELS,
        num_warps=WARPS,
    )
