"""Manifold Mixup: mixing at a module is mixing by hand, at one place, and leaves nothing behind."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from icmixup import draw_cutmix, draw_mixup, mix_hidden, mix_inputs, training_loss
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


# Faults that would be silent: mixed targets with scores that are not mixed, or not mixed once


class Blocks(nn.Module):
    """A ModuleList, which is never called itself, and a ReLU that is called after each of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.relu = nn.ReLU()
        self.unused = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, rows: Tensor) -> Tensor:
        for block in self.blocks:
            rows = self.relu(block(rows))
        scores: Tensor = self.head(rows)
        return scores


class Branches(nn.Module):
    """A stem, a block with a skip connection around it, an auxiliary head, two parallel branches, a neck."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.auxiliary = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.left, self.right, self.neck = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.stem(rows)
        rows = rows + self.block(rows).tanh()
        self.auxiliary(rows)
        rows = torch.cat([self.left(rows), self.right(rows)], dim=1).tanh()
        scores: Tensor = self.head(self.neck(rows).tanh())
        return scores


class Checkpointed(nn.Module):
    """A first layer, then a checkpointed pair of layers."""

    def __init__(self, reentrant: bool, enabled: bool = True) -> None:
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.reentrant, self.enabled = reentrant, enabled

    def segment(self, rows: Tensor) -> Tensor:
        scores: Tensor = self.head(self.inner(rows).tanh())
        return scores

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.first(rows).tanh()
        if not self.enabled:
            return self.segment(rows)
        scores: Tensor = checkpoint(self.segment, rows, use_reentrant=self.reentrant)
        return scores


ROWS = torch.randn(5, 8, generator=torch.Generator().manual_seed(5))


def test_every_batch_of_a_model_with_a_module_list_is_mixed() -> None:
    torch.manual_seed(0)
    model, generator = Blocks(), torch.Generator().manual_seed(6)
    clean = model(ROWS)
    pairs = draw_mixup(LABELS, partner=torch.tensor([1, 2, 3, 4, 0]), lam=0.5)
    modules = hidden_modules(model, ROWS)
    assert modules == tuple(model.blocks)
    for _ in range(60):
        with mix_somewhere(modules, pairs, generator):
            assert not torch.allclose(model(ROWS), clean, atol=1e-4)


@pytest.mark.parametrize("name", ["unused", "blocks"])
def test_a_module_that_is_never_called_is_an_error(name: str) -> None:
    model, pairs = Blocks(), draw_mixup(LABELS, lam=0.5)
    words = r"(Linear|ModuleList) was not called in the forward pass, so nothing was mixed"
    with pytest.raises(RuntimeError, match=words), mix_hidden(model.get_submodule(name), pairs):
        model(ROWS)
    with pytest.raises(RuntimeError, match=words):
        training_loss(model, ROWS, LABELS, "manifold", hidden=(model.blocks[0], model.get_submodule(name)))
    assert hooks(model) == 0


def test_a_module_that_is_called_twice_is_an_error() -> None:
    model, pairs = Blocks(), draw_mixup(LABELS, lam=0.5)
    with pytest.raises(RuntimeError, match=r"ReLU was called 2 times in the forward pass"):  # noqa: SIM117
        with mix_hidden(model.relu, pairs):
            model(ROWS)
    with pytest.raises(RuntimeError, match=r"Linear was called 2 times"):  # noqa: SIM117
        with mix_hidden(model.head, pairs):
            model(ROWS), model(ROWS)
    with pytest.raises(ValueError, match=r"hidden names 2 modules, but some are the same"):
        training_loss(model, ROWS, LABELS, "manifold", hidden=(model.head, model.head))
    assert hooks(model) == 0


def test_only_modules_that_carry_the_whole_image_are_found() -> None:
    torch.manual_seed(0)
    model = Branches()
    assert hidden_modules(model, ROWS) == (model.stem, model.neck)


def test_looking_for_modules_changes_neither_model_nor_random_state() -> None:
    class Noise(nn.Module):
        """Draws in evaluation mode too."""

        def forward(self, rows: Tensor) -> Tensor:
            return rows + 0 * torch.rand_like(rows)

    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), Noise(), nn.Linear(8, 3))
    model[2].eval()
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    assert hidden_modules(model, ROWS) == tuple(model[:4])
    assert [module.training for module in model] == [True, True, False, True, True]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.get_rng_state().equal(state)
    assert hooks(model) == 0


def test_looking_for_modules_loses_no_gradient_where_parametrized_weights_are_cached() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), weight_norm(nn.Linear(8, 3)))
    with parametrize.cached():
        training_loss(model, ROWS, LABELS, "manifold").backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_the_modules_of_a_model_are_looked_for_once() -> None:
    model, runs = Blocks(), Counter[str]()
    model.head.register_forward_pre_hook(lambda *_: runs.update(["head"]))
    for _ in range(3):
        training_loss(model, ROWS, LABELS, "manifold")
    assert runs["head"] == 1 + 4 + 3  # calls, exchanges at blocks and head, steps


def test_a_body_and_a_head_are_mixed_within_the_body() -> None:
    body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    model = nn.Sequential(OrderedDict(body=body, head=nn.Linear(8, 3)))
    assert hidden_modules(model, ROWS) == hidden_modules(model) == tuple(body)


def test_a_child_that_is_nearly_all_of_the_model_is_opened_and_a_container_with_a_forward_is_not() -> None:
    class Dense(nn.ModuleDict):
        """As a block of DenseNet: a ModuleDict that is called."""

        def forward(self, rows: Tensor) -> Tensor:
            for layer in self.values():
                rows = torch.cat([rows[:, :4], layer(rows)[:, :4]], dim=1)
            return rows

    body = nn.Sequential(nn.Linear(8, 8), Dense({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}), nn.Tanh())
    model = nn.Sequential(OrderedDict(body=body, drop=nn.Dropout(), head=nn.Linear(8, 2)))
    assert hidden_modules(model, ROWS) == (*body, model.drop)


def test_an_attribute_called_hidden_that_names_no_modules_is_not_taken_for_names() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.hidden, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, rows: Tensor) -> Tensor:
            scores: Tensor = self.head(self.hidden(self.stem(rows)).tanh())
            return scores

    model = Plain()
    assert hidden_modules(model, ROWS) == (model.stem, model.hidden)


def test_a_classifier_that_starts_at_zero_is_verified_once_it_has_learnt() -> None:
    model = Branches()
    nn.init.zeros_(model.head.weight)
    assert model.block in hidden_modules(model, ROWS)  # equal scores show nothing
    nn.init.normal_(model.head.weight)
    assert hidden_modules(model, ROWS) == (model.stem, model.neck)


def test_features_passed_by_name_are_mixed() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Bilinear(8, 4, 2)

        def forward(self, rows: Tensor, others: Tensor) -> Tensor:
            scores: Tensor = self.layer(input1=rows, input2=others)
            return scores

    model, others, pairs = Named(), torch.randn(5, 4), draw_mixup(LABELS, 1.0, mode="elem")
    with mix_hidden(model.layer, pairs):
        actual = model(ROWS, others)
    torch.testing.assert_close(actual, model(mix_inputs(ROWS, pairs), others))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_module_is_refused_since_it_would_run_again_unmixed(reentrant: bool) -> None:
    model = Checkpointed(reentrant)
    with pytest.raises(RuntimeError, match="Linear runs under gradient checkpointing"):
        training_loss(model, ROWS, LABELS, "manifold", hidden=(model.first, model.inner))
    assert hooks(model) == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_outside_the_checkpointed_segment_gradients_are_right(reentrant: bool) -> None:
    gradients = []
    for enabled in (False, True):
        torch.manual_seed(0)
        model, generator = Checkpointed(reentrant, enabled), torch.Generator().manual_seed(7)
        loss = training_loss(model, ROWS, LABELS, "manifold", generator=generator, hidden=(model.first,))
        loss.backward()
        gradients.append([weight.grad for weight in model.parameters()])
    torch.testing.assert_close(*gradients)


def compiled_whole(model: nn.Sequential) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def compiled_in_place(model: nn.Sequential) -> nn.Module:
    model.compile(backend="eager")
    return model


def compiled_inside(model: nn.Sequential) -> nn.Module:
    body = torch.compile(model, backend="eager")
    return nn.Sequential(body, nn.Identity())  # type: ignore[arg-type]


@pytest.mark.parametrize("compiled", [compiled_whole, compiled_in_place, compiled_inside])
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_a_compiled_model_is_refused_since_it_ignores_hooks(
    model: nn.Sequential, images: Tensor, compiled: Any, warm: bool
) -> None:
    network = compiled(model)
    if warm:
        network(images)
    with pytest.raises(ValueError, match=r"(OptimizedModule|Sequential) is compiled"):
        training_loss(network, images, LABELS, "manifold", hidden=(model[0], model[2]))
    if compiled is not compiled_inside:
        with pytest.raises(ValueError, match=r"(OptimizedModule|Sequential) is compiled"):
            training_loss(network, images, LABELS, "manifold")


def test_modules_compiled_one_by_one_can_be_mixed_at(model: nn.Sequential, images: Tensor) -> None:
    parts = nn.Sequential(*(torch.compile(part, backend="eager") for part in model))  # type: ignore[misc]
    for step in range(3):
        losses = [
            training_loss(network, images, LABELS, "manifold", generator=torch.Generator().manual_seed(step))
            for network in (model, parts)
        ]
        torch.testing.assert_close(*losses)


def test_a_hook_that_compiled_code_ignores_is_an_error(model: nn.Sequential, images: Tensor) -> None:
    """Also where training_loss cannot see it: a compiled function around the model."""
    run = torch.compile(lambda rows: model(rows), backend="eager")
    run(images)
    with pytest.raises(RuntimeError, match="was not called in the forward pass"):  # noqa: SIM117
        with mix_hidden(model[2], draw_mixup(LABELS, lam=0.5)):
            run(images)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_step_mixes_at_another_place_in_each_replay() -> None:
    torch.manual_seed(0)
    model = Blocks().cuda()
    rows, labels = ROWS.cuda(), LABELS.cuda()
    generator = torch.Generator("cuda").manual_seed(8)

    def step() -> Tensor:
        return training_loss(model, rows, labels, "manifold", generator=generator)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # finds the modules
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        loss = step()
    generator.manual_seed(9)
    replayed = []
    for _ in range(5):
        graph.replay()
        replayed.append(loss.item())
    generator.manual_seed(9)
    assert replayed == pytest.approx([step().item() for _ in range(5)])
    assert len(set(replayed)) == 5


def test_bad_input_is_named_in_the_error(model: nn.Sequential, images: Tensor) -> None:
    pairs = draw_mixup(LABELS, lam=0.5)
    with (
        pytest.raises(
            ValueError,
            match=r"no modules to mix at; pass some, for example hidden=\(model.layer1, model.layer2\)",
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


@pytest.mark.parametrize(
    ("hidden", "given"),
    [
        (nn.Sequential(nn.Tanh()), "Sequential"),
        (nn.Linear(2, 2), "Linear"),
        (("layer1",), "a tuple with str"),
        ("layer1", "str"),
        (iter([nn.Tanh()]), "list_iterator"),
    ],
    ids=["sequential", "module", "names", "name", "iterator"],
)
def test_a_module_in_place_of_a_tuple_is_refused_since_its_children_would_be_mixed_at(
    hidden: Any, given: str, model: nn.Sequential, images: Tensor
) -> None:
    with pytest.raises(TypeError, match=rf"hidden must be a tuple of modules .* got {given}"):
        training_loss(model, images, torch.zeros(len(images)).long(), "manifold", hidden=hidden)
