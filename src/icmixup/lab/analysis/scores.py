"""Scores of images between two classes: confidence and class difference as functions of lam.

This is the paper's last figure. For one test image per class and all ordered pairs of classes (a, b), images
are mixed as x~ = lam x_a + (1 - lam) x_b. Each mixed image has a squared norm, and a class difference: the
score of class a minus the score of class b.

The paper calls its norm class-independent and does not define it further, so three norms are measured: of the
scores; of the scores minus their mean, since a constant added to all scores of an image does not change its
prediction but changes the pair axis; and of the features, the input of the last layer.

The paper states lam from 0 to 1 in steps of 0.1 and 99K images of CIFAR-100, which is ten steps of 9,900
ordered pairs. We use all eleven steps, 108,900 images. Since (a, b) at lam equals (b, a) at 1 - lam, the mean
norm is symmetric about lam = 0.5, and the mean difference is 0 there.

K classes with a test image    P = K (K - 1) ordered pairs    B mixed images    C classes    D features
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from icmixup.lab.analysis.runs import (
    check_trained_on_images,
    describe_run,
    expand_comparisons,
    line_names,
    load_model,
)
from icmixup.lab.augment import normalise
from icmixup.lab.datasets import Dataset, Split
from icmixup.lab.training.data import remember_data
from icmixup.lab.training.evaluate import inference
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.identity import autocast_dtype
from icmixup.lab.training.output import rows_as_csv, write_output
from icmixup.lab.training.run_folder import Row
from icmixup.lab.training.trained import find_run, load_run_data

LAMS = tuple(step / 10 for step in range(11))
PROVENANCE = ("device", "torch", "commit", "date")  # of a run's row, repeated in ours


class Point(NamedTuple):
    """Measurements over all pairs at one lam."""

    lam: float
    images: int  # mixed images, P
    squared_norm: float  # of the scores, mean over pairs
    centred_norm: float  # squared norm of the scores minus their mean, mean over pairs
    feature_norm: float  # squared norm of the input of the last linear layer; nan without such a layer
    difference_mean: float  # score of the first class minus score of the second
    difference_std: float  # population standard deviation over the P pairs


def analyse_runs(
    folders: Sequence[Path],
    *,
    data_dir: Path,
    device: torch.device,
    image_seeds: Sequence[int] = (),
) -> list[Row]:
    """Analyse finished runs: one row per run, choice of test images, and lam.

    Args:
        folders: folders of finished runs, of any datasets, models and methods, or of comparisons.
        image_seeds: each draws one test image per class; if empty, the first image of each class is used.

    Returns:
        Rows with line (a name shared by runs that differ in the seed alone), run, dataset, model, method,
        seed, provenance of the run, image_seed ("first" or a number), and the fields of Point.
    """
    runs = [find_run(folder) for folder in expand_comparisons(folders)]
    check_trained_on_images(runs, "the analysis needs images")
    load = remember_data(Execution(out=Path(), data_dir=data_dir))
    rows: list[Row] = []
    for run, line in zip(runs, line_names([run.recipe for run in runs]), strict=True):
        data = load_run_data(run, load)
        model = load_model(run, data, device)
        result = run.result() or {}
        described = describe_run(run, line) | {name: result.get(name) for name in PROVENANCE}
        for seed in image_seeds or (None,):
            about = {**described, "image_seed": "first" if seed is None else seed}
            images, labels = chosen_images(data, seed, device)
            points = compute_curve(model, images, labels, autocast_dtype(run.recipe, device))
            rows += [about | point._asdict() for point in points]
    return rows


def chosen_images(data: Dataset, image_seed: int | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """(K, channels, H, W) normalised test images, one per class, and their (K,) labels."""
    split = data.test[choose_rows(data.test, image_seed)].to(device)
    if len(split) < 2:
        raise ValueError(
            f"the test set of {data.name} has images of {len(split)} class; pairs need at least 2"
        )
    return normalise(split.square(), data.mean, data.std), split.labels


def choose_rows(split: Split, image_seed: int | None) -> Tensor:
    """(K,) indices into the split, one per class: the first image, or one drawn with the seed."""
    generator = torch.Generator().manual_seed(image_seed or 0)
    present = torch.bincount(split.labels).nonzero().flatten()
    rows = [(split.labels == label).nonzero().flatten() for label in present]
    draws = [torch.randint(len(own), (), generator=generator) for own in rows]
    return torch.stack([own[0 if image_seed is None else k] for own, k in zip(rows, draws, strict=True)])


def compute_curve(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    autocast_dtype: torch.dtype | None = None,
    *,
    block: int = 1000,
) -> list[Point]:
    """Points of a model at each of LAMS.

    Args:
        images: (K, channels, H, W) normalised images, on the device of the model.
        labels: (K,) their classes, all distinct.
        autocast_dtype: for example torch.bfloat16; None for float32.
        block: mixed images per forward pass; affects memory, not the result.
    """
    with inference(model, images.device, autocast_dtype):
        return [summarise_pairs(lam, *measure_pairs(model, images, labels, lam, block)) for lam in LAMS]


def summarise_pairs(lam: float, norms: Tensor, differences: Tensor) -> Point:
    """Reduce (P, 3) squared norms and (P,) differences to a Point."""
    scores, centred, features = norms.mean(dim=0).tolist()
    spread, mean = torch.std_mean(differences, correction=0)
    return Point(lam, len(differences), scores, centred, features, mean.item(), spread.item())


def measure_pairs(
    model: nn.Module, images: Tensor, labels: Tensor, lam: float, block: int
) -> tuple[Tensor, Tensor]:
    """(P, 3) squared norms and (P,) class differences, float64, of all ordered pairs at one lam."""
    norms, differences = [], []
    for pairs in torch.split(ordered_pairs(len(images), images.device), block):
        first, second = pairs.unbind(dim=1)
        mixed = torch.lerp(images[second], images[first], lam)  # Eq. 1, left
        scores, features = scores_and_features(model, mixed)
        own, other = (scores.gather(1, labels[part, None])[:, 0] for part in (first, second))
        measured = (scores, scores - scores.mean(dim=1, keepdim=True), features)
        norms.append(torch.stack([part.square().sum(dim=1) for part in measured], dim=1))
        differences.append(own - other)
    return torch.cat(norms), torch.cat(differences)


def scores_and_features(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """(B, C) scores and (B, D) inputs of the last linear layer, float64; (B, 1) nan without such a layer."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    inputs: list[Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, args: inputs.append(args[0])) for module in linear[-1:]
    ]
    try:
        scores: Tensor = model(images)
    finally:
        for hook in hooks:
            hook.remove()
    features = inputs[0].flatten(1) if inputs else scores.new_full((len(scores), 1), torch.nan)
    return scores.double(), features.double()


def ordered_pairs(number: int, device: torch.device) -> Tensor:
    """(P, 2) all ordered pairs of distinct indices below `number`."""
    all_pairs = torch.cartesian_prod(*[torch.arange(number, device=device)] * 2)
    return all_pairs[all_pairs[:, 0] != all_pairs[:, 1]]


def write_analysis(rows: Sequence[Row], path: Path) -> Path:
    """Write the rows as CSV; an interrupted write leaves no partial file."""
    write_output(path, rows_as_csv(rows).encode())
    return path
