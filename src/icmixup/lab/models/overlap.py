"""Weight gradients of convolutions, computed beside the rest of the backward pass.

Nothing but the optimizer waits for a weight gradient, and its kernels are limited by arithmetic, while those
of BatchNorm are limited by memory. So a captured step computes it on a stream of its own, where the GPU runs
it at the same time as the backward pass of the layers below.
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


def convolve(maps: Tensor, weight: Tensor, stride: tuple[int, ...], padding: tuple[int, ...]) -> Tensor:
    """F.conv2d(maps, weight, None, stride, padding), where backward() adds to weight.grad by itself.

    Args:
        maps: (B, C, H, W).
        weight: (D, C, K, K) leaf, converted to the dtype of maps.

    Returns:
        (B, D, H', W').
    """
    out: Tensor = Convolution.apply(maps, weight, stride, padding)
    return out


Sizes = tuple[tuple[int, ...], tuple[int, ...]]  # stride, padding


class Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, maps, weight, stride, padding):
        used = weight.to(maps.dtype)
        ctx.save_for_backward(maps, used)
        ctx.weight, ctx.sizes = weight, (stride, padding)
        return F.conv2d(maps, used, None, stride, padding)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        maps, used = ctx.saved_tensors
        weight, sizes = ctx.weight, ctx.sizes
        if ctx.needs_input_grad[1]:
            run_beside(lambda: add_weight_grad(weight, grad, maps, used, sizes), (grad, maps, used))
        maps_grad = None
        if ctx.needs_input_grad[0]:
            maps_grad = differentiate(grad, maps, used, sizes, (True, False, False))[0]
        return maps_grad, None, None, None


def differentiate(
    grad: Tensor, maps: Tensor, weight: Tensor, sizes: Sizes, wanted: tuple[bool, ...]
) -> Tensor:
    stride, padding = sizes
    found: Tensor = torch.ops.aten.convolution_backward(
        grad, maps, weight, None, stride, padding, (1, 1), False, (0, 0), 1, wanted
    )
    return found


def add_weight_grad(weight: Tensor, grad: Tensor, maps: Tensor, used: Tensor, sizes: Sizes) -> None:
    """weight.grad += the weight gradient, on the current stream: autograd would do it on that of forward."""
    found = differentiate(grad, maps, used, sizes, (False, True, False))[1]
    if weight.grad is None:
        weight.grad = torch.empty_like(weight).copy_(found)  # laid out as the weight, which optimizers need
    else:
        weight.grad.add_(found)


def run_beside(run: Callable[[], None], read: tuple[Tensor, ...]) -> None:
    """Run on a side stream if a step is being captured; the end of the backward pass waits for it.

    Elsewhere it runs on the current stream. The warm-up before a capture does, so that cuDNN, which compares
    its algorithms then, measures each of them alone.
    """
    if not (read[0].is_cuda and torch.cuda.is_current_stream_capturing()):
        run()
        return
    main, side = torch.cuda.current_stream(), side_of(read[0].device)
    side.stream.wait_stream(main)
    with torch.cuda.stream(side.stream):
        run()
    backward_pass = torch._C._current_graph_task_id()
    if side.backward_pass != backward_pass:
        side.under_way.clear()
        side.backward_pass = backward_pass
        Variable._execution_engine.queue_callback(partial(join, main, side))
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


@cache
def side_of(device: torch.device) -> Side:
    """One per GPU: only one thread captures steps."""
    return Side(torch.cuda.Stream(device))


def join(main: torch.cuda.Stream, side: Side) -> None:
    """At the end of a backward pass the main stream waits for all weight gradients."""
    main.wait_stream(side.stream)
    side.under_way.clear()


def abandon(device: torch.device) -> None:
    """After an error in a captured backward pass: a capture cannot end before its streams have joined."""
    if side_of(device).under_way:
        join(torch.cuda.current_stream(device), side_of(device))
