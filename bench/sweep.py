"""A comparison's runs in turn against several at once, on this machine, in one go.

    python bench/sweep.py --out results/bench.csv
    python bench/sweep.py --model resnet18 --workers 4 --seeds 1

Digits with a long tail, as `make demo` has them. Starting processes and reading data count.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from pathlib import Path

from step import COLUMNS, write_row

from icmixup.lab.compare import compare
from icmixup.lab.ranks import pick_device
from icmixup.lab.recipe import QUICK, Recipe
from icmixup.lab.runs import provenance
from icmixup.lab.workers import count_workers

METHODS = ("mixup", "ic-mixup")


def measure(recipe: Recipe, seeds: int, workers: int) -> dict[str, object]:
    """One row: so many runs at once."""
    with tempfile.TemporaryDirectory() as folder:
        root, started = Path(folder), time.perf_counter()
        found = compare(recipe, METHODS, range(seeds), root=root, data_dir=root, workers=workers)
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
        **{name: value for name, value in provenance(pick_device()).items() if name in COLUMNS.split()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="small-cnn")
    parser.add_argument("--seeds", type=int, default=8, help="two methods each")
    parser.add_argument("--workers", type=int, help="found out if not given")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    recipe = dataclasses.replace(QUICK, dataset="digits", model=args.model, per_class=100, imbalance=0.01)
    workers = count_workers(len(METHODS) * args.seeds, None, args.workers)
    rows = [measure(recipe, args.seeds, number) for number in (1, workers)]
    for row in rows:
        write_row(args.out, row)
    speeds = [float(str(row["images_per_second"])) for row in rows]
    print(f"{workers} at once: {speeds[1] / speeds[0]:.2f} times as fast as in turn")


if __name__ == "__main__":
    main()
