"""Predictions of a run: the scores of every test image, stored beside its result.

predictions.npz holds four arrays and no pickles, so that `numpy.load(path)` reads it anywhere:

    scores        (N, C) float16, minus the largest score of each image
    labels        (N,) int64
    file_names    (N,) text, empty for datasets that are not files
    class_names   (C,) text

Subtracting a constant per image changes neither probabilities nor rankings, and float16 is finest near 0: two
scores that compete for the first place stay distinct, and large scores do not overflow.
"""

from __future__ import annotations

import io
import warnings
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from icmixup.lab.training.run_folder import Row, Run, write_atomically

PREDICTIONS_FILE = "predictions.npz"
REMEDY = "run the command that trained it again to evaluate its checkpoint"
# What numpy raises for a file that is cut short, is another array, or holds pickles.
DAMAGE = (ValueError, KeyError, TypeError, EOFError, OSError, zipfile.BadZipFile, zlib.error)
LOWEST = float(np.finfo(np.float16).min)


class Predictions(NamedTuple):
    """Scores of the test images of one run."""

    scores: npt.NDArray[np.float16]  # (N, C); the largest of each image is 0
    labels: npt.NDArray[np.int64]  # (N,)
    file_names: tuple[str, ...]  # N names, "" for an image without a file
    class_names: tuple[str, ...]  # C names

    @property
    def correct(self) -> npt.NDArray[np.bool_]:
        """(N,) whether the class with the largest score is the label."""
        right: npt.NDArray[np.bool_] = self.scores.argmax(axis=1) == self.labels
        return right

    def tensors(self) -> tuple[Tensor, Tensor]:
        """(N, C) float32 scores and (N,) labels as tensors."""
        return torch.from_numpy(self.scores.astype(np.float32)), torch.from_numpy(self.labels)


def make_predictions(
    scores: Tensor, labels: Tensor, file_names: Sequence[str], class_names: Sequence[str]
) -> Predictions:
    """Predictions from (N, C) scores and (N,) labels, in the precision in which they are stored."""
    below_top = scores.detach().cpu().double()
    below_top = (below_top - below_top.amax(dim=1, keepdim=True)).clamp(min=LOWEST)
    names = tuple(file_names) or ("",) * len(labels)
    return Predictions(
        below_top.half().numpy(), labels.cpu().numpy().astype(np.int64), names, tuple(class_names)
    )


def write_predictions(folder: Path, predictions: Predictions) -> Path:
    """Write predictions.npz into a run's folder, atomically."""
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        scores=predictions.scores.astype(np.float16),
        labels=predictions.labels.astype(np.int64),
        file_names=np.array(predictions.file_names, dtype=np.str_),
        class_names=np.array(predictions.class_names, dtype=np.str_),
    )
    write_atomically(folder / PREDICTIONS_FILE, buffer.getvalue())
    return folder / PREDICTIONS_FILE


def read_predictions(run_folder: Path) -> Predictions:
    """The predictions in a run's folder; a ValueError names a file that is missing or damaged."""
    path = run_folder / PREDICTIONS_FILE
    if not path.exists():
        raise ValueError(f"{path} does not exist; {REMEDY}")
    try:
        # From memory: numpy leaves the file open if it is damaged.
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as stored:
            predictions = Predictions(
                stored["scores"],
                stored["labels"],
                tuple(stored["file_names"].tolist()),
                tuple(stored["class_names"].tolist()),
            )
    except DAMAGE as error:
        raise ValueError(f"{path} is damaged ({error}); {REMEDY}") from error
    check_shapes(predictions, path)
    return predictions


def finished_row(run: Run) -> Row | None:
    """The row of a run that has a result and readable predictions; warns if only the latter are missing."""
    row = run.result()
    if row is None:
        return None
    try:
        read_predictions(run.folder)
    except ValueError as error:
        reason = str(error).removesuffix(f"; {REMEDY}")
        warnings.warn(f"{reason}; {run.folder.name} is evaluated again", stacklevel=2)
        return None
    return row


def check_shapes(predictions: Predictions, path: Path) -> None:
    """Raise a ValueError that names the file if its arrays do not fit together."""
    scores, labels = predictions.scores, predictions.labels
    shape = (len(labels), len(predictions.class_names))
    fits = scores.shape == shape and len(predictions.file_names) == len(labels)
    if not fits or scores.dtype != np.float16 or labels.dtype != np.int64:
        raise ValueError(
            f"{path} is damaged (scores {scores.dtype} {scores.shape}, labels {labels.dtype} {labels.shape}, "
            f"{len(predictions.file_names)} file names, {len(predictions.class_names)} class names); {REMEDY}"
        )
    low, high = (int(labels.min()), int(labels.max())) if len(labels) else (0, 0)
    if low < 0 or high >= shape[1]:
        raise ValueError(f"{path} is damaged (labels {low} to {high}, {shape[1]} classes); {REMEDY}")
