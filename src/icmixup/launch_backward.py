"""The backward pass of fused.py: each gradient is summed by one program in one order, so runs repeat.

The 2 K entries of the targets are sorted by class; dS_ic is a sum over the entries of class c, so a program
that owns some images and some classes needs no atomic addition. Large classes are cut into chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from icmixup import kernels, kernels_backward
from icmixup.launch import Problem, State, cdiv, fast_sums


class Entries(NamedTuple):
    """The E = 2 K non-zeros of the targets, sorted by class."""

    names: Tensor  # (2, E) int32: classifier, its other class
    shares: Tensor  # (4, E): own share, other share, own share x weight on the rows, x pull on the columns
    chunks: Tensor  # (4, chunks) int32, longest first: name, class, first entry, number of entries
    first_chunk: Tensor  # (C + 1,) int32: chunks of class c are first_chunk[c] .. first_chunk[c + 1]


class Own(NamedTuple):
    """Gradients of an image and of its own classifier, by image; 0 where there is none."""

    row_grad: Tensor  # (R,)
    column_grad: Tensor  # (R,)
    column_pull: Tensor  # (R,)


def backward(
    grads: tuple[Tensor | None, Tensor | None],
    targets: Tensor,
    keys: tuple[Tensor, Tensor],
    state: State,
    problem: Problem,
    dtype: torch.dtype,
) -> Tensor:
    """(R, C) gradient of the scores, from (R,) and (num_columns,) gradients of the losses."""
    own, state_with_pulls = _with_pulls(grads, state, problem)
    own_pull = _own_pull(own, state, problem)
    level = _level(keys, own, own_pull, state_with_pulls, problem)
    entries = _sort_entries(state_with_pulls, problem)
    sums = state.slab.new_empty(problem.num_chunks, problem.Rp)
    _sparse_gradient(keys, state_with_pulls, entries, sums, problem)
    _dense_gradient(targets, keys, state_with_pulls, sums, problem)
    grad = torch.empty(problem.R, problem.C, device=targets.device, dtype=dtype)
    kernels_backward.finish_gradient[(cdiv(problem.R, 32), cdiv(problem.C, 64))](
        sums, targets, entries.first_chunk, own_pull, level, state.plan, grad, problem.R, problem.K,
        problem.C, problem.Rp, problem.offset, BR=32, BC=64,
    )  # fmt: skip
    return grad


def _with_pulls(
    grads: tuple[Tensor | None, Tensor | None], state: State, problem: Problem
) -> tuple[Own, State]:
    """Divide the gradients by the sums that the forward pass left in their place."""
    rows, columns = state.rows.clone(), state.columns.clone()
    pull, right_pull, undo = kernels.PULL.value, kernels.RIGHT_PULL.value, kernels.UNDO.value
    own = Own(*(state.slab.new_zeros(problem.R) for _ in range(3)))
    for table in (rows, columns):
        table[pull : right_pull + 1] = 0.0
    if problem.rows and grads[0] is not None:
        own.row_grad.copy_(grads[0])
        sums = state.rows[:, : problem.R]
        for line in (pull, right_pull):
            rows[line, : problem.R] = own.row_grad * (sums[undo] / sums[line])
    if problem.columns and grads[1] is not None:
        number, sums = problem.num_columns, state.columns[:, : problem.num_columns]
        for line in (pull, right_pull):
            columns[line, :number] = grads[1] * (sums[undo] / sums[line])
        own.column_grad[problem.own_rows] = grads[1].float()
        own.column_pull[problem.own_rows] = columns[pull, :number]
    return own, state._replace(rows=rows, columns=columns)


def _own_pull(own: Own, state: State, problem: Problem) -> Tensor:
    """(R,) what the own entry adds to W_ii, beyond what the sums over entries hold of it."""
    if problem.duplicates == kernels.POSITIVE.value:
        return torch.zeros_like(own.row_grad)
    pull = -(own.row_grad + own.column_grad)
    if problem.duplicates == kernels.IGNORE.value:
        # Equal classifiers are left out there, and the own one is equal to itself.
        here, number = problem.own_rows, problem.num_columns
        mine, top = state.rows[kernels.OWN.value, : problem.R], kernels.TOP.value
        if problem.rows:
            share = (mine - state.rows[top, : problem.R]).exp() / state.rows[kernels.PULL.value, : problem.R]
            pull += own.row_grad * share
        if problem.columns:
            share = (mine[here] - state.columns[top, :number]).exp() / state.columns[
                kernels.PULL.value, :number
            ]
            pull[here] += own.column_grad[here] * share
    return pull


def _level(keys: tuple[Tensor, Tensor], own: Own, own_pull: Tensor, state: State, problem: Problem) -> Tensor:
    """(R,) what the floor of smoothed targets adds to every class of an image: floor x sum_j dloss/dz_ij.

    On the rows that sum is 0. On the columns it is one more sweep, with pulls in the place of weights. What
    the own entry pulls comes with its whole target, floor included, so it is taken off here.
    """
    if problem.C <= 2:
        return torch.zeros_like(own.row_grad)
    mode, floor = state.plan[0], state.plan[2]
    smoothed = (mode == kernels.FAST.value) & (floor != 0)
    plan = torch.where(smoothed, state.plan, -1.0)
    columns = state.columns.clone()
    columns[kernels.BETA.value] = columns[kernels.PULL.value]
    weighted = problem._replace(has_bias=True, columns=False)
    sums = fast_sums(keys, state._replace(columns=columns), plan, weighted)[0][0].sum(0)[: problem.R]
    weight, undo = (state.rows[line, : problem.R] for line in (kernels.WEIGHT.value, kernels.UNDO.value))
    total = weight * (sums + own.column_pull / undo) - own.column_grad
    return torch.where(smoothed, floor * (total - own_pull), 0.0)


def _sort_entries(state: State, problem: Problem) -> Entries:
    K, C, E = problem.K, problem.C, 2 * problem.K
    second = state.pairs[1, :K].where(state.columns[kernels.V.value, :K] != 0, C)
    classes, order = torch.sort(torch.cat([state.pairs[0, :K], second]), stable=True)
    names = torch.empty(2, E, device=order.device, dtype=torch.int32)
    shares = state.slab.new_empty(4, E)
    kernels_backward.pack_entries[(cdiv(E, 256),)](
        state.pairs, state.columns, order, names, shares, K, problem.Kp, E, B=256
    )
    return Entries(names, shares, *_cut(classes, problem))


def _cut(classes: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """Cut the entries of each class into chunks of one length at most: (4, chunks), (C + 1,)."""
    longest = cdiv(2 * problem.K, problem.tiles.heavy_chunks)
    start = torch.searchsorted(classes, torch.arange(problem.C + 1, device=classes.device, dtype=torch.int32))
    number = (start.diff() + longest - 1) // longest
    first_chunk = torch.nn.functional.pad(number.cumsum(0), (1, 0))
    name = torch.arange(problem.num_chunks, device=classes.device)
    of_class = torch.searchsorted(first_chunk[1:], name, right=True).clamp(max=problem.C - 1)
    begin = start[of_class] + (name - first_chunk[of_class]) * longest
    size = (start[of_class + 1] - begin).clamp(0, longest)
    # Chunks side by side in a tile wait for the longest of them, and long ones must not come last.
    size, order = size.sort(descending=True, stable=True)
    return torch.stack([name[order], of_class[order], begin[order], size]).int(), first_chunk.int()


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
            state.plan, sums, problem.R, problem.Rp, problem.Kp, 2 * problem.K, number, MODE=mode,
            BETAS=problem.has_bias, ROWS=problem.rows, COLUMNS=problem.columns, DUPLICATES=problem.duplicates,
            WIDE=problem.wide, NC=tiles.grad_chunks, BN=tiles.grad_entries, BM=tiles.grad_images,
            num_warps=tiles.grad_warps,
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
