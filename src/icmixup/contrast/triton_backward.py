"""The Triton kernels of fused.py's backward pass; names and letters as in kernels.py.

E entries: the non-zeros of Y~, sorted by class; a chunk is some entries of one class.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from icmixup.contrast.kernels import (
    BETA,
    BIAS,
    DENSE,
    FAST,
    IGNORE,
    NEGATIVE,
    OWN,
    POSITIVE,
    PULL,
    RIGHT_PULL,
    RIGHT_TOP,
    SAFE,
    TOP,
    UNDO,
    WEIGHT,
    U,
    V,
)
from icmixup.contrast.triton_forward import dense_scores, exp, over_lines

# more lines of rows, for the backward pass
OWN_PULL = tl.constexpr(6)  # what the own entry adds to W_ii, beyond what the sums over entries hold of it
LEVEL = tl.constexpr(7)  # what it takes off the sums of level
ROW_LINES = 8


@triton.jit
def _copy(table, copied, LINE: tl.constexpr, n, size):
    tl.store(copied + LINE * size + n, tl.load(table + LINE * size + n, mask=n < size), mask=n < size)


@triton.jit
def _over_sum(gradient, table, n, size, there, SUM: tl.constexpr):
    """A gradient divided by the sum that the forward pass left in the line that takes it."""
    undo = tl.load(table + UNDO * size + n, mask=there, other=0.0)
    return gradient * (undo / tl.load(table + SUM * size + n, mask=there, other=1.0))


@triton.jit
def _own_share(table, own, n, size, there):
    """The own entry's part in the sum over D."""
    top = tl.load(table + TOP * size + n, mask=there, other=0.0)
    return exp(own - top) / tl.load(table + PULL * size + n, mask=there, other=1.0)


@triton.jit
def pull_rows(
    row_grad, row_stride, column_grad, column_stride, rows, columns, pulled, R, Rp, Kp, number, offset,
    ROWS: tl.constexpr, DUPLICATES: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """The table of rows with pulls where the sums were, OWN_PULL and LEVEL added."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    j = i + offset
    there = i < (R if ROWS else 0)
    here = (i < R) & (j >= 0) & (j < number)
    g = tl.load(row_grad + i.to(tl.int64) * row_stride, mask=there, other=0.0).to(tl.float32)
    h = tl.load(column_grad + j.to(tl.int64) * column_stride, mask=here, other=0.0).to(tl.float32)
    own = tl.load(rows + OWN * Rp + i, mask=i < Rp, other=0.0)
    own_pull = tl.zeros([B], tl.float32)
    if DUPLICATES != POSITIVE:
        own_pull -= g + h
    if DUPLICATES == IGNORE:
        # Equal classifiers are left out there, and the own one is equal to itself.
        own_pull += tl.where(there, g * _own_share(rows, own, i, Rp, there), 0.0)
        own_pull += tl.where(here, h * _own_share(columns, own, j, Kp, here), 0.0)
    _copy(rows, pulled, OWN, i, Rp)
    _copy(rows, pulled, TOP, i, Rp)
    _copy(rows, pulled, WEIGHT, i, Rp)
    tl.store(pulled + PULL * Rp + i, _over_sum(g, rows, i, Rp, there, PULL), mask=i < Rp)
    if DUPLICATES == POSITIVE:
        tl.store(pulled + RIGHT_PULL * Rp + i, _over_sum(g, rows, i, Rp, there, RIGHT_PULL), mask=i < Rp)
    tl.store(pulled + OWN_PULL * Rp + i, own_pull, mask=i < Rp)
    weight = tl.load(rows + WEIGHT * Rp + i, mask=i < Rp, other=0.0)
    undo = tl.load(rows + UNDO * Rp + i, mask=i < Rp, other=1.0)
    level = weight * (_over_sum(h, columns, j, Kp, here, PULL) / undo) - h - own_pull
    tl.store(pulled + LEVEL * Rp + i, level, mask=i < Rp)


@triton.jit
def pull_columns(
    column_grad, column_stride, pairs, columns, pulled, classes, K, C, Kp, number,
    DUPLICATES: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """The table of columns with pulls where the sums were, and the classes of its 2 K entries."""
    j = tl.program_id(0) * B + tl.arange(0, B)
    here = j < number
    h = tl.load(column_grad + j.to(tl.int64) * column_stride, mask=here, other=0.0).to(tl.float32)
    _copy(columns, pulled, U, j, Kp)
    _copy(columns, pulled, V, j, Kp)
    _copy(columns, pulled, TOP, j, Kp)
    _copy(columns, pulled, BIAS, j, Kp)
    _copy(columns, pulled, BETA, j, Kp)
    tl.store(pulled + PULL * Kp + j, _over_sum(h, columns, j, Kp, here, PULL), mask=j < Kp)
    if DUPLICATES == POSITIVE:
        _copy(columns, pulled, RIGHT_TOP, j, Kp)
        tl.store(pulled + RIGHT_PULL * Kp + j, _over_sum(h, columns, j, Kp, here, RIGHT_PULL), mask=j < Kp)
    # A share of 0 is no entry: sorted behind all classes.
    second = tl.load(pairs + Kp + j, mask=j < K, other=0)
    v = tl.load(columns + V * Kp + j, mask=j < K, other=0.0)
    tl.store(classes + j, tl.load(pairs + j, mask=j < K, other=0), mask=j < K)
    tl.store(classes + K + j, tl.where(v != 0, second, C), mask=j < K)


@triton.jit
def _first_entry(classes, c, E, STEPS: tl.constexpr):
    """Where the entries of class c begin among all, by halving."""
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
def cut_classes(
    classes, starts, chunks, E, C, n_chunks, longest, STEPS: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    """Cut the entries of each class into chunks of one length at most: class, first entry, number of entries.

    Class c has places c + start // longest and on: never fewer than its chunks, so that no class need know of
    those before it. Places without a chunk have size 0.
    """
    c = tl.program_id(0) * B + tl.arange(0, B)
    here = c < C
    start = _first_entry(classes, tl.minimum(c, C), E, STEPS)
    end = _first_entry(classes, tl.minimum(c + 1, C), E, STEPS)
    tl.store(starts + c, start, mask=c <= C)
    place = c + start // longest
    after = tl.where(c + 1 < C, c + 1 + end // longest, n_chunks)
    for n in range(0, tl.max(tl.where(here, after - place, 0), 0)):
        at = place + n
        begin = tl.minimum(start + n * longest, end)
        writes = here & (at < after)
        tl.store(chunks + at, c, mask=writes)
        tl.store(chunks + n_chunks + at, begin, mask=writes)
        tl.store(chunks + 2 * n_chunks + at, tl.minimum(end - begin, longest), mask=writes)


@triton.jit
def pack_entries(pairs, columns, order, entries, shares, K, Kp, E, B: tl.constexpr):
    """Entry e, sorted by class: its classifier and other class; own and other share, own share x pulls."""
    e = tl.program_id(0) * B + tl.arange(0, B)
    here = e < E
    n = tl.load(order + e, mask=here, other=0)
    j = tl.where(n < K, n, n - K).to(tl.int32)
    u = tl.load(columns + U * Kp + j)
    v = tl.load(columns + V * Kp + j)
    share = tl.where(n < K, u, v)
    tl.store(entries + e, j, mask=here)
    tl.store(entries + E + e, tl.load(pairs + tl.where(n < K, Kp, 0) + j), mask=here)
    tl.store(shares + e, share, mask=here)
    tl.store(shares + E + e, tl.where(n < K, v, u), mask=here)
    tl.store(shares + 2 * E + e, share * tl.load(columns + BETA * Kp + j), mask=here)
    tl.store(shares + 3 * E + e, share * tl.load(columns + PULL * Kp + j), mask=here)


@triton.jit
def _entry(entries, shares, begin, size, n, E, BETAS: tl.constexpr):
    """Other class, own and other share of the n-th entries of chunks; what they pull on rows and on columns.

    Beyond a chunk stands some other entry: its z is in range, and it pulls nothing.
    """
    e = tl.minimum(begin[:, None] + n[None, :], E - 1)
    there = n[None, :] < size[:, None]
    share = tl.load(shares + e)
    to_row = tl.where(there, tl.load(shares + 2 * E + e) if BETAS else share, 0.0)
    to_column = tl.where(there, tl.load(shares + 3 * E + e), 0.0)
    return tl.load(entries + E + e), share, tl.load(shares + E + e), to_row, to_column


@triton.jit
def sparse_gradient(
    slab, columns, rows, row_keys, column_keys, entries, shares, chunks, order, plan, out, R, Rp, Kp, E,
    n_chunks, MODE: tl.constexpr, BETAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DUPLICATES: tl.constexpr, WIDE: tl.constexpr, NC: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """dS^T of BM images, NC chunks at a time: a chunk is some entries of one class, summed by one program.

    The class's own scores are read once, those of the other class gathered; every sum is written once.
    """
    if tl.load(plan) != MODE:
        return
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    top = tl.load(rows + TOP * Rp + i)[None, None, :]
    weight = tl.load(rows + WEIGHT * Rp + i)[None, None, :]
    pull = tl.load(rows + PULL * Rp + i)[None, None, :]
    if DUPLICATES != NEGATIVE:
        keys = tl.load(row_keys + i, mask=i < R, other=0)[None, None, :]
        own = tl.load(rows + OWN * Rp + i)[None, None, :]
        right_pull = tl.load(rows + RIGHT_PULL * Rp + i)[None, None, :]
    for first in range(tl.program_id(1) * NC, n_chunks, tl.num_programs(1) * NC):
        at = first + tl.arange(0, NC)
        chunk = tl.load(order + at, mask=at < n_chunks, other=0)
        c = tl.load(chunks + chunk)
        begin = tl.load(chunks + n_chunks + chunk)
        size = tl.where(at < n_chunks, tl.load(chunks + 2 * n_chunks + chunk), 0)
        at_c = tl.load(slab + c[:, None, None].to(tl.int64) * Rp + i[None, None, :])
        total = tl.zeros([NC, BN, BM], tl.float32)
        n = tl.arange(0, BN)
        other, share, other_share, to_row, to_column = _entry(entries, shares, begin, size, n, E, BETAS)
        for n0 in range(0, tl.max(size, 0), BN):
            row = other.to(tl.int64) if WIDE else other
            at_other = tl.load(slab + row[:, :, None] * Rp + i[None, None, :])
            z = share[:, :, None] * at_c + other_share[:, :, None] * at_other
            if DUPLICATES != NEGATIVE or MODE == SAFE:
                j = tl.load(entries + tl.minimum(begin[:, None] + (n0 + n)[None, :], E - 1))
            if MODE == FAST:
                if ROWS and COLUMNS:
                    pulled = pull * to_row[:, :, None] + weight * to_column[:, :, None]
                elif ROWS:
                    pulled = pull * to_row[:, :, None]
                else:
                    pulled = weight * to_column[:, :, None]
                power = tl.exp2(z)
                gradient = power * pulled
            else:
                bias = tl.load(columns + BIAS * Kp + j)[:, :, None]
                below = z - tl.load(columns + TOP * Kp + j)[:, :, None]
                gradient = pull * share[:, :, None] * exp(z + bias - top)
                gradient += to_column[:, :, None] * exp(below)
                gradient = tl.where(((n0 + n)[None, :] < size[:, None])[:, :, None], gradient, 0.0)
            if DUPLICATES != NEGATIVE:
                same = tl.load(column_keys + j)[:, :, None] == keys
                if DUPLICATES == IGNORE:
                    gradient = tl.where(same, 0.0, gradient)
                else:
                    if MODE == FAST:
                        right = right_pull * tl.load(columns + BETA * Kp + j)[:, :, None] * power
                        below = power * weight
                    else:
                        right = right_pull * exp(z + bias - own)
                        below = exp(z - tl.load(columns + RIGHT_TOP * Kp + j)[:, :, None])
                    right += tl.load(columns + RIGHT_PULL * Kp + j)[:, :, None] * below
                    same = same & ((n0 + n)[None, :] < size[:, None])[:, :, None]
                    gradient -= tl.where(same, share[:, :, None] * right, 0.0)
            total += gradient
            # The next entries are asked for before they are needed.
            other, share, other_share, to_row, to_column = _entry(
                entries, shares, begin, size, n0 + BN + n, E, BETAS
            )
        place = out + chunk[:, None].to(tl.int64) * Rp + i[None, :]
        tl.store(place, tl.sum(total, 1), mask=(size > 0)[:, None] & (i < Rp)[None, :])


@triton.jit
def dense_gradient(
    slab, targets, columns, rows, row_keys, column_keys, plan, out, R, K, C, Rp, Kp, DUPLICATES: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dS^T of BM images, line c of out for class c: the weights of a tile, times its targets."""
    if tl.load(plan) != DENSE:
        return
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    top = tl.load(rows + TOP * Rp + i)[None, :]
    pull = tl.load(rows + PULL * Rp + i)[None, :]
    for j0 in range(0, K, BN):
        j = j0 + tl.arange(0, BN)
        z = dense_scores(slab, targets, i, j, K, C, Rp, BN, BM, BC)
        biased = z + tl.load(columns + BIAS * Kp + j)[:, None]
        gradient = pull * exp(biased - top)
        below = z - tl.load(columns + TOP * Kp + j)[:, None]
        gradient += tl.load(columns + PULL * Kp + j)[:, None] * exp(below)
        if DUPLICATES != NEGATIVE:
            keys = tl.load(row_keys + i, mask=i < R, other=0)[None, :]
            same = tl.load(column_keys + j, mask=j < K, other=0)[:, None] == keys
            if DUPLICATES == IGNORE:
                gradient = tl.where(same, 0.0, gradient)
            else:
                right = tl.load(rows + RIGHT_PULL * Rp + i)[None, :]
                right = right * exp(biased - tl.load(rows + OWN * Rp + i)[None, :])
                below = z - tl.load(columns + RIGHT_TOP * Kp + j)[:, None]
                right += tl.load(columns + RIGHT_PULL * Kp + j)[:, None] * exp(below)
                gradient -= tl.where(same, right, 0.0)
        gradient = tl.where((j < K)[:, None] & (i < R)[None, :], gradient, 0.0)
        for c0 in range(0, C, BC):
            c = c0 + tl.arange(0, BC)
            here = (c < C)[:, None] & (j < K)[None, :]
            y = tl.load(targets + j[None, :].to(tl.int64) * C + c[:, None], mask=here, other=0.0)
            place = out + c[:, None].to(tl.int64) * Rp + i[None, :]
            before = tl.load(place, mask=(c < C)[:, None] & (j0 > 0), other=0.0)
            after = tl.dot(y.to(tl.float32), gradient, before, input_precision="ieee")
            tl.store(place, after, mask=(c < C)[:, None])
        tl.debug_barrier()


@triton.jit
def finish_gradient(
    out, targets, starts, rows, by_row, plan, grad, R, K, C, Rp, offset, longest, parts,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Sum the chunks of each class, add what the own entry and the floor pull, and turn S^T back into S.

    The floor of smoothed targets adds floor x sum_j dloss/dz_ij to every class of an image. On the rows that
    sum is 0; on the columns it is by_row, a sweep with pulls for weights. What the own entry pulls comes with
    its whole target, floor included, so LEVEL takes it off.
    """
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    mode = tl.load(plan)
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
    value = tl.trans(total) + tl.load(rows + OWN_PULL * Rp + r, mask=own, other=0.0)[:, None] * y
    if tl.load(plan + 4) == FAST:
        sums = over_lines(by_row, 0, parts, Rp, r, r < R, False, 4, BR).to(tl.float32)
        sums = tl.load(rows + WEIGHT * Rp + r) * sums + tl.load(rows + LEVEL * Rp + r)
        value += (tl.load(plan + 2) * sums)[:, None]
    there = (r < R)[:, None] & (c < C)[None, :]
    tl.store(grad + r[:, None].to(tl.int64) * C + c[None, :], value, mask=there)
