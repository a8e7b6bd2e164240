"""Every baseline for long tails and our own forms, in one recipe: rows, and a table with intervals.

    python tools/long_tail_baselines.py --dataset digits --per-class 100 --imbalance 0.01 --recipe quick \
        --seeds 5 --out runs/long-tail --rows results/long_tail_digits.csv

Runs that are finished are not trained again, nor are those that have a row in --rows, unless a line needs
their weights. Lines that share a run train it once. Where tau is chosen, a second run of the same seed
holds out a fifth of its training images; the tau that is best on them is then applied to the run on all
images. No choice is made on the test images. Differences are to `balanced`, logit adjustment in training.
Methods that need images are left out on features.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Collection, Sequence
from fnmatch import fnmatch
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, get_args

from icmixup.lab.comparison.compare import read_answers
from icmixup.lab.comparison.statistics import describe_sample, take_look
from icmixup.lab.datasets import Dataset, DataSpec
from icmixup.lab.models import weights_digest
from icmixup.lab.paper.deadline import run_in_time
from icmixup.lab.paper.results import append_rows, check_file, experiment, read_rows
from icmixup.lab.sweep import run_recipes
from icmixup.lab.sweep.budget import parse_budget
from icmixup.lab.training.data import training_data
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.features import mixes_features
from icmixup.lab.training.recipe import RECIPES, After, Precision, Recipe, lengthen, read_recipe
from icmixup.lab.training.retrain import retrain
from icmixup.lab.training.run_folder import Row

REFERENCE = "balanced"
HELD_OUT = 0.2


class Entry(NamedTuple):
    """One line of the table: a method with settings of its own, and what is done after training."""

    name: str
    settings: dict[str, Any]
    after: After = "none"
    tau: float | None = None  # None chooses it on held-out images

    @property
    def chooses_tau(self) -> bool:
        return self.after in ("adjust", "tau-norm") and self.tau is None


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
    *plain("mixup-cutmix", "balanced-mixup-cutmix", "ic-mixup-cutmix"),
    Entry("mixup-cutmix, then adjusted, tau chosen", {"method": "mixup-cutmix"}, "adjust"),
    Entry("ic-mixup-cutmix, then adjusted, tau chosen", {"method": "ic-mixup-cutmix"}, "adjust"),
    Entry("regmixup, then adjusted, tau chosen", {"method": "regmixup"}, "adjust"),
    Entry("ic-mixup, then adjusted, tau chosen", {"method": "ic-mixup"}, "adjust"),
    Entry("ic-regmixup, then adjusted, tau chosen", {"method": "ic-regmixup"}, "adjust"),
    # The defaults of alpha are 20 and 1: with equal ones the two differ in their loss alone.
    Entry("balanced-regmixup, alpha 1", {"method": "balanced-regmixup", "alpha": 1.0}),
    Entry("balanced-ic-regmixup, alpha 20", {"method": "balanced-ic-regmixup", "alpha": 20.0}),
    Entry("balanced-regmixup, tau 1.5", {"method": "balanced-regmixup", "adjust_tau": 1.5}),
    Entry("balanced-ic-regmixup, tau 1.5", {"method": "balanced-ic-regmixup", "adjust_tau": 1.5}),
)


def base_recipe(args: argparse.Namespace) -> Recipe:
    """The named recipe on the given data."""
    given = {
        name: getattr(args, name)
        for name in ("model", "weights", "per_class", "imbalance", "epochs", "lr", "image_size", "precision")
        if getattr(args, name) is not None
    }
    recipe = dataclasses.replace(RECIPES[args.recipe], dataset=args.dataset, **given)
    if args.epochs is not None:
        recipe = dataclasses.replace(recipe, min_steps=0)
    digest = weights_digest(recipe.model, recipe.weights)
    return dataclasses.replace(recipe, weights_digest=digest, eval_every=recipe.epochs)


def trained_recipe(entry: Entry, base: Recipe, seed: int) -> Recipe:
    """The run of a line, before its classifier is changed."""
    return dataclasses.replace(base, seed=seed, **entry.settings)


def holding_out(recipe: Recipe) -> Recipe:
    """The same run without the images on which tau is chosen."""
    return dataclasses.replace(recipe, held_out=HELD_OUT)


class Session:
    """Trains the runs of all lines, each once, then makes the lines from them.

    Args:
        execution: where runs are, and on what they are trained.
        rows: file that every row is appended to as soon as it is there.
        seconds: runs that are not expected to end within this time are not started.
    """

    def __init__(self, execution: Execution, rows: Path | None = None, seconds: float | None = None) -> None:
        self.execution, self.rows = execution, rows
        self.end = None if seconds is None else time.monotonic() + seconds
        self.trained: dict[Recipe, Row] = {}
        self.stored = {} if rows is None else stored_rows(rows)
        self.loaded: dict[DataSpec, Dataset] = {}

    def on_data_of(self, recipe: Recipe) -> Execution:
        """With the images or features of a recipe, loaded once for all methods and seeds."""
        if recipe.data not in self.loaded:
            self.loaded[recipe.data] = training_data(recipe, self.execution)
        return dataclasses.replace(self.execution, dataset=self.loaded[recipe.data])

    def lengthened(self, recipe: Recipe) -> Recipe:
        """What is trained, and has rows: a run that is too short for its min_steps has more epochs."""
        data = self.on_data_of(recipe).dataset
        assert data is not None
        return lengthen(recipe, len(data.train))

    def stored_row(self, recipe: Recipe) -> Row | None:
        """The row of a run in the file."""
        if not self.stored:
            return None
        return self.stored.get((experiment(self.lengthened(recipe)), recipe.seed))

    def train(self, recipes: Sequence[Recipe], keep: Collection[Recipe]) -> None:
        """Train runs on the same images; rows of those in `keep` are rows of the table."""
        if not recipes:
            return
        execution = self.on_data_of(recipes[0])
        by_key = {self.lengthened(recipe).key: recipe for recipe in recipes}

        def on_row(row: Row) -> None:
            recipe = by_key[row["key"]]
            self.trained[recipe] = row
            print(f"trained {recipe.title}: {row['accuracy']:.2f} %", flush=True)
            if recipe in keep:
                self.append(row)

        if self.end is None:
            run_recipes(recipes, execution, on_row=on_row)
        else:
            run_in_time(recipes, execution, self.end - time.monotonic(), on_row)

    def make(self, entry: Entry, recipe: Recipe) -> Row | None:
        """The row of a line for one seed; None if a run that it needs has not been trained."""
        if entry.after == "none":
            return self.trained.get(recipe) or self.stored_row(recipe)
        if recipe not in self.trained:
            return None
        tau = entry.tau
        if entry.chooses_tau:
            held = holding_out(recipe)
            if held not in self.trained:
                return None
            tau = float(self.retrain(held, entry.after)["tau_used"])
        row = self.retrain(recipe, entry.after, tau)
        self.append(row)
        return row

    def retrain(self, recipe: Recipe, how: After, tau: float | None = None) -> Row:
        folder = self.execution.out / self.trained[recipe]["folder"]
        return retrain(folder, how, self.on_data_of(recipe), tau=tau)

    def append(self, row: Row) -> None:
        if self.rows is not None:
            append_rows(self.rows, [(as_recipe(row), row)])


def stored_rows(path: Path) -> dict[tuple[str, int], Row]:
    """The rows of a results file by experiment and seed."""
    return {
        (experiment(found.recipe), found.recipe.seed): found.recipe.fields() | found.numbers
        for found in read_rows(path).rows
    }


def run_lines(
    entries: Sequence[Entry], base: Recipe, seeds: Sequence[int], session: Session
) -> dict[str, list[Row]]:
    """The rows of each line; the first seed of all lines is trained before the second of any."""
    lines = [(entry, trained_recipe(entry, base, seed)) for seed in seeds for entry in entries]
    needed = {r for entry, r in lines if entry.after != "none" or session.stored_row(r) is None}
    whole = [recipe for recipe in dict.fromkeys(recipe for _, recipe in lines) if recipe in needed]
    held = list(dict.fromkeys(holding_out(recipe) for entry, recipe in lines if entry.chooses_tau))
    session.train(whole, {recipe for entry, recipe in lines if entry.after == "none"})
    session.train(held, ())
    found: dict[str, list[Row]] = {entry.name: [] for entry in entries}
    for entry, recipe in sorted(lines, key=lambda line: line[0].after == "crt"):  # the slow ones last
        row = session.make(entry, recipe)
        if row is None:
            print(f"{entry.name}, seed {recipe.seed}: not trained within --budget", flush=True)
        else:
            found[entry.name].append(row)
    return found


def as_recipe(row: Row) -> Recipe:
    names = [field.name for field in dataclasses.fields(Recipe)]
    return read_recipe({name: row[name] for name in names})


def print_table(rows: list[Row], names: Sequence[str], seeds: Sequence[int], out: Path) -> None:
    """Markdown: mean accuracy, that of the smallest classes, and the difference to the reference."""
    answers, why = read_answers(rows, out)
    if why:
        print(why)
    samples = take_look(rows, names, seeds, answers).samples
    print("| method | accuracy | few | difference to balanced [95 % interval] |\n|---|---|---|---|")
    for name in names:
        own = [row for row in rows if row["method"] == name]
        few = [row["few"] for row in own if row["few"] is not None]
        of_few = f"{fmean(few):.1f}" if few else "-"
        accuracy = fmean(row["accuracy"] for row in own)
        print(f"| {name} | {accuracy:.1f} | {of_few} | {describe(samples, name)} |")


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
    parser.add_argument("--lr", type=float)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--device")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("runs/long-tail"))
    parser.add_argument("--precision", choices=get_args(Precision), help="bfloat16 on a CPU too")
    parser.add_argument("--budget", help="start only runs that are expected to end within this, such as 9m")
    parser.add_argument("--rows", type=Path, help="CSV file to append the rows to")
    parser.add_argument("--only", nargs="+", default=["*"], help="lines of the table, for example 'erm*'")
    args = parser.parse_args()
    base, seeds = base_recipe(args), range(args.seeds)
    execution = Execution(out=args.out, data_dir=args.data_dir, device=args.device, workers=args.workers)
    kept = [e for e in ENTRIES if base.train == "all" or mixes_features(e.settings["method"])]
    kept = [e for e in kept if any(fnmatch(e.name, pattern) for pattern in args.only)]
    if not kept:
        parser.error(f"--only {' '.join(args.only)} matches no line of {', '.join(e.name for e in ENTRIES)}")
    if args.rows is not None:
        check_file(args.rows, [trained_recipe(entry, base, seeds[0]) for entry in kept])
    session = Session(execution, args.rows, None if args.budget is None else parse_budget(args.budget))
    found = run_lines(kept, base, seeds, session)
    whole = {name: rows for name, rows in found.items() if len(rows) == len(seeds)}
    if REFERENCE in whole:
        named = [row | {"method": name} for name, rows in whole.items() for row in rows]
        print_table(named, list(whole), seeds, args.out)
    else:
        print(f"no table, since {REFERENCE}, which differences are to, does not have all seeds; see --only")


if __name__ == "__main__":
    main()
