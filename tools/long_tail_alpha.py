"""Choose alpha of balanced-ic-regmixup on a validation part, then compare with logit adjustment.

    python tools/long_tail_alpha.py --data-dir data --out runs/alpha --rows results/long_tail_alpha.csv

The validation part is 50 images per class of CIFAR-100's training set. The long tail (imbalance 0.01) is
drawn from the other 450, so no image of the test set takes part in the choice. The best candidate is then
trained on the usual long tail and tested once, beside the baselines, with every seed; those rows are appended
to --results.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import torch
from candidates import MADE, write_candidates

from icmixup.lab.datasets import Dataset, DataSpec, Split, draw_subset, load_dataset, subset_counts
from icmixup.lab.paper.results import append_rows
from icmixup.lab.sweep import run_recipes
from icmixup.lab.training.definitions import Definitions
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.recipe import STRONG, Recipe

PER_CLASS = 50  # of the validation part
CANDIDATES = (
    ("balanced-ic-regmixup", 0.2),
    ("balanced-ic-regmixup", 1.0),
    ("balanced-ic-regmixup", 20.0),
    ("balanced-ic-regmixup-cutmix", 1.0),
)
SHOWN = ("method", "alpha", "seed", "epochs", "model", "accuracy", "many", "medium", "few", *MADE)
BASELINES = (("balanced-mixup-cutmix", 1.0), ("ic-mixup-cutmix", 1.0))


def hold_out_balanced(train: Split, num_classes: int, seed: int = 0) -> tuple[Split, Split]:
    """The training images without PER_CLASS of each class, and those."""
    counts = torch.full((num_classes,), PER_CLASS)
    rows = draw_subset(train.labels, counts, seed)
    kept = torch.ones(len(train), dtype=torch.bool)
    kept[rows] = False
    return train[kept.nonzero().squeeze(1)], train[rows]


def validation_data(data_dir: Path) -> Dataset:
    whole = load_dataset(DataSpec("cifar100"), data_dir)
    train, validation = hold_out_balanced(whole.train, whole.num_classes)
    counts = subset_counts(torch.bincount(train.labels), imbalance=0.01)
    return dataclasses.replace(whole, train=train[draw_subset(train.labels, counts, 0)], test=validation)


def candidate(method: str, alpha: float, epochs: int, model: str) -> Recipe:
    return dataclasses.replace(
        STRONG,
        model=model,
        method=method,
        alpha=alpha,
        epochs=epochs,
        imbalance=0.01,
        trivial=True,
        compile=torch.cuda.is_available(),
    )


def show(row: dict[str, object]) -> None:
    few = row["few"]
    print(
        f"{row['method']} alpha {row['alpha']} seed {row['seed']}: {row['accuracy']:.2f}, few {few}",
        flush=True,
    )


def choose(args: argparse.Namespace) -> tuple[str, float]:
    """The candidate with the highest accuracy on the validation part."""
    execution = Execution(
        out=args.out / "validation",
        data_dir=args.data_dir,
        device=args.device,
        workers=args.workers,
        dataset=validation_data(args.data_dir),
        definitions=Definitions(),  # so that workers are sent the data: by its name they would load all of it
    )
    recipes = [candidate(*pair, args.validation_epochs, args.model) for pair in (*CANDIDATES, *BASELINES)]
    rows = run_recipes(recipes, execution, on_row=show)
    write_candidates(args.rows, SHOWN, rows)
    own = [row for row in rows if row["method"].startswith("balanced-ic")]
    best = max(own, key=lambda row: float(row["accuracy"]))
    return best["method"], best["alpha"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("runs/alpha"))
    parser.add_argument("--rows", type=Path, default=Path("results/long_tail_alpha.csv"))
    parser.add_argument("--results", type=Path, default=Path("results/runs.csv"))
    parser.add_argument("--model", default="resnet32")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--validation-epochs", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--device", default=None)
    args = parser.parse_args()
    chosen = choose(args)
    print(f"chosen: {chosen[0]} with alpha {chosen[1]}", flush=True)
    recipes = [
        dataclasses.replace(candidate(*pair, args.epochs, args.model), seed=seed)
        for seed in range(args.seeds)
        for pair in (chosen, *BASELINES)
    ]
    by_key = {recipe.key: recipe for recipe in recipes}

    def keep(row: dict[str, object]) -> None:
        append_rows(args.results, [(by_key[str(row["key"])], row)])
        show(row)

    execution = Execution(
        out=args.out / "test", data_dir=args.data_dir, device=args.device, workers=args.workers
    )
    run_recipes(recipes, execution, on_row=keep)


if __name__ == "__main__":
    main()
