"""A comparison's runs in turn against several at once, on this machine, in one go.

    python bench/sweep.py --out results/bench.csv
    python bench/sweep.py --dataset cifar100 --fraction 0.1 --model resnet34 --compile --epochs 20 --workers 3

Digits with a long tail, as `make demo` has them, if no other dataset is named. Starting processes and reading
data count; compiling does not, since a run before the others does it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
import time
from pathlib import Path

from step import write_row

from icmixup.lab.comparison.compare import compare
from icmixup.lab.sweep.local import count_workers
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.ranks import pick_device
from icmixup.lab.training.recipe import QUICK, Recipe
from icmixup.lab.training.run_folder import provenance

METHODS = ("mixup", "ic-mixup")


def measure(recipe: Recipe, seeds: int, workers: int, data_dir: Path) -> dict[str, object]:
    """One row: `workers` concurrent runs."""
    with tempfile.TemporaryDirectory() as folder:
        root, started = Path(folder), time.perf_counter()
        found = compare(
            recipe, METHODS, range(seeds), execution=Execution(out=root, data_dir=data_dir, workers=workers)
        )
        seconds = time.perf_counter() - started
    images = sum(row["train_images"] for row in found.rows) * recipe.epochs
    return {
        "bench": "sweep",
        "form": "in turn" if workers == 1 else f"{workers} at once",
        "model": recipe.model,
        "method": " ".join(METHODS),
        "batch_size": recipe.batch_size,
        "images_per_second": round(images / seconds),
        "ms_per_step": "",
        "peak_mb": "",
        "epochs": recipe.epochs * len(found.rows),
        **provenance(pick_device()),
    }


def find_recipe(args: argparse.Namespace) -> Recipe:
    same = {"dataset": args.dataset, "model": args.model, "epochs": args.epochs, "compile": args.compile}
    if args.dataset == "digits":
        return dataclasses.replace(QUICK, per_class=100, imbalance=0.01, **same)
    return Recipe(fraction=args.fraction, eval_every=args.epochs, **same)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("ICMIXUP_DATA", "data")))
    parser.add_argument("--fraction", type=float, default=1.0, help="of another dataset than digits")
    parser.add_argument("--model", default="small-cnn")
    parser.add_argument("--epochs", type=int, default=QUICK.epochs)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--seeds", type=int, default=8, help="two methods each")
    parser.add_argument("--workers", type=int, help="found out if not given")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    recipe = find_recipe(args)
    workers = count_workers(len(METHODS) * args.seeds, None, args.workers)
    if args.compile:
        measure(dataclasses.replace(recipe, epochs=1), 1, 1, args.data_dir)
    rows = [measure(recipe, args.seeds, number, args.data_dir) for number in (1, workers)]
    for row in rows:
        write_row(row, args.out)
    speeds = [float(str(row["images_per_second"])) for row in rows]
    print(f"{workers} at once: {speeds[1] / speeds[0]:.2f} times as fast as in turn")


if __name__ == "__main__":
    main()
