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
from candidates import MADE, show, validation_execution, write_candidates
from long_tail_test import run_and_append

from icmixup.lab.sweep import run_recipes
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.recipe import STRONG, Recipe

CANDIDATES = (
    ("balanced-ic-regmixup", 0.2),
    ("balanced-ic-regmixup", 1.0),
    ("balanced-ic-regmixup", 20.0),
    ("balanced-ic-regmixup-cutmix", 1.0),
)
SHOWN = ("method", "alpha", "seed", "epochs", "model", "accuracy", "many", "medium", "few", *MADE)
BASELINES = (("balanced-mixup-cutmix", 1.0), ("ic-mixup-cutmix", 1.0))


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


def choose(args: argparse.Namespace) -> tuple[str, float]:
    """The candidate with the highest accuracy on the validation part."""
    recipes = [candidate(*pair, args.validation_epochs, args.model) for pair in (*CANDIDATES, *BASELINES)]
    rows = run_recipes(recipes, validation_execution(args), on_row=show)
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
    execution = Execution(
        out=args.out / "test", data_dir=args.data_dir, device=args.device, workers=args.workers
    )
    run_and_append(recipes, execution, args.results)


if __name__ == "__main__":
    main()
