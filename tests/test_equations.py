"""The paper's equations 1 to 10 and every gradient of its appendix A, against autograd in float64.

The paper maximises a log-likelihood L, a sum over the batch; the loss is -L / B.

B pairs    C classes    D features    r_i features    W (D, C) weights    y~ (B, C) targets
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from icmixup import METHODS, draw_mixup, infinite_class_loss, mix_inputs, mix_targets
from icmixup.methods import mixed_loss

B, C, D = 6, 5, 4
AXIS = pytest.mark.parametrize("axis", ["class", "pair"])


class Batch(NamedTuple):
    features: Tensor  # (B, D)
    weights: Tensor  # (D, C), with gradient
    targets: Tensor  # (B, C)

    @property
    def scores(self) -> Tensor:
        return self.features @ self.weights


@pytest.fixture
def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(B, D, generator=generator, dtype=torch.float64)
    weights = torch.randn(D, C, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 1, 2, 3, 4, 1])
    partner = torch.tensor([3, 4, 0, 1, 5, 2])
    lam = torch.rand(B, generator=generator, dtype=torch.float64)
    return Batch(features, weights, mix_targets(labels, draw_mixup(labels, partner=partner, lam=lam), C))


def mixed_score(batch: Batch, i: int, j: int) -> Tensor:
    """r_i^T W y~_j, of image i under the classifier of pair j  (Eq. 3)."""
    return batch.features[i] @ (batch.weights @ batch.targets[j])


def probability(batch: Batch, axis: str, i: int) -> Tensor:
    """p(C_y~i given x~i), the library's."""
    return torch.exp(-infinite_class_loss(batch.scores, batch.targets, (axis,), reduction="none"))[i]


def log_normaliser(batch: Batch, axis: str, i: int) -> Tensor:
    """log Z_i from the library's loss: the loss of pair i is log Z_i - r_i^T W y~_i."""
    loss = infinite_class_loss(batch.scores, batch.targets, (axis,), reduction="none")[i]
    return loss + mixed_score(batch, i, i)


def gradient(value: Tensor, batch: Batch) -> Tensor:
    """(D, C), column c the gradient on W_c."""
    return torch.autograd.grad(value, batch.weights, retain_graph=True)[0]


def share_of(batch: Batch, axis: str, i: int, j: int) -> float:
    """p_cc(C_j given x_i) on the class axis, p_ci(C_i given x_j) on the pair axis, by hand."""
    if axis == "class":
        total = sum(math.exp(mixed_score(batch, i, k).item()) for k in range(B))  # Eq. 5
        return math.exp(mixed_score(batch, i, j).item()) / total
    total = sum(math.exp(mixed_score(batch, k, i).item()) for k in range(B))  # Eq. 7
    return math.exp(mixed_score(batch, j, i).item()) / total


def test_equation_1_mixes_images_and_labels_by_one_lam() -> None:
    images, labels = torch.randn(3, 2, 4, 4, dtype=torch.float64), torch.tensor([2, 0, 1])
    pairs = draw_mixup(labels, partner=torch.tensor([1, 2, 0]), lam=torch.tensor([0.9, 0.2, 0.6]).double())
    inputs, targets = mix_inputs(images, pairs), mix_targets(labels, pairs, 3)
    for a, (b, lam) in enumerate([(1, 0.9), (2, 0.2), (0, 0.6)]):
        torch.testing.assert_close(inputs[a], lam * images[a] + (1 - lam) * images[b], rtol=1e-6, atol=1e-6)
        y_a, y_b = torch.eye(3).double()[labels[a]], torch.eye(3).double()[labels[b]]
        torch.testing.assert_close(targets[a], lam * y_a + (1 - lam) * y_b, rtol=1e-6, atol=1e-6)


def test_equation_2_needs_only_scores_never_the_weights(batch: Batch) -> None:
    classifiers = torch.stack([sum(y[c] * batch.weights[:, c] for c in range(C)) for y in batch.targets])
    expected = (batch.features @ classifiers.T).log_softmax(dim=1).diagonal().neg()
    actual = infinite_class_loss(batch.scores, batch.targets, ("class",), reduction="none")
    torch.testing.assert_close(actual, expected)


@AXIS
def test_equations_3_4_5_7_by_hand(batch: Batch, axis: str) -> None:
    likelihood = sum(math.log(share_of(batch, axis, i, i)) for i in range(B))  # Eq. 4
    loss = infinite_class_loss(batch.scores, batch.targets, (axis,)).item()
    assert loss == pytest.approx(-likelihood / B, rel=1e-12)


def test_equation_9_sums_both_axes_and_does_not_halve(batch: Batch) -> None:
    likelihood = sum(math.log(share_of(batch, axis, i, i)) for i in range(B) for axis in ("class", "pair"))
    loss = infinite_class_loss(batch.scores, batch.targets).item()
    assert loss == pytest.approx(-likelihood / B, rel=1e-12)


def test_class_axis_gradient_is_equation_6(batch: Batch) -> None:
    """Also A.9: sum_i r_i (y~_ic - sum_j p_cc(C_j given x_i) y~_jc)."""
    expected = torch.zeros(D, C, dtype=torch.float64)
    for c in range(C):
        for i in range(B):
            predicted = sum(share_of(batch, "class", i, j) * batch.targets[j, c] for j in range(B))
            expected[:, c] += batch.features[i] * (batch.targets[i, c] - predicted)
    loss = infinite_class_loss(batch.scores, batch.targets, ("class",))
    torch.testing.assert_close(gradient(-loss * B, batch), expected)


def test_pair_axis_gradient_is_equation_8(batch: Batch) -> None:
    """Also A.12: sum_i y~_ic (r_i - sum_j p_ci(C_i given x_j) r_j)."""
    expected = torch.zeros(D, C, dtype=torch.float64)
    for c in range(C):
        for i in range(B):
            predicted = sum(share_of(batch, "pair", i, j) * batch.features[j] for j in range(B))
            expected[:, c] += batch.targets[i, c] * (batch.features[i] - predicted)
    loss = infinite_class_loss(batch.scores, batch.targets, ("pair",))
    torch.testing.assert_close(gradient(-loss * B, batch), expected)


def test_mixup_gradient_is_equation_10(batch: Batch) -> None:
    """Also A.1 and A.3: sum_i r_i (y~_ic - p(c given x_i))."""
    expected = batch.features.T @ (batch.targets - batch.scores.softmax(dim=1))
    loss = mixed_loss(batch.scores, batch.targets, METHODS["mixup"], None)
    torch.testing.assert_close(gradient(-loss * B, batch), expected.detach())


def test_mixup_gradient_before_it_is_simplified_is_a_2(batch: Batch) -> None:
    p = batch.scores.softmax(dim=1).detach()
    expected = torch.zeros(D, C, dtype=torch.float64)
    for c in range(C):
        for i in range(B):
            for other in range(C):
                expected[:, c] += batch.targets[i, other] * batch.features[i] * (int(other == c) - p[i, c])
    loss = mixed_loss(batch.scores, batch.targets, METHODS["mixup"], None)
    torch.testing.assert_close(gradient(-loss * B, batch), expected)


def test_softmax_derivative_is_a_4(batch: Batch) -> None:
    """Of p(c' given x_i), which is the class axis for C copies of image i, each under its own class."""
    for i in range(B):
        copies = batch._replace(
            features=batch.features[i].expand(C, D), targets=torch.eye(C, dtype=torch.float64)
        )
        p = copies.scores[0].softmax(dim=0).detach()
        for other in range(C):
            expected = p[other] * batch.features[i][:, None] * (torch.eye(C)[other] - p)
            actual = gradient(probability(copies, "class", other), copies)
            torch.testing.assert_close(actual, expected)


def normaliser_gradient(batch: Batch, axis: str, i: int) -> Tensor:
    """(1 / Z) gradient of Z, by hand: A.8 on the class axis, A.11 on the pair axis."""
    total = torch.zeros(D, C, dtype=torch.float64)
    for j in range(B):
        image, classifier = (i, j) if axis == "class" else (j, i)
        total += share_of(batch, axis, i, j) * torch.outer(batch.features[image], batch.targets[classifier])
    return total


@AXIS
def test_normalisers_are_a_7_and_a_10(batch: Batch, axis: str) -> None:
    for i in range(B):
        under = [mixed_score(batch, i, j) if axis == "class" else mixed_score(batch, j, i) for j in range(B)]
        expected = math.log(sum(math.exp(score.item()) for score in under))
        assert log_normaliser(batch, axis, i).item() == pytest.approx(expected, rel=1e-12)


@AXIS
def test_normaliser_gradients_are_a_8_and_a_11(batch: Batch, axis: str) -> None:
    for i in range(B):
        actual = gradient(log_normaliser(batch, axis, i), batch)  # of log Z, so (1 / Z) gradient of Z
        torch.testing.assert_close(actual, normaliser_gradient(batch, axis, i))


@AXIS
def test_likelihood_gradient_is_a_5(batch: Batch, axis: str) -> None:
    for i in range(B):
        p = share_of(batch, axis, i, i)
        pull = torch.outer(batch.features[i], batch.targets[i])
        expected = p * (pull - normaliser_gradient(batch, axis, i))
        torch.testing.assert_close(gradient(probability(batch, axis, i), batch), expected)


@AXIS
def test_log_likelihood_gradient_is_a_6(batch: Batch, axis: str) -> None:
    expected = torch.zeros(D, C, dtype=torch.float64)
    for i in range(B):
        expected += torch.outer(batch.features[i], batch.targets[i]) - normaliser_gradient(batch, axis, i)
    loss = infinite_class_loss(batch.scores, batch.targets, (axis,), reduction="sum")
    torch.testing.assert_close(gradient(-loss, batch), expected)
