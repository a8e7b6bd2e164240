"""Mixer: the same pairs, inputs and targets as the functions it is made of, in a loader and with its loss."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from forked import forking_context
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, default_collate

from icmixup import METHODS, Method, Mixer, mix_inputs, mix_targets, training_loss
from icmixup.objective import draw_pairs

B, C, SIZE = 12, 4, (6, 6)
COUNTS = torch.tensor([60, 20, 6, 1])
EXPRESSIBLE = [
    m for m, row in METHODS.items() if row.draw != "manifold" and (row.draw == "none" or not row.clean_weight)
]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def images() -> Tensor:
    return torch.randn(B, 1, *SIZE, generator=seeded(1))


@pytest.fixture
def labels() -> Tensor:
    return torch.arange(B) % C


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, C))


@pytest.mark.parametrize("name", [name for name in EXPRESSIBLE if METHODS[name].draw != "none"])
def test_inputs_and_targets_are_those_of_the_drawn_pairs(images: Tensor, labels: Tensor, name: str) -> None:
    pairs = draw_pairs(images, labels, METHODS[name], COUNTS.float(), seeded())
    inputs, targets = Mixer(name, C, COUNTS, generator=seeded())(images, labels)
    assert torch.equal(inputs, mix_inputs(images, pairs))
    assert torch.equal(targets, mix_targets(labels, pairs, C))


@pytest.mark.parametrize("name", EXPRESSIBLE)
def test_mixer_and_its_criterion_are_training_loss(
    model: nn.Module, images: Tensor, labels: Tensor, name: str
) -> None:
    method = replace(METHODS[name].at(1), label_smoothing=0.1)
    expected = training_loss(model, images, labels, method, COUNTS, generator=seeded())
    mixer = Mixer(method, C, COUNTS, generator=seeded())
    inputs, targets = mixer(images, labels)
    torch.testing.assert_close(mixer.criterion()(model(inputs), targets), expected)


@pytest.mark.parametrize("settings", [{"clean_weight": 2.0}, {"class_sizes": "adjust-clean"}], ids=str)
def test_the_criterion_of_a_method_that_does_not_mix_is_its_clean_term(
    model: nn.Module, images: Tensor, labels: Tensor, settings: dict[str, Any]
) -> None:
    method = replace(METHODS["erm"], label_smoothing=0.1, **settings)
    mixer = Mixer(method, C, COUNTS)
    inputs, targets = mixer(images, labels)
    expected = training_loss(model, images, labels, method, COUNTS)
    torch.testing.assert_close(mixer.criterion()(model(inputs), targets), expected)


@pytest.mark.parametrize("name", EXPRESSIBLE)
def test_on_integer_labels_the_criterion_is_cross_entropy(
    model: nn.Module, images: Tensor, labels: Tensor, name: str
) -> None:
    criterion = Mixer(METHODS[name].at(1), C, COUNTS).criterion().eval()
    scores = model(images)
    torch.testing.assert_close(criterion(scores, labels), F.cross_entropy(scores, labels))


@pytest.mark.parametrize("name", ["mixup", "ic-mixup", "balanced-mixup", "erm"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float16, torch.float64], ids=str)
def test_one_hot_targets_of_any_type_have_the_loss_of_float32_ones(
    name: str, dtype: torch.dtype, labels: Tensor
) -> None:
    scores = torch.randn(len(labels), C, generator=seeded())
    one_hot = F.one_hot(labels.long(), C)
    criterion = Mixer(name, C, COUNTS).criterion()
    actual = criterion(scores, one_hot.to(dtype))
    torch.testing.assert_close(actual, criterion(scores, one_hot.float()), check_dtype=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["balanced-mixup", "ldam", "ic-balanced-mixup"])
def test_a_criterion_in_half_precision_does_not_round_class_sizes(name: str, dtype: torch.dtype) -> None:
    """As Lightning's precision "16-true" converts it. float16 ends at 65,504."""
    scores, targets = torch.randn(2, 6, C, generator=seeded()).softmax(dim=2)
    counts = torch.tensor([70_001.0, 5003.0, 1017.0, 1.0])
    losses = []
    for converted in (torch.float32, dtype):
        torch.manual_seed(0)
        losses.append(Mixer(name, C, counts).criterion().to(converted)(scores, targets))
    assert torch.equal(*losses)


@pytest.mark.parametrize("name", ["mixup", "ic-mixup", "balanced-mixup", "erm"])
def test_targets_that_do_not_fit_the_scores_are_refused_by_every_criterion(name: str) -> None:
    criterion, scores = Mixer(name, C, COUNTS).criterion(), torch.zeros(6, C)
    with pytest.raises(ValueError, match=r"multi-label targets are not supported"):
        criterion(scores, torch.ones(6, C))
    for wrong in (torch.full((6, C + 1), 1 / (C + 1)), torch.full((1, C), 1 / C), torch.tensor(1)):
        with pytest.raises(ValueError, match=r"expected|one label per row"):
            criterion(scores, wrong)
    with pytest.raises(TypeError, match=r"labels must be a torch.Tensor, got list"):
        criterion(scores, [0] * 6)
    with pytest.raises(TypeError, match=r"scores must be a torch.Tensor, got list"):
        criterion(scores.tolist(), torch.zeros(6).long())


def test_without_a_mixing_method_inputs_stay_and_labels_become_targets(
    images: Tensor, labels: Tensor
) -> None:
    inputs, targets = Mixer(Method(draw="none", clean_weight=1.0, label_smoothing=0.2), C)(images, labels)
    assert inputs is images
    torch.testing.assert_close(targets, F.one_hot(labels, C) * 0.8 + 0.2 / C)


def test_timms_switch_turns_mixing_off_and_on_again(images: Tensor, labels: Tensor) -> None:
    mixer = Mixer(Method(draw="cutmix", label_smoothing=0.2, axes=("class",)), C)
    mixer.mixup_enabled = False
    inputs, targets = mixer(images, labels)
    assert inputs is images
    torch.testing.assert_close(targets, F.one_hot(labels, C) * 0.8 + 0.2 / C)
    mixer.mixup_enabled = True
    assert not torch.equal(mixer(images, labels)[0], images)


def test_labels_may_be_shares_and_inputs_a_dict(images: Tensor, labels: Tensor) -> None:
    expected, targets = Mixer("mixup", C, generator=seeded())(images, labels)
    mixer = Mixer("mixup", C, generator=seeded())
    inputs, again = mixer({"pixels": images, "flag": True}, F.one_hot(labels, C).float())
    assert torch.equal(again, targets)
    assert inputs["flag"] is True
    assert torch.equal(inputs["pixels"], expected)


class Collate:
    """default_collate, then the mixer; a class, because workers may need to pickle it."""

    def __init__(self, mixer: Mixer) -> None:
        self.mixer = mixer

    def __call__(self, batch: list[Any]) -> Any:
        return self.mixer(*default_collate(batch))


def first_lams(
    generator: torch.Generator | None, seed: int, workers: int, context: str | None = None
) -> list[list[float]]:
    """The lam of the first batch of each worker, in two epochs, of images that show their own label."""
    torch.manual_seed(seed)
    labels = torch.arange(64) % 2
    mixer = Mixer(Method(draw="mixup", alpha=1.0), 2, generator=generator)
    data = TensorDataset(labels.float()[:, None], labels)
    loader = DataLoader(
        data, 16, collate_fn=Collate(mixer), num_workers=workers, multiprocessing_context=context
    )
    epochs = []
    for _ in range(2):
        lams = []
        for inputs, targets in loader:
            torch.testing.assert_close(inputs, targets[:, 1:])  # pixels and labels are mixed alike
            lams.append(targets[targets < 1].max().item())
        epochs.append(lams)
    return epochs


# Processes that test mutants may not start others.
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("own", [True, False], ids=["own generator", "global generator"])
def test_in_a_loader_every_worker_and_epoch_draws_its_own_pairs_reproducibly(workers: int, own: bool) -> None:
    runs = [first_lams(seeded() if own else None, seed, workers) for seed in (1, 1, 2)]
    assert len({lam for epoch in runs[0] for lam in epoch}) == 8
    assert runs[0] == runs[1]
    if not own or workers:
        assert runs[0] != runs[2]


@pytest.mark.slow
def test_a_generator_reaches_workers_that_are_not_forked_as_it_reaches_forked_ones() -> None:
    forking_context()  # whose server has imported torch
    forked, served = (first_lams(seeded(), 1, 2, context) for context in ("fork", "forkserver"))
    assert forked == served


def test_a_copy_of_a_mixer_and_its_criterion_shares_one_generator_as_they_do() -> None:
    mixer = Mixer("ic-balanced-mixup", C, COUNTS, generator=seeded())
    copied, criterion = copy.deepcopy((mixer, mixer.criterion()))
    assert copied.generator is criterion.generator
    assert copied.generator is not mixer.generator


def test_the_number_of_classes_may_come_from_numpy(images: Tensor, labels: Tensor) -> None:
    """As labels.max() + 1 of an array does."""
    numbers = (pytest.importorskip("numpy").int64(C), C)
    found, expected = (Mixer("ic-mixup", n, generator=seeded())(images, labels) for n in numbers)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ic-mixup", "remix", "balanced", "ldam"])
def test_a_mixer_compiles_into_one_graph_and_takes_a_short_last_batch(
    name: str, images: Tensor, labels: Tensor
) -> None:
    torch.compiler.reset()
    mixer = Mixer(name, C, COUNTS)
    criterion = mixer.criterion()

    def step(images: Tensor, labels: Tensor) -> Tensor:
        inputs, targets = mixer(images, labels)
        return criterion(inputs.flatten(1)[:, :C], targets)

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    for number in (6, 5, 3):
        assert compiled(images[:number], labels[:number]).isfinite()


def test_a_mixer_can_be_pickled(images: Tensor, labels: Tensor) -> None:
    mixer = Mixer("ic-mixup", C, COUNTS)
    torch.manual_seed(3)
    expected = mixer(images, labels)
    torch.manual_seed(3)
    actual = pickle.loads(pickle.dumps(mixer))(images, labels)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("shape", [(B, 50), (B, 1, 50), (B, 8, 50)], ids=str)
def test_cutmix_of_a_signal_replaces_an_interval(shape: tuple[int, ...], labels: Tensor) -> None:
    signals = labels.float().reshape(B, *(1 for _ in shape[1:])).expand(shape)
    inputs, targets = Mixer("cutmix", C, size=(50,), generator=seeded())(signals, labels)
    first = inputs[labels == 0]
    assert set(inputs.unique().tolist()) <= {0.0, 1.0, 2.0, 3.0}  # pasted, not blended
    torch.testing.assert_close((first == 0).float().flatten(1).mean(dim=1), targets[labels == 0, 0])


BAD: dict[str, tuple[str, Any]] = {
    "manifold": (
        r"Mixer cannot express 'manifold': it mixes inside the model.*training_loss",
        lambda: Mixer("manifold", C),
    ),
    "regmixup": (
        r"Mixer cannot express 'regmixup': its loss also scores the clean inputs \(clean_weight=1\)",
        lambda: Mixer("regmixup", C),
    ),
    "unknown": (r"no method 'mixap'; did you mean mixup", lambda: Mixer("mixap", C)),
    "one class": (r"num_classes must be an integer of at least 2, got 1", lambda: Mixer("mixup", 1)),
    "classes as text": (r"num_classes must be .* got '10'", lambda: Mixer("mixup", "10")),  # type: ignore[arg-type]
    "no counts": (r"depends on class sizes; pass class_counts", lambda: Mixer("remix", C)),
    "other counts": (
        r"class_counts have shape \(4,\); expected \(5,\)",
        lambda: Mixer("remix", 5, COUNTS),
    ),
    "an empty class": (
        r"class_counts of classes \[1\] are not positive",
        lambda: Mixer("balanced-mixup", C, torch.tensor([5, 0, 5, 5])),
    ),
    "tokens": (
        r"input 'ids' has dtype torch.int64.*token ids are mixed at a hidden layer.*ic-manifold",
        lambda: Mixer("mixup", C)({"ids": torch.arange(8).reshape(2, 4)}, torch.tensor([0, 1])),
    ),
    "bytes": (
        r"images have dtype torch.uint8; mixing needs floating point",
        lambda: Mixer("mixup", C)(torch.zeros(2, 3, dtype=torch.uint8), torch.tensor([0, 1])),
    ),
    "nothing": (r"have no tensor", lambda: Mixer("mixup", C)({"flag": True}, torch.tensor([0, 1]))),
    "float labels": (
        r"labels have dtype torch.float32 and shape \(2,\)",
        lambda: Mixer("mixup", C)(torch.zeros(2, 3), torch.tensor([0.0, 1.0])),
    ),
}


@pytest.mark.parametrize(("words", "call"), BAD.values(), ids=BAD)
def test_bad_input_is_named_in_the_error(words: str, call: Any) -> None:
    with pytest.raises(ValueError, match=words):
        call()
