"""The fitted temperature against known ones, a grid, and the ends of its range."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from icmixup.calibration import FARTHEST, fit_temperature, mean_class_nll, negative_log_likelihood


def scored(n: int, c: int, temperature: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Scores and labels that softmax(scores / temperature) generates."""
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(n, c, generator=generator)
    labels = (scores / temperature).softmax(dim=1).multinomial(1, generator=generator)[:, 0]
    return scores, labels


@pytest.mark.parametrize("temperature", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("c", [2, 10])
def test_it_finds_the_temperature_that_made_the_labels(temperature: float, c: int) -> None:
    scores, labels = scored(20_000, c, temperature)
    assert fit_temperature(scores, labels) == pytest.approx(temperature, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.uint16, torch.int32])
def test_labels_may_be_integers_of_any_width(dtype: torch.dtype) -> None:
    scores, labels = scored(50, 3, 2.0)
    assert fit_temperature(scores, labels.to(dtype)) == fit_temperature(scores, labels)


@pytest.mark.parametrize(
    ("n", "c", "temperature"), [(50, 3, 2.0), (200, 100, 0.5), (7, 2, 9.0), (500, 10, 1.3)]
)
def test_no_temperature_on_a_fine_grid_is_better(n: int, c: int, temperature: float) -> None:
    scores, labels = scored(n, c, temperature)
    fitted = fit_temperature(scores, labels)
    least = negative_log_likelihood(scores.double() / fitted, labels)
    for t in fitted * torch.logspace(-2, 2, 401, dtype=torch.float64):
        assert least <= negative_log_likelihood(scores.double() / t, labels) + 1e-12
    # The slope of the loss in log T is zero there, to ten digits of T.
    step = 1e-4
    losses = [negative_log_likelihood(scores.double() / (fitted * (1 + s)), labels) for s in (-step, step)]
    assert abs(losses[1] - losses[0]) / (2 * step) < 1e-4


def test_likelihood_is_that_of_a_loop() -> None:
    scores, labels = scored(20, 4, 1.0)
    loop = -sum(row.softmax(0)[y].log().item() for row, y in zip(scores.double(), labels, strict=True)) / 20
    assert negative_log_likelihood(scores, labels) == pytest.approx(loop, rel=1e-12)


@pytest.mark.parametrize("factor", [1e-3, 0.5, 1e4])
def test_scores_k_times_as_large_give_k_times_the_temperature(factor: float) -> None:
    scores, labels = scored(300, 5, 2.0)
    scores = scores.double()
    assert fit_temperature(factor * scores, labels) == pytest.approx(factor * fit_temperature(scores, labels))


def test_a_constant_added_to_each_row_changes_nothing() -> None:
    scores, labels = scored(300, 5, 2.0)
    shifted = scores.double() + 1000 * torch.randn(300, 1, generator=torch.Generator().manual_seed(1))
    assert fit_temperature(shifted, labels) == pytest.approx(fit_temperature(scores, labels), rel=1e-8)


@pytest.mark.parametrize(("sign", "times"), [(1.0, 1 / FARTHEST), (-1.0, FARTHEST)])
def test_separable_and_upside_down_scores_stop_at_the_ends_of_the_range(sign: float, times: float) -> None:
    labels = torch.arange(60) % 3
    scores = sign * 7.0 * torch.nn.functional.one_hot(labels, 3)  # every row spans 7
    assert fit_temperature(scores, labels) == pytest.approx(7.0 * times)


def test_one_wrong_image_among_separable_ones_gives_a_finite_minimum() -> None:
    labels = torch.zeros(1000, dtype=torch.int64)
    scores = torch.tensor([[5.0, 0.0]]).repeat(1000, 1)
    labels[0] = 1
    # 999 of 1,000 right: the best confidence is 0.999, so 5 / T = log 999.
    assert fit_temperature(scores, labels) == pytest.approx(5.0 / torch.tensor(999.0).log().item(), rel=1e-6)


def test_equal_scores_leave_the_temperature_at_one() -> None:
    assert fit_temperature(torch.full((4, 3), 2.5), torch.tensor([0, 1, 2, 0])) == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_floating_type_fits_as_its_own_values_in_float64(dtype: torch.dtype) -> None:
    scores, labels = scored(200, 4, 2.0)
    scores = scores.to(dtype)
    expected = fit_temperature(scores.double(), labels)
    assert fit_temperature(scores.requires_grad_(), labels.int()) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("largest", [40_000.0, 65_504.0])
def test_float16_scores_whose_range_overflows_are_fitted(largest: float) -> None:
    scores = torch.tensor([[largest, -largest], [-largest, largest], [largest, 0.0]], dtype=torch.float16)
    labels = torch.tensor([0, 1, 1])
    expected = fit_temperature(scores.double(), labels)
    assert fit_temperature(scores, labels) == pytest.approx(expected, rel=1e-9)


def test_blocks_of_rows_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, labels = scored(101, 4, 2.0)
    whole = fit_temperature(scores, labels)
    monkeypatch.setattr("icmixup.calibration.BLOCK_ELEMENTS", 40)
    assert fit_temperature(scores, labels) == pytest.approx(whole, rel=1e-10)


@pytest.mark.parametrize(
    ("scores", "labels", "words"),
    [
        (torch.zeros(3), torch.zeros(3, dtype=torch.int64), r"scores have shape \(3,\)"),
        (torch.zeros(3, 2), torch.zeros(4, dtype=torch.int64), r"labels have shape \(4,\).*same N images"),
        (torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), "at least one"),
        (torch.zeros(3, 0), torch.zeros(3, dtype=torch.int64), r"\(3, 0\)"),
        (torch.zeros(3, 2), torch.zeros(3), "integer labels"),
        (torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), "expected floating-point"),
        (torch.zeros(2, 2), torch.tensor([0, 2]), "labels range from 0 to 2, but the classes are 0 to 1"),
        (torch.zeros(2, 2), torch.tensor([-1, 0]), "from -1 to 0"),
        (torch.zeros(2, 1), torch.tensor([0, 0]), r"shape \(2, 1\): one class; expected at least two"),
        (
            torch.tensor([[0.0, float("nan")], [0.0, 1.0]]),
            torch.tensor([0, 1]),
            "1 of 2 images .* nan or infinite",
        ),
    ],
)
def test_bad_input_is_named(scores: Tensor, labels: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fit_temperature(scores, labels)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_the_loss_over_classes_is_the_lowest_mean_of_their_losses(temperature: float) -> None:
    scores, labels = scored(60, 4, temperature)
    labels[labels == 3] = 1  # one class without images, one with many
    sizes = labels.bincount(minlength=4)
    assert len(set(sizes.tolist())) == 4

    def loss(t: float) -> float:
        return sum(negative_log_likelihood(scores / t, labels, of) for of in range(3)) / 3

    def negative_log_likelihood(scaled: Tensor, labels: Tensor, of: int) -> float:
        own = scaled[labels == of].double()
        return float((own.logsumexp(dim=1) - own[:, of]).mean())

    found = mean_class_nll(scores, labels)
    grid = torch.logspace(-2, 2, 2001, dtype=torch.float64).tolist()
    assert found == pytest.approx(min(map(loss, grid)), abs=1e-5)
    assert found <= min(map(loss, grid)) + 1e-12


def test_the_loss_over_classes_does_not_depend_on_the_scale_or_repeated_images() -> None:
    scores, labels = scored(80, 3, 2.0)
    found = mean_class_nll(scores, labels)
    assert mean_class_nll(100 * scores, labels) == pytest.approx(found)
    order = torch.cat([torch.arange(80), (labels == 0).nonzero()[:, 0]])  # one class twice
    assert mean_class_nll(scores[order], labels[order]) == pytest.approx(found)
    assert mean_class_nll(torch.zeros(80, 3), labels) == pytest.approx(math.log(3))


def test_scores_that_are_always_right_have_no_loss() -> None:
    labels = torch.arange(5)
    assert mean_class_nll(torch.eye(5), labels) == pytest.approx(0, abs=1e-9)
