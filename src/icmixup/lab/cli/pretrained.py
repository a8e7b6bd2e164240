"""What compare and train share about pretrained weights and features: the default recipe, and notes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from icmixup.lab.cli.shared import given_flags
from icmixup.lab.cli.terminal import print_note
from icmixup.lab.training.recipe import LINEAR, RECIPES, TRANSFORMER_LAYER_DECAY, Recipe, Transfer, lengthen
from icmixup.lab.wording import count

if TYPE_CHECKING:
    from icmixup.lab.datasets import Dataset
    from icmixup.lab.training.execution import Execution


def recipe_for(dataset: str, pretrained: Transfer) -> str | None:
    """The recipe for pretrained weights or features; None if there are neither."""
    if pretrained.train == "head" or is_features(dataset):
        return "head"
    return "finetune" if pretrained.weights is not None else None


def is_features(dataset: str) -> bool:
    return dataset.endswith(".npz")


def start_recipe(name: str, args: Sequence[str]) -> Recipe:
    """A named recipe; epochs that are given count as they are."""
    given = "epochs" in given_flags(args)
    return dataclasses.replace(RECIPES[name], min_steps=0) if given else RECIPES[name]


def resolve_recipe(recipe: Recipe, name: str) -> Recipe:
    """The recipe with what depends on its weights filled in: their digest, and the default layer decay.

    Args:
        name: of the recipe that the flags started from.
    """
    if is_features(recipe.dataset):
        if recipe.weights is not None:
            raise ValueError(f"{recipe.dataset} holds features, so --weights has no use; leave it out")
        if recipe.image_size is not None:
            raise ValueError(f"{recipe.dataset} holds features, so --image-size has no use; leave it out")
        return dataclasses.replace(recipe, model=LINEAR, train="head")
    if recipe.weights is None:
        if recipe.train == "head":
            raise ValueError(
                "--train head needs the features of pretrained weights; pass --weights FILE or pretrained"
            )
        if name == "finetune":
            print_note(
                f"{recipe.model} starts from random weights: the recipe finetune is for pretrained ones; "
                "pass --weights FILE or pretrained"
            )
        return recipe
    from icmixup.lab.models import preprocessing_of, uses_attention, weights_digest

    preprocessing_of(recipe.model, recipe.weights)  # an unknown model is reported before its weights
    recipe = dataclasses.replace(recipe, weights_digest=weights_digest(recipe.model, recipe.weights))
    if name == "finetune" and recipe.layer_decay is None and uses_attention(recipe.model):
        recipe = dataclasses.replace(recipe, layer_decay=TRANSFORMER_LAYER_DECAY)
    return recipe


def prepare_data(recipe: Recipe, data: Dataset, execution: Execution) -> tuple[Recipe, Dataset]:
    """Lengthen the recipe to its min_steps, compute features for --train head, and report both."""
    from icmixup.lab.comparison.folds import first_fold
    from icmixup.lab.models import start_note
    from icmixup.lab.training.data import training_data

    if note := start_note(recipe.model, recipe.weights):
        print_note(note)
    if recipe.weights is not None:
        print_loaded(recipe, data)
    if recipe.min_steps:
        longer = lengthen(recipe, len(first_fold(recipe, data).train))
        if longer.epochs > recipe.epochs:
            epochs = f"{longer.epochs} epochs instead of {recipe.epochs}"
            print_note(f"{epochs}, for at least {recipe.min_steps} steps; pass --epochs to choose")
        recipe = longer
    if recipe.train == "head" and not data.is_features:
        images = count(len(data.train) + len(data.test), "image")
        print_note(
            f"features of {images}, computed once without augmentation; methods mix the features of "
            f"{recipe.model}, and only a linear head is trained"
        )
        data = training_data(
            dataclasses.replace(recipe, method="erm"), dataclasses.replace(execution, dataset=data)
        )
    return recipe, data


def print_loaded(recipe: Recipe, data: Dataset) -> None:
    """Which weights were loaded, and how images are prepared for them."""
    from icmixup.lab.models import build_model

    _, channels, _, size = data.train.images.shape
    model = build_model(
        recipe.model,
        data.num_classes,
        channels=channels,
        seed=recipe.seed,
        weights=recipe.weights,
        image_size=size,
    )
    print_note(f"weights {recipe.weights} of {recipe.model}: {model.load_report}")
    mean, std = (", ".join(f"{value:g}" for value in part) for part in (data.mean, data.std))
    print_note(f"images of {size} pixels, mean ({mean}), std ({std})")
