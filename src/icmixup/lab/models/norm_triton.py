"""BatchNorm, addition of a shortcut and activation of channels-last maps, fused, on a GPU.

R = B H W pixels    C channels    x (R, C) input    s (R, C) shortcut    y (R, C) output

    z = w (x - mean) / std + b + s        y = act(z)

All of this is limited by memory. Forward, x is read for its moments, then read again, and y is written.
Backward, with dz = dy act'(z), dy and x are read for the sums of dz and dz x, then read again, and dx is
written: eight passes over a map. Without a shortcut, z is computed again from x. With one, the sign of y
decides, and dz is stored, since it is also the gradient of the shortcut.

Sums over pixels are made by several programs for each block of channels. Each writes its part, and the
program that finishes last adds the parts in a fixed order, so that the result does not depend on which one
that is.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

ACTIVATIONS = {"none": 0, "relu": 1, "relu6": 2, "silu": 3}
LARGEST = 2**31  # elements of a map: offsets are 32 bits


class Tiles(NamedTuple):
    """How a map is divided among programs."""

    channels: int  # of a tile
    rows: int  # pixels of a tile
    programs: int  # that share the pixels of a block of channels, in a sum
    warps: int
    unit: int  # divides the number of channels, which the compiler must know to load several at once


TILE = 4096  # elements
WARPS = 8
SUM_PROGRAMS = 264  # of a sum in all: two on each multiprocessor of an H200
SUM_TILES = 4  # of each program of a sum, at least: the last program has to add up what all of them found
PARTS = 8192  # sums that the last program reads at once
# Channels of a tile, and the share of the memory's speed that such tiles reach if there are more channels.
WIDTHS = {128: 1.0, 64: 0.95, 32: 0.7}
FULL = 0.7  # share of a tile that must be filled for that


def choose_tiles(rows: int, channels: int) -> Tiles:
    """Wide tiles, for long reads, unless the last one would be mostly empty."""
    widths = [width for width in WIDTHS if width < 2 * channels] or [triton.next_power_of_2(channels)]

    def speed(width: int) -> float:
        blocks = triton.cdiv(channels, width)
        filled: float = channels / (blocks * width)
        return min(1.0, filled / FULL) * (1.0 if blocks == 1 else WIDTHS[width])

    width = max(widths, key=speed)
    height = TILE // width
    blocks = triton.cdiv(channels, width)
    programs = max(1, min(triton.cdiv(rows, SUM_TILES * height), SUM_PROGRAMS // blocks))
    return Tiles(width, height, programs, WARPS, gcd(channels, 16))


@triton.jit
def _activate(z, ACTIVATION: tl.constexpr):
    # Comparisons leave NaN as it is, as torch does; tl.maximum would turn it into 0 and hide a divergence.
    if ACTIVATION == 1:
        z = tl.where(z < 0, 0.0, z)
    elif ACTIVATION == 2:
        z = tl.where(z < 0, 0.0, tl.where(z > 6, 6.0, z))
    elif ACTIVATION == 3:
        z = z * tl.sigmoid(z)
    return z


@triton.jit
def _slope(z, ACTIVATION: tl.constexpr):
    """act'(z); for the first three, z may also be act(z)."""
    if ACTIVATION == 1:
        slope = tl.where(z > 0, 1.0, 0.0)
    elif ACTIVATION == 2:
        slope = tl.where((z > 0) & (z < 6), 1.0, 0.0)
    elif ACTIVATION == 3:
        sigmoid = tl.sigmoid(z)
        slope = sigmoid * (1 + z * (1 - sigmoid))
    else:
        slope = tl.full(z.shape, 1.0, tl.float32)
    return slope


@triton.jit
def _add_parts(parts, column, inside, channels, programs, CHANNELS: tl.constexpr, PARTS: tl.constexpr):
    """Sums over programs of two (C,) rows each; past the first-level cache, since others wrote them."""
    first = tl.zeros((PARTS, CHANNELS), tl.float32)
    second = tl.zeros((PARTS, CHANNELS), tl.float32)
    for start in range(0, programs, PARTS):
        program = start + tl.arange(0, PARTS)[:, None]
        place = parts + 2 * program * channels + column[None, :]
        seen = (program < programs) & inside[None, :]
        first += tl.load(place, mask=seen, other=0.0, cache_modifier=".cg")
        second += tl.load(place + channels, mask=seen, other=0.0, cache_modifier=".cg")
    return tl.sum(first, axis=0), tl.sum(second, axis=0)


@triton.jit
def _is_last(counter, programs):
    """Whether all other programs of a block of channels have written their parts; resets the counter."""
    tl.debug_barrier()  # every thread has written before one of them counts
    finished = tl.atomic_add(counter, 1, sem="acq_rel")
    last = finished == programs - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit(do_not_specialize=["rows", "units", "programs"])
def moments_kernel(
    x, weight, bias, running_mean, running_var, batches, table, parts, counters,
    rows, units, programs, momentum, eps,
    HAS_BATCHES: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Mean and 1/std of each channel, the line z = scale x + offset, and the running statistics.

    Sums are of x minus the channel's first pixel, so that a large mean does not cancel a small variance.
    """
    channels = units * UNIT
    block, part = tl.program_id(0), tl.program_id(1)
    column = block * CHANNELS + tl.arange(0, CHANNELS)
    inside = column < channels
    origin = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    first = tl.zeros((ROWS, CHANNELS), tl.float32)
    second = tl.zeros((ROWS, CHANNELS), tl.float32)
    for start in range(part * ROWS, rows, programs * ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        seen = (row < rows) & inside[None, :]
        value = tl.load(x + row * channels + column[None, :], mask=seen, other=0.0).to(tl.float32)
        value = tl.where(seen, value - origin[None, :], 0.0)
        first += value
        second += value * value
    place = parts + 2 * part * channels + column
    tl.store(place, tl.sum(first, axis=0), mask=inside)
    tl.store(place + channels, tl.sum(second, axis=0), mask=inside)
    if _is_last(counters + block, programs):
        total, squares = _add_parts(parts, column, inside, channels, programs, CHANNELS, PARTS)
        shift = total / rows
        variance = squares / rows - shift * shift
        variance = tl.where(variance < 0, 0.0, variance)  # by rounding; NaN stays
        mean, inverse = origin + shift, 1 / tl.sqrt(variance + eps)
        scale = inverse * tl.load(weight + column, mask=inside, other=0.0)
        offset = tl.load(bias + column, mask=inside, other=0.0) - mean * scale
        tl.store(table + column, mean, mask=inside)
        tl.store(table + channels + column, inverse, mask=inside)
        tl.store(table + 2 * channels + column, scale, mask=inside)
        tl.store(table + 3 * channels + column, offset, mask=inside)
        old = tl.load(running_mean + column, mask=inside, other=0.0)
        tl.store(running_mean + column, old + momentum * (mean - old), mask=inside)
        old = tl.load(running_var + column, mask=inside, other=0.0)
        unbiased = variance * (rows / (rows - 1.0))
        tl.store(running_var + column, old + momentum * (unbiased - old), mask=inside)
        if HAS_BATCHES and block == 0:
            tl.store(batches, tl.load(batches) + 1)


@triton.jit(do_not_specialize=["rows", "units"])
def apply_kernel(
    x, shortcut, y, table, rows, units,
    ACTIVATION: tl.constexpr, HAS_SHORTCUT: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """y = act(scale x + offset + s)."""
    channels = units * UNIT
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = column < channels
    place = row * channels + column[None, :]
    seen = (row < rows) & inside[None, :]
    scale = tl.load(table + 2 * channels + column, mask=inside, other=0.0)[None, :]
    offset = tl.load(table + 3 * channels + column, mask=inside, other=0.0)[None, :]
    z = tl.load(x + place, mask=seen, other=0.0).to(tl.float32) * scale + offset
    if HAS_SHORTCUT:
        z += tl.load(shortcut + place, mask=seen, other=0.0).to(tl.float32)
    tl.store(y + place, _activate(z, ACTIVATION).to(y.dtype.element_ty), mask=seen)


@triton.jit(do_not_specialize=["rows", "units", "programs"])
def reduce_kernel(
    dy, second_dy, x, y, dz, table, weight_grad, bias_grad, line, parts, counters,
    rows, units, programs,
    ACTIVATION: tl.constexpr, HAS_SECOND: tl.constexpr, HAS_SHORTCUT: tl.constexpr, CHANNELS: tl.constexpr,
    ROWS: tl.constexpr, UNIT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Gradients of w and b, and the line dx = a dz + b x + d; with a shortcut also dz itself.

    dy may come in two parts, from the two ends of a forked output.

    db = sum dz    dw = sum dz (x - mean) / std    dx = w / std (dz - db / R - (x - mean) / std dw / R)
    """
    channels = units * UNIT
    block, part = tl.program_id(0), tl.program_id(1)
    column = block * CHANNELS + tl.arange(0, CHANNELS)
    inside = column < channels
    mean = tl.load(table + column, mask=inside, other=0.0)
    inverse = tl.load(table + channels + column, mask=inside, other=0.0)
    scale = tl.load(table + 2 * channels + column, mask=inside, other=0.0)
    offset = tl.load(table + 3 * channels + column, mask=inside, other=0.0)
    first = tl.zeros((ROWS, CHANNELS), tl.float32)
    second = tl.zeros((ROWS, CHANNELS), tl.float32)
    for start in range(part * ROWS, rows, programs * ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        place = row * channels + column[None, :]
        seen = (row < rows) & inside[None, :]
        value = tl.load(x + place, mask=seen, other=0.0).to(tl.float32)
        grad = tl.load(dy + place, mask=seen, other=0.0).to(tl.float32)
        if HAS_SECOND:
            grad += tl.load(second_dy + place, mask=seen, other=0.0).to(tl.float32)
        if HAS_SHORTCUT:
            grad *= _slope(tl.load(y + place, mask=seen, other=0.0).to(tl.float32), ACTIVATION)
            tl.store(dz + place, grad.to(dz.dtype.element_ty), mask=seen)
        else:
            grad *= _slope(value * scale[None, :] + offset[None, :], ACTIVATION)
        first += grad
        second += grad * (value - mean[None, :])
    spot = parts + 2 * part * channels + column
    tl.store(spot, tl.sum(first, axis=0), mask=inside)
    tl.store(spot + channels, tl.sum(second, axis=0), mask=inside)
    if _is_last(counters + block, programs):
        total, product = _add_parts(parts, column, inside, channels, programs, CHANNELS, PARTS)
        product *= inverse
        slope = -scale * inverse * product / rows
        tl.store(bias_grad + column, total, mask=inside)
        tl.store(weight_grad + column, product, mask=inside)
        tl.store(line + column, slope, mask=inside)
        tl.store(line + channels + column, -scale * total / rows - slope * mean, mask=inside)


@triton.jit(do_not_specialize=["rows", "units"])
def input_gradient_kernel(
    dz, x, dx, table, line, rows, units,
    ACTIVATION: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """dx = a dz + b x + d, where `dz` is still dy if there is an activation."""
    channels = units * UNIT
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = column < channels
    place = row * channels + column[None, :]
    seen = (row < rows) & inside[None, :]
    scale = tl.load(table + 2 * channels + column, mask=inside, other=0.0)[None, :]
    offset = tl.load(table + 3 * channels + column, mask=inside, other=0.0)[None, :]
    slope = tl.load(line + column, mask=inside, other=0.0)[None, :]
    constant = tl.load(line + channels + column, mask=inside, other=0.0)[None, :]
    value = tl.load(x + place, mask=seen, other=0.0).to(tl.float32)
    grad = tl.load(dz + place, mask=seen, other=0.0).to(tl.float32)
    grad *= _slope(value * scale + offset, ACTIVATION)
    tl.store(dx + place, (scale * grad + slope * value + constant).to(dx.dtype.element_ty), mask=seen)


class Statistics(NamedTuple):
    """What a BatchNorm updates while it trains, on the device of its maps."""

    mean: Tensor  # (C,) running
    var: Tensor  # (C,) running
    batches: Tensor | None  # int64 scalar, counted if given
    counters: Tensor  # (C,) int32 zeros, of programs that finished; not shared with another stream
    momentum: float
    eps: float


def norm_act(
    maps: Tensor,
    weight: Tensor,
    bias: Tensor,
    statistics: Statistics,
    activation: str = "none",
    shortcut: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """act(norm(maps) + shortcut) with the statistics of the batch, whose running means are updated.

    A block with a shortcut is mostly followed by another one, which uses the output twice: in its branch and
    as its shortcut. Autograd would add the two gradients in a pass of its own. If the second use takes the
    fork, a second name for the same values, the backward pass adds them as it reads them.

    Args:
        maps: (B, C, H, W), read and written in channels-last format.
        weight: (C,) float32.
        bias: (C,) float32.
        activation: a key of ACTIVATIONS; "silu" not with a shortcut.
        shortcut: (B, C, H, W), or None.

    Returns:
        (B, C, H, W), channels-last, of the dtype of maps; and, with a shortcut, its fork.
    """
    if maps.numel() >= LARGEST:
        raise ValueError(f"maps of {tuple(maps.shape)} have more than 2^31 elements; use a smaller batch")
    assert shortcut is None or (shortcut.shape == maps.shape and activation != "silu")
    found = NormAct.apply(maps, shortcut, weight, bias, statistics, ACTIVATIONS[activation])
    return (found, None) if shortcut is None else found


def channels_last(maps: Tensor) -> Tensor:
    return maps.contiguous(memory_format=torch.channels_last)


class NormAct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, maps, shortcut, weight, bias, statistics, activation):
        maps = channels_last(maps)
        channels = maps.shape[1]
        rows = maps.numel() // channels
        tiles = choose_tiles(rows, channels)
        table = torch.empty(4, channels, device=maps.device)
        parts = torch.empty(2 * tiles.programs, channels, device=maps.device)
        blocks = triton.cdiv(channels, tiles.channels)
        moments_kernel[(blocks, tiles.programs)](
            *(maps, weight, bias, statistics.mean, statistics.var),
            *(statistics.batches, table, parts, statistics.counters),
            *(rows, channels // tiles.unit, tiles.programs, statistics.momentum, statistics.eps),
            HAS_BATCHES=statistics.batches is not None,
            **sum_options(tiles),
        )
        out = torch.empty_like(maps)
        shortcut = None if shortcut is None else channels_last(shortcut.to(maps.dtype))
        apply_kernel[(triton.cdiv(rows, tiles.rows), blocks)](
            *(maps, shortcut, out, table, rows, channels // tiles.unit),
            ACTIVATION=activation,
            HAS_SHORTCUT=shortcut is not None,
            **tile_options(tiles),
        )
        ctx.save_for_backward(maps, None if shortcut is None else out, table)
        ctx.sizes = rows, channels, tiles, activation, statistics.counters
        ctx.set_materialize_grads(False)
        return out if shortcut is None else (out, out.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, fork_grad=None):
        maps, out, table = ctx.saved_tensors
        rows, channels, tiles, activation, counters = ctx.sizes
        grad, *others = (channels_last(part) for part in (grad, fork_grad) if part is not None)
        second = others[0] if others else None
        weight_grad, bias_grad, line = (
            table.new_empty(channels),
            table.new_empty(channels),
            table.new_empty(2, channels),
        )
        blocks = triton.cdiv(channels, tiles.channels)
        parts = table.new_empty((2 * tiles.programs, channels))
        inner = None if out is None else torch.empty_like(maps)
        reduce_kernel[(blocks, tiles.programs)](
            *(grad, second, maps, out, inner, table, weight_grad, bias_grad, line, parts, counters),
            *(rows, channels // tiles.unit, tiles.programs),
            ACTIVATION=activation,
            HAS_SECOND=second is not None,
            HAS_SHORTCUT=out is not None,
            **sum_options(tiles),
        )
        maps_grad = torch.empty_like(maps)
        input_gradient_kernel[(triton.cdiv(rows, tiles.rows), blocks)](
            *(grad if inner is None else inner, maps, maps_grad, table, line),
            *(rows, channels // tiles.unit),
            ACTIVATION=activation if inner is None else 0,
            **tile_options(tiles),
        )
        return maps_grad, inner, weight_grad, bias_grad, None, None


def tile_options(tiles: Tiles) -> dict[str, int]:
    return {"CHANNELS": tiles.channels, "ROWS": tiles.rows, "UNIT": tiles.unit, "num_warps": tiles.warps}


def sum_options(tiles: Tiles) -> dict[str, int]:
    return {**tile_options(tiles), "PARTS": PARTS // tiles.channels}
