"""What trained networks make of images between two classes: confidence and class difference along lam.

The paper's last figure: one test image a class, all pairs of classes, x~ = lam x_a + (1 - lam) x_b, and of
each mixed image a squared norm and the score of class a less that of class b.

The paper calls its norm class-independent, and says no more. Three are measured: that of the scores; that of
the scores less their mean, since a number added to all scores of an image changes no prediction, but the pair
axis moves it; and that of the features, which the last layer reads.

The paper says lam from 0 to 1 by 0.1, and 99K images of CIFAR-100: that is ten steps of 9,900 ordered pairs.
We take its eleven steps, so 108,900. Since (a, b) at lam is (b, a) at 1 - lam, the mean norm is symmetric
about lam = 0.5, and the mean difference is 0 there.

K classes that have a test image    P = K (K - 1) ordered pairs
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from icmixup.lab.augment import normalise
from icmixup.lab.datasets import Dataset, Split
from icmixup.lab.models import build_model
from icmixup.lab.sweep.local import remember_data
from icmixup.lab.training.evaluate import evaluation_mode
from icmixup.lab.training.recipe import Recipe, read_recipe
from icmixup.lab.training.run_folder import Run, write_atomically
from icmixup.lab.training.step import autocast_dtype, place

LAMS = tuple(step / 10 for step in range(11))
Row = dict[str, Any]


class Point(NamedTuple):
    """All pairs at one lam."""

    lam: float
    images: int  # mixed images, P
    squared_norm: float  # of the scores, mean over pairs
    centred_norm: float  # squared too, of the scores less their mean
    feature_norm: float  # squared too, of what the last linear layer reads; nan where there is none
    difference_mean: float  # score of the first class less that of the second
    difference_std: float  # over all P pairs, so divided by P


def analyse_runs(
    folders: Sequence[Path],
    *,
    data_dir: Path,
    device: torch.device,
    image_seeds: Sequence[int] = (),
) -> list[Row]:
    """Points of finished runs: a row for every run, choice of test images and lam.

    Args:
        folders: of finished runs, of any datasets, models and methods.
        image_seeds: each draws a test image of every class; none takes the first of each.

    Returns:
        Rows with line (what tells this run from the others, seeds aside), run, dataset, model, method, seed,
        where and when it was trained, image_seed ("first", or a number), and the fields of Point.
    """
    runs = [find_run(folder) for folder in dict.fromkeys(folders)]
    read = remember_data(data_dir)
    rows: list[Row] = []
    for run, line in zip(runs, line_names([run.recipe for run in runs]), strict=True):
        data = read_data(run, read)
        model = load_model(run, data, device)
        for seed in image_seeds or (None,):
            about = describe_run(run, line) | {"image_seed": "first" if seed is None else seed}
            points = curve(model, *chosen_images(data, seed, device), autocast_dtype(run.recipe, device))
            rows += [about | point._asdict() for point in points]
    return rows


def describe_run(run: Run, line: str) -> Row:
    recipe, result = run.recipe, run.result() or {}
    return {
        "line": line,
        "run": run.folder.name,
        "dataset": recipe.dataset,
        "model": recipe.model,
        "method": recipe.method,
        "seed": recipe.seed,
        **{name: result.get(name) for name in ("device", "torch", "commit", "date")},
    }


def line_names(recipes: Sequence[Recipe]) -> list[str]:
    """The method of each, with every other field in which they differ; runs of several seeds share a name."""
    every = [recipe.fields() for recipe in recipes]
    differ = [
        name
        for name in every[0]
        if name not in ("method", "seed") and any(fields[name] != every[0][name] for fields in every)
    ]
    return [
        " ".join(
            [
                str(fields["method"]),
                *(f"{name}={fields[name]}" for name in differ if fields[name] is not None),
            ]
        )
        for fields in every
    ]


def find_run(folder: Path) -> Run:
    """The finished run in a folder; a ValueError says what else is there."""
    path = folder / "recipe.json"
    if not path.exists():
        raise ValueError(f"{folder} is {what_is_there(folder)}; give the folder of a finished run")
    run = Run(folder, read_recipe(json.loads(path.read_text())))
    if run.result() is None:
        done = max((row.get("epoch", 0) for row in run.read_log()), default=0)
        raise ValueError(
            f"{folder} is unfinished, {done} of {run.recipe.epochs} epochs are done; the command that "
            "started it goes on from there"
        )
    return run


def what_is_there(folder: Path) -> str:
    if not folder.is_dir():
        return "no folder"
    inside = sorted(path.parent.name for path in folder.glob("*/recipe.json"))
    return f"a folder of {len(inside)} runs, {inside[0]} first" if inside else "not a run's folder"


def read_data(run: Run, read: Callable[[Recipe], Dataset]) -> Dataset:
    """The images that the run was trained and tested on."""
    try:
        return read(run.recipe)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{run.folder} was trained on {run.recipe.dataset}, which cannot be read: {error}; "
            "give the --data-dir where it is"
        ) from error


def load_model(run: Run, data: Dataset, device: torch.device) -> nn.Module:
    """The network as it was tested at the end of its run: the averaged weights where the recipe averages."""
    state, refused = run.load(device)
    if state is None:
        why = "; ".join(refused.values()) or f"there is no {run.checkpoints()[0].name}"
        raise ValueError(f"{run.folder} has no weights to analyse: {why}")
    recipe, channels = run.recipe, data.test.images.shape[1]
    model = place(build_model(recipe.model, data.num_classes, channels=channels, seed=recipe.seed), device)
    try:
        model.load_state_dict(state["model" if recipe.ema is None else "average"])
    except RuntimeError as error:
        raise ValueError(
            f"the weights in {run.folder} are of another network than {recipe.model} for the "
            f"{data.num_classes} classes of {recipe.dataset}; have the images changed since?"
        ) from error
    return model


def chosen_images(data: Dataset, image_seed: int | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """(K, channels, H, W) normalised test images, one a class, and their (K,) labels."""
    split = data.test[pick_rows(data.test, image_seed)].to(device)
    if len(split) < 2:
        raise ValueError(f"the test set of {data.name} has images of {len(split)} class; pairs need two")
    return normalise(split.images, torch.tensor(data.mean), torch.tensor(data.std)), split.labels


def pick_rows(split: Split, image_seed: int | None) -> Tensor:
    """(K,) one row of the split for each of its classes: the first, or one drawn from the seed."""
    generator = torch.Generator().manual_seed(image_seed or 0)
    present = torch.bincount(split.labels).nonzero().flatten()
    rows = [(split.labels == label).nonzero().flatten() for label in present]
    draw = [torch.randint(len(own), (), generator=generator) for own in rows]
    return torch.stack([own[0 if image_seed is None else k] for own, k in zip(rows, draw, strict=True)])


def curve(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    autocast_dtype: torch.dtype | None = None,
    *,
    block: int = 1000,
) -> list[Point]:
    """The points of a model at each of LAMS.

    Args:
        images: (K, channels, H, W) as the model takes them, on its device.
        labels: (K,) their classes, all different.
        autocast_dtype: such as torch.bfloat16; None for float32.
        block: mixed images at a time; it changes memory, not the points.
    """
    autocast = torch.autocast(images.device.type, dtype=autocast_dtype, enabled=autocast_dtype is not None)
    with evaluation_mode(model), torch.inference_mode(), autocast:
        return [point(lam, *measured_pairs(model, images, labels, lam, block)) for lam in LAMS]


def point(lam: float, norms: Tensor, differences: Tensor) -> Point:
    """The point of (P, 3) squared norms and (P,) differences."""
    scores, centred, features = norms.mean(dim=0).tolist()
    spread, mean = torch.std_mean(differences, correction=0)
    return Point(lam, len(differences), scores, centred, features, mean.item(), spread.item())


def measured_pairs(
    model: nn.Module, images: Tensor, labels: Tensor, lam: float, block: int
) -> tuple[Tensor, Tensor]:
    """(P, 3) squared norms and (P,) differences, float64, of all ordered pairs at one lam."""
    parts = list(measured_blocks(model, images, labels, lam, block))
    norms, differences = (torch.cat(part) for part in zip(*parts, strict=True))
    return norms, differences


def measured_blocks(
    model: nn.Module, images: Tensor, labels: Tensor, lam: float, block: int
) -> Iterator[tuple[Tensor, Tensor]]:
    for pairs in torch.split(ordered_pairs(len(images), images.device), block):
        first, second = pairs.unbind(dim=1)
        scores, features = with_features(model, torch.lerp(images[second], images[first], lam))  # Eq. 1, left
        own, other = (scores.gather(1, labels[part, None])[:, 0] for part in (first, second))
        measured = (scores, scores - scores.mean(dim=1, keepdim=True), features)
        yield torch.stack([part.square().sum(dim=1) for part in measured], dim=1), own - other


def with_features(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """(B, C) scores and (B, D) what the last linear layer reads, float64; nan for D = 1 without one."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    read: list[Tensor] = []
    hooks = [module.register_forward_pre_hook(lambda _, args: read.append(args[0])) for module in linear[-1:]]
    try:
        scores: Tensor = model(images)
    finally:
        for hook in hooks:
            hook.remove()
    features = read[0].flatten(1) if read else scores.new_full((len(scores), 1), torch.nan)
    return scores.double(), features.double()


def ordered_pairs(number: int, device: torch.device) -> Tensor:
    """(P, 2) every pair of two different of so many things, both ways round."""
    every = torch.cartesian_prod(*[torch.arange(number, device=device)] * 2)
    return every[every[:, 0] != every[:, 1]]


def write_analysis(rows: Sequence[Row], path: Path) -> Path:
    """The rows as CSV, whole or not at all."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.getvalue().encode())
    return path
