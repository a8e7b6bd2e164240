"""Gradients that cannot be differentiated again, and an error where that is tried.

A custom backward pass that autograd cannot see through would otherwise be taken for a constant: gradient
penalties and Hessians would silently lack a term. torch's once_differentiable does not help here: it stays
silent when the incoming gradient is a constant, as it is for every scalar loss.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


def first_order_only(gradient: Tensor, what: str) -> Tensor:
    """The gradient; if a graph of the backward pass is built, one whose own backward pass is an error."""
    if not torch.is_grad_enabled():
        return gradient
    last: Tensor = _FirstOrder.apply(gradient.detach().requires_grad_(), what)  # type: ignore[no-untyped-call]
    return last


class _FirstOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, gradient: Tensor, what: str) -> Tensor:
        ctx.what = what  # type: ignore[attr-defined]
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        raise RuntimeError(
            f"second derivatives of {ctx.what} are not implemented; "  # type: ignore[attr-defined]
            "pass gather=False and fused=False to infinite_class_loss, which has them"
        )
