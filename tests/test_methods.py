"""Every method: a row of choices, beside the same steps written out, and trained on a tiny set."""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from icmixup import (
    AXES,
    METHODS,
    InfiniteClassLoss,
    Method,
    Mixer,
    Pairs,
    cached_backward,
    draw_cutmix,
    draw_either,
    draw_mixup,
    draw_remix,
    draw_virtual,
    fit_temperature,
    infinite_class_loss,
    mix_inputs,
    mix_targets,
    mixed_accuracy,
    training_loss,
)
from icmixup.hidden import mix_somewhere
from icmixup.pairs import leave_unmixed

B, C, SIZE = 12, 4, (6, 6)
COUNTS = torch.tensor([60, 20, 6, 1])
SPELLINGS = (
    "erm mixup ic-mixup ic-mixup-c ic-mixup-p regmixup ic-regmixup remix ic-remix cutmix ic-cutmix "
    "mixup-cutmix ic-mixup-cutmix manifold ic-manifold ic-mixup-centred "
    "ic-mixup-cutmix-centred ic-mixup-sources ic-mixup-classes "
    "balanced balanced-mixup balanced-mixup-cutmix balanced-regmixup balanced-ic-regmixup "
    "balanced-ic-regmixup-cutmix erm-adjusted regmixup-adjusted ic-regmixup-adjusted "
    "focal ldam ldam-drw erm-drw ic-balanced-mixup ic-balanced-mixup-cutmix"
)
EVERY_METHOD = pytest.mark.parametrize("name", METHODS)
PLAIN = {"erm", "balanced", "erm-adjusted", "focal", "ldam", "ldam-drw", "erm-drw"}  # without mixing
ADJUSTED = {"erm-adjusted": "erm", "regmixup-adjusted": "regmixup", "ic-regmixup-adjusted": "ic-regmixup"}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(144, C))


@pytest.fixture
def images() -> Tensor:
    return torch.randn(B, 1, *SIZE, generator=seeded(1))


@pytest.fixture
def labels() -> Tensor:
    return torch.arange(B) % C


# What each row is, written out


def soft(scores: Tensor, targets: Tensor) -> Tensor:
    return -(targets * scores.log_softmax(dim=1)).sum(dim=1).mean()


def contrast(**choice: Any) -> Callable[[Tensor, Tensor, torch.Generator], Tensor]:
    return lambda scores, targets, _: infinite_class_loss(scores, targets, **choice)


def weighed(alpha: float) -> Callable[[Tensor, Tensor, torch.Generator], Tensor]:
    def loss(scores: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
        virtual = draw_virtual(COUNTS, 1024, alpha, generator)
        return infinite_class_loss(scores, targets, class_weights=1 / COUNTS, virtual=virtual)

    return loss


def softly(scores: Tensor, targets: Tensor, _: torch.Generator) -> Tensor:
    return soft(scores, targets)


def balanced(scores: Tensor, targets: Tensor, _: torch.Generator) -> Tensor:
    return soft(scores + COUNTS.log(), targets)


def mixup(alpha: float) -> Callable[[Tensor, torch.Generator], Pairs]:
    return lambda labels, generator: draw_mixup(labels, alpha, mode="batch", generator=generator)


def remix(labels: Tensor, generator: torch.Generator) -> Pairs:
    return draw_remix(labels, 0.2, COUNTS, kappa=3, tau=0.5, generator=generator)


def cutmix(labels: Tensor, generator: torch.Generator) -> Pairs:
    return draw_cutmix(labels, 1.0, SIZE, generator=generator)


def either(labels: Tensor, generator: torch.Generator, alpha: float = 0.2) -> Pairs:
    return draw_either(labels, alpha, SIZE, cutmix_alpha=1.0, switch_prob=0.5, generator=generator)


# name: draw, loss of the mixed images, whether the clean ones count
WRITTEN_OUT: dict[str, tuple[Any, Any, bool]] = {
    "mixup": (mixup(0.2), softly, False),
    "ic-mixup": (mixup(0.2), contrast(), False),
    "ic-mixup-c": (mixup(0.2), contrast(axes=("class",)), False),
    "ic-mixup-p": (mixup(0.2), contrast(axes=("pair",)), False),
    "regmixup": (mixup(20.0), softly, True),
    "ic-regmixup": (mixup(20.0), contrast(), True),
    "remix": (remix, softly, False),
    "ic-remix": (remix, contrast(), False),
    "cutmix": (cutmix, softly, False),
    "ic-cutmix": (cutmix, contrast(), False),
    "mixup-cutmix": (either, softly, False),
    "ic-mixup-cutmix": (either, contrast(), False),
    "ic-mixup-centred": (mixup(0.2), contrast(centred=True), False),
    "ic-mixup-cutmix-centred": (either, contrast(centred=True), False),
    "ic-mixup-sources": (mixup(0.2), contrast(axes=("class",), negatives=("sources",)), False),
    "ic-mixup-classes": (mixup(0.2), contrast(axes=("class",), negatives=("classes",)), False),
    "balanced-mixup": (mixup(0.2), balanced, False),
    "balanced-mixup-cutmix": (either, balanced, False),
    "balanced-regmixup": (mixup(20.0), balanced, True),
    "balanced-ic-regmixup": (mixup(1.0), contrast(), True),
    "balanced-ic-regmixup-cutmix": (partial(either, alpha=1.0), contrast(), True),
    "ic-balanced-mixup": (mixup(0.2), weighed(0.2), False),
    "ic-balanced-mixup-cutmix": (either, weighed(0.2), False),
}


def test_methods_are_spelled_as_the_design_says() -> None:
    assert list(METHODS) == SPELLINGS.split()
    assert len(METHODS) == 34
    assert set(METHODS) - set(WRITTEN_OUT) == {*PLAIN, *ADJUSTED, "manifold", "ic-manifold"}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_a_row_is_its_draw_its_loss_and_its_clean_part(
    model: nn.Module, images: Tensor, labels: Tensor, name: str, seed: int
) -> None:
    draw, loss, clean = WRITTEN_OUT[name]
    generator = seeded(seed)
    pairs = draw(labels, generator)
    expected = loss(model(mix_inputs(images, pairs)), mix_targets(labels, pairs, C), generator)
    if clean:
        adjusted = METHODS[name].class_sizes in ("adjust", "adjust-clean")
        expected = expected + F.cross_entropy(model(images) + COUNTS.log() * adjusted, labels)
    actual = training_loss(model, images, labels, METHODS[name], COUNTS, generator=seeded(seed))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("name", ["manifold", "ic-manifold"])
def test_manifold_rows_mix_somewhere_inside(
    model: nn.Sequential, images: Tensor, labels: Tensor, name: str
) -> None:
    loss = contrast() if name == "ic-manifold" else softly
    for hidden in (None, (model[3],)):
        generator = seeded()
        pairs = draw_mixup(labels, 2.0, generator=generator)
        with mix_somewhere(hidden or tuple(model[:3]), pairs, generator):
            scores = model(images)
        expected = loss(scores, mix_targets(labels, pairs, C), generator)
        actual = training_loss(model, images, labels, name, generator=seeded(), hidden=hidden)
        torch.testing.assert_close(actual, expected)


def test_manifold_counts_clean_images_too(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    both = replace(METHODS["manifold"], clean_weight=0.5)
    expected = training_loss(model, images, labels, "manifold", generator=seeded()) + 0.5 * F.cross_entropy(
        model(images), labels
    )
    torch.testing.assert_close(training_loss(model, images, labels, both, generator=seeded()), expected)


def test_a_model_that_changes_its_inputs_in_place_has_the_same_loss_on_clean_images(
    model: nn.Sequential, images: Tensor, labels: Tensor
) -> None:
    class Normalise(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return images.sub_(0.5).mul_(2)

    both, hidden = replace(METHODS["manifold"], clean_weight=0.5), (model[3],)
    expected = training_loss(model, (images - 0.5) * 2, labels, both, generator=seeded(), hidden=hidden)
    changing = nn.Sequential(Normalise(), *model)
    actual = training_loss(changing, images, labels, both, generator=seeded(), hidden=hidden)
    torch.testing.assert_close(actual, expected)


def test_erm_is_cross_entropy_and_balanced_is_that_of_scores_plus_log_counts(
    model: nn.Module, images: Tensor, labels: Tensor
) -> None:
    expected = F.cross_entropy(model(images), labels)
    torch.testing.assert_close(training_loss(model, images, labels, "erm"), expected)
    total = torch.zeros(())
    for scores, label in zip(model(images), labels, strict=True):
        shares = [n * score.exp() for n, score in zip(COUNTS, scores, strict=True)]
        total = total - torch.log(shares[int(label)] / sum(shares))
    torch.testing.assert_close(training_loss(model, images, labels, "balanced", COUNTS), total / B)


@pytest.mark.parametrize("tau", [0.0, 0.5, 2.0])
def test_tau_scales_the_log_counts_of_logit_adjustment(
    model: nn.Module, images: Tensor, labels: Tensor, tau: float
) -> None:
    method = replace(METHODS["balanced"], adjust_tau=tau)
    expected = F.cross_entropy(model(images) + tau * COUNTS.log(), labels)
    torch.testing.assert_close(training_loss(model, images, labels, method, COUNTS), expected)


@pytest.mark.parametrize("tau", [0.5, 2.0])
@pytest.mark.parametrize(
    "method",
    [
        *(METHODS[name] for name in ("balanced-mixup", "balanced-regmixup", "balanced-ic-regmixup")),
        Method(draw="mixup", axes=AXES, class_sizes="adjust"),
    ],
)
def test_tau_log_n_is_the_logarithm_of_n_to_the_tau_in_every_term(
    model: nn.Module, images: Tensor, labels: Tensor, method: Method, tau: float
) -> None:
    scaled = replace(method, adjust_tau=tau)
    expected = training_loss(model, images, labels, method, COUNTS**tau, generator=seeded())
    actual = training_loss(model, images, labels, scaled, COUNTS, generator=seeded())
    torch.testing.assert_close(actual, expected)


def test_focal_loss_has_the_factor_of_lin_et_al(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    p = model(images).softmax(dim=1)[torch.arange(B), labels]
    expected = (-((1 - p) ** 2) * p.log()).mean()  # their Eq. 4, gamma = 2
    torch.testing.assert_close(training_loss(model, images, labels, "focal"), expected)


def test_every_class_of_smoothed_labels_has_its_own_focal_factor(
    model: nn.Module, images: Tensor, labels: Tensor
) -> None:
    method = replace(METHODS["focal"], label_smoothing=0.2)
    expected = torch.zeros(())
    for p, label in zip(model(images).softmax(dim=1), labels, strict=True):
        for c in range(C):
            share = 0.8 * (c == int(label)) + 0.2 / C
            expected = expected - share * (1 - p[c]) ** 2 * p[c].log() / B
    torch.testing.assert_close(training_loss(model, images, labels, method), expected)


class ToFloat32(nn.Module):
    def forward(self, scores: Tensor) -> Tensor:
        return scores.float()


@EVERY_METHOD
@pytest.mark.parametrize("shares", [False, True])
def test_half_precision_scores_have_the_loss_of_the_same_scores_in_float32(
    name: str, shares: bool, labels: Tensor
) -> None:
    images = (3 * torch.randn(B, 1, C, generator=seeded(1))).bfloat16()
    model = nn.Sequential(nn.Identity(), nn.Flatten())  # the mixed images are the scores
    targets = 0.9 * F.one_hot(labels, C) + 0.1 / C if shares else labels
    actual, expected = (
        training_loss(
            nn.Sequential(model, to),
            images,
            targets,
            METHODS[name].at(1),
            COUNTS,
            generator=seeded(),
            hidden=(model,),
        )
        for to in (nn.Identity(), ToFloat32())
    )
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_focal_loss_has_finite_gradients_where_an_image_is_certain() -> None:
    scores = torch.tensor([[60.0, -60.0], [0.0, 3.0]], requires_grad=True)
    method = replace(METHODS["focal"], focal_gamma=0.5)
    training_loss(nn.Identity(), scores, torch.tensor([0, 1]), method).backward()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()


def test_ldam_is_the_loss_of_its_authors_code(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """LDAMLoss of Cao et al. (2019) with max_m=0.5 and s=30, whose scores are 30 cosines here."""
    scores = model(images)
    margins = 1 / COUNTS.double() ** 0.25
    margins = margins * (0.5 / margins.max())
    at_label = F.one_hot(labels, C).bool()
    expected = F.cross_entropy(torch.where(at_label, scores - 30 * margins[None], scores), labels)
    torch.testing.assert_close(training_loss(model, images, labels, "ldam", COUNTS).double(), expected)


@pytest.mark.parametrize(("name", "first"), [("ldam-drw", "ldam"), ("erm-drw", "erm")])
def test_deferred_weights_enter_after_four_fifths_of_training(
    model: nn.Module, images: Tensor, labels: Tensor, name: str, first: str
) -> None:
    assert METHODS[name].at(159 / 200) == METHODS[first]
    late = METHODS[name].at(160 / 200)
    assert late == METHODS[name].at(1.0)
    assert late.class_sizes == "effective"
    assert METHODS["erm"].at(0.0) == METHODS["erm"]
    with pytest.raises(ValueError, match=r"only after 0.8 of training; pass method.at\(epoch / epochs\)"):
        training_loss(model, images, labels, name, COUNTS)


@pytest.mark.parametrize(("name", "plain"), ADJUSTED.items())
def test_methods_that_adjust_after_training_train_as_the_plain_ones(
    model: nn.Module, images: Tensor, labels: Tensor, name: str, plain: str
) -> None:
    for tau in (1.0, 1.5):
        method = replace(METHODS[name], adjust_tau=tau)
        assert method.at(0.0) == method.at(1.0) == METHODS[plain]
        refusal = rf"pass method.at\(0\), .* adjust_scores\(scores, class_counts, {tau:g}\) at test time"
        with pytest.raises(ValueError, match=refusal):
            training_loss(model, images, labels, method, COUNTS)


# Weights of small classes are nearly 1 / n; those of large ones are nearly equal.
@pytest.mark.parametrize("counts", [COUNTS, torch.tensor([60_000, 20_000, 6_000, 1_000])])
def test_class_weights_are_the_inverse_effective_numbers_of_cui_et_al(
    model: nn.Module, images: Tensor, labels: Tensor, counts: Tensor
) -> None:
    labels = labels.clamp(max=2)  # not all classes are in the batch
    weights = [(1 - 0.9999) / (1 - 0.9999**n) for n in counts.tolist()]
    weight = torch.tensor([w / sum(weights) * C for w in weights])
    expected = F.cross_entropy(model(images), labels, weight=weight)
    actual = training_loss(model, images, labels, METHODS["erm-drw"].at(1), counts)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


@EVERY_METHOD
def test_every_method_trains(name: str, labels: Tensor) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(144, C))
    images = torch.randn(C, 1, *SIZE)[labels] + 0.3 * torch.randn(
        B, 1, *SIZE
    )  # one pattern a class, and noise
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def loss(seed: int) -> Tensor:
        return training_loss(model, images, labels, METHODS[name].at(0), COUNTS, generator=seeded(seed))

    before = sum(loss(seed).item() for seed in range(8)) / 8
    for step in range(25):
        optimizer.zero_grad()
        loss(step + 8).backward()
        optimizer.step()
    after = sum(loss(seed).item() for seed in range(8)) / 8
    assert after < 0.9 * before
    accuracy = (model(images).argmax(dim=1) == labels).float().mean()
    assert accuracy > 0.7 or name == "ic-mixup-p"  # alone, it is blind to a constant per class


@EVERY_METHOD
def test_labels_may_be_integers_or_shares(
    model: nn.Module, images: Tensor, labels: Tensor, name: str
) -> None:
    method = METHODS[name].at(1)
    expected = training_loss(model, images, labels, method, COUNTS, generator=seeded())
    for other in (
        labels.int(),
        labels.to(torch.uint8),
        labels.to(torch.uint16),
        F.one_hot(labels, C),
        F.one_hot(labels, C).float(),
    ):
        actual = training_loss(model, images, other, method, COUNTS, generator=seeded())
        torch.testing.assert_close(actual, expected)


@EVERY_METHOD
def test_generator_alone_decides(model: nn.Module, images: Tensor, labels: Tensor, name: str) -> None:
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        method = METHODS[name].at(1)
        losses.append(training_loss(model, images, labels, method, COUNTS, generator=seeded(3)))
        assert torch.get_rng_state().equal(before)
    assert losses[0].equal(losses[1])


@pytest.mark.parametrize("name", ["erm", "mixup", "ic-mixup", "ic-remix", "manifold", "ic-balanced-mixup"])
def test_a_batch_of_one_image_and_rows_of_numbers_will_do(name: str) -> None:
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, C))
    for number in (1, 3):
        loss = training_loss(model, torch.randn(number, 7), torch.arange(number), name, COUNTS)
        assert loss.isfinite()


# The numbers of a row


@pytest.mark.parametrize(
    "choice",
    [
        {"temperature": 0.3},
        {"duplicates": "ignore"},
        {"duplicates": "positive"},
        {"negatives": ("pairs", "classes")},
    ],
    ids=str,
)
def test_choices_of_the_loss_reach_it(
    model: nn.Module, images: Tensor, labels: Tensor, choice: dict[str, Any]
) -> None:
    pairs = draw_mixup(labels, 0.2, generator=seeded())
    scores, targets = model(mix_inputs(images, pairs)), mix_targets(labels, pairs, C)
    method = replace(METHODS["ic-mixup"], **choice)
    actual = training_loss(model, images, labels, method, generator=seeded())
    torch.testing.assert_close(actual, infinite_class_loss(scores, targets, **choice))
    assert actual != infinite_class_loss(scores, targets)


@pytest.mark.parametrize("axes", [(), ("class", "pair")])
def test_label_smoothing_reaches_clean_and_mixed_targets(
    model: nn.Module, images: Tensor, labels: Tensor, axes: tuple[str, ...]
) -> None:
    method = Method(draw="mixup", axes=axes, clean_weight=0.5, label_smoothing=0.2)
    pairs = draw_mixup(labels, 0.2, generator=seeded())
    targets = mix_targets(labels, pairs, C, label_smoothing=0.2)
    scores = model(mix_inputs(images, pairs))
    expected = infinite_class_loss(scores, targets, axes) if axes else soft(scores, targets)
    expected = expected + 0.5 * soft(model(images), F.one_hot(labels, C) * 0.8 + 0.2 / C)
    torch.testing.assert_close(training_loss(model, images, labels, method, generator=seeded()), expected)


@pytest.mark.parametrize("num_virtual", [0, 7])
def test_label_smoothing_only_changes_the_temperature_of_the_class_axis(
    model: nn.Module, images: Tensor, labels: Tensor, num_virtual: int
) -> None:
    method = Method(draw="mixup", axes=("class",), num_virtual=num_virtual)
    smoothed, sharper = replace(method, label_smoothing=0.2), replace(method, temperature=1 / 0.8)
    actual, expected, other = (
        training_loss(model, images, labels, form, COUNTS, generator=seeded())
        for form in (smoothed, sharper, method)
    )
    torch.testing.assert_close(actual, expected)
    assert actual != other


@pytest.mark.parametrize("mode", ["elem", "pair"])
@pytest.mark.parametrize("draw", ["mixup", "remix", "cutmix", "either"])
def test_mode_and_numbers_reach_the_draw(
    model: nn.Module, images: Tensor, labels: Tensor, draw: Any, mode: Any
) -> None:
    numbers = {"cutmix_alpha": 0.4, "switch_prob": 0.8, "kappa": 2.0, "tau": 0.9}
    method = Method(draw=draw, alpha=0.7, mode=mode, prob=0.6).with_settings(**numbers)
    for seed in range(6):
        generator, choice = seeded(seed), {"mode": mode}
        if draw == "mixup":
            pairs = draw_mixup(labels, 0.7, generator=generator, **choice)
        elif draw == "remix":
            pairs = draw_remix(labels, 0.7, COUNTS, kappa=2.0, tau=0.9, generator=generator, **choice)
        elif draw == "cutmix":
            pairs = draw_cutmix(labels, 0.7, SIZE, generator=generator, **choice)
        else:
            pairs = draw_either(
                labels, 0.7, SIZE, cutmix_alpha=0.4, switch_prob=0.8, generator=generator, **choice
            )
        pairs = leave_unmixed(pairs, 0.6, generator)
        expected = soft(model(mix_inputs(images, pairs)), mix_targets(labels, pairs, C))
        actual = training_loss(model, images, labels, method, COUNTS, generator=seeded(seed))
        torch.testing.assert_close(actual, expected)


def test_infinite_class_without_mixing_is_balanced_softmax_of_the_batch(
    model: nn.Module, images: Tensor
) -> None:
    labels = torch.tensor([0] * 7 + [1] * 3 + [2, 3])
    method = replace(METHODS["ic-mixup-c"], prob=0.0)
    counts = torch.bincount(labels).float()
    expected = F.cross_entropy(model(images) + counts.log(), labels) + counts[labels].log().mean()
    torch.testing.assert_close(training_loss(model, images, labels, method), expected)


def test_one_joint_forward_gives_the_same_loss_where_images_do_not_meet(
    model: nn.Module, images: Tensor, labels: Tensor
) -> None:
    calls = []
    model.register_forward_pre_hook(lambda _, args: calls.append(len(args[0])))
    for name in ("regmixup", "ic-regmixup"):
        apart, joint = METHODS[name], replace(METHODS[name], joint=True)
        losses = [training_loss(model, images, labels, m, generator=seeded()) for m in (apart, joint)]
        torch.testing.assert_close(*losses)
    assert calls == [B, B, 2 * B] * 2


def test_batch_norm_sees_clean_and_mixed_images_apart_unless_joint(images: Tensor, labels: Tensor) -> None:
    """The paper's two forwards, or the one of RegMixup's authors."""
    seen = []
    for joint in (False, True):
        model = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(36, C))
        training_loss(model, images, labels, replace(METHODS["regmixup"], joint=joint), generator=seeded())
        seen.append(int(model[0].num_batches_tracked))
    assert seen == [2, 1]


def test_virtual_pairs_without_class_counts_are_of_all_classes_alike(
    model: nn.Module, images: Tensor, labels: Tensor
) -> None:
    method = replace(METHODS["ic-mixup"], num_virtual=16)
    generator = seeded()
    pairs = draw_mixup(labels, 0.2, generator=generator)
    virtual = draw_virtual(torch.ones(C), 16, 0.2, generator)
    expected = infinite_class_loss(
        model(mix_inputs(images, pairs)), mix_targets(labels, pairs, C), virtual=virtual
    )
    torch.testing.assert_close(training_loss(model, images, labels, method, generator=seeded()), expected)


def test_logit_adjustment_reaches_the_infinite_class_loss(
    model: nn.Module, images: Tensor, labels: Tensor
) -> None:
    method = replace(METHODS["ic-mixup"], class_sizes="adjust")
    pairs = draw_mixup(labels, 0.2, generator=seeded())
    scores, targets = model(mix_inputs(images, pairs)), mix_targets(labels, pairs, C)
    expected = infinite_class_loss(scores + COUNTS.log(), targets)
    actual = training_loss(model, images, labels, method, COUNTS, generator=seeded())
    torch.testing.assert_close(actual, expected)


def test_a_method_is_found_by_its_name(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    by_row = training_loss(model, images, labels, METHODS["ic-mixup"], generator=seeded())
    assert training_loss(model, images, labels, "ic-mixup", generator=seeded()).equal(by_row)


def test_a_method_cannot_change() -> None:
    with pytest.raises(FrozenInstanceError):
        METHODS["erm"].alpha = 1.0  # type: ignore[misc]


# Bad input

BAD_CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "near name": (
        r"no method 'icmixup'; did you mean ic-mixup.*the methods are erm, mixup, ic-mixup",
        {"method": "icmixup"},
    ),
    "far name": (r"no method 'zzz'; the methods are erm, mixup, ic-mixup", {"method": "zzz"}),
    "empty batch": (r"labels have shape \(0,\); expected at least one image", {"labels": torch.arange(0)}),
    "no counts for remix": (
        r"this method depends on class sizes; pass class_counts, \(C,\) training images of each class",
        {"method": "remix", "class_counts": None},
    ),
    "no counts for balanced": (r"pass class_counts", {"method": "balanced", "class_counts": None}),
    "no counts for margins": (r"pass class_counts", {"method": "ldam", "class_counts": None}),
    "no counts for weights": (r"pass class_counts", {"method": "ic-balanced-mixup", "class_counts": None}),
    "counts of no shape": (
        r"class_counts have shape \(\); expected \(C,\), one size per class",
        {"class_counts": torch.tensor(3)},
    ),
    "zeros in remix": (
        r"class_counts of classes \[2\] are not positive.*count them as 1",
        {"method": "ic-remix", "class_counts": torch.tensor([5, 5, 0, 5])},
    ),
    "zeros in balanced": (
        r"class_counts of classes \[2\] are not positive.*takes their logarithm",
        {"method": "balanced", "class_counts": torch.tensor([5, 5, 0, 5])},
    ),
    "zeros in margins": (
        r"class_counts of classes \[3\] are not positive",
        {"method": "ldam", "class_counts": torch.tensor([5, 5, 5, 0])},
    ),
    "zeros in deferred weights": (
        r"class_counts of classes \[1\] are not positive",
        {"method": METHODS["erm-drw"].at(1), "class_counts": torch.tensor([5, 0, 5, 5])},
    ),
    "zeros in weights": (
        r"class_counts of classes \[0\] are not positive",
        {"method": "ic-balanced-mixup", "class_counts": torch.tensor([0, 5, 5, 5])},
    ),
    "infinite counts": (
        r"class_counts of classes \[1\] are not positive and finite",
        {"method": "balanced", "class_counts": torch.tensor([5, torch.inf, 5, 5])},
    ),
    "unknown counts": (
        r"class_counts of classes \[3\] are not positive and finite",
        {"method": "balanced", "class_counts": torch.tensor([5, 5, 5, torch.nan])},
    ),
    "labels too high": (
        r"labels range from 1 to 4, but the classes are 0 to 3",
        {"labels": torch.arange(B) % C + 1, "method": "mixup"},
    ),
    "clean labels too high": (
        r"labels range from 1 to 4, but the classes are 0 to 3",
        {"labels": torch.arange(B) % C + 1, "method": "erm"},
    ),
    "label that torch would skip": (
        r"labels range from -100 to -100, but the classes are 0 to 3",
        {"labels": torch.full((B,), -100), "method": "erm"},
    ),
    "shares of other classes": (
        r"labels have shape \(12, 12\); expected \(B, 4\)",
        {"labels": torch.eye(B), "method": "erm"},
    ),
    "float labels": (
        r"labels have dtype torch.float32 and shape \(12,\); expected \(B,\) integers",
        {"labels": torch.arange(B) % C + 0.5, "method": "erm"},
    ),
    "bytes for images": (
        r"images have dtype torch.uint8; mixing needs floating point",
        {"images": torch.zeros(B, 1, *SIZE, dtype=torch.uint8)},
    ),
    "flat images for cutmix": (
        r"size must be the last dimensions of the images.* got \(\); for signals",
        {"images": torch.zeros(B, 36), "method": "cutmix"},
    ),
}


@pytest.mark.parametrize(("words", "change"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_input_is_named_in_the_error(
    model: nn.Module, images: Tensor, labels: Tensor, words: str, change: dict[str, Any]
) -> None:
    given = {"images": images, "labels": labels, "method": "ic-mixup", "class_counts": COUNTS} | change
    with pytest.raises(ValueError, match=words):
        training_loss(model, **given)


SIZED = [
    name for name, m in METHODS.items() if m.draw == "remix" or m.margin or m.at(1).class_sizes != "none"
]


@pytest.mark.parametrize("name", SIZED)
def test_an_empty_class_in_counts_on_the_cpu_is_refused_on_any_device(
    model: nn.Module, images: Tensor, labels: Tensor, name: str
) -> None:
    counts = torch.tensor([5, 5, 0, 5])
    with pytest.raises(ValueError, match=r"class_counts of classes \[2\] are not positive"):
        training_loss(model.to("meta"), images.to("meta"), labels.to("meta"), METHODS[name].at(1), counts)


@pytest.mark.parametrize("counts", [COUNTS[:3], torch.cat([COUNTS, COUNTS])], ids=["short", "long"])
@EVERY_METHOD
def test_class_counts_of_another_length_are_never_taken(
    model: nn.Module, images: Tensor, labels: Tensor, name: str, counts: Tensor
) -> None:
    words = rf"{len(counts)} class_counts but scores of 4 classes|the classes are 0 to {len(counts) - 1}"
    with pytest.raises(ValueError, match=words):
        training_loss(model, images, labels, METHODS[name].at(1), counts)


BAD_ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "draw": (r"draw must be one of 'none', 'mixup', 'remix', 'cutmix', .* got 'cutmx'", {"draw": "cutmx"}),
    "class_sizes": (
        r"class_sizes must be one of 'none', 'adjust', 'adjust-clean', .* got 'ajust'",
        {"class_sizes": "ajust"},
    ),
    "negative tau": (r"adjust_tau must be a number of at least 0, got -1", {"adjust_tau": -1.0}),
    "tau without adjustment": (r"adjust_tau=2.0 has no effect .*class_sizes=", {"adjust_tau": 2.0}),
    "negative gamma": (r"focal_gamma must be a number of at least 0", {"focal_gamma": -0.5}),
    "margin of nothing": (r"margin=1.0 has no effect .*no axes, or", {"margin": 1.0, "axes": AXES}),
    "deferred nothing": (r"defer=0.5 has no effect .*\"effective\"", {"defer": 0.5}),
    "mode": (r"mode must be one of .* got 'sample'", {"mode": "sample"}),
    "axes": (
        r"axes must be a tuple of one or both of .* got \('class', 'image'\)",
        {"axes": ("class", "image")},
    ),
    "axes as text": (r"axes must be a tuple .* got 'class'", {"axes": "class"}),
    "axes as a list": (r"axes must be a tuple .* got \['class'\]", {"axes": ["class"]}),
    "axis twice": (r"axes must be a tuple", {"axes": ("pair", "pair")}),
    "negatives": (r"negatives must be one of .* got 'pairs'", {"axes": AXES, "negatives": "pairs"}),
    "duplicates": (r"duplicates must be one of .* got 'drop'", {"axes": AXES, "duplicates": "drop"}),
    "alpha zero": (r"alpha must be a positive number, got 0", {"alpha": 0}),
    "alpha nan": (r"alpha must be a positive number, got nan", {"alpha": math.nan}),
    "alpha infinite": (r"alpha must be a positive number, got inf", {"alpha": math.inf}),
    "alpha as text": (r"alpha must be a positive number, got '0.2'", {"alpha": "0.2"}),
    "alpha none": (r"alpha must be a positive number, got None", {"alpha": None}),
    "cutmix_alpha": (r"cutmix_alpha must be a positive", {"draw": "either", "cutmix_alpha": -1.0}),
    "temperature": (
        r"temperature must be a positive number, got inf",
        {"axes": AXES, "temperature": math.inf},
    ),
    "prob": (r"prob must be the probability .* got 1.5", {"prob": 1.5}),
    "prob true": (r"prob must be the probability .* got True", {"prob": True}),
    "prob nan": (r"prob must be the probability .* got nan", {"prob": math.nan}),
    "switch_prob": (r"switch_prob must be .* got -0.1", {"draw": "either", "switch_prob": -0.1}),
    "kappa": (r"kappa must be at least 1.* got 0.9", {"draw": "remix", "kappa": 0.9}),
    "tau": (r"tau must be .* got 2", {"draw": "remix", "tau": 2}),
    "label_smoothing": (r"label_smoothing must be .* got 1.0", {"label_smoothing": 1.0}),
    "label_smoothing nan": (r"label_smoothing must be .* got nan", {"label_smoothing": math.nan}),
    "clean_weight": (r"clean_weight must be .* got -1", {"clean_weight": -1.0}),
    "num_virtual": (r"num_virtual must be an integer .* got 1.5", {"axes": AXES, "num_virtual": 1.5}),
    "centred": (r"centred must be one of True, False, got 1", {"axes": AXES, "centred": 1}),
    "joint": (r"joint must be one of True, False, got 'yes'", {"clean_weight": 1.0, "joint": "yes"}),
    # Values that are fine on their own, but not together
    "axes without mixing": (
        r'axes=\(\'class\', \'pair\'\) contrasts mixed inputs, but draw="none" does not mix',
        {"draw": "none", "clean_weight": 1.0, "axes": AXES},
    ),
    "no loss": (r'draw="none" with clean_weight=0 has no loss', {"draw": "none"}),
    "weights without axes": (
        r"class_sizes='weigh' has no effect .*axes with \"pair\"",
        {"class_sizes": "weigh"},
    ),
    "weights without the pair axis": (
        r"class_sizes='weigh' has no effect",
        {"class_sizes": "weigh", "axes": ("class",)},
    ),
    "adjusting no clean inputs": (
        r"class_sizes='adjust-clean' has no effect .*clean_weight above 0",
        {"class_sizes": "adjust-clean", "axes": AXES},
    ),
    "virtual without axes": (r"num_virtual=5 has no effect", {"num_virtual": 5}),
    "virtual without the class axis": (r"num_virtual=5 has no effect", {"num_virtual": 5, "axes": ("pair",)}),
    "virtual without pairs": (
        r"num_virtual=5 has no effect .*negatives=\('classes',\)",
        {"num_virtual": 5, "axes": AXES, "negatives": ("classes",)},
    ),
    "negatives without axes": (r"negatives=.* has no effect", {"negatives": ("classes",)}),
    "negatives without the class axis": (
        r"negatives=.* has no effect",
        {"negatives": ("classes",), "axes": ("pair",)},
    ),
    "duplicates without axes": (r"duplicates='ignore' has no effect", {"duplicates": "ignore"}),
    "temperature without axes": (r"temperature=0.5 has no effect", {"temperature": 0.5}),
    "centred without the pair axis": (r"centred=True has no effect", {"centred": True, "axes": ("class",)}),
    "kappa without Remix": (r'kappa=2.0 has no effect .*draw="remix"', {"kappa": 2.0}),
    "tau without Remix": (r"tau=1.0 has no effect", {"tau": 1.0}),
    "switch_prob without a switch": (r"switch_prob=0.1 has no effect", {"switch_prob": 0.1}),
    "cutmix_alpha without a switch": (
        r"cutmix_alpha=2.0 has no effect",
        {"draw": "cutmix", "cutmix_alpha": 2.0},
    ),
    "joint without clean inputs": (r"joint=True has no effect", {"joint": True}),
    "joint in Manifold Mixup": (
        r"joint=True has no effect",
        {"draw": "manifold", "clean_weight": 1.0, "joint": True},
    ),
    "alpha without mixing": (
        r"alpha=1.0 has no effect",
        {"draw": "none", "clean_weight": 1.0, "alpha": 1.0},
    ),
    "mode without mixing": (r"mode='elem' has no", {"draw": "none", "clean_weight": 1.0, "mode": "elem"}),
    "prob without mixing": (r"prob=0.5 has no", {"draw": "none", "clean_weight": 1.0, "prob": 0.5}),
}


@pytest.mark.parametrize(("words", "choice"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_row_that_cannot_be_meant_is_refused(words: str, choice: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=words):
        Method(**{"draw": "mixup", **choice})


def test_every_field_of_a_row_is_validated() -> None:
    for entry in fields(Method):
        with pytest.raises(ValueError, match=f"^{entry.name} must be "):
            Method(**{"draw": "mixup", entry.name: object()})


@pytest.mark.parametrize("name", ["ldam-drw", "erm-adjusted", "mixup"])
def test_an_epoch_in_place_of_a_share_of_training_is_refused(name: str) -> None:
    """It would weigh classes from the second epoch on."""
    with pytest.raises(ValueError, match=r"progress must be the share of training .*epoch / epochs.* got 2"):
        METHODS[name].at(2)


@EVERY_METHOD
def test_one_setting_over_several_methods_changes_those_that_use_it(name: str) -> None:
    settings = {"alpha": 0.7, "kappa": 2.0, "temperature": 0.5, "label_smoothing": 0.1, "joint": True}
    changed = METHODS[name].with_settings(**settings)
    for entry in fields(Method):
        before, after = (getattr(method, entry.name) for method in (METHODS[name], changed))
        used = entry.name in settings and METHODS[name].uses(entry.name)
        assert after == (settings[entry.name] if used else before)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.5, "duplicates": "ignore", "axes": AXES},
        {"adjust_tau": 1.5, "class_sizes": "adjust"},
        {"adjust_tau": 1.5, "class_sizes": "adjust-clean", "clean_weight": 1.0},
        {"num_virtual": 9, "class_sizes": "weigh", "axes": ("pair", "class")},
    ],
    ids=str,
)
def test_settings_that_need_each_other_are_applied_together_in_any_order(settings: dict[str, Any]) -> None:
    expected = replace(METHODS["mixup"], **settings)
    backwards = dict(reversed(settings.items()))
    assert METHODS["mixup"].with_settings(**settings) == expected
    assert METHODS["mixup"].with_settings(**backwards) == expected


def test_a_seed_in_place_of_a_generator_is_named(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    calls: list[Callable[..., object]] = [
        lambda **source: training_loss(model, images, labels, "ic-manifold", **source),
        lambda **source: Mixer("ic-mixup", C, **source),
        lambda **source: draw_mixup(labels, **source),
        lambda **source: draw_mixup(labels, partner=torch.arange(B), **source),
        lambda **source: draw_virtual(torch.ones(C), 3, **source),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"got int; of a seed: torch.Generator\(\).manual_seed\(seed\)"):
            call(generator=0)


def test_arguments_of_another_type_are_named(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    with pytest.raises(TypeError, match=r"method must be a Method or a name of METHODS, got NoneType"):
        training_loss(model, images, labels, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"labels must be a torch.Tensor, got list"):
        training_loss(model, images, labels.tolist(), "mixup")
    calls: list[tuple[str, Callable[[], object]]] = [
        ("class_counts", lambda: training_loss(model, images, labels, "balanced", [5] * C)),
        ("class_counts", lambda: Mixer("ic-remix", C, [5] * C)),
        ("class_counts", lambda: draw_remix(labels, 0.2, [5] * C)),
        ("class_counts", lambda: draw_virtual([5] * C, 3)),
        ("partner", lambda: draw_mixup(labels, partner=list(range(B)))),
        ("class_weights", lambda: InfiniteClassLoss(class_weights=[1.0] * C)),
        ("class_weights", lambda: infinite_class_loss(torch.eye(2), torch.eye(2), class_weights=[1.0] * 2)),
        ("virtual", lambda: infinite_class_loss(torch.eye(2), torch.eye(2), virtual=[[1.0, 0.0]])),
        ("images", lambda: mix_inputs(images.tolist(), draw_mixup(labels))),
        ("scores", lambda: mixed_accuracy([[0.0, 1.0]], torch.tensor([[0.0, 1.0]]))),
        ("targets", lambda: mixed_accuracy(torch.eye(2), [[1.0, 0.0], [0.0, 1.0]])),
        ("scores", lambda: fit_temperature([[0.0, 1.0]], torch.tensor([1]))),
        ("labels", lambda: fit_temperature(torch.eye(2), [0, 1])),
    ]
    for name, call in calls:
        with pytest.raises(TypeError, match=rf"{name} must be a torch.Tensor, got list"):
            call()
    for method in ("erm", "ic-mixup", "ic-manifold"):
        with pytest.raises(TypeError, match=r"the inputs must be a torch.Tensor, or .* got ndarray"):
            training_loss(model, images.numpy(), labels, method)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"targets must be a torch.Tensor, got list"):
        infinite_class_loss(model(images), labels.tolist())


@pytest.mark.parametrize("name", ["erm", "balanced", "focal", "ldam", "ldam-drw", "erm-drw"])
@pytest.mark.parametrize(("rows", "given"), [(B, 1), (1, B), (B, B - 1)])
def test_another_number_of_labels_than_images_is_refused_and_never_broadcast(
    name: str, rows: int, given: int, model: nn.Module, images: Tensor, labels: Tensor
) -> None:
    counts = torch.arange(1, C + 1)
    with pytest.raises(ValueError, match=rf"{given} labels but {rows} rows of scores"):
        training_loss(model, images[:rows], labels[:given], METHODS[name].at(1.0), counts)


# Inputs and outputs other than one tensor


class TwoInputs(nn.Module):
    """Scores of two kinds of rows, as a tensor, as an object with logits, or as a dict."""

    def __init__(self, output: str = "tensor") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.output = nn.Linear(5, C), nn.Linear(3, C), output

    def forward(self, left: Tensor, right: Tensor, scale: float = 1.0) -> Any:
        scores = (self.left(left) + self.right(right)) * scale
        if self.output == "logits":
            return SimpleNamespace(loss=None, logits=scores)
        return {"logits": scores} if self.output == "dict" else scores


LEFT, RIGHT = torch.randn(B, 5, generator=seeded(3)), torch.randn(B, 3, generator=seeded(4))


@pytest.mark.parametrize("output", ["tensor", "logits", "dict"])
@pytest.mark.parametrize("name", ["erm", "ic-mixup", "remix", "regmixup", "ic-balanced-mixup"])
def test_tuples_and_dicts_are_mixed_tensor_by_tensor(labels: Tensor, name: str, output: str) -> None:
    class Joined(nn.Module):
        def forward(self, rows: Tensor) -> Any:
            return TwoInputs()(rows[:, :5], rows[:, 5:], 2.0)

    joined = torch.cat([LEFT, RIGHT], dim=1)
    expected = training_loss(Joined(), joined, labels, name, COUNTS, generator=seeded())
    model = TwoInputs(output)
    batches: list[Any] = [
        (LEFT, RIGHT, 2.0),
        [LEFT, RIGHT, 2.0],
        {"right": RIGHT, "left": LEFT, "scale": 2.0},
        UserDict(right=RIGHT, left=LEFT, scale=2.0),
    ]
    for batch in batches:
        actual = training_loss(model, batch, labels, name, COUNTS, generator=seeded())
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("inside", [(RIGHT,), [[RIGHT]], {"rows": RIGHT}], ids=["tuple", "list", "dict"])
def test_tensors_inside_an_entry_are_refused_since_they_would_stay_unmixed(
    labels: Tensor, inside: Any
) -> None:
    class Nested(nn.Module):
        def forward(self, left: Tensor, inside: Any) -> Tensor:
            while not isinstance(inside, Tensor):
                inside = inside["rows"] if isinstance(inside, dict) else inside[0]
            return TwoInputs()(left, inside)

    batch, words = (
        {"left": LEFT, "inside": inside},
        f"'inside' is a {type(inside).__name__} with tensors inside",
    )
    training_loss(Nested(), batch, labels, "erm")
    with pytest.raises(ValueError, match=words):
        training_loss(Nested(), batch, labels, "ic-mixup")
    with pytest.raises(ValueError, match=words):
        Mixer("ic-mixup", C)(batch, labels)
    with pytest.raises(ValueError, match=words):
        cached_backward(Nested(), batch, lambda scores: scores.sum(), B)


def test_one_joint_forward_of_a_dict(labels: Tensor) -> None:
    batch, method = {"left": LEFT, "right": RIGHT}, METHODS["regmixup"]
    losses = [
        training_loss(TwoInputs(), batch, labels, replace(method, joint=joint), generator=seeded())
        for joint in (False, True)
    ]
    torch.testing.assert_close(*losses)


class Tokens(nn.Module):
    """Token ids, embedded and scored; the mask is an integer tensor too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.encoder, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, C)

    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        features = self.encoder(self.embed(ids)).tanh() * mask[:, :, None]
        return SimpleNamespace(logits=self.head(features.mean(dim=1)))


def test_token_ids_are_mixed_at_a_hidden_layer_and_nowhere_else(labels: Tensor) -> None:
    model = Tokens()
    ids = torch.randint(20, (B, 6), generator=seeded(5))
    batch = {"ids": ids, "mask": torch.ones(B, 6, dtype=torch.int64)}
    for name in ("mixup", "ic-mixup", "regmixup"):
        with pytest.raises(
            ValueError, match=r"input 'ids' has dtype torch.int64.* hidden layer: .*ic-manifold"
        ):
            training_loss(model, batch, labels, name)
    loss = training_loss(model, batch, labels, "manifold", generator=seeded())
    pairs = draw_mixup(labels, 2.0, generator=seeded())
    scores = model.head(model.encoder(mix_inputs(model.embed(ids), pairs)).tanh().mean(dim=1))
    torch.testing.assert_close(loss, soft(scores, mix_targets(labels, pairs, C)))
    with pytest.raises(ValueError, match=r"images have dtype torch.int64; mixing needs floating point"):
        training_loss(model, batch, labels, "manifold", hidden=(model.embed,))


@pytest.mark.parametrize("output", [(torch.zeros(B, C), None), None, "scores"], ids=["tuple", "none", "text"])
def test_an_output_without_scores_is_named(images: Tensor, labels: Tensor, output: Any) -> None:
    class Odd(nn.Module):
        def forward(self, _: Tensor) -> Any:
            return output

    with pytest.raises(ValueError, match=rf"the model returned {type(output).__name__}; expected a \(B, C\)"):
        training_loss(Odd(), images, labels, "mixup")


def test_scores_of_pixels_are_refused(images: Tensor, labels: Tensor) -> None:
    with pytest.raises(ValueError, match=r"scores of shape \(12, 4, 4, 4\); expected \(B, C\)"):
        training_loss(nn.Conv2d(1, C, 3), images, labels, "mixup")


@pytest.mark.parametrize(
    ("shape", "size"),
    [((B, 40), (40,)), ((B, 2, 40), (40,)), ((B, 16, 40), (16, 40)), ((B, 1, 16, 40), (40,))],
    ids=["signal", "signal with channels", "spectrogram", "time of a spectrogram"],
)
def test_cutmix_of_signals_and_spectrograms_takes_a_size(
    shape: tuple[int, ...], size: tuple[int, ...], labels: Tensor
) -> None:
    torch.manual_seed(0)
    rows = torch.randn(shape)
    model = nn.Sequential(nn.Flatten(), nn.Linear(rows[0].numel(), C))
    actual = training_loss(model, rows, labels, "cutmix", generator=seeded(), size=size)
    pairs = draw_cutmix(labels, 1.0, size, generator=seeded())
    keeps = pairs.weight.reshape(B, *(1 for _ in shape[1 : len(shape) - len(size)]), *size)
    mixed = torch.where(keeps.expand(shape) == 1, rows, rows[pairs.partner])
    torch.testing.assert_close(actual, soft(model(mixed), mix_targets(labels, pairs, C)))


def test_a_size_that_is_not_the_images_is_refused(images: Tensor, labels: Tensor, model: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"images have shape .* but the pairs' weight has shape"):
        training_loss(model, images, labels, "cutmix", size=(6, 5))


def test_the_clean_term_alone_is_adjusted_for_class_sizes_in_balanced_ic_regmixup() -> None:
    generator = torch.Generator().manual_seed(3)
    images, labels = torch.randn(12, 5), torch.randint(4, (12,))
    counts = torch.tensor([50.0, 20.0, 5.0, 1.0])
    model = torch.nn.Linear(5, 4)
    loss = training_loss(model, images, labels, "balanced-ic-regmixup", counts, generator=generator)
    pairs = draw_mixup(labels, 1.0, generator=generator.manual_seed(3))
    mixed = infinite_class_loss(model(mix_inputs(images, pairs)), mix_targets(labels, pairs, 4))
    clean = torch.nn.functional.cross_entropy(model(images) + counts.log(), labels)
    torch.testing.assert_close(loss, mixed + clean)
