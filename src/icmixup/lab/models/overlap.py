"""Convolutions of a captured step: products where they suffice, and weight gradients beside the rest.

Nothing but the optimizer waits for a weight gradient, and its kernels are limited by arithmetic, while those
of BatchNorm are limited by memory. So a captured step computes it on a stream of its own, where the GPU runs
it at the same time as the backward pass of the layers below.

A network has some fifty weights. To convert each of them to 16 bits and each gradient to 32 takes a hundred
small kernels, of which most of the time is their start, so all of them are converted at once.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.function import once_differentiable

DEPTH = 2  # weight gradients that may be under way: what they read is kept in memory until then


def convolve(
    maps: Tensor,
    weight: Tensor,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    cast: Tensor | None = None,
) -> Tensor:
    """F.conv2d(maps, weight, None, stride, padding), where backward() adds to weight.grad by itself.

    Args:
        maps: (B, C, H, W).
        weight: (D, C, K, K) leaf, converted to the dtype of maps.
        cast: the weight in that dtype, if it is known already.

    Returns:
        (B, D, H', W').
    """
    out: Tensor = Convolution.apply(maps, weight, stride, padding, cast)
    return out


Sizes = tuple[tuple[int, ...], tuple[int, ...]]  # stride, padding


class Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, maps, weight, stride, padding, cast):
        used = weight.to(maps.dtype) if cast is None else cast
        ctx.save_for_backward(maps, used)
        ctx.weight, ctx.sizes = weight, (stride, padding)
        if is_product(used, ctx.sizes):
            return to_maps(to_rows(maps) @ to_matrix(used).t(), maps.shape)
        return F.conv2d(maps, used, None, stride, padding)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        maps, used = ctx.saved_tensors
        weight, sizes = ctx.weight, ctx.sizes
        if ctx.needs_input_grad[1]:
            run_beside(weight, lambda: weight_grad(grad, maps, used, sizes), (grad, maps, used))
        maps_grad = input_grad(grad, maps, used, sizes) if ctx.needs_input_grad[0] else None
        return maps_grad, None, None, None, None


def is_product(weight: Tensor, sizes: Sizes) -> bool:
    """Whether a convolution is a product of matrices: one pixel to one pixel.

    Only in 16 bits: torch may compute convolutions in TF32 where it computes products in float32.
    """
    return weight.shape[2:] == (1, 1) and sizes == ((1, 1), (0, 0)) and weight.dtype.itemsize == 2


def to_rows(maps: Tensor) -> Tensor:
    """(B, C, H, W) as (B H W, C)."""
    return maps.permute(0, 2, 3, 1).reshape(-1, maps.shape[1])


def to_maps(rows: Tensor, shape: torch.Size) -> Tensor:
    """(B H W, C) as (B, C, H, W), channels-last; B, H and W are those of `shape`."""
    return rows.view(shape[0], *shape[2:], -1).permute(0, 3, 1, 2)


def to_matrix(weight: Tensor) -> Tensor:
    """(D, C, 1, 1) as (D, C)."""
    return weight[:, :, 0, 0]


def input_grad(grad: Tensor, maps: Tensor, weight: Tensor, sizes: Sizes) -> Tensor:
    if is_product(weight, sizes):
        return to_maps(to_rows(grad) @ to_matrix(weight), grad.shape)
    return differentiate(grad, maps, weight, sizes, (True, False, False))[0]


def weight_grad(grad: Tensor, maps: Tensor, weight: Tensor, sizes: Sizes) -> Tensor:
    if is_product(weight, sizes):
        return (to_rows(grad).t() @ to_rows(maps))[:, :, None, None]
    return differentiate(grad, maps, weight, sizes, (False, True, False))[1]


def differentiate(
    grad: Tensor, maps: Tensor, weight: Tensor, sizes: Sizes, wanted: tuple[bool, ...]
) -> Tensor:
    stride, padding = sizes
    found: Tensor = torch.ops.aten.convolution_backward(
        grad, maps, weight, None, stride, padding, (1, 1), False, (0, 0), 1, wanted
    )
    return found


def add_grads(weights: list[Tensor], found: list[Tensor]) -> None:
    """weight.grad += gradient, for each weight; a weight that is used several times occurs several times."""
    grads = [torch.empty_like(weight) for weight in weights]  # laid out as the weight, which optimizers need
    copy_all(grads, found)
    again: list[tuple[Tensor, Tensor]] = []
    for weight, grad in zip(weights, grads, strict=True):
        if weight.grad is None:
            weight.grad = grad
        else:
            again.append((weight.grad, grad))
    while again:  # each gradient once: torch adds all of them at the same time
        once = {id(old): (old, new) for old, new in again}
        again = [pair for pair in again if once[id(pair[0])][1] is not pair[1]]
        torch._foreach_add_([old for old, _ in once.values()], [new for _, new in once.values()])


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """targets[i].copy_(sources[i]), in a few kernels for all that are in channels-last format."""
    flat: list[tuple[Tensor, Tensor]] = []  # targets and sources
    for target, source in zip(targets, sources, strict=True):
        if all(part.is_contiguous(memory_format=torch.channels_last) for part in (target, source)):
            # As vectors: torch compares strides, and those of filters of one pixel can differ.
            flat.append((target.permute(0, 2, 3, 1).view(-1), source.permute(0, 2, 3, 1).view(-1)))
        else:
            target.copy_(source)
    if flat:
        torch._foreach_copy_([target for target, _ in flat], [source for _, source in flat])


def run_beside(weight: Tensor, run: Callable[[], Tensor], read: tuple[Tensor, ...]) -> None:
    """Add a weight gradient, computed on a side stream if a step is being captured.

    Then it is added at the end of the backward pass, which waits for it. Elsewhere it is computed on the
    current stream and added at once. The warm-up before a capture does that, so that cuDNN, which compares
    its algorithms then, measures each of them alone.
    """
    if not (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
        add_grads([weight], [run()])
        return
    main, side = torch.cuda.current_stream(), side_of(weight.device)
    side.stream.wait_stream(main)
    with torch.cuda.stream(side.stream):
        found = run()
    backward_pass = torch._C._current_graph_task_id()
    if side.backward_pass != backward_pass:
        side.clear()
        side.backward_pass = backward_pass
        Variable._execution_engine.queue_callback(partial(join, main, side))
    side.weights.append(weight)
    side.found.append(found)
    side.under_way.append((side.stream.record_event(), read))
    if len(side.under_way) > DEPTH:
        event, _ = side.under_way.popleft()
        main.wait_event(event)


@dataclass
class Side:
    """The side stream of a GPU, and what runs there."""

    stream: torch.cuda.Stream
    backward_pass: int = -1  # number of the backward pass
    # Ends of weight gradients, and what they read.
    under_way: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = field(default_factory=deque)
    weights: list[Tensor] = field(default_factory=list)  # and their gradients in this backward pass
    found: list[Tensor] = field(default_factory=list)

    def clear(self) -> None:
        self.under_way.clear()
        self.weights, self.found = [], []


@cache
def side_of(device: torch.device) -> Side:
    """One per GPU: only one thread captures steps."""
    return Side(torch.cuda.Stream(device))


def join(main: torch.cuda.Stream, side: Side) -> None:
    """At the end of a backward pass the main stream waits for all weight gradients, and adds them."""
    main.wait_stream(side.stream)
    with torch.cuda.stream(main), torch.no_grad():
        add_grads(side.weights, side.found)
    side.clear()


def abandon(device: torch.device) -> None:
    """After an error in a captured backward pass: a capture cannot end before its streams have joined."""
    side = side_of(device)
    if side.under_way:
        torch.cuda.current_stream(device).wait_stream(side.stream)
        side.clear()
