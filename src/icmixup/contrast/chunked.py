"""The chunked form in plain torch, a few rows of S~ at a time: memory linear in R + K, any device and dtype.

R images, K classifiers, C classes    scores S (R, C)    targets Y~ (K, C)    mixed scores z = S Y~^T (R, K)
D: the entries that a softmax sums over; P: its positives (the own entry, or all that are equal to it).

    loss = log sum_D e^(z - top_D) - log sum_P e^(z - top_P) + (top_D - top_P)

The tops are subtracted from each other, not from the logarithms, so that large scores lose no digits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from icmixup._first_order import first_order_only
from icmixup.contrast.request import Losses, Request

CHUNK_ELEMENTS = 2**23  # of S~ held at a time; 32 MB in float32
TENSORS = ("scores", "targets", "bias", "row_keys", "column_keys")  # fields of a Request that are tensors


def contrast_chunked(request: Request, chunk: int | None = None) -> Losses:
    """What contrast_plain returns, without ever storing S~; the backward pass computes it again.

    Gradients flow to the scores only. float64 stays float64; all other dtypes are computed in float32.

    Args:
        request: what to compute; its reduction is ignored.
        chunk: rows of S~ at a time; by default as many as CHUNK_ELEMENTS entries hold.

    Returns:
        (R,) and (num_matched,) losses; None for what was not requested.
    """
    chunk = chunk or max(1, CHUNK_ELEMENTS // max(1, len(request.targets)))
    row_losses, column_losses = _Chunked.apply(chunk, *request)  # type: ignore[no-untyped-call]
    return row_losses if request.rows else None, column_losses if request.columns else None


class Sums(NamedTuple):
    """Running log-sum-exp of each row or column: the largest entry, and sum e^(z - top)."""

    top: Tensor
    total: Tensor


class Chunk(NamedTuple):
    """Some rows of S~: the index of the first one, the mixed scores, and which entries are in P and in D."""

    start: int
    mixed: Tensor  # (rows, K)
    positive: Tensor  # (rows, K) bool: P
    left_out: Tensor | None  # (rows, K) bool: not in D


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chunk_size: int, *fields: Any) -> tuple[Tensor, Tensor]:
        request = Request(*fields)
        row_sums = []
        by_column = _no_sums(request.num_matched(), request.scores)
        for chunk in _chunks(request, chunk_size):
            if request.rows:
                empty = _no_sums(len(chunk.mixed), request.scores)
                row_sums.append(_add_chunk(_biased(chunk, request.bias), empty, dim=1))
            if request.columns:
                by_column = _add_chunk(_matched(chunk, request.num_matched()), by_column, dim=0)
        by_row = _join(row_sums, request.scores)
        tensors = (getattr(request, name) for name in TENSORS)
        ctx.save_for_backward(*tensors, *by_row[0], *by_row[1], *by_column[0], *by_column[1])
        ctx.chunk_size, ctx.options = chunk_size, request._replace(**_no_tensors())
        return _losses(*by_row), _losses(*by_column)

    @staticmethod
    def backward(ctx: Any, row_grad: Tensor, column_grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            grad = _Chunked.gradient(ctx, row_grad, column_grad)
        return None, first_order_only(grad, "the chunked form"), *(None,) * (len(Request._fields) - 1)

    @staticmethod
    def gradient(ctx: Any, row_grad: Tensor, column_grad: Tensor) -> Tensor:
        """(R, C) gradient of the scores."""
        tensors, sums = ctx.saved_tensors[: len(TENSORS)], ctx.saved_tensors[len(TENSORS) :]
        by_row, by_column = (Sums(*sums[:2]), Sums(*sums[2:4])), (Sums(*sums[4:6]), Sums(*sums[6:]))
        request: Request = ctx.options._replace(**dict(zip(TENSORS, tensors, strict=True)))
        scores, num_matched = request.scores, request.num_matched()
        grad = torch.zeros_like(scores, dtype=_inner(scores))
        for chunk in _chunks(request, ctx.chunk_size):
            here = slice(chunk.start, chunk.start + len(chunk.mixed))
            mixed_grad = torch.zeros_like(chunk.mixed)
            if request.rows:
                own_sums = [Sums(s.top[here, None], s.total[here, None]) for s in by_row]
                mixed_grad += row_grad[here, None] * _slope(_biased(chunk, request.bias), *own_sums)
            if request.columns:
                mixed_grad[:, :num_matched] += column_grad * _slope(_matched(chunk, num_matched), *by_column)
            grad[here] = _product(mixed_grad, request.targets)
        return grad.to(scores.dtype)


def _no_tensors() -> dict[str, Any]:
    return dict.fromkeys(TENSORS)


def _inner(scores: Tensor) -> torch.dtype:
    return torch.float64 if scores.dtype == torch.float64 else torch.float32


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right in the inner dtype; in the bfloat16 of autocast near-equal classifiers would tie."""
    with torch.autocast(left.device.type, enabled=False):
        return left @ right.to(left.dtype)


def _chunks(request: Request, chunk_size: int) -> Iterator[Chunk]:
    scores, (row_keys, column_keys) = request.scores, request.keys()
    for start in range(0, len(scores), chunk_size):
        mixed = _product(scores[start : start + chunk_size].to(_inner(scores)), request.targets.T)
        own = torch.zeros_like(mixed, dtype=torch.bool)
        own.diagonal(request.offset + start).fill_(True)
        if row_keys is None or column_keys is None:
            yield Chunk(start, mixed, own, None)
            continue
        same = row_keys[start : start + chunk_size, None] == column_keys
        if request.duplicates == "positive":
            yield Chunk(start, mixed, own | same, None)
        else:
            yield Chunk(start, mixed, own, same & ~own)


def _biased(chunk: Chunk, bias: Tensor | None) -> Chunk:
    return chunk if bias is None else chunk._replace(mixed=chunk.mixed + bias.to(chunk.mixed.dtype))


def _matched(chunk: Chunk, number: int) -> Chunk:
    """The columns that have an image."""
    left_out = None if chunk.left_out is None else chunk.left_out[:, :number]
    return Chunk(chunk.start, chunk.mixed[:, :number], chunk.positive[:, :number], left_out)


def _no_sums(length: int, scores: Tensor) -> tuple[Sums, Sums]:
    # The lowest finite number, not -inf: -inf - -inf would be nan where a chunk has no entry in D or P.
    dtype = _inner(scores)
    top = torch.full((length,), torch.finfo(dtype).min, dtype=dtype, device=scores.device)
    return Sums(top, torch.zeros_like(top)), Sums(top, torch.zeros_like(top))


def _add_chunk(chunk: Chunk, sums: tuple[Sums, Sums], dim: int) -> tuple[Sums, Sums]:
    """Add a chunk of S~ to the running sums over D and over P."""
    of_all, of_positives = sums
    return _add(chunk.mixed, chunk.left_out, of_all, dim), _add(
        chunk.mixed, ~chunk.positive, of_positives, dim
    )


def _add(mixed: Tensor, left_out: Tensor | None, sums: Sums, dim: int) -> Sums:
    if left_out is not None:
        mixed = mixed.masked_fill(left_out, torch.finfo(mixed.dtype).min)
    top = torch.maximum(sums.top, mixed.amax(dim))
    total = sums.total * (sums.top - top).exp() + (mixed - top.unsqueeze(dim)).exp().sum(dim)
    return Sums(top, total)


def _join(parts: list[tuple[Sums, Sums]], scores: Tensor) -> tuple[Sums, Sums]:
    of_all, of_positives = zip(_no_sums(0, scores), *parts, strict=True)
    return _concatenate(of_all), _concatenate(of_positives)


def _concatenate(parts: tuple[Sums, ...]) -> Sums:
    return Sums(torch.cat([part.top for part in parts]), torch.cat([part.total for part in parts]))


def _losses(of_all: Sums, of_positives: Sums) -> Tensor:
    return of_all.total.log() - of_positives.total.log() + (of_all.top - of_positives.top)


def _slope(chunk: Chunk, of_all: Sums, of_positives: Sums) -> Tensor:
    """dloss/dz: the softmax over D less the softmax over P."""
    slope = (chunk.mixed - of_all.top).exp() / of_all.total
    if chunk.left_out is not None:
        slope = slope.masked_fill(chunk.left_out, 0.0)
    positive = (chunk.mixed - of_positives.top).exp() / of_positives.total
    return slope - positive.masked_fill(~chunk.positive, 0.0)
