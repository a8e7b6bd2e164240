"""The rows of every rank, with the gradient of a single process. In a single process: its own rows.

B pairs on this rank    N pairs on all ranks    C classes
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from icmixup._first_order import first_order_only


class Ranks(NamedTuple):
    """How many pairs each rank holds, and which rank this is."""

    sizes: tuple[int, ...]
    rank: int

    def total(self) -> int:
        """N, the pairs of all ranks."""
        return sum(self.sizes)

    def start(self) -> int:
        """Where this rank's pairs begin among all."""
        return sum(self.sizes[: self.rank])

    def alone(self) -> bool:
        return len(self.sizes) == 1


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def mean_over_ranks(value: Tensor) -> Tensor:
    """The mean of a scalar over all ranks, without a gradient; every rank must call this."""
    value = value.detach().clone()
    if is_distributed():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value


def meet_ranks(rows: Tensor, choices: Mapping[str, object]) -> Ranks:
    """Exchange the sizes of all ranks, and check that they agree on what they are about to gather.

    Args:
        rows: (B, C) of this rank; B may differ between ranks, C may not.
        choices: dtypes and the loss's options, by name; each must be the same on every rank.
    """
    if not is_distributed():
        return Ranks((len(rows),), 0)
    options = {name: str(value) for name, value in {"classes": rows.shape[1], **choices}.items()}
    mine = torch.tensor([len(rows), zlib.crc32(repr(options).encode())], device=rows.device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    met = torch.stack(everyone).tolist()
    # Every rank sees the same checksums, so all of them raise, and none is left waiting.
    if len({code for _, code in met}) > 1:
        raise ValueError(describe_disagreement(options))
    return Ranks(tuple(size for size, _ in met), dist.get_rank())


def describe_disagreement(options: dict[str, str]) -> str:
    """The options that differ, with the value of each rank; all ranks must call this."""
    everyone: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, options)
    values = {name: [other[name] for other in everyone] for name in options}
    different = [
        f"{name}: {', '.join(each)} in rank order" for name, each in values.items() if len(set(each)) > 1
    ]
    return (
        f"the ranks disagree on {' and on '.join(different)}; "
        "use the same model, dtype and loss on every rank, or pass gather=False"
    )


def gather_rows(local: Tensor, ranks: Ranks) -> Tensor:
    """(B, C) on each rank to (N, C) on all, in rank order.

    The backward pass sums, for each rank's rows, the gradient that every rank has for them.
    """
    if ranks.alone():
        return local
    gathered: Tensor = _GatherRows.apply(local, ranks)  # type: ignore[no-untyped-call]
    return gathered


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, local: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks  # type: ignore[attr-defined]
        # Collectives need equal shapes, so shorter ranks are padded, and cut again.
        padded = local.new_zeros(max(ranks.sizes), *local.shape[1:])
        padded[: len(local)] = local
        everyone = [torch.empty_like(padded) for _ in ranks.sizes]
        dist.all_gather(everyone, padded)
        return torch.cat([rows[:size] for rows, size in zip(everyone, ranks.sizes, strict=True)])

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        ranks: Ranks = ctx.ranks  # type: ignore[attr-defined]
        total = gradient.detach().contiguous().clone()
        dist.all_reduce(total)
        own = total[ranks.start() : ranks.start() + ranks.sizes[ranks.rank]]
        return first_order_only(own, "rows gathered from other ranks"), None
