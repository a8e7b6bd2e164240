"""Beside the real torchvision: our loss behind its MixUp and CutMix, our augmentation beside its own."""

from __future__ import annotations

import pytest
import torch

import icmixup as icm

pytest.importorskip("torchvision")
from torchvision.transforms import v2


@pytest.mark.parametrize("transform", [v2.MixUp(num_classes=5), v2.CutMix(num_classes=5)])
def test_the_loss_takes_torchvisions_mixed_labels(transform):
    _, labels = transform(torch.randn(8, 3, 8, 8), torch.randint(5, (8,)))
    scores = torch.randn(8, 5, requires_grad=True)
    icm.infinite_class_loss(scores, labels).backward()
    assert scores.grad.isfinite().all()


def test_our_mixup_with_torchvisions_partner_and_lam_is_torchvisions():
    images, labels = torch.randn(8, 3, 8, 8), torch.randint(5, (8,))
    torch.manual_seed(0)
    theirs, their_targets = v2.MixUp(alpha=1.0, num_classes=5)(images, labels)
    # torchvision mixes lam x + (1 - lam) of the image before: find its lam in the targets.
    partner = torch.arange(8).roll(1)
    differ = (labels != labels[partner]).nonzero()[0]
    lam = their_targets[differ, labels[differ]].item()
    pairs = icm.draw_mixup(labels, partner=partner, lam=lam)
    torch.testing.assert_close(icm.mix_inputs(images, pairs), theirs)
    torch.testing.assert_close(icm.mix_targets(labels, pairs, 5), their_targets)
