"""contrast as Triton kernels, forward and backward: both axes of the loss without the matrix S~.

R images, K classifiers, C classes    scores S (R, C)    targets Y~ (K, C)    mixed scores z = S Y~^T (R, K)

A mixed target has two classes, so z_ij = u_j S_i,a_j + v_j S_i,b_j is two reads instead of a product of
length C; under label smoothing the other classes share one floor, which adds the same to every z of an image.
With o_i = z_ii the own entry, t_i the largest score of image i and m the middle of all scores, one
exponential serves both axes, and dominant entries are near e^0, where rounding is small:

    e_ij = exp(z_ij - t_i)            rows       loss_i = log(1 + exp(t_i - o_i) sum_j!=i e_ij)
    w_i  = exp(t_i - m)               columns    loss_j = log(1 + exp(m - o_j) sum_i!=j e_ij w_i)
    W_ij = e_ij (A_i + w_i H_j)       gradient   dS_ic  = sum_j W_ij Y_jc - (g_i + h_i) Y_ic

with A and H the gradients g, h over the sums. That holds while scores spread over less than 60; beyond it the
largest entries are found first, and each axis takes its own exponential. Targets with more classes go through
a tiled float32 product. The device chooses between the three: the host never waits, a CUDA graph can hold the
loss. No atomic additions: equal inputs give equal bits, always. Memory is linear in R + K.

A score that is not finite makes every loss nan, as it does in the product.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from icmixup.contrast.plain import DUPLICATES, Duplicates

if TYPE_CHECKING:
    from icmixup.contrast.launch import Problem

HAS_TRITON = importlib.util.find_spec("triton") is not None
# From results/bench_loss.csv, one H200, where a test holds them to every row: an entry of S~ costs the plain
# product as much as 440 classes, and the kernels, whose host takes 3 ms, win from this much work on:
# 8,600 pairs of 100 classes, 5,300 of 1,000, 1,350 of 21,843.
ENTRY_COST = 440
FUSED_WORK = 4 * 10**10
# Where the kernels do not run, a larger S~ is computed in parts: slower than the product, but not stored.
CHUNKED_ENTRIES = 2**27

_LIBRARY = "icmixup"
_FORWARD = (
    "(Tensor scores, Tensor targets, Tensor? bias, Tensor? row_keys, Tensor? column_keys, int offset, "
    "bool rows, bool columns, int num_columns, int duplicates, int[] tiles) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_BACKWARD = (
    "(Tensor? row_grad, Tensor? column_grad, Tensor targets, Tensor? row_keys, Tensor? column_keys, "
    "Tensor slab, Tensor pairs, Tensor row_table, Tensor column_table, Tensor plan, int num_images, "
    "int offset, bool rows, bool columns, int num_columns, bool has_bias, int duplicates, int[] tiles, "
    "ScalarType dtype) -> Tensor"
)


def fused_available(device: torch.device | str = "cuda") -> bool:
    """Whether the kernels run on `device`: Triton is installed, and it is a CUDA GPU.

    With TRITON_INTERPRET=1 Triton runs them on the CPU, slowly, for tests.
    """
    on_gpu = torch.device(device).type == "cuda" and torch.cuda.is_available()
    return HAS_TRITON and (on_gpu or os.environ.get("TRITON_INTERPRET") == "1")


def prefer_fused(num_rows: int, num_columns: int, num_classes: int, device: torch.device) -> bool:
    """Whether the kernels are not slower than the plain product, by the benchmark.

    Inside a CUDA graph, where the host has no part, they win from about 2,000 pairs on; that is not seen from
    here, so there it is the caller who says fused=True.
    """
    work = num_rows * num_columns * (ENTRY_COST + num_classes)
    return device.type == "cuda" and HAS_TRITON and work >= FUSED_WORK


def prefer_chunked(num_rows: int, num_columns: int) -> bool:
    """Whether S~ is too large to be stored where the kernels do not run."""
    return num_rows * num_columns > CHUNKED_ENTRIES


def contrast_fused(
    scores: Tensor,
    targets: Tensor,
    *,
    offset: int = 0,
    rows: bool = True,
    columns: bool = True,
    num_columns: int | None = None,
    bias: Tensor | None = None,
    row_keys: Tensor | None = None,
    column_keys: Tensor | None = None,
    duplicates: Duplicates = "negative",
    tiles: tuple[int, ...] = (),
) -> tuple[Tensor | None, Tensor | None]:
    """What contrast.contrast returns, from kernels that never store S~.

    Gradients flow to scores alone. float32, bfloat16 and float16, float32 inside; the gradient is in the
    dtype of the scores. Deterministic. Works under autograd, torch.compile and in CUDA graphs.

    Args:
        scores, targets, offset, rows, columns, num_columns, bias, row_keys, column_keys, duplicates:
            as contrast.contrast takes them. Equal keys mean equal targets.
        tiles: launch.Tiles, to try others than the chosen ones.

    Returns:
        (R,) and (num_columns,) float32 losses, or None in place of what was not asked for.
    """
    number = len(targets) if num_columns is None else num_columns
    if not torch.compiler.is_compiling():
        _check(scores, targets, offset, rows, columns, number)
    keys = (None, None) if duplicates == "negative" else (row_keys, column_keys)
    row_losses, column_losses, *_ = torch.ops.icmixup.contrast_fused(
        scores, targets, bias, *keys, offset, rows, columns, number, DUPLICATES.index(duplicates), list(tiles)
    )
    return row_losses if rows else None, column_losses if columns else None


def _check(scores: Tensor, targets: Tensor, offset: int, rows: bool, columns: bool, number: int) -> None:
    if not fused_available(scores.device):
        raise ValueError(
            f"fused=True needs Triton and a CUDA GPU, but scores are on {scores.device}"
            f"{'' if HAS_TRITON else ' and Triton is not installed'}; "
            'pip install triton and move the scores to the GPU, or leave fused="auto"'
        )
    if scores.dtype == torch.float64:
        raise ValueError('the kernels are float32 inside, but scores are float64; leave fused="auto"')
    R, K = len(scores), len(targets)
    assert min(R, K) > 0, "someone gathered an empty batch"
    assert not rows or 0 <= offset <= K - R, "an image without its classifier"
    assert not columns or (0 <= -offset <= R - number and number <= K), "a classifier without its image"


def _problem(
    scores_shape: tuple[int, ...],
    targets: Tensor,
    shape: tuple[int, bool, bool, int],
    has_bias: bool,
    duplicates: int,
    tiles: list[int],
) -> Problem:
    from icmixup.contrast.launch import Problem, Tiles

    device = targets.device
    cores = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    R, C = scores_shape
    return Problem(R, len(targets), C, *shape, duplicates, has_bias, Tiles(*tiles), cores)


def _forward(
    scores: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    row_keys: Tensor | None,
    column_keys: Tensor | None,
    offset: int,
    rows: bool,
    columns: bool,
    num_columns: int,
    duplicates: int,
    tiles: list[int],
) -> tuple[Tensor, ...]:
    from icmixup.contrast.launch import forward

    shape = (offset, rows, columns, num_columns)
    problem = _problem(tuple(scores.shape), targets, shape, bias is not None, duplicates, tiles)
    keys = _keys(row_keys, column_keys, targets)
    bias = None if bias is None else bias.contiguous()
    row_losses, column_losses, state = forward(scores.contiguous(), targets.contiguous(), bias, keys, problem)
    return row_losses, column_losses, *state


def _keys(row_keys: Tensor | None, column_keys: Tensor | None, targets: Tensor) -> tuple[Tensor, Tensor]:
    # A kernel wants a pointer also where it reads nothing.
    if row_keys is None or column_keys is None:
        return targets, targets
    return row_keys.contiguous(), column_keys.contiguous()


def _forward_fake(
    scores: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    row_keys: Tensor | None,
    column_keys: Tensor | None,
    offset: int,
    rows: bool,
    columns: bool,
    num_columns: int,
    duplicates: int,
    tiles: list[int],
) -> tuple[Tensor, ...]:
    from icmixup.contrast.launch import Problem, Tiles

    (R, C), K = scores.shape, targets.shape[0]
    shape = Problem(R, K, C, offset, rows, columns, num_columns, duplicates, False, Tiles(*tiles), 1)
    new = scores.new_empty
    return (
        new(R if rows else 0, dtype=torch.float32),
        new(num_columns if columns else 0, dtype=torch.float32),
        new(C, shape.Rp, dtype=torch.float32),
        new(2, shape.Kp, dtype=torch.int32),
        new(6, shape.Rp, dtype=torch.float32),
        new(9, shape.Kp, dtype=torch.float32),
        new(5, dtype=torch.float32),
    )


def _backward(
    row_grad: Tensor | None,
    column_grad: Tensor | None,
    targets: Tensor,
    row_keys: Tensor | None,
    column_keys: Tensor | None,
    slab: Tensor,
    pairs: Tensor,
    row_table: Tensor,
    column_table: Tensor,
    plan: Tensor,
    num_images: int,
    offset: int,
    rows: bool,
    columns: bool,
    num_columns: int,
    has_bias: bool,
    duplicates: int,
    tiles: list[int],
    dtype: torch.dtype,
) -> Tensor:
    from icmixup.contrast.launch import State
    from icmixup.contrast.launch_backward import backward

    shape = (offset, rows, columns, num_columns)
    problem = _problem((num_images, slab.shape[0]), targets, shape, has_bias, duplicates, tiles)
    keys = _keys(row_keys, column_keys, targets)
    state = State(slab, pairs, row_table, column_table, plan)
    return backward((row_grad, column_grad), targets.contiguous(), keys, state, problem, dtype)


def _backward_fake(*args: Any) -> Tensor:
    slab, num_images, dtype = args[5], args[10], args[18]
    return torch.empty(num_images, slab.shape[0], dtype=dtype, device=slab.device)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    scores, targets, bias, row_keys, column_keys, *shape = inputs
    offset, rows, columns, num_columns, duplicates, tiles = shape
    ctx.save_for_backward(targets, row_keys, column_keys, *output[2:])
    ctx.rest = (
        len(scores),
        offset,
        rows,
        columns,
        num_columns,
        bias is not None,
        duplicates,
        tiles,
        scores.dtype,
    )
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)  # or zeros as large as the slab would come in


def _gradient(
    ctx: Any, row_grad: Tensor | None, column_grad: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    gradient = torch.ops.icmixup.contrast_fused_backward(row_grad, column_grad, *saved, *ctx.rest)
    return gradient, *(None,) * 10


_forward_op = torch.library.custom_op(
    f"{_LIBRARY}::contrast_fused", _forward, mutates_args=(), schema=_FORWARD
)
_forward_op.register_fake(_forward_fake)
_forward_op.register_autograd(_gradient, setup_context=_remember)
_backward_op = torch.library.custom_op(
    f"{_LIBRARY}::contrast_fused_backward", _backward, mutates_args=(), schema=_BACKWARD
)
_backward_op.register_fake(_backward_fake)
