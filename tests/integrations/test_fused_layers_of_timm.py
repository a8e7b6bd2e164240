"""Fused layers in timm's networks: the same results, in training and evaluation."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from importlib import import_module

import pytest
import torch
from torch import nn

from icmixup.lab.models import build_model
from icmixup.lab.models.fused import (
    OLDEST_TORCH,
    DepthwiseConv,
    FusedBlock,
    FusedNorm,
    FusedPool,
    GlobalPool,
    NormPool,
    StemConv,
    fuse_layers,
)

timm = pytest.importorskip("timm")

# Families with BatchNorm that differ in their blocks: attention, anti-aliasing, other stems, drop path.
NETWORKS = (
    *(
        "tf_efficientnet_lite0",
        "efficientnet_b0",
        "mobilenetv2_050",
        "mobilenetv3_small_050",
        "mnasnet_small",
    ),
    *("resnet18.a1_in1k", "resnet26d", "resnet26t", "seresnet50", "ecaresnet26t", "resnetblur18"),
    *("resnext26ts", "skresnet18", "res2net50d", "wide_resnet50_2", "densenet121", "vgg11_bn", "regnety_002"),
    *("rexnet_100", "repvgg_a0", "ghostnet_050", "hardcorenas_a", "dla34", "hrnet_w18_small", "darknet17"),
    *("convnext_atto", "cspresnet50", "inception_v3", "nf_regnet_b0", "levit_128s", "mobileone_s0"),
)


def count(model: nn.Module, kind: type[nn.Module]) -> int:
    return sum(isinstance(module, kind) for module in model.modules())


def step(model: nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    """Scores of a training step, gradients, and the state after it."""
    torch.manual_seed(0)  # of dropout
    scores = model.train()(images)
    scores.square().mean().backward()
    grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
    return [scores, *grads, *model.state_dict().values()]


@pytest.mark.parametrize("name", [name for name in NETWORKS if name.split(".")[0] in timm.list_models()])
def test_a_fused_network_of_timm_computes_what_it_did_before(name) -> None:
    size = None if name.startswith("levit") else 96
    model = build_model(name, 5, seed=0, image_size=size)
    fast = fuse_layers(copy.deepcopy(model))
    images = torch.randn(2, 3, size or 224, size or 224)
    with torch.no_grad():
        assert torch.equal(model.eval()(images), fast.eval()(images))
    for one, other in zip(step(model, images), step(fast, images), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


KERNELS_BESIDE_LAYERS = """
import copy, sys, torch
from icmixup.lab.models import build_model, fused

fused.runs_kernels = lambda maps: True
torch.manual_seed(0)
model = build_model(sys.argv[1], 5, seed=0, image_size=32)
for module in model.modules():
    if isinstance(module, torch.nn.BatchNorm2d):
        torch.nn.init.uniform_(module.weight, 0.5, 1.5)
model = model.to(memory_format=torch.channels_last).train()
fast = fused.fuse_layers(copy.deepcopy(model))
images = torch.randn(4, 3, 32, 32).to(memory_format=torch.channels_last)
for network in (model, fast):
    network(images).square().mean().backward()
for (name, one), other in zip(model.named_parameters(), fast.parameters(), strict=True):
    error = (one.grad - other.grad).norm() / one.grad.norm()
    assert error < 1e-2, (name, error)
for one, other in zip(model.state_dict().values(), fast.state_dict().values(), strict=True):
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
"""


@pytest.mark.skipif(torch.__version__ < OLDEST_TORCH, reason="the kernels are not used there")
@pytest.mark.parametrize("name", ["resnet10t", "resnet18.a1_in1k", "resnet26"])
def test_the_kernels_train_a_resnet_of_timm_as_its_layers_do(name) -> None:
    """In Triton's interpreter, which has to be chosen before Triton is imported."""
    command = [sys.executable, "-c", KERNELS_BESIDE_LAYERS, name]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_other_blocks_of_the_same_name_compute_what_they_did_before() -> None:
    """The Bottleneck of timm's ResNetV2, as in its hybrids of a ResNet and a transformer."""
    layers = import_module("timm.layers")
    model = import_module("timm.models.resnetv2").ResNetV2(
        (1, 1, 1, 1),
        num_classes=5,
        preact=False,
        conv_layer=layers.create_conv2d,
        norm_layer=layers.BatchNormAct2d,
    )
    fast = fuse_layers(copy.deepcopy(model))
    images = torch.randn(2, 3, 64, 64)
    for one, other in zip(step(model, images), step(fast, images), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_drop_path_and_dropblock_are_kept() -> None:
    model = timm.create_model("resnet18", num_classes=5, drop_path_rate=0.5, drop_block_rate=0.2)
    fast = fuse_layers(copy.deepcopy(model))
    images = torch.randn(2, 3, 224, 224)
    for one, other in zip(step(model, images), step(fast, images), strict=True):
        torch.testing.assert_close(one, other)


def test_all_layers_of_the_networks_that_we_time_are_fused() -> None:
    resnet = fuse_layers(build_model("resnet50.a1_in1k", 5, seed=0))
    assert count(resnet, FusedBlock) == 16
    assert count(resnet, FusedNorm) == 53
    assert count(resnet, StemConv) == 1
    assert (count(resnet, NormPool), count(resnet, FusedPool), count(resnet, GlobalPool)) == (1, 0, 1)
    # Only the four projections are followed by no activation.
    assert sum(m.activation == "none" for m in resnet.modules() if isinstance(m, FusedNorm)) == 4
    lite = fuse_layers(build_model("tf_efficientnet_lite0", 5, seed=0))
    assert count(lite, DepthwiseConv) == 16
    assert count(lite, FusedNorm) == 49
    assert sum(m.activation == "relu6" for m in lite.modules() if isinstance(m, FusedNorm)) == 33
