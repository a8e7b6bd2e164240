"""Search the recipe `long-tail` on a validation part of CIFAR-100's training set.

    python tools/long_tail_recipe.py --data-dir data --out runs/recipe --rows results/long_tail_recipe.csv
    python tools/long_tail_recipe.py --model resnet18 --methods ic-mixup-cutmix --epochs 200 \\
        --stages larger-networks --rows results/long_tail_larger.csv

The validation part is that of tools/long_tail_alpha.py: 50 images per class, and a long tail (imbalance 0.01)
drawn from the other 450. The STAGES are searched in turn: each tries its settings with the best so far, for
every method, and keeps those with the highest mean accuracy over methods and seeds. So no method is favoured
by a recipe that was chosen for another. All candidates are written to --rows as they finish; the recipe that
was found is printed, to be put into icmixup.lab.training.recipe by hand; tools/long_tail_test.py tests it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from statistics import fmean
from typing import Any

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
    # For networks that CutMix suits. Sharpness-aware minimisation was a candidate too, in commit 6f609c2.
    "larger-networks": (
        {"method": "ic-mixup-cutmix"},
        {"method": "balanced-mixup-cutmix"},
        {"method": "balanced-ic-regmixup-cutmix"},
        {"epochs": 400, "eval_every": 400},
        {"weight_decay": 1e-3},
    ),
}
SHOWN = ("stage", "settings", "method", "seed", "epochs", "model", "accuracy", "many", "medium", "few")
SHOWN += MADE


def candidates(base: Recipe, settings: Settings, args: argparse.Namespace) -> list[Recipe]:
    """One recipe for each method and seed; settings may name another method."""
    return [
        dataclasses.replace(base, **({"method": method, "seed": seed} | settings))
        for method in args.methods
        for seed in range(args.seeds)
    ]


def search_stage(
    stage: str, base: Recipe, execution: Execution, args: argparse.Namespace, rows: list[Row]
) -> Recipe:
    """The base with the best settings of a stage; rows of all candidates are added to `rows` and the file."""
    recipes = {json.dumps(settings): candidates(base, settings, args) for settings in STAGES[stage]}
    settings_of = {recipe.key: settings for settings, group in recipes.items() for recipe in group}
    by_key: dict[str, Row] = {}

    def keep(row: Row) -> None:
        show(row)
        by_key[row["key"]] = row
        rows.append(row | {"stage": stage, "settings": settings_of[row["key"]]})
        write_candidates(args.rows, SHOWN, rows)  # a search that is cut short leaves them

    # All candidates in one call: processes and compiled code are shared, and no worker waits for a stage.
    run_recipes([recipe for group in recipes.values() for recipe in group], execution, on_row=keep)
    means: dict[str, float] = {}
    for settings, group in recipes.items():
        # A run that was lost is a KeyError: no silent choice.
        means[settings] = fmean(by_key[recipe.key]["accuracy"] for recipe in group)
        print(f"{stage} {settings}: {means[settings]:.2f}", flush=True)
    best = max(means, key=lambda settings: means[settings])
    print(f"{stage}, found: {best}", flush=True)
    return dataclasses.replace(base, **json.loads(best))


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
        eval_every=args.epochs,
    )
    execution = validation_execution(args)
    rows: list[Row] = []
    for stage in args.stages:
        recipe = search_stage(stage, recipe, execution, args, rows)


if __name__ == "__main__":
    main()
