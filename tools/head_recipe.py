"""Search the recipe `head` by cross-validation of the training photos; the test photos take no part.

    python tools/head_recipe.py birds --weights lite0/model.safetensors --out runs/head \
        --rows results/head_recipe.csv

DATA is a folder of photos, or an .npz file of features. Its training examples are divided into five folds,
each class evenly. Seed k trains on all folds but fold k, evenly and with a long tail (imbalance 0.1) drawn
from them, and is tested on fold k. The search is one setting at a time, in the order of STAGES: each stage
tries its values with those chosen so far, for every method. Accuracies are averaged over methods and both
class distributions, so that no method is favoured. The first value of a stage is that of the recipe: another
one replaces it only if its mean is the highest and the difference over folds (paired t-test, corrected for
the number of other values) is significant at 5 %. All candidates are written to --rows; the recipe that was
found is printed, to be put into icmixup.lab.training.recipe by hand.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from candidates import write_candidates

from icmixup.lab.comparison.statistics import paired_difference
from icmixup.lab.datasets import Dataset, draw_subset, subset_counts
from icmixup.lab.datasets.features import is_features_file, standardise
from icmixup.lab.datasets.folds import fold_numbers
from icmixup.lab.models import weights_digest
from icmixup.lab.sweep import run_recipes
from icmixup.lab.training.data import training_data
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.recipe import HEAD, Recipe
from icmixup.lab.training.run_folder import Row

METHODS = ("erm", "mixup", "ic-mixup", "ic-regmixup", "balanced", "balanced-mixup")
IMBALANCES = (1.0, 0.1)
LINEAR = "linear"  # the model of features from a file
FOLDS = 5
FOLD_SEED = 0
SIGNIFICANCE = 0.05
Settings = dict[str, Any]


def values(names: str, *others: object) -> tuple[Settings, ...]:
    """The recipe's own values of one or more settings, and others."""
    fields = names.split()
    own = tuple(getattr(HEAD, field) for field in fields)
    tried = dict.fromkeys([own, *(value if isinstance(value, tuple) else (value,) for value in others)])
    return tuple(dict(zip(fields, value, strict=True)) for value in tried)


STAGES: dict[str, tuple[Settings, ...]] = {
    "lr": values("lr", 3e-4, 1e-3, 3e-3, 1e-2),
    "length": values("epochs min_steps", (20, 230), (60, 700), (120, 1400)),
    "weight decay": values("weight_decay", 0.0, 0.05, 0.5, 5.0),
}
SHOWN = (
    "stage",
    "settings",
    "dataset",
    "imbalance",
    "method",
    "seed",
    "epochs",
    "lr",
    "weight_decay",
    "model",
)
SHOWN += ("accuracy", "few", "nll", "train_images", "minutes", "device", "torch", "python", "commit", "date")


def start_recipe(args: argparse.Namespace) -> Recipe:
    """The recipe `head` on the given data."""
    if is_features_file(args.data):
        return dataclasses.replace(HEAD, dataset=args.data, model=LINEAR)
    if args.weights is None:
        raise SystemExit(f"{args.data} is not an .npz file of features; pass --weights for photos")
    digest = weights_digest(args.model, args.weights)
    given = {"dataset": args.data, "model": args.model, "weights": args.weights}
    return dataclasses.replace(HEAD, **given, weights_digest=digest)


def read_training_features(args: argparse.Namespace) -> Dataset:
    """The features of all training examples; their test set is not looked at after this."""
    recipe = dataclasses.replace(start_recipe(args), method="erm")
    return training_data(recipe, Execution(out=args.out, data_dir=args.data_dir, device=args.device))


def validation_data(whole: Dataset, fold: int, imbalance: float) -> Dataset:
    """Fold `fold` of the training examples as the test set; a long tail of the others for training."""
    examples = whole.train
    numbers = fold_numbers(examples.labels, FOLDS, FOLD_SEED)
    train = examples[(numbers != fold).nonzero().squeeze(1)]
    counts = subset_counts(torch.bincount(train.labels, minlength=whole.num_classes), imbalance=imbalance)
    kept = train[draw_subset(train.labels, counts, fold)]
    held = examples[(numbers == fold).nonzero().squeeze(1)]
    # Standardised again: the examples of the fold must not take part in that either.
    return standardise(dataclasses.replace(whole, train=kept, test=held, split_by=f"fold {fold} of {FOLDS}"))


def run_candidate(
    base: Recipe, parts: dict[tuple[float, int], Dataset], args: argparse.Namespace
) -> list[Row]:
    """The rows of all methods, folds and class distributions."""
    execution = Execution(
        out=args.out, data_dir=args.data_dir, device=args.device, workers=args.workers, threads=1
    )
    rows: list[Row] = []
    for (imbalance, fold), data in parts.items():
        recipes = [
            dataclasses.replace(base, method=method, seed=fold, imbalance=imbalance)
            for method in args.methods
        ]
        rows += run_recipes(recipes, dataclasses.replace(execution, dataset=data))
    return rows


def fold_means(rows: Sequence[Row]) -> list[float]:
    """Mean accuracy of each fold over methods and class distributions."""
    folds = sorted({row["seed"] for row in rows})
    return [fmean(row["accuracy"] for row in rows if row["seed"] == fold) for fold in folds]


def choose(candidates: Sequence[Sequence[float]]) -> tuple[int, str]:
    """Which of several settings to use, and why: the first one unless another is significantly better.

    Args:
        candidates: accuracies in each fold, of the present setting first.
    """
    means = [fmean(accuracies) for accuracies in candidates]
    best = means.index(max(means))
    if best == 0:
        return 0, "the present value is the best"
    difference = paired_difference(candidates[best], candidates[0])
    assert difference is not None
    p = 1.0 if difference.p is None else min(1.0, difference.p * (len(candidates) - 1))
    said = f"the best is {difference} better than the present value, corrected p = {p:.3f}"
    return (best, said) if p < SIGNIFICANCE else (0, f"{said}: kept")


def search_stage(
    stage: str, base: Recipe, parts: dict[tuple[float, int], Dataset], args: argparse.Namespace
) -> tuple[Recipe, list[Row]]:
    """The base with the settings that a stage chooses, and the rows of all candidates."""
    rows: list[Row] = []
    candidates: list[list[float]] = []
    for settings in STAGES[stage]:
        found = run_candidate(dataclasses.replace(base, **settings), parts, args)
        rows += [row | {"stage": stage, "settings": json.dumps(settings)} for row in found]
        candidates.append(fold_means(found))
        print(f"{stage} {settings}: {fmean(candidates[-1]):.2f}", flush=True)
    index, why = choose(candidates)
    print(f"{stage}: {STAGES[stage][index]}; {why}", flush=True)
    return dataclasses.replace(base, **STAGES[stage][index]), rows


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", help="a folder of photos, or an .npz file of features")
    parser.add_argument("--model", default=HEAD.model)
    parser.add_argument("--weights", help="of the model, for photos")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES))
    parser.add_argument("--seeds", type=int, choices=range(2, FOLDS + 1), default=FOLDS)
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("runs/head"))
    parser.add_argument("--rows", type=Path, default=Path("results/head_recipe.csv"))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)  # matrices are small
    whole = read_training_features(args)
    parts = {
        (imbalance, fold): validation_data(whole, fold, imbalance)
        for imbalance in IMBALANCES
        for fold in range(args.seeds)
    }
    recipe = start_recipe(args)
    rows: list[Row] = []
    for stage in args.stages:
        recipe, found = search_stage(stage, recipe, parts, args)
        rows += found
        write_candidates(args.rows, SHOWN, rows)  # a search that is cut short leaves them
    names = dict.fromkeys(name for stage in args.stages for name in STAGES[stage][0])
    print("found:", ", ".join(f"{name}={getattr(recipe, name)!r}" for name in names))


if __name__ == "__main__":
    main()
