"""The Triton kernels that read scores and targets, and choose how to go on, before kernels_sums.py sums.

i: rows of S, images      j: rows of Y~, classifiers      c: classes      z_ij: mixed score
slab      (C, Rp) S^T in float32: z of one j is two contiguous reads; in FAST mode (S - largest of i) log2 e
pairs     (2, Kp) int32, the classes of j                       rows, columns    tables of numbers by i, by j
plan      (5,) mode, centre, floor, poison, mode of level       BM, BN, BC       tile over i, over j, over c
Powers are of 2, which is one instruction on the GPU where those of e are several.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

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
