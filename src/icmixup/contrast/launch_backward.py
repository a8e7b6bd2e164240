"""The backward pass of fused.py: each gradient is summed by one program in one order, so runs repeat.

The 2 K entries of the targets are sorted by class; dS_ic is a sum over the entries of class c, so a program
that owns some images and some classes needs no atomic addition. Large classes are cut into chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from icmixup.contrast import kernels, triton_backward as kernels_backward
from icmixup.contrast.launch import Problem, State, cdiv, fast_sums, fuses, sum_tables


class Entries(NamedTuple):
    """The E = 2 K non-zeros of the targets, sorted by class."""

    names: Tensor  # (2, E) int32: classifier, its other class
    shares: Tensor  # (4, E): own share, other share, own share x weight on the rows, x pull on the columns
    starts: Tensor  # (C + 1,) int32: entries of class c are starts[c] .. starts[c + 1]
    chunks: Tensor  # (3, chunks) int32: class, first entry, number of entries
    order: Tensor  # (chunks,) longest first


def backward(
    grads: tuple[Tensor | None, Tensor | None],
    targets: Tensor,
    keys: tuple[Tensor, Tensor],
    state: State,
    problem: Problem,
    dtype: torch.dtype,
) -> Tensor:
    """(R, C) gradient of the scores, from (R,) and (num_columns,) gradients of the losses."""
    axes = [asked and grad is not None for asked, grad in zip(problem[4:6], grads, strict=True)]
    problem = problem._replace(rows=axes[0], columns=axes[1])
    pulled, classes = _pull(grads, state, problem)
    entries = _sort_entries(classes, pulled, problem)
    sums = state.slab.new_empty(problem.num_chunks, problem.Rp)
    _sparse_gradient(keys, pulled, entries, sums, problem)
    _dense_gradient(targets, keys, pulled, sums, problem)
    level = _level(keys, pulled, problem)
    grad = torch.empty(problem.R, problem.C, device=targets.device, dtype=dtype)
    kernels_backward.finish_gradient[(cdiv(problem.R, 32), cdiv(problem.C, 64))](
        sums, targets, entries.starts, pulled.rows, level, state.plan, grad, problem.R, problem.K,
        problem.C, problem.Rp, problem.offset, problem.longest, level.shape[1], BR=32, BC=64,
    )  # fmt: skip
    return grad


def _pull(grads: tuple[Tensor | None, Tensor | None], state: State, problem: Problem) -> tuple[State, Tensor]:
    """The state with gradients over sums where the sums were; (2 K,) int32 classes of the entries."""
    R, K, C, Rp, Kp, number = problem.R, problem.K, problem.C, problem.Rp, problem.Kp, problem.number
    rows = state.slab.new_empty(kernels_backward.ROW_LINES, Rp)
    columns = state.slab.new_empty(kernels.COLUMN_LINES, Kp)
    classes = state.pairs.new_empty(2 * K)
    # Gradients of a mean are one number, expanded: read with their stride, they need no copy.
    of_rows, of_columns = ((state.plan, 0) if grad is None else (grad, grad.stride(0)) for grad in grads)
    kernels_backward.pull_rows[(cdiv(Rp, 128),)](
        *of_rows, *of_columns, state.rows, state.columns, rows, R, Rp, Kp, number, problem.offset,
        ROWS=problem.rows, DUPLICATES=problem.duplicates, B=128,
    )  # fmt: skip
    kernels_backward.pull_columns[(cdiv(Kp, 128),)](
        *of_columns, state.pairs, state.columns, columns, classes, K, C, Kp, number,
        DUPLICATES=problem.duplicates, B=128,
    )  # fmt: skip
    return state._replace(rows=rows, columns=columns), classes


def _level(keys: tuple[Tensor, Tensor], pulled: State, problem: Problem) -> Tensor:
    """(1, parts, Rp) sums over the columns of each image, with pulls for weights, if there is a floor."""
    weighted = problem._replace(rows=True, columns=False)
    tables = sum_tables(weighted, pulled.slab)
    if problem.C > 2:
        fast_sums(keys, pulled, weighted, tables, kernels.PULL.value)
    return tables[0]


def _sort_entries(classes: Tensor, pulled: State, problem: Problem) -> Entries:
    K, C, E, number = problem.K, problem.C, 2 * problem.K, problem.num_chunks
    classes, order = torch.sort(classes, stable=True)
    entries = Entries(
        names=classes.new_empty(2, E),
        shares=pulled.slab.new_empty(4, E),
        starts=classes.new_empty(C + 1),
        chunks=classes.new_empty(3, number),
        order=order,
    )
    kernels_backward.pack_entries[(cdiv(E, 256),)](
        pulled.pairs, pulled.columns, order, entries.names, entries.shares, K, problem.Kp, E, B=256
    )
    kernels_backward.cut_classes[(cdiv(C + 1, 128),)](
        classes, entries.starts, entries.chunks, E, C, number, problem.longest, STEPS=E.bit_length(), B=128
    )
    # Chunks side by side in a tile wait for the longest of them, and long ones must not come last.
    return entries._replace(order=torch.sort(entries.chunks[2], descending=True, stable=True)[1])


def _sparse_gradient(
    keys: tuple[Tensor, Tensor], state: State, entries: Entries, sums: Tensor, problem: Problem
) -> None:
    tiles, number = problem.tiles, problem.num_chunks
    blocks = cdiv(problem.R, tiles.grad_images)
    splits = max(
        1, min(cdiv(number, tiles.grad_chunks), cdiv(tiles.grad_splits * problem.multiprocessors, blocks))
    )
    for mode in (kernels.FAST.value, kernels.SAFE.value):
        kernels_backward.sparse_gradient[(blocks, splits)](
            state.slab, state.columns, state.rows, *keys, entries.names, entries.shares, entries.chunks,
            entries.order, state.plan, sums, problem.R, problem.Rp, problem.Kp, 2 * problem.K, number,
            MODE=mode, BETAS=problem.has_bias, ROWS=problem.rows, COLUMNS=problem.columns,
            DUPLICATES=problem.duplicates, WIDE=problem.wide, NC=tiles.grad_chunks, BN=tiles.grad_entries,
            BM=tiles.grad_images, num_warps=tiles.grad_warps, enable_fp_fusion=fuses(mode),
        )  # fmt: skip


def _dense_gradient(
    targets: Tensor, keys: tuple[Tensor, Tensor], state: State, sums: Tensor, problem: Problem
) -> None:
    tiles = problem.tiles
    kernels_backward.dense_gradient[(cdiv(problem.R, tiles.dense_images),)](
        state.slab, targets, state.columns, state.rows, *keys, state.plan, sums, problem.R, problem.K,
        problem.C, problem.Rp, problem.Kp, DUPLICATES=problem.duplicates, BN=tiles.dense_classifiers,
        BM=tiles.dense_images, BC=tiles.dense_classes, num_warps=tiles.dense_warps,
    )  # fmt: skip
