"""Baselines on long tails that change the classifier of a trained run, and nothing below it.

    adjust      logit adjustment after training: b_c - tau log(n_c / N)  (Menon et al., 2021, Sec. 4.1)
    tau-norm    w_c / |w_c|^tau, without the bias  (Kang et al., 2020, Eq. 5)
    crt         a new classifier, trained on the frozen features with class-balanced sampling  (Kang et al.)

All three end in other weights of the same network. So the result is the folder of a run, beside the first,
which `icmixup predict`, `export` and `analyse` can use. Without a given tau, it is chosen on held-out
training images; the test images take no part in it.

N training images, C classes, n_c images in class c, (C, D) classifier weights w, (C,) biases b.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from icmixup._checks import check_no_empty_class
from icmixup.adjustment import fit_adjustment, pick_tau
from icmixup.hidden import evaluation_mode
from icmixup.lab.datasets import Dataset, Split
from icmixup.lab.models import seeded
from icmixup.lab.training.classifier import adjust_bias, bias_of, linear_of
from icmixup.lab.training.data import training_data
from icmixup.lab.training.evaluate import (
    balanced_accuracy,
    class_accuracies,
    evaluate,
    split_scores,
)
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.feed import make_feed
from icmixup.lab.training.identity import autocast_dtype, identify
from icmixup.lab.training.inputs import write_inputs
from icmixup.lab.training.lock import lock_folder
from icmixup.lab.training.loop import check_sizes
from icmixup.lab.training.optimizer import make_optimizer, weight_groups
from icmixup.lab.training.predictions import finished_row, make_predictions, write_predictions
from icmixup.lab.training.ranks import pick_device
from icmixup.lab.training.recipe import After, Recipe
from icmixup.lab.training.run_folder import Row, Run, locate_run, open_run, provenance
from icmixup.lab.training.step import initial_model, make_inputs, to_device
from icmixup.lab.training.trained import find_run, load_run_data, load_run_weights

EPOCHS_SHARE = 0.1  # of the run's epochs, for crt


def retrain(
    folder: Path, how: After, execution: Execution, *, tau: float | None = None, epochs: int | None = None
) -> Row:
    """Change the classifier of the finished run in `folder`; the result is a run beside it.

    Args:
        how: "adjust", "tau-norm" or "crt".
        execution: data folder and device; its out is not used.
        tau: of the first two; None chooses it on the images that the run held out.
        epochs: of crt; a tenth of the run's by default.
    """
    run = find_run(folder)
    recipe = retrained_recipe(run, how, tau, epochs)
    device = pick_device(execution.device)
    base = replace(run.recipe, after="none")
    beside = replace(execution, out=folder.parent)
    data = load_run_data(run, lambda recipe: training_data(recipe, beside)).to(device)
    check_no_empty_class(data.class_counts)
    identity = run.identity or identify(base, data, device.type)
    row = finished_row(locate_run(folder.parent, recipe, identity))
    if row is not None:
        return row
    started = time.monotonic()
    # Before a folder is made, which would stay behind without a result.
    model = load_run_weights(run, to_device(initial_model(replace(base, weights=None), data), device))
    classifier = linear_of(model, recipe, data)
    if how == "adjust":
        bias_of(classifier, recipe)
    made = open_run(folder.parent, recipe, identity)
    with lock_folder(made.folder):
        row = finished_row(made)
        if row is not None:
            return row
        chosen = change_classifier(model, recipe, data)
        return finish(run, made, model, data, chosen, time.monotonic() - started)


def retrained_recipe(run: Run, how: After, tau: float | None, epochs: int | None) -> Recipe:
    """The recipe of the result; a ValueError says what cannot be done with this run."""
    recipe, folder = run.recipe, run.folder
    if recipe.after != "none":
        raise ValueError(f"{folder} is itself the result of {recipe.after}; pass the run it was made from")
    if recipe.cosine:
        cause = "--cosine-classifier" if recipe.cosine_classifier else recipe.method
        raise ValueError(
            f"{folder} was trained with {cause}, so its classifier compares directions and has neither norms "
            "nor biases; pass a run with a linear one"
        )
    if recipe.tau_afterwards is not None and how != "adjust":
        raise ValueError(
            f"{folder} was trained with {recipe.method}, whose adjustment is in the biases, which {how} "
            "replaces; pass a run without adjustment, for example of erm"
        )
    if how == "crt":
        if tau is not None:
            raise ValueError(f"crt has no tau, got {tau:g}; leave --tau out")
        most = recipe.epochs
        return replace(recipe, after=how, after_epochs=epochs or max(1, math.ceil(EPOCHS_SHARE * most)))
    if epochs is not None:
        raise ValueError(f"{how} trains nothing, got epochs={epochs}; leave --epochs out")
    adjusts = recipe.whole_method.adjusts
    if how == "adjust" and (adjusts or recipe.sampler == "class-balanced"):
        what = recipe.method if adjusts else "--sampler class-balanced"
        raise ValueError(
            f"{folder} was trained with {what}, which corrects for class sizes already, and adjust would do "
            "so again; pass a run without it, for example of erm"
        )
    if tau is None and not recipe.held_out:
        raise ValueError(
            f"{folder} held out no images to choose tau on; pass --tau (1 is usual), or train with "
            "--held-out 0.2"
        )
    return replace(recipe, after=how, after_tau=tau)


def change_classifier(model: nn.Module, recipe: Recipe, data: Dataset) -> float | None:
    """Give the network its new classifier, in place, and return the tau that was used."""
    if recipe.after == "crt":
        train_classifier(model, recipe, data)
        return None
    classifier = linear_of(model, recipe, data)
    bias = bias_of(classifier, recipe) if recipe.after == "adjust" else None
    tau = choose_tau(model, classifier, recipe, data) if recipe.after_tau is None else recipe.after_tau
    if bias is not None:
        adjust_bias(bias, data, tau)
    else:
        normalise_weights(classifier, tau)
    return tau


@torch.no_grad()
def normalise_weights(classifier: nn.Linear, tau: float) -> None:
    """w_c / |w_c|^tau, without the bias."""
    classifier.weight /= classifier.weight.norm(dim=1, keepdim=True) ** tau
    if classifier.bias is not None:
        classifier.bias.zero_()


def choose_tau(model: nn.Module, classifier: nn.Linear, recipe: Recipe, data: Dataset) -> float:
    """The tau of `adjust` with the lowest loss on the held-out images, as fit_adjustment says; that of
    `tau-norm` with the highest balanced accuracy: by its loss, networks that fit their few images exactly
    were not normalised at all."""
    assert data.held_out is not None, "retrained_recipe asks for held-out images"
    scores = scores_of(model, data.held_out, recipe, data)
    labels = data.held_out.labels.cpu()
    if recipe.after == "adjust":
        return fit_adjustment(scores, labels, data.class_counts)
    norms = classifier.weight.detach().norm(dim=1).float().cpu()
    plain = scores if classifier.bias is None else scores - classifier.bias.detach().float().cpu()
    return pick_tau(lambda tau: -balanced_accuracy(class_accuracies(plain / norms**tau, labels)))


def scores_of(model: nn.Module, split: Split, recipe: Recipe, data: Dataset) -> Tensor:
    """(N, C) float32 scores on the CPU."""
    dtype = autocast_dtype(recipe, split.labels.device)
    return split_scores(model, split, data.mean, data.std, autocast_dtype=dtype)


def train_classifier(model: nn.Module, recipe: Recipe, data: Dataset) -> None:
    """A new linear classifier on frozen features: cross-entropy, class-balanced sampling, half a cosine.

    Images are augmented as in the run. BatchNorm uses its running statistics, which stay as they are.
    """
    assert recipe.after_epochs is not None
    recipe = replace(
        recipe,
        method="erm",
        sampler="class-balanced",
        epochs=recipe.after_epochs,
        schedule="cosine",
        lr_drops=None,
        warmup_epochs=0,
        warmup_fraction=0.0,
        layer_decay=None,
    )
    check_sizes(recipe, data)
    device = data.train.labels.device
    classifier = linear_of(model, recipe, data)
    classifier.load_state_dict(new_classifier(classifier, recipe.seed).state_dict())
    model.requires_grad_(False)
    classifier.requires_grad_(True)
    groups = weight_groups(classifier, recipe)
    lrs = torch.zeros(len(groups), device=device)
    optimizer = make_optimizer(groups, recipe, lrs)
    feed, prepare = make_feed(recipe, data.train), make_inputs(data, device)
    dtype = autocast_dtype(recipe, device)
    with evaluation_mode(model):
        for epoch in range(recipe.epochs):
            feed.fill(epoch)
            for step in range(len(feed.epoch.lrs)):
                images, labels, lr, _ = feed.batch(step)
                lrs.copy_(lr.expand_as(lrs))
                with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
                    loss = F.cross_entropy(model(prepare(images)), labels)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()


def new_classifier(old: nn.Linear, seed: int) -> nn.Linear:
    """A linear layer of the same shape, with PyTorch's initial weights from the seed."""
    with seeded(seed):
        return nn.Linear(old.in_features, old.out_features, bias=old.bias is not None)


def finish(run: Run, made: Run, model: nn.Module, data: Dataset, tau: float | None, seconds: float) -> Row:
    """Write checkpoint, predictions and result of the new run."""
    recipe, base = made.recipe, run.result() or {}
    state = model.state_dict()
    made.save(
        {
            "model": state,
            "average": None if recipe.ema is None else state,
            "epochs_done": recipe.epochs,
            "seconds": seconds,
        }
    )
    test = data.test
    scores = scores_of(model, test, recipe, data)
    predictions = make_predictions(scores, test.labels, test.file_names, data.class_names)
    write_predictions(made.folder, predictions)
    write_inputs(made.folder, data)
    row = {
        **base,
        **recipe.fields(),
        "key": recipe.key,
        **evaluate(*predictions.tensors(), data.class_counts.cpu()),
        "minutes": round(base.get("minutes", 0.0) + seconds / 60, 3),
        **provenance(data.test.labels.device),
        "folder": made.folder.name,
        "tau_used": tau,
        "made_from": run.folder.name,
    }
    return made.finish(row)
