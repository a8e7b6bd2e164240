"""Triton kernels of the backward pass, and the functions that launch them; names as in triton_forward.py.

The E = 2 K non-zero shares of the targets are the entries, sorted by class; dS_ic is a sum over the entries
of class c. Large classes are split into chunks. Each chunk is summed by one program in a fixed order, so no
atomic additions are needed, and equal inputs give equal bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from icmixup.contrast.triton_forward import (
    BIAS,
    COEF,
    COLUMN_LINES,
    DENSE,
    EXP_BIAS,
    FAST,
    OWN,
    PLAN_FLOOR,
    PLAN_FLOOR_MODE,
    PLAN_MODE,
    POSITIVE_COEF,
    POSITIVE_SUM,
    POSITIVE_TOP,
    RESCALE,
    SAFE,
    SHARE_A,
    SHARE_B,
    SUM,
    TOP,
    WEIGHT,
    ForwardState,
    Launch,
    cdiv,
    dense_scores,
    empty_sums,
    exp,
    fuses_products,
    launch_fast_sums,
    reduce_lines,
)

# more lines of rows, in the backward pass only
OWN_COEF = tl.constexpr(6)  # what the own entry adds to W_ii, beyond its part in the sums over entries
OWN_FLOOR = tl.constexpr(7)  # what it adds to the sum of dloss/dz that the floor is multiplied by
GRADIENT_ROW_LINES = 8
# lines of entries
ENTRY_CLASSIFIER = tl.constexpr(0)
ENTRY_OTHER_CLASS = tl.constexpr(1)
ENTRY_LINES = 2
# lines of shares
SHARE_OWN = tl.constexpr(0)  # of the entry's class
SHARE_OTHER = tl.constexpr(1)  # of the classifier's other class
SHARE_ROW = tl.constexpr(2)  # own share x e^bias
SHARE_COLUMN = tl.constexpr(3)  # own share x coefficient of the classifier
SHARE_LINES = 4
# lines of chunks
CHUNK_CLASS = tl.constexpr(0)
CHUNK_BEGIN = tl.constexpr(1)  # first entry
CHUNK_SIZE = tl.constexpr(2)  # number of entries
CHUNK_LINES = 3


@triton.jit
def _copy_line(table, out, LINE: tl.constexpr, n, size):
    tl.store(out + LINE * size + n, tl.load(table + LINE * size + n, mask=n < size), mask=n < size)


@triton.jit
def _over_sum(gradient, table, n, size, there, LINE: tl.constexpr):
    """A gradient divided by the sum that the forward pass stored in a line, SUM or POSITIVE_SUM."""
    rescale = tl.load(table + RESCALE * size + n, mask=there, other=0.0)
    return gradient * (rescale / tl.load(table + LINE * size + n, mask=there, other=1.0))


@triton.jit
def _own_share(table, own, n, size, there):
    """The own entry's share of the sum over D."""
    top = tl.load(table + TOP * size + n, mask=there, other=0.0)
    return exp(own - top) / tl.load(table + SUM * size + n, mask=there, other=1.0)


@triton.jit
def set_row_coefs(
    row_grad, row_stride, column_grad, column_stride, rows, columns, out,
    R, Rp, Kp, n_columns, offset,
    ROWS: tl.constexpr, DUPLICATES: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """The table of rows with coefficients in place of the sums, and with OWN_COEF and OWN_FLOOR."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    j = i + offset
    there = i < (R if ROWS else 0)
    here = (i < R) & (j >= 0) & (j < n_columns)
    g = tl.load(row_grad + i.to(tl.int64) * row_stride, mask=there, other=0.0).to(tl.float32)
    h = tl.load(column_grad + j.to(tl.int64) * column_stride, mask=here, other=0.0).to(tl.float32)
    own = tl.load(rows + OWN * Rp + i, mask=i < Rp, other=0.0)
    own_coef = tl.zeros([B], tl.float32)
    if DUPLICATES != "positive":
        own_coef -= g + h
    if DUPLICATES == "ignore":
        # The sums over entries leave out equal classifiers, and with them the own one.
        own_coef += tl.where(there, g * _own_share(rows, own, i, Rp, there), 0.0)
        own_coef += tl.where(here, h * _own_share(columns, own, j, Kp, here), 0.0)
    _copy_line(rows, out, OWN, i, Rp)
    _copy_line(rows, out, TOP, i, Rp)
    _copy_line(rows, out, WEIGHT, i, Rp)
    tl.store(out + COEF * Rp + i, _over_sum(g, rows, i, Rp, there, SUM), mask=i < Rp)
    if DUPLICATES == "positive":
        tl.store(out + POSITIVE_COEF * Rp + i, _over_sum(g, rows, i, Rp, there, POSITIVE_SUM), mask=i < Rp)
    tl.store(out + OWN_COEF * Rp + i, own_coef, mask=i < Rp)
    weight = tl.load(rows + WEIGHT * Rp + i, mask=i < Rp, other=0.0)
    rescale = tl.load(rows + RESCALE * Rp + i, mask=i < Rp, other=1.0)
    own_floor = weight * (_over_sum(h, columns, j, Kp, here, SUM) / rescale) - h - own_coef
    tl.store(out + OWN_FLOOR * Rp + i, own_floor, mask=i < Rp)


@triton.jit
def set_column_coefs(
    column_grad, column_stride, classes_of, columns, out, classes,
    K, C, Kp, n_columns,
    DUPLICATES: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """The table of columns with coefficients in place of the sums, and the classes of its 2 K entries."""
    j = tl.program_id(0) * B + tl.arange(0, B)
    here = j < n_columns
    h = tl.load(column_grad + j.to(tl.int64) * column_stride, mask=here, other=0.0).to(tl.float32)
    _copy_line(columns, out, SHARE_A, j, Kp)
    _copy_line(columns, out, SHARE_B, j, Kp)
    _copy_line(columns, out, TOP, j, Kp)
    _copy_line(columns, out, BIAS, j, Kp)
    _copy_line(columns, out, EXP_BIAS, j, Kp)
    tl.store(out + COEF * Kp + j, _over_sum(h, columns, j, Kp, here, SUM), mask=j < Kp)
    if DUPLICATES == "positive":
        _copy_line(columns, out, POSITIVE_TOP, j, Kp)
        tl.store(out + POSITIVE_COEF * Kp + j, _over_sum(h, columns, j, Kp, here, POSITIVE_SUM), mask=j < Kp)
    # A share of 0 is not an entry: class C sorts it behind all others.
    second = tl.load(classes_of + Kp + j, mask=j < K, other=0)
    v = tl.load(columns + SHARE_B * Kp + j, mask=j < K, other=0.0)
    tl.store(classes + j, tl.load(classes_of + j, mask=j < K, other=0), mask=j < K)
    tl.store(classes + K + j, tl.where(v != 0, second, C), mask=j < K)


@triton.jit
def _first_entry(classes, c, E, STEPS: tl.constexpr):
    """Index of the first entry of class c, by bisection."""
    low = c * 0
    high = low + E
    for _ in range(STEPS):
        middle = (low + high) // 2
        before = (low < high) & (tl.load(classes + middle, mask=low < high, other=0) < c)
        after = (low < high) & ~before
        low = tl.where(before, middle + 1, low)
        high = tl.where(after, middle, high)
    return low


@triton.jit
def split_classes(
    classes, starts, chunks,
    E, C, n_chunks, longest,
    STEPS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Split the entries of each class into chunks of at most `longest` entries.

    The slots of class c start at c + start // longest: never fewer than its chunks, so that no class depends
    on those before it. Slots without a chunk have size 0.
    """
    c = tl.program_id(0) * B + tl.arange(0, B)
    here = c < C
    start = _first_entry(classes, tl.minimum(c, C), E, STEPS)
    end = _first_entry(classes, tl.minimum(c + 1, C), E, STEPS)
    tl.store(starts + c, start, mask=c <= C)
    slot = c + start // longest
    after = tl.where(c + 1 < C, c + 1 + end // longest, n_chunks)
    for n in range(0, tl.max(tl.where(here, after - slot, 0), 0)):
        at = slot + n
        begin = tl.minimum(start + n * longest, end)
        writes = here & (at < after)
        tl.store(chunks + CHUNK_CLASS * n_chunks + at, c, mask=writes)
        tl.store(chunks + CHUNK_BEGIN * n_chunks + at, begin, mask=writes)
        tl.store(chunks + CHUNK_SIZE * n_chunks + at, tl.minimum(end - begin, longest), mask=writes)


@triton.jit
def pack_entries(
    classes_of, columns, order, entries, shares,
    K, Kp, E,
    B: tl.constexpr,
):  # fmt: skip
    """Fill the tables of entries and of their shares, in the order of their classes."""
    e = tl.program_id(0) * B + tl.arange(0, B)
    here = e < E
    n = tl.load(order + e, mask=here, other=0)
    j = tl.where(n < K, n, n - K).to(tl.int32)
    u = tl.load(columns + SHARE_A * Kp + j)
    v = tl.load(columns + SHARE_B * Kp + j)
    share = tl.where(n < K, u, v)
    tl.store(entries + ENTRY_CLASSIFIER * E + e, j, mask=here)
    tl.store(entries + ENTRY_OTHER_CLASS * E + e, tl.load(classes_of + tl.where(n < K, Kp, 0) + j), mask=here)
    tl.store(shares + SHARE_OWN * E + e, share, mask=here)
    tl.store(shares + SHARE_OTHER * E + e, tl.where(n < K, v, u), mask=here)
    tl.store(shares + SHARE_ROW * E + e, share * tl.load(columns + EXP_BIAS * Kp + j), mask=here)
    tl.store(shares + SHARE_COLUMN * E + e, share * tl.load(columns + COEF * Kp + j), mask=here)


@triton.jit
def _load_entries(entries, shares, begin, size, n, E, HAS_BIAS: tl.constexpr):
    """Other class, own and other share of the n-th entries of chunks, and their weights on rows and columns.

    Beyond the end of a chunk this is an entry of another one: its z is in range, and its weights are 0.
    """
    e = tl.minimum(begin[:, None] + n[None, :], E - 1)
    there = n[None, :] < size[:, None]
    share = tl.load(shares + SHARE_OWN * E + e)
    row_weight = tl.where(there, tl.load(shares + SHARE_ROW * E + e) if HAS_BIAS else share, 0.0)
    column_weight = tl.where(there, tl.load(shares + SHARE_COLUMN * E + e), 0.0)
    other = tl.load(entries + ENTRY_OTHER_CLASS * E + e)
    return other, share, tl.load(shares + SHARE_OTHER * E + e), row_weight, column_weight


@triton.jit
def sparse_gradient(
    scores_t, columns, rows, row_keys, column_keys, entries, shares, chunks, order, plan, out,
    R, Rp, Kp, E, n_chunks,
    MODE: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DUPLICATES: tl.constexpr, WIDE: tl.constexpr, NC: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """dS^T of BM images, NC chunks at a time; each chunk is summed by one program.

    The class's own scores are read once, those of the other class gathered; every sum is written once.
    """
    if tl.load(plan + PLAN_MODE) != MODE:
        return
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    top = tl.load(rows + TOP * Rp + i)[None, None, :]
    weight = tl.load(rows + WEIGHT * Rp + i)[None, None, :]
    coef = tl.load(rows + COEF * Rp + i)[None, None, :]
    if DUPLICATES != "negative":
        keys = tl.load(row_keys + i, mask=i < R, other=0)[None, None, :]
        own = tl.load(rows + OWN * Rp + i)[None, None, :]
        positive_coef = tl.load(rows + POSITIVE_COEF * Rp + i)[None, None, :]
    for first in range(tl.program_id(1) * NC, n_chunks, tl.num_programs(1) * NC):
        at = first + tl.arange(0, NC)
        chunk = tl.load(order + at, mask=at < n_chunks, other=0)
        c = tl.load(chunks + CHUNK_CLASS * n_chunks + chunk)
        begin = tl.load(chunks + CHUNK_BEGIN * n_chunks + chunk)
        size = tl.where(at < n_chunks, tl.load(chunks + CHUNK_SIZE * n_chunks + chunk), 0)
        at_c = tl.load(scores_t + c[:, None, None].to(tl.int64) * Rp + i[None, None, :])
        total = tl.zeros([NC, BN, BM], tl.float32)
        n = tl.arange(0, BN)
        other, share, other_share, row_weight, column_weight = _load_entries(
            entries, shares, begin, size, n, E, HAS_BIAS
        )
        for n0 in range(0, tl.max(size, 0), BN):
            row = other.to(tl.int64) if WIDE else other
            at_other = tl.load(scores_t + row[:, :, None] * Rp + i[None, None, :])
            z = share[:, :, None] * at_c + other_share[:, :, None] * at_other
            if DUPLICATES != "negative" or MODE == SAFE:
                e = tl.minimum(begin[:, None] + (n0 + n)[None, :], E - 1)
                j = tl.load(entries + ENTRY_CLASSIFIER * E + e)
            if MODE == FAST:
                if ROWS and COLUMNS:
                    factor = coef * row_weight[:, :, None] + weight * column_weight[:, :, None]
                elif ROWS:
                    factor = coef * row_weight[:, :, None]
                else:
                    factor = weight * column_weight[:, :, None]
                power = tl.exp2(z)
                gradient = power * factor
            else:
                bias = tl.load(columns + BIAS * Kp + j)[:, :, None]
                below = z - tl.load(columns + TOP * Kp + j)[:, :, None]
                gradient = coef * share[:, :, None] * exp(z + bias - top)
                gradient += column_weight[:, :, None] * exp(below)
                gradient = tl.where(((n0 + n)[None, :] < size[:, None])[:, :, None], gradient, 0.0)
            if DUPLICATES != "negative":
                same = tl.load(column_keys + j)[:, :, None] == keys
                if DUPLICATES == "ignore":
                    gradient = tl.where(same, 0.0, gradient)
                else:
                    if MODE == FAST:
                        positive = positive_coef * tl.load(columns + EXP_BIAS * Kp + j)[:, :, None] * power
                        below = power * weight
                    else:
                        positive = positive_coef * exp(z + bias - own)
                        below = exp(z - tl.load(columns + POSITIVE_TOP * Kp + j)[:, :, None])
                    positive += tl.load(columns + POSITIVE_COEF * Kp + j)[:, :, None] * below
                    same = same & ((n0 + n)[None, :] < size[:, None])[:, :, None]
                    gradient -= tl.where(same, share[:, :, None] * positive, 0.0)
            total += gradient
            # Load the next entries before they are needed.
            other, share, other_share, row_weight, column_weight = _load_entries(
                entries, shares, begin, size, n0 + BN + n, E, HAS_BIAS
            )
        pointer = out + chunk[:, None].to(tl.int64) * Rp + i[None, :]
        tl.store(pointer, tl.sum(total, 1), mask=(size > 0)[:, None] & (i < Rp)[None, :])


@triton.jit
def dense_gradient(
    scores_t, targets, columns, rows, row_keys, column_keys, plan, out,
    R, K, C, Rp, Kp,
    DUPLICATES: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dS^T of BM images, line c of out for class c: dloss/dz of a tile, times its targets."""
    if tl.load(plan + PLAN_MODE) != DENSE:
        return
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    top = tl.load(rows + TOP * Rp + i)[None, :]
    coef = tl.load(rows + COEF * Rp + i)[None, :]
    for j0 in range(0, K, BN):
        j = j0 + tl.arange(0, BN)
        z = dense_scores(scores_t, targets, i, j, K, C, Rp, BN, BM, BC)
        biased = z + tl.load(columns + BIAS * Kp + j)[:, None]
        gradient = coef * exp(biased - top)
        below = z - tl.load(columns + TOP * Kp + j)[:, None]
        gradient += tl.load(columns + COEF * Kp + j)[:, None] * exp(below)
        if DUPLICATES != "negative":
            keys = tl.load(row_keys + i, mask=i < R, other=0)[None, :]
            same = tl.load(column_keys + j, mask=j < K, other=0)[:, None] == keys
            if DUPLICATES == "ignore":
                gradient = tl.where(same, 0.0, gradient)
            else:
                positive = tl.load(rows + POSITIVE_COEF * Rp + i)[None, :]
                positive = positive * exp(biased - tl.load(rows + OWN * Rp + i)[None, :])
                below = z - tl.load(columns + POSITIVE_TOP * Kp + j)[:, None]
                positive += tl.load(columns + POSITIVE_COEF * Kp + j)[:, None] * exp(below)
                gradient -= tl.where(same, positive, 0.0)
        gradient = tl.where((j < K)[:, None] & (i < R)[None, :], gradient, 0.0)
        for c0 in range(0, C, BC):
            c = c0 + tl.arange(0, BC)
            here = (c < C)[:, None] & (j < K)[None, :]
            y = tl.load(targets + j[None, :].to(tl.int64) * C + c[:, None], mask=here, other=0.0)
            pointer = out + c[:, None].to(tl.int64) * Rp + i[None, :]
            before = tl.load(pointer, mask=(c < C)[:, None] & (j0 > 0), other=0.0)
            after = tl.dot(y.to(tl.float32), gradient, before, input_precision="ieee")
            tl.store(pointer, after, mask=(c < C)[:, None])
        tl.debug_barrier()


@triton.jit
def finish_gradient(
    out, targets, starts, rows, by_row, plan, grad,
    R, K, C, Rp, offset, longest, parts,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Sum the chunks of each class, add the own entry and the floor, and transpose dS^T to dS.

    The floor of smoothed targets adds floor x sum_j dloss/dz_ij to every class of an image. On the rows that
    sum is 0; on the columns it is by_row, from fast_sums with coefficients as weights. The own entry is added
    with its whole target, floor included, so OWN_FLOOR subtracts it from that sum.
    """
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    mode = tl.load(plan + PLAN_MODE)
    start = tl.load(starts + c, mask=c < C, other=0)
    end = tl.load(starts + c + 1, mask=c < C, other=0)
    begin = tl.where(mode == DENSE, c, c + start // longest)
    count = tl.where(mode == DENSE, 1, (end - start + longest - 1) // longest)
    count = tl.where(c < C, count, 0)
    total = tl.zeros([BC, BR], tl.float32)
    for n in range(0, tl.max(count, 0)):
        line = out + (begin + n).to(tl.int64)[:, None] * Rp + r[None, :]
        total += tl.load(line, mask=(n < count)[:, None], other=0.0)
    own = (r < R) & (r + offset >= 0) & (r + offset < K)
    here = own[:, None] & (c < C)[None, :]
    line = targets + (r + offset).to(tl.int64)[:, None] * C + c[None, :]
    y = tl.load(line, mask=here, other=0.0).to(tl.float32)
    value = tl.trans(total) + tl.load(rows + OWN_COEF * Rp + r, mask=own, other=0.0)[:, None] * y
    if tl.load(plan + PLAN_FLOOR_MODE) == FAST:
        sums = reduce_lines(by_row, 0, parts, Rp, r, r < R, False, 4, BR).to(tl.float32)
        sums = tl.load(rows + WEIGHT * Rp + r) * sums + tl.load(rows + OWN_FLOOR * Rp + r)
        value += (tl.load(plan + PLAN_FLOOR) * sums)[:, None]
    there = (r < R)[:, None] & (c < C)[None, :]
    tl.store(grad + r[:, None].to(tl.int64) * C + c[None, :], value, mask=there)


class Entries(NamedTuple):
    """The E = 2 K non-zero shares of the targets, sorted by class; lines as named above."""

    names: Tensor  # (2, E) int32: classifier, its other class
    shares: Tensor  # (4, E)
    starts: Tensor  # (C + 1,) int32: entries of class c are starts[c] .. starts[c + 1]
    chunks: Tensor  # (3, num_chunks) int32
    order: Tensor  # (num_chunks,) longest first


def launch_backward(
    grads: tuple[Tensor | None, Tensor | None],
    targets: Tensor,
    keys: tuple[Tensor, Tensor],
    state: ForwardState,
    launch: Launch,
    dtype: torch.dtype,
) -> Tensor:
    """(R, C) gradient of the scores, from (R,) and (num_columns,) gradients of the losses."""
    row_grad, column_grad = grads
    launch = replace(
        launch, rows=launch.rows and row_grad is not None, columns=launch.columns and column_grad is not None
    )
    state, classes = _set_coefs(grads, state, launch)
    entries = _sort_entries(classes, state, launch)
    chunk_sums = state.scores_t.new_empty(launch.num_chunks, launch.Rp)
    _launch_sparse_gradient(keys, state, entries, chunk_sums, launch)
    _launch_dense_gradient(targets, keys, state, chunk_sums, launch)
    floor_sums = _floor_sums(keys, state, launch)
    grad = torch.empty(launch.R, launch.C, device=targets.device, dtype=dtype)
    finish_gradient[(cdiv(launch.R, 32), cdiv(launch.C, 64))](
        chunk_sums, targets, entries.starts, state.rows, floor_sums, state.plan, grad,
        R=launch.R, K=launch.K, C=launch.C, Rp=launch.Rp, offset=launch.offset, longest=launch.longest,
        parts=floor_sums.shape[1], BR=32, BC=64,
    )  # fmt: skip
    return grad


def _set_coefs(
    grads: tuple[Tensor | None, Tensor | None], state: ForwardState, launch: Launch
) -> tuple[ForwardState, Tensor]:
    """The state with coefficients in place of the sums; (2 K,) int32 classes of the entries."""
    Rp, Kp, n_columns = launch.Rp, launch.Kp, launch.num_column_losses
    rows = state.scores_t.new_empty(GRADIENT_ROW_LINES, Rp)
    columns = state.scores_t.new_empty(COLUMN_LINES, Kp)
    classes = state.classes_of.new_empty(2 * launch.K)
    # The gradient of a mean is one number, expanded: read with its stride, it needs no copy.
    of_rows, of_columns = ((state.plan, 0) if grad is None else (grad, grad.stride(0)) for grad in grads)
    set_row_coefs[(cdiv(Rp, 128),)](
        *of_rows, *of_columns, state.rows, state.columns, rows,
        R=launch.R, Rp=Rp, Kp=Kp, n_columns=n_columns, offset=launch.offset,
        ROWS=launch.rows, DUPLICATES=launch.duplicates, B=128,
    )  # fmt: skip
    set_column_coefs[(cdiv(Kp, 128),)](
        *of_columns, state.classes_of, state.columns, columns, classes,
        K=launch.K, C=launch.C, Kp=Kp, n_columns=n_columns, DUPLICATES=launch.duplicates, B=128,
    )  # fmt: skip
    return state._replace(rows=rows, columns=columns), classes


def _floor_sums(keys: tuple[Tensor, Tensor], state: ForwardState, launch: Launch) -> Tensor:
    """(1, parts, Rp) sums over the columns of each image, weighted by coefficients, if there is a floor."""
    launch = replace(launch, rows=True, columns=False)
    sums = empty_sums(launch, state.scores_t)
    if launch.C > 2:
        launch_fast_sums(keys, state, launch, sums, COEF.value)
    return sums.by_row


def _sort_entries(classes: Tensor, state: ForwardState, launch: Launch) -> Entries:
    K, C, E, n_chunks = launch.K, launch.C, 2 * launch.K, launch.num_chunks
    classes, order = torch.sort(classes, stable=True)
    entries = Entries(
        names=classes.new_empty(ENTRY_LINES, E),
        shares=state.scores_t.new_empty(SHARE_LINES, E),
        starts=classes.new_empty(C + 1),
        chunks=classes.new_empty(CHUNK_LINES, n_chunks),
        order=order,
    )
    pack_entries[(cdiv(E, 256),)](
        state.classes_of, state.columns, order, entries.names, entries.shares, K=K, Kp=launch.Kp, E=E, B=256
    )
    split_classes[(cdiv(C + 1, 128),)](
        classes, entries.starts, entries.chunks, E=E, C=C, n_chunks=n_chunks, longest=launch.longest,
        STEPS=E.bit_length(), B=128,
    )  # fmt: skip
    # The chunks of a tile take as long as the longest of them, and long ones must not come last.
    sizes = entries.chunks[CHUNK_SIZE.value]
    return entries._replace(order=torch.sort(sizes, descending=True, stable=True)[1])


def _launch_sparse_gradient(
    keys: tuple[Tensor, Tensor], state: ForwardState, entries: Entries, chunk_sums: Tensor, launch: Launch
) -> None:
    tiles, n_chunks = launch.tiles, launch.num_chunks
    blocks = cdiv(launch.R, tiles.grad_images)
    programs = cdiv(tiles.grad_splits * launch.multiprocessors, blocks)
    splits = max(1, min(cdiv(n_chunks, tiles.grad_chunks), programs))
    for mode in (FAST.value, SAFE.value):
        sparse_gradient[(blocks, splits)](
            state.scores_t, state.columns, state.rows, *keys, entries.names, entries.shares, entries.chunks,
            entries.order, state.plan, chunk_sums,
            R=launch.R, Rp=launch.Rp, Kp=launch.Kp, E=2 * launch.K, n_chunks=n_chunks,
            MODE=mode, HAS_BIAS=launch.has_bias, ROWS=launch.rows, COLUMNS=launch.columns,
            DUPLICATES=launch.duplicates, WIDE=launch.wide, NC=tiles.grad_chunks, BN=tiles.grad_entries,
            BM=tiles.grad_images, num_warps=tiles.grad_warps, enable_fp_fusion=fuses_products(mode),
        )  # fmt: skip


def _launch_dense_gradient(
    targets: Tensor, keys: tuple[Tensor, Tensor], state: ForwardState, chunk_sums: Tensor, launch: Launch
) -> None:
    tiles = launch.tiles
    dense_gradient[(cdiv(launch.R, tiles.dense_images),)](
        state.scores_t, targets, state.columns, state.rows, *keys, state.plan, chunk_sums,
        R=launch.R, K=launch.K, C=launch.C, Rp=launch.Rp, Kp=launch.Kp, DUPLICATES=launch.duplicates,
        BN=tiles.dense_classifiers, BM=tiles.dense_images, BC=tiles.dense_classes,
        num_warps=tiles.dense_warps,
    )  # fmt: skip
