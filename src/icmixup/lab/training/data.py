"""What a recipe trains and tests on: images, or the features of a frozen network."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from icmixup.lab.datasets import Dataset, load_dataset, take_fold, validation_dataset
from icmixup.lab.models import preprocessing_of
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.features import check_feature_methods, feature_dataset
from icmixup.lab.training.ranks import pick_device, rank
from icmixup.lab.training.recipe import Fingerprints, Recipe, Subset, Transfer
from icmixup.lab.training.run_folder import FEATURES_FOLDER

LoadData = Callable[[Recipe], Dataset]


def load_recipe_data(recipe: Recipe, data_dir: Path, *, show_progress: bool = False) -> Dataset:
    """The images that a recipe trains and tests on, prepared as its pretrained weights expect.

    With folds, these are all images: training_data takes the fold.
    """
    preprocessing = preprocessing_of(recipe.model, recipe.weights)
    if preprocessing is not None and recipe.image_size is not None:
        preprocessing = replace(preprocessing, image_size=recipe.image_size)
    spec = replace(recipe.data, fold=None)
    return load_dataset(spec, data_dir, preprocessing=preprocessing, show_progress=show_progress)


def training_data(recipe: Recipe, execution: Execution) -> Dataset:
    """What a recipe trains and tests on: images, or the features of a frozen network."""
    data = execution.dataset
    given = data is not None
    data = load_recipe_data(recipe, execution.data_dir) if data is None else data
    if recipe.train == "head" or data.is_features:
        check_feature_methods((recipe.method,))
    if recipe.train == "head" and not data.is_features:
        folder, device = execution.out / FEATURES_FOLDER, pick_device(execution.device)
        data = feature_dataset(recipe, data, folder, device, show_progress=rank() == 0)
    if execution.validation is not None and not given:
        data = validation_dataset(data, execution.validation)
    if not given:
        check_fingerprint(recipe, data, execution.fingerprint)
    return data if recipe.fold is None else take_fold(data, recipe.data)


def check_fingerprint(recipe: Recipe, data: Dataset, expected: str | None) -> None:
    """Raise an error if these are not the images that the sweep started with."""
    if expected is not None and data.fingerprint != expected:
        raise ValueError(
            f"the images of {recipe.dataset} have changed since this command started (fingerprint "
            f"{data.fingerprint}, was {expected}); run the same command again"
        )


def remember_data(execution: Execution) -> LoadData:
    """A loader that keeps the last dataset, and the last fold of it: runs of a sweep mostly share them."""
    load = functools.lru_cache(maxsize=1)(functools.partial(training_data, execution=execution))
    fold = functools.lru_cache(maxsize=1)(take_fold)

    def find(recipe: Recipe) -> Dataset:
        whole = replace(data_recipe(recipe), fold=None, seed=0)  # folds share their images
        data = load(whole) if execution.dataset is None else execution.dataset
        return data if recipe.fold is None else fold(data, recipe.data)

    return find


def data_recipe(recipe: Recipe) -> Recipe:
    """The part of a recipe that its data depends on; equal for runs that share their data.

    That is the seed too if there are folds, since every seed has its own.
    """
    kinds: tuple[type, ...] = (Subset, Transfer, Fingerprints) if recipe.weights is not None else (Subset,)
    names = [entry.name for kind in kinds for entry in dataclasses.fields(kind)]
    names += ["model"] if recipe.weights is not None else []
    kept = {name: getattr(recipe, name) for name in names}
    if recipe.folds is not None:
        kept |= {"folds": recipe.folds, "fold": recipe.fold, "seed": recipe.seed}
    return Recipe(dataset=recipe.dataset, method="erm", **kept)
