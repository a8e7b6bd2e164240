"""With the real timm: its models in the lab, our loss after its Mixup."""

from __future__ import annotations

import pytest
import torch

import icmixup as icm

timm = pytest.importorskip("timm")
from timm.data import Mixup  # noqa: E402
from timm.loss import SoftTargetCrossEntropy  # noqa: E402

from icmixup.lab.models import build_model  # noqa: E402


@pytest.mark.parametrize("name", ["resnet18.a1_in1k", "convnext_atto", "mobilenetv3_small_050"])
def test_a_timm_name_builds_timms_model_from_the_seed(name):
    first, again, other = (build_model(name, 7, channels=1, seed=seed) for seed in (0, 0, 1))
    images = torch.randn(2, 1, 64, 64)
    assert type(first) is type(timm.create_model(name, num_classes=7, in_chans=1))
    assert first(images).shape == (2, 7)
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert any((a != b).any() for a, b in zip(first.parameters(), other.parameters(), strict=True))


def test_an_unknown_name_offers_timms_nearest():
    with pytest.raises(ValueError, match="resnet50"):
        build_model("resnet500", 10, seed=0)


@pytest.mark.parametrize("mode", ["batch", "elem", "pair"])
@pytest.mark.parametrize("cutmix_alpha", [0.0, 1.0])
def test_the_loss_stands_in_for_soft_target_cross_entropy(mode, cutmix_alpha):
    mixup = Mixup(mixup_alpha=0.4, cutmix_alpha=cutmix_alpha, mode=mode, label_smoothing=0.1, num_classes=5)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 64, 5))
    inputs, targets = mixup(torch.randn(8, 3, 8, 8), torch.randint(5, (8,)))
    for criterion in (SoftTargetCrossEntropy(), icm.InfiniteClassLoss()):
        model.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        assert loss.isfinite()
        assert model[1].weight.grad.abs().sum() > 0


def test_manifold_mixup_finds_places_in_a_timm_resnet():
    model = build_model("resnet18.a1_in1k", 5, channels=3, seed=0)
    images, labels = torch.randn(6, 3, 64, 64), torch.randint(5, (6,))
    icm.training_loss(model, images, labels, "ic-manifold").backward()
    assert all(p.grad is not None for p in model.parameters())
