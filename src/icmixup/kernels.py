"""The Triton kernels of fused.py's forward pass. Only kernels_backward.py imports Triton besides.

i: rows of S, images      j: rows of Y~, classifiers      c: classes      z_ij: mixed score
slab      (C, Rp) S^T in float32: z of one j is two contiguous reads; in FAST mode (S - largest of i) log2 e
pairs     (2, Kp) int32, the classes of j                       rows, columns    tables of numbers by i, by j
plan      (5,) mode, centre, floor, poison, mode of level       BM, BN, BC       tile over i, over j, over c
Powers are of 2, which is one instruction on the GPU where those of e are several.
"""

# mypy: ignore-errors

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton reads it when a kernel is defined

LOG2E = tl.constexpr(1.4426950408889634)
# modes
FAST = tl.constexpr(0)
SAFE = tl.constexpr(1)
DENSE = tl.constexpr(2)
# duplicates
NEGATIVE = tl.constexpr(0)
IGNORE = tl.constexpr(1)
POSITIVE = tl.constexpr(2)
# lines of rows and of columns
OWN = tl.constexpr(0)  # z_ii; in FAST mode less the largest score of i
U = tl.constexpr(0)  # share of the first class
TOP = tl.constexpr(1)  # largest entry; not in FAST mode
WEIGHT = tl.constexpr(2)  # e^(largest score of i - centre)
V = tl.constexpr(2)  # share of the second class
PULL = tl.constexpr(3)  # gradient / sum over D; before the backward pass, the sum
RIGHT_PULL = tl.constexpr(4)  # gradient / sum over P
UNDO = tl.constexpr(5)  # turns a sum below the largest score or the centre into one below the own entry
BIAS = tl.constexpr(6)
BETA = tl.constexpr(7)  # e^bias
RIGHT_TOP = tl.constexpr(8)  # largest entry of P; not in FAST mode
ROW_LINES = 6
PLAN_NUMBERS = 5
COLUMN_LINES = 9
# Up to this spread of scores, sums of 2^20 entries below any of them fit in float32.
SPREAD = tl.constexpr(60.0)
LARGEST_BIAS = tl.constexpr(11.0)
# Shares that sum to one up to rounding; of others, the largest score cannot be taken off beforehand.
EXCESS = tl.constexpr(5e-7)


@triton.jit
def read_scores(
    scores, targets, peaks, extremes, plan, R, C, FLOOR: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """The largest score of each image, the largest and smallest of a program's images, and the floor."""
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    line = scores + r.to(tl.int64) * C
    high = tl.full([BR], -float("inf"), tl.float32)
    low = tl.full([BR], float("inf"), tl.float32)
    for c0 in range(0, C, BC):
        c = c0 + tl.arange(0, BC)
        there = (r < R)[:, None] & (c < C)[None, :]
        s = tl.load(line[:, None] + c[None, :], mask=there, other=0.0).to(tl.float32)
        # A maximum may lose a nan, but not inf; choose_mode takes either for poison.
        s = tl.where(s == s, s, float("inf"))
        high = tl.maximum(high, tl.max(tl.where(there, s, -float("inf")), 1))
        low = tl.minimum(low, tl.min(tl.where(there, s, float("inf")), 1))
    tl.store(peaks + r, high)
    tl.store(extremes + tl.program_id(0), tl.max(high, 0))
    tl.store(extremes + tl.num_programs(0) + tl.program_id(0), tl.min(low, 0))
    if tl.program_id(0) == 0:
        least = tl.full([BC], float("inf"), tl.float32)
        for c0 in range(0, C, BC):
            c = c0 + tl.arange(0, BC)
            least = tl.minimum(least, tl.load(targets + c, mask=c < C, other=float("inf")).to(tl.float32))
        tl.store(plan + 2, tl.min(least, 0) if FLOOR else 0.0)


@triton.jit
def read_pairs(
    targets, bias, plan, pairs, columns, extremes, K, C, Kp, HAS_BIAS: tl.constexpr, BN: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """The first and the last class of each target that differ from the floor, and by how much.

    Padding repeats the last target with bias -inf, so that its z stay in range and count nothing.
    """
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    line = targets + tl.minimum(j, K - 1).to(tl.int64) * C
    f = tl.load(plan + 2)
    first = tl.full([BN], 2147483647, tl.int32)
    last = tl.full([BN], -1, tl.int32)
    count = tl.zeros([BN], tl.int32)
    for c0 in range(0, C, BC):
        c = c0 + tl.arange(0, BC)
        y = tl.load(line[:, None] + c[None, :], mask=(c < C)[None, :], other=0.0).to(tl.float32)
        # lam f + (1 - lam) f is f only up to rounding: the floor of smoothed targets has a tolerance.
        other = (tl.abs(y - f) > 5e-7 * f) | (y != y)
        other = other & (c < C)[None, :]
        first = tl.minimum(first, tl.min(tl.where(other, c[None, :], 2147483647), 1))
        last = tl.maximum(last, tl.max(tl.where(other, c[None, :], -1), 1))
        count += tl.sum(other.to(tl.int32), 1)
    first = tl.where(count > 0, first, 0)
    last = tl.where(count > 0, last, 0)
    u = tl.load(line + first).to(tl.float32) - f
    v = tl.where(last > first, tl.load(line + last).to(tl.float32) - f, 0.0)
    b = tl.zeros([BN], tl.float32)
    if HAS_BIAS:
        b = tl.load(bias + tl.minimum(j, K - 1)).to(tl.float32)
    tl.store(pairs + j, first)
    tl.store(pairs + Kp + j, last)
    tl.store(columns + U * Kp + j, u)
    tl.store(columns + V * Kp + j, v)
    b_or_none = tl.where(j < K, b, -float("inf"))
    tl.store(columns + BIAS * Kp + j, b_or_none)
    tl.store(columns + BETA * Kp + j, tl.exp2(b_or_none * LOG2E))
    nothing = tl.zeros([BN], tl.float32)
    tl.store(columns + PULL * Kp + j, nothing)
    tl.store(columns + RIGHT_PULL * Kp + j, nothing)
    tl.store(columns + UNDO * Kp + j, nothing)
    # e^(z - inf) = 0 for classifiers without an image
    tl.store(columns + TOP * Kp + j, nothing + float("inf"))
    tl.store(columns + RIGHT_TOP * Kp + j, nothing + float("inf"))
    mine = extremes + tl.program_id(0)
    programs = tl.num_programs(0)
    tl.store(mine, tl.max(count, 0).to(tl.float32))
    tl.store(mine + programs, tl.max(tl.abs(u + v + C * f - 1.0), 0))
    tl.store(mine + 2 * programs, tl.min(tl.minimum(u, v), 0))
    tl.store(mine + 3 * programs, tl.max(b, 0))


@triton.jit
def choose_mode(
    of_scores, of_targets, plan, n_scores, n_targets, ANY_FLOOR: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    """FAST where one exponential serves both axes, SAFE where scores reach far, DENSE for other targets."""
    high = tl.full([B], -float("inf"), tl.float32)
    low = tl.full([B], float("inf"), tl.float32)
    for n0 in range(0, n_scores, B):
        n = n0 + tl.arange(0, B)
        here = n < n_scores
        high = tl.maximum(high, tl.load(of_scores + n, mask=here, other=-float("inf")))
        low = tl.minimum(low, tl.load(of_scores + n_scores + n, mask=here, other=float("inf")))
    count = tl.zeros([B], tl.float32)
    excess = tl.zeros([B], tl.float32)
    lowest = tl.zeros([B], tl.float32)
    bias = tl.zeros([B], tl.float32)
    for n0 in range(0, n_targets, B):
        n = n0 + tl.arange(0, B)
        here = n < n_targets
        count = tl.maximum(count, tl.load(of_targets + n, mask=here, other=0.0))
        excess = tl.maximum(excess, tl.load(of_targets + n_targets + n, mask=here, other=0.0))
        lowest = tl.minimum(lowest, tl.load(of_targets + 2 * n_targets + n, mask=here, other=0.0))
        bias = tl.maximum(bias, tl.load(of_targets + 3 * n_targets + n, mask=here, other=0.0))
    top = tl.max(high, 0)
    bottom = tl.min(low, 0)
    f = tl.load(plan + 2)
    # Shares that sum to one keep z between the smallest and the largest score.
    shares = (tl.min(lowest, 0) >= 0) & (tl.max(excess, 0) <= EXCESS)
    near = shares & (top - bottom < SPREAD) & (tl.max(bias, 0) <= LARGEST_BIAS)
    sparse = tl.max(count, 0) <= 2
    mode = tl.where(near & sparse & ((f == 0) | ANY_FLOOR), 0.0, tl.where(sparse & (f == 0), 1.0, 2.0))
    tl.store(plan, mode)
    tl.store(plan + 1, top * 0.5 + bottom * 0.5)
    tl.store(plan + 3, (top - top) + (bottom - bottom))  # nan if a score is not finite
    tl.store(plan + 4, tl.where((mode == 0.0) & (f != 0), 0.0, -1.0))


@triton.jit
def transpose_scores(scores, peaks, slab, plan, R, C, Rp, BR: tl.constexpr, BC: tl.constexpr):
    """S (R, C) to the slab (C, Rp)."""
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    there = (r < R)[:, None] & (c < C)[None, :]
    s = tl.load(scores + r[:, None].to(tl.int64) * C + c[None, :], mask=there, other=0.0).to(tl.float32)
    if tl.load(plan) == FAST:
        s = (s - tl.load(peaks + r, mask=r < R, other=0.0)[:, None]) * LOG2E
    tl.store(slab + c[:, None].to(tl.int64) * Rp + r[None, :], tl.trans(s), mask=(c < C)[:, None])


@triton.jit
def find_own(
    scores, peaks, slab, targets, pairs, plan, rows, columns, R, K, C, Rp, Kp, number, offset,
    B: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """z of each image under its own classifier, WEIGHT and UNDO; TOP as if nothing were larger.

    In FAST mode in float64, since these multiply whole sums: their rounding would not average out.
    """
    i = tl.program_id(0) * B + tl.arange(0, B)
    j = i + offset
    there = (i < R) & (j >= 0) & (j < K)
    mode = tl.load(plan)
    f = tl.load(plan + 2)
    poison = tl.load(plan + 3)
    a = tl.load(pairs + j, mask=there, other=0).to(tl.int64)
    b = tl.load(pairs + Kp + j, mask=there, other=0).to(tl.int64)
    u = tl.load(columns + U * Kp + j, mask=there, other=0.0)
    v = tl.load(columns + V * Kp + j, mask=there, other=0.0)
    own = u * tl.load(slab + a * Rp + i) + v * tl.load(slab + b * Rp + i)
    peak = tl.load(peaks + i, mask=i < R, other=0.0).to(tl.float64)
    line = scores + i.to(tl.int64) * C
    precise = u.to(tl.float64) * (tl.load(line + a, mask=there, other=0.0).to(tl.float64) - peak)
    precise += v.to(tl.float64) * (tl.load(line + b, mask=there, other=0.0).to(tl.float64) - peak)
    floor = tl.zeros([B], tl.float32)  # what it adds to every z of an image, beyond the largest score
    if (f != 0) | (mode == DENSE):
        dense = tl.zeros([B], tl.float32)
        for c0 in range(0, C, BC):
            c = c0 + tl.arange(0, BC)[:, None]
            s = tl.load(slab + c.to(tl.int64) * Rp + i[None, :], mask=c < C, other=0.0)
            floor += tl.sum(s, 0) * (f / LOG2E)
            if mode == DENSE:
                own_line = targets + j.to(tl.int64)[None, :] * C
                y = tl.load(own_line + c, mask=(c < C) & there[None, :], other=0.0).to(tl.float32)
                dense += tl.sum(s * y, 0)
        own = tl.where(mode == DENSE, dense, own)
    own += poison
    precise += poison.to(tl.float64)
    height = peak - tl.load(plan + 1).to(tl.float64) + floor.to(tl.float64)
    tl.store(rows + OWN * Rp + i, own)
    tl.store(rows + TOP * Rp + i, own)
    tl.store(rows + WEIGHT * Rp + i, tl.where(i < R, tl.exp(height), 0.0).to(tl.float32))
    tl.store(rows + PULL * Rp + i, tl.zeros([B], tl.float32))
    tl.store(rows + RIGHT_PULL * Rp + i, tl.zeros([B], tl.float32))
    tl.store(rows + UNDO * Rp + i, tl.where(mode == FAST, tl.exp(-precise), 1.0).to(tl.float32))
    here = there & (j < number)
    undo = tl.where(mode == FAST, tl.exp(-precise - height), 1.0).to(tl.float32)
    tl.store(columns + UNDO * Kp + j, undo, mask=here)
    tl.store(columns + TOP * Kp + j, own, mask=here)
    tl.store(columns + RIGHT_TOP * Kp + j, own, mask=here)


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
                # From here on the own entry is what these tiles make of it, as the backward pass does, not
                # what find_own's other order of sums did: large scores round to other numbers there.
                at = i + offset
                entry = tl.sum(tl.where(own, z, 0.0), 0) + tl.load(plan + 3)
                tl.store(rows + OWN * Rp + i, entry, mask=(at >= j0) & (at < j0 + BN) & (at < K) & (i < R))
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
