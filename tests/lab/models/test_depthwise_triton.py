"""The kernels of depthwise convolutions compared with torch's own convolution in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from triton_on_cpu import DEVICE, import_kernels, interpreter

kernels = import_kernels("icmixup.lab.models.depthwise_triton")
depthwise_conv = kernels.depthwise_conv

Padding = tuple[int, int, int, int]
Conv = Callable[[Tensor, Tensor, int, Padding], Tensor]


class Case(NamedTuple):
    side: int
    stride: int
    padding: Padding
    size: tuple[int, int, int, int] = (2, 40, 9, 7)  # 40 channels are two and a half blocks


CASES = [
    Case(3, 1, (1, 1, 1, 1)),
    Case(5, 1, (2, 2, 2, 2), (1, 24, 8, 6)),
    Case(3, 2, (0, 1, 0, 1), (2, 40, 8, 6)),  # TensorFlow's SAME padding of even sizes
    Case(3, 2, (1, 1, 1, 1)),
    Case(5, 2, (1, 2, 1, 2), (1, 24, 10, 6)),
    Case(5, 2, (2, 2, 2, 2), (2, 16, 7, 5)),
    Case(5, 1, (0, 3, 4, 1), (2, 5, 6, 7)),
    Case(3, 1, (4, 0, 0, 5), (1, 3, 4, 5)),  # padding wider than the filter
    Case(3, 2, (0, 0, 0, 0), (3, 8, 8, 8)),  # the last row and column are not read
    Case(7, 1, (3, 3, 3, 3), (1, 16, 5, 4)),
    Case(7, 2, (2, 3, 2, 3), (1, 16, 6, 6)),
    Case(3, 1, (1, 1, 1, 1), (1, 32, 16, 3)),  # several groups of rows, and channels of one whole block
]


class Results(NamedTuple):
    out: Tensor
    maps: Tensor
    weight: Tensor

    def errors(self, exact: Results) -> list[float]:
        """Largest errors of the output and of both gradients, in units of their root mean square."""
        return [
            float((a.double() - b).abs().max() / b.square().mean().sqrt())
            for a, b in zip(self, exact, strict=True)
        ]


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    with interpreter():
        yield


def draw(case: Case, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Maps, filters and a gradient of the output, which `dtype` represents exactly; float64."""
    generator = torch.Generator().manual_seed(0)
    batch, channels, height, width = case.size
    left, right, top, bottom = case.padding
    out_height = (height + top + bottom - case.side) // case.stride + 1
    out_width = (width + left + right - case.side) // case.stride + 1
    shapes = [case.size, (channels, 1, case.side, case.side), (batch, channels, out_height, out_width)]
    maps, weight, grads = (torch.randn(shape, generator=generator).to(dtype).double() for shape in shapes)
    return maps, weight, grads


def torch_conv(maps: Tensor, weight: Tensor, stride: int, padding: Padding) -> Tensor:
    return F.conv2d(F.pad(maps, padding), weight, stride=stride, groups=len(weight))


def differentiate(conv: Conv, case: Case, tensors: tuple[Tensor, Tensor, Tensor]) -> Results:
    maps, weight = (tensor.detach().requires_grad_() for tensor in tensors[:2])
    out = conv(maps, weight, case.stride, case.padding)
    return Results(
        out.detach().cpu(), *(g.cpu() for g in torch.autograd.grad(out, (maps, weight), tensors[2]))
    )


def channels_last(
    tensors: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    maps, weight, grads = (tensor.to(DEVICE, dtype) for tensor in tensors)
    layout = torch.channels_last
    return maps.contiguous(memory_format=layout), weight, grads.contiguous(memory_format=layout)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_gradients_are_those_of_torch_in_float64(case: Case) -> None:
    tensors = draw(case)
    results = differentiate(depthwise_conv, case, channels_last(tensors, torch.float32))
    exact = differentiate(torch_conv, case, tensors)
    assert [tensor.shape for tensor in results] == [tensor.shape for tensor in exact]
    assert max(results.errors(exact)) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [CASES[0], CASES[4]], ids=str)
def test_half_precision_is_no_less_exact_than_in_torch(case: Case, dtype: torch.dtype) -> None:
    if DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter cuts float32 off at bfloat16 where a GPU rounds")
    tensors = draw(case, dtype)
    exact = differentiate(torch_conv, case, tensors)
    results = differentiate(depthwise_conv, case, channels_last(tensors, dtype))
    of_torch = differentiate(torch_conv, case, channels_last(tensors, dtype))
    for ours, theirs in zip(results.errors(exact), of_torch.errors(exact), strict=True):
        assert ours < 1.5 * theirs + 1e-4


@pytest.mark.parametrize("case", [CASES[0], CASES[4]], ids=str)
def test_results_in_bfloat16_are_rounded_only_once(case: Case) -> None:
    tensors = draw(case, torch.bfloat16)
    results = differentiate(depthwise_conv, case, channels_last(tensors, torch.bfloat16))
    for ours, exact in zip(results, differentiate(torch_conv, case, tensors), strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.double(), exact, rtol=2**-7, atol=1e-5)


def test_float32_weights_are_not_rounded_to_the_dtype_of_the_maps() -> None:
    case = CASES[3]
    maps, _, grads = draw(case, torch.bfloat16)
    _, weight, _ = draw(case)
    exact = differentiate(torch_conv, case, (maps, weight, grads))
    maps16, _, grads16 = channels_last((maps, weight, grads), torch.bfloat16)
    results = differentiate(depthwise_conv, case, (maps16, weight.to(DEVICE, torch.float32), grads16))
    assert [tensor.dtype for tensor in results] == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert results.errors(exact)[2] < 2e-6
    torch.testing.assert_close(results.out.double(), exact.out, rtol=2**-7, atol=1e-5)
    torch.testing.assert_close(results.maps.double(), exact.maps, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("case", [CASES[3], CASES[6]], ids=str)
def test_any_tiles_and_any_number_of_partial_sums_give_the_same(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = draw(case)
    exact = differentiate(torch_conv, case, tensors)
    monkeypatch.setattr(kernels, "choose_tiles", lambda kind, shape: kernels.Tiles(16, 4, 3, 1))
    monkeypatch.setattr(kernels, "MULTIPROCESSORS", 1)
    monkeypatch.setattr(kernels, "CHUNKS_AT_ONCE", 2)
    results = differentiate(depthwise_conv, case, channels_last(tensors, torch.float32))
    assert max(results.errors(exact)) < 2e-6


def test_other_layouts_of_maps_gradients_and_weights_give_the_same() -> None:
    case = CASES[3]
    tensors = draw(case)
    expected = differentiate(depthwise_conv, case, channels_last(tensors, torch.float32))
    maps, weight, grads = (tensor.to(DEVICE, torch.float32) for tensor in tensors)
    by_tap = weight.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)
    assert not maps.is_contiguous(memory_format=torch.channels_last)
    for ours, theirs in zip(
        differentiate(depthwise_conv, case, (maps, by_tap, grads)), expected, strict=True
    ):
        assert torch.equal(ours, theirs)


def test_the_output_and_the_gradient_of_the_maps_are_channels_last() -> None:
    maps, weight, _ = channels_last(draw(CASES[3]), torch.float32)
    maps.requires_grad_()
    out = depthwise_conv(maps, weight, 2, (1, 1, 1, 1))
    out.sum().backward()  # a gradient that is expanded from a scalar is of no layout
    assert maps.grad is not None
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert maps.grad.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("learned", "kernel"), [("maps", "_weight_grad"), ("weight", "_input_grad")])
def test_a_gradient_that_nobody_needs_is_not_computed(
    learned: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps, weight, grads = channels_last(draw(CASES[2]), torch.float32)
    (maps if learned == "maps" else weight).requires_grad_()
    monkeypatch.delattr(kernels, kernel)
    depthwise_conv(maps, weight, 2, (0, 1, 0, 1)).backward(grads)
    assert (maps.grad is not None) == (learned == "maps")
    assert (weight.grad is not None) == (learned == "weight")


@pytest.mark.parametrize(
    ("maps", "weight", "stride", "padding", "message"),
    [
        ((2, 8, 5, 5), (4, 1, 3, 3), 1, (1, 1, 1, 1), r"\(2, 8, 5, 5\) and weight is \(4, 1, 3, 3\)"),
        ((8, 5, 5), (8, 1, 3, 3), 1, (1, 1, 1, 1), r"maps are \(8, 5, 5\)"),
        ((2, 8, 5, 5), (8, 1, 3, 5), 1, (1, 1, 1, 1), r"\(8, 1, 3, 5\); filters must be square"),
        ((2, 8, 5, 5), (8, 1, 4, 4), 1, (1, 1, 1, 1), r"a side of 3, 5 or 7"),
        ((2, 8, 5, 5), (8, 1, 3, 3), 3, (1, 1, 1, 1), r"stride must be 1 or 2 .* got 3"),
        ((2, 8, 5, 5), (8, 1, 3, 3), 1, (1, -1, 1, 1), r"\(1, -1, 1, 1\)"),
        ((2, 8, 1, 5), (8, 1, 3, 3), 1, (1, 1, 0, 1), r"\(2, 8, 1, 5\) padded by .* no output"),
        ((2**11, 2**10, 32, 32), (2**10, 1, 3, 3), 1, (1, 1, 1, 1), r"2\^31 values"),
    ],
)
def test_wrong_sizes_are_refused_and_shown(
    maps: tuple[int, ...], weight: tuple[int, ...], stride: int, padding: Padding, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        depthwise_conv(torch.empty(1).expand(maps), torch.empty(weight), stride, padding)


def test_maps_of_float64_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got torch\.float64"):
        depthwise_conv(torch.ones(1, 8, 5, 5).double(), torch.ones(8, 1, 3, 3), 1, (1, 1, 1, 1))
