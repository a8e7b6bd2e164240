"""Search the recipe `long-tail` on a validation part of CIFAR-100's training set; the test set takes no part.

    python tools/long_tail_recipe.py --data-dir data --out runs/recipe --rows results/long_tail_recipe.csv

The validation part is that of tools/long_tail_alpha.py: 50 images per class, and a long tail (imbalance 0.01)
drawn from the other 450. The search is one setting at a time, in the order of STAGES: each stage tries its
values with the best ones so far, for every method, and keeps the value with the highest mean accuracy over
methods and seeds. So no method is favoured by a recipe that was chosen for another. All candidates are
written to --rows; the recipe that was found is printed, to be put into icmixup.lab.training.recipe by hand.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from long_tail_alpha import validation_data

from icmixup.lab.sweep import run_recipes
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.recipe import LONG_TAIL, Recipe
from icmixup.lab.training.run_folder import Row

METHODS = ("balanced", "balanced-mixup-cutmix", "ic-mixup-cutmix", "balanced-ic-regmixup")
Settings = dict[str, Any]
# Published values among them: weight decay 2e-4, lr 0.3 with batch 256, AutoAugment and Cutout of ProCo (Du
# et al., 2024); weight decay 5e-4 and lr 0.1 with batch 128 of the strong recipe.
STAGES: dict[str, tuple[Settings, ...]] = {
    "augmentation": (
        {"trivial": True, "autoaugment": False, "cutout": 0},
        {"trivial": True, "autoaugment": False, "cutout": 16},
        {"trivial": False, "autoaugment": True, "cutout": 0},
        {"trivial": False, "autoaugment": True, "cutout": 16},
        {"trivial": False, "autoaugment": False, "cutout": 0},
    ),
    "weight decay": ({"weight_decay": 5e-4}, {"weight_decay": 2e-4}, {"weight_decay": 1e-3}),
    "batch and lr": (
        {"batch_size": 128, "lr": 0.1},
        {"batch_size": 128, "lr": 0.05},
        {"batch_size": 256, "lr": 0.3, "warmup_epochs": 5},
    ),
    "ema": ({"ema": None}, {"ema": 0.999}),
}
SHOWN = ("stage", "settings", "method", "seed", "epochs", "model", "accuracy", "many", "medium", "few")
SHOWN += ("minutes", "device", "torch", "commit", "date")


def candidates(base: Recipe, settings: Settings, args: argparse.Namespace) -> list[Recipe]:
    """One recipe for each method and seed."""
    return [
        dataclasses.replace(base, method=method, seed=seed, **settings)
        for method in args.methods
        for seed in range(args.seeds)
    ]


def search_stage(
    stage: str, base: Recipe, execution: Execution, args: argparse.Namespace
) -> tuple[Recipe, list[Row]]:
    """The base with the best settings of a stage, and the rows of all candidates."""
    rows: list[Row] = []
    means: list[tuple[float, Settings]] = []
    for settings in STAGES[stage]:
        found = run_recipes(candidates(base, settings, args), execution)
        rows += [row | {"stage": stage, "settings": json.dumps(settings)} for row in found]
        means.append((fmean(row["accuracy"] for row in found), settings))
        print(f"{stage} {settings}: {means[-1][0]:.2f}", flush=True)
    best = max(means, key=lambda pair: pair[0])[1]
    return dataclasses.replace(base, **best), rows


def write_rows(path: Path, rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, SHOWN, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("runs/recipe"))
    parser.add_argument("--rows", type=Path, default=Path("results/long_tail_recipe.csv"))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES))
    parser.add_argument("--model", default="resnet32")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--device", default=None)
    args = parser.parse_args()
    recipe = dataclasses.replace(
        LONG_TAIL,
        model=args.model,
        epochs=args.epochs,
        imbalance=0.01,
        compile=torch.cuda.is_available(),
        eval_every=args.epochs,
    )
    execution = Execution(
        out=args.out,
        data_dir=args.data_dir,
        device=args.device,
        workers=args.workers,
        dataset=validation_data(args.data_dir),
    )
    rows: list[Row] = []
    for stage in args.stages:
        recipe, found = search_stage(stage, recipe, execution, args)
        rows += found
        write_rows(args.rows, rows)  # after every stage, so that a search that is cut short leaves its rows
    names = dict.fromkeys(name for stage in args.stages for name in STAGES[stage][0])
    print("found:", ", ".join(f"{name}={getattr(recipe, name)!r}" for name in names))


if __name__ == "__main__":
    main()
