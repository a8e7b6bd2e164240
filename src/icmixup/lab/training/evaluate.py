"""What a trained model is worth: accuracy, by class and by class size, and how honest its probabilities are.

Letters: N test images, C classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from icmixup.lab.augment import normalise
from icmixup.lab.datasets import Split
from icmixup.calibration import check_scored, fit_temperature, negative_log_likelihood

# Training images of classes that are "many", and of classes that are "few": the bounds of Liu et al. (2019).
MANY_ABOVE, FEW_BELOW = 100, 20
CALIBRATION_BINS = 15

Metrics = dict[str, float | list[float | None] | None]


def evaluate(scores: Tensor, labels: Tensor, class_counts: Tensor) -> Metrics:
    """Every number we report of one model on one test set.

    Accuracies and calibration errors are percentages, NLL is in nats. The scaled NLL and calibration error
    are those of scores / T, where each half of the test set gets the T fitted on the other half, so that no
    image has a say in its own temperature (see `two_folds`).

    Args:
        scores: (N, C) logits of the whole test set.
        labels: (N,) integers, their classes; a class may be absent.
        class_counts: (C,) sizes of the classes in the training set.

    Returns:
        accuracy: share of test images that are right.
        class_accuracies: C of them, None where the test set has no image of that class.
        many, medium, few: mean of these over classes of > 100, 20 to 100 and < 20 training images; None
            where there is no such class.
        nll, calibration_error: of the scores as they are; 15 bins, mean absolute gap.
        nll_scaled, calibration_error_scaled: over both halves, as above.
        fitted_temperature: mean of the two halves' temperatures.
    """
    scores, labels, class_counts = scores.detach().cpu(), labels.cpu(), class_counts.cpu()
    check_evaluable(scores, labels, class_counts)
    scaled, temperature = cross_scaled(scores, labels)
    per_class = class_accuracies(scores, labels)
    return {
        "accuracy": 100 * (scores.argmax(dim=1) == labels).double().mean().item(),
        "class_accuracies": per_class,
        **size_group_accuracies(per_class, class_counts),
        "nll": negative_log_likelihood(scores, labels),
        "calibration_error": calibration_error(scores, labels),
        "nll_scaled": negative_log_likelihood(scaled, labels),
        "calibration_error_scaled": calibration_error(scaled, labels),
        "fitted_temperature": temperature,
    }


def class_accuracies(scores: Tensor, labels: Tensor) -> list[float | None]:
    """Percentage right in each of the C classes, None for a class without test images."""
    # Imported here: torchmetrics takes longer to import than the command line to answer.
    from torchmetrics.functional.classification import multiclass_accuracy

    num_classes = scores.shape[1]
    # float64, since a percentage of a few images should not print as 66.66667.
    shares = multiclass_accuracy(scores, labels, num_classes, average=None, validate_args=False).double()
    sizes = labels.bincount(minlength=num_classes)
    right = (shares * sizes).round()
    return [100 * r / n if n else None for r, n in zip(right.tolist(), sizes.tolist(), strict=True)]


def size_group_accuracies(per_class: Sequence[float | None], class_counts: Tensor) -> dict[str, float | None]:
    """Mean class accuracy of the classes with many, a medium number of and few training images."""
    groups: dict[str, list[float]] = {"many": [], "medium": [], "few": []}
    for accuracy, count in zip(per_class, class_counts.tolist(), strict=True):
        if accuracy is not None:
            groups[size_group(count)].append(accuracy)
    return {name: sum(group) / len(group) if group else None for name, group in groups.items()}


def size_group(count: int) -> str:
    if count > MANY_ABOVE:
        return "many"
    return "few" if count < FEW_BELOW else "medium"


def calibration_error(scores: Tensor, labels: Tensor) -> float:
    """Percentage by which confidence and accuracy differ, averaged over images in 15 bins of confidence."""
    from torchmetrics.functional.classification import multiclass_calibration_error

    # torchmetrics keeps a bin of its own for a confidence of exactly 1, which saturated scores would fill.
    below_one = torch.nextafter(torch.tensor(1.0), torch.tensor(0.0)).item()
    probabilities = scores.double().softmax(dim=1).clamp(max=below_one)
    error = multiclass_calibration_error(
        probabilities, labels, scores.shape[1], n_bins=CALIBRATION_BINS, norm="l1", validate_args=False
    )
    return 100 * error.item()


def cross_scaled(scores: Tensor, labels: Tensor) -> tuple[Tensor, float]:
    """Scores over the temperature that the other half of the test set asks for, and the mean of the two."""
    second = two_folds(labels)
    for_second = fit_temperature(scores[~second], labels[~second])
    for_first = fit_temperature(scores[second], labels[second])
    temperatures = torch.where(second, for_second, for_first)
    return scores / temperatures[:, None], (for_first + for_second) / 2


def two_folds(labels: Tensor) -> Tensor:
    """(N,) True for the second fold; a class's images, in the test set's order, go to either fold by turns.

    The turns run on from class to class, so that classes of one image each do not all land in one fold.
    """
    second = torch.empty(len(labels), dtype=torch.bool)
    second[labels.argsort(stable=True)] = torch.arange(len(labels)) % 2 == 1
    return second


def check_evaluable(scores: Tensor, labels: Tensor, class_counts: Tensor) -> None:
    check_scored(scores, labels)
    if len(scores) < 2:
        raise ValueError(
            "the test set has one image; it needs two or more, since one half sets the other's temperature"
        )
    if scores.shape[1] < 2 or class_counts.shape != scores.shape[1:]:
        raise ValueError(
            f"scores have {scores.shape[1]} classes and class_counts are {tuple(class_counts.shape)}; "
            "wanted (C,) counts of the training set for the same C classes, two or more"
        )


def split_scores(
    model: nn.Module,
    split: Split,
    mean: Sequence[float] | Tensor,
    std: Sequence[float] | Tensor,
    *,
    batch_size: int = 1000,
    autocast_dtype: torch.dtype | None,
) -> Tensor:
    """The model's scores of every image of a split, in evaluation mode; each module's mode is put back after.

    Args:
        model: takes (B, channels, H, W) float32, on any device.
        split: N images (uint8, not augmented) with their labels.
        mean, std: (channels,) of pixels in [0, 1], as the model was trained with.
        batch_size: images at a time; it changes speed and memory, not the scores.
        autocast_dtype: such as torch.bfloat16; None for float32.

    Returns:
        (N, C) float32 on the CPU.
    """
    device = next(model.parameters()).device
    mean = torch.as_tensor(mean, dtype=torch.float32, device=device)
    std = torch.as_tensor(std, dtype=torch.float32, device=device)
    autocast = torch.autocast(device.type, dtype=autocast_dtype, enabled=autocast_dtype is not None)
    blocks = []
    with evaluation_mode(model), torch.inference_mode(), autocast:
        for images in torch.split(split.images, batch_size):
            blocks.append(model(normalise(images.to(device), mean, std)).float())
    # Copied once at the end, so that a GPU is never waited for between blocks.
    return torch.cat(blocks).cpu()


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """model.eval() inside, and after it every module in the mode it had, also when the block raises."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
