"""Convolutions that add to the gradients of their weights by themselves, compared with torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from icmixup.lab.models.overlap import add_grads, convolve, copy_all, is_product

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


def made_pixels() -> tuple[Tensor, Tensor]:
    """Maps in bfloat16 and filters of one pixel."""
    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(2, 16, 5, 3, generator=generator).bfloat16().to(memory_format=torch.channels_last)
    return maps.requires_grad_(), torch.randn(24, 16, 1, 1, generator=generator).requires_grad_()


def test_filters_of_one_pixel_are_products_with_the_same_result() -> None:
    found = []
    for run in (lambda x, w: convolve(x, w, (1, 1), (0, 0)), lambda x, w: F.conv2d(x, w.to(x.dtype))):
        maps, weight = made_pixels()
        out = run(maps, weight)
        out.float().square().sum().backward()
        found.append((out, maps.grad, weight.grad))
        assert out.is_contiguous(memory_format=torch.channels_last)
    for ours, theirs in zip(*found, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("shape", "stride", "padding", "dtype", "expected"),
    [
        ((4, 4, 1, 1), (1, 1), (0, 0), torch.bfloat16, True),
        ((4, 4, 1, 1), (1, 1), (0, 0), torch.float32, False),
        ((4, 4, 1, 1), (2, 2), (0, 0), torch.bfloat16, False),
        ((4, 4, 1, 1), (1, 1), (1, 1), torch.bfloat16, False),
        ((4, 4, 1, 3), (1, 1), (0, 0), torch.bfloat16, False),
    ],
)
def test_only_convolutions_from_pixel_to_pixel_are_products(shape, stride, padding, dtype, expected) -> None:
    assert is_product(torch.empty(shape, dtype=dtype), (stride, padding)) == expected


def test_a_weight_that_is_known_in_16_bits_is_not_converted_again() -> None:
    maps, weight = made_pixels()
    out = convolve(maps, weight, (1, 1), (0, 0), torch.zeros_like(weight, dtype=torch.bfloat16))
    assert not out.any()
    out.backward(torch.ones_like(out))
    assert weight.grad.any()


def test_gradients_of_a_weight_that_occurs_three_times_are_added() -> None:
    weights = [torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last) for _ in range(2)]
    order = [weights[0], weights[1], weights[0], weights[0]]
    add_grads(order, [torch.full((2, 3, 2, 2), 10.0**k, dtype=torch.bfloat16) for k in range(4)])
    assert [set(weight.grad.flatten().tolist()) for weight in weights] == [{1101.0}, {10.0}]


def test_tensors_of_any_layout_are_copied() -> None:
    generator = torch.Generator().manual_seed(0)
    last, shapes = torch.channels_last, [(4, 3, 2, 2), (4, 3, 1, 1), (4, 1, 3, 3)]
    formats = [(one, other) for one in (last, torch.contiguous_format) for other in (last, None)]
    for target_format, source_format in formats:
        sources = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
        if source_format is not None:
            sources = [source.to(memory_format=source_format) for source in sources]
        targets = [torch.zeros(shape).to(memory_format=target_format) for shape in shapes]
        copy_all(targets, sources)
        for target, source in zip(targets, sources, strict=True):
            assert torch.equal(target, source.float())
