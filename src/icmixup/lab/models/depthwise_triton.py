"""Depthwise convolutions of channels-last maps on a GPU, forward and backward.

B images    C channels    H, W height and width    K side of the filter    S stride    ' of the output

    out[b, y, x, c] = sum_ky,kx maps[b, S y + ky - top, S x + kx - left, c] weight[c, ky, kx]

Each program takes a block of channels and a block of positions: a position is one column of one image over
a few rows. A map value that was loaded once serves all rows of the position that its column of the filter
reaches, so that K loads (not K^2) are made for each output; the other columns of the filter find their
values in the L1 cache, as neighbouring positions are neighbouring columns.

Only the filter, the stride and the tiles are compile-time constants, so that layers share their kernels: a
network has few kinds of filters, and compiling the three kernels for one kind takes seconds.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs
# mypy: disable-error-code="assignment, var-annotated"

from __future__ import annotations

from math import gcd
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FILTER_SIDES = (3, 5, 7)
STRIDES = (1, 2)
# Programs of the weight gradient have one warp each. All of them run at once, in one turn: as many as fit on
# the multiprocessors of an H200 with the registers that each may take.
MULTIPROCESSORS = 132
WARP_REGISTERS = 65536 // 32  # of a multiprocessor, for each thread of a warp
WEIGHT_REGISTERS = {3: 168, 5: 240, 7: 240}  # of a thread, by side of the filter
CHUNKS_AT_ONCE = 512  # chunks, and partial sums, that a program of the last kernel loads at a time
PARTIALS_AT_ONCE = 4096

# The most rows of a position, by side of the filter and stride. With more of them, the compiler (for Hopper)
# spills more than a few registers, or leaves room for fewer than 8 warps on a multiprocessor.
MOST_ROWS = {
    "forward": {(3, 1): 4, (5, 1): 7, (7, 1): 4, (3, 2): 2, (5, 2): 2, (7, 2): 2},
    "input": {(3, 1): 4, (5, 1): 7, (7, 1): 4, (3, 2): 4, (5, 2): 2, (7, 2): 2},
    "weight": {(3, 1): 4, (5, 1): 4, (7, 1): 4, (3, 2): 4, (5, 2): 2, (7, 2): 2},
}

Kind = Literal["forward", "input", "weight"]
# Arguments whose values the compiler must not see, or it would make another kernel for some of them.
SIZES = ["positions", "steps", "units", "H", "W", "OUT_H", "OUT_W", "TOP", "LEFT"]


class Shape(NamedTuple):
    """Sizes of a convolution: of the maps, of the filter, of the padding before them, and of the output."""

    batch: int
    channels: int
    height: int
    width: int
    side: int
    stride: int
    top: int
    left: int
    out_height: int
    out_width: int


class Tiles(NamedTuple):
    """What a program computes: a block of channels at some positions, each of one column and some rows."""

    channels: int
    positions: int
    rows: int
    warps: int
    registers: int | None = None  # at most, for each thread


def choose_tiles(kind: Kind, shape: Shape) -> Tiles:
    """Tiles of one of the three kernels, chosen by the registers that they take.

    A thread holds 8 channels of a position (one load of 16 bytes) and a sum for each of its rows. For the
    weight gradient it holds a sum for each weight of its channels instead, so 4 channels for 25 weights.
    """
    channels = 32 if shape.channels > 0.875 * 32 * _ceil_div(shape.channels, 32) else 16
    per_thread = {3: 8, 5: 4, 7: 2}[shape.side] if kind == "weight" else 8
    warps = 1 if kind == "weight" else 4
    registers = WEIGHT_REGISTERS[shape.side] if kind == "weight" else None
    return Tiles(channels, per_thread * 32 * warps // channels, _choose_rows(kind, shape), warps, registers)


def _choose_rows(kind: Kind, shape: Shape) -> int:
    """Rows of a position, so that the fewest rows are loaded: each position loads those around it, too."""
    most = MOST_ROWS[kind][shape.side, shape.stride]
    height = _input_groups(shape, 1) if kind == "input" else shape.out_height
    around = (shape.side - 1) // shape.stride
    return min(range(1, most + 1), key=lambda rows: _ceil_div(height, rows) * (rows + around))


@triton.jit
def _zeros(COUNT: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    """A tuple of sums, each (BLOCK_P, BLOCK_C)."""
    sums = ()
    for _ in tl.static_range(COUNT):
        sums += (tl.zeros((BLOCK_P, BLOCK_C), tl.float32),)
    return sums


@triton.jit
def _filter_column(taps, kx: tl.constexpr, channel, C, K: tl.constexpr):
    """Column kx of the filters: a tuple of K weights, each (1, BLOCK_C)."""
    weights = ()
    for ky in tl.static_range(K):
        weights += (tl.load(taps + (ky * K + kx) * C + channel, mask=channel < C, other=0.0),)
    return weights


@triton.jit
def _add_taps(
    sums, value, weights, first: tl.constexpr, step: tl.constexpr, COUNT: tl.constexpr, K: tl.constexpr
):
    """Add value times weight (first + i step) to sum i, where the filter has such a weight."""
    added = ()
    for i in tl.static_range(COUNT):
        if first + i * step >= 0 and first + i * step < K:
            added += (sums[i] + value * weights[first + i * step],)
        else:
            added += (sums[i],)
    return added


@triton.jit
def _add_rows(sums, value, grads, row: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, S: tl.constexpr):
    """Add to the sum of each ky the value in an input row times the gradient that weight ky links it to."""
    added = ()
    for ky in tl.static_range(K):
        if (row - ky) % S == 0 and row - ky >= 0 and row - ky < S * ROWS:
            added += (sums[ky] + value * grads[(row - ky) // S],)
        else:
            added += (sums[ky],)
    return added


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    maps,
    taps,
    out,
    positions,
    units,
    H,
    W,
    OUT_H,
    OUT_W,
    TOP,
    LEFT,
    UNIT: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    C = units * UNIT
    # Programs of all channels of a position are neighbours, so that whole pixels are read at about one time.
    BLOCKS = (C + BLOCK_C - 1) // BLOCK_C
    GROUPS = (OUT_H + ROWS - 1) // ROWS
    channel = tl.program_id(0) % BLOCKS * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    position = tl.program_id(0) // BLOCKS * BLOCK_P + tl.arange(0, BLOCK_P)[:, None]
    column, group, image = position % OUT_W, position // OUT_W % GROUPS, position // (OUT_W * GROUPS)
    inside = (position < positions) & (channel < C)
    y, x = group * (ROWS * S) - TOP, column * S - LEFT
    source = maps + ((image * H + y) * W + x) * C + channel
    sums = _zeros(ROWS, BLOCK_P, BLOCK_C)
    for kx in tl.static_range(K):
        # A column of the filter at a time: all K^2 weights of 8 channels would not fit into registers.
        weights = _filter_column(taps, kx, channel, C, K)
        in_width = inside & (x + kx >= 0) & (x + kx < W)
        for row in tl.static_range(S * (ROWS - 1) + K):
            seen = in_width & (y + row >= 0) & (y + row < H)
            value = tl.load(source + (row * W + kx) * C, mask=seen, other=0.0).to(tl.float32)
            sums = _add_taps(sums, value, weights, row, -S, ROWS, K)
    target = out + ((image * OUT_H + group * ROWS) * OUT_W + column) * C + channel
    for row in tl.static_range(ROWS):
        tl.store(target + row * OUT_W * C, sums[row], mask=inside & (group * ROWS + row < OUT_H))


@triton.jit(do_not_specialize=SIZES)
def input_grad_kernel(
    grads,
    taps,
    out,
    positions,
    units,
    H,
    W,
    OUT_H,
    OUT_W,
    TOP,
    LEFT,
    UNIT: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    C = units * UNIT
    # A position is S columns and S * ROWS rows of the padded input. Column S m + q of it meets only weights
    # q + S j, at column m - j of the gradient: nothing is loaded for weights that do not contribute.
    BLOCKS = (C + BLOCK_C - 1) // BLOCK_C
    REACH: tl.constexpr = (K - 1) // S
    COLUMNS = (LEFT + W - 1) // S - LEFT // S + 1
    GROUPS = ((TOP + H - 1) // S - TOP // S + ROWS) // ROWS
    channel = tl.program_id(0) % BLOCKS * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    position = tl.program_id(0) // BLOCKS * BLOCK_P + tl.arange(0, BLOCK_P)[:, None]
    column, group, image = position % COLUMNS, position // COLUMNS % GROUPS, position // (COLUMNS * GROUPS)
    inside = (position < positions) & (channel < C)
    column += LEFT // S
    first_row = group * ROWS + TOP // S
    y, x = first_row * S - TOP, column * S - LEFT
    source = grads + ((image * OUT_H + first_row - REACH) * OUT_W + column) * C + channel
    target = out + ((image * H + y) * W + x) * C + channel
    for phase in tl.static_range(S):
        sums = _zeros(ROWS * S, BLOCK_P, BLOCK_C)
        for kx in tl.static_range(phase, K, S):
            weights = _filter_column(taps, kx, channel, C, K)
            in_width = inside & (column - kx // S >= 0) & (column - kx // S < OUT_W)
            for row in tl.static_range(ROWS + REACH):
                seen = in_width & (first_row + (row - REACH) >= 0) & (first_row + (row - REACH) < OUT_H)
                value = tl.load(source + (row * OUT_W - kx // S) * C, mask=seen, other=0.0).to(tl.float32)
                sums = _add_taps(sums, value, weights, S * (REACH - row), 1, ROWS * S, K)
        in_width = inside & (x + phase >= 0) & (x + phase < W)
        for row in tl.static_range(ROWS * S):
            wanted = in_width & (y + row >= 0) & (y + row < H)
            tl.store(target + (row * W + phase) * C, sums[row], mask=wanted)


@triton.jit(do_not_specialize=SIZES)
def weight_grad_kernel(
    maps,
    grads,
    partials,
    positions,
    steps,
    units,
    H,
    W,
    OUT_H,
    OUT_W,
    TOP,
    LEFT,
    UNIT: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    C = units * UNIT
    # Each thread keeps its own K^2 sums over all its positions, for as few channels as fit into registers.
    # Threads are added up only at the end: adding them up in each step would cost more than the products.
    # One warp makes a program, since adding up several would need 5 barriers for each weight.
    BLOCKS = (C + BLOCK_C - 1) // BLOCK_C
    GROUPS = (OUT_H + ROWS - 1) // ROWS
    channel = tl.program_id(0) % BLOCKS * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    chunk = tl.program_id(0) // BLOCKS
    sums = ()
    for _ in tl.static_range(K):
        sums += (_zeros(K, BLOCK_P, BLOCK_C),)
    # Steps of a program are neighbours, so that the columns between two of them are found in the L1 cache.
    for step in range(steps):
        start = (chunk * steps + step) * BLOCK_P
        position = start + tl.arange(0, BLOCK_P)[:, None]
        column, group, image = position % OUT_W, position // OUT_W % GROUPS, position // (OUT_W * GROUPS)
        inside = (position < positions) & (channel < C)
        loss_source = grads + ((image * OUT_H + group * ROWS) * OUT_W + column) * C + channel
        loss = ()
        for row in tl.static_range(ROWS):
            seen = inside & (group * ROWS + row < OUT_H)
            loss += (tl.load(loss_source + row * OUT_W * C, mask=seen, other=0.0).to(tl.float32),)
        y, x = group * (ROWS * S) - TOP, column * S - LEFT
        source = maps + ((image * H + y) * W + x) * C + channel
        updated = ()
        for kx in tl.static_range(K):
            in_width = inside & (x + kx >= 0) & (x + kx < W)
            column_sums = sums[kx]
            for row in tl.static_range(S * (ROWS - 1) + K):
                seen = in_width & (y + row >= 0) & (y + row < H)
                value = tl.load(source + (row * W + kx) * C, mask=seen, other=0.0).to(tl.float32)
                column_sums = _add_rows(column_sums, value, loss, row, ROWS, K, S)
            updated += (column_sums,)
        sums = updated
    target = partials + chunk * (K * K * C) + channel
    for ky in tl.static_range(K):
        for kx in tl.static_range(K):
            total = tl.sum(sums[kx][ky], axis=0)[None, :]
            tl.store(target + (ky * K + kx) * C, total, mask=channel < C)


@triton.jit(do_not_specialize=["chunks", "channel_stride", "row_stride", "column_stride", "C"])
def sum_kernel(
    partials,
    out,
    chunks,
    channel_stride,
    row_stride,
    column_stride,
    C,
    K: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < K * K * C
    total = tl.zeros((BLOCK_CHUNKS, BLOCK), tl.float32)
    for start in range(0, chunks, BLOCK_CHUNKS):
        chunk = start + tl.arange(0, BLOCK_CHUNKS)[:, None]
        seen = (chunk < chunks) & inside[None, :]
        total += tl.load(partials + chunk * (K * K * C) + place[None, :], mask=seen, other=0.0)
    channel, tap = place % C, place // C
    target = out + channel * channel_stride + tap // K * row_stride + tap % K * column_stride
    tl.store(target, tl.sum(total, axis=0), mask=inside)


def _input_groups(shape: Shape, rows: int) -> int:
    """Positions of the input gradient that lie one above another: each has stride * rows rows."""
    first, last = shape.top // shape.stride, (shape.top + shape.height - 1) // shape.stride
    return _ceil_div(last - first + 1, rows)


def _input_columns(shape: Shape) -> int:
    """Positions of the input gradient that lie side by side: each has stride columns."""
    return (shape.left + shape.width - 1) // shape.stride - shape.left // shape.stride + 1


def _sizes(shape: Shape) -> tuple[int, ...]:
    """The sizes that the three kernels take."""
    return (
        *(shape.channels // _unit(shape.channels), shape.height, shape.width),
        *(shape.out_height, shape.out_width, shape.top, shape.left),
    )


def _unit(channels: int) -> int:
    """Channels of which there is a multiple: the compiler must know it to load 16 bytes at once."""
    return gcd(channels, 16)


def _constants(shape: Shape, tiles: Tiles) -> dict[str, int]:
    """The compile-time arguments that the three kernels share, and the options of their compiler."""
    constants = {
        "UNIT": _unit(shape.channels),
        "K": shape.side,
        "S": shape.stride,
        "ROWS": tiles.rows,
        "BLOCK_P": tiles.positions,
        "BLOCK_C": tiles.channels,
    }
    # Triton 3.10 no longer fuses products and sums by default.
    options = {"num_warps": tiles.warps, "num_stages": 1, "enable_fp_fusion": True}
    return constants | options | ({} if tiles.registers is None else {"maxnreg": tiles.registers})


def _ceil_div(count: int, size: int) -> int:
    return -(-count // size)


def _empty_maps(like: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def _forward(maps: Tensor, taps: Tensor, shape: Shape) -> Tensor:
    """(B, C, H, W) maps and (K * K, C) taps to (B, C, H', W')."""
    tiles = choose_tiles("forward", shape)
    out = _empty_maps(maps, (shape.batch, shape.channels, shape.out_height, shape.out_width))
    positions = shape.batch * _ceil_div(shape.out_height, tiles.rows) * shape.out_width
    grid = (_ceil_div(shape.channels, tiles.channels) * _ceil_div(positions, tiles.positions),)
    forward_kernel[grid](maps, taps, out, positions, *_sizes(shape), **_constants(shape, tiles))
    return out


def _input_grad(grads: Tensor, taps: Tensor, shape: Shape) -> Tensor:
    """(B, C, H', W') gradients and (K * K, C) taps to (B, C, H, W)."""
    tiles = choose_tiles("input", shape)
    out = _empty_maps(grads, (shape.batch, shape.channels, shape.height, shape.width))
    positions = shape.batch * _input_groups(shape, tiles.rows) * _input_columns(shape)
    grid = (_ceil_div(shape.channels, tiles.channels) * _ceil_div(positions, tiles.positions),)
    input_grad_kernel[grid](grads, taps, out, positions, *_sizes(shape), **_constants(shape, tiles))
    return out


def _programs(tiles: Tiles) -> int:
    """Programs of the weight gradient that run at once."""
    return MULTIPROCESSORS * (WARP_REGISTERS // (tiles.registers or 255))


def _weight_grad(maps: Tensor, grads: Tensor, weight: Tensor, shape: Shape) -> Tensor:
    """(B, C, H, W) maps and (B, C, H', W') gradients to (C, 1, K, K), in the dtype of weight."""
    tiles = choose_tiles("weight", shape)
    positions = shape.batch * _ceil_div(shape.out_height, tiles.rows) * shape.out_width
    blocks = _ceil_div(shape.channels, tiles.channels)
    # Programs add their own parts, and a second kernel adds the programs: always in the same order.
    steps = _ceil_div(_ceil_div(positions, tiles.positions), max(_programs(tiles) // blocks, 1))
    chunks = _ceil_div(positions, steps * tiles.positions)
    partials = torch.empty(chunks, shape.side**2, shape.channels, dtype=torch.float32, device=maps.device)
    sizes = positions, steps, *_sizes(shape)
    weight_grad_kernel[(blocks * chunks,)](maps, grads, partials, *sizes, **_constants(shape, tiles))
    return _sum_partials(partials, weight)


def _sum_partials(partials: Tensor, weight: Tensor) -> Tensor:
    """(chunks, K * K, C) sums to (C, 1, K, K), laid out as weight."""
    chunks, taps, channels = partials.shape
    out = torch.empty_like(weight)
    block_chunks = min(CHUNKS_AT_ONCE, triton.next_power_of_2(chunks))
    block = min(64, PARTIALS_AT_ONCE // block_chunks)
    sum_kernel[(_ceil_div(taps * channels, block),)](
        partials,
        out,
        chunks,
        out.stride(0),
        out.stride(2),
        out.stride(3),
        channels,
        K=weight.shape[-1],
        BLOCK_CHUNKS=block_chunks,
        BLOCK=block,
    )
    return out


class DepthwiseConv(torch.autograd.Function):
    """The three kernels as one differentiable function."""

    @staticmethod
    def forward(ctx, maps: Tensor, weight: Tensor, shape: Shape) -> Tensor:
        maps = maps.contiguous(memory_format=torch.channels_last)
        # (K * K, C), as weights of neighbouring channels are loaded together. This copies nothing if the
        # parameter lies in memory like that.
        taps = weight.detach().permute(2, 3, 1, 0).flatten(2).flatten(0, 1).float().contiguous()
        ctx.shape = shape
        ctx.save_for_backward(
            maps if ctx.needs_input_grad[1] else None, taps if ctx.needs_input_grad[0] else None, weight
        )
        return _forward(maps, taps, shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        maps, taps, weight = ctx.saved_tensors
        grads = grads.contiguous(memory_format=torch.channels_last)
        return (
            _input_grad(grads, taps, ctx.shape) if ctx.needs_input_grad[0] else None,
            _weight_grad(maps, grads, weight, ctx.shape) if ctx.needs_input_grad[1] else None,
            None,
        )


def _check(maps: Tensor, weight: Tensor, stride: int, padding: tuple[int, int, int, int]) -> None:
    shapes = f"maps are {tuple(maps.shape)} and weight is {tuple(weight.shape)}"
    if maps.ndim != 4 or weight.ndim != 4 or weight.shape[:2] != (maps.shape[1], 1):
        raise ValueError(f"{shapes}; they must be (B, C, H, W) and (C, 1, K, K)")
    if weight.shape[2] != weight.shape[3] or weight.shape[2] not in FILTER_SIDES:
        raise ValueError(f"{shapes}; filters must be square with a side of 3, 5 or 7")
    if stride not in STRIDES or min(padding) < 0:
        raise ValueError(f"stride must be 1 or 2 and padding not negative, got {stride} and {padding}")
    if maps.dtype not in DTYPES or not weight.is_floating_point():
        raise ValueError(
            f"maps must be bfloat16, float16 or float32, got {maps.dtype} (weight: {weight.dtype})"
        )


def _shape(maps: Tensor, weight: Tensor, stride: int, padding: tuple[int, int, int, int]) -> Shape:
    batch, channels, height, width = maps.shape
    left, right, top, bottom = padding
    side = weight.shape[-1]
    out_height = (top + height + bottom - side) // stride + 1
    out_width = (left + width + right - side) // stride + 1
    sizes = f"maps of {tuple(maps.shape)} padded by {padding}"
    if min(batch, channels, height, width, out_height, out_width) < 1:
        raise ValueError(f"{sizes} have no output for filters of side {side}")
    if batch * channels * max(height * width, out_height * out_width) >= 2**31:
        raise ValueError(
            f"{sizes} have 2^31 values or more; the kernels count in 32 bits: use a smaller batch"
        )
    return Shape(batch, channels, height, width, side, stride, top, left, out_height, out_width)


def depthwise_conv(maps: Tensor, weight: Tensor, stride: int, padding: tuple[int, int, int, int]) -> Tensor:
    """Convolve each channel with its own filter, F.conv2d(F.pad(maps, padding), weight, groups=C).

    Products are added in float32. Nothing waits for the GPU, so it can be captured in a CUDA graph after one
    run has compiled the kernels.

    Args:
        maps: (B, C, H, W) of bfloat16, float16 or float32, fastest if it is channels-last.
        weight: (C, 1, K, K), K 3, 5 or 7, of any float dtype, read as float32.
        stride: 1 or 2.
        padding: zeros on the left, right, top and bottom.

    Returns:
        (B, C, H', W') channels-last, in the dtype of maps.
    """
    _check(maps, weight, stride, padding)
    out: Tensor = DepthwiseConv.apply(maps, weight, _shape(maps, weight, stride, padding))
    return out
