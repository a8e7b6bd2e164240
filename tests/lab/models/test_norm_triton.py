"""BatchNorm, shortcut and activation in one: the kernels compared with torch's layers in float64."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton_on_cpu import DEVICE, import_kernels, interpreter

kernels = import_kernels("icmixup.lab.models.norm_triton")
ACTIVATIONS = {"none": lambda z: z, "relu": F.relu, "relu6": F.relu6, "silu": F.silu}
MOMENTUM, EPS = 0.1, 1e-3
ROUNDING = 1.05 if DEVICE == "cuda" else 2.1  # Triton's interpreter truncates where a GPU rounds to nearest


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    with interpreter():
        yield


def made_inputs(channels: int, dtype: torch.dtype = torch.float32, mean: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(channels)
    draw = {
        name: torch.randn(3, channels, 7, 5, generator=generator) for name in ("maps", "shortcut", "grad")
    }
    draw["maps"] = 2 * draw["maps"] + mean
    inputs = {name: value.to(dtype).to(memory_format=torch.channels_last) for name, value in draw.items()}
    inputs["weight"] = torch.rand(channels, generator=generator) + 0.5
    inputs["bias"] = torch.randn(channels, generator=generator)
    return {name: value.to(DEVICE) for name, value in inputs.items()}


def made_statistics(channels: int, dtype: torch.dtype = torch.float32):
    return kernels.Statistics(
        mean=torch.full((channels,), 0.5, dtype=dtype, device=DEVICE),
        var=torch.full((channels,), 2.0, dtype=dtype, device=DEVICE),
        batches=torch.tensor(4, device=DEVICE),
        counters=torch.zeros(channels, dtype=torch.int32, device=DEVICE),
        momentum=MOMENTUM,
        eps=EPS,
    )


def run_kernels(inputs: dict[str, Tensor], activation: str, with_shortcut: bool):
    """Output, gradients and statistics, of the kernels."""
    leaves = {name: value.clone().requires_grad_() for name, value in inputs.items() if name != "grad"}
    statistics = made_statistics(inputs["weight"].shape[0])
    shortcut = leaves["shortcut"] if with_shortcut else None
    out, _ = kernels.norm_act(
        leaves["maps"], leaves["weight"], leaves["bias"], statistics, activation, shortcut
    )
    out.backward(inputs["grad"])
    return out.detach(), {name: leaf.grad for name, leaf in leaves.items()}, statistics


def run_torch(inputs: dict[str, Tensor], activation: str, with_shortcut: bool, dtype=torch.float64):
    """The same by torch's functions in another dtype; weights and statistics are at least float32."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = {
        name: value.to(wide if value.dim() == 1 else dtype).requires_grad_()
        for name, value in inputs.items()
        if name != "grad"
    }
    statistics = made_statistics(inputs["weight"].shape[0], wide)
    z = F.batch_norm(
        leaves["maps"], statistics.mean, statistics.var, leaves["weight"], leaves["bias"], True, MOMENTUM, EPS
    )
    out = ACTIVATIONS[activation](z + leaves["shortcut"] if with_shortcut else z)
    out.backward(inputs["grad"].to(dtype))
    return out.detach(), {name: leaf.grad for name, leaf in leaves.items()}, statistics


def error(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


CASES = [(name, False) for name in ACTIVATIONS] + [(name, True) for name in ("none", "relu", "relu6")]


@pytest.mark.parametrize("channels", [3, 40, 136])
@pytest.mark.parametrize(("activation", "with_shortcut"), CASES)
def test_output_gradients_and_statistics_are_those_of_torch(activation, with_shortcut, channels) -> None:
    inputs = made_inputs(channels)
    out, grads, statistics = run_kernels(inputs, activation, with_shortcut)
    exact, exact_grads, exact_statistics = run_torch(inputs, activation, with_shortcut)
    assert error(out, exact) < 2e-6
    for name, grad in exact_grads.items():
        if grad is None:
            assert grads[name] is None
        else:
            assert error(grads[name], grad) < 2e-6, name
    torch.testing.assert_close(statistics.mean.double(), exact_statistics.mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(statistics.var.double(), exact_statistics.var, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("with_shortcut", [False, True])
def test_bfloat16_is_as_accurate_as_torch(with_shortcut) -> None:
    inputs = made_inputs(24, torch.bfloat16)
    out, grads, _ = run_kernels(inputs, "relu", with_shortcut)
    exact, exact_grads, _ = run_torch(inputs, "relu", with_shortcut)
    theirs, their_grads, _ = run_torch(inputs, "relu", with_shortcut, torch.bfloat16)
    assert out.dtype == torch.bfloat16
    assert error(out, exact) <= ROUNDING * error(theirs, exact)
    for name in ("maps", "weight", "bias"):
        allowed = ROUNDING * error(their_grads[name], exact_grads[name]) + 1e-6  # sums of float32
        assert error(grads[name], exact_grads[name]) <= allowed, name


def test_a_large_mean_does_not_hide_a_small_variance() -> None:
    inputs = made_inputs(8, mean=3000.0)
    out, _, _ = run_kernels(inputs, "none", False)
    exact, _, _ = run_torch(inputs, "none", False)
    # Sums of squares around 0 would have an error of 9e6 * 2^-24, a tenth of the variance.
    assert error(out, exact) < 1e-3


@pytest.mark.parametrize(("activation", "with_shortcut"), CASES)
def test_a_pixel_that_is_not_a_number_spoils_its_channel_as_in_torch(activation, with_shortcut) -> None:
    inputs = made_inputs(8)
    inputs["maps"][1, 2, 3, 4] = torch.nan
    out, _, statistics = run_kernels(inputs, activation, with_shortcut)
    exact, _, exact_statistics = run_torch(inputs, activation, with_shortcut)
    assert torch.equal(out.isnan(), exact.isnan())
    assert torch.equal(statistics.mean.isnan(), exact_statistics.mean.isnan())
    assert torch.equal(statistics.var.isnan(), exact_statistics.var.isnan())


@pytest.mark.parametrize("with_shortcut", [False, True])
def test_sums_of_several_programs_and_tiles_are_those_of_all_pixels(with_shortcut, monkeypatch) -> None:
    for tile in ("MOMENTS_TILE", "REDUCE_TILE", "MAP_TILE"):
        monkeypatch.setattr(kernels, tile, 512)
    monkeypatch.setattr(kernels, "SUM_PROGRAMS", 6)
    inputs = made_inputs(40)  # 105 pixels in tiles of 4: 27 tiles, by three programs for each of two blocks
    assert kernels.choose_sum_tiles(inputs["maps"], 512)[:4] == (32, 4, 2, 3)
    few, few_grads, _ = run_kernels(inputs, "relu", with_shortcut)
    monkeypatch.setattr(kernels, "SUM_PROGRAMS", 50)
    monkeypatch.setattr(kernels, "PARTS", 128)  # of which the last program adds four at once
    assert kernels.choose_sum_tiles(inputs["maps"], 512)[:4] == (32, 4, 2, 14)
    many, many_grads, statistics = run_kernels(inputs, "relu", with_shortcut)
    exact, exact_grads, _ = run_torch(inputs, "relu", with_shortcut)
    for out, grads in ((few, few_grads), (many, many_grads)):
        assert error(out, exact) < 2e-6
        for name in ("maps", "weight", "bias"):
            assert error(grads[name], exact_grads[name]) < 2e-6
    assert not statistics.counters.any()  # ready for the next step
    assert statistics.batches == 5


@pytest.mark.parametrize("activation", ["none", "relu"])
def test_gradients_of_a_forked_output_are_added(activation) -> None:
    inputs = made_inputs(16)
    _, whole, _ = run_kernels(inputs, activation, True)
    leaves = {name: value.clone().requires_grad_() for name, value in inputs.items() if name != "grad"}
    arguments = leaves["maps"], leaves["weight"], leaves["bias"], made_statistics(16), activation
    out, fork = kernels.norm_act(*arguments, leaves["shortcut"])
    assert torch.equal(out, fork)
    torch.autograd.backward([out, fork], [0.25 * inputs["grad"], 0.75 * inputs["grad"]])
    for name, leaf in leaves.items():
        torch.testing.assert_close(leaf.grad, whole[name])


def test_the_gradient_of_a_fork_alone_counts() -> None:
    inputs = made_inputs(16)
    _, whole, _ = run_kernels(inputs, "relu", True)
    maps = inputs["maps"].clone().requires_grad_()
    statistics = made_statistics(16)
    _, fork = kernels.norm_act(maps, inputs["weight"], inputs["bias"], statistics, "relu", inputs["shortcut"])
    fork.backward(inputs["grad"])
    torch.testing.assert_close(maps.grad, whole["maps"])


def test_maps_in_another_layout_give_the_same() -> None:
    inputs = made_inputs(16)
    out, grads, _ = run_kernels(inputs, "relu", True)
    other = {name: value.contiguous() for name, value in inputs.items()}
    other_out, other_grads, _ = run_kernels(other, "relu", True)
    assert torch.equal(out, other_out)
    assert all(torch.equal(grads[name], other_grads[name]) for name in grads)


@pytest.mark.parametrize(
    ("channels", "width"), [(3, 4), (24, 32), (40, 64), (96, 128), (144, 64), (240, 128), (672, 128)]
)
def test_tiles_are_wide_and_nearly_full(channels, width) -> None:
    assert kernels.tile_width(channels) == width


def test_too_many_elements_are_refused() -> None:
    maps = torch.empty(2**15, 2**8, 2**4, 2**4, device="meta")
    with pytest.raises(ValueError, match=r"\(32768, 256, 16, 16\)"):
        kernels.norm_act(maps, torch.ones(256), torch.zeros(256), made_statistics(256))


@pytest.mark.parametrize(("room", "stages"), [(227, 5), (163, 5), (99, 3), (48, 1), (16, 1)])
def test_tiles_under_way_fit_into_shared_memory(room, stages, monkeypatch) -> None:
    properties = SimpleNamespace(shared_memory_per_block_optin=room << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert kernels.count_stages(torch.device("cuda"), 3 * 8192, 5) == stages
