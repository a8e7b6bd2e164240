"""Fused layers: the same network, with its parameters, names and results."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from triton_on_cpu import DEVICE, import_kernels, interpreter

from icmixup.lab.datasets import Dataset, Split
from icmixup.lab.models import MODELS, build_model, fused
from icmixup.lab.models.fused import (
    DepthwiseConv,
    FusedNorm,
    FusedPool,
    FusedResidual,
    StemConv,
    can_fuse,
    fuse_layers,
    runs_kernels,
)
from icmixup.lab.training import step as step_module
from icmixup.lab.training.recipe import Recipe

import_kernels("icmixup.lab.models.norm_triton")
MADE = Dataset(
    "made",
    *2 * (Split(torch.zeros(10, 3, 8, 8, dtype=torch.uint8), torch.arange(10) % 5),),
    tuple("abcde"),
    (0.5,) * 3,
    (0.25,) * 3,
)


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    with interpreter():
        yield


def build_pair(name: str) -> tuple[nn.Module, nn.Module]:
    """A network with running statistics that differ from the initial ones, and its fused form."""
    model = build_model(name, 5, seed=0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -1, 1)
            nn.init.uniform_(module.weight, 0.5, 1.5)
    return model, fuse_layers(copy.deepcopy(model))


@pytest.fixture(autouse=True)
def exact_convolutions() -> Iterator[None]:
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield


def step(model: nn.Module, images: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Scores in training mode, gradients and the state after the step."""
    model.train()
    scores = model(images)
    scores.square().mean().backward()
    return scores, {name: weight.grad for name, weight in model.named_parameters()}, model.state_dict()


@pytest.mark.parametrize("name", MODELS)
def test_a_fused_network_computes_what_it_did_before(name) -> None:
    model, fast = build_pair(name)
    images = torch.randn(4, 3, 16, 16)
    assert torch.equal(model.eval()(images), fast.eval()(images))
    for one, other in zip(step(model, images), step(fast, images), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["small-cnn", "resnet32"])
def test_the_kernels_train_as_the_layers_do(name, monkeypatch) -> None:
    monkeypatch.setattr(fused, "runs_kernels", lambda maps: True)
    torch.manual_seed(0)  # with some draws, rounding moves an activation across 0, and gradients with it
    model, fast = build_pair(name)
    model, fast = model.to(DEVICE), fast.to(DEVICE)
    images = torch.randn(4, 3, 8, 8, device=DEVICE).to(memory_format=torch.channels_last)
    for one, other in zip(step(model, images), step(fast, images), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=1e-4)


def test_every_norm_of_a_resnet_is_fused_with_what_follows_it() -> None:
    model = fuse_layers(build_model("resnet18", 5, seed=0))
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert all(isinstance(norm, FusedNorm) for norm in norms)
    # Those of the three projections are followed by nothing.
    assert sorted(norm.activation for norm in norms) == 3 * ["none"] + 17 * ["relu"]
    assert not any(isinstance(module, nn.ReLU) for module in model.modules())
    assert sum(isinstance(module, FusedResidual) for module in model.modules()) == 8


def test_the_state_of_a_fused_network_fits_the_original() -> None:
    model, fast = build_pair("resnet32")
    assert list(model.state_dict()) == list(fast.state_dict())
    model.load_state_dict(fast.state_dict())


def test_layers_that_differ_are_left_alone() -> None:
    layers = (
        nn.BatchNorm2d(8, affine=False),
        nn.BatchNorm2d(8, momentum=None),
        nn.BatchNorm2d(8, track_running_stats=False),
        nn.BatchNorm1d(8),
        nn.GroupNorm(2, 8),
        nn.Conv2d(8, 8, 3),  # bias
        nn.Conv2d(8, 8, 3, groups=8),  # bias
        nn.Conv2d(8, 8, 3, groups=4, bias=False),
        nn.Conv2d(8, 8, 3, groups=8, bias=False, dilation=2),
        nn.Conv2d(8, 8, 3, groups=8, bias=False, padding="same"),
        nn.Conv2d(8, 16, 3, groups=8, bias=False),
        nn.Conv2d(8, 8, (3, 5), groups=8, bias=False),
        nn.Conv2d(3, 8, 3, 2, padding_mode="reflect", padding=1),
        nn.utils.spectral_norm(nn.Conv2d(8, 8, 3, bias=False)),  # computes its weight in a hook
        nn.Conv2d(3, 8, 3, bias=False),
        nn.MaxPool2d(2, 2),
        nn.MaxPool2d(3, 2, 1, ceil_mode=True),
    )
    before = [type(layer) for layer in layers]
    fuse_layers(nn.ModuleList(layers))
    assert [type(layer) for layer in layers] == before


def test_an_activation_that_does_not_follow_a_norm_stays() -> None:
    model = fuse_layers(
        nn.Sequential(nn.BatchNorm2d(4), nn.Dropout(), nn.ReLU(), nn.BatchNorm2d(4), nn.GELU())
    )
    assert [type(layer) for layer in model] == [FusedNorm, nn.Dropout, nn.ReLU, FusedNorm, nn.GELU]
    assert [model[0].activation, model[3].activation] == ["none", "none"]


class Both(nn.Sequential):
    """A norm and its activation, side by side."""

    def forward(self, maps: Tensor) -> Tensor:
        norm, activation = self
        return norm(maps) + activation(maps)


def test_a_sequence_with_a_forward_of_its_own_computes_what_it_did_before() -> None:
    model = Both(nn.BatchNorm2d(4), nn.ReLU())
    maps = torch.randn(2, 4, 3, 3)
    assert torch.equal(fuse_layers(copy.deepcopy(model))(maps), model(maps))


@pytest.mark.parametrize(("method", "is_fused"), [("mixup", True), ("manifold", False)])
def test_networks_inside_which_images_are_mixed_are_not_fused(method, is_fused, monkeypatch) -> None:
    """A fused norm has applied the activation at whose input Manifold Mixup may mix."""
    monkeypatch.setattr(step_module, "is_fused", lambda recipe, device: True)
    recipe = Recipe(dataset="made", model="small-cnn", method=method)
    learner = step_module.make_learner(recipe, MADE, lambda model: model)
    assert any(isinstance(module, FusedNorm) for module in learner.model.modules()) == is_fused


def test_maps_too_large_for_the_kernels_are_left_to_torch() -> None:
    with FakeTensorMode():
        assert runs_kernels(torch.empty(2**15, 2**8, 2**4, 2**4 - 1, device="cuda"))
        assert not runs_kernels(torch.empty(2**15, 2**8, 2**4, 2**4, device="cuda"))


@pytest.mark.parametrize("padding", [0, 1, 2, 3])
@pytest.mark.parametrize("side", [3, 4, 7])
@pytest.mark.parametrize("size", [(8, 8), (9, 11), (13, 8)])
def test_a_stem_on_blocks_of_pixels_is_that_of_torch(side, padding, size, monkeypatch) -> None:
    monkeypatch.setattr(fused, "runs_kernels", lambda maps: True)
    conv = nn.Conv2d(3, 6, side, 2, padding, dtype=torch.float64)
    fast = fuse_layers(copy.deepcopy(conv))
    assert type(fast) is StemConv
    maps = torch.randn(2, 3, *size, dtype=torch.float64)
    torch.testing.assert_close(fast(maps), conv(maps))
    torch.testing.assert_close(fast.eval()(maps), conv(maps))
    for layer in (conv, fast.train()):
        layer(maps).square().sum().backward()
    torch.testing.assert_close(fast.weight.grad, conv.weight.grad)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding", [0, 1])
def test_a_depthwise_convolution_is_that_of_torch(stride, padding, monkeypatch) -> None:
    monkeypatch.setattr(fused, "runs_kernels", lambda maps: True)
    conv = nn.Conv2d(6, 6, 3, stride, padding, groups=6, bias=False).to(DEVICE)
    fast = fuse_layers(copy.deepcopy(conv))
    assert type(fast) is DepthwiseConv
    maps = torch.randn(2, 6, 7, 9, device=DEVICE)
    torch.testing.assert_close(fast(maps), conv(maps))
    torch.testing.assert_close(fast.eval()(maps), conv(maps))


def test_pooling_is_that_of_torch(monkeypatch) -> None:
    monkeypatch.setattr(fused, "runs_kernels", lambda maps: True)
    pool = fuse_layers(nn.MaxPool2d(3, 2, 1))
    assert type(pool) is FusedPool
    maps = torch.randn(2, 6, 7, 9, device=DEVICE)
    assert torch.equal(pool(maps), nn.MaxPool2d(3, 2, 1)(maps))
    assert torch.equal(pool.eval()(maps), nn.MaxPool2d(3, 2, 1)(maps))


def test_one_value_per_channel_is_refused_as_by_torch(monkeypatch) -> None:
    monkeypatch.setattr(fused, "runs_kernels", lambda maps: True)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        fuse_layers(nn.BatchNorm2d(4).to(DEVICE))(torch.randn(1, 4, 1, 1, device=DEVICE))


def test_a_cpu_and_the_switch_leave_networks_as_they_are(monkeypatch) -> None:
    assert not can_fuse(torch.device("cpu"))
    monkeypatch.setenv(fused.SWITCH, "0")
    assert not can_fuse(torch.device(DEVICE))
