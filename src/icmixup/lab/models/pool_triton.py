"""Max pooling of 3 x 3 pixels with stride 2 and padding 1, and the mean, of channels-last maps on a GPU.

B images    C channels    H, W height and width of the input, OUT_H, OUT_W of the output

The stem of a ResNet ends with it. Forward stores which of the nine pixels was the largest in one byte, not in
the eight of torch. Backward, each block of 2 x 2 input pixels looks at the four windows that may contain it,
so that every gradient is written once, and sums do not depend on the order of threads.

In that stem BatchNorm and ReLU come before it, on the largest maps of the network. `norm_pool` computes them
in the same pass: the maps between are never stored. Backward, only pixels that were the largest of a window
have a gradient, so the sums of BatchNorm are over windows; x of those pixels is kept in `picked`.
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

from icmixup.lab.models.norm_triton import (
    ACTIVATIONS,
    Statistics,
    channels_last,
    check_size,
    count_rows,
    find_moments,
    reduce_gradient,
)

PIXELS, CHANNELS, WARPS = 16, 64, 4  # of a program
NOTHING = tl.constexpr(9)  # none of the nine places


@triton.jit(do_not_specialize=["pixels", "units", "height", "width", "out_height", "out_width"])
def pool_forward_kernel(
    maps, out, places, picked, table, pixels, units, height, width, out_height, out_width,
    HAS_NORM: tl.constexpr, UNIT: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The largest of the nine pixels of each window; with a norm, of relu(scale x + offset)."""
    channels = units * UNIT
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)[:, None]
    column, row = pixel % out_width, pixel // out_width % out_height
    image = pixel // (out_width * out_height)
    inside = (pixel < pixels) & (channel < channels)
    best = tl.full((PIXELS, CHANNELS), float("-inf"), tl.float32)
    place = tl.full((PIXELS, CHANNELS), NOTHING, tl.int32)
    if HAS_NORM:
        scale = tl.load(table + 2 * channels + channel, mask=channel < channels, other=0.0)
        offset = tl.load(table + 3 * channels + channel, mask=channel < channels, other=0.0)
        source_value = tl.zeros((PIXELS, CHANNELS), tl.float32)
    for tap in tl.static_range(9):
        y, x = 2 * row + tap // 3 - 1, 2 * column + tap % 3 - 1
        seen = inside & (y >= 0) & (y < height) & (x >= 0) & (x < width)
        source = maps + ((image * height + y) * width + x) * channels + channel
        loaded = tl.load(source, mask=seen, other=0.0).to(tl.float32)
        value = loaded * scale + offset if HAS_NORM else loaded
        # As in torch, NaN is larger than any number, and the first of equal pixels counts.
        better = seen & ((value > best) | (value != value) | (place == NOTHING))
        best = tl.where(better, value, best)
        place = tl.where(better, tap, place)
        if HAS_NORM:
            source_value = tl.where(better, loaded, source_value)
    target = pixel * channels + channel
    if HAS_NORM:
        tl.store(picked + target, source_value.to(picked.dtype.element_ty), mask=inside)
        best = tl.where(best < 0, 0.0, best)
    tl.store(out + target, best.to(out.dtype.element_ty), mask=inside)
    tl.store(places + target, place.to(tl.int8), mask=inside)


@triton.jit(do_not_specialize=["pixels", "units", "height", "width", "out_height", "out_width"])
def pool_backward_kernel(
    grads, places, out, maps, table, line, pixels, units, height, width, out_height, out_width,
    HAS_NORM: tl.constexpr, UNIT: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Gradients of the blocks of 2 x 2 input pixels; window v covers rows 2 v - 1 to 2 v + 1.

    So the first row of block v is the middle one of window v, and the second row is the last one of window v
    and the first one of window v + 1.
    """
    channels = units * UNIT
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    block = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)[:, None]
    column, row = block % out_width, block // out_width % out_height
    image = block // (out_width * out_height)
    inside = (block < pixels) & (channel < channels)
    source = block * channels + channel
    right, below = inside & (column + 1 < out_width), inside & (row + 1 < out_height)
    here_place, here = _window(places, grads, source, inside)
    right_place, right_grad = _window(places, grads, source + channels, right)
    below_place, below_grad = _window(places, grads, source + out_width * channels, below)
    across_place, across = _window(places, grads, source + (out_width + 1) * channels, right & below)
    for pixel in tl.static_range(4):
        if pixel == 0:
            total = tl.where(here_place == 4, here, 0.0)
        elif pixel == 1:
            total = tl.where(here_place == 5, here, 0.0) + tl.where(right_place == 3, right_grad, 0.0)
        elif pixel == 2:
            total = tl.where(here_place == 7, here, 0.0) + tl.where(below_place == 1, below_grad, 0.0)
        else:
            total = tl.where(here_place == 8, here, 0.0) + tl.where(right_place == 6, right_grad, 0.0)
            total += tl.where(below_place == 2, below_grad, 0.0) + tl.where(across_place == 0, across, 0.0)
        y, x = 2 * row + pixel // 2, 2 * column + pixel % 2
        target = ((image * height + y) * width + x) * channels + channel
        seen = inside & (y < height) & (x < width)
        if HAS_NORM:
            value = tl.load(maps + target, mask=seen, other=0.0).to(tl.float32)
            total = _input_gradient(value, total, table, line, channel, channels)
        tl.store(out + target, total.to(out.dtype.element_ty), mask=seen)


@triton.jit
def _window(places, grads, source, seen):
    """The largest pixel of a window, and its gradient."""
    place = tl.load(places + source, mask=seen, other=NOTHING).to(tl.int32)
    return place, tl.load(grads + source, mask=seen, other=0.0).to(tl.float32)


@triton.jit
def _input_gradient(value, grad, table, line, channel, channels):
    """dx = a dz + b x + d of BatchNorm and ReLU, as norm_triton.input_gradient_kernel computes it."""
    known = channel < channels
    scale = tl.load(table + 2 * channels + channel, mask=known, other=0.0)
    offset = tl.load(table + 3 * channels + channel, mask=known, other=0.0)
    slope = tl.load(line + channel, mask=known, other=0.0)
    constant = tl.load(line + channels + channel, mask=known, other=0.0)
    grad = tl.where(value * scale + offset > 0, grad, 0.0)
    return scale * grad + slope * value + constant


def max_pool(maps: Tensor) -> Tensor:
    """(B, C, H, W) to (B, C, ceil(H / 2), ceil(W / 2)), channels-last, as F.max_pool2d(maps, 3, 2, 1)."""
    check_size(maps)
    out: Tensor = MaxPool.apply(maps)
    return out


class MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, maps):
        maps = channels_last(maps)
        out, places = empty_pooled(maps, maps.dtype), empty_pooled(maps, torch.int8)
        launch(pool_forward_kernel, (maps, out, places, None, None), maps, HAS_NORM=False)
        ctx.save_for_backward(places)
        ctx.shape = maps.shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (places,) = ctx.saved_tensors
        grad = channels_last(grad)
        maps_grad = torch.empty(
            ctx.shape, dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last
        )
        launch(pool_backward_kernel, (grad, places, maps_grad, None, None, None), maps_grad, HAS_NORM=False)
        return maps_grad


def norm_pool(maps: Tensor, weight: Tensor, bias: Tensor, statistics: Statistics) -> Tensor:
    """max_pool(relu(norm(maps))), with the statistics of the batch, whose running means are updated."""
    check_size(maps)
    out: Tensor = NormPool.apply(maps, weight, bias, statistics)
    return out


class NormPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, maps, weight, bias, statistics):
        maps = channels_last(maps)
        table = find_moments(maps, weight, bias, statistics)
        out, picked = empty_pooled(maps, maps.dtype), empty_pooled(maps, maps.dtype)
        places = empty_pooled(maps, torch.int8)
        launch(pool_forward_kernel, (maps, out, places, picked, table), maps, HAS_NORM=True)
        ctx.save_for_backward(maps, picked, places, table)
        ctx.counters = statistics.counters
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        maps, picked, places, table = ctx.saved_tensors
        grad = channels_last(grad)
        weight_grad, bias_grad, line = reduce_gradient(
            (grad, None),
            *(picked, None, None, table, ctx.counters),
            activation=ACTIVATIONS["relu"],
            pixels=count_rows(maps),
        )
        maps_grad = torch.empty_like(maps)
        launch(pool_backward_kernel, (grad, places, maps_grad, maps, table, line), maps, HAS_NORM=True)
        return maps_grad, weight_grad, bias_grad, None


def global_mean(maps: Tensor) -> Tensor:
    """(B, C, H, W) to (B, C, 1, 1): the mean over all pixels, with a gradient in channels-last format.

    That of torch is not, and converting it takes longer than computing it.
    """
    out: Tensor = GlobalMean.apply(maps)
    return out


class GlobalMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, maps):
        ctx.shape = maps.shape
        return maps.mean((2, 3), keepdim=True)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return channels_last((grad / (ctx.shape[2] * ctx.shape[3])).expand(ctx.shape))


def empty_pooled(maps: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for a value of each window and channel."""
    batch, channels, height, width = maps.shape
    shape = batch, channels, (height + 1) // 2, (width + 1) // 2
    return torch.empty(shape, dtype=dtype, device=maps.device, memory_format=torch.channels_last)


def launch(kernel, tensors: tuple[Tensor | None, ...], maps: Tensor, **options: bool) -> None:
    """Run a kernel with a program for some windows, or blocks of input pixels, and channels."""
    batch, channels, height, width = maps.shape
    out_height, out_width = (height + 1) // 2, (width + 1) // 2
    count, unit = batch * out_height * out_width, gcd(channels, 16)
    kernel[(triton.cdiv(count, PIXELS), triton.cdiv(channels, CHANNELS))](
        *tensors,
        *(count, channels // unit, height, width, out_height, out_width),
        UNIT=unit,
        PIXELS=PIXELS,
        CHANNELS=CHANNELS,
        num_warps=WARPS,
        **options,
    )
