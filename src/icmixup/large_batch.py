"""Batches larger than memory: the loss needs scores alone, so the model can run twice and in parts.

B inputs in a batch    P in a part, at most    C classes
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Rows = tuple[Tensor, ...]
RandomState = tuple[Tensor, list[Tensor]]


def cached_backward(
    model: nn.Module,
    inputs: Tensor | tuple[Tensor, ...],
    loss: Callable[[Tensor], Tensor],
    part_size: int,
) -> Tensor:
    """loss(model(inputs)).backward() in the memory of one part, for a loss over the whole batch.

    A first pass computes all scores without a graph; the loss and its gradient on them are small; a second
    pass runs each part again, with a graph, and feeds it its slice of that gradient. The price is one more
    forward pass. Gradients are added into .grad, as backward does.

    >>> criterion = icm.InfiniteClassLoss()
    >>> loss = icm.cached_backward(model, inputs, lambda scores: criterion(scores, targets), part_size=256)
    >>> optimizer.step()

    The number of parts changes nothing but rounding, with one exception: BatchNorm, while training,
    normalises by the mean and variance of a part, as it would in batches of that size. Running statistics
    and other buffers are put back after the first pass, so each part updates them once. Dropout draws the
    same in both passes, as long as it draws from torch's own generators.

    Under DistributedDataParallel ranks may have different B and different numbers of parts; gradients are
    averaged once, in the last part. Call it within autocast just as the model would be.

    Args:
        model: from inputs to (B, C) scores, each row from its own input (BatchNorm aside).
        inputs: (B, ...), or a tuple of those, handed over as model(*inputs).
        loss: from (B, C) scores to a scalar. What it contains besides, a learnt temperature say, gets its
            gradient too. A GradScaler goes inside: lambda scores: scaler.scale(criterion(scores, targets)).
        part_size: P, inputs at once, at most; if it exceeds B there is one part.

    Returns:
        Scalar, the loss, without a graph.
    """
    parts = split_rows(inputs if isinstance(inputs, tuple) else (inputs,), part_size)
    devices = random_devices(model, parts[0])
    # DDP's wrapper would talk to the other ranks, which may have another number of parts.
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    states, scores = [], []
    with torch.no_grad(), keep_buffers(model):
        for part in parts:
            states.append(random_state(devices))
            scores.append(plain(*part))
    # Older torch (before pytorch #165068) would use again the weights that autocast has cast without a graph.
    torch.clear_autocast_cache()
    all_scores = torch.cat(scores).requires_grad_()
    value = loss(all_scores)
    value.backward()  # type: ignore[no-untyped-call]
    assert all_scores.grad is not None
    slices = all_scores.grad.tensor_split(len(parts))
    with torch.random.fork_rng([device.index for device in devices]):
        for number, (part, state, gradient) in enumerate(zip(parts, states, slices, strict=True)):
            set_random_state(state, devices)
            with nullcontext() if number == len(parts) - 1 else unsynchronised(model):
                model(*part).backward(gradient)
    return value.detach()


def split_rows(inputs: Rows, part_size: int) -> list[Rows]:
    """(B, ...) tensors to as few parts as P allows, of equal sizes give or take a row.

    A short last part, of one row say, would be more than BatchNorm could bear.
    """
    lengths = [len(rows) for rows in inputs]
    if part_size < 1 or not lengths or min(lengths) < 1 or len(set(lengths)) > 1:
        raise ValueError(
            f"inputs of {lengths} rows in parts of {part_size}; "
            "wanted at least one row, as many in every input, and a part_size of at least 1"
        )
    parts = math.ceil(lengths[0] / part_size)
    return list(zip(*(rows.tensor_split(parts) for rows in inputs), strict=True))


@contextmanager
def keep_buffers(model: nn.Module) -> Iterator[None]:
    """Put running statistics and other buffers back at the end."""
    buffers = list(model.buffers())
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)


def unsynchronised(model: nn.Module) -> AbstractContextManager[None]:
    """Within this context DDP adds gradients up and leaves the averaging to a later backward pass."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def random_devices(model: nn.Module, rows: Rows) -> list[torch.device]:
    """The GPUs whose generators the model may draw from."""
    return sorted({tensor.device for tensor in (*model.parameters(), *rows) if tensor.is_cuda}, key=str)


def random_state(devices: list[torch.device]) -> RandomState:
    return torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in devices]


def set_random_state(state: RandomState, devices: list[torch.device]) -> None:
    torch.set_rng_state(state[0])
    for device, of_device in zip(devices, state[1], strict=True):
        torch.cuda.set_rng_state(of_device, device)
