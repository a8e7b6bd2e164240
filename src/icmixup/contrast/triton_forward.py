"""Triton kernels of the forward pass, and the functions that launch them.

i: rows of S, images      j: rows of Y~, classifiers      c: classes      z_ij: mixed score
D: entries that a softmax sums over      P: its positives, the own entry and, on request, its duplicates
BM, BN, BC, BR, B: sizes of tiles        Rp, Kp: R and K rounded up to whole tiles

Tables on the device (a line is a row of a table, named by the constants below):

scores_t    (C, Rp)  S^T in float32: z of one j is two contiguous reads; FAST mode: (S - largest of i) log2 e
classes_of  (2, Kp)  int32, the two classes of classifier j
rows        (6, Rp)  numbers by image                columns    (9, Kp)  numbers by classifier
plan        (5,)     what choose_mode decided

Powers are of 2, which is one instruction on the GPU where those of e are several.

The device decides which kernels do the work (plan): the others are launched too, and return immediately. That
costs a few microseconds each. Asking the device instead would make the host wait, and the loss could not be
captured in a CUDA graph. Tables are allocated empty and torch does no arithmetic here: a small kernel costs
the host as much as a large one, and with more than about twenty launches the host would be slower than the
device.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from icmixup._checks import Duplicates

LOG2E = tl.constexpr(1.4426950408889634)
# modes
FAST = tl.constexpr(0)  # one exponential serves both axes
SAFE = tl.constexpr(1)  # scores spread too far for that: largest entries first
DENSE = tl.constexpr(2)  # targets with more than two classes
# entries of plan
PLAN_MODE = tl.constexpr(0)
PLAN_CENTRE = tl.constexpr(1)  # the middle between the smallest and the largest score
PLAN_FLOOR = tl.constexpr(2)  # share of all other classes under label smoothing
PLAN_POISON = tl.constexpr(3)  # 0, or nan if a score is not finite
PLAN_FLOOR_MODE = tl.constexpr(4)  # FAST if the gradient of the floor is needed
PLAN_ENTRIES = 5
# lines of rows and of columns; TOP, SUM, POSITIVE_SUM and RESCALE are the same in both
OWN = tl.constexpr(0)  # rows: z_ii; in FAST mode less the largest score of i
SHARE_A = tl.constexpr(0)  # columns: share of the first class
TOP = tl.constexpr(1)  # largest entry; not in FAST mode
WEIGHT = tl.constexpr(2)  # rows: e^(largest score of i - centre)
SHARE_B = tl.constexpr(2)  # columns: share of the second class
SUM = tl.constexpr(3)  # sum over D
COEF = tl.constexpr(3)  # in the backward pass: gradient / sum over D
POSITIVE_SUM = tl.constexpr(4)  # sum over P
POSITIVE_COEF = tl.constexpr(4)  # in the backward pass: gradient / sum over P
RESCALE = tl.constexpr(5)  # e^(largest score, or centre, - own entry): makes a sum relative to the own entry
BIAS = tl.constexpr(6)  # columns
EXP_BIAS = tl.constexpr(7)  # columns: e^bias
POSITIVE_TOP = tl.constexpr(8)  # columns: largest entry of P; not in FAST mode
ROW_LINES = 6
COLUMN_LINES = 9
# lines of what read_scores and read_targets find, one column per program
SCORES_HIGH = tl.constexpr(0)
SCORES_LOW = tl.constexpr(1)
SCORES_LINES = 2
TARGETS_COUNT = tl.constexpr(0)  # most classes of a target
TARGETS_EXCESS = tl.constexpr(1)  # largest deviation of a sum of shares from 1
TARGETS_LOWEST = tl.constexpr(2)  # smallest share
TARGETS_BIAS = tl.constexpr(3)  # largest bias
TARGETS_LINES = 4
# Up to this spread of scores, sums of 2^20 entries relative to any of them fit in float32.
SPREAD = tl.constexpr(60.0)
LARGEST_BIAS = tl.constexpr(11.0)
# Shares that sum to one up to rounding; for others, the largest score cannot be subtracted beforehand.
EXCESS = tl.constexpr(5e-7)


@triton.jit
def read_scores(
    scores, targets, peaks, extremes, plan,
    R, C,
    FLOOR: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Find the largest score of each image, the largest and smallest of a program's images, and the floor."""
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    line = scores + r.to(tl.int64) * C
    high = tl.full([BR], -float("inf"), tl.float32)
    low = tl.full([BR], float("inf"), tl.float32)
    for c0 in range(0, C, BC):
        c = c0 + tl.arange(0, BC)
        there = (r < R)[:, None] & (c < C)[None, :]
        s = tl.load(line[:, None] + c[None, :], mask=there, other=0.0).to(tl.float32)
        # A maximum may lose a nan, but not inf; choose_mode treats both as not finite.
        s = tl.where(s == s, s, float("inf"))
        high = tl.maximum(high, tl.max(tl.where(there, s, -float("inf")), 1))
        low = tl.minimum(low, tl.min(tl.where(there, s, float("inf")), 1))
    tl.store(peaks + r, high)
    extremes += tl.program_id(0)
    tl.store(extremes + SCORES_HIGH * tl.num_programs(0), tl.max(high, 0))
    tl.store(extremes + SCORES_LOW * tl.num_programs(0), tl.min(low, 0))
    if tl.program_id(0) == 0:
        least = tl.full([BC], float("inf"), tl.float32)
        for c0 in range(0, C, BC):
            c = c0 + tl.arange(0, BC)
            least = tl.minimum(least, tl.load(targets + c, mask=c < C, other=float("inf")).to(tl.float32))
        tl.store(plan + PLAN_FLOOR, tl.min(least, 0) if FLOOR else 0.0)


@triton.jit
def read_targets(
    targets, bias, plan, classes_of, columns, extremes,
    K, C, Kp,
    HAS_BIAS: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Find the first and the last class of each target that differ from the floor, and by how much.

    Padding repeats the last target with bias -inf: its z stay in range and add nothing to a sum.
    """
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    line = targets + tl.minimum(j, K - 1).to(tl.int64) * C
    f = tl.load(plan + PLAN_FLOOR)
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
    tl.store(classes_of + j, first)
    tl.store(classes_of + Kp + j, last)
    tl.store(columns + SHARE_A * Kp + j, u)
    tl.store(columns + SHARE_B * Kp + j, v)
    padded_bias = tl.where(j < K, b, -float("inf"))
    tl.store(columns + BIAS * Kp + j, padded_bias)
    tl.store(columns + EXP_BIAS * Kp + j, tl.exp2(padded_bias * LOG2E))
    zeros = tl.zeros([BN], tl.float32)
    tl.store(columns + SUM * Kp + j, zeros)
    tl.store(columns + POSITIVE_SUM * Kp + j, zeros)
    tl.store(columns + RESCALE * Kp + j, zeros)
    # e^(z - inf) = 0 for classifiers without an image
    tl.store(columns + TOP * Kp + j, zeros + float("inf"))
    tl.store(columns + POSITIVE_TOP * Kp + j, zeros + float("inf"))
    extremes += tl.program_id(0)
    programs = tl.num_programs(0)
    tl.store(extremes + TARGETS_COUNT * programs, tl.max(count, 0).to(tl.float32))
    tl.store(extremes + TARGETS_EXCESS * programs, tl.max(tl.abs(u + v + C * f - 1.0), 0))
    tl.store(extremes + TARGETS_LOWEST * programs, tl.min(tl.minimum(u, v), 0))
    tl.store(extremes + TARGETS_BIAS * programs, tl.max(b, 0))


@triton.jit
def choose_mode(of_scores, of_targets, plan, n_scores, n_targets, ANY_FLOOR: tl.constexpr, B: tl.constexpr):
    """FAST if one exponential can serve both axes, SAFE if scores spread too far, DENSE for other targets."""
    high = tl.full([B], -float("inf"), tl.float32)
    low = tl.full([B], float("inf"), tl.float32)
    for n0 in range(0, n_scores, B):
        n = n0 + tl.arange(0, B)
        here = n < n_scores
        line = of_scores + n
        high = tl.maximum(high, tl.load(line + SCORES_HIGH * n_scores, mask=here, other=-float("inf")))
        low = tl.minimum(low, tl.load(line + SCORES_LOW * n_scores, mask=here, other=float("inf")))
    count = tl.zeros([B], tl.float32)
    excess = tl.zeros([B], tl.float32)
    lowest = tl.zeros([B], tl.float32)
    bias = tl.zeros([B], tl.float32)
    for n0 in range(0, n_targets, B):
        n = n0 + tl.arange(0, B)
        here = n < n_targets
        line = of_targets + n
        count = tl.maximum(count, tl.load(line + TARGETS_COUNT * n_targets, mask=here, other=0.0))
        excess = tl.maximum(excess, tl.load(line + TARGETS_EXCESS * n_targets, mask=here, other=0.0))
        lowest = tl.minimum(lowest, tl.load(line + TARGETS_LOWEST * n_targets, mask=here, other=0.0))
        bias = tl.maximum(bias, tl.load(line + TARGETS_BIAS * n_targets, mask=here, other=0.0))
    top = tl.max(high, 0)
    bottom = tl.min(low, 0)
    f = tl.load(plan + PLAN_FLOOR)
    # Shares that sum to one keep z between the smallest and the largest score.
    shares = (tl.min(lowest, 0) >= 0) & (tl.max(excess, 0) <= EXCESS)
    near = shares & (top - bottom < SPREAD) & (tl.max(bias, 0) <= LARGEST_BIAS)
    sparse = tl.max(count, 0) <= 2
    # 0.0, 1.0 and 2.0 are FAST, SAFE and DENSE, in a table of floats.
    mode = tl.where(near & sparse & ((f == 0) | ANY_FLOOR), 0.0, tl.where(sparse & (f == 0), 1.0, 2.0))
    tl.store(plan + PLAN_MODE, mode)
    tl.store(plan + PLAN_CENTRE, top * 0.5 + bottom * 0.5)
    tl.store(plan + PLAN_POISON, (top - top) + (bottom - bottom))
    tl.store(plan + PLAN_FLOOR_MODE, tl.where((mode == 0.0) & (f != 0), 0.0, -1.0))


@triton.jit
def transpose_scores(
    scores, peaks, scores_t, plan,
    R, C, Rp,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """S (R, C) to scores_t (C, Rp)."""
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    there = (r < R)[:, None] & (c < C)[None, :]
    s = tl.load(scores + r[:, None].to(tl.int64) * C + c[None, :], mask=there, other=0.0).to(tl.float32)
    if tl.load(plan + PLAN_MODE) == FAST:
        s = (s - tl.load(peaks + r, mask=r < R, other=0.0)[:, None]) * LOG2E
    tl.store(scores_t + c[:, None].to(tl.int64) * Rp + r[None, :], tl.trans(s), mask=(c < C)[:, None])


@triton.jit
def find_own(
    scores, peaks, scores_t, targets, classes_of, plan, rows, columns,
    R, K, C, Rp, Kp, n_columns, offset,
    B: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Fill OWN, WEIGHT and RESCALE of each image and its classifier; TOP starts at the own entry.

    float64 in FAST mode, since these factors multiply whole sums: their rounding would not average out.
    """
    i = tl.program_id(0) * B + tl.arange(0, B)
    j = i + offset
    there = (i < R) & (j >= 0) & (j < K)
    mode = tl.load(plan + PLAN_MODE)
    f = tl.load(plan + PLAN_FLOOR)
    poison = tl.load(plan + PLAN_POISON)
    a = tl.load(classes_of + j, mask=there, other=0).to(tl.int64)
    b = tl.load(classes_of + Kp + j, mask=there, other=0).to(tl.int64)
    u = tl.load(columns + SHARE_A * Kp + j, mask=there, other=0.0)
    v = tl.load(columns + SHARE_B * Kp + j, mask=there, other=0.0)
    own = u * tl.load(scores_t + a * Rp + i) + v * tl.load(scores_t + b * Rp + i)
    peak = tl.load(peaks + i, mask=i < R, other=0.0).to(tl.float64)
    line = scores + i.to(tl.int64) * C
    precise = u.to(tl.float64) * (tl.load(line + a, mask=there, other=0.0).to(tl.float64) - peak)
    precise += v.to(tl.float64) * (tl.load(line + b, mask=there, other=0.0).to(tl.float64) - peak)
    floor = tl.zeros([B], tl.float32)  # what the floor adds to every z of an image, beyond the largest score
    if (f != 0) | (mode == DENSE):
        dense = tl.zeros([B], tl.float32)
        for c0 in range(0, C, BC):
            c = c0 + tl.arange(0, BC)[:, None]
            s = tl.load(scores_t + c.to(tl.int64) * Rp + i[None, :], mask=c < C, other=0.0)
            floor += tl.sum(s, 0) * (f / LOG2E)
            if mode == DENSE:
                own_line = targets + j.to(tl.int64)[None, :] * C
                y = tl.load(own_line + c, mask=(c < C) & there[None, :], other=0.0).to(tl.float32)
                dense += tl.sum(s * y, 0)
        own = tl.where(mode == DENSE, dense, own)
    own += poison
    precise += poison.to(tl.float64)
    height = peak - tl.load(plan + PLAN_CENTRE).to(tl.float64) + floor.to(tl.float64)
    tl.store(rows + OWN * Rp + i, own)
    tl.store(rows + TOP * Rp + i, own)
    tl.store(rows + WEIGHT * Rp + i, tl.where(i < R, tl.exp(height), 0.0).to(tl.float32))
    tl.store(rows + SUM * Rp + i, tl.zeros([B], tl.float32))
    tl.store(rows + POSITIVE_SUM * Rp + i, tl.zeros([B], tl.float32))
    tl.store(rows + RESCALE * Rp + i, tl.where(mode == FAST, tl.exp(-precise), 1.0).to(tl.float32))
    here = there & (j < n_columns)
    rescale = tl.where(mode == FAST, tl.exp(-precise - height), 1.0).to(tl.float32)
    tl.store(columns + RESCALE * Kp + j, rescale, mask=here)
    tl.store(columns + TOP * Kp + j, own, mask=here)
    tl.store(columns + POSITIVE_TOP * Kp + j, own, mask=here)


@triton.jit
def _load_classifiers(classes_of, columns, j, Kp):
    """Classes a_j, b_j and shares u_j, v_j."""
    a = tl.load(classes_of + j)
    b = tl.load(classes_of + Kp + j)
    return a, b, tl.load(columns + SHARE_A * Kp + j), tl.load(columns + SHARE_B * Kp + j)


@triton.jit
def _sparse_scores(
    scores_t, a, b, u, v, i,
    Rp,
    WIDE: tl.constexpr,
):  # fmt: skip
    """z (BN, BM) of classifiers with two classes: u_j S_i,a_j + v_j S_i,b_j."""
    if WIDE:
        a = a.to(tl.int64)
        b = b.to(tl.int64)
    at_a = tl.load(scores_t + a[:, None] * Rp + i[None, :])
    at_b = tl.load(scores_t + b[:, None] * Rp + i[None, :])
    return u[:, None] * at_a + v[:, None] * at_b


@triton.jit
def dense_scores(
    scores_t, targets, i, j,
    K, C, Rp,
    BN: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """z (BN, BM) of any classifiers."""
    z = tl.zeros([BN, BM], tl.float32)
    for c0 in range(0, C, BC):
        c = c0 + tl.arange(0, BC)
        here = (j < K)[:, None] & (c < C)[None, :]
        y = tl.load(targets + j[:, None].to(tl.int64) * C + c[None, :], mask=here, other=0.0).to(tl.float32)
        s = tl.load(scores_t + c[:, None].to(tl.int64) * Rp + i[None, :], mask=(c < C)[:, None], other=0.0)
        z = tl.dot(y, s, z, input_precision="ieee")
    return z


@triton.jit
def exp(x):
    return tl.exp2(x * LOG2E)


@triton.jit
def _accumulate(table, j, value, n_columns, filled, LARGEST: tl.constexpr):
    """Add to this program's sums by column, or keep the larger; columns beyond `filled` start here."""
    before = tl.load(table + j, mask=j < filled, other=-float("inf") if LARGEST else 0.0)
    tl.store(table + j, tl.maximum(before, value) if LARGEST else before + value, mask=j < n_columns)


@triton.jit
def fast_sums(
    scores_t, classes_of, columns, rows, row_keys, column_keys, plan, by_row, by_column,
    R, K, Rp, Kp, n_columns, offset, span,
    WEIGHT_LINE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DUPLICATES: tl.constexpr,
    WIDE: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Sums over rows and over columns of S~, own entries left out, from one exponential per entry.

    Program (g, p) holds BM images and loops over the p-th span of classifiers, then takes its next images.
    Row sums stay in registers; the column sums of a program are its own line of by_column, so there are no
    races. On the rows, line WEIGHT_LINE of columns weights the classifiers, unless it is negative: EXP_BIAS,
    or COEF for the sums of the floor.
    """
    if tl.load(plan + (PLAN_FLOOR_MODE if WEIGHT_LINE == COEF else PLAN_MODE)) != FAST:
        return
    group = tl.program_id(0)
    part = tl.program_id(1)
    by_column += group.to(tl.int64) * n_columns
    positive_by_column = by_column + tl.num_programs(0).to(tl.int64) * n_columns
    for block in range(group, tl.cdiv(R, BM), tl.num_programs(0)):
        filled = tl.minimum(block - group, 1) * n_columns  # columns that already hold a sum
        i = block * BM + tl.arange(0, BM)
        image_weight = tl.load(rows + WEIGHT * Rp + i)[None, :]
        in_rows = tl.zeros([BN, BM], tl.float32)
        positive_in_rows = tl.zeros([BN, BM], tl.float32)
        if DUPLICATES != "negative":
            keys = tl.load(row_keys + i, mask=i < R, other=0)[None, :]
        a, b, u, v = _load_classifiers(classes_of, columns, part * span + tl.arange(0, BN), Kp)
        for j0 in range(part * span, tl.minimum(part * span + span, K), BN):
            j = j0 + tl.arange(0, BN)
            e = tl.exp2(_sparse_scores(scores_t, a, b, u, v, i, Rp, WIDE))
            # Load the next classifiers before they are needed; at the end, some valid ones.
            next_j = tl.minimum(j0 + BN, Kp - BN) + tl.arange(0, BN)
            a, b, u, v = _load_classifiers(classes_of, columns, next_j, Kp)
            if (j0 < block * BM + BM + offset) & (j0 + BN > block * BM + offset):
                e = tl.where(j[:, None] == i[None, :] + offset, 0.0, e)
            classifier_weight = tl.load(columns + WEIGHT_LINE * Kp + j)[:, None] if WEIGHT_LINE >= 0 else 1.0
            if DUPLICATES != "negative":
                same = tl.load(column_keys + j, mask=j < K, other=0)[:, None] == keys
                if DUPLICATES == "ignore":
                    e = tl.where(same, 0.0, e)
                else:
                    positive = tl.where(same, e, 0.0)
                    positive_in_rows += positive * classifier_weight
                    if COLUMNS:
                        value = tl.sum(positive * image_weight, 1)
                        _accumulate(positive_by_column, j, value, n_columns, filled, False)
            if ROWS:
                in_rows += e * classifier_weight if WEIGHT_LINE >= 0 else e
            if COLUMNS:
                _accumulate(by_column, j, tl.sum(e * image_weight, 1), n_columns, filled, False)
        if ROWS:
            tl.store(by_row + part * Rp + i, tl.sum(in_rows, 0))
            if DUPLICATES == "positive":
                tl.store(by_row + (tl.num_programs(1) + part) * Rp + i, tl.sum(positive_in_rows, 0))
        tl.debug_barrier()  # the next images read column sums that other threads may have written


@triton.jit
def _store_own(line, z, own, i, poison):
    """Replace the own entries of find_own by those of these tiles, which the backward pass computes too.

    find_own adds in another order, where large scores round differently.
    """
    entry = tl.sum(tl.where(own, z, 0.0), 0) + poison
    tl.store(line + i, entry, mask=tl.sum(own.to(tl.int32), 0) > 0)


@triton.jit
def safe_sums(
    scores_t, targets, classes_of, columns, rows, row_keys, column_keys, plan, by_row, by_column,
    R, K, C, Rp, Kp, n_columns, offset, span,
    MODE: tl.constexpr, LARGEST: tl.constexpr, DUPLICATES: tl.constexpr, WIDE: tl.constexpr, BN: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """fast_sums for any scores and any targets: first the LARGEST entries, then sums relative to them."""
    if tl.load(plan + PLAN_MODE) != MODE:
        return
    group = tl.program_id(0)
    part = tl.program_id(1)
    by_column += group.to(tl.int64) * n_columns
    positive_by_column = by_column + tl.num_programs(0).to(tl.int64) * n_columns
    start = -float("inf") if LARGEST else 0.0
    for block in range(group, tl.cdiv(R, BM), tl.num_programs(0)):
        filled = tl.minimum(block - group, 1) * n_columns  # columns that already hold a sum
        i = block * BM + tl.arange(0, BM)
        there = (i < R)[None, :]
        top = tl.load(rows + TOP * Rp + i)[None, :]
        own_score = tl.load(rows + OWN * Rp + i)[None, :]
        in_rows = tl.full([BN, BM], start, tl.float32)
        positive_in_rows = tl.zeros([BN, BM], tl.float32)
        for j0 in range(part * span, tl.minimum(part * span + span, K), BN):
            j = j0 + tl.arange(0, BN)
            if MODE == DENSE:
                z = dense_scores(scores_t, targets, i, j, K, C, Rp, BN, BM, BC)
            else:
                a, b, u, v = _load_classifiers(classes_of, columns, j, Kp)
                z = _sparse_scores(scores_t, a, b, u, v, i, Rp, WIDE)
            biased = z + tl.load(columns + BIAS * Kp + j)[:, None]
            own = j[:, None] == i[None, :] + offset
            counts = ~own
            if MODE == DENSE and LARGEST:
                exists = (i < R)[None, :] & (j < K)[:, None]
                _store_own(rows + OWN * Rp, z, own & exists, i, tl.load(plan + PLAN_POISON))
            if DUPLICATES != "negative":
                keys = tl.load(row_keys + i, mask=i < R, other=0)[None, :]
                same = tl.load(column_keys + j, mask=j < K, other=0)[:, None] == keys
                if DUPLICATES == "ignore":
                    counts = counts & ~same
                else:
                    positive = same & ~own
                    positive_top = tl.load(columns + POSITIVE_TOP * Kp + j)[:, None]
                    if LARGEST:
                        value = tl.max(tl.where(positive & there, z, start), 1)
                    else:
                        positive_in_rows += tl.where(positive, exp(biased - own_score), 0.0)
                        value = tl.sum(tl.where(positive & there, exp(z - positive_top), 0.0), 1)
                    _accumulate(positive_by_column, j, value, n_columns, filled, LARGEST)
            if LARGEST:
                in_rows = tl.maximum(in_rows, tl.where(counts, biased, start))
                value = tl.max(tl.where(counts & there, z, start), 1)
            else:
                in_rows += tl.where(counts, exp(biased - top), 0.0)
                below = z - tl.load(columns + TOP * Kp + j)[:, None]
                value = tl.sum(tl.where(counts & there, exp(below), 0.0), 1)
            _accumulate(by_column, j, value, n_columns, filled, LARGEST)
        tl.store(by_row + part * Rp + i, tl.max(in_rows, 0) if LARGEST else tl.sum(in_rows, 0))
        if DUPLICATES == "positive":
            tl.store(by_row + (tl.num_programs(1) + part) * Rp + i, tl.sum(positive_in_rows, 0))
        tl.debug_barrier()


@triton.jit
def reduce_lines(
    table, first, lines, width, n, there,
    LARGEST: tl.constexpr, BL: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Sum, or maximum, over `lines` lines of columns n of a table, from line `first` on; in float64."""
    start = -float("inf") if LARGEST else 0.0
    total = tl.full([BL, B], start, tl.float64)
    for l0 in range(0, lines, BL):
        line = l0 + tl.arange(0, BL)[:, None]
        pointer = table + (first + line).to(tl.int64) * width + n[None, :]
        value = tl.load(pointer, mask=(line < lines) & there[None, :], other=start).to(tl.float64)
        total = tl.maximum(total, value) if LARGEST else total + value
    return tl.max(total, 0) if LARGEST else tl.sum(total, 0)


@triton.jit
def find_tops(
    by_row, by_column, rows, columns, plan,
    R, Rp, Kp, n_columns, offset, groups, parts,
    DUPLICATES: tl.constexpr, BL: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Raise TOP, and POSITIVE_TOP of columns, to the largest entries found by safe_sums."""
    if tl.load(plan + PLAN_MODE) == FAST:
        return
    n = tl.program_id(0) * B + tl.arange(0, B)
    own = tl.load(rows + OWN * Rp + n, mask=n < R, other=0.0)
    largest = reduce_lines(by_row, 0, parts, Rp, n, n < R, True, BL, B).to(tl.float32)
    tl.store(rows + TOP * Rp + n, tl.maximum(own, largest), mask=n < R)
    here = n < n_columns
    own = tl.load(rows + OWN * Rp + n - offset, mask=here, other=0.0)
    largest = reduce_lines(by_column, 0, groups, n_columns, n, here, True, BL, B).to(tl.float32)
    tl.store(columns + TOP * Kp + n, tl.maximum(own, largest), mask=here)
    if DUPLICATES == "positive":
        largest = reduce_lines(by_column, groups, groups, n_columns, n, here, True, BL, B).to(tl.float32)
        tl.store(columns + POSITIVE_TOP * Kp + n, tl.maximum(own, largest), mask=here)


@triton.jit
def _log_sum(others, own, top):
    """log(e^top others + e^own) - own, exactly 0 without others; and the sum relative to top; in float64."""
    own_power = tl.exp(own - top)
    x = others + (own_power - 1.0)
    # 1 + x has lost the last digits of a small x.
    return tl.where(tl.abs(x) < 1e-6, x - 0.5 * x * x, tl.log(1.0 + x)) + (top - own), others + own_power


@triton.jit
def _store_losses(
    sums, lines, width, table, own, positive_top, n, there, size, losses,
    DUPLICATES: tl.constexpr, BL: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Losses of rows or columns from sums over D and over P, which are stored in SUM and POSITIVE_SUM."""
    rescale = tl.load(table + RESCALE * size + n, mask=there, other=1.0).to(tl.float64)
    top = tl.load(table + TOP * size + n, mask=there, other=0.0).to(tl.float64)
    others = reduce_lines(sums, 0, lines, width, n, there, False, BL, B) * rescale
    loss, whole = _log_sum(others, own, top)
    tl.store(table + SUM * size + n, whole.to(tl.float32), mask=there)
    if DUPLICATES == "positive":
        others = reduce_lines(sums, lines, lines, width, n, there, False, BL, B) * rescale
        positive, whole = _log_sum(others, own, positive_top)
        loss -= positive
        tl.store(table + POSITIVE_SUM * size + n, whole.to(tl.float32), mask=there)
    tl.store(losses + n, loss.to(tl.float32), mask=there)


@triton.jit
def finish_losses(
    by_row, by_column, rows, columns, row_losses, column_losses,
    R, Rp, Kp, n_columns, offset, groups, parts,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DUPLICATES: tl.constexpr, BL: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Losses of image n and of classifier n. The positives of a row equal its own entry, so need no top."""
    n = tl.program_id(0) * B + tl.arange(0, B)
    if ROWS:
        own = tl.load(rows + OWN * Rp + n, mask=n < R, other=0.0).to(tl.float64)
        _store_losses(by_row, parts, Rp, rows, own, own, n, n < R, Rp, row_losses, DUPLICATES, BL, B)
    if COLUMNS:
        here = n < n_columns
        own = tl.load(rows + OWN * Rp + n - offset, mask=here, other=0.0).to(tl.float64)
        top = tl.load(columns + POSITIVE_TOP * Kp + n, mask=here, other=0.0).to(tl.float64)
        _store_losses(
            by_column, groups, n_columns, columns, own, top, n, here, Kp, column_losses, DUPLICATES, BL, B
        )


class Tiles(NamedTuple):
    """Sizes of tiles and numbers of warps, all powers of two except sum_groups; chosen with bench/tune.py."""

    sum_classifiers: int = 256  # tile of the sums
    sum_images: int = 32  # at most 128, as for the gradient
    sum_warps: int = 8
    sum_groups: int = 0  # concurrent programs, each with its own column sums; 0: one per multiprocessor
    grad_chunks: int = 32  # tile of the gradient: chunks, entries of each, images
    grad_entries: int = 4
    grad_images: int = 16
    grad_warps: int = 8
    grad_splits: int = 1  # programs per multiprocessor at least, where there are few images
    dense_classifiers: int = 128  # tile of targets with more than two classes
    dense_images: int = 64
    dense_classes: int = 16
    dense_warps: int = 8
    heavy_chunks: int = 256  # a class with more than 2 K / heavy_chunks entries is split


@dataclass(frozen=True)
class Launch:
    """Sizes and options of one call of contrast_fused: all that the launches need besides tensors.

    Derived sizes are cached, since every launch asks for several of them and the host's time counts.
    """

    R: int
    K: int
    C: int
    offset: int
    rows: bool
    columns: bool
    num_columns: int
    duplicates: Duplicates
    has_bias: bool
    tiles: Tiles
    multiprocessors: int

    @cached_property
    def Rp(self) -> int:
        return _round_up(self.R, 128)

    @cached_property
    def Kp(self) -> int:
        return _round_up(self.K, max(self.tiles.sum_classifiers, self.tiles.dense_classifiers))

    @cached_property
    def wide(self) -> bool:
        """Whether indices into S^T need 64 bits."""
        return (self.C + 1) * self.Rp >= 2**31

    @cached_property
    def weight_line(self) -> int:
        """Line of columns that weights classifiers on the rows: for bias or padding; -1 without them."""
        differ = self.has_bias or self.K % self.tiles.sum_classifiers != 0
        return EXP_BIAS.value if differ else -1

    @cached_property
    def num_column_losses(self) -> int:
        return self.num_columns if self.columns else 0

    @cached_property
    def blocks(self) -> int:
        """Tiles of classifiers, of the larger size."""
        return cdiv(self.K, max(self.tiles.sum_classifiers, self.tiles.dense_classifiers))

    @cached_property
    def grid(self) -> tuple[int, int]:
        """Groups of images, parts of the classifiers; none without work, since each fills its own lines."""
        programs = self.tiles.sum_groups or self.multiprocessors
        groups = min(cdiv(self.R, max(self.tiles.sum_images, self.tiles.dense_images)), programs)
        parts = max(1, min(self.blocks, programs // groups))
        return groups, cdiv(self.blocks, cdiv(self.blocks, parts))

    @cached_property
    def span(self) -> int:
        """Classifiers of one part."""
        block = max(self.tiles.sum_classifiers, self.tiles.dense_classifiers)
        return cdiv(self.blocks, self.grid[1]) * block

    @cached_property
    def num_chunks(self) -> int:
        return self.C + self.tiles.heavy_chunks

    @cached_property
    def longest(self) -> int:
        """Largest number of entries in a chunk."""
        return cdiv(2 * self.K, self.tiles.heavy_chunks)


class ForwardState(NamedTuple):
    """Tables that the backward pass needs too."""

    scores_t: Tensor  # (C, Rp)
    classes_of: Tensor  # (2, Kp) int32
    rows: Tensor  # (6, Rp)
    columns: Tensor  # (9, Kp)
    plan: Tensor  # (5,)


class SumTables(NamedTuple):
    """Partial sums, or largest entries: each program has lines of its own.

    `sides` is 1 for sums over D, or 2 if sums over P are needed as well.
    """

    by_row: Tensor  # (sides, parts, Rp)
    by_column: Tensor  # (sides, groups, num_column_losses)


def cdiv(number: int, size: int) -> int:
    return -(-number // size)


def _round_up(number: int, size: int) -> int:
    return cdiv(number, size) * size


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def empty_state(launch: Launch, device: torch.device) -> ForwardState:
    scores_t = torch.empty(launch.C, launch.Rp, device=device, dtype=torch.float32)
    return ForwardState(
        scores_t=scores_t,
        classes_of=scores_t.new_empty(2, launch.Kp, dtype=torch.int32),
        rows=scores_t.new_empty(ROW_LINES, launch.Rp),
        columns=scores_t.new_empty(COLUMN_LINES, launch.Kp),
        plan=scores_t.new_empty(PLAN_ENTRIES),
    )


def empty_sums(launch: Launch, like: Tensor) -> SumTables:
    groups, parts = launch.grid
    sides = 2 if launch.duplicates == "positive" else 1
    by_row = like.new_empty(sides, parts, launch.Rp)
    return SumTables(by_row, like.new_empty(sides, groups, launch.num_column_losses))


# In the launches below tensors are positional, in the order of the kernel's signature; numbers have keywords.


def launch_forward(
    scores: Tensor, targets: Tensor, bias: Tensor | None, keys: tuple[Tensor, Tensor], launch: Launch
) -> tuple[Tensor, Tensor, ForwardState]:
    """(R,) row losses, (num_columns,) column losses, each empty if not requested, and the state."""
    state = _prepare(scores, targets, bias, launch)
    sums = empty_sums(launch, state.scores_t)
    _launch_safe_sums(targets, keys, state, launch, sums, largest=True)
    R, n_columns, (groups, parts) = launch.R, launch.num_column_losses, launch.grid
    tables = (*sums, state.rows, state.columns)
    sizes = {
        "R": R, "Rp": launch.Rp, "Kp": launch.Kp, "n_columns": n_columns, "offset": launch.offset,
        "groups": groups, "parts": parts, "DUPLICATES": launch.duplicates, "BL": 16, "B": 64,
    }  # fmt: skip
    find_tops[(cdiv(max(R, n_columns), 64),)](*tables, state.plan, **sizes)
    launch_fast_sums(keys, state, launch, sums, launch.weight_line)
    _launch_safe_sums(targets, keys, state, launch, sums)
    losses = state.scores_t.new_empty(R if launch.rows else 0), state.scores_t.new_empty(n_columns)
    finish_losses[(cdiv(max(R, n_columns), 64),)](
        *tables, *losses, **sizes, ROWS=launch.rows, COLUMNS=launch.columns
    )
    return *losses, state


def _prepare(scores: Tensor, targets: Tensor, bias: Tensor | None, launch: Launch) -> ForwardState:
    """Choose the mode, transpose the scores, find the own entries."""
    R, C, Rp = launch.R, launch.C, launch.Rp
    state = empty_state(launch, scores.device)
    peaks = state.scores_t.new_empty(Rp)
    _launch_choose_mode(scores, targets, bias, peaks, state, launch)
    transpose_scores[(Rp // 32, cdiv(C, 64))](
        scores, peaks, state.scores_t, state.plan, R=R, C=C, Rp=Rp, BR=32, BC=64
    )
    find_own[(Rp // 128,)](
        scores, peaks, state.scores_t, targets, state.classes_of, state.plan, state.rows, state.columns,
        R=R, K=launch.K, C=C, Rp=Rp, Kp=launch.Kp, n_columns=launch.num_column_losses, offset=launch.offset,
        B=128, BC=16, enable_fp_fusion=False,
    )  # fmt: skip
    return state


def _launch_choose_mode(
    scores: Tensor, targets: Tensor, bias: Tensor | None, peaks: Tensor, state: ForwardState, launch: Launch
) -> None:
    """Fill peaks, classes_of and plan, and those lines of columns that depend on targets and bias only."""
    C, tiles = launch.C, launch.tiles
    block = min(1024, max(16, _next_power_of_2(C)))
    images = min(128, 4096 // block)
    of_scores = peaks.new_empty(SCORES_LINES, launch.Rp // images)
    # With two classes every target is a pair; with more, a smallest share above 0 is label smoothing.
    read_scores[(launch.Rp // images,)](
        scores, targets, peaks, of_scores, state.plan, R=launch.R, C=C, FLOOR=C > 2, BR=images, BC=block
    )
    classifiers = min(tiles.sum_classifiers, tiles.dense_classifiers, 4096 // block)
    of_targets = peaks.new_empty(TARGETS_LINES, launch.Kp // classifiers)
    read_targets[(launch.Kp // classifiers,)](
        targets, targets if bias is None else bias, state.plan, state.classes_of, state.columns, of_targets,
        K=launch.K, C=C, Kp=launch.Kp, HAS_BIAS=bias is not None, BN=classifiers, BC=block,
    )  # fmt: skip
    choose_mode[(1,)](
        of_scores, of_targets, state.plan, n_scores=of_scores.shape[1], n_targets=of_targets.shape[1],
        ANY_FLOOR=launch.duplicates != "positive", B=1024,
    )  # fmt: skip


def launch_fast_sums(
    keys: tuple[Tensor, Tensor], state: ForwardState, launch: Launch, sums: SumTables, weight_line: int
) -> None:
    """Sums without the own entries, relative to the largest score (rows) or the centre (columns), if FAST."""
    tiles = launch.tiles
    fast_sums[launch.grid](
        state.scores_t, state.classes_of, state.columns, state.rows, *keys, state.plan, *sums,
        R=launch.R, K=launch.K, Rp=launch.Rp, Kp=launch.Kp, n_columns=launch.num_column_losses,
        offset=launch.offset, span=launch.span, WEIGHT_LINE=weight_line, ROWS=launch.rows,
        COLUMNS=launch.columns, DUPLICATES=launch.duplicates, WIDE=launch.wide, BN=tiles.sum_classifiers,
        BM=tiles.sum_images, num_warps=tiles.sum_warps,
    )  # fmt: skip


def fuses_products(mode: int) -> bool:
    """Whether a product and the sum after it may round once.

    Not in SAFE mode: u x + v y is then the same to the last bit in either order, so that the largest entry
    is exactly e^0 = 1 in the backward pass too, however large the scores are.
    """
    return bool(mode != SAFE.value)


def _launch_safe_sums(
    targets: Tensor,
    keys: tuple[Tensor, Tensor],
    state: ForwardState,
    launch: Launch,
    sums: SumTables,
    largest: bool = False,
) -> None:
    """The sums relative to TOP, or the largest entries, if SAFE or DENSE."""
    tiles = launch.tiles
    sparse = (SAFE.value, tiles.sum_classifiers, tiles.sum_images, tiles.sum_warps)
    dense = (DENSE.value, tiles.dense_classifiers, tiles.dense_images, tiles.dense_warps)
    for mode, classifiers, images, warps in (sparse, dense):
        safe_sums[launch.grid](
            state.scores_t, targets, state.classes_of, state.columns, state.rows, *keys, state.plan, *sums,
            R=launch.R, K=launch.K, C=launch.C, Rp=launch.Rp, Kp=launch.Kp,
            n_columns=launch.num_column_losses, offset=launch.offset, span=launch.span, MODE=mode,
            LARGEST=largest, DUPLICATES=launch.duplicates, WIDE=launch.wide, BN=classifiers, BM=images,
            BC=tiles.dense_classes, num_warps=warps, enable_fp_fusion=fuses_products(mode),
        )  # fmt: skip
