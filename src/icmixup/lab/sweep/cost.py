"""The cost of a run, from its recipe alone: no images are loaded, and nothing is measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from icmixup.lab.datasets.cifar import NO_TWINS, NUM_CLASSES, TRAIN_IMAGES
from icmixup.lab.datasets.subsets import DEIC_IMAGES, subset_counts
from icmixup.lab.training.recipe import Recipe
from icmixup.methods import Method, find_method

# Work per image relative to ResNet-18, and per step regardless of its images. They only determine the order
# of runs and the estimate of their time.
WORK = {
    **{"resnet18": 1.0, "resnet34": 1.7, "resnet50": 2.5, "resnet32": 0.4, "resnet32x4": 1.7},
    **{"wrn16-8": 2.2, "small-cnn": 0.1},
}
STEP_WORK = 20.0


def work(recipe: Recipe) -> float:
    """The cost of a run, in images of a ResNet-18."""
    images = count_images(recipe)
    passes = forward_passes(find_method(recipe.method))
    steps = math.ceil(images / recipe.batch_size)
    return recipe.epochs * (images * WORK.get(recipe.model, 1.0) * passes + steps * STEP_WORK)


def count_images(recipe: Recipe) -> int:
    """Number of training images of a recipe, without loading them."""
    name = "cifar10" if recipe.dataset == NO_TWINS else recipe.dataset
    if name not in NUM_CLASSES:
        return TRAIN_IMAGES
    classes = NUM_CLASSES[name]
    each = TRAIN_IMAGES // classes if recipe.split is None else DEIC_IMAGES
    counts = subset_counts(
        torch.full((classes,), each),
        per_class=recipe.per_class,
        fraction=recipe.fraction,
        imbalance=recipe.imbalance,
    )
    return int(counts.sum())


def forward_passes(method: Method) -> int:
    """Of a step: one, or two where clean images are trained on beside mixed ones."""
    return 2 if method.draw != "none" and method.clean_weight > 0 else 1


def slowest(methods: Sequence[str]) -> str:
    """The most expensive method: two forward passes before one, Infinite Class before soft targets."""

    def cost(name: str) -> tuple[int, int, int]:
        method = find_method(name)
        return forward_passes(method), method.num_virtual, len(method.axes)

    return max(methods, key=cost)
