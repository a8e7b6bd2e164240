"""Cross-validation: the runs of all folds of a method and seed, pooled into one row.

Every image is tested once per seed, by the network that was not trained on it. Together the folds predict all
images, and are treated as one run: metrics, statistics and tables are computed from its predictions. They are
stored in a folder of their own beside the runs:

    predictions.npz    the scores of all images
    folds.json         the pooled row, with the folders of the folds
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from icmixup.lab.datasets import Dataset, take_fold
from icmixup.lab.training.data import remember_data
from icmixup.lab.training.evaluate import evaluate
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.predictions import Predictions, read_predictions, write_predictions
from icmixup.lab.training.recipe import Recipe
from icmixup.lab.training.run_folder import Row, write_atomically
from icmixup.lab.training.stored import FOLDS_FILE


def fold_recipes(recipe: Recipe) -> list[Recipe]:
    """The runs of one method and seed: one for each fold, or the recipe itself without cross-validation."""
    if recipe.folds is None:
        return [recipe]
    return [replace(recipe, fold=fold) for fold in range(1, recipe.folds + 1)]


def first_fold(recipe: Recipe, whole: Dataset) -> Dataset:
    """What the first run trains and tests on: one fold of cross-validation, otherwise all images."""
    fold = fold_recipes(recipe)[0]
    return whole if fold.fold is None else take_fold(whole, fold.data)


def pool_folds(recipes: Sequence[Recipe], rows: Sequence[Row], execution: Execution) -> list[Row]:
    """One row for each method and seed of which all folds have finished; other rows as they are.

    Args:
        recipes: of all runs, those of the folds of a method and seed in order.
        rows: of the runs that finished.
    """
    by_key = {row["key"]: row for row in rows}
    groups: dict[Recipe, list[Recipe]] = {}
    for recipe in recipes:
        groups.setdefault(replace(recipe, fold=None), []).append(recipe)
    load = remember_data(execution)
    pooled = []
    for recipe, folds in groups.items():
        found = [by_key[fold.key] for fold in folds if fold.key in by_key]
        if recipe.folds is None:
            pooled += found
        elif len(found) == recipe.folds:
            pooled.append(pool_rows(recipe, found, execution.out, load(folds[0]).class_counts.tolist()))
    return pooled


def pool_rows(recipe: Recipe, rows: Sequence[Row], runs: Path, class_counts: Sequence[int]) -> Row:
    """The row of all folds together; its folder, with the pooled predictions, is written.

    Args:
        recipe: of all folds.
        rows: one for each fold.
        runs: folder that contains their folders.
        class_counts: training images of each class in a fold; folds differ by one at most.
    """
    predictions = pool_predictions([read_predictions(runs / row["folder"]) for row in rows])
    names = [row["folder"] for row in rows]
    key = hashlib.sha256(json.dumps(names).encode()).hexdigest()[:10]
    folder = runs / f"{recipe.title}.pooled-{key}"
    row = {
        **rows[0],
        **recipe.fields(),
        "key": recipe.key,
        **evaluate(*predictions.tensors(), torch.tensor(class_counts)),
        "loss": fmean(row["loss"] for row in rows),
        "train_images": min(row["train_images"] for row in rows),
        "minutes": round(sum(row["minutes"] for row in rows), 3),
        "images_per_second": round(fmean(row["images_per_second"] or 0 for row in rows)),
        "folder": folder.name,
        "fold_folders": names,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_predictions(folder, predictions)
    write_atomically(folder / FOLDS_FILE, json.dumps(row, indent=1).encode())
    return row


def pool_predictions(folds: Sequence[Predictions]) -> Predictions:
    """The predictions of all folds, ordered by the names of the images, which are the same for every seed."""
    names = [name for fold in folds for name in fold.file_names]
    if len(set(names)) < len(names):
        raise ValueError(
            f"{len(names) - len(set(names))} images are in more than one fold: folds must be of one partition"
        )
    if len({fold.class_names for fold in folds}) > 1:
        raise ValueError("folds have different class names; train them on the same images")
    order = np.argsort(np.array(names))
    return Predictions(
        np.concatenate([fold.scores for fold in folds])[order],
        np.concatenate([fold.labels for fold in folds])[order],
        tuple(names[row] for row in order),
        folds[0].class_names,
    )
