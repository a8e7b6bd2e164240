"""Every baseline for long tails and our own forms, in one recipe: rows, and a table with intervals.

    python tools/long_tail_baselines.py --dataset digits --per-class 100 --imbalance 0.01 --recipe quick \
        --seeds 5 --out runs/long-tail --rows results/long_tail_digits.csv

Runs that are finished are not trained again. Where tau is chosen, a second run of the same seed holds out a
fifth of its training images; the tau that is best on them is then applied to the run on all images. No choice
is made on the test images. Differences are to `balanced`, logit adjustment in training. Methods that need
images are left out on features.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from icmixup.lab.comparison.compare import read_correct
from icmixup.lab.comparison.statistics import describe_sample, take_look
from icmixup.lab.datasets import Dataset, DataSpec
from icmixup.lab.models import weights_digest
from icmixup.lab.paper.results import append_rows
from icmixup.lab.sweep import run_recipes
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.features import mixes_features
from icmixup.lab.training.loop import training_data
from icmixup.lab.training.recipe import RECIPES, After, Recipe, read_recipe
from icmixup.lab.training.retrain import retrain
from icmixup.lab.training.run_folder import Row

REFERENCE = "balanced"
HELD_OUT = 0.2
LOADED: dict[DataSpec, Dataset] = {}


class Entry(NamedTuple):
    """One line of the table: a method with settings of its own, and what is done after training."""

    name: str
    settings: dict[str, Any]
    after: After = "none"
    tau: float | None = None  # None chooses it on held-out images


def plain(*methods: str) -> tuple[Entry, ...]:
    return tuple(Entry(method, {"method": method}) for method in methods)


ENTRIES = (
    *plain("erm", "focal", "erm-drw", "ldam", "ldam-drw"),
    Entry("erm, square-root sampling", {"method": "erm", "sampler": "square-root"}),
    Entry("erm, class-balanced sampling", {"method": "erm", "sampler": "class-balanced"}),
    Entry("erm, then adjusted, tau 1", {"method": "erm"}, "adjust", 1.0),
    Entry("erm, then adjusted, tau chosen", {"method": "erm"}, "adjust"),
    Entry("erm, then tau-normalised, tau chosen", {"method": "erm"}, "tau-norm"),
    Entry("erm, then cRT", {"method": "erm"}, "crt"),
    Entry("balanced, tau 0.5", {"method": "balanced", "adjust_tau": 0.5}),
    *plain("balanced"),
    Entry("balanced, tau 1.5", {"method": "balanced", "adjust_tau": 1.5}),
    *plain("mixup", "remix", "regmixup", "balanced-mixup", "balanced-regmixup"),
    *plain("ic-mixup", "ic-remix", "ic-regmixup", "ic-balanced-mixup", "balanced-ic-regmixup"),
    Entry("ic-regmixup, then adjusted, tau chosen", {"method": "ic-regmixup"}, "adjust"),
    Entry("balanced-ic-regmixup, tau 1.5", {"method": "balanced-ic-regmixup", "adjust_tau": 1.5}),
)


def base_recipe(args: argparse.Namespace) -> Recipe:
    """The named recipe on the given data."""
    given = {
        name: getattr(args, name)
        for name in ("model", "weights", "per_class", "imbalance", "epochs", "image_size")
        if getattr(args, name) is not None
    }
    recipe = dataclasses.replace(RECIPES[args.recipe], dataset=args.dataset, **given)
    digest = weights_digest(recipe.model, recipe.weights)
    return dataclasses.replace(recipe, weights_digest=digest, compile=torch.cuda.is_available())


def with_data(execution: Execution, recipe: Recipe) -> Execution:
    """With the images or features of a recipe, loaded once for all methods and seeds."""
    if recipe.data not in LOADED:
        LOADED[recipe.data] = training_data(recipe, execution)
    return dataclasses.replace(execution, dataset=LOADED[recipe.data])


def run_entry(entry: Entry, base: Recipe, seeds: Sequence[int], execution: Execution) -> list[Row]:
    """The rows of all seeds."""
    recipes = [dataclasses.replace(base, seed=seed, **entry.settings) for seed in seeds]
    execution = with_data(execution, recipes[0])
    rows = run_recipes(recipes, execution)
    if entry.after == "crt":
        rows = [retrain(execution.out / row["folder"], "crt", execution) for row in rows]
    elif entry.after != "none":
        held = [dataclasses.replace(recipe, held_out=HELD_OUT) for recipe in recipes]
        taus = [entry.tau] * len(rows) if entry.tau is not None else choose_taus(held, entry.after, execution)
        rows = [
            retrain(execution.out / row["folder"], entry.after, execution, tau=tau)
            for row, tau in zip(rows, taus, strict=True)
        ]
    print(entry.name, [round(row["accuracy"], 2) for row in rows], flush=True)
    return rows


def choose_taus(held: Sequence[Recipe], after: After, execution: Execution) -> list[float]:
    """The best tau of each run on the images that it held out."""
    execution = with_data(dataclasses.replace(execution, dataset=None), held[0])
    rows = run_recipes(held, execution)
    found = [retrain(execution.out / row["folder"], after, execution)["tau_used"] for row in rows]
    print(f"tau chosen on held-out images: {found}", flush=True)
    return [float(tau) for tau in found]


def as_recipe(row: Row) -> Recipe:
    names = [field.name for field in dataclasses.fields(Recipe)]
    return read_recipe({name: row[name] for name in names})


def print_table(rows: list[Row], names: Sequence[str], seeds: Sequence[int], out: Path) -> None:
    """Markdown: mean accuracy, that of the smallest classes, and the difference to the reference."""
    correct, why = read_correct(rows, out)
    if why:
        print(why)
    samples = take_look(rows, names, seeds, correct).samples
    print("| method | accuracy | few | difference to balanced [95 % interval] |\n|---|---|---|---|")
    for name in names:
        own = [row for row in rows if row["method"] == name]
        few = [row["few"] for row in own if row["few"] is not None]
        line = f"| {name} | {fmean(row['accuracy'] for row in own):.1f} | {fmean(few) if few else 0:.1f} | "
        print(line + describe(samples, name) + " |")


def describe(samples: Any, name: str) -> str:
    """The difference of a method to the reference; a pair is stored in one of two orders."""
    if name == REFERENCE:
        return ""
    sign = 1 if (name, REFERENCE) in samples else -1
    found = describe_sample(samples[(name, REFERENCE) if sign == 1 else (REFERENCE, name)])
    if found.low is None or found.high is None:
        return f"{sign * found.mean:+.1f}"
    low, high = sorted((sign * found.low, sign * found.high))
    return f"{sign * found.mean:+.1f} [{low:+.1f}, {high:+.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--recipe", choices=list(RECIPES), default="quick")
    parser.add_argument("--model")
    parser.add_argument("--weights")
    parser.add_argument("--per-class", type=int)
    parser.add_argument("--imbalance", type=float, default=0.01)
    parser.add_argument("--image-size", type=int)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--device")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("runs/long-tail"))
    parser.add_argument("--rows", type=Path, help="CSV file to append the rows to")
    parser.add_argument("--only", nargs="+", default=["*"], help="lines of the table, for example 'erm*'")
    args = parser.parse_args()
    base, seeds = base_recipe(args), range(args.seeds)
    execution = Execution(out=args.out, data_dir=args.data_dir, device=args.device, workers=args.workers)
    named: list[Row] = []
    kept = [e for e in ENTRIES if base.train == "all" or mixes_features(e.settings["method"])]
    kept = [e for e in kept if any(fnmatch(e.name, pattern) for pattern in args.only)]
    if not kept:
        parser.error(f"--only {' '.join(args.only)} matches no line of {', '.join(e.name for e in ENTRIES)}")
    for entry in kept:
        rows = run_entry(entry, base, seeds, execution)
        if args.rows is not None:
            append_rows(args.rows, [(as_recipe(row), row) for row in rows])
        named += [row | {"method": entry.name} for row in rows]
    if any(entry.name == REFERENCE for entry in kept):
        print_table(named, [entry.name for entry in kept], seeds, args.out)


if __name__ == "__main__":
    main()
