"""The Triton kernels of fused.py's backward pass; names and letters as in kernels.py.

E entries: the non-zeros of Y~, sorted by class; a chunk is some entries of one class.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from icmixup.kernels import (
    BETA,
    BIAS,
    DENSE,
    FAST,
    IGNORE,
    NEGATIVE,
    OWN,
    PULL,
    RIGHT_PULL,
    RIGHT_TOP,
    SAFE,
    TOP,
    WEIGHT,
    U,
    V,
    dense_scores,
    exp,
)


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
    slab, columns, rows, row_keys, column_keys, entries, shares, chunks, plan, out, R, Rp, Kp, E, n_chunks,
    MODE: tl.constexpr, BETAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
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
        size = tl.load(chunks + 3 * n_chunks + at, mask=at < n_chunks, other=0)
        begin = tl.load(chunks + 2 * n_chunks + at, mask=at < n_chunks, other=0)
        c = tl.load(chunks + n_chunks + at, mask=at < n_chunks, other=0)
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
        chunk = tl.load(chunks + at, mask=at < n_chunks, other=0).to(tl.int64)
        place = out + chunk[:, None] * Rp + i[None, :]
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
    out, targets, first_chunk, own_pull, level, plan, grad, R, K, C, Rp, offset, BR: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Sum the chunks of each class, add what the own entry and the floor pull, and turn S^T back into S."""
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    mode = tl.load(plan)
    begin = tl.load(first_chunk + c, mask=c < C, other=0)
    count = tl.load(first_chunk + c + 1, mask=c < C, other=0) - begin
    begin = tl.where(mode == DENSE, c, begin)
    count = tl.where(c < C, tl.where(mode == DENSE, 1, count), 0)
    total = tl.zeros([BC, BR], tl.float32)
    for n in range(0, tl.max(count, 0)):
        line = out + (begin + n).to(tl.int64)[:, None] * Rp + r[None, :]
        total += tl.load(line, mask=(n < count)[:, None], other=0.0)
    own = (r < R) & (r + offset >= 0) & (r + offset < K)
    here = own[:, None] & (c < C)[None, :]
    line = targets + (r + offset).to(tl.int64)[:, None] * C + c[None, :]
    y = tl.load(line, mask=here, other=0.0).to(tl.float32)
    value = tl.trans(total) + tl.load(own_pull + r, mask=own, other=0.0)[:, None] * y
    value += tl.load(level + r, mask=r < R, other=0.0)[:, None]
    there = (r < R)[:, None] & (c < C)[None, :]
    tl.store(grad + r[:, None].to(tl.int64) * C + c[None, :], value, mask=there)
