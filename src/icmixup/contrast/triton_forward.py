"""The Triton kernels that sum over rows and columns of S~, forward; names and letters as in kernels.py."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from icmixup.contrast.kernels import (
    BIAS,
    DENSE,
    FAST,
    IGNORE,
    LOG2E,
    NEGATIVE,
    OWN,
    POSITIVE,
    PULL,
    RIGHT_PULL,
    RIGHT_TOP,
    TOP,
    UNDO,
    WEIGHT,
    U,
    V,
)


@triton.jit
def _classifiers(pairs, columns, j, Kp):
    """Classes a_j, b_j and shares u_j, v_j."""
    a = tl.load(pairs + j)
    b = tl.load(pairs + Kp + j)
    return a, b, tl.load(columns + U * Kp + j), tl.load(columns + V * Kp + j)


@triton.jit
def _sparse_scores(slab, a, b, u, v, i, Rp, WIDE: tl.constexpr):
    """z (BN, BM) of classifiers with two classes: u_j S_i,a_j + v_j S_i,b_j."""
    if WIDE:
        a = a.to(tl.int64)
        b = b.to(tl.int64)
    at_a = tl.load(slab + a[:, None] * Rp + i[None, :])
    at_b = tl.load(slab + b[:, None] * Rp + i[None, :])
    return u[:, None] * at_a + v[:, None] * at_b


@triton.jit
def dense_scores(slab, targets, i, j, K, C, Rp, BN: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    """z (BN, BM) of any classifiers."""
    z = tl.zeros([BN, BM], tl.float32)
    for c0 in range(0, C, BC):
        c = c0 + tl.arange(0, BC)
        here = (j < K)[:, None] & (c < C)[None, :]
        y = tl.load(targets + j[:, None].to(tl.int64) * C + c[None, :], mask=here, other=0.0).to(tl.float32)
        s = tl.load(slab + c[:, None].to(tl.int64) * Rp + i[None, :], mask=(c < C)[:, None], other=0.0)
        z = tl.dot(y, s, z, input_precision="ieee")
    return z


@triton.jit
def exp(x):
    return tl.exp2(x * LOG2E)


@triton.jit
def _fold(table, j, value, number, filled, LARGEST: tl.constexpr):
    """Add to this program's own sums by column, or keep the larger, if they are filled."""
    before = tl.load(table + j, mask=j < filled, other=-float("inf") if LARGEST else 0.0)
    tl.store(table + j, tl.maximum(before, value) if LARGEST else before + value, mask=j < number)


@triton.jit
def fast_sums(
    slab, pairs, columns, rows, row_keys, column_keys, plan, by_row, by_column, R, K, Rp, Kp, number, offset,
    span, LINE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DUPLICATES: tl.constexpr,
    WIDE: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Sums over rows and over columns of S~, own entries left out, out of one exponential an entry.

    Program (g, p) keeps BM images and sweeps the p-th span of classifiers, then takes its next images. Row
    sums stay in registers; column sums of a program are its own line of by_column, so nobody waits or races.
    On the rows, the LINE of columns weighs the classifiers, if it is not negative: BETA, or PULL for level.
    """
    if tl.load(plan + (4 if LINE == PULL else 0)) != FAST:
        return
    group = tl.program_id(0)
    part = tl.program_id(1)
    by_column += group.to(tl.int64) * number
    right_by_column = by_column + tl.num_programs(0).to(tl.int64) * number
    for block in range(group, tl.cdiv(R, BM), tl.num_programs(0)):
        filled = tl.minimum(block - group, 1) * number  # columns that hold a sum already
        i = block * BM + tl.arange(0, BM)
        weight = tl.load(rows + WEIGHT * Rp + i)[None, :]
        in_rows = tl.zeros([BN, BM], tl.float32)
        right_in_rows = tl.zeros([BN, BM], tl.float32)
        if DUPLICATES != NEGATIVE:
            keys = tl.load(row_keys + i, mask=i < R, other=0)[None, :]
        a, b, u, v = _classifiers(pairs, columns, part * span + tl.arange(0, BN), Kp)
        for j0 in range(part * span, tl.minimum(part * span + span, K), BN):
            j = j0 + tl.arange(0, BN)
            e = tl.exp2(_sparse_scores(slab, a, b, u, v, i, Rp, WIDE))
            # The next classifiers are asked for before they are needed; at the end, some that are there.
            a, b, u, v = _classifiers(pairs, columns, tl.minimum(j0 + BN, Kp - BN) + tl.arange(0, BN), Kp)
            if (j0 < block * BM + BM + offset) & (j0 + BN > block * BM + offset):
                e = tl.where(j[:, None] == i[None, :] + offset, 0.0, e)
            beta = tl.load(columns + LINE * Kp + j)[:, None] if LINE >= 0 else 1.0
            if DUPLICATES != NEGATIVE:
                same = tl.load(column_keys + j, mask=j < K, other=0)[:, None] == keys
                if DUPLICATES == IGNORE:
                    e = tl.where(same, 0.0, e)
                else:
                    right = tl.where(same, e, 0.0)
                    right_in_rows += right * beta
                    if COLUMNS:
                        _fold(right_by_column, j, tl.sum(right * weight, 1), number, filled, False)
            if ROWS:
                in_rows += e * beta if LINE >= 0 else e
            if COLUMNS:
                _fold(by_column, j, tl.sum(e * weight, 1), number, filled, False)
        if ROWS:
            tl.store(by_row + part * Rp + i, tl.sum(in_rows, 0))
            if DUPLICATES == POSITIVE:
                tl.store(by_row + (tl.num_programs(1) + part) * Rp + i, tl.sum(right_in_rows, 0))
        tl.debug_barrier()  # the next images read the column sums that other threads may have written


@triton.jit
def _keep_own(line, z, own, i, poison):
    """From here on own entries are what these tiles make of them, as the backward pass does.

    find_own took its sums in another order, where large scores round to other numbers.
    """
    entry = tl.sum(tl.where(own, z, 0.0), 0) + poison
    tl.store(line + i, entry, mask=tl.sum(own.to(tl.int32), 0) > 0)


@triton.jit
def safe_sums(
    slab, targets, pairs, columns, rows, row_keys, column_keys, plan, by_row, by_column, R, K, C, Rp, Kp,
    number, offset, span, MODE: tl.constexpr, LARGEST: tl.constexpr, DUPLICATES: tl.constexpr,
    WIDE: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """fast_sums for any scores and any targets: first the LARGEST entries, then sums below them."""
    if tl.load(plan) != MODE:
        return
    group = tl.program_id(0)
    part = tl.program_id(1)
    by_column += group.to(tl.int64) * number
    right_by_column = by_column + tl.num_programs(0).to(tl.int64) * number
    start = -float("inf") if LARGEST else 0.0
    for block in range(group, tl.cdiv(R, BM), tl.num_programs(0)):
        filled = tl.minimum(block - group, 1) * number  # columns that hold a sum already
        i = block * BM + tl.arange(0, BM)
        there = (i < R)[None, :]
        top = tl.load(rows + TOP * Rp + i)[None, :]
        mine = tl.load(rows + OWN * Rp + i)[None, :]
        in_rows = tl.full([BN, BM], start, tl.float32)
        right_in_rows = tl.zeros([BN, BM], tl.float32)
        for j0 in range(part * span, tl.minimum(part * span + span, K), BN):
            j = j0 + tl.arange(0, BN)
            if MODE == DENSE:
                z = dense_scores(slab, targets, i, j, K, C, Rp, BN, BM, BC)
            else:
                a, b, u, v = _classifiers(pairs, columns, j, Kp)
                z = _sparse_scores(slab, a, b, u, v, i, Rp, WIDE)
            biased = z + tl.load(columns + BIAS * Kp + j)[:, None]
            own = j[:, None] == i[None, :] + offset
            counts = ~own
            if MODE == DENSE and LARGEST:
                _keep_own(rows + OWN * Rp, z, own & (i < R)[None, :] & (j < K)[:, None], i, tl.load(plan + 3))
            if DUPLICATES != NEGATIVE:
                keys = tl.load(row_keys + i, mask=i < R, other=0)[None, :]
                same = tl.load(column_keys + j, mask=j < K, other=0)[:, None] == keys
                if DUPLICATES == IGNORE:
                    counts = counts & ~same
                else:
                    right = same & ~own
                    pref = tl.load(columns + RIGHT_TOP * Kp + j)[:, None]
                    if LARGEST:
                        value = tl.max(tl.where(right & there, z, start), 1)
                    else:
                        right_in_rows += tl.where(right, exp(biased - mine), 0.0)
                        value = tl.sum(tl.where(right & there, exp(z - pref), 0.0), 1)
                    _fold(right_by_column, j, value, number, filled, LARGEST)
            if LARGEST:
                in_rows = tl.maximum(in_rows, tl.where(counts, biased, start))
                value = tl.max(tl.where(counts & there, z, start), 1)
            else:
                in_rows += tl.where(counts, exp(biased - top), 0.0)
                below = z - tl.load(columns + TOP * Kp + j)[:, None]
                value = tl.sum(tl.where(counts & there, exp(below), 0.0), 1)
            _fold(by_column, j, value, number, filled, LARGEST)
        tl.store(by_row + part * Rp + i, tl.max(in_rows, 0) if LARGEST else tl.sum(in_rows, 0))
        if DUPLICATES == POSITIVE:
            tl.store(by_row + (tl.num_programs(1) + part) * Rp + i, tl.sum(right_in_rows, 0))
        tl.debug_barrier()


@triton.jit
def over_lines(
    table, first, lines, width, n, there, LARGEST: tl.constexpr, BL: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    """Sums, or the largest, of columns n of a table: so many lines from the first; in float64."""
    start = -float("inf") if LARGEST else 0.0
    total = tl.full([BL, B], start, tl.float64)
    for l0 in range(0, lines, BL):
        line = l0 + tl.arange(0, BL)[:, None]
        place = table + (first + line).to(tl.int64) * width + n[None, :]
        value = tl.load(place, mask=(line < lines) & there[None, :], other=start).to(tl.float64)
        total = tl.maximum(total, value) if LARGEST else total + value
    return tl.max(total, 0) if LARGEST else tl.sum(total, 0)


@triton.jit
def find_tops(
    by_row, by_column, rows, columns, plan, R, Rp, Kp, number, offset, groups, parts,
    DUPLICATES: tl.constexpr, BL: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Raise TOP, and RIGHT_TOP of columns, to the largest entries that safe_sums found."""
    if tl.load(plan) == FAST:
        return
    n = tl.program_id(0) * B + tl.arange(0, B)
    own = tl.load(rows + OWN * Rp + n, mask=n < R, other=0.0)
    largest = over_lines(by_row, 0, parts, Rp, n, n < R, True, BL, B).to(tl.float32)
    tl.store(rows + TOP * Rp + n, tl.maximum(own, largest), mask=n < R)
    here = n < number
    own = tl.load(rows + OWN * Rp + n - offset, mask=here, other=0.0)
    largest = over_lines(by_column, 0, groups, number, n, here, True, BL, B).to(tl.float32)
    tl.store(columns + TOP * Kp + n, tl.maximum(own, largest), mask=here)
    if DUPLICATES == POSITIVE:
        largest = over_lines(by_column, groups, groups, number, n, here, True, BL, B).to(tl.float32)
        tl.store(columns + RIGHT_TOP * Kp + n, tl.maximum(own, largest), mask=here)


@triton.jit
def _log_sum(others, own, top):
    """log(others + e^own) - own, exactly 0 without others; and the sum, both sums below top; in float64."""
    mine = tl.exp(own - top)
    x = others + (mine - 1.0)
    # 1 + x has lost the last digits of a small x.
    return tl.where(tl.abs(x) < 1e-6, x - 0.5 * x * x, tl.log(1.0 + x)) + (top - own), others + mine


@triton.jit
def _losses(
    sums, lines, width, table, own, right_top, n, there, size, losses, DUPLICATES: tl.constexpr,
    BL: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Losses of rows or columns from sums over D and over P; leaves the whole sums in PULL, RIGHT_PULL."""
    undo = tl.load(table + UNDO * size + n, mask=there, other=1.0).to(tl.float64)
    top = tl.load(table + TOP * size + n, mask=there, other=0.0).to(tl.float64)
    others = over_lines(sums, 0, lines, width, n, there, False, BL, B) * undo
    loss, whole = _log_sum(others, own, top)
    tl.store(table + PULL * size + n, whole.to(tl.float32), mask=there)
    if DUPLICATES == POSITIVE:
        others = over_lines(sums, lines, lines, width, n, there, False, BL, B) * undo
        right, whole = _log_sum(others, own, right_top)
        loss -= right
        tl.store(table + RIGHT_PULL * size + n, whole.to(tl.float32), mask=there)
    tl.store(losses + n, loss.to(tl.float32), mask=there)


@triton.jit
def finish_losses(
    by_row, by_column, rows, columns, row_losses, column_losses, R, Rp, Kp, number, offset, groups, parts,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DUPLICATES: tl.constexpr, BL: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Losses of image n and of classifier n. The right ones of a row equal its own entry, so need no top."""
    n = tl.program_id(0) * B + tl.arange(0, B)
    if ROWS:
        own = tl.load(rows + OWN * Rp + n, mask=n < R, other=0.0).to(tl.float64)
        _losses(by_row, parts, Rp, rows, own, own, n, n < R, Rp, row_losses, DUPLICATES, BL, B)
    if COLUMNS:
        here = n < number
        own = tl.load(rows + OWN * Rp + n - offset, mask=here, other=0.0).to(tl.float64)
        top = tl.load(columns + RIGHT_TOP * Kp + n, mask=here, other=0.0).to(tl.float64)
        _losses(by_column, groups, number, columns, own, top, n, here, Kp, column_losses, DUPLICATES, BL, B)
