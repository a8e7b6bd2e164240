"""What a report keeps of the predictions of a run: correctness, calibration, confusions, confident mistakes.

N test images, C classes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from icmixup.lab.comparison.classes import Matrix, confusion_matrix
from icmixup.lab.training.evaluate import (
    CALIBRATION_BINS,
    confidence_and_correctness,
    confidence_bins,
    cross_fit_temperature,
    selective_risks,
)
from icmixup.lab.training.predictions import Predictions

MISTAKES = 8  # shown for each method
COVERAGES = np.linspace(0.02, 1.0, 50)  # shares of the test images at which the risk is kept


class Mistake(NamedTuple):
    """A test image that a run got wrong."""

    image: int
    file_name: str
    label: int
    predicted: int
    confidence: float  # of the predicted class after temperature scaling, from 0 to 1


class Bins(NamedTuple):
    """Images by confidence, in 15 bins of equal width: the numbers behind a calibration error."""

    images: npt.NDArray[np.float64]  # (15,)
    confidence: npt.NDArray[np.float64]  # (15,) sum over the images of a bin
    correct: npt.NDArray[np.float64]  # (15,)


class Summary(NamedTuple):
    """The predictions of one run, reduced to what is shown."""

    class_names: tuple[str, ...]
    images: str  # a digest of labels and file names: equal for runs tested on the same images
    labels: npt.NDArray[np.int64]  # (N,)
    tested: npt.NDArray[np.int64]  # (C,) test images of each class
    correct: npt.NDArray[np.bool_]  # (N,)
    bins: Bins
    bins_scaled: Bins  # after temperature scaling
    risks: npt.NDArray[np.float64]  # error rate of the most confident images, at COVERAGES, in percent
    confusion: Matrix  # (C, C)
    mistakes: tuple[Mistake, ...]  # most confident first


def summarise_predictions(predictions: Predictions) -> Summary:
    """The summary of one run."""
    scores, labels = predictions.tensors()
    scaled, _ = cross_fit_temperature(scores, labels)
    risks = selective_risks(scores, labels).numpy()
    rows = np.maximum(np.ceil(COVERAGES * len(labels)).astype(int), 1) - 1
    return Summary(
        predictions.class_names,
        images_digest(predictions.labels, predictions.file_names),
        predictions.labels,
        np.bincount(predictions.labels, minlength=len(predictions.class_names)),
        predictions.correct,
        count_bins(scores, labels),
        count_bins(scaled, labels),
        100 * risks[rows],
        confusion_matrix(predictions),
        confident_mistakes(scaled, labels, predictions.file_names),
    )


def images_digest(labels: npt.NDArray[np.int64], file_names: Sequence[str]) -> str:
    """What tells test sets apart: (N,) labels, and N file names, or none for images that are not files."""
    names = "\0".join(file_names or ("",) * len(labels)).encode()
    return hashlib.sha256(labels.astype(np.int64).tobytes() + names).hexdigest()


def count_bins(scores: Tensor, labels: Tensor) -> Bins:
    """Images, confidence and correct answers by bin of confidence."""
    confidence, right = confidence_and_correctness(scores, labels)
    index = confidence_bins(confidence).numpy()
    weights = (None, confidence.numpy(), right.numpy())
    return Bins(*(np.bincount(index, w, CALIBRATION_BINS).astype(np.float64) for w in weights))


def confident_mistakes(scores: Tensor, labels: Tensor, file_names: tuple[str, ...]) -> tuple[Mistake, ...]:
    """The wrong answers with the highest confidence; the order of the test set decides ties."""
    confidence, predicted = scores.double().softmax(dim=1).max(dim=1)
    wrong = (predicted != labels).nonzero().flatten()
    order = wrong[confidence[wrong].argsort(descending=True, stable=True)][:MISTAKES].tolist()
    return tuple(
        Mistake(row, file_names[row], int(labels[row]), int(predicted[row]), float(confidence[row]))
        for row in order
    )
