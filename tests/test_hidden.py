"""Manifold Mixup: mixing at a module is mixing by hand, at one place, and leaves nothing behind."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from icmixup import draw_cutmix, draw_mixup, mix_hidden, mix_inputs
from icmixup.hidden import hidden_modules, mix_somewhere

LABELS = torch.tensor([0, 1, 2, 0, 1])


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.AvgPool2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)
    )


@pytest.fixture
def images() -> Tensor:
    return torch.randn(5, 2, 6, 6, generator=torch.Generator().manual_seed(1))


def mixed_at(model: nn.Sequential, place: int, images: Tensor, weight: Tensor, partner: Tensor) -> Tensor:
    """The same by hand: run to the module, mix, run on."""
    features = model[:place](images)
    weight = weight.reshape(-1, *(1 for _ in features.shape[1:]))
    scores: Tensor = model[place:](weight * features + (1 - weight) * features[partner])
    return scores


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("place", range(6))
def test_mixing_at_a_module_is_mixing_its_input_by_hand(
    model: nn.Sequential, images: Tensor, place: int
) -> None:
    pairs = draw_mixup(LABELS, 1.0, mode="elem", generator=torch.Generator().manual_seed(2))
    with mix_hidden(model[place], pairs):
        actual = model(images)
    torch.testing.assert_close(actual, mixed_at(model, place, images, pairs.lam, pairs.partner))


def test_only_the_first_input_is_mixed() -> None:
    pairs = draw_mixup(LABELS, 1.0, mode="elem")
    module, a, b = nn.Bilinear(3, 4, 2), torch.randn(5, 3), torch.randn(5, 4)
    with mix_hidden(module, pairs):
        torch.testing.assert_close(module(a, b), module.forward(mix_inputs(a, pairs), b))


def test_hook_is_gone_after_the_context(model: nn.Sequential, images: Tensor) -> None:
    clean, pairs = model(images), draw_mixup(LABELS, lam=0.5)
    with mix_hidden(model[2], pairs), mix_somewhere((model[0], model[1]), pairs):
        assert hooks(model) == 3
        assert not model(images).equal(clean)
    assert hooks(model) == 0
    assert model(images).equal(clean)


def test_hook_is_gone_after_an_exception(model: nn.Sequential, images: Tensor) -> None:
    clean, pairs = model(images), draw_mixup(LABELS, lam=0.5)
    for context in (mix_hidden(model[2], pairs), mix_somewhere(tuple(model[:3]), pairs)):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), context:
            model[5](model[:2](images))
        assert hooks(model) == 0
    assert model(images).equal(clean)


def test_gradient_flows_to_both_images_of_a_pair(model: nn.Sequential, images: Tensor) -> None:
    pairs = draw_mixup(LABELS, partner=torch.tensor([1, 0, 3, 2, 4]), lam=0.25)
    images.requires_grad_()
    with mix_hidden(model[5], pairs):
        scores = model(images)
    (gradient,) = torch.autograd.grad(scores[0].sum(), images)
    reached = gradient.flatten(1).any(dim=1).tolist()
    assert reached == [True, True, False, False, False]


def test_somewhere_is_exactly_one_place_and_each_as_often(model: nn.Sequential, images: Tensor) -> None:
    generator, places = torch.Generator().manual_seed(3), (0, 2, 5)
    pairs = draw_mixup(LABELS, 1.0, mode="elem", generator=generator)
    by_hand = [mixed_at(model, place, images, pairs.lam, pairs.partner) for place in places]
    chosen = Counter[int]()
    for _ in range(300):
        with mix_somewhere(tuple(model[place] for place in places), pairs, generator):
            actual = model(images)
        matches = [n for n, scores in enumerate(by_hand) if torch.allclose(actual, scores, atol=1e-6)]
        assert len(matches) == 1
        chosen.update(matches)
    assert stats.chisquare([chosen[n] for n in range(3)]).pvalue > 1e-4


def test_generator_alone_decides_the_place(model: nn.Sequential, images: Tensor) -> None:
    pairs, runs = draw_mixup(LABELS, lam=0.5), []
    for seed in range(2):
        torch.manual_seed(seed)
        generator, scores = torch.Generator().manual_seed(4), []
        for _ in range(8):
            with mix_somewhere(tuple(model[:4]), pairs, generator):
                scores.append(model(images))
        runs.append(torch.stack(scores))
    assert runs[0].equal(runs[1])


def test_modules_are_found_by_name_or_are_the_children_but_the_last(model: nn.Sequential) -> None:
    assert hidden_modules(model) == tuple(model[:5])
    model.hidden = ("1", "5")
    assert hidden_modules(model) == (model[1], model[5])


def test_bad_input_is_named_in_the_error(model: nn.Sequential, images: Tensor) -> None:
    pairs = draw_mixup(LABELS, lam=0.5)
    with (
        pytest.raises(
            ValueError, match=r"no modules to mix at; name some, as hidden=\(model.layer1, model.layer2\)"
        ),
        mix_somewhere((), pairs),
    ):
        pass
    with pytest.raises(ValueError, match=r"Linear has no modules to mix at; pass hidden=\(module, \.\.\.\)"):
        hidden_modules(nn.Linear(2, 2))
    boxes = draw_cutmix(LABELS, 1.0, (6, 6))
    with (
        pytest.raises(
            ValueError, match=r"images have shape \(5, 16\) but the pairs' weight has shape \(5, 6, 6\)"
        ),
        mix_hidden(model[5], boxes),
    ):
        model(images)
