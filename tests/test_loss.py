"""The loss against hand-written loops, its symmetries, its precision, and its input validation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from icmixup import InfiniteClassLoss, draw_mixup, draw_virtual, infinite_class_loss, mix_targets
from icmixup.contrast.plain import target_keys

B, C, M = 7, 5, 3
AXIS = pytest.mark.parametrize("axis", ["class", "pair"])
DUPLICATES = pytest.mark.parametrize("duplicates", ["negative", "ignore", "positive"])
any_batch = settings(max_examples=25, deadline=None, derandomize=True, database=None)

# Every way to call it. Each option has tests of its own; what holds for all is tested over this table.
CHOICES: dict[str, dict[str, Any]] = {
    "paper": {},
    "class": {"axes": ("class",)},
    "pair": {"axes": ("pair",)},
    "sources": {"negatives": ("sources",)},
    "classes": {"negatives": ("classes",)},
    "pairs and classes": {"negatives": ("pairs", "classes")},
    "temperature": {"temperature": 0.3},
    "weighted": {"class_weights": torch.tensor([1.0, 2.0, 0.5, 4.0, 3.0]).double()},
    "virtual": {"virtual": torch.eye(C)[:M].double() * 0.25 + 0.15},
    "ignore": {"duplicates": "ignore"},
    "positive": {"duplicates": "positive"},
    "centred": {"centred": True},
    "ignore among classes": {"duplicates": "ignore", "negatives": ("classes",)},
    "positive among sources": {"duplicates": "positive", "negatives": ("sources",)},
}
EVERY_CHOICE = pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)


def make_batch(seed: int = 0, pairs: int = B, classes: int = C, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """float64 scores, and targets with a lam for each pair."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(pairs, classes, generator=generator, dtype=torch.float64) * scale
    labels = torch.randint(classes, (pairs,), generator=generator)
    lam = torch.rand(pairs, generator=generator, dtype=torch.float64)
    drawn = draw_mixup(labels, lam=lam, generator=generator)
    return scores, mix_targets(labels, drawn, classes)


def batch_with_duplicates() -> tuple[Tensor, Tensor]:
    """Pairs 0, 2, 5 share a classifier, 1 and 3 another, and 4 and 6 are one-hot, of one class."""
    half, third, pure = (
        torch.tensor(row, dtype=torch.float64)
        for row in ([0.5, 0.5, 0.0, 0.0, 0.0], [0.0, 0.7, 0.0, 0.0, 0.3], [0.0, 0.0, 1.0, 0.0, 0.0])
    )
    return make_batch(3)[0], torch.stack([half, third, half, third, pure, half, pure])


def dot(a: Tensor, b: Tensor) -> float:
    return sum(x * y for x, y in zip(a.tolist(), b.tolist(), strict=True))


def cross_entropy_by_hand(
    own: float, others: Sequence[float], equal: Sequence[float] = (), rule: str = "negative"
) -> float:
    """-log of the probability of the own one; `equal` are scores of its duplicates."""
    top = math.exp(own) + (sum(map(math.exp, equal)) if rule == "positive" else 0.0)
    total = math.exp(own) + sum(map(math.exp, others))
    total += sum(map(math.exp, equal)) if rule != "ignore" else 0.0
    return math.log(total) - math.log(top)


def class_axis_by_hand(
    scores: Tensor, targets: Tensor, more: Sequence[tuple[Tensor, float]] = (), rule: str = "negative"
) -> Tensor:
    """(B,); `more` are classifiers that have no image, each with its bias."""
    losses = []
    for i, image in enumerate(scores):
        candidates = [(targets[j], 0.0) for j in range(len(targets)) if j != i] + list(more)
        others = [
            dot(image, candidate) + bias for candidate, bias in candidates if not candidate.equal(targets[i])
        ]
        equal = [
            dot(image, candidate) + bias for candidate, bias in candidates if candidate.equal(targets[i])
        ]
        losses.append(cross_entropy_by_hand(dot(image, targets[i]), others, equal, rule))
    return torch.tensor(losses, dtype=torch.float64)


def pair_axis_by_hand(scores: Tensor, targets: Tensor, rule: str = "negative") -> Tensor:
    losses = []
    for i, classifier in enumerate(targets):
        candidates = [j for j in range(len(scores)) if j != i]
        others = [dot(scores[j], classifier) for j in candidates if not targets[j].equal(classifier)]
        equal = [dot(scores[j], classifier) for j in candidates if targets[j].equal(classifier)]
        losses.append(cross_entropy_by_hand(dot(scores[i], classifier), others, equal, rule))
    return torch.tensor(losses, dtype=torch.float64)


def among_classes_by_hand(scores: Tensor, targets: Tensor, negatives: str, rule: str = "negative") -> Tensor:
    losses = []
    for image, target in zip(scores, targets, strict=True):
        candidates = [c for c in range(len(target)) if negatives == "classes" or target[c] > 0]
        others = [image[c].item() for c in candidates if target[c] != 1]
        equal = [image[c].item() for c in candidates if target[c] == 1]
        losses.append(cross_entropy_by_hand(dot(image, target), others, equal, rule))
    return torch.tensor(losses, dtype=torch.float64)


def one_by_one(scores: Tensor, targets: Tensor, **choice: Any) -> Tensor:
    return infinite_class_loss(scores, targets, reduction="none", **choice)


# What is contrasted with what


def test_each_axis_is_the_loop_and_both_are_their_sum() -> None:
    scores, targets = make_batch()
    classes, pairs = class_axis_by_hand(scores, targets), pair_axis_by_hand(scores, targets)
    torch.testing.assert_close(one_by_one(scores, targets, axes=("class",)), classes)
    torch.testing.assert_close(one_by_one(scores, targets, axes=("pair",)), pairs)
    torch.testing.assert_close(one_by_one(scores, targets), classes + pairs)
    torch.testing.assert_close(one_by_one(scores, targets, axes=("pair", "class")), classes + pairs)


@EVERY_CHOICE
def test_sum_and_mean_are_those_of_the_losses_one_by_one(choice: dict[str, Any]) -> None:
    scores, targets = make_batch()
    losses = one_by_one(scores, targets, **choice)
    assert losses.shape == (B,)
    torch.testing.assert_close(infinite_class_loss(scores, targets, reduction="sum", **choice), losses.sum())
    torch.testing.assert_close(infinite_class_loss(scores, targets, **choice), losses.mean())


@pytest.mark.parametrize("negatives", ["sources", "classes"])
def test_original_classes_as_the_only_negatives_are_the_loop(negatives: str) -> None:
    scores, targets = make_batch()
    targets[4] = torch.eye(C)[1]  # a pair within one class has one source
    expected = among_classes_by_hand(scores, targets, negatives)
    actual = one_by_one(scores, targets, axes=("class",), negatives=(negatives,))
    torch.testing.assert_close(actual, expected)


def test_classes_that_only_label_smoothing_gives_a_share_are_not_sources() -> None:
    scores, targets = make_batch()
    targets[4] = torch.eye(C)[1]
    smoothed = 0.9 * targets + 0.1 / C
    sources = [
        [image[c].item() for c in range(C) if t[c] > 0] for image, t in zip(scores, targets, strict=True)
    ]
    expected = [
        cross_entropy_by_hand(dot(image, own), others)
        for image, own, others in zip(scores, smoothed, sources, strict=True)
    ]
    actual = one_by_one(scores, smoothed, axes=("class",), negatives=("sources",))
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64))


def test_original_classes_together_with_the_pairs_are_the_loop() -> None:
    scores, targets = make_batch()
    more = [(row, 0.0) for row in torch.eye(C).double()]
    actual = one_by_one(scores, targets, axes=("class",), negatives=("pairs", "classes"))
    torch.testing.assert_close(actual, class_axis_by_hand(scores, targets, more))


@pytest.mark.parametrize("negatives", [("sources",), ("classes",), ("pairs", "classes")])
def test_negatives_change_only_the_class_axis(negatives: tuple[str, ...]) -> None:
    scores, targets = make_batch()
    pair_axis = one_by_one(scores, targets, negatives=negatives) - one_by_one(
        scores, targets, axes=("class",), negatives=negatives
    )
    torch.testing.assert_close(pair_axis, pair_axis_by_hand(scores, targets))


def test_two_classes_suffice_for_sources() -> None:
    scores, targets = torch.randn(4, 2), torch.tensor([[0.1, 0.9], [0.5, 0.5], [0.8, 0.2], [0.6, 0.4]])
    both = [one_by_one(scores, targets, axes=("class",), negatives=(n,)) for n in ("sources", "classes")]
    torch.testing.assert_close(*both)


@EVERY_CHOICE
def test_temperature_divides_the_scores(choice: dict[str, Any]) -> None:
    scores, targets = make_batch()
    actual = one_by_one(scores, targets, **{**choice, "temperature": 0.25})
    torch.testing.assert_close(actual, one_by_one(scores * 4, targets, **{**choice, "temperature": 1.0}))


def test_virtual_classifiers_are_the_loop_and_weigh_as_much_as_the_batch() -> None:
    scores, targets = make_batch()
    virtual = draw_virtual(torch.tensor([9, 4, 3, 2, 1]), M, 1.0, torch.Generator().manual_seed(0))
    more = [(row, -math.log(M / B)) for row in virtual.double()]
    actual = one_by_one(scores, targets, axes=("class",), virtual=virtual)
    torch.testing.assert_close(actual, class_axis_by_hand(scores, targets, more))
    both = one_by_one(scores, targets, virtual=virtual)
    torch.testing.assert_close(both - actual, pair_axis_by_hand(scores, targets))
    with_classes = one_by_one(
        scores, targets, axes=("class",), virtual=virtual, negatives=("pairs", "classes")
    )
    more += [(row, 0.0) for row in torch.eye(C).double()]
    torch.testing.assert_close(with_classes, class_axis_by_hand(scores, targets, more))


def test_the_batch_once_more_as_virtual_pairs_adds_log_2() -> None:
    scores, targets = make_batch()
    for copies in (1, 5):
        doubled = one_by_one(scores, targets, axes=("class",), virtual=targets.repeat(copies, 1))
        plain = one_by_one(scores, targets, axes=("class",))
        torch.testing.assert_close(doubled, plain + math.log(2))


def test_class_weights_are_the_loop_on_the_pair_axis_only() -> None:
    scores, targets = make_batch()
    class_weights = torch.tensor([0.1, 1.0, 3.0, 0.5, 2.0], dtype=torch.float64)
    weights = [dot(target, class_weights) for target in targets]
    scaled = torch.tensor([weight * B / sum(weights) for weight in weights], dtype=torch.float64)
    expected = class_axis_by_hand(scores, targets) + scaled * pair_axis_by_hand(scores, targets)
    torch.testing.assert_close(one_by_one(scores, targets, class_weights=class_weights), expected)
    class_axis = one_by_one(scores, targets, axes=("class",), class_weights=class_weights)
    torch.testing.assert_close(class_axis, class_axis_by_hand(scores, targets))


# Pairs that share their classifier


@DUPLICATES
def test_duplicates_are_the_loop_on_either_axis(duplicates: str) -> None:
    scores, targets = batch_with_duplicates()
    actual = one_by_one(scores, targets, axes=("class",), duplicates=duplicates)
    torch.testing.assert_close(actual, class_axis_by_hand(scores, targets, rule=duplicates))
    actual = one_by_one(scores, targets, axes=("pair",), duplicates=duplicates)
    torch.testing.assert_close(actual, pair_axis_by_hand(scores, targets, rule=duplicates))


@DUPLICATES
def test_duplicates_among_classes_and_virtual_pairs_are_the_loop(duplicates: str) -> None:
    scores, targets = batch_with_duplicates()
    virtual = torch.stack([targets[1], targets[4], targets[0].roll(1)])
    more = [(row, 0.0) for row in torch.eye(C).double()] + [(row, -math.log(3 / B)) for row in virtual]
    actual = one_by_one(
        scores, targets, negatives=("pairs", "classes"), virtual=virtual, duplicates=duplicates
    )
    expected = class_axis_by_hand(scores, targets, more, duplicates)
    torch.testing.assert_close(actual, expected + pair_axis_by_hand(scores, targets, duplicates))


@DUPLICATES
@pytest.mark.parametrize("negatives", ["sources", "classes"])
def test_a_pure_pair_is_a_duplicate_of_its_class(negatives: str, duplicates: str) -> None:
    scores, targets = batch_with_duplicates()
    actual = one_by_one(scores, targets, axes=("class",), negatives=(negatives,), duplicates=duplicates)
    torch.testing.assert_close(actual, among_classes_by_hand(scores, targets, negatives, duplicates))


def test_counting_duplicates_as_positive_leaves_the_class_axis_gradient_as_it_is() -> None:
    """Equal targets are equal columns of S~: their probabilities are equal, and n of them add up to n p."""
    scores, targets = batch_with_duplicates()
    scores.requires_grad_()
    equals = torch.tensor([sum(row.equal(other) for other in targets) for row in targets])
    negative = one_by_one(scores, targets, axes=("class",))
    positive = one_by_one(scores, targets, axes=("class",), duplicates="positive")
    torch.testing.assert_close(positive, negative - equals.log())
    torch.testing.assert_close(
        torch.autograd.grad(positive.sum(), scores), torch.autograd.grad(negative.sum(), scores)
    )


def test_the_mean_over_positives_of_supcon_is_the_paper_itself() -> None:
    """Pair by pair on the class axis, and once averaged on the pair axis: equal targets, equal columns."""
    scores, targets = batch_with_duplicates()
    same = (targets[:, None] == targets).all(dim=2)
    mixed = scores @ targets.T
    rows = -(mixed.log_softmax(dim=1) * same).sum(dim=1) / same.sum(dim=1)
    torch.testing.assert_close(rows, one_by_one(scores, targets, axes=("class",)))
    columns = -(mixed.T.log_softmax(dim=1) * same).sum(dim=1) / same.sum(dim=1)
    own = one_by_one(scores, targets, axes=("pair",))
    torch.testing.assert_close(columns.mean(), own.mean())
    assert (columns - own).abs().max() > 0.1  # so the mean is needed


def test_without_duplicates_the_three_ways_agree() -> None:
    scores, targets = make_batch()
    assert len(targets.unique(dim=0)) == B
    for duplicates in ("ignore", "positive"):
        torch.testing.assert_close(
            one_by_one(scores, targets, duplicates=duplicates), one_by_one(scores, targets)
        )


@any_batch
@given(st.integers(1, 40), st.integers(1, 130), st.booleans(), st.integers(0, 10**6))
def test_keys_are_equal_exactly_where_targets_are(pairs: int, classes: int, turned: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(3, classes, generator=generator).softmax(dim=1)
    rows[1] = torch.nextafter(rows[0], torch.ones(()))  # the nearest float32
    which = torch.randint(3, (pairs,), generator=generator)
    targets = rows[which].T.contiguous().T if turned else rows[which]
    keys = target_keys(targets)
    assert torch.equal(keys[:, None] == keys, (targets[:, None] == targets).all(dim=2))


# Symmetries


@any_batch
@given(st.integers(1, 9), st.integers(2, 6), st.integers(0, 10**6))
def test_permuting_the_pairs_permutes_losses_and_gradient(pairs: int, classes: int, seed: int) -> None:
    scores, targets = make_batch(seed, pairs, classes)
    order = torch.randperm(pairs, generator=torch.Generator().manual_seed(seed))
    for duplicates in ("negative", "ignore", "positive"):
        straight, moved = scores.clone().requires_grad_(), scores[order].requires_grad_()
        losses = one_by_one(straight, targets, duplicates=duplicates)
        permuted = one_by_one(moved, targets[order], duplicates=duplicates)
        torch.testing.assert_close(permuted, losses[order])
        (straight_grad,) = torch.autograd.grad(losses.mean(), straight)
        (moved_grad,) = torch.autograd.grad(permuted.mean(), moved)
        torch.testing.assert_close(moved_grad, straight_grad[order])


@any_batch
@given(st.integers(2, 9), st.integers(2, 6), st.integers(0, 10**6))
def test_class_axis_is_blind_to_a_constant_per_image(pairs: int, classes: int, seed: int) -> None:
    """Shares sum to 1, so a constant on row i of S is the same constant on row i of S~."""
    scores, targets = make_batch(seed, pairs, classes)
    moved = scores + torch.randn(pairs, 1, generator=torch.Generator().manual_seed(seed)).double()
    for negatives in (("pairs",), ("sources",), ("classes",), ("pairs", "classes")):
        before = one_by_one(scores, targets, axes=("class",), negatives=negatives)
        torch.testing.assert_close(one_by_one(moved, targets, axes=("class",), negatives=negatives), before)


@any_batch
@given(st.integers(2, 9), st.integers(2, 6), st.integers(0, 10**6))
def test_pair_axis_is_blind_to_a_constant_per_class(pairs: int, classes: int, seed: int) -> None:
    """k_c on column c of S is sum_c y~_jc k_c on column j of S~, the same for every image."""
    scores, targets = make_batch(seed, pairs, classes)
    moved = scores + torch.randn(classes, generator=torch.Generator().manual_seed(seed)).double()
    before = one_by_one(scores, targets, axes=("pair",))
    torch.testing.assert_close(one_by_one(moved, targets, axes=("pair",)), before)


def test_neither_axis_is_blind_to_what_the_other_is() -> None:
    scores, targets = make_batch()
    per_image, per_class = torch.arange(B).double()[:, None], torch.arange(C).double()
    for axis, constant in (("class", per_class), ("pair", per_image)):
        moved = infinite_class_loss(scores + constant, targets, (axis,))
        assert (moved - infinite_class_loss(scores, targets, (axis,))).abs() > 0.1


def test_centred_is_the_loop_with_rows_minus_their_means_on_the_pair_axis_only() -> None:
    scores, targets = make_batch()
    means = torch.tensor([sum(dot(image, target) for target in targets) / B for image in scores]).double()
    centred = pair_axis_by_hand(scores - means[:, None], targets)
    assert not torch.allclose(centred, pair_axis_by_hand(scores, targets), atol=0.1)
    torch.testing.assert_close(one_by_one(scores, targets, axes=("pair",), centred=True), centred)
    classes = class_axis_by_hand(scores, targets)
    torch.testing.assert_close(one_by_one(scores, targets, axes=("class",), centred=True), classes)


@any_batch
@given(st.integers(2, 9), st.integers(2, 6), st.integers(0, 10**6))
def test_centred_neither_depends_on_a_constant_per_image_nor_has_a_gradient_on_it(
    pairs: int, classes: int, seed: int
) -> None:
    scores, targets = make_batch(seed, pairs, classes)
    moved = scores + torch.randn(pairs, 1, generator=torch.Generator().manual_seed(seed)).double()
    before = one_by_one(scores.requires_grad_(), targets, centred=True)
    torch.testing.assert_close(one_by_one(moved, targets, centred=True), before)
    (gradient,) = torch.autograd.grad(before.sum(), scores)
    torch.testing.assert_close(gradient.sum(dim=1), torch.zeros(pairs).double())


@any_batch
@given(st.integers(2, 8), st.integers(0, 10**6))
def test_one_hot_targets_of_distinct_classes_give_plain_cross_entropy(classes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores, labels = torch.randn(classes, classes, generator=generator), torch.randperm(classes)
    loss = infinite_class_loss(scores, F.one_hot(labels, classes), ("class",))
    torch.testing.assert_close(loss, F.cross_entropy(scores, labels))


@any_batch
@given(st.integers(1, 12), st.integers(2, 6), st.integers(0, 10**6))
def test_unmixed_class_axis_is_balanced_softmax_of_the_batch(pairs: int, classes: int, seed: int) -> None:
    """-log(e^S_y / sum_c b_c e^S_c), b_c images of class c in the batch: Balanced Softmax, less log b_y."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(pairs, classes, generator=generator).double().requires_grad_()
    labels = torch.randint(classes, (pairs,), generator=generator)
    counts = torch.bincount(labels, minlength=classes).double()
    ours = one_by_one(scores, F.one_hot(labels, classes).double(), axes=("class",))
    balanced = F.cross_entropy(scores + counts.log(), labels, reduction="none")
    torch.testing.assert_close(ours, balanced + counts[labels].log())
    torch.testing.assert_close(
        torch.autograd.grad(ours.mean(), scores), torch.autograd.grad(balanced.mean(), scores)
    )


# Precision


@EVERY_CHOICE
def test_gradient_is_that_of_finite_differences(choice: dict[str, Any]) -> None:
    scores, targets = batch_with_duplicates()
    assert torch.autograd.gradcheck(
        lambda s: infinite_class_loss(s, targets, **choice), scores.requires_grad_()
    )


def test_gradient_reaches_targets_and_class_weights_too() -> None:
    scores, targets = make_batch()
    class_weights = torch.rand(C, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda t, w: infinite_class_loss(scores, t, class_weights=w),
        (targets.requires_grad_(), class_weights),
    )


@EVERY_CHOICE
def test_autocast_changes_nothing(choice: dict[str, Any]) -> None:
    scores, targets = (part.float() for part in make_batch())
    inside, outside = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = infinite_class_loss(inside, targets, **choice)
    expected = infinite_class_loss(outside, targets, **choice)
    torch.testing.assert_close(loss, expected, rtol=0, atol=0)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(inside.grad, outside.grad, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_scores_get_a_float32_loss(dtype: torch.dtype) -> None:
    scores, targets = make_batch(scale=3.0)
    scores = scores.to(dtype).requires_grad_()
    loss = infinite_class_loss(scores, targets.float())
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, infinite_class_loss(scores.detach().float(), targets.float()))
    loss.backward()
    assert scores.grad is not None
    assert scores.grad.dtype == dtype
    both_half = infinite_class_loss(scores, targets.to(dtype))
    assert both_half.dtype == torch.float32
    torch.testing.assert_close(both_half, infinite_class_loss(scores.float(), targets.to(dtype).float()))


def test_float64_stays_float64_and_float32_float32() -> None:
    scores, targets = make_batch()
    assert infinite_class_loss(scores, targets).dtype == torch.float64
    assert infinite_class_loss(scores, targets.float()).dtype == torch.float64
    assert infinite_class_loss(scores.float(), targets.float()).dtype == torch.float32


def test_one_hot_integers_are_targets_too() -> None:
    scores, labels = torch.randn(B, C), torch.randint(C, (B,))
    one_hot = F.one_hot(labels, C)
    torch.testing.assert_close(
        infinite_class_loss(scores, one_hot), infinite_class_loss(scores, one_hot.float())
    )


@pytest.mark.parametrize(
    "choice", ["paper", "class", "pair", "temperature", "weighted", "ignore", "positive", "centred"]
)
def test_one_pair_gives_exactly_zero(choice: str) -> None:
    scores = torch.tensor([[3.0, -1e4, 0.1, 7.0, 2.0]], requires_grad=True)
    targets = torch.tensor([[0.25, 0.0, 0.75, 0.0, 0.0]])
    loss = infinite_class_loss(scores, targets, **CHOICES[choice])
    loss.backward()
    assert loss.item() == 0
    assert scores.grad is not None
    assert not scores.grad.any()


@EVERY_CHOICE
def test_scores_of_ten_thousand_give_neither_inf_nor_nan(choice: dict[str, Any]) -> None:
    scores, targets = make_batch()
    scores = (scores.sign() * 1e4).float().requires_grad_()
    loss = infinite_class_loss(scores, targets.float(), **choice)
    loss.backward()
    assert loss.isfinite()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()


@EVERY_CHOICE
def test_a_nan_score_is_never_hidden(choice: dict[str, Any]) -> None:
    for c in range(C):
        scores, targets = batch_with_duplicates()
        scores[4, c] = torch.nan
        assert infinite_class_loss(scores, targets, **choice).isnan()
        assert one_by_one(scores, targets, **choice)[4].isnan()


# Compilers, transforms, modules


@pytest.mark.slow
@EVERY_CHOICE
@pytest.mark.parametrize("dynamic", [None, True])
def test_whole_loss_compiles_into_one_graph(dynamic: bool | None, choice: dict[str, Any]) -> None:
    torch.compiler.reset()
    scores, targets = batch_with_duplicates()
    scores.requires_grad_()

    def loss(scores: Tensor, targets: Tensor) -> Tensor:
        return infinite_class_loss(scores, targets, **choice)

    compiled_loss = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    compiled = compiled_loss(scores, targets)
    expected = loss(scores, targets)
    torch.testing.assert_close(compiled, expected)
    torch.testing.assert_close(torch.autograd.grad(compiled, scores), torch.autograd.grad(expected, scores))
    short = scores.detach()[:5], targets[:5]
    torch.testing.assert_close(compiled_loss(*short), loss(*short))


@pytest.mark.slow
def test_a_temperature_that_changes_from_step_to_step_compiles() -> None:
    torch.compiler.reset()
    compiled = torch.compile(infinite_class_loss, fullgraph=True, backend="aot_eager")
    for temperature in (1.0, 0.9, 0.8):
        expected = infinite_class_loss(*make_batch(), temperature=temperature)
        torch.testing.assert_close(compiled(*make_batch(), temperature=temperature), expected)


@EVERY_CHOICE
def test_functional_gradient_is_that_of_autograd(choice: dict[str, Any]) -> None:
    scores, targets = batch_with_duplicates()
    functional = torch.func.grad(lambda s: infinite_class_loss(s, targets, **choice))(scores)
    scores.requires_grad_()
    (expected,) = torch.autograd.grad(infinite_class_loss(scores, targets, **choice), scores)
    torch.testing.assert_close(functional, expected)


@EVERY_CHOICE
def test_vmap_over_networks_with_targets_of_their_own_is_a_loop_over_them(choice: dict[str, Any]) -> None:
    if torch.__version__ < "2.7" and "duplicates" in choice:
        pytest.skip("torch 2.6 cannot compare rows within vmap")
    batches = [make_batch(seed) for seed in range(3)]
    scores, targets = (torch.stack(rows) for rows in zip(*batches, strict=True))
    loss = partial(infinite_class_loss, **choice)
    torch.testing.assert_close(torch.vmap(loss)(scores, targets), torch.stack([loss(*b) for b in batches]))
    gradients = torch.vmap(torch.func.grad(loss))(scores, targets)
    torch.testing.assert_close(gradients, torch.stack([torch.func.grad(loss)(*b) for b in batches]))
    labels = targets.argmax(dim=2)
    expected = torch.stack([infinite_class_loss(s, y) for s, y in zip(scores, labels, strict=True)])
    torch.testing.assert_close(torch.vmap(infinite_class_loss)(scores, labels), expected)


@EVERY_CHOICE
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_module_is_the_function_with_fixed_options(choice: dict[str, Any], reduction: Any) -> None:
    scores, targets = batch_with_duplicates()
    made = {name: value for name, value in choice.items() if name != "virtual"}
    criterion = InfiniteClassLoss(**made, reduction=reduction)
    expected = infinite_class_loss(scores, targets, reduction=reduction, **choice)
    torch.testing.assert_close(criterion(scores, targets, choice.get("virtual")), expected)


def test_module_moves_class_weights_and_shows_its_options() -> None:
    criterion = InfiniteClassLoss(("class",), temperature=0.5, class_weights=torch.ones(C))
    assert criterion.double().class_weights.dtype == torch.float64
    assert list(criterion.state_dict()) == ["class_weights"]
    assert "axes=('class',)" in repr(criterion)
    assert "temperature=0.5" in repr(criterion)


@EVERY_CHOICE
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_with_integer_labels_the_loss_is_plain_cross_entropy(choice: dict[str, Any], reduction: Any) -> None:
    scores, targets = make_batch()
    labels = targets.argmax(dim=1)
    criterion = InfiniteClassLoss(reduction=reduction, **{k: v for k, v in choice.items() if k != "virtual"})
    expected = torch.stack(
        [-row.log_softmax(dim=0)[label] for row, label in zip(scores, labels, strict=True)]
    )
    expected = getattr(expected, reduction)() if reduction != "none" else expected
    for same in (labels, labels.int(), labels.to(torch.uint8), labels.to(torch.uint16)):
        torch.testing.assert_close(criterion(scores, same), expected)


def test_class_weights_stay_exact_in_half_precision_and_follow_the_device() -> None:
    """As Lightning's precision "16-true" converts a criterion. The smallest float16 is 6e-8."""
    scores, targets = make_batch(pairs=6)
    weights = 1e-9 * torch.arange(1, C + 1)
    criterion = InfiniteClassLoss(class_weights=weights).half()
    assert torch.equal(
        criterion(scores, targets), infinite_class_loss(scores, targets, class_weights=weights)
    )
    assert criterion.to("meta").class_weights.device.type == "meta"


@pytest.mark.parametrize("enabled", [True, False], ids=["autocast", "half precision"])
def test_integer_labels_are_scored_in_float32(enabled: bool) -> None:
    scores, labels = torch.randn(6, C, dtype=torch.bfloat16), torch.arange(6) % C
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        loss = InfiniteClassLoss()(scores, labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(scores.float(), labels))


@EVERY_CHOICE
def test_the_plain_form_has_second_derivatives(choice: dict[str, Any]) -> None:
    scores, targets = make_batch(pairs=4)
    assert torch.autograd.gradgradcheck(
        lambda rows: infinite_class_loss(rows, targets, fused=False, **choice), scores.requires_grad_()
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_second_derivatives_of_the_chunked_form_are_an_error(
    reduction: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd would take its gradient for a constant, and a gradient penalty would train on it."""
    monkeypatch.setattr("icmixup.contrast.CHUNKED_ENTRIES", 0)
    scores, targets = make_batch()
    scores.requires_grad_()
    loss = infinite_class_loss(scores, targets, reduction=reduction)
    (gradient,) = torch.autograd.grad(loss, scores, create_graph=True)
    plain = infinite_class_loss(scores, targets, reduction=reduction, fused=False)
    torch.testing.assert_close(gradient.detach(), torch.autograd.grad(plain, scores)[0])
    with pytest.raises(RuntimeError, match=r"second derivatives of the chunked form are not implemented"):
        (gradient.square().sum() + scores.sum()).backward()


def test_gradients_reach_targets_and_virtual_targets_whatever_the_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("icmixup.contrast.CHUNKED_ENTRIES", 0)
    scores, targets = make_batch()
    virtual = targets[:3].clone()
    check = torch.autograd.gradcheck
    assert check(lambda t: infinite_class_loss(scores, t), targets.clone().requires_grad_())
    assert check(lambda v: infinite_class_loss(scores, targets, virtual=v), virtual.requires_grad_())


# Input validation

BAD_CALLS: dict[str, tuple[str, Any]] = {
    "float labels": (
        r"targets have dtype torch.float64 and shape \(7,\); expected \(B, C\) class shares.*\(B,\) integers",
        lambda s, t: infinite_class_loss(s, t.argmax(dim=1).double()),
    ),
    "label too high": (
        r"labels range from 0 to 5, but the classes are 0 to 4",
        lambda s, t: infinite_class_loss(s, torch.arange(7) % 6),
    ),
    "label that torch would skip": (
        r"labels range from -100 to -100",
        lambda s, t: infinite_class_loss(s, torch.full((7,), -100)),
    ),
    "other number of labels": (
        r"6 labels but 7 rows of scores",
        lambda s, t: infinite_class_loss(s, torch.arange(6) % 5),
    ),
    "virtual beside labels": (
        r"virtual classifiers extend mixed targets \(B, C\), but targets are integer labels",
        lambda s, t: infinite_class_loss(s, t.argmax(dim=1), virtual=t),
    ),
    "one class": (
        r"scores have shape \(7, 1\): one class; expected at least two",
        lambda s, t: infinite_class_loss(s[:, :1], torch.ones_like(t[:, :1])),
    ),
    "other shape": (
        r"scores have shape \(7, 5\) but targets have shape \(7, 4\); expected \(B, C\) for both",
        lambda s, t: infinite_class_loss(s, t[:, :4]),
    ),
    "too many dims": (
        r"scores have shape \(1, 7, 5\) but targets have shape \(1, 7, 5\)",
        lambda s, t: infinite_class_loss(s[None], t[None]),
    ),
    "empty batch": (
        r"scores have shape \(0, 5\): an empty batch has no loss, skip it",
        lambda s, t: infinite_class_loss(s[:0], t[:0]),
    ),
    "integer scores": (
        r"scores have dtype torch.int64; expected floating-point logits",
        lambda s, t: infinite_class_loss(s.long(), t),
    ),
    "sum of two": (
        r"targets must be class shares, .* row 2 has the sum 2 and .*multi-label targets are not supported",
        lambda s, t: infinite_class_loss(s, t * torch.tensor([1.0, 1, 2, 1, 1, 1, 1])[:, None]),
    ),
    "multi-hot": (r"row 0 has the sum 5", lambda s, t: infinite_class_loss(s, torch.ones(7, 5))),
    "negative share": (
        r"row 0 has the sum 1 and the lowest share -0.5",
        lambda s, t: infinite_class_loss(s, torch.tensor([-0.5, 1.5, 0, 0, 0]).expand(7, 5)),
    ),
    "nan shares": (r"row 0 has the sum nan", lambda s, t: infinite_class_loss(s, t * math.nan)),
    "fused as text": (
        r"fused must be one of 'auto', True, False, got 'yes'",
        lambda s, t: infinite_class_loss(s, t, fused="yes"),
    ),
    "fused as a number": (r"fused must be .* got 1", lambda s, t: infinite_class_loss(s, t, fused=1)),
    "gather as text": (r"gather must be .* got 'no'", lambda s, t: infinite_class_loss(s, t, gather="no")),
    "centred as text": (r"centred must be .* got 'no'", lambda s, t: infinite_class_loss(s, t, centred="no")),
    "gradient of targets": (
        r"targets require a gradient, which fused=True does not compute",
        lambda s, t: infinite_class_loss(s, t.requires_grad_(), fused=True),
    ),
    "gradient of virtual targets": (
        r"targets require a gradient",
        lambda s, t: infinite_class_loss(s, t, virtual=t.clone().requires_grad_(), fused=True),
    ),
    "class weight of zero": (
        r"class_weights must be positive and finite, got \[1.0, 0.0",
        lambda s, t: infinite_class_loss(s, t, class_weights=torch.tensor([1.0, 0, 1, 1, 1])),
    ),
    "class weight of nan": (
        r"class_weights must be positive and finite",
        lambda s, t: infinite_class_loss(s, t, class_weights=torch.full((5,), math.nan)),
    ),
    "module, class weight": (
        r"class_weights must be positive and finite",
        lambda s, t: InfiniteClassLoss(class_weights=-torch.ones(5)),
    ),
    "module, fused": (r"fused must be", lambda s, t: InfiniteClassLoss(fused="no")),
    "temperature infinite": (r"got inf", lambda s, t: infinite_class_loss(s, t, temperature=math.inf)),
    "virtual sums": (
        r"virtual targets must be class shares",
        lambda s, t: infinite_class_loss(s, t, virtual=torch.ones(3, 5)),
    ),
    "unknown axis": (
        r"axes must be a tuple of one or both of \('class', 'pair'\), got \('class', 'image'\)",
        lambda s, t: infinite_class_loss(s, t, ("class", "image")),
    ),
    "bare axis": (r"got 'class'", lambda s, t: infinite_class_loss(s, t, "class")),
    "no axis": (r"got \(\)", lambda s, t: infinite_class_loss(s, t, ())),
    "axis twice": (r"got \('pair', 'pair'\)", lambda s, t: infinite_class_loss(s, t, ("pair", "pair"))),
    "unknown negatives": (
        r"negatives must be one of .*\('sources',\).* got \('images',\)",
        lambda s, t: infinite_class_loss(s, t, negatives=("images",)),
    ),
    "unknown duplicates": (
        r"duplicates must be one of 'negative', 'ignore', 'positive', got 'drop'",
        lambda s, t: infinite_class_loss(s, t, duplicates="drop"),
    ),
    "unknown reduction": (
        r"reduction must be one of 'mean', 'sum', 'none', got 'max'",
        lambda s, t: infinite_class_loss(s, t, reduction="max"),
    ),
    "temperature zero": (
        r"temperature must be a positive number, got 0",
        lambda s, t: infinite_class_loss(s, t, temperature=0),
    ),
    "temperature nan": (r"got nan", lambda s, t: infinite_class_loss(s, t, temperature=math.nan)),
    "class weights": (
        r"class_weights have shape \(4,\); expected \(5,\), one per class",
        lambda s, t: infinite_class_loss(s, t, class_weights=torch.ones(4)),
    ),
    "virtual of other classes": (
        r"virtual targets have shape \(3, 4\); expected \(M, 5\) with M > 0, as draw_virtual returns them",
        lambda s, t: infinite_class_loss(s, t, virtual=torch.ones(3, 4)),
    ),
    "no virtual": (r"\(0, 5\)", lambda s, t: infinite_class_loss(s, t, virtual=torch.ones(0, 5))),
    "flat virtual": (r"shape \(5,\)", lambda s, t: infinite_class_loss(s, t, virtual=torch.ones(5))),
    "virtual without pairs": (
        r"virtual classifiers extend the pairs, but negatives are \('classes',\); add \"pairs\"",
        lambda s, t: infinite_class_loss(s, t, virtual=torch.ones(3, 5), negatives=("classes",)),
    ),
    "module, unknown axis": (r"axes must be", lambda s, t: InfiniteClassLoss(("rows",))),
    "module, unknown reduction": (
        r"reduction must be .* got 'max'",
        lambda s, t: InfiniteClassLoss(reduction="max"),
    ),
}


@pytest.mark.parametrize(("words", "call"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_input_is_named_in_the_error(words: str, call: Any) -> None:
    with pytest.raises(ValueError, match=words):
        call(*make_batch())


class CountOperations(TorchDispatchMode):
    """Counts torch operations that move data: all except views, allocations and type promotion."""

    SKIPPED = ("empty", "detach", "promote_types")

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view and not any(word in function.name() for word in self.SKIPPED):
            self.names.append(function.name())
        return function(*args, **(kwargs or {}))


@pytest.mark.skipif(torch.__version__ < "2.7", reason="torch 2.6 records a slice of a whole dimension")
def test_a_small_batch_takes_no_more_operations_than_the_plain_product(monkeypatch):
    # As on a GPU, where the values of targets are not checked.
    monkeypatch.setattr("icmixup._checks.can_look_at", lambda _: False)
    scores, targets = torch.randn(128, 100, requires_grad=True), torch.rand(128, 100).softmax(dim=1)

    def plain(scores, targets):
        mixed, own = scores @ targets.T, torch.arange(len(scores))
        return F.cross_entropy(mixed, own) + F.cross_entropy(mixed.T, own)

    counts = []
    for loss in (plain, infinite_class_loss):
        with CountOperations() as counted:
            torch.autograd.grad(loss(scores, targets), scores)
        counts.append(sorted(counted.names))
    assert counts[0] == counts[1]
