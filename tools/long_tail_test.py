"""Test the recipe `long-tail` on LT-CIFAR100 0.01: several networks, methods and seeds.

    python tools/long_tail_test.py --models resnet32 resnet18 --seeds 3
    python tools/long_tail_test.py --recipe proco --models resnet32 --methods balanced
    python tools/long_tail_test.py --recipe proco-code --models resnet32 --methods balanced

Rows are appended to --results as runs finish, the first seed of all before the second of any; runs that the
file has are not trained again. Two recipes separate what the recipe of ProCo (Du et al., 2024) gains from
what its contrastive branch gains, which neither has. `proco` has its augmentation, batch size, learning rate,
warm-up and weight decay, with a cosine schedule. `proco-code` also has the other values of its code: the
learning rate drops after 160 and 180 epochs, momentum without Nesterov, a classifier of cosines, and no
incomplete batches.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from candidates import show

from icmixup.lab.paper.deadline import run_in_time
from icmixup.lab.paper.results import append_rows, check_file, experiment, read_rows
from icmixup.lab.sweep import run_recipes
from icmixup.lab.sweep.budget import parse_budget
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.recipe import LONG_TAIL, Precision, Recipe, change_epochs
from icmixup.lab.training.run_folder import Row

# Two pairs that differ in the loss of mixed images alone: soft targets with logit adjustment, or Infinite
# Class. The methods of the second pair train on every image twice, clean and mixed.
METHODS = (
    *("balanced", "balanced-mixup-cutmix", "ic-mixup-cutmix"),
    *("balanced-regmixup", "balanced-ic-regmixup"),
)
PROCO = {"batch_size": 256, "lr": 0.3, "warmup_epochs": 5, "weight_decay": 2e-4, "cutout": 16}
RECIPES: dict[str, dict[str, Any]] = {
    "long-tail": {},
    "proco": PROCO,
    "proco-code": {
        **PROCO,
        **{"schedule": "step", "lr_drops": (160, 180), "lr_factor": 0.1, "nesterov": False},
        **{"cosine_classifier": True, "drop_last": True},
    },
}


def make_recipes(
    models: Sequence[str],
    methods: Sequence[str],
    seeds: int,
    epochs: int = 200,
    recipe: str = "long-tail",
    precision: Precision = "auto",
) -> list[Recipe]:
    """One recipe for each network, method and seed."""
    base = dataclasses.replace(LONG_TAIL, imbalance=0.01, precision=precision, **RECIPES[recipe])
    base = dataclasses.replace(change_epochs(base, epochs), eval_every=epochs)
    return [
        dataclasses.replace(base, model=model, method=method, seed=seed)
        for seed in range(seeds)
        for model in models
        for method in methods
    ]


def without_finished(recipes: Sequence[Recipe], results: Path) -> list[Recipe]:
    """The recipes that have no row yet."""
    done = {(experiment(row.recipe), row.recipe.seed) for row in read_rows(results).rows}
    return [recipe for recipe in recipes if (experiment(recipe), recipe.seed) not in done]


def run_and_append(
    recipes: Sequence[Recipe], execution: Execution, results: Path, budget: str | None = None
) -> None:
    by_key = {recipe.key: recipe for recipe in recipes}

    def keep(row: Row) -> None:
        append_rows(results, [(by_key[row["key"]], row)])
        show(row)

    if budget is None:
        run_recipes(recipes, execution, on_row=keep)
    else:
        run_in_time(recipes, execution, parse_budget(budget), keep)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["resnet32"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--recipe", choices=list(RECIPES), default="long-tail")
    parser.add_argument(
        "--precision", choices=get_args(Precision), default="auto", help="bfloat16 on a CPU too"
    )
    parser.add_argument("--results", type=Path, default=Path("results/long_tail.csv"))
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("runs/long-tail"))
    parser.add_argument("--budget", help="start only runs that are expected to end within this, such as 9m")
    parser.add_argument("--workers", type=int, default=5, help="concurrent runs")
    parser.add_argument("--device")
    args = parser.parse_args()
    recipes = make_recipes(args.models, args.methods, args.seeds, args.epochs, args.recipe, args.precision)
    todo = without_finished(recipes, args.results)
    print(f"{len(todo)} of {len(recipes)} runs have no row in {args.results}", flush=True)
    check_file(args.results, todo)
    execution = Execution(out=args.out, data_dir=args.data_dir, device=args.device, workers=args.workers)
    run_and_append(todo, execution, args.results, args.budget)


if __name__ == "__main__":
    main()
