"""The forward pass of fused.py as launches of kernels; nothing here makes the host wait for the device.

Which kernels do the work is decided on the device (plan): the others are launched too, and leave at once.
That costs a few microseconds each; to ask the device would cost the host its lead, and the loss its place in
a CUDA graph. Tables start empty and torch does no arithmetic here: a small kernel costs the host as much as a
large one, and beyond some twenty launches the host would be slower than the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from icmixup.contrast import kernels, triton_forward as kernels_sums


class Tiles(NamedTuple):
    """Sizes of tiles and numbers of warps, powers of two but for sum_groups; from bench/tune.py tiles."""

    sum_classifiers: int = 256  # tile of the sums
    sum_images: int = 32  # at most 128, as for the gradient
    sum_warps: int = 8
    sum_groups: int = 0  # programs at once, each with column sums of its own; 0: one a multiprocessor
    grad_chunks: int = 32  # tile of the gradient: chunks, entries of each, images
    grad_entries: int = 4
    grad_images: int = 16
    grad_warps: int = 8
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
    def weights_line(self) -> int:
        """Line of columns by which classifiers count on the rows: for their bias, or to leave out padding."""
        differ = self.has_bias or self.K % self.tiles.sum_classifiers != 0
        return kernels.BETA.value if differ else -1

    @property
    def number(self) -> int:
        """Columns with a loss."""
        return self.num_columns if self.columns else 0

    @property
    def blocks(self) -> int:
        """Tiles of classifiers, of the larger size."""
        return cdiv(self.K, max(self.tiles.sum_classifiers, self.tiles.dense_classifiers))

    @property
    def grid(self) -> tuple[int, int]:
        """Groups of images, parts of the classifiers; none without work, since each fills its own lines."""
        programs = self.tiles.sum_groups or self.multiprocessors
        groups = min(cdiv(self.R, max(self.tiles.sum_images, self.tiles.dense_images)), programs)
        parts = max(1, min(self.blocks, programs // groups))
        return groups, cdiv(self.blocks, cdiv(self.blocks, parts))

    @property
    def span(self) -> int:
        """Classifiers of one part."""
        block = max(self.tiles.sum_classifiers, self.tiles.dense_classifiers)
        return cdiv(self.blocks, self.grid[1]) * block

    @property
    def num_chunks(self) -> int:
        return self.C + self.tiles.heavy_chunks

    @property
    def longest(self) -> int:
        """Entries of one chunk at most."""
        return cdiv(2 * self.K, self.tiles.heavy_chunks)


class State(NamedTuple):
    """What the forward pass leaves to the backward pass."""

    slab: Tensor  # (C, Rp) scores, transposed
    pairs: Tensor  # (2, Kp) int32 classes of each classifier
    rows: Tensor  # (6, Rp) numbers by image, lines as named in kernels.py
    columns: Tensor  # (9, Kp) numbers by classifier
    plan: Tensor  # (5,) mode, centre, floor, poison, mode of level


def cdiv(number: int, size: int) -> int:
    return -(-number // size)


Tables = tuple[Tensor, Tensor]  # by image and by classifier, as sum_tables makes them


def _up(number: int, size: int) -> int:
    return cdiv(number, size) * size


def forward(
    scores: Tensor, targets: Tensor, bias: Tensor | None, keys: tuple[Tensor, Tensor], problem: Problem
) -> tuple[Tensor, Tensor, State]:
    """(R,) row losses, (num_columns,) column losses (empty where not asked for), and the state."""
    state = _prepare(scores, targets, bias, problem)
    tables = sum_tables(problem, state.slab)
    _safe_sums(targets, keys, state, problem, tables, largest=True)
    R, Rp, Kp, number, offset = problem.R, problem.Rp, problem.Kp, problem.number, problem.offset
    kernels_sums.find_tops[(cdiv(max(R, number), 64),)](
        *tables, state.rows, state.columns, state.plan, R, Rp, Kp, number, offset, *problem.grid,
        DUPLICATES=problem.duplicates, BL=16, B=64,
    )  # fmt: skip
    fast_sums(keys, state, problem, tables, problem.weights_line)
    _safe_sums(targets, keys, state, problem, tables)
    losses = state.slab.new_empty(R if problem.rows else 0), state.slab.new_empty(number)
    kernels_sums.finish_losses[(cdiv(max(R, number), 64),)](
        *tables, state.rows, state.columns, *losses, R, Rp, Kp, number, offset, *problem.grid,
        ROWS=problem.rows, COLUMNS=problem.columns, DUPLICATES=problem.duplicates, BL=16, B=64,
    )  # fmt: skip
    return *losses, state


def _prepare(scores: Tensor, targets: Tensor, bias: Tensor | None, problem: Problem) -> State:
    """Choose the mode, transpose the scores, find the own entries."""
    R, C, Rp, Kp = problem.R, problem.C, problem.Rp, problem.Kp
    slab = torch.empty(C, Rp, device=scores.device)
    state = State(
        slab=slab,
        pairs=slab.new_empty(2, Kp, dtype=torch.int32),
        rows=slab.new_empty(kernels.ROW_LINES, Rp),
        columns=slab.new_empty(kernels.COLUMN_LINES, Kp),
        plan=slab.new_empty(kernels.PLAN_NUMBERS),
    )
    peaks = slab.new_empty(Rp)
    _choose_mode(scores, targets, bias, peaks, state, problem)
    kernels.transpose_scores[(Rp // 32, cdiv(C, 64))](scores, peaks, slab, state.plan, R, C, Rp, BR=32, BC=64)
    kernels.find_own[(Rp // 128,)](
        scores, peaks, slab, targets, state.pairs, state.plan, state.rows, state.columns, R, problem.K, C, Rp,
        Kp, problem.number, problem.offset, B=128, BC=16, enable_fp_fusion=False,
    )  # fmt: skip
    return state


def _choose_mode(
    scores: Tensor, targets: Tensor, bias: Tensor | None, peaks: Tensor, state: State, problem: Problem
) -> None:
    """Fill peaks, pairs and plan, and columns as far as targets and bias say what it holds."""
    R, K, C, Rp, Kp, tiles = problem.R, problem.K, problem.C, problem.Rp, problem.Kp, problem.tiles
    block = min(1024, max(16, _pow2(C)))
    images = min(128, 4096 // block)
    of_scores = peaks.new_empty(2, Rp // images)
    # With two classes every target is a pair; with more, a smallest share above 0 is label smoothing.
    kernels.read_scores[(Rp // images,)](
        scores, targets, peaks, of_scores, state.plan, R, C, FLOOR=C > 2, BR=images, BC=block
    )
    lines = min(tiles.sum_classifiers, tiles.dense_classifiers, 4096 // block)
    of_targets = peaks.new_empty(4, Kp // lines)
    kernels.read_pairs[(Kp // lines,)](
        targets, targets if bias is None else bias, state.plan, state.pairs, state.columns, of_targets, K, C,
        Kp, HAS_BIAS=bias is not None, BN=lines, BC=block,
    )  # fmt: skip
    any_floor = problem.duplicates != kernels.POSITIVE.value
    kernels.choose_mode[(1,)](
        of_scores, of_targets, state.plan, Rp // images, Kp // lines, ANY_FLOOR=any_floor, B=1024
    )


def _pow2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def sum_tables(problem: Problem, like: Tensor) -> Tables:
    """(sides, parts, Rp) and (sides, groups, num_columns): each program has lines of its own.

    One side is over D, the other over P, where that is more than the own entry.
    """
    groups, parts = problem.grid
    sides = 2 if problem.duplicates == kernels.POSITIVE.value else 1
    return like.new_empty(sides, parts, problem.Rp), like.new_empty(sides, groups, problem.number)


def fast_sums(
    keys: tuple[Tensor, Tensor], state: State, problem: Problem, tables: Tables, weights_line: int
) -> None:
    """Sums without the own entries, below the largest score (rows) or the centre (columns), if FAST."""
    tiles = problem.tiles
    kernels_sums.fast_sums[problem.grid](
        state.slab, state.pairs, state.columns, state.rows, *keys, state.plan, *tables, problem.R, problem.K,
        problem.Rp, problem.Kp, problem.number, problem.offset, problem.span, LINE=weights_line,
        ROWS=problem.rows, COLUMNS=problem.columns, DUPLICATES=problem.duplicates, WIDE=problem.wide,
        BN=tiles.sum_classifiers, BM=tiles.sum_images, num_warps=tiles.sum_warps,
    )  # fmt: skip


def fuses(mode: int) -> bool:
    """Whether a product and the sum after it may round once.

    Not in SAFE mode: u x + v y then is the same to the last bit in whatever order, so an entry that is the
    largest is e^0 = 1 of it on the way back too, however large the scores are.
    """
    return bool(mode != kernels.SAFE.value)


def _safe_sums(
    targets: Tensor,
    keys: tuple[Tensor, Tensor],
    state: State,
    problem: Problem,
    tables: Tables,
    largest: bool = False,
) -> None:
    """The sums below TOP, or the largest entries, if SAFE or DENSE."""
    tiles = problem.tiles
    sparse = (kernels.SAFE.value, tiles.sum_classifiers, tiles.sum_images, tiles.sum_warps)
    dense = (kernels.DENSE.value, tiles.dense_classifiers, tiles.dense_images, tiles.dense_warps)
    for mode, classifiers, images, warps in (sparse, dense):
        kernels_sums.safe_sums[problem.grid](
            state.slab, targets, state.pairs, state.columns, state.rows, *keys, state.plan, *tables,
            problem.R, problem.K, problem.C, problem.Rp, problem.Kp, problem.number, problem.offset,
            problem.span, MODE=mode, LARGEST=largest, DUPLICATES=problem.duplicates, WIDE=problem.wide,
            BN=classifiers, BM=images, BC=tiles.dense_classes, num_warps=warps, enable_fp_fusion=fuses(mode),
        )  # fmt: skip
