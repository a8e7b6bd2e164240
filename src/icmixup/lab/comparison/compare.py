"""Methods x seeds on the same images and the same initial weights: runs, standings, a verdict, files.

comparison.json    per method the accuracies and metrics by seed; the recipe, every row, the verdict
comparison.csv     a row a run
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from icmixup.lab.datasets import Dataset
from icmixup.lab.sweep.ray import run_recipes
from icmixup.lab.sweep.progress import Display
from icmixup.lab.training.recipe import Recipe, read_recipe
from icmixup.lab.training.run_folder import Row, write_whole
from icmixup.lab.comparison.statistics import Standing, footnote, rank_methods, verdict
from icmixup.methods import find_method

EVEN_METHODS = ("erm", "mixup", "ic-mixup", "cutmix", "ic-cutmix", "regmixup", "ic-regmixup")
LONG_TAIL_METHODS = (
    "erm",
    "mixup",
    "ic-mixup",
    "remix",
    "ic-remix",
    "regmixup",
    "ic-regmixup",
    "balanced-mixup",
    "ic-mixup-centred",
)
LONG_TAIL_RATIO = 2  # of the largest class to the smallest, from which on class sizes matter


class Failure(NamedTuple):
    """A run without a result: its loss became nan, or its process died time and again."""

    method: str
    seed: int
    reason: str


@dataclass(frozen=True)
class Comparison:
    """What methods x seeds came to."""

    recipe: Recipe  # of the baseline with the first seed; the others differ in method and seed alone
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    baseline: str
    rows: tuple[Row, ...]  # finished runs
    failures: tuple[Failure, ...]
    standings: tuple[Standing, ...]  # highest accuracy first
    verdict: str
    footnote: str


def compare(
    recipe: Recipe,
    methods: Sequence[str],
    seeds: Sequence[int],
    baseline: str | None = None,
    *,
    root: Path,
    data_dir: Path,
    dataset: Dataset | None = None,
    display: Display | None = None,
    workers: int | None = 1,
    **where: Any,
) -> Comparison:
    """Train every method with every seed, and compare their accuracies seed by seed.

    A seed decides initial weights, order and augmentation alike, and the training images are the same for
    all, so that two methods with one seed differ in nothing but the method. Finished runs under `root` are
    taken as they are. A run that diverges, or is lost, does not stop the others.

    Args:
        recipe: everything but method and seed.
        baseline: what the differences are to; see pick_baseline.
        dataset: the recipe's own, if it is loaded already.
        display: told of every run.
        workers: how many runs at once; in turn in this process if not given, found out if None.
        where: engine, address, device and trackers; see run_recipes.
    """
    methods = check_methods(methods)
    baseline = pick_baseline(methods, baseline)
    failures: list[Failure] = []

    def fail(each: Recipe, reason: str) -> None:
        failures.append(Failure(each.method, each.seed, reason))
        if display is not None:
            display.fail(each, reason)

    rows = run_recipes(
        plan_runs(recipe, methods, seeds),
        root,
        data_dir=data_dir,
        dataset=dataset,
        workers=workers,
        on_row=None if display is None else display.finish,
        on_beat=None if display is None else display.beat,
        on_failure=fail,
        **where,
    )
    return summarise(recipe, methods, seeds, baseline, rows, failures)


def summarise(
    recipe: Recipe,
    methods: Sequence[str],
    seeds: Sequence[int],
    baseline: str,
    rows: Sequence[Row],
    failures: Sequence[Failure] = (),
) -> Comparison:
    """A comparison from the rows of its runs."""
    standings = rank_methods(rows, methods, seeds, baseline)
    return Comparison(
        recipe=dataclasses.replace(recipe, method=baseline, seed=seeds[0]),
        methods=tuple(methods),
        seeds=tuple(seeds),
        baseline=baseline,
        rows=tuple(rows),
        failures=tuple(failures),
        standings=standings,
        verdict=verdict(standings, baseline),
        footnote=footnote(standings, baseline),
    )


def plan_runs(recipe: Recipe, methods: Sequence[str], seeds: Sequence[int]) -> list[Recipe]:
    """The recipes to carry out, seed by seed, so that an interrupted comparison has whole pairs."""
    if not seeds:
        raise ValueError("no seeds to compare over; give --seeds 3, say")
    return [
        dataclasses.replace(recipe, method=method, seed=seed)
        for seed in dict.fromkeys(seeds)
        for method in methods
    ]


def check_methods(methods: Sequence[str]) -> tuple[str, ...]:
    """The methods, each once; names that we do not have are refused before anything is trained."""
    for method in methods:
        find_method(method)
    if not methods:
        raise ValueError("no methods to compare; give --methods erm mixup ic-mixup, say")
    return tuple(dict.fromkeys(methods))


def pick_baseline(methods: Sequence[str], baseline: str | None = None) -> str:
    """The one asked for, else mixup if it is compared, else the first."""
    if baseline is None:
        return "mixup" if "mixup" in methods else methods[0]
    if baseline not in methods:
        raise ValueError(f"the baseline {baseline!r} is not among the methods: {', '.join(methods)}; add it")
    return baseline


def default_methods(class_counts: Tensor) -> tuple[str, ...]:
    """What to compare if nobody says: on a long tail, those that a user with a long tail would try.

    Args:
        class_counts: (C,) training images of each class.
    """
    uneven = int(class_counts.max()) >= LONG_TAIL_RATIO * int(class_counts.min())
    return LONG_TAIL_METHODS if uneven else EVEN_METHODS


def forget_runs(root: Path, recipes: Sequence[Recipe]) -> None:
    """Remove what earlier sittings left of these very runs."""
    for recipe in recipes:
        if (root / recipe.name).exists():
            shutil.rmtree(root / recipe.name)


def write_comparison(comparison: Comparison, folder: Path) -> tuple[Path, Path]:
    """comparison.json and comparison.csv, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "comparison.json", folder / "comparison.csv"
    write_whole(paths[0], json.dumps(as_json(comparison), indent=1, allow_nan=False).encode())
    write_whole(paths[1], as_csv(comparison).encode())
    return paths


def read_comparison(path: Path) -> Comparison:
    """The comparison that write_comparison wrote; its statistics are made anew from its rows."""
    stored = json.loads(path.read_text())
    return summarise(
        read_recipe(stored["recipe"]),
        tuple(stored["methods"]),
        tuple(stored["seeds"]),
        stored["baseline"],
        stored["runs"],
        [Failure(**failure) for failure in stored["failures"]],
    )


def as_json(comparison: Comparison) -> dict[str, object]:
    order = {method: place for place, method in enumerate(comparison.methods)}
    standings = sorted(comparison.standings, key=lambda standing: order[standing.method])
    return {
        "verdict": comparison.verdict,
        "footnote": comparison.footnote,
        "baseline": comparison.baseline,
        "seeds": comparison.seeds,
        "methods": {standing.method: standing_as_json(standing) for standing in standings},
        "recipe": comparison.recipe.fields(),
        "failures": [failure._asdict() for failure in comparison.failures],
        "runs": comparison.rows,
    }


def standing_as_json(standing: Standing) -> dict[str, object]:
    difference = standing.difference
    return {
        "accuracies": standing.accuracies,
        "mean": standing.mean,
        "std": standing.std,
        "difference": None if difference is None else dataclasses.asdict(difference),
        "metrics": dict(standing.metrics),
    }


def as_csv(comparison: Comparison) -> str:
    """A row a run, those without a result included; lists stand as JSON."""
    failed: list[Row] = [
        {
            **dataclasses.replace(comparison.recipe, method=method, seed=seed).fields(),
            "status": "no result",
        }
        for method, seed, _ in comparison.failures
    ]
    rows: list[Row] = [*({**row, "status": "finished"} for row in comparison.rows), *failed]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: json.dumps(v) if isinstance(v, list | tuple) else v for k, v in row.items()})
    return text.getvalue()
