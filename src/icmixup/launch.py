"""The forward pass of fused.py as launches of kernels; nothing here makes the host wait for the device.

Which kernels do the work is decided on the device (plan): the others are launched too, and leave at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from icmixup import kernels


class Tiles(NamedTuple):
    """Sizes of tiles and numbers of warps, powers of two but for sum_groups; from bench/loss.py --tune."""

    sum_classifiers: int = 256  # tile of the sums
    sum_images: int = 32  # at most 128, as for the gradient
    sum_warps: int = 16
    sum_groups: int = 0  # programs at once, each with column sums of its own; 0: one a multiprocessor
    grad_chunks: int = 32  # tile of the gradient: chunks, entries of each, images
    grad_entries: int = 4
    grad_images: int = 32
    grad_warps: int = 16
    grad_splits: int = 1  # programs a multiprocessor at least, where there are few images
    dense_classifiers: int = 128  # tile of targets with more than two classes
    dense_images: int = 64
    dense_classes: int = 16
    dense_warps: int = 8
    heavy_chunks: int = 256  # a class with more than 2 K / heavy_chunks entries is split


class Problem(NamedTuple):
    """One call of contrast_fused, apart from tensors."""

    R: int
    K: int
    C: int
    offset: int
    rows: bool
    columns: bool
    num_columns: int
    duplicates: int
    has_bias: bool
    tiles: Tiles
    multiprocessors: int

    @property
    def Rp(self) -> int:
        return _up(self.R, 128)

    @property
    def Kp(self) -> int:
        return _up(self.K, max(self.tiles.sum_classifiers, self.tiles.dense_classifiers))

    @property
    def wide(self) -> bool:
        """Whether 32 bits do not address all of S^T."""
        return (self.C + 1) * self.Rp >= 2**31

    @property
    def betas(self) -> bool:
        """Whether classifiers count differently on the rows: by their bias, or because they are padding."""
        return self.has_bias or self.K % self.tiles.sum_classifiers != 0

    @property
    def grid(self) -> tuple[int, int]:
        """Groups of images, parts of the classifiers."""
        programs = self.tiles.sum_groups or self.multiprocessors
        groups = min(cdiv(self.R, self.tiles.sum_images), programs)
        most = cdiv(self.K, max(self.tiles.sum_classifiers, self.tiles.dense_classifiers))
        return groups, max(1, min(most, programs // groups))

    @property
    def span(self) -> int:
        """Classifiers of one part."""
        block = max(self.tiles.sum_classifiers, self.tiles.dense_classifiers)
        return cdiv(cdiv(self.K, block), self.grid[1]) * block

    @property
    def num_chunks(self) -> int:
        return self.C + self.tiles.heavy_chunks

    @property
    def own_rows(self) -> slice:
        """The images that the leading classifiers belong to."""
        return slice(-self.offset, -self.offset + self.num_columns)


class State(NamedTuple):
    """What the forward pass leaves to the backward pass."""

    slab: Tensor  # (C, Rp) scores, transposed
    pairs: Tensor  # (2, Kp) int32 classes of each classifier
    rows: Tensor  # (6, Rp) numbers by image, lines as named in kernels.py
    columns: Tensor  # (9, Kp) numbers by classifier
    plan: Tensor  # (4,) mode, centre, floor, poison


def cdiv(number: int, size: int) -> int:
    return -(-number // size)


def _up(number: int, size: int) -> int:
    return cdiv(number, size) * size


def forward(
    scores: Tensor, targets: Tensor, bias: Tensor | None, keys: tuple[Tensor, Tensor], problem: Problem
) -> tuple[Tensor, Tensor, State]:
    """(R,) row losses, (num_columns,) column losses (empty where not asked for), and the state."""
    state = _prepare(scores, targets, bias, problem)
    _find_tops(targets, keys, state, problem)
    by_row, by_column = fast_sums(keys, state, state.plan, problem)
    _safe_sums(targets, keys, state, problem, (by_row, by_column))
    empty = state.slab.new_empty(0)
    rows = _losses(by_row.sum(1), state.rows, state.rows[0], problem)[: problem.R] if problem.rows else empty
    own, columns = state.rows[0, problem.own_rows], state.columns[:, : problem.num_columns]
    return rows, _losses(by_column.sum(1), columns, own, problem) if problem.columns else empty, state


def _prepare(scores: Tensor, targets: Tensor, bias: Tensor | None, problem: Problem) -> State:
    """Read the pairs off the targets, choose the mode, transpose the scores, find the own entries."""
    low, high = torch.aminmax(scores, dim=1)
    peaks = high.float()
    state = State(
        slab=peaks.new_empty(problem.C, problem.Rp),
        pairs=torch.empty(2, problem.Kp, device=scores.device, dtype=torch.int32),
        rows=peaks.new_zeros(kernels.ROW_LINES, problem.Rp),
        columns=peaks.new_zeros(kernels.COLUMN_LINES, problem.Kp),
        plan=peaks.new_empty(4),
    )
    _choose_mode(peaks.amax(), low.amin().float(), targets, bias, state, problem)
    R, K, C, Rp = problem.R, problem.K, problem.C, problem.Rp
    kernels.transpose_scores[(Rp // 32, cdiv(C, 64))](
        scores, peaks, state.slab, state.plan, R, C, Rp, BR=32, BC=64
    )
    below, floors = peaks.new_empty(Rp, dtype=torch.float64), peaks.new_empty(Rp)
    kernels.find_own[(Rp // 128,)](
        scores, peaks, state.slab, targets, state.pairs, state.columns, state.plan, state.rows, below, floors,
        R, K, C, Rp, problem.Kp, problem.offset, B=128, BC=16,
    )  # fmt: skip
    _find_weights(peaks, below[:R], floors[:R], state, problem)
    return state


def _choose_mode(
    high: Tensor, low: Tensor, targets: Tensor, bias: Tensor | None, state: State, problem: Problem
) -> None:
    """Fill pairs, plan, and the lines of columns that depend on targets and bias."""
    C, Kp, tiles = problem.C, problem.Kp, problem.tiles
    # With two classes every target is a pair; with more, a smallest share above 0 is label smoothing.
    floor = targets[0].amin().float() if C > 2 else torch.zeros_like(high)
    block = min(1024, max(16, _pow2(C)))
    lines = min(tiles.sum_classifiers, tiles.dense_classifiers, max(1, 4096 // block))
    extremes = high.new_empty(4, Kp // lines)
    kernels.read_pairs[(Kp // lines,)](
        targets, targets if bias is None else bias, floor, state.pairs, state.columns, extremes, problem.K, C,
        Kp, HAS_BIAS=bias is not None, BN=lines, BC=block,
    )  # fmt: skip
    any_floor = problem.duplicates != kernels.POSITIVE.value
    kernels.choose_mode[(1,)](
        high, low, extremes, floor, state.plan, extremes.shape[1], ANY_FLOOR=any_floor, B=1024
    )


def _pow2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _find_weights(peaks: Tensor, below: Tensor, floors: Tensor, state: State, problem: Problem) -> None:
    """Fill WEIGHT and UNDO, in float64: they multiply whole sums, so their rounding would not average out."""
    fast = state.plan[0] == kernels.FAST.value
    below = below + state.plan[3]
    height = peaks.double() - state.plan[1] + floors
    state.rows[kernels.WEIGHT.value, : problem.R] = height.exp()
    state.rows[kernels.UNDO.value, : problem.R] = torch.where(fast, (-below).exp(), 1.0)
    if problem.columns:
        undo = (-below - height)[problem.own_rows].exp()
        state.columns[kernels.UNDO.value, : problem.num_columns] = torch.where(fast, undo, 1.0)


def _find_tops(targets: Tensor, keys: tuple[Tensor, Tensor], state: State, problem: Problem) -> None:
    """Fill TOP of rows and columns, and RIGHT_TOP of columns: in FAST mode with the own entries."""
    tables = _sum_tables(problem, -torch.inf, state.slab)
    _safe_sums(targets, keys, state, problem, tables, largest=True)
    own = state.rows[kernels.OWN.value]
    state.rows[kernels.TOP.value] = torch.maximum(own, tables[0][0].amax(0))
    for line, side in ((kernels.TOP.value, 0), (kernels.RIGHT_TOP.value, 1)):
        state.columns[line] = torch.inf  # e^(z - inf) = 0 for classifiers without an image
        if problem.columns:
            largest = torch.maximum(own[problem.own_rows], tables[1][side].amax(0))
            state.columns[line, : problem.num_columns] = largest


def _losses(sums: Tensor, table: Tensor, own: Tensor, problem: Problem) -> Tensor:
    """Losses of rows or columns from (2, .) sums over D and over P; leaves the whole sums in PULL.

    The right ones of a row equal the own entry, so that needs no top.
    """
    undo = table[kernels.UNDO.value]
    losses, table[kernels.PULL.value] = _log_sum(sums[0] * undo, own, table[kernels.TOP.value])
    if problem.duplicates == kernels.POSITIVE.value:
        top = table[kernels.RIGHT_TOP.value] if len(table) == kernels.COLUMN_LINES else own
        right, table[kernels.RIGHT_PULL.value] = _log_sum(sums[1] * undo, own, top)
        losses = losses - right
    return losses


def _log_sum(others: Tensor, own: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """log(others + e^own) - own, exactly 0 without others; and the sum, both sums below top."""
    return torch.log1p(others + torch.expm1(own - top)) + (top - own), others + (own - top).exp()


def _sum_tables(problem: Problem, start: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """(2, parts, Rp) and (2, groups, num_columns): each program has lines of its own, over D and over P."""
    groups, parts = problem.grid
    number = problem.num_columns if problem.columns else 0
    return like.new_full((2, parts, problem.Rp), start), like.new_full((2, groups, number), start)


def fast_sums(
    keys: tuple[Tensor, Tensor], state: State, plan: Tensor, problem: Problem
) -> tuple[Tensor, Tensor]:
    """Partial sums without the own entries, below the largest score (rows) or the centre (columns).

    Zeros unless plan says FAST.
    """
    tables, tiles = _sum_tables(problem, 0.0, state.slab), problem.tiles
    kernels.fast_sums[problem.grid](
        state.slab, state.pairs, state.columns, state.rows, *keys, plan, *tables, problem.R, problem.K,
        problem.Rp, problem.Kp, tables[1].shape[2], problem.offset, problem.span, BETAS=problem.betas,
        ROWS=problem.rows or not problem.columns, COLUMNS=problem.columns, DUPLICATES=problem.duplicates,
        WIDE=problem.wide, BN=tiles.sum_classifiers, BM=tiles.sum_images, num_warps=tiles.sum_warps,
    )  # fmt: skip
    return tables


def _safe_sums(
    targets: Tensor,
    keys: tuple[Tensor, Tensor],
    state: State,
    problem: Problem,
    tables: tuple[Tensor, Tensor],
    largest: bool = False,
) -> None:
    """Add the sums below TOP to the tables, or the largest entries, if plan says SAFE or DENSE."""
    tiles = problem.tiles
    sparse = (kernels.SAFE.value, tiles.sum_classifiers, tiles.sum_images, tiles.sum_warps)
    dense = (kernels.DENSE.value, tiles.dense_classifiers, tiles.dense_images, tiles.dense_warps)
    for mode, classifiers, images, warps in (sparse, dense):
        kernels.safe_sums[problem.grid](
            state.slab, targets, state.pairs, state.columns, state.rows, *keys, state.plan, *tables,
            problem.R, problem.K, problem.C, problem.Rp, problem.Kp, tables[1].shape[2], problem.offset,
            problem.span, MODE=mode, LARGEST=largest, DUPLICATES=problem.duplicates, WIDE=problem.wide,
            BN=classifiers, BM=images, BC=tiles.dense_classes, num_warps=warps,
        )  # fmt: skip
