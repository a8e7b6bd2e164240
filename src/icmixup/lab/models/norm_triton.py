"""BatchNorm, addition of a shortcut and activation of channels-last maps, fused, on a GPU.

R = B H W pixels    C channels    x (R, C) input    s (R, C) shortcut    y (R, C) output

    z = w (x - mean) / std + b + s        y = act(z)

All of this is limited by memory. Forward, x is read for its moments, then read again, and y is written.
Backward, with dz = dy act'(z), dy and x are read for the sums of dz and dz x, then read again, and dx is
written: eight passes over a map. Without a shortcut, z is computed again from x. With one, the forward pass
stores one bit for each act'(z), and dz is stored, since it is also the gradient of the shortcut.

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
    blocks: int  # of channels
    programs: int  # that share the pixels of a block of channels
    warps: int
    unit: int  # divides the number of channels, which the compiler must know to load several at once


# Bytes of a tile and its warps, by what a kernel does.
MAP_TILE, MAP_WARPS = 4096, 4
MOMENTS_TILE, REDUCE_TILE, SUM_WARPS = 16384, 8192, 8  # reduce_kernel reads up to three maps
STAGES = 5  # tiles of a sum under way; a program that waited for each would reach half of the memory's speed
SUM_PROGRAMS = 128  # of a sum in all: about one on each multiprocessor of an H200
SUM_TILES = 2  # of each program of a sum, at least
# Channels of a tile of a sum. All others wait for the program that adds up the parts of a block of channels,
# so blocks are small, and many; and their slopes fit into a word.
SUM_WIDTH = 32
PARTS = 16384  # sums that the last program reads at once: all of them, since every read waits for the memory
SHARED_MEMORY = 99 << 10  # bytes that a program may use on GPUs of compute capability 8.6 and 8.9
RESERVED = 4 << 10  # of them, for sums over threads
# Channels of a tile, and the share of the memory's speed that such tiles reach if there are more channels.
WIDTHS = {128: 1.0, 64: 0.95, 32: 0.7}
FULL = 0.7  # share of a tile that must be filled for that


def tile_width(channels: int) -> int:
    """Wide tiles, for long reads, unless the last one would be mostly empty."""
    widths = [width for width in WIDTHS if width < 2 * channels]
    if not widths:
        power: int = triton.next_power_of_2(channels)
        return power

    def speed(width: int) -> float:
        blocks = triton.cdiv(channels, width)
        filled: float = channels / (blocks * width)
        return min(1.0, filled / FULL) * (1.0 if blocks == 1 else WIDTHS[width])

    return max(widths, key=speed)


def choose_tiles(maps: Tensor) -> Tiles:
    """One tile for each program."""
    return divide(maps, tile_width(maps.shape[1]), MAP_TILE, MAP_WARPS)


def choose_sum_tiles(maps: Tensor, tile: int) -> Tiles:
    """For a sum over pixels: narrow tiles, of which each program adds several."""
    tiles = divide(maps, min(SUM_WIDTH, triton.next_power_of_2(maps.shape[1])), tile, SUM_WARPS)
    programs = min(triton.cdiv(tiles.programs, SUM_TILES), max(1, SUM_PROGRAMS // tiles.blocks))
    return tiles._replace(programs=programs)


def divide(maps: Tensor, width: int, tile: int, warps: int) -> Tiles:
    """Tiles of `width` channels and `tile` bytes."""
    channels = maps.shape[1]
    height = max(1, tile // (width * maps.element_size()))
    blocks, programs = triton.cdiv(channels, width), triton.cdiv(count_rows(maps), height)
    return Tiles(width, height, blocks, programs, warps, gcd(channels, 16))


def count_rows(maps: Tensor) -> int:
    """R, the pixels of all maps."""
    return maps.numel() // maps.shape[1]


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
    """act'(z)."""
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
    PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Mean and 1/std of each channel, the line z = scale x + offset, and the running statistics.

    Sums are of x minus the channel's first pixel, so that a large mean does not cancel a small variance.
    """
    channels = units * UNIT
    block, part = tl.program_id(0), tl.program_id(1)
    column = block * CHANNELS + tl.arange(0, CHANNELS)
    inside = column < channels
    origin = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    # What only the last program needs is read before the sum, which hides the time that it takes.
    slope = tl.load(weight + column, mask=inside, other=0.0)
    shifted = tl.load(bias + column, mask=inside, other=0.0)
    old_mean = tl.load(running_mean + column, mask=inside, other=0.0)
    old_var = tl.load(running_var + column, mask=inside, other=0.0)
    first = tl.zeros((ROWS, CHANNELS), tl.float32)
    second = tl.zeros((ROWS, CHANNELS), tl.float32)
    for start in tl.range(part * ROWS, rows, programs * ROWS, num_stages=STAGES):
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
        scale = inverse * slope
        offset = shifted - mean * scale
        tl.store(table + column, mean, mask=inside)
        tl.store(table + channels + column, inverse, mask=inside)
        tl.store(table + 2 * channels + column, scale, mask=inside)
        tl.store(table + 3 * channels + column, offset, mask=inside)
        tl.store(running_mean + column, old_mean + momentum * (mean - old_mean), mask=inside)
        unbiased = variance * (rows / (rows - 1.0))
        tl.store(running_var + column, old_var + momentum * (unbiased - old_var), mask=inside)
        if HAS_BATCHES and block == 0:
            tl.store(batches, tl.load(batches) + 1)


@triton.jit
def _last_tile_first(channels, CHANNELS: tl.constexpr, ROWS: tl.constexpr):
    """(ROWS, 1) pixels of this program, and the number of its block of channels.

    The kernel before this one has read the map from its start to its end, whose last part is still in the
    second-level cache; and the kernel after this one reads from the start what this one writes last.
    """
    blocks = tl.cdiv(channels, CHANNELS)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row = (tile // blocks) * ROWS + tl.arange(0, ROWS)[:, None]
    return row, tile % blocks


@triton.jit(do_not_specialize=["rows", "units"])
def apply_kernel(
    x, shortcut, y, bits, table, rows, units,
    ACTIVATION: tl.constexpr, HAS_SHORTCUT: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
    UNIT: tl.constexpr, WORD: tl.constexpr,
):  # fmt: skip
    """y = act(z) with z = scale x + offset + s; with a shortcut also act'(z), which is 0 or 1, as a bit."""
    channels = units * UNIT
    row, column_block = _last_tile_first(channels, CHANNELS, ROWS)
    column = column_block * CHANNELS + tl.arange(0, CHANNELS)
    inside = column < channels
    place = row * channels + column[None, :]
    seen = (row < rows) & inside[None, :]
    scale = tl.load(table + 2 * channels + column, mask=inside, other=0.0)[None, :]
    offset = tl.load(table + 3 * channels + column, mask=inside, other=0.0)[None, :]
    z = tl.load(x + place, mask=seen, other=0.0).to(tl.float32) * scale + offset
    if HAS_SHORTCUT:
        z += tl.load(shortcut + place, mask=seen, other=0.0).to(tl.float32)
        if ACTIVATION != 0:
            slopes = tl.reshape(_slope(z, ACTIVATION).to(tl.int32), (ROWS, CHANNELS // WORD, WORD))
            word = tl.sum(slopes << tl.arange(0, WORD)[None, None, :], axis=2)
            words = tl.cdiv(channels, WORD)
            spot = column_block * (CHANNELS // WORD) + tl.arange(0, CHANNELS // WORD)[None, :]
            tl.store(bits + row * words + spot, word, mask=(row < rows) & (spot < words))
    tl.store(y + place, _activate(z, ACTIVATION).to(y.dtype.element_ty), mask=seen)


@triton.jit
def _slopes(bits, start, rows, block, blocks, ROWS: tl.constexpr):
    """(ROWS, 1) words: act'(z) of the channels of a block."""
    row = start + tl.arange(0, ROWS)[:, None]
    return tl.load(bits + row * blocks + block, mask=row < rows, other=0)


@triton.jit(do_not_specialize=["rows", "units", "programs", "pixels"])
def reduce_kernel(
    dy, second_dy, x, bits, dz, table, weight_grad, bias_grad, line, parts, counters,
    rows, units, programs, pixels,
    ACTIVATION: tl.constexpr, HAS_SECOND: tl.constexpr, HAS_SHORTCUT: tl.constexpr, CHANNELS: tl.constexpr,
    ROWS: tl.constexpr, UNIT: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of w and b, and the line dx = a dz + b x + d; with a shortcut also dz itself.

    dy may come in two parts, from the two ends of a forked output. The moments were those of `pixels` rows,
    which are more than the rows here if a max pooling has left some of them out.

    db = sum dz    dw = sum dz (x - mean) / std    dx = w / std (dz - db / R - (x - mean) / std dw / R)
    """
    channels = units * UNIT
    block, part = tl.program_id(0), tl.program_id(1)
    column = block * CHANNELS + tl.arange(0, CHANNELS)
    inside = column < channels
    blocks = tl.num_programs(0)
    mean = tl.load(table + column, mask=inside, other=0.0)
    inverse = tl.load(table + channels + column, mask=inside, other=0.0)
    scale = tl.load(table + 2 * channels + column, mask=inside, other=0.0)
    offset = tl.load(table + 3 * channels + column, mask=inside, other=0.0)
    first = tl.zeros((ROWS, CHANNELS), tl.float32)
    second = tl.zeros((ROWS, CHANNELS), tl.float32)
    if HAS_SHORTCUT and ACTIVATION != 0:
        next_word = _slopes(bits, part * ROWS, rows, block, blocks, ROWS)
    for start in tl.range(part * ROWS, rows, programs * ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)[:, None]
        place = row * channels + column[None, :]
        seen = (row < rows) & inside[None, :]
        value = tl.load(x + place, mask=seen, other=0.0).to(tl.float32)
        grad = tl.load(dy + place, mask=seen, other=0.0).to(tl.float32)
        if HAS_SECOND:
            grad += tl.load(second_dy + place, mask=seen, other=0.0).to(tl.float32)
        if HAS_SHORTCUT:
            if ACTIVATION != 0:
                word = next_word  # read one tile ahead
                next_word = _slopes(bits, start + programs * ROWS, rows, block, blocks, ROWS)
                grad = tl.where((word >> tl.arange(0, CHANNELS)[None, :]) & 1 == 1, grad, 0.0)
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
        slope = -scale * inverse * product / pixels
        tl.store(bias_grad + column, total, mask=inside)
        tl.store(weight_grad + column, product, mask=inside)
        tl.store(line + column, slope, mask=inside)
        tl.store(line + channels + column, -scale * total / pixels - slope * mean, mask=inside)


@triton.jit(do_not_specialize=["rows", "units"])
def input_gradient_kernel(
    dz, x, dx, table, line, rows, units,
    ACTIVATION: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """dx = a dz + b x + d, where `dz` is still dy if there is an activation."""
    channels = units * UNIT
    row, column_block = _last_tile_first(channels, CHANNELS, ROWS)
    column = column_block * CHANNELS + tl.arange(0, CHANNELS)
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
    check_size(maps)
    assert shortcut is None or (shortcut.shape == maps.shape and activation != "silu")
    found = NormAct.apply(maps, shortcut, weight, bias, statistics, ACTIVATIONS[activation])
    return (found, None) if shortcut is None else found


def check_size(maps: Tensor) -> None:
    if maps.numel() >= LARGEST:
        raise ValueError(f"maps of {tuple(maps.shape)} have more than 2^31 elements; use a smaller batch")


def channels_last(maps: Tensor) -> Tensor:
    return maps.contiguous(memory_format=torch.channels_last)


class NormAct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, maps, shortcut, weight, bias, statistics, activation):
        maps = channels_last(maps)
        table = find_moments(maps, weight, bias, statistics)
        out = torch.empty_like(maps)
        shortcut = None if shortcut is None else channels_last(shortcut.to(maps.dtype))
        bits = make_bits(maps) if shortcut is not None and activation else None
        tiles = choose_tiles(maps)
        apply_kernel[(tiles.blocks * tiles.programs,)](
            *(maps, shortcut, out, bits, table, count_rows(maps), maps.shape[1] // tiles.unit),
            ACTIVATION=activation,
            HAS_SHORTCUT=shortcut is not None,
            WORD=min(SUM_WIDTH, tiles.channels),
            **tile_options(tiles),
        )
        ctx.save_for_backward(maps, bits, table)
        ctx.activation, ctx.counters, ctx.has_shortcut = activation, statistics.counters, shortcut is not None
        ctx.set_materialize_grads(False)
        return out if shortcut is None else (out, out.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, fork_grad=None):
        maps, bits, table = ctx.saved_tensors
        grad, *others = (channels_last(part) for part in (grad, fork_grad) if part is not None)
        inner = torch.empty_like(maps) if ctx.has_shortcut else None
        weight_grad, bias_grad, line = reduce_gradient(
            (grad, others[0] if others else None),
            *(maps, bits, inner, table, ctx.counters),
            activation=ctx.activation,
            pixels=count_rows(maps),
        )
        maps_grad = torch.empty_like(maps)
        tiles = choose_tiles(maps)
        input_gradient_kernel[(tiles.blocks * tiles.programs,)](
            *(grad if inner is None else inner, maps, maps_grad, table, line),
            *(count_rows(maps), maps.shape[1] // tiles.unit),
            ACTIVATION=ctx.activation if inner is None else 0,
            **tile_options(tiles),
        )
        return maps_grad, inner, weight_grad, bias_grad, None, None


def find_moments(maps: Tensor, weight: Tensor, bias: Tensor, statistics: Statistics) -> Tensor:
    """(4, C): mean, 1/std, scale and offset of each channel; the running statistics are updated."""
    tiles = choose_sum_tiles(maps, MOMENTS_TILE)
    channels = maps.shape[1]
    table = torch.empty(4, channels, device=maps.device)
    parts = table.new_empty((2 * tiles.programs, channels))
    moments_kernel[(tiles.blocks, tiles.programs)](
        *(maps, weight, bias, statistics.mean, statistics.var),
        *(statistics.batches, table, parts, statistics.counters),
        *(count_rows(maps), channels // tiles.unit, tiles.programs, statistics.momentum, statistics.eps),
        HAS_BATCHES=statistics.batches is not None,
        **sum_options(tiles, count_stages(maps.device, MOMENTS_TILE, STAGES)),
    )
    return table


def reduce_gradient(
    grads: tuple[Tensor, Tensor | None],
    maps: Tensor,
    bits: Tensor | None,
    inner: Tensor | None,
    table: Tensor,
    counters: Tensor,
    *,
    activation: int,
    pixels: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of w and b, (C,), and (2, C) of the line by which dx depends on x; writes dz to `inner`."""
    channels = maps.shape[1]
    tiles = choose_sum_tiles(maps, REDUCE_TILE)
    weight_grad, bias_grad = table.new_empty(channels), table.new_empty(channels)
    line, parts = table.new_empty((2, channels)), table.new_empty((2 * tiles.programs, channels))
    reduce_kernel[(tiles.blocks, tiles.programs)](
        *(*grads, maps, bits, inner, table, weight_grad, bias_grad, line, parts, counters),
        *(count_rows(maps), channels // tiles.unit, tiles.programs, pixels),
        ACTIVATION=activation,
        HAS_SECOND=grads[1] is not None,
        HAS_SHORTCUT=inner is not None,
        **sum_options(tiles, count_stages(maps.device, 3 * REDUCE_TILE, STAGES)),
    )
    return weight_grad, bias_grad, line


def tile_options(tiles: Tiles) -> dict[str, int]:
    return {"CHANNELS": tiles.channels, "ROWS": tiles.rows, "UNIT": tiles.unit, "num_warps": tiles.warps}


def sum_options(tiles: Tiles, stages: int) -> dict[str, int]:
    parts = min(triton.next_power_of_2(tiles.programs), PARTS // tiles.channels)
    return {**tile_options(tiles), "PARTS": parts, "STAGES": stages}


def count_stages(device: torch.device, tile: int, most: int) -> int:
    """How many tiles of so many bytes may be under way: some GPUs have less shared memory than others."""
    if device.type != "cuda":
        return most
    properties = torch.cuda.get_device_properties(device)
    room: int = getattr(properties, "shared_memory_per_block_optin", SHARED_MEMORY)
    return max(1, min(most, (room - RESERVED) // tile))


def make_bits(maps: Tensor) -> Tensor:
    """(R, blocks) words, not initialised: a bit for each of the channels that a program of a sum reads."""
    blocks = triton.cdiv(maps.shape[1], SUM_WIDTH)
    return torch.empty(count_rows(maps), blocks, dtype=torch.int32, device=maps.device)
