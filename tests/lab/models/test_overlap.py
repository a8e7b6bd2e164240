"""Convolutions that add to the gradients of their weights by themselves, compared with torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from icmixup.lab.models.overlap import convolve

STRIDE, PADDING = (2, 1), (1, 0)


def made_inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(2, 6, 7, 9, dtype=dtype, generator=generator)
    weight = torch.randn(4, 6, 3, 3, dtype=torch.float64, generator=generator)
    return maps, weight.to(memory_format=torch.channels_last).requires_grad_()


def torch_convolve(maps: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(maps, weight.to(maps.dtype), None, STRIDE, PADDING)


def our_convolve(maps: Tensor, weight: Tensor) -> Tensor:
    return convolve(maps, weight, STRIDE, PADDING)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_outputs_and_gradients_are_those_of_torch(dtype) -> None:
    found = []
    for run in (our_convolve, torch_convolve):
        maps, weight = made_inputs(dtype)
        out = run(maps.requires_grad_(), weight)
        out.square().sum().backward()
        found.append((out, maps.grad, weight.grad))
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs)


def test_gradients_of_several_uses_and_backward_passes_are_added() -> None:
    """As RegMixup does, which calls the network twice, and large_batch, which calls backward twice."""
    grads = []
    for run in (our_convolve, torch_convolve):
        maps, weight = made_inputs()
        (run(maps, weight).square().sum() + run(2 * maps, weight).sum()).backward()
        run(3 * maps, weight).sum().backward()
        grads.append(weight.grad)
    torch.testing.assert_close(*grads)


def test_a_gradient_lies_in_memory_as_its_weight() -> None:
    maps, weight = made_inputs()
    our_convolve(maps, weight).sum().backward()
    assert weight.grad.stride() == weight.stride()


def test_a_frozen_weight_gets_no_gradient_but_passes_it_on() -> None:
    maps, weight = made_inputs()
    our_convolve(maps.requires_grad_(), weight.requires_grad_(False)).sum().backward()
    assert weight.grad is None
    assert maps.grad is not None
