"""Metrics of a trained model: accuracy, per class and by class size, and calibration.

N test images, C classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean

import torch
from torch import Tensor, nn

from icmixup._checks import check_scored
from icmixup.calibration import fit_temperature, negative_log_likelihood
from icmixup.hidden import evaluation_mode
from icmixup.lab.augment import normalise
from icmixup.lab.datasets import Split

# Training images of "many-shot" and "few-shot" classes: the bounds of Liu et al. (2019).
MANY_ABOVE, FEW_BELOW = 100, 20
CALIBRATION_BINS = 15
TEST_PIXELS = 1000 * 64 * 64  # per batch on a CPU, in evaluation

Metrics = dict[str, float | list[float | None] | None]


def evaluate(scores: Tensor, labels: Tensor, class_counts: Tensor) -> Metrics:
    """Compute all metrics of one model on one test set.

    Accuracies and calibration errors are percentages, NLL is in nats. The scaled NLL and calibration error
    are those of scores / T, where T of each half of the test set is fitted on the other half, so that the
    temperature of an image does not depend on its own label (see `two_folds`).

    Args:
        scores: (N, C) logits of the whole test set.
        labels: (N,) integers; a class may be absent.
        class_counts: (C,) training images of each class.

    Returns:
        accuracy: of all test images.
        class_accuracies: list of C, None for a class without test images.
        many, medium, few: balanced accuracy of the classes of > 100, 20 to 100 and < 20 training images;
            None if there is no such class.
        nll, calibration_error: of the scores as given; expected calibration error with 15 bins.
        adaptive_calibration_error: the same with 15 bins of equally many images.
        brier_score: mean over images of the squared error of all C probabilities, from 0 to 2.
        risk_coverage_area: mean error rate of the k most confident images, over all k, in percent.
        coverage_at_5_risk: largest share of images, most confident first, of which at most 5 % are wrong.
        nll_scaled, calibration_error_scaled: after temperature scaling, as above.
        fitted_temperature: mean of the temperatures of both halves.
    """
    scores, labels, class_counts = scores.detach().cpu(), labels.cpu(), class_counts.cpu()
    check_evaluable(scores, labels, class_counts)
    scaled, temperature = cross_fit_temperature(scores, labels)
    return {
        **unscaled_metrics(scores, labels, class_counts),
        "nll_scaled": negative_log_likelihood(scaled, labels),
        "calibration_error_scaled": calibration_error(scaled, labels),
        "fitted_temperature": temperature,
    }


def unscaled_metrics(scores: Tensor, labels: Tensor, class_counts: Tensor) -> Metrics:
    """The metrics of `evaluate` that need no temperature."""
    per_class = class_accuracies(scores, labels)
    return {
        "accuracy": 100 * (scores.argmax(dim=1) == labels).double().mean().item(),
        "class_accuracies": per_class,
        **size_group_accuracies(per_class, class_counts),
        "nll": negative_log_likelihood(scores, labels),
        "calibration_error": calibration_error(scores, labels),
        "adaptive_calibration_error": adaptive_calibration_error(scores, labels),
        "brier_score": brier_score(scores, labels),
        "risk_coverage_area": risk_coverage_area(scores, labels),
        "coverage_at_5_risk": coverage_at_risk(scores, labels, 0.05),
    }


def class_accuracies(scores: Tensor, labels: Tensor) -> list[float | None]:
    """Accuracy of each of the C classes in percent, None for a class without test images."""
    right = labels[scores.argmax(dim=1) == labels]
    counts = (part.bincount(minlength=scores.shape[1]).tolist() for part in (right, labels))
    return [100 * r / n if n else None for r, n in zip(*counts, strict=True)]


def balanced_accuracy(per_class: Iterable[float | None]) -> float:
    """Accuracy averaged over the classes that have test images, from what class_accuracies returns."""
    return fmean(accuracy for accuracy in per_class if accuracy is not None)


def size_group_accuracies(per_class: Sequence[float | None], class_counts: Tensor) -> dict[str, float | None]:
    """Balanced accuracy of the classes with many, medium and few training images."""
    groups: dict[str, list[float]] = {"many": [], "medium": [], "few": []}
    for accuracy, count in zip(per_class, class_counts.tolist(), strict=True):
        if accuracy is not None:
            groups[size_group(count)].append(accuracy)
    return {name: fmean(group) if group else None for name, group in groups.items()}


def size_group(count: int) -> str:
    if count > MANY_ABOVE:
        return "many"
    return "few" if count < FEW_BELOW else "medium"


def calibration_error(scores: Tensor, labels: Tensor) -> float:
    """Expected calibration error in percent: mean |confidence - accuracy| over 15 bins of confidence."""
    confidence, right = confidence_and_correctness(scores, labels)
    gaps = torch.zeros(CALIBRATION_BINS, dtype=torch.float64)
    gaps.index_add_(0, confidence_bins(confidence), confidence - right)
    return 100 * gaps.abs().sum().item() / len(labels)


def confidence_bins(confidence: Tensor) -> Tensor:
    """(N,) bin of each confidence, of 15 of equal width; a confidence on an edge belongs to the bin above."""
    edges = torch.linspace(0, 1, CALIBRATION_BINS + 1, dtype=confidence.dtype)[1:-1]
    return torch.bucketize(confidence, edges, right=True)


def adaptive_calibration_error(scores: Tensor, labels: Tensor) -> float:
    """Calibration error in percent with bins of equally many images instead of equal width.

    Confidences of trained networks crowd near 1, where bins of equal width put nearly all images into one.
    """
    confidence, right = confidence_and_correctness(scores, labels)
    order = confidence.argsort()
    gaps = [
        abs((confidence[rows] - right[rows]).sum()) for rows in torch.tensor_split(order, CALIBRATION_BINS)
    ]
    return 100 * float(sum(gaps)) / len(labels)


def brier_score(scores: Tensor, labels: Tensor) -> float:
    """Mean of sum_c (p_c - y_c)^2, from 0 to 2."""
    errors = scores.double().softmax(dim=1)
    errors[torch.arange(len(labels)), labels] -= 1
    return errors.square().sum(dim=1).mean().item()


def selective_risks(scores: Tensor, labels: Tensor) -> Tensor:
    """(N,) error rate of the k most confident images, for k = 1 to N."""
    confidence, right = confidence_and_correctness(scores, labels)
    wrong = 1 - right[confidence.argsort(descending=True, stable=True)]
    return wrong.cumsum(0) / torch.arange(1, len(labels) + 1)


def risk_coverage_area(scores: Tensor, labels: Tensor) -> float:
    """Area under the risk-coverage curve, in percent: small if the least confident images are the wrong
    ones, and about the error rate if confidence says nothing."""
    return 100 * selective_risks(scores, labels).mean().item()


def coverage_at_risk(scores: Tensor, labels: Tensor, risk: float) -> float:
    """Largest share of the images in percent, most confident first, with an error rate of at most `risk`."""
    within = (selective_risks(scores, labels) <= risk).nonzero()
    return 100 * (int(within[-1]) + 1) / len(labels) if len(within) else 0.0


def confidence_and_correctness(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(N,) probability of the predicted class, and (N,) 1 where it is the label, both float64."""
    confidence, predicted = scores.double().softmax(dim=1).max(dim=1)
    return confidence, (predicted == labels).double()


def cross_fit_temperature(scores: Tensor, labels: Tensor) -> tuple[Tensor, float]:
    """Divide the scores of each half of the test set by the temperature fitted on the other half.

    Returns:
        (N, C) scaled scores, and the mean of the two temperatures.
    """
    second = two_folds(labels)
    for_second = fit_temperature(scores[~second], labels[~second])
    for_first = fit_temperature(scores[second], labels[second])
    temperatures = torch.where(second, for_second, for_first)
    return scores / temperatures[:, None], (for_first + for_second) / 2


def two_folds(labels: Tensor) -> Tensor:
    """(N,) True for images in the second fold; the images of a class alternate between the folds.

    The alternation continues from class to class, so that classes of one image are not all in the same fold.
    """
    second = torch.empty(len(labels), dtype=torch.bool)
    second[labels.argsort(stable=True)] = torch.arange(len(labels)) % 2 == 1
    return second


def check_evaluable(scores: Tensor, labels: Tensor, class_counts: Tensor) -> None:
    """Raise an error for inputs that `evaluate` does not support."""
    check_scored(scores, labels)
    check_test_size(len(scores))
    if class_counts.shape != scores.shape[1:]:
        raise ValueError(
            f"class_counts must be ({scores.shape[1]},), one count for each class of the scores, "
            f"got {tuple(class_counts.shape)}"
        )


def check_test_size(images: int) -> None:
    """Raise an error for a test set that cannot be halved."""
    if images < 2:
        raise ValueError(
            f"the test set must have at least 2 images, got {images}, "
            "because the temperature of each half is fitted on the other: add test images"
        )


def split_scores(
    model: nn.Module,
    split: Split,
    mean: Sequence[float] | Tensor,
    std: Sequence[float] | Tensor,
    *,
    batch_size: int | None = None,
    autocast_dtype: torch.dtype | None,
) -> Tensor:
    """Compute the scores of all images of a split in evaluation mode; the mode of each module is restored.

    Args:
        model: takes (B, channels, H, W) float32, on any device.
        split: N images (uint8, not augmented) with their labels.
        mean, std: (channels,) of pixels in [0, 1], the ones used in training.
        batch_size: affects speed and memory, not the scores; by default 1000, or fewer images above 64 x 64.
        autocast_dtype: for example torch.bfloat16; None for float32.

    Returns:
        (N, C) float32 on the CPU.
    """
    device = next(model.parameters()).device
    mean = torch.as_tensor(mean, dtype=torch.float32, device=device)
    std = torch.as_tensor(std, dtype=torch.float32, device=device)
    blocks: list[Tensor] = []
    with inference(model, device, autocast_dtype):
        side = split.images.shape[-1] if split.images.dim() == 4 else 1
        size = batch_size or test_batch_size(side, device)
        for images in split.blocks(size):
            images = images.to(device)
            # Features and other floats stay as they are; a network may change its inputs in place.
            inputs = normalise(images, mean, std) if images.dtype == torch.uint8 else images.clone()
            if device.type == "cuda" and blocks:
                inputs = fill_up(inputs, size)
            blocks.append(model(inputs)[: len(images)].float())
    # Copied once at the end, to avoid a synchronisation after each block.
    return torch.cat(blocks).cpu()


def fill_up(inputs: Tensor, size: int) -> Tensor:
    """(size, ...): the inputs, followed by zeros, so that all batches have the shape of the first.

    cuDNN plans its convolutions for every new shape, which takes seconds.
    """
    return torch.cat([inputs, inputs.new_zeros(size - len(inputs), *inputs.shape[1:])])


def test_batch_size(side: int, device: torch.device) -> int:
    """Images per batch in evaluation, such that large images need no more memory than training on them."""
    pixels = TEST_PIXELS * (8 if device.type == "cuda" else 1)
    return max(1, min(1000, pixels // side**2))


@contextmanager
def inference(model: nn.Module, device: torch.device, autocast_dtype: torch.dtype | None) -> Iterator[None]:
    """Context in which a trained network is used: in evaluation mode, without gradients, under autocast.

    Args:
        autocast_dtype: for example torch.bfloat16; None for float32.
    """
    autocast = torch.autocast(device.type, dtype=autocast_dtype, enabled=autocast_dtype is not None)
    with evaluation_mode(model), torch.inference_mode(), autocast:
        yield
