"""Sharpness-aware minimisation (Foret et al., 2021): the gradient at the worst point nearby.

A step computes the gradient g twice on the same batch: at the weights w, and at w + rho g / ||g||. The second
one is applied to w.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def perturbed(weights: Sequence[Tensor], rho: float) -> Iterator[None]:
    """Weights moved by rho along their gradient; at the end exactly those before."""
    moved = [weight for weight in weights if weight.grad is not None]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    before = [weight.detach().clone() for weight in moved]
    # A gradient of zero has no direction: the weights then stay where they are.
    scale = rho / torch.stack(torch._foreach_norm(gradients)).norm().clamp(min=1e-12)
    with torch.no_grad():
        torch._foreach_add_(moved, torch._foreach_mul(gradients, scale))
    try:
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(moved, before)


@contextmanager
def without_statistics(model: nn.Module) -> Iterator[None]:
    """Let BatchNorm use the statistics of the batch without adding them to its running ones."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in zip(norms, before, strict=True):
            norm.momentum = momentum
