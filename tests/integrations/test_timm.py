"""With the real timm: its models in the lab, our loss behind its Mixup, our Mixup in its place."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from frameworks import C, digits, run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, default_collate

import icmixup as icm

timm = pytest.importorskip("timm")
from timm.data import Mixup  # noqa: E402
from timm.loss import SoftTargetCrossEntropy  # noqa: E402

from icmixup.integrations.timm import Mixup as OurMixup  # noqa: E402
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


def test_an_unknown_name_lists_similar_names_of_timm():
    with pytest.raises(ValueError, match="resnet50"):
        build_model("resnet500", 10, seed=0)


@pytest.mark.parametrize("mode", ["batch", "elem", "pair"])
@pytest.mark.parametrize("cutmix_alpha", [0.0, 1.0])
def test_the_loss_replaces_soft_target_cross_entropy(mode, cutmix_alpha):
    mixup = Mixup(mixup_alpha=0.4, cutmix_alpha=cutmix_alpha, mode=mode, label_smoothing=0.1, num_classes=5)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 64, 5))
    inputs, targets = mixup(torch.randn(8, 3, 8, 8), torch.randint(5, (8,)))
    for criterion in (SoftTargetCrossEntropy(), icm.InfiniteClassLoss()):
        model.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        assert loss.isfinite()
        assert model[1].weight.grad.abs().sum() > 0


def test_manifold_mixup_finds_modules_in_a_timm_resnet():
    model = build_model("resnet18.a1_in1k", 5, channels=3, seed=0)
    images, labels = torch.randn(6, 3, 64, 64), torch.randint(5, (6,))
    icm.training_loss(model, images, labels, "ic-manifold").backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("mode", ["batch", "elem", "pair"])
@pytest.mark.parametrize("alphas", [(0.4, 0.0), (0.0, 1.0), (0.4, 1.0)])
@pytest.mark.parametrize("number", [8, 7])
def test_our_mixup_mixes_pixels_and_labels_by_the_same_share(mode, alphas, number):
    torch.manual_seed(0)
    labels = torch.arange(number) % 5
    images = (
        F.one_hot(labels, 5).float()[:, :, None, None].expand(-1, -1, 8, 8)
    )  # an image that shows its label
    before = images.clone()
    inputs, targets = OurMixup(*alphas, mode=mode, num_classes=5)(images, labels)
    torch.testing.assert_close(inputs.mean(dim=(2, 3)), targets)
    assert torch.equal(images, before)
    assert not torch.equal(inputs, images)


def test_our_mixup_has_the_arguments_and_the_switch_of_timms():
    settings = {
        "mixup_alpha": 0.8,
        "cutmix_alpha": 1.0,
        "cutmix_minmax": None,
        "prob": 1.0,
        "switch_prob": 0.5,
    }
    settings |= {"mode": "batch", "correct_lam": True, "label_smoothing": 0.1, "num_classes": 5}
    settings |= {"multi_label": False}  # since timm 1.0.31
    mixup = OurMixup(**settings)  # as timm's train.py passes them
    assert isinstance(mixup, Mixup)
    images, labels = torch.randn(6, 3, 8, 8), torch.arange(6) % 5
    mixup.mixup_enabled = False
    inputs, targets = mixup(images, labels)
    assert torch.equal(inputs, images)
    torch.testing.assert_close(targets, F.one_hot(labels, 5) * 0.9 + 0.02)


def test_class_counts_turn_mixup_into_remix():
    labels = torch.tensor([0, 1] * 8)
    mixup = OurMixup(1.0, num_classes=2, class_counts=torch.tensor([100, 1]), mode="elem")
    targets = torch.cat([mixup(torch.randn(16, 1, 2, 2), labels)[1] for _ in range(20)])
    # Where the two classes meet and the rare image has more than half of the pixels, it gets the whole label.
    shares = targets[:, 1]
    assert not ((shares > 0.5) & (shares < 1)).any()


def collate_and_mix(mixup: OurMixup, samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return mixup(*default_collate(samples))


@pytest.mark.slow
def test_a_generator_reaches_workers_that_are_not_forked_as_it_reaches_forked_ones():
    from forked import forking_context  # which the ranks of this file do not find

    forking_context()  # whose server has imported torch
    data = TensorDataset(torch.randn(32, 3, 8, 8), torch.arange(32) % 5)
    targets = []
    for context in ("fork", "forkserver"):
        torch.manual_seed(0)
        mixup = OurMixup(num_classes=5, generator=torch.Generator().manual_seed(1))
        collate = partial(collate_and_mix, mixup)
        loader = DataLoader(data, 8, num_workers=2, collate_fn=collate, multiprocessing_context=context)
        targets.append([mixed for _, mixed in loader])
    torch.testing.assert_close(targets[0], targets[1])
    assert not any(torch.equal(first, other) for first in targets[0][:1] for other in targets[0][1:])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cutmix_minmax": (0.2, 0.8)}, "cutmix_minmax"),
        ({"correct_lam": False}, "correct_lam"),
        ({"multi_label": True}, "multi_label=True is not supported"),
        ({"class_counts": torch.ones(10)}, r"class_counts have shape \(10,\); expected \(1000,\)"),
        ({"mixup_alpha": 0.0}, "one must be positive"),
        ({"cutmix_alpha": 1.0, "class_counts": torch.ones(1000)}, "set cutmix_alpha=0"),
    ],
)
def test_what_our_mixup_does_not_support_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        OurMixup(**settings)


def one_step(images: Tensor, labels: Tensor, ranks: bool = False) -> tuple[nn.Module, nn.Module]:
    """Gradients of a timm network for one batch that is not mixed, under DDP if there are ranks."""
    torch.manual_seed(0)
    model = timm.create_model("test_vit", in_chans=1, num_classes=C, img_size=32)
    mixup = OurMixup(num_classes=C)
    mixup.mixup_enabled, criterion = False, mixup.criterion()
    inputs, targets = mixup(F.interpolate(images, 32), labels)
    wrapped = DistributedDataParallel(model) if ranks else model
    criterion(wrapped(inputs), targets).backward()
    return model, criterion


def test_two_ranks_have_the_gradient_of_one_batch_and_one_may_validate_alone(tmp_path):
    output = run_ranks("timm_step.py", str(tmp_path / "gradients.pt"))
    assert output.count("validation loss") == 1
    model, _ = one_step(*digits(16))
    found = torch.load(tmp_path / "gradients.pt")
    torch.testing.assert_close(found, [p.grad for p in model.parameters()], rtol=1e-4, atol=1e-6)


def test_a_classification_task_of_timm_takes_the_loss():
    task_module = pytest.importorskip("timm.task", reason="timm has tasks since 1.0.23")
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, C))
    mixup = OurMixup(num_classes=C)
    task = task_module.ClassificationTask(model, mixup.criterion(), verbose=False)
    inputs, targets = mixup(*digits(16))
    expected = icm.infinite_class_loss(model(inputs), targets)
    torch.testing.assert_close(task(inputs, targets)["loss"], expected)
    other = task_module.ClassificationTask(model, SoftTargetCrossEntropy(), verbose=False)
    other.criterion = icm.InfiniteClassLoss()  # as the guide does in train.py
    torch.testing.assert_close(other(inputs, targets)["loss"], expected)
