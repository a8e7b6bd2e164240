"""Whether a comparison takes the time that --budget gives it, by the clock, on this machine as it is.

    python bench/budget.py 1m 2m 5m --out results/budget.csv
    python bench/budget.py 2m --workers 2 --epochs 400

Digits with the quick recipe. Measuring the speed, starting processes, training and evaluation count, as they
do for a user. The load of the machine before and after is recorded: a budget can only be kept if other
programs leave as much of the machine during the runs as they did during the trials. Exits with 1 if a
comparison took over 115 % of its budget.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import os
import tempfile
import time
from pathlib import Path

from icmixup.lab.comparison.compare import EVEN_METHODS, compare
from icmixup.lab.datasets import DataSpec, load_dataset
from icmixup.lab.sweep.budget import Question, describe_fit, fit_budget, parse_budget
from icmixup.lab.sweep.local import count_workers
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.ranks import pick_device
from icmixup.lab.training.recipe import QUICK, Recipe, fewest_epochs, shorten
from icmixup.lab.training.run_folder import provenance

MOST = 1.15  # of the budget
COLUMNS = (
    *("budget_s", "took_s", "share", "measuring_s", "workers", "epochs", "seeds", "methods", "dropped"),
    *("load_before", "load_after", "device", "torch", "commit", "date"),
)


def measure(text: str, recipe: Recipe, seeds: int, workers: int | None) -> dict[str, object]:
    """One row: a comparison within a budget."""
    seconds = parse_budget(text)
    data = load_dataset(DataSpec(recipe.dataset), Path("unused"))
    number = count_workers(len(EVEN_METHODS) * seeds, None, workers)
    floor = fewest_epochs(recipe, "quick", len(data.train))
    question = Question(recipe, EVEN_METHODS, seeds, "mixup", floor)
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        execution = Execution(out=Path(folder), data_dir=Path(folder), dataset=data, workers=number)
        started = time.monotonic()
        fit, left = fit_budget(question, seconds, dataclasses.replace(execution, concurrent=number))
        compare(shorten(recipe, fit.epochs), fit.methods, range(fit.seeds), "mixup", execution=execution)
        took = time.monotonic() - started
    return {
        "budget_s": seconds,
        "took_s": round(took, 1),
        "share": round(took / seconds, 3),
        "measuring_s": round(seconds - left, 1),
        "workers": number,
        "epochs": fit.epochs,
        "seeds": fit.seeds,
        "methods": len(fit.methods),
        "dropped": describe_fit(question.asked, fit),
        "load_before": round(before, 1),
        "load_after": round(os.getloadavg()[0], 1),
        **{name: value for name, value in provenance(pick_device()).items() if name in COLUMNS},
    }


def write_row(path: Path | None, row: dict[str, object]) -> None:
    print(", ".join(f"{name} {row[name]}" for name in COLUMNS[:11]), flush=True)
    if path is None:
        return
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("budgets", nargs="+", help="for example 90s, 5m or 1h30m")
    parser.add_argument("--epochs", type=int, default=QUICK.epochs)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, help="found out if not given")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    recipe = dataclasses.replace(QUICK, dataset="digits", epochs=args.epochs, eval_every=args.epochs)
    rows = []
    for text in args.budgets:
        rows.append(measure(text, recipe, args.seeds, args.workers))
        write_row(args.out, rows[-1])
    return int(any(float(str(row["share"])) > MOST for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
