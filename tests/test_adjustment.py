"""Logit adjustment after training: against its formula, Bayes' rule and a search by hand."""

from __future__ import annotations

import math
from statistics import fmean

import pytest
import torch

import icmixup as icm
from icmixup.adjustment import TAUS, pick_tau, search_tau
from icmixup.calibration import mean_class_nll

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


def long_tail(n: int, tau: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels with COUNTS, and scores whose best tau is the given one."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.multinomial(COUNTS.float(), n, replacement=True, generator=generator)
    scores = torch.nn.functional.one_hot(labels, 3) + torch.randn(n, 3, generator=generator)
    return scores + tau * (COUNTS / COUNTS.sum()).log(), labels


def test_the_fitted_tau_has_the_lowest_loss() -> None:
    scores, labels = long_tail(2000, 0.6, seed=1)

    def loss(tau: float) -> float:
        return mean_class_nll(scores - tau * (COUNTS / COUNTS.sum()).log(), labels)

    found = icm.fit_adjustment(scores, labels, COUNTS)
    assert loss(found) == pytest.approx(min(map(loss, TAUS)))
    assert found == pytest.approx(0.6, abs=0.1)
    assert icm.fit_adjustment(3 * scores, labels, COUNTS) == pytest.approx(1.8, abs=0.3)  # their scale counts
    nothing = icm.fit_adjustment(torch.zeros(4, 3), torch.tensor([0, 1, 2, 0]), torch.ones(3))
    assert nothing == 1.0  # all equal


def accuracy(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """The mean over classes that have images."""
    right = (scores.argmax(dim=1) == labels).double()
    return fmean(float(right[labels == c].mean()) for c in set(labels.tolist()))


def test_a_search_finds_the_tau_of_all_candidates_with_fewer_evaluations() -> None:
    generator = torch.Generator().manual_seed(0)
    evaluated = []
    for trial in range(60):
        num_classes, images = torch.randint(2, 30, (2,), generator=generator).tolist()
        counts = torch.randint(1, 1000, (num_classes,), generator=generator).float()
        labels = torch.randint(num_classes, (images,), generator=generator)
        scores = torch.randn(images, num_classes, generator=generator)
        scores[torch.arange(images), labels] += (1, 3, 60)[trial % 3]  # with 60 every tau is as good
        scores += 2 * torch.rand(1, generator=generator) * counts.log()
        tried: list[float] = []

        def loss(tau: float, scores=scores, counts=counts, labels=labels, tried=tried) -> float:  # type: ignore[no-untyped-def]
            tried.append(tau)
            return mean_class_nll(icm.adjust_scores(scores, counts, tau), labels)

        found = search_tau(loss, math.log(scores.shape[1]))
        evaluated.append(len(tried))
        assert found == pick_tau(loss)
    assert sum(number <= 12 for number in evaluated) >= 30  # the others have ties


def test_where_scores_are_no_better_than_guessing_the_lowest_loss_is_found() -> None:
    # Beyond small taus the adjustment is larger than the scores, and no temperature is better than guessing:
    # the loss is that of guessing there, and does not fall towards its minimum.
    counts = (100 * 0.05 ** (torch.arange(10) / 9)).long()
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        labels = torch.multinomial(counts.float(), 60, True, generator=generator)
        scores = 0.03 * torch.randn(60, 10, generator=generator)
        losses = {tau: mean_class_nll(icm.adjust_scores(scores, counts, tau), labels) for tau in TAUS}
        found = icm.fit_adjustment(scores, labels, counts)
        assert losses[found] == pytest.approx(min(losses.values()), abs=1e-9)


def test_of_equally_good_taus_the_one_nearest_to_1_is_taken() -> None:
    assert pick_tau(lambda tau: 0.5) == 1.0
    assert pick_tau(lambda tau: -1e-12 * tau) == 1.0  # rounding errors
    assert pick_tau(lambda tau: max(tau - 0.4, 0)) == 0.4


def test_on_few_images_it_is_nearer_to_the_best_tau_than_a_choice_by_accuracy() -> None:
    errors: dict[str, list[float]] = {"loss": [], "accuracy": []}
    for seed in range(30):
        scores, labels = long_tail(100, 0.6, seed)
        accuracies = {tau: accuracy(icm.adjust_scores(scores, COUNTS, tau), labels) for tau in TAUS}
        chosen = {
            "loss": icm.fit_adjustment(scores, labels, COUNTS),
            "accuracy": max(TAUS, key=lambda tau: (accuracies[tau], -abs(tau - 1))),
        }
        for name, tau in chosen.items():
            errors[name].append(abs(tau - 0.6))
    assert fmean(errors["loss"]) < 0.6 * fmean(errors["accuracy"])


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
