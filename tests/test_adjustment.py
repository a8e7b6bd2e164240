"""Logit adjustment after training: against its formula, Bayes' rule and a search by hand."""

from __future__ import annotations

import pytest
import torch

import icmixup as icm
from icmixup.adjustment import TAUS

COUNTS = torch.tensor([80, 15, 5])


def test_adjusted_scores_are_those_of_menon_et_al() -> None:
    scores = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    for tau in (0.0, 0.5, 1.0, 2.0):
        expected = scores - tau * torch.tensor([0.8, 0.15, 0.05]).log()
        torch.testing.assert_close(icm.adjust_scores(scores, COUNTS, tau), expected)
    assert icm.adjust_scores(scores.half(), COUNTS).dtype == torch.float32  # log n needs more than float16
    assert icm.adjust_scores(scores.double(), COUNTS).dtype == torch.float64


def test_adjusted_probabilities_are_those_of_equally_frequent_classes() -> None:
    likelihood = torch.tensor([[0.2, 0.5, 0.9], [0.7, 0.1, 0.1]])  # p(x | y)
    joint = likelihood * COUNTS / COUNTS.sum()  # p(x, y) of the training set
    adjusted = icm.adjust_scores(joint.log(), COUNTS).softmax(dim=1)
    torch.testing.assert_close(adjusted, likelihood / likelihood.sum(dim=1, keepdim=True))


def test_the_fitted_tau_has_the_best_mean_class_accuracy() -> None:
    generator = torch.Generator().manual_seed(1)
    labels = torch.multinomial(COUNTS.float(), 2000, replacement=True, generator=generator)
    scores = torch.nn.functional.one_hot(labels, 3) + torch.randn(2000, 3, generator=generator)
    scores = scores + 0.6 * (COUNTS / COUNTS.sum()).log()

    def accuracy(tau: float) -> float:
        right = (scores - tau * (COUNTS / COUNTS.sum()).log()).argmax(dim=1) == labels
        return sum(float(right[labels == c].double().mean()) for c in range(3)) / 3

    found = icm.fit_adjustment(scores, labels, COUNTS)
    assert accuracy(found) == pytest.approx(max(map(accuracy, TAUS)))
    assert abs(found - 0.6) < 0.25
    assert accuracy(found) > accuracy(0.0) + 0.05
    assert (
        icm.fit_adjustment(torch.zeros(4, 3), torch.tensor([0, 1, 2, 0]), torch.ones(3)) == 1.0
    )  # all equal


def test_a_class_without_held_out_images_does_not_count() -> None:
    scores = torch.tensor([[1.0, 0.0, -9.0], [1.0, 0.9, -9.0]])
    labels = torch.tensor([0, 1])
    counts = torch.tensor([10, 5, 1])
    assert icm.adjust_scores(scores, counts, icm.fit_adjustment(scores, labels, counts)).argmax(
        1
    ).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: icm.adjust_scores(torch.zeros(2, 3), COUNTS[:2]),
            r"scores have shape \(2, 3\) and there are 2",
        ),
        (lambda: icm.adjust_scores(torch.zeros(3), COUNTS), r"expected \(N, 3\) scores"),
        (
            lambda: icm.adjust_scores(torch.zeros(2, 3), COUNTS, -1),
            "tau must be a number of at least 0, got -1",
        ),
        (
            lambda: icm.adjust_scores(torch.zeros(2, 3), COUNTS, torch.nan),
            "tau must be a number of at least 0",
        ),
        (
            lambda: icm.adjust_scores(torch.zeros(2, 3), torch.tensor([5, 0, 1])),
            r"classes \[1\] are not positive",
        ),
        (lambda: icm.adjust_scores([[0.0]], COUNTS), "scores must be a torch.Tensor, got list"),
        (
            lambda: icm.adjust_scores(torch.zeros(2, 3), [5, 2, 1]),
            "class_counts must be a torch.Tensor, got list",
        ),
        (
            lambda: icm.fit_adjustment(torch.zeros(2, 3), torch.tensor([0, 1]), [5, 2, 1]),
            "class_counts must be a torch.Tensor, got list",
        ),
        (
            lambda: icm.fit_adjustment(torch.zeros(2, 3), torch.tensor([0, 3]), COUNTS),
            "labels range from 0 to 3",
        ),
        (lambda: icm.fit_adjustment(torch.zeros(0, 3), torch.zeros(0).long(), COUNTS), "at least one"),
    ],
)
def test_wrong_arguments_are_named(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises((ValueError, TypeError), match=message):
        call()
