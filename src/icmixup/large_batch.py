"""Batches larger than memory: the loss needs only the scores, so the model can run twice, part by part.

B inputs in a batch    P in a part, at most    C classes
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from icmixup._checks import check_whole
from icmixup.inputs import Inputs, call_model, map_tensors, named_tensors

RandomState = tuple[Tensor, list[Tensor]]


def cached_backward(
    model: nn.Module,
    inputs: Inputs,
    loss: Callable[[Tensor], Tensor],
    part_size: int,
    *,
    scaler: torch.amp.GradScaler | None = None,
) -> Tensor:
    """loss(model(inputs)).backward() in the memory of one part, for a loss over the whole batch.

    A first pass computes all scores without a graph; the loss and its gradient on them are small; a second
    pass runs each part again, with a graph, and feeds it its slice of that gradient. The price is one more
    forward pass. Gradients are added into .grad, as backward does.

    >>> criterion = icm.InfiniteClassLoss()
    >>> loss = icm.cached_backward(model, inputs, lambda scores: criterion(scores, targets), part_size=256)
    >>> optimizer.step()

    The number of parts changes nothing but rounding, with two exceptions, both while training: BatchNorm
    normalises by the mean and variance of a part, as it would in batches of that size, and spectral_norm
    makes one power iteration in each part. Running statistics and other buffers are restored after the first
    pass, so each part updates them once. Dropout draws the same in both passes, as long as it draws from
    torch's own generators of the CPU and of NVIDIA GPUs.

    Under DistributedDataParallel ranks may have different B and different numbers of parts; gradients are
    averaged once, in the last part. Under fully_shard, and with SyncBatchNorm, all ranks need the same number
    of parts, because every forward pass communicates. Call it within autocast, as you would call the model.

    Args:
        model: from inputs to (B, C) scores or an output with `logits`, each row from its own input (except
            for BatchNorm).
        inputs: (B, ...); or a tuple, passed as model(*inputs), or a dict, passed as model(**inputs). Every
            tensor in them is split; other entries are passed to each part.
        loss: from (B, C) scores to a scalar. Its own parameters, for example a learnt temperature, get their
            gradient too.
        part_size: P, the largest number of inputs at once; if it exceeds B there is one part.
        scaler: a GradScaler, which scales the gradients, not the loss that is returned. Then unscale and step
            as usual: scaler.step(optimizer); scaler.update().

    Returns:
        Scalar, the unscaled loss, without a graph.
    """
    parts = split_rows(inputs, part_size)
    devices = random_devices(model, parts[0])
    # DDP's wrapper would communicate with the other ranks, which may have another number of parts.
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    states, scores = [], []
    with torch.no_grad(), keep_buffers(model):
        for part in parts:
            states.append(random_state(devices))
            # A copy, since a model may change its inputs in place, and they are needed again.
            scores.append(call_model(plain, map_tensors(torch.clone, part)))
    forget_cached_weights()
    all_scores = torch.cat(scores).requires_grad_()
    value = loss(all_scores)
    (value if scaler is None else scaler.scale(value)).backward()  # type: ignore[no-untyped-call]
    assert all_scores.grad is not None
    slices = all_scores.grad.tensor_split(len(parts))
    with torch.random.fork_rng([device.index for device in devices]):
        for number, (part, state, gradient) in enumerate(zip(parts, states, slices, strict=True)):
            set_random_state(state, devices)
            forget_cached_weights()  # whose graph the last backward pass freed
            with nullcontext() if number == len(parts) - 1 else unsynchronised(model):
                call_model(model, part).backward(gradient)  # type: ignore[no-untyped-call]
    return value.detach()


def split_rows(inputs: Inputs, part_size: int) -> list[Inputs]:
    """(B, ...) tensors to as few parts as P allows, whose sizes differ by at most one row.

    BatchNorm could not normalise a last part of a single row.
    """
    check_whole("part_size", part_size, 1)
    lengths = [len(rows) for _, rows in named_tensors(inputs)]
    if not lengths or min(lengths) < 1 or len(set(lengths)) > 1:
        raise ValueError(
            f"inputs have {lengths} rows; expected at least one row, and the same number in every tensor"
        )
    number = math.ceil(lengths[0] / part_size)
    return [
        map_tensors(lambda rows, part=part: rows.tensor_split(number)[part], inputs)  # type: ignore[misc]
        for part in range(number)
    ]


@contextmanager
def keep_buffers(model: nn.Module) -> Iterator[None]:
    """Restore running statistics and other buffers at the end, whether they are changed in place or replaced
    by new tensors."""
    buffers = [(module, *entry) for module in model.modules() for entry in module._buffers.items()]
    before = [None if buffer is None else buffer.clone() for _, _, buffer in buffers]
    try:
        yield
    finally:
        for (module, name, buffer), value in zip(buffers, before, strict=True):
            module._buffers[name] = buffer
            if buffer is not None and value is not None:
                buffer.copy_(value)


def forget_cached_weights() -> None:
    """Drop the weights that autocast has cast and that parametrize.cached() keeps.

    Those of a pass without a graph would be used again in a pass with one, and get no gradient. (In autocast
    only before pytorch #165068.)
    """
    torch.clear_autocast_cache()
    parametrize._cache.clear()


def unsynchronised(model: nn.Module) -> AbstractContextManager[None]:
    """Within this context DDP accumulates gradients, and a later backward pass averages them."""
    inner = getattr(model, "_orig_mod", model)  # of torch.compile(DistributedDataParallel(...))
    return inner.no_sync() if isinstance(inner, DistributedDataParallel) else nullcontext()


def random_devices(model: nn.Module, inputs: Inputs) -> list[torch.device]:
    """The GPUs whose generators the model may draw from."""
    tensors = (*model.parameters(), *(tensor for _, tensor in named_tensors(inputs)))
    return sorted({tensor.device for tensor in tensors if tensor.is_cuda}, key=str)


def random_state(devices: list[torch.device]) -> RandomState:
    return torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in devices]


def set_random_state(state: RandomState, devices: list[torch.device]) -> None:
    torch.set_rng_state(state[0])
    for device, of_device in zip(devices, state[1], strict=True):
        torch.cuda.set_rng_state(of_device, device)
