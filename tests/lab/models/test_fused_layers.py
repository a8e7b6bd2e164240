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
kernels_of_stem = import_kernels("icmixup.lab.models.stem_triton")
SHORT = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # NumPy, which interprets, has no bfloat16
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
    learner = step_module.make_learner(recipe, MADE)
    assert any(isinstance(module, FusedNorm) for module in learner.model.modules()) == is_fused


def test_maps_too_large_for_the_kernels_are_left_to_torch() -> None:
    with FakeTensorMode():
        assert runs_kernels(torch.empty(2**15, 2**8, 2**4, 2**4 - 1, device="cuda"))
        assert not runs_kernels(torch.empty(2**15, 2**8, 2**4, 2**4, device="cuda"))


def made_stem(bias: bool = True, **sizes: int) -> tuple[nn.Module, nn.Module, Tensor]:
    """A first convolution in float64, its fused form, and images; all values are exact in SHORT."""
    conv = nn.Conv2d(3, 6, stride=2, bias=bias, **sizes).to(SHORT).to(DEVICE)
    fast = fuse_layers(copy.deepcopy(conv).float())
    return conv.double(), fast, torch.randn(2, 3, 9, 12, device=DEVICE).to(SHORT)


@pytest.mark.parametrize("padding", [0, 1, 2, 3])
@pytest.mark.parametrize("side", [3, 4, 7])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_stem_on_blocks_of_pixels_is_that_of_torch(side, padding, layout, monkeypatch) -> None:
    monkeypatch.setattr(fused, "runs_kernels", lambda maps: True)
    conv, fast, maps = made_stem(kernel_size=side, padding=padding)
    assert type(fast) is StemConv
    maps = maps.contiguous(memory_format=layout)
    expected, found = conv(maps.double()), fast(maps)
    assert found.dtype == SHORT
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)
    grad = torch.randn(expected.shape, device=DEVICE).to(SHORT)
    expected.backward(grad.double())
    found.backward(grad)
    torch.testing.assert_close(fast.weight.grad.double(), conv.weight.grad, rtol=1e-5, atol=1e-5)


def test_a_stem_of_many_filters_has_the_same_gradient(monkeypatch) -> None:
    monkeypatch.setattr(fused, "runs_kernels", lambda maps: True)
    grads = []
    for limit in (kernels_of_stem.LARGEST_SUMS, 1):
        monkeypatch.setattr(kernels_of_stem, "LARGEST_SUMS", limit)
        torch.manual_seed(0)
        _, fast, maps = made_stem(kernel_size=7, padding=3, bias=False)
        fast(maps).float().square().sum().backward()
        grads.append(fast.weight.grad)
    torch.testing.assert_close(*grads, rtol=1e-2, atol=0.1)  # torch's own sum is rounded to SHORT
    assert not torch.equal(*grads)


def test_sums_of_several_programs_are_those_of_all_pixels(monkeypatch) -> None:
    monkeypatch.setattr(fused, "runs_kernels", lambda maps: True)
    monkeypatch.setattr(kernels_of_stem, "PIXELS", 16)
    monkeypatch.setattr(kernels_of_stem, "PROGRAMS", 2)  # for 60 pixels: two tiles each
    conv, fast, maps = made_stem(kernel_size=3, padding=1)
    grad = torch.randn(2, 6, 5, 6, device=DEVICE).to(SHORT)
    conv(maps.double()).backward(grad.double())
    fast(maps).backward(grad)
    torch.testing.assert_close(fast.weight.grad.double(), conv.weight.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_blocks_hold_the_pixels_of_padded_images(channels) -> None:
    images = torch.randn(2, channels, 5, 7, device=DEVICE)
    extended = 8 * -(-channels // 2)
    blocks = kernels_of_stem.make_blocks(images, 2, 4, 5, 6, extended, torch.float32)
    padded = torch.nn.functional.pad(images, (4, 1, 2, 3))
    expected = fused.merge_blocks(padded)
    assert torch.equal(blocks[:, : 4 * channels], expected)
    assert not blocks[:, 4 * channels :].any()


@pytest.mark.parametrize("change", ["float32", "gradient"])
def test_a_stem_is_torchs_own_in_float32_and_if_images_need_a_gradient(change, monkeypatch) -> None:
    monkeypatch.setattr(fused, "runs_kernels", lambda maps: True)
    monkeypatch.setattr(fused, "convolve_stem", None)
    _, fast, maps = made_stem(kernel_size=7, padding=3)
    maps = maps.float() if change == "float32" else maps.requires_grad_()
    fast.to(maps.dtype)(maps)


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


@pytest.mark.parametrize(
    ("version", "expected"), [("2.6.0+cu124", False), ("2.10.1", False), ("2.11.0", True)]
)
def test_layers_are_fused_only_with_versions_of_triton_that_were_tested(
    version: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)(version))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert can_fuse(torch.device("cuda")) == expected


def test_weights_are_converted_once_in_a_forward_pass_and_anew_in_the_next(monkeypatch) -> None:
    monkeypatch.setattr(fused, "runs_kernels", lambda maps: True)
    model = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.Conv2d(8, 8, 3, bias=False))
    fast = fuse_layers(copy.deepcopy(model).to(memory_format=torch.channels_last))
    maps = torch.randn(2, 8, 5, 5)
    seen: list[Tensor | None] = []
    fast[1].register_forward_pre_hook(lambda conv, _: seen.append(conv.cast))
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(fast(maps), model(maps), rtol=2e-2, atol=2e-2)
        assert torch.equal(seen[-1], model[1].weight.bfloat16())
        assert fast[0].cast is None
        assert fast[1].cast is None
        for network in (model, fast):
            nn.init.constant_(network[0].weight, 0.25)


def test_weights_are_not_converted_outside_of_training_or_autocast(monkeypatch) -> None:
    monkeypatch.setattr(fused, "runs_kernels", lambda maps: True)
    model = fuse_layers(nn.Sequential(nn.Conv2d(8, 8, 1, bias=False)))
    monkeypatch.setattr(fused, "copy_all", None)
    model(torch.randn(2, 8, 5, 5))
    with torch.autocast("cpu", torch.bfloat16):
        model.eval()(torch.randn(2, 8, 5, 5))


def test_the_mean_over_all_pixels_is_that_of_torch_with_a_gradient_in_the_format_of_the_maps(
    monkeypatch,
) -> None:
    monkeypatch.setattr(fused, "runs_kernels", lambda maps: True)
    maps = torch.randn(2, 6, 4, 3, device=DEVICE).to(memory_format=torch.channels_last)
    grads = []
    for pool in (nn.AdaptiveAvgPool2d(1), fuse_layers(nn.AdaptiveAvgPool2d(1))):
        leaf = maps.clone().requires_grad_()
        torch.testing.assert_close(pool(leaf), maps.mean((2, 3), keepdim=True))
        pool(leaf).square().sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads)
    assert type(pool) is fused.GlobalPool
    assert grads[1].is_contiguous(memory_format=torch.channels_last)
    assert type(fuse_layers(nn.AdaptiveAvgPool2d(2))) is nn.AdaptiveAvgPool2d
