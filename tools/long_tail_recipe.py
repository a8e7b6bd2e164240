"""Search the recipe `long-tail` on a validation part of CIFAR-100's training set.

    python tools/long_tail_recipe.py --data-dir data --out runs/recipe --rows results/long_tail_recipe.csv

The validation part is that of tools/long_tail_alpha.py: 50 images per class, and a long tail (imbalance 0.01)
drawn from the other 450. The STAGES are searched in turn: each tries its settings with the best so far, for
every method, and keeps those with the highest mean accuracy over methods and seeds. So no method is favoured
by a recipe that was chosen for another. All candidates are written to --rows; the recipe that was found is
printed, to be put into icmixup.lab.training.recipe by hand. tools/long_tail_test.py then tests it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from candidates import MADE, show, validation_execution, write_candidates

from icmixup.lab.sweep import run_recipes
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.recipe import LONG_TAIL, Recipe
from icmixup.lab.training.run_folder import Row

METHODS = ("balanced-mixup-cutmix", "balanced-ic-regmixup")
Settings = dict[str, Any]
# The last candidates of the first two stages are from ProCo (Du et al., 2024).
STAGES: dict[str, tuple[Settings, ...]] = {
    "augmentation": (
        {"trivial": True, "autoaugment": False, "cutout": 0},
        {"trivial": True, "autoaugment": False, "cutout": 16},
        {"trivial": False, "autoaugment": True, "cutout": 0},
        {"trivial": False, "autoaugment": True, "cutout": 16},
    ),
    "optimisation": (
        {"weight_decay": 5e-4, "batch_size": 128, "lr": 0.1, "warmup_epochs": 0},
        {"weight_decay": 2e-4, "batch_size": 128, "lr": 0.1, "warmup_epochs": 0},
        {"weight_decay": 2e-4, "batch_size": 256, "lr": 0.3, "warmup_epochs": 5},
    ),
    "refinement": (
        {"cosine_classifier": False, "ema": None, "mix_off_epoch": None},
        {"cosine_classifier": True, "ema": None, "mix_off_epoch": None},
        {"cosine_classifier": False, "ema": 0.999, "mix_off_epoch": None},
        {"cosine_classifier": False, "ema": None, "mix_off_epoch": 50},  # of 60
    ),
}
SHOWN = ("stage", "settings", "method", "seed", "epochs", "model", "accuracy", "many", "medium", "few")
SHOWN += MADE


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
    recipes = {json.dumps(settings): candidates(base, settings, args) for settings in STAGES[stage]}
    # All candidates in one call: processes and compiled code are shared, and no worker waits for a stage.
    found = run_recipes([recipe for group in recipes.values() for recipe in group], execution, on_row=show)
    by_key = {row["key"]: row for row in found}
    rows: list[Row] = []
    means: dict[str, float] = {}
    for settings, group in recipes.items():
        own = [by_key[recipe.key] for recipe in group]  # a run that was lost is a KeyError: no silent choice
        rows += [row | {"stage": stage, "settings": settings} for row in own]
        means[settings] = fmean(row["accuracy"] for row in own)
        print(f"{stage} {settings}: {means[settings]:.2f}", flush=True)
    best = max(means, key=lambda settings: means[settings])
    return dataclasses.replace(base, **json.loads(best)), rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("runs/recipe"))
    parser.add_argument("--rows", type=Path, default=Path("results/long_tail_recipe.csv"))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=["augmentation", "optimisation"])
    parser.add_argument("--model", default="resnet32")
    parser.add_argument("--epochs", type=int, default=60, help="of the search")
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
    execution = validation_execution(args)
    rows: list[Row] = []
    for stage in args.stages:
        recipe, found = search_stage(stage, recipe, execution, args)
        rows += found
        write_candidates(args.rows, SHOWN, rows)  # a search that is cut short leaves them
    names = dict.fromkeys(name for stage in args.stages for name in STAGES[stage][0])
    print("found:", ", ".join(f"{name}={getattr(recipe, name)!r}" for name in names), flush=True)


if __name__ == "__main__":
    main()
