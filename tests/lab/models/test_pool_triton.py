"""Max pooling by our kernels compared with torch's, value by value."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton_on_cpu import DEVICE, import_kernels, interpreter

kernels = import_kernels("icmixup.lab.models.pool_triton")


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    with interpreter():
        yield


def pool_both(maps: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output and gradient of ours, and of torch's."""
    found = []
    for pool in (kernels.max_pool, lambda maps: F.max_pool2d(maps, 3, 2, 1)):
        leaf = maps.clone().requires_grad_()
        out = pool(leaf)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        out.backward(grad.to(out))
        found += [out.detach(), leaf.grad]
    return tuple(found)


@pytest.mark.parametrize("channels", [3, 16, 72])
@pytest.mark.parametrize("size", [(8, 8), (7, 9), (1, 5), (2, 1)])
def test_outputs_and_gradients_are_those_of_torch(size, channels) -> None:
    maps = torch.randn(3, channels, *size, device=DEVICE).to(memory_format=torch.channels_last)
    out, grad, their_out, their_grad = pool_both(maps)
    assert torch.equal(out, their_out)
    torch.testing.assert_close(grad, their_grad)
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_of_equal_pixels_the_first_gets_the_gradient() -> None:
    maps = torch.randint(3, (2, 8, 9, 9), device=DEVICE).float().relu()  # zeros after a ReLU are many
    out, grad, their_out, their_grad = pool_both(maps)
    assert torch.equal(out, their_out)
    torch.testing.assert_close(grad, their_grad)


def test_not_a_number_and_infinity_are_passed_on_as_by_torch() -> None:
    maps = torch.randn(1, 8, 6, 6, device=DEVICE)
    maps[0, 0, 2, 2] = torch.nan
    maps[0, 1] = -torch.inf
    out, grad, their_out, their_grad = pool_both(maps)
    assert torch.equal(out.isnan(), their_out.isnan())
    torch.testing.assert_close(out, their_out, equal_nan=True)
    torch.testing.assert_close(grad, their_grad)


def test_bfloat16_is_exact() -> None:
    maps = torch.randn(2, 16, 8, 8, device=DEVICE).bfloat16()
    out, _, their_out, _ = pool_both(maps)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, their_out)


def test_too_many_elements_are_refused() -> None:
    with pytest.raises(ValueError, match="smaller batch"):
        kernels.max_pool(torch.empty(2**15, 2**8, 2**4, 2**4, device="meta"))


def norm_pool_both(maps: Tensor, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs, gradients and statistics of norm_pool, and of torch's layers in float64."""
    channels = maps.shape[1]
    generator = torch.Generator().manual_seed(channels)
    drawn = {"weight": torch.randn(channels, generator=generator), "bias": torch.randn(channels)}
    found = []
    for kind in (dtype, torch.float64):
        leaves = {
            name: value.to(DEVICE, torch.promote_types(kind, torch.float32)) for name, value in drawn.items()
        }
        leaves["maps"] = maps.to(kind)
        for name, value in leaves.items():
            leaves[name] = value.clone().requires_grad_()
        mean, var = torch.zeros(channels, device=DEVICE), torch.ones(channels, device=DEVICE)
        x, w, b = leaves["maps"], leaves["weight"], leaves["bias"]
        if kind == torch.float64:
            mean, var = mean.double(), var.double()
            out = F.max_pool2d(F.batch_norm(x, mean, var, w, b, True, 0.1, 1e-5).relu(), 3, 2, 1)
        else:
            counters = torch.zeros(channels, dtype=torch.int32, device=DEVICE)
            out = kernels.norm_pool(x, w, b, kernels.Statistics(mean, var, None, counters, 0.1, 1e-5))
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        out.backward(grad.to(out))
        gradients = {f"gradient of {name}": leaf.grad for name, leaf in leaves.items()}
        found.append({"out": out.detach(), "mean": mean, "var": var, **gradients})
    return tuple(found)


@pytest.mark.parametrize("channels", [3, 16, 72])
@pytest.mark.parametrize("size", [(8, 8), (7, 9), (1, 5)])
def test_a_norm_a_relu_and_pooling_in_one_are_those_of_torch(size, channels) -> None:
    maps = 2 * torch.randn(3, channels, *size, device=DEVICE) + 1
    ours, theirs = norm_pool_both(maps.to(memory_format=torch.channels_last), torch.float32)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name].double(), value, rtol=1e-4, atol=1e-5, msg=name)


def test_a_norm_and_pooling_in_bfloat16_are_near_those_of_torch() -> None:
    maps = torch.randn(4, 16, 12, 12, device=DEVICE).bfloat16()
    ours, theirs = norm_pool_both(maps.to(memory_format=torch.channels_last), torch.bfloat16)
    assert ours["out"].dtype == ours["gradient of maps"].dtype == torch.bfloat16
    for name, value in theirs.items():
        assert (ours[name].double() - value).norm() < 0.02 * value.norm(), name


def test_a_pixel_that_is_not_a_number_spoils_its_channel_as_in_torch() -> None:
    maps = torch.randn(2, 8, 6, 6, device=DEVICE)
    maps[1, 2, 3, 4] = torch.nan
    ours, theirs = norm_pool_both(maps, torch.float32)
    assert torch.equal(ours["out"].isnan(), theirs["out"].isnan())
    assert ours["out"].isnan().any()
