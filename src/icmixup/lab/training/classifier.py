"""The linear classifier of a network, and its adjustment for class sizes after training."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from icmixup.adjustment import log_prior
from icmixup.lab.datasets import Dataset
from icmixup.lab.models import CosineLinear, classifier_of
from icmixup.lab.training.recipe import Recipe
from icmixup.lab.training.step import initial_model


def check_linear_classifier(recipe: Recipe, data: Dataset) -> None:
    """Raise a ValueError for a method that changes the classifier, with a network that has none to change."""
    if not recipe.cosine and recipe.tau_afterwards is None:
        return
    model = initial_model(replace(recipe, weights=None), data)  # with a cosine classifier, if it needs one
    if recipe.tau_afterwards is not None:
        bias_of(linear_of(model, recipe, data), recipe)


def linear_of(model: nn.Module, recipe: Recipe, data: Dataset) -> nn.Linear:
    """The classifier: of a network, or the head that is trained on features."""
    classifier = model if data.is_features else classifier_of(model, recipe.model)
    assert isinstance(classifier, nn.Linear)
    assert not isinstance(classifier, CosineLinear)
    return classifier


def bias_of(classifier: nn.Linear, recipe: Recipe) -> Tensor:
    """The bias of a classifier, which logit adjustment changes."""
    bias: Tensor | None = classifier.bias
    if bias is None:
        raise ValueError(f"the classifier of {recipe.model} has no bias to adjust; use another method")
    return bias


@torch.no_grad()
def adjust_bias(bias: Tensor, data: Dataset, tau: float) -> None:
    """b_c - tau log(n_c / N), in place: adjust_scores, as a part of the network."""
    bias.sub_(tau * log_prior(data.class_counts).to(bias.device))
