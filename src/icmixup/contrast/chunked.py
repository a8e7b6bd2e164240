"""contrast in plain torch, a few rows of S~ at a time: memory linear in R + K, on any device, in any dtype.

R images, K classifiers, C classes    scores S (R, C)    targets Y~ (K, C)    mixed scores z = S Y~^T (R, K)
D: what a softmax sums over; P: what counts as right in it (the own entry, or all that equal it).

    loss = log sum_D e^(z - top_D) - log sum_P e^(z - top_P) + (top_D - top_P)

The tops are subtracted from each other, not from the logarithms, so that large scores lose no digits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from icmixup.contrast.plain import Duplicates

CHUNK_ELEMENTS = 2**23  # of S~ held at a time; 32 MB in float32


def contrast_chunked(
    scores: Tensor,
    targets: Tensor,
    *,
    offset: int = 0,
    rows: bool = True,
    columns: bool = True,
    num_columns: int | None = None,
    bias: Tensor | None = None,
    row_keys: Tensor | None = None,
    column_keys: Tensor | None = None,
    duplicates: Duplicates = "negative",
    chunk: int | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """What contrast.contrast returns, without ever storing S~; the backward pass computes it again.

    Gradients flow to scores alone. float64 stays float64, all else is float32 inside.

    Args:
        scores, targets, offset, rows, columns, num_columns, bias, row_keys, column_keys, duplicates:
            as contrast.contrast takes them.
        chunk: rows of S~ at a time; the default holds CHUNK_ELEMENTS of it.

    Returns:
        (R,) and (num_columns,) losses, or None in place of what was not asked for.
    """
    number = len(targets) if num_columns is None else num_columns
    chunk = chunk or max(1, CHUNK_ELEMENTS // max(1, len(targets)))
    keys = (None, None) if duplicates == "negative" else (row_keys, column_keys)
    shape = Shape(offset, rows, columns, number, duplicates, chunk)
    row_losses, column_losses = _Chunked.apply(scores, targets, bias, *keys, shape)  # type: ignore[no-untyped-call]
    return row_losses if rows else None, column_losses if columns else None


class Shape(NamedTuple):
    """What is asked for, apart from tensors."""

    offset: int
    rows: bool
    columns: bool
    num_columns: int
    duplicates: Duplicates
    chunk: int


class Sums(NamedTuple):
    """Running log-sum-exp of each row or column: the largest entry, and sum e^(z - top)."""

    top: Tensor
    total: Tensor


class Part(NamedTuple):
    """Some rows of S~: where they start, the mixed scores, and what is right and what is left out in them."""

    start: int
    mixed: Tensor  # (rows, K)
    right: Tensor  # (rows, K) bool: P
    left_out: Tensor | None  # (rows, K) bool: not in D


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        row_keys: Tensor | None,
        column_keys: Tensor | None,
        shape: Shape,
    ) -> tuple[Tensor, Tensor]:
        inputs = (scores, targets, bias, row_keys, column_keys)
        row_parts = []
        by_column = _no_sums(shape.num_columns, scores)
        for part in _parts(*inputs, shape):
            if shape.rows:
                row_parts.append(_fold(_biased(part, bias), _no_sums(len(part.mixed), scores), dim=1))
            if shape.columns:
                by_column = _fold(_leading(part, shape.num_columns), by_column, dim=0)
        by_row = _join(row_parts, scores)
        ctx.save_for_backward(*inputs, *by_row[0], *by_row[1], *by_column[0], *by_column[1])
        ctx.shape = shape
        return _losses(*by_row), _losses(*by_column)

    @staticmethod
    def backward(ctx: Any, row_grad: Tensor, column_grad: Tensor) -> tuple[Tensor | None, ...]:
        scores, targets, bias, row_keys, column_keys, a, b, c, d, e, f, g, h = ctx.saved_tensors
        by_row, by_column, shape = (Sums(a, b), Sums(c, d)), (Sums(e, f), Sums(g, h)), ctx.shape
        grad = torch.zeros_like(scores, dtype=_inner(scores))
        for part in _parts(scores, targets, bias, row_keys, column_keys, shape):
            here = slice(part.start, part.start + len(part.mixed))
            pull = torch.zeros_like(part.mixed)
            if shape.rows:
                sums = [Sums(s.top[here, None], s.total[here, None]) for s in by_row]
                pull += row_grad[here, None] * _slope(_biased(part, bias), sums)
            if shape.columns:
                sums = [Sums(s.top, s.total) for s in by_column]
                pull[:, : shape.num_columns] += column_grad * _slope(_leading(part, shape.num_columns), sums)
            grad[here] = _product(pull, targets)
        return grad.to(scores.dtype), None, None, None, None, None


def _inner(scores: Tensor) -> torch.dtype:
    return torch.float64 if scores.dtype == torch.float64 else torch.float32


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right in the inner dtype; autocast would take bfloat16, where near-equal classifiers tie."""
    with torch.autocast(left.device.type, enabled=False):
        return left @ right.to(left.dtype)


def _parts(
    scores: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    row_keys: Tensor | None,
    column_keys: Tensor | None,
    shape: Shape,
) -> Iterator[Part]:
    for start in range(0, len(scores), shape.chunk):
        mixed = _product(scores[start : start + shape.chunk].to(_inner(scores)), targets.T)
        own = torch.zeros_like(mixed, dtype=torch.bool)
        own.diagonal(shape.offset + start).fill_(True)
        if row_keys is None or column_keys is None:
            yield Part(start, mixed, own, None)
            continue
        same = row_keys[start : start + shape.chunk, None] == column_keys
        positive = shape.duplicates == "positive"
        yield Part(start, mixed, own | same if positive else own, None if positive else same & ~own)


def _biased(part: Part, bias: Tensor | None) -> Part:
    return part if bias is None else part._replace(mixed=part.mixed + bias.to(part.mixed.dtype))


def _leading(part: Part, number: int) -> Part:
    """The columns that have an image."""
    left_out = None if part.left_out is None else part.left_out[:, :number]
    return Part(part.start, part.mixed[:, :number], part.right[:, :number], left_out)


def _no_sums(length: int, scores: Tensor) -> tuple[Sums, Sums]:
    # The lowest finite number, not -inf: -inf - -inf would be nan where a chunk holds nothing of D or P.
    dtype = _inner(scores)
    top = torch.full((length,), torch.finfo(dtype).min, dtype=dtype, device=scores.device)
    return Sums(top, torch.zeros_like(top)), Sums(top, torch.zeros_like(top))


def _fold(part: Part, sums: tuple[Sums, Sums], dim: int) -> tuple[Sums, Sums]:
    """Add a part of S~ to the running sums over D and over P."""
    return _add(part.mixed, part.left_out, sums[0], dim), _add(part.mixed, ~part.right, sums[1], dim)


def _add(mixed: Tensor, left_out: Tensor | None, sums: Sums, dim: int) -> Sums:
    if left_out is not None:
        mixed = mixed.masked_fill(left_out, torch.finfo(mixed.dtype).min)
    top = torch.maximum(sums.top, mixed.amax(dim))
    total = sums.total * (sums.top - top).exp() + (mixed - top.unsqueeze(dim)).exp().sum(dim)
    return Sums(top, total)


def _join(parts: list[tuple[Sums, Sums]], scores: Tensor) -> tuple[Sums, Sums]:
    of_all, of_right = zip(_no_sums(0, scores), *parts, strict=True)
    return _concatenate(of_all), _concatenate(of_right)


def _concatenate(parts: tuple[Sums, ...]) -> Sums:
    return Sums(torch.cat([part.top for part in parts]), torch.cat([part.total for part in parts]))


def _losses(of_all: Sums, of_right: Sums) -> Tensor:
    return of_all.total.log() - of_right.total.log() + (of_all.top - of_right.top)


def _slope(part: Part, sums: list[Sums]) -> Tensor:
    """dloss/dz: the softmax over D less the softmax over P."""
    of_all, of_right = sums
    slope = (part.mixed - of_all.top).exp() / of_all.total
    if part.left_out is not None:
        slope = slope.masked_fill(part.left_out, 0.0)
    right = (part.mixed - of_right.top).exp() / of_right.total
    return slope - right.masked_fill(~part.right, 0.0)
