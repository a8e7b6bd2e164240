"""With the real torchvision: our loss behind its MixUp and CutMix, our transform in their place."""

from __future__ import annotations

import pytest
import torch
from frameworks import C, digits, small_network
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import icmixup as icm

pytest.importorskip("torchvision")
from torchvision import tv_tensors
from torchvision.transforms import v2

from icmixup.integrations.torchvision import Collate, MixBatch


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


def shown_labels(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images that show their own label: its one-hot row in every pixel."""
    labels = torch.arange(number) % 5
    return F.one_hot(labels, 5).float()[:, :, None, None].expand(-1, -1, 8, 8).contiguous(), labels


@pytest.mark.parametrize("method", ["ic-mixup", "ic-cutmix", "ic-mixup-cutmix"])
def test_pixels_and_labels_are_mixed_by_the_same_share(method):
    inputs, targets = MixBatch(method=method, num_classes=5)(*shown_labels(9))
    torch.testing.assert_close(inputs.mean(dim=(2, 3)), targets)


@pytest.mark.parametrize("shape", [(8, 8), (3, 8, 8), (4, 3, 8, 8)], ids=["grey", "colour", "video"])
def test_a_box_spans_height_and_width_alone(shape):
    torch.manual_seed(0)
    labels = torch.arange(16) % 2
    images = labels.float().reshape(-1, *(1 for _ in shape)).expand(-1, *shape).contiguous()
    inputs, targets = MixBatch(method="cutmix", num_classes=2)(images, labels)
    torch.testing.assert_close(inputs.flatten(1).mean(dim=1), targets[:, 1])
    frames = inputs.reshape(16, -1, 8, 8)
    torch.testing.assert_close(frames, frames[:, :1].expand_as(frames))
    mixed = frames[:, 0][(targets.amin(dim=1) > 0)]
    assert len(mixed)
    assert (mixed != mixed[:, :1]).any(), "a strip over the whole height"
    assert (mixed != mixed[:, :, :1]).any(), "a strip over the whole width"


def test_the_structure_of_a_batch_is_kept():
    images, labels = shown_labels(6)
    mix = MixBatch(num_classes=5)
    batch = {"image": tv_tensors.Image(images), "labels": labels, "name": ["a"] * 6}
    mixed = mix(batch)
    assert isinstance(mixed["image"], tv_tensors.Image)
    assert mixed["name"] == batch["name"]
    torch.testing.assert_close(mixed["image"].as_subclass(torch.Tensor).mean(dim=(2, 3)), mixed["labels"])
    nested = MixBatch(num_classes=5, labels_getter=lambda batch: batch[1]["class"])
    _, found = nested(images, {"class": labels, "index": torch.arange(6)})
    assert found["class"].shape == (6, 5)
    assert torch.equal(found["index"], torch.arange(6))


def test_it_follows_other_transforms_in_a_compose():
    pipeline = v2.Compose([v2.Normalize([0.5] * 5, [0.5] * 5), MixBatch(num_classes=5)])
    inputs, targets = pipeline(*shown_labels(6))
    torch.testing.assert_close(inputs.mean(dim=(2, 3)), targets * 2 - 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_collate_mixes_each_batch_anew_in_every_worker(workers):
    data = TensorDataset(*shown_labels(20))
    loader = DataLoader(data, 5, collate_fn=Collate(MixBatch(num_classes=5)), num_workers=workers)
    torch.manual_seed(0)
    batches = list(loader)
    for inputs, targets in batches:
        torch.testing.assert_close(inputs.mean(dim=(2, 3)), targets)
    lams = {round(targets.max().item(), 6) for _, targets in batches}
    assert len(lams) > 1, "every batch has the same lam"


def test_loss_falls_accuracy_is_above_chance_and_one_criterion_validates():
    torch.manual_seed(0)
    images, labels = digits(600)
    mix, model = MixBatch(num_classes=C), small_network()
    loader = DataLoader(TensorDataset(images[:500], labels[:500]), 50, shuffle=True, collate_fn=Collate(mix))
    criterion, optimizer = mix.criterion(), torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(6):
        for inputs, targets in loader:
            loss = criterion(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    scores = model(images[500:])
    assert (scores.argmax(dim=1) == labels[500:]).float().mean() > 0.6
    torch.testing.assert_close(criterion(scores, labels[500:]), F.cross_entropy(scores, labels[500:]))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.zeros(4).long()), "v2.ToDtype"),
        ((torch.zeros(4, 3, 8, 8), torch.zeros(3).long()), "one batch of 3 floating-point images"),
        ({"image": torch.zeros(4, 3, 8, 8)}, "labels_getter"),
        ((torch.zeros(4, 3, 8, 8), [0, 1, 2, 0]), "no labels found"),
        ((torch.zeros(3, 8, 8), torch.tensor(1)), r"got of shape \(\); collate the samples first"),
        ({"image": torch.zeros(3, 8, 8), "label": 1}, "got int; collate the samples first"),
    ],
)
def test_batches_that_cannot_be_mixed_are_named(batch, message):
    mix = MixBatch(num_classes=5)
    with pytest.raises(ValueError, match=message):
        mix(*batch) if isinstance(batch, tuple) else mix(batch)


@pytest.mark.parametrize("change", [torch.Tensor.int, lambda labels: labels[:, None][:, 0]])
def test_labels_that_are_not_in_the_batch_are_refused_since_they_would_stay_unmixed(change):
    images, labels = shown_labels(4)
    mix = MixBatch(num_classes=5, labels_getter=lambda batch: change(batch["class"]))
    with pytest.raises(ValueError, match=r"shape \(4,\) that is not in the batch"):
        mix({"image": images, "class": labels})


def test_masks_and_boxes_are_refused():
    images, labels = shown_labels(4)
    with pytest.raises(ValueError, match="contains Mask"):
        MixBatch(num_classes=5)(images, labels, tv_tensors.Mask(torch.zeros(4, 8, 8)))


def our_name(name: str) -> str:
    """ShearX to shear-x, AutoContrast to autocontrast."""
    return name[:-1].lower() + "-" + name[-1].lower() if name[-1] in "XY" else name.lower()


def test_autoaugment_has_torchvisions_policy_and_pixels() -> None:
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.autoaugment import AutoAugment, AutoAugmentPolicy, _apply_op

    from icmixup.lab.augment.autoaugment import POLICY, relative_strength
    from icmixup.lab.augment.trivial import KERNELS, DrawnOperations, apply_operations

    theirs = AutoAugment(AutoAugmentPolicy.CIFAR10)
    assert (
        tuple(
            tuple((our_name(name), chance, magnitude or 0) for name, chance, magnitude in sub)
            for sub in theirs.policies
        )
        == POLICY
    )
    images = torch.randint(1, 256, (3, 3, 32, 32), generator=torch.Generator().manual_seed(0)).byte()
    space = theirs._augmentation_space(10, (32, 32))
    for name, magnitude in sorted({(name, m or 0) for sub in theirs.policies for name, _, m in sub}):
        levels, _ = space[name]
        level = float(levels[magnitude]) if levels.ndim else 0.0
        wanted = torch.stack(
            [_apply_op(image, name, level, InterpolationMode.NEAREST, fill=None) for image in images]
        )
        strength = torch.full((3,), relative_strength(our_name(name), magnitude, 32, 32))
        operation = torch.full((3,), list(KERNELS).index(our_name(name)))
        # Geometric operations of torchvision move the pixels the other way, which its random sign makes even.
        found = [
            apply_operations(images, DrawnOperations(operation, sign * strength)).int() for sign in (1, -1)
        ]
        near = [float(((one - wanted.int()).abs() <= 1).float().mean()) for one in found]
        assert max(near) > 0.97, (name, magnitude, near)
