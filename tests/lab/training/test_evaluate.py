"""Metrics compared with loops, and the scores of a split."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_calibration_error

from icmixup.calibration import fit_temperature, negative_log_likelihood
from icmixup.lab.augment import normalise
from icmixup.lab.datasets import Split
from icmixup.lab.models import build_model
from icmixup.lab.training.evaluate import (
    calibration_error,
    class_accuracies,
    cross_fit_temperature,
    evaluate,
    fill_up,
    split_scores,
    two_folds,
)

N, C = 400, 6
COUNTS = torch.tensor([101, 100, 20, 19, 500, 0])


def random_scores(seed: int = 0, n: int = N, c: int = C, sharpness: float = 3.0) -> tuple[Tensor, Tensor]:
    """Overconfident scores that are right for about half of the images."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(c, (n,), generator=generator)
    signal = 1.5 * nn.functional.one_hot(labels, c)
    return sharpness * (signal + torch.randn(n, c, generator=generator)), labels


def loop_calibration_error(scores: Tensor, labels: Tensor) -> float:
    probabilities = scores.double().softmax(dim=1)
    bins: list[list[tuple[float, float]]] = [[] for _ in range(15)]
    for row, label in zip(probabilities, labels, strict=True):
        confidence, prediction = row.max(), row.argmax()
        bins[min(int(confidence * 15), 14)].append((confidence.item(), float(prediction == label)))
    gaps = [abs(sum(c for c, _ in b) - sum(r for _, r in b)) for b in bins]
    return 100 * sum(gaps) / len(labels)


def loop_class_accuracy(scores: Tensor, labels: Tensor, classes: list[int]) -> float:
    """Mean over classes of the accuracy in percent."""
    shares = []
    for c in classes:
        rows = [i for i, label in enumerate(labels.tolist()) if label == c]
        shares.append(sum(scores[i].tolist().index(max(scores[i].tolist())) == c for i in rows) / len(rows))
    return 100 * sum(shares) / len(shares)


def test_accuracies_equal_those_of_a_loop() -> None:
    scores, labels = random_scores()
    metrics = evaluate(scores, labels, COUNTS)
    right = sum(row.argmax().item() == label for row, label in zip(scores, labels.tolist(), strict=True))
    assert metrics["accuracy"] == pytest.approx(100 * right / N)
    assert metrics["class_accuracies"] == pytest.approx(
        [loop_class_accuracy(scores, labels, [c]) for c in range(C)]
    )


def test_many_medium_and_few_are_separated_at_100_and_20_images() -> None:
    scores, labels = random_scores()
    metrics = evaluate(scores, labels, COUNTS)
    assert metrics["many"] == pytest.approx(loop_class_accuracy(scores, labels, [0, 4]))
    assert metrics["medium"] == pytest.approx(loop_class_accuracy(scores, labels, [1, 2]))
    assert metrics["few"] == pytest.approx(loop_class_accuracy(scores, labels, [3, 5]))


def test_a_group_without_classes_is_none() -> None:
    metrics = evaluate(*random_scores(), torch.full((C,), 50))
    assert metrics["many"] is None
    assert metrics["few"] is None
    assert metrics["medium"] is not None


@pytest.mark.parametrize("sharpness", [0.1, 1.0, 3.0, 100.0])
def test_calibration_error_equals_that_of_a_loop(sharpness: float) -> None:
    scores, labels = random_scores(sharpness=sharpness)
    assert calibration_error(scores, labels) == pytest.approx(
        loop_calibration_error(scores, labels), rel=1e-4
    )


@pytest.mark.parametrize("sharpness", [0.0, 0.1, 3.0])  # 0: all images on the edge of two bins
def test_metrics_equal_those_of_torchmetrics(sharpness: float) -> None:
    scores, labels = random_scores(c=5, sharpness=sharpness)
    theirs = multiclass_calibration_error(scores.double().softmax(dim=1), labels, 5, n_bins=15)
    assert calibration_error(scores, labels) == pytest.approx(100 * theirs.item(), rel=1e-5)
    shares = multiclass_accuracy(scores, labels, 5, average=None)
    assert class_accuracies(scores, labels) == pytest.approx((100 * shares).tolist(), rel=1e-5)


def test_certain_and_nearly_certain_images_share_the_last_bin() -> None:
    # Confidence 1 but sometimes wrong, and 0.99 but always right: the gaps cancel only if they share a bin.
    scores = torch.tensor([[200.0, 0.0]] * 5 + [[4.6, 0.0]] * 5)
    labels = torch.tensor([0, 0, 0, 0, 1] + [0] * 5)
    assert calibration_error(scores, labels) == pytest.approx(
        loop_calibration_error(scores, labels), rel=1e-4
    )


def test_images_of_a_class_alternate_between_the_folds() -> None:
    labels = torch.randint(7, (201,), generator=torch.Generator().manual_seed(0))
    second = two_folds(labels)
    assert abs(int(second.sum()) - int((~second).sum())) <= 1
    for c in range(7):
        folds = second[labels == c].int()
        assert bool((folds.diff().abs() == 1).all())


def test_one_image_per_class_still_fills_both_folds() -> None:
    assert two_folds(torch.tensor([3, 1, 0, 2])).tolist() == [True, True, False, False]


def test_each_half_is_scaled_by_the_temperature_of_the_other() -> None:
    scores, labels = random_scores()
    second = two_folds(labels)
    scaled, temperature = cross_fit_temperature(scores, labels)
    of_first, of_second = (fit_temperature(scores[fold], labels[fold]) for fold in (~second, second))
    assert of_first != of_second
    torch.testing.assert_close(scaled[second], scores[second] / of_first)
    torch.testing.assert_close(scaled[~second], scores[~second] / of_second)
    assert temperature == pytest.approx((of_first + of_second) / 2)


def test_the_temperature_of_an_image_does_not_depend_on_its_own_fold() -> None:
    scores, labels = random_scores()
    second = two_folds(labels)
    disturbed = scores.clone()
    disturbed[second] = -disturbed[second]
    before, after = cross_fit_temperature(scores, labels)[0], cross_fit_temperature(disturbed, labels)[0]
    torch.testing.assert_close(after[second], -before[second])


def test_scaling_keeps_predictions_and_calibrates_overconfident_scores() -> None:
    scores, labels = random_scores(n=2000)
    metrics = evaluate(scores, labels, COUNTS)
    scaled, _ = cross_fit_temperature(scores, labels)
    assert torch.equal(scaled.argmax(dim=1), scores.argmax(dim=1))
    assert metrics["nll"] == pytest.approx(negative_log_likelihood(scores, labels))
    assert metrics["nll_scaled"] == pytest.approx(negative_log_likelihood(scaled, labels))
    assert metrics["calibration_error_scaled"] == pytest.approx(
        loop_calibration_error(scaled, labels), rel=1e-4
    )
    # Signal 1.5 in unit noise: the true log-odds are 1.5 times the differences of scores at sharpness 1.
    assert metrics["fitted_temperature"] == pytest.approx(3.0 / 1.5, rel=0.1)
    assert metrics["calibration_error_scaled"] < 5 < metrics["calibration_error"]


def test_classes_without_test_images_are_none_and_in_no_group() -> None:
    scores, labels = random_scores()
    labels = labels.clamp(min=3)
    metrics = evaluate(scores, labels, COUNTS)
    assert metrics["class_accuracies"][:3] == [None, None, None]
    assert metrics["medium"] is None
    assert metrics["many"] == pytest.approx(loop_class_accuracy(scores, labels, [4]))


def test_two_classes_and_two_images_are_accepted() -> None:
    metrics = evaluate(torch.tensor([[2.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1]), torch.tensor([1, 1]))
    assert metrics["class_accuracies"] == [100.0, 0.0]
    assert metrics["accuracy"] == 50.0


def test_metrics_can_be_written_as_strict_json() -> None:
    scores, labels = random_scores()
    metrics = evaluate(scores, labels.clamp(min=3), COUNTS)
    assert json.loads(json.dumps(metrics, allow_nan=False)) == metrics


@pytest.mark.parametrize(
    ("scores", "labels", "counts", "words"),
    [
        (torch.full((4, 2), float("nan")), torch.tensor([0, 1, 0, 1]), torch.ones(2), "4 of 4 .* nan"),
        (torch.zeros(4, 2), torch.tensor([0, 1, 2, 1]), torch.ones(2), "labels range from 0 to 2"),
        (
            torch.zeros(4, 2),
            torch.tensor([0, 1, 0, 1]),
            torch.ones(3),
            r"class_counts must be \(2,\).*got \(3,\)",
        ),
        (torch.zeros(1, 2), torch.tensor([0]), torch.ones(2), "at least 2 images, got 1"),
        (
            torch.zeros(4, 1),
            torch.tensor([0, 0, 0, 0]),
            torch.ones(1),
            r"scores have shape \(4, 1\): one class",
        ),
    ],
)
def test_invalid_input_is_refused(scores: Tensor, labels: Tensor, counts: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        evaluate(scores, labels, counts)


MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.25)


def random_split(n: int = 25) -> Split:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (n, 3, 8, 8), generator=generator, dtype=torch.uint8)
    return Split(images=images, labels=torch.zeros(n, dtype=torch.int64))


def test_scores_of_a_split_equal_those_of_one_forward_in_evaluation_mode() -> None:
    model, split = build_model("small-cnn", 4, seed=0), random_split()
    model(torch.randn(8, 3, 8, 8))  # moves the running statistics away from 0 and 1
    scores = split_scores(model, split, MEAN, STD, batch_size=10, autocast_dtype=None)
    model.eval()
    expected = model(normalise(split.images, torch.tensor(MEAN), torch.tensor(STD)))
    torch.testing.assert_close(scores, expected)
    assert not scores.requires_grad


def test_images_that_fill_up_a_batch_change_no_scores() -> None:
    model, inputs = build_model("small-cnn", 4, seed=0).eval(), torch.randn(3, 3, 16, 16)
    filled = fill_up(inputs, 8)
    assert filled.shape == (8, 3, 16, 16)
    torch.testing.assert_close(model(filled)[:3], model(inputs))
    assert torch.equal(fill_up(inputs, 3), inputs)


def test_scoring_changes_neither_modes_nor_statistics() -> None:
    model = build_model("small-cnn", 4, seed=0)
    model.stem.eval()  # frozen by the user
    modes = [m.training for m in model.modules()]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    split_scores(model, random_split(), MEAN, STD, autocast_dtype=None)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())


def test_modes_are_restored_when_the_model_raises() -> None:
    model = build_model("small-cnn", 4, channels=1, seed=0)
    with pytest.raises(RuntimeError):
        split_scores(model, random_split(), MEAN, STD, autocast_dtype=None)
    assert all(m.training for m in model.modules())


def test_autocast_scores_are_close_and_returned_as_float32() -> None:
    model, split = build_model("small-cnn", 4, seed=0), random_split()
    exact, autocast = (
        split_scores(model, split, torch.tensor(MEAN), torch.tensor(STD), autocast_dtype=dtype)
        for dtype in (None, torch.bfloat16)
    )
    assert autocast.dtype == torch.float32
    torch.testing.assert_close(autocast, exact, rtol=0.1, atol=0.05)
    assert not torch.equal(autocast, exact)


# Metrics of probabilities and of confidence


def test_the_brier_score_is_a_loop_over_images_and_classes() -> None:
    scores, labels = random_scores()
    total = 0.0
    for row, label in zip(scores.double().softmax(dim=1).tolist(), labels.tolist(), strict=True):
        total += sum((p - (c == label)) ** 2 for c, p in enumerate(row))
    assert evaluate(scores, labels, torch.full((C,), 50))["brier_score"] == pytest.approx(total / len(labels))


def test_adaptive_bins_have_equally_many_images() -> None:
    """Of 45 images, each of 15 bins has 3; the gap of a bin counts by its images."""
    scores, labels = random_scores(n=45)
    probabilities = scores.double().softmax(dim=1)
    images = sorted(
        (max(row), int(row.index(max(row)) == label))
        for row, label in zip(probabilities.tolist(), labels.tolist(), strict=True)
    )
    gaps = [abs(sum(p - right for p, right in images[k : k + 3])) for k in range(0, 45, 3)]
    found = evaluate(scores, labels, torch.full((C,), 50))["adaptive_calibration_error"]
    assert found == pytest.approx(100 * sum(gaps) / 45)


def test_risk_and_coverage_follow_the_images_in_order_of_confidence() -> None:
    scores, labels = random_scores()
    confidence, top = scores.double().softmax(dim=1).max(dim=1)
    order = sorted(range(len(labels)), key=lambda k: -confidence[k].item())
    wrong, risks = 0, []
    for number, k in enumerate(order, start=1):
        wrong += int(top[k] != labels[k])
        risks.append(wrong / number)
    found = evaluate(scores, labels, torch.full((C,), 50))
    assert found["risk_coverage_area"] == pytest.approx(100 * sum(risks) / len(risks))
    within = [number for number, risk in enumerate(risks, start=1) if risk <= 0.05]
    assert found["coverage_at_5_risk"] == pytest.approx(100 * max(within, default=0) / len(risks))


def test_a_perfect_classifier_has_no_risk_and_covers_everything() -> None:
    labels = torch.arange(C).repeat(4)
    found = evaluate(20.0 * torch.eye(C)[labels], labels, torch.full((C,), 50))
    assert (found["risk_coverage_area"], found["coverage_at_5_risk"]) == (0.0, 100.0)
    never = evaluate(-20.0 * torch.eye(C)[labels], labels, torch.full((C,), 50))
    assert (never["risk_coverage_area"], never["coverage_at_5_risk"]) == (100.0, 0.0)
