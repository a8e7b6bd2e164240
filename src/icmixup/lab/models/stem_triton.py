"""The first convolution of a network for photos, with stride 2, on blocks of 2 x 2 pixels, on a GPU.

B images    C channels of an image    D channels of the output    K, L height and width of a filter in blocks
E channels of a block: 4 C, and zeros up to a multiple of 8

Tensor cores need more channels than the three of an image. On blocks of pixels, which have enough, stride 2
becomes stride 1. `make_blocks` pads, converts and rearranges the images in one pass, and `weight_gradient`
adds up the gradient of the filters, for which cuDNN has no fast algorithm with so few channels:

    dW[d, k, l, e] = sum over images and pixels (y, x) of dY[y, x, d] X[y + k, x + l, e]

a product of dY^T (D, pixels) and a matrix (pixels, K L E) that is read from the blocks and never stored.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from icmixup.lab.models.norm_triton import count_stages

BLOCKS = 128  # of a program of blocks_kernel
PIXELS = 64  # that a program of weight_kernel multiplies at once
PROGRAMS = 132  # of weight_kernel: one on each multiprocessor of an H200
WARPS, STAGES = 8, 3
LARGEST_SUMS = 64 * 256  # D K L E: the sums of a program stay in registers


@triton.jit
def blocks_kernel(
    maps, out, blocks, channels, height, width, high, wide, top, left,
    stride_image, stride_channel, stride_row, stride_column,
    EXTENDED: tl.constexpr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """out[b, y, x] = the pixels (2 y - top, 2 x - left) to (2 y - top + 1, 2 x - left + 1) of image b."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    entry = tl.arange(0, WIDTH)[None, :]
    x, y, image = block % wide, block // wide % high, block // (wide * high)
    pixel = entry // channels
    row, column = 2 * y + pixel // 2 - top, 2 * x + pixel % 2 - left
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    place = image.to(tl.int64) * stride_image + (entry % channels) * stride_channel
    place += row * stride_row + column * stride_column
    value = tl.load(maps + place, mask=inside & (block < blocks) & (pixel < 4), other=0.0)
    spot = out + block * EXTENDED + entry
    tl.store(spot, value.to(out.dtype.element_ty), mask=(block < blocks) & (entry < EXTENDED))


@triton.jit
def weight_kernel(
    grads, blocks, parts, pixels, out_height, out_width, high, wide, programs,
    FILTERS: tl.constexpr, ROUNDED: tl.constexpr, EXTENDED: tl.constexpr, RUN: tl.constexpr,
    COLUMNS: tl.constexpr, PADDED: tl.constexpr, PIXELS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The sum over some of the pixels: parts[program] (D, K L E)."""
    channel, column = tl.arange(0, ROUNDED), tl.arange(0, PADDED)
    # The blocks under a row of a filter lie one after another.
    shift = (column // RUN) * (wide * EXTENDED) + column % RUN
    total = tl.zeros((ROUNDED, PADDED), tl.float32)
    for start in tl.range(tl.program_id(0) * PIXELS, pixels, programs * PIXELS, num_stages=STAGES):
        pixel = start + tl.arange(0, PIXELS)[:, None]
        x, y, image = pixel % out_width, pixel // out_width % out_height, pixel // (out_width * out_height)
        first = ((image * high + y) * wide + x) * EXTENDED
        known = (pixel < pixels) & (channel[None, :] < FILTERS)
        grad = tl.load(grads + pixel * FILTERS + channel[None, :], mask=known, other=0.0)
        covered = (pixel < pixels) & (column[None, :] < COLUMNS)
        patch = tl.load(blocks + first + shift[None, :], mask=covered, other=0.0)
        total = tl.dot(tl.trans(grad), patch, total)
    place = parts + (tl.program_id(0) * FILTERS + channel[:, None]) * COLUMNS + column[None, :]
    tl.store(place, total, mask=(channel[:, None] < FILTERS) & (column[None, :] < COLUMNS))


def make_blocks(
    maps: Tensor, top: int, left: int, high: int, wide: int, extended: int, dtype: torch.dtype
) -> Tensor:
    """The blocks of images that are padded with zeros.

    Args:
        maps: (B, C, H, W), in any layout.
        top, left: rows and columns of zeros before the image; what `high` and `wide` ask for is added behind.
        high, wide: blocks of an image, down and across.
        extended: E, channels of a block; those after the first 4 C are 0.

    Returns:
        (B, E, high, wide), channels-last, of the given dtype.
    """
    batch, channels, height, width = maps.shape
    out = torch.empty(
        (batch, extended, high, wide), dtype=dtype, device=maps.device, memory_format=torch.channels_last
    )
    count = batch * high * wide
    blocks_kernel[(triton.cdiv(count, BLOCKS),)](
        *(maps, out, count, channels, height, width, high, wide, top, left, *maps.stride()),
        EXTENDED=extended,
        WIDTH=triton.next_power_of_2(extended),
        BLOCKS=BLOCKS,
    )
    return out


def convolve_blocks(blocks: Tensor, weight: Tensor) -> Tensor:
    """F.conv2d(blocks, weight), with a faster gradient of the weight, and none of the blocks.

    Args:
        blocks: (B, E, H, W), channels-last, 16 bits.
        weight: (D, E, K, L) float32.
    """
    out: Tensor = BlockConvolution.apply(blocks, weight)
    return out


class BlockConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, blocks, weight):
        used = weight.to(blocks.dtype, memory_format=torch.channels_last)
        ctx.save_for_backward(blocks, used)
        return F.conv2d(blocks, used)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        blocks, used = ctx.saved_tensors
        if fits_registers(*used.shape):
            return None, weight_gradient(grad, blocks, used.shape)
        return None, torch.nn.grad.conv2d_weight(blocks, used.shape, grad).float()


def weight_gradient(grad: Tensor, blocks: Tensor, shape: tuple[int, ...]) -> Tensor:
    """(D, E, K, L) float32: the gradient of the weight."""
    grad = grad.contiguous(memory_format=torch.channels_last)
    filters, extended, height, width = shape
    columns = height * width * extended
    batch, _, out_height, out_width = grad.shape
    pixels = batch * out_height * out_width
    programs = min(PROGRAMS, triton.cdiv(pixels, PIXELS))
    parts = torch.empty(programs, filters, columns, device=grad.device)
    weight_kernel[(programs,)](
        *(grad, blocks, parts, pixels, out_height, out_width, *blocks.shape[2:], programs),
        FILTERS=filters,
        ROUNDED=max(16, triton.next_power_of_2(filters)),
        EXTENDED=extended,
        RUN=width * extended,
        COLUMNS=columns,
        PADDED=max(16, triton.next_power_of_2(columns)),
        PIXELS=PIXELS,
        STAGES=count_stages(grad.device, 2 * PIXELS * (filters + columns), STAGES),
        num_warps=WARPS,
    )
    return parts.sum(dim=0).view(filters, height, width, extended).permute(0, 3, 1, 2)


def fits_registers(filters: int, extended: int, height: int, width: int) -> bool:
    """Whether a program of `weight_kernel` can keep its sums."""
    sums: int = triton.next_power_of_2(filters) * triton.next_power_of_2(extended * height * width)
    return sums <= LARGEST_SUMS
