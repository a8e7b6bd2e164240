"""Per-class accuracies, confusion matrices and the most confused pairs of classes, from predictions.

per_class.csv           accuracy of every class by method, mean and standard deviation over seeds
confusion.METHOD.csv    rows: true class, columns: predicted class, test images per run (mean over seeds)
confused_pairs.csv      the most frequent confusions of every method
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from icmixup.lab.training.predictions import Predictions, read_predictions
from icmixup.lab.training.run_folder import Row, write_atomically
from icmixup.lab.wording import first_few

MOST_CONFUSED = 20  # pairs listed for each method
NAMED = 3  # classes in an error message
Matrix = npt.NDArray[np.float64]


def write_class_files(
    folder: Path, runs: Path, rows: Sequence[Row], methods: Sequence[str], class_counts: Sequence[int]
) -> list[Path]:
    """Write per_class.csv, confused_pairs.csv and a confusion matrix for each method.

    Args:
        runs: folder that contains the run folders of `rows`.
        class_counts: training images of each class.
    """
    by_method = {
        method: [read_predictions(runs / row["folder"]) for row in rows if row["method"] == method]
        for method in methods
    }
    found = {method: runs for method, runs in by_method.items() if runs}
    if not found:
        return []
    names = common_class_names([run for runs in found.values() for run in runs], len(class_counts))
    matrices = {method: [confusion_matrix(run) for run in runs] for method, runs in found.items()}
    means = {method: np.mean(each, axis=0) for method, each in matrices.items()}
    paths = [
        write_csv(folder / "per_class.csv", per_class_rows(matrices, names, class_counts)),
        write_csv(folder / "confused_pairs.csv", confused_rows(means, names)),
    ]
    for method, matrix in means.items():
        table = [
            ["true class", *names],
            *([name, *line] for name, line in zip(names, matrix.tolist(), strict=True)),
        ]
        paths.append(write_csv(folder / f"confusion.{method}.csv", table))
    return paths


def common_class_names(runs: Sequence[Predictions], num_classes: int) -> tuple[str, ...]:
    """The class names that all runs share; a ValueError if they do not."""
    first = runs[0].class_names
    for run in runs:
        if run.class_names != first or len(run.class_names) != num_classes:
            raise ValueError(
                f"predictions of different classes cannot be compared: {len(run.class_names)} classes "
                f"({first_few(run.class_names, NAMED)}) and {max(len(first), num_classes)} "
                f"({first_few(first, NAMED)})"
            )
    return first


def confusion_matrix(predictions: Predictions) -> Matrix:
    """(C, C) numbers of test images by true class (rows) and predicted class (columns)."""
    size = len(predictions.class_names)
    cells = predictions.labels * size + predictions.scores.argmax(axis=1)
    return np.bincount(cells, minlength=size * size).reshape(size, size).astype(np.float64)


def per_class_rows(
    matrices: dict[str, list[Matrix]], names: Sequence[str], class_counts: Sequence[int]
) -> list[list[object]]:
    """One row per method and class; accuracy is empty for a class without test images."""
    rows: list[list[object]] = [
        ["method", "class", "train_images", "test_images", "accuracy", "std", "seeds"]
    ]
    for method, each in matrices.items():
        for label, name in enumerate(names):
            tested = int(each[0][label].sum())
            shares = [100 * matrix[label, label] / tested for matrix in each] if tested else []
            mean = round(float(np.mean(shares)), 4) if shares else ""
            std = round(float(np.std(shares, ddof=1)), 4) if len(shares) > 1 else ""
            rows.append([method, name, class_counts[label], tested, mean, std, len(each)])
    return rows


def confused_rows(means: dict[str, Matrix], names: Sequence[str]) -> list[list[object]]:
    """The most confused pairs of each method, most test images first."""
    rows: list[list[object]] = [
        ["method", "true_class", "predicted_class", "images", "percent_of_true_class"]
    ]
    for method, matrix in means.items():
        wrong = matrix * (1 - np.eye(len(names)))
        for cell in np.argsort(-wrong, axis=None, kind="stable")[:MOST_CONFUSED].tolist():
            true, predicted = divmod(cell, len(names))
            images = float(wrong[true, predicted])
            if images:
                share = round(100 * images / float(matrix[true].sum()), 4)
                rows.append([method, names[true], names[predicted], round(images, 4), share])
    return rows


def write_csv(path: Path, rows: Sequence[Sequence[object]]) -> Path:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_atomically(path, text.getvalue().encode())
    return path
