"""Methods x seeds on the same images and the same initial weights: runs, statistics, a verdict, files.

comparison.json    accuracies and metrics by method and seed; the recipe, every row, the verdict
comparison.csv     one row per run
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
from typing import NamedTuple

from torch import Tensor

from icmixup.lab.comparison.statistics import Standing, footnote, rank_methods, verdict
from icmixup.lab.sweep import run_recipes
from icmixup.lab.sweep.progress import Display
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.features import mixes_features
from icmixup.lab.training.recipe import Recipe, read_recipe
from icmixup.lab.training.run_folder import Row, write_atomically
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
LONG_TAIL_RATIO = 2  # of the largest to the smallest class, from which on class sizes matter


class Failure(NamedTuple):
    """A run without a result: its loss became nan, or its process died repeatedly."""

    method: str
    seed: int
    reason: str


@dataclass(frozen=True)
class Comparison:
    """The result of methods x seeds."""

    recipe: Recipe  # of the baseline with the first seed; the others differ in method and seed only
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
    execution: Execution,
    display: Display | None = None,
) -> Comparison:
    """Train every method with every seed, and compare their accuracies seed by seed.

    A seed determines initial weights, order and augmentation, and all runs share the training images, so two
    methods with the same seed differ in the method only. Finished runs in execution.out are reused. A run
    that diverges or is lost does not stop the others.

    Args:
        recipe: everything but method and seed.
        baseline: method that differences refer to; see pick_baseline.
        display: shows the progress of every run.
    """
    methods = check_methods(methods)
    baseline = pick_baseline(methods, baseline)
    failures: list[Failure] = []

    def fail(failed: Recipe, reason: str) -> None:
        failures.append(Failure(failed.method, failed.seed, reason))
        if display is not None:
            display.fail(failed, reason)

    rows = run_recipes(
        comparison_recipes(recipe, methods, seeds),
        execution,
        on_row=None if display is None else display.finish,
        on_progress=None if display is None else display.update,
        on_failure=fail,
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


def comparison_recipes(recipe: Recipe, methods: Sequence[str], seeds: Sequence[int]) -> list[Recipe]:
    """The recipes to train, seed by seed, so that an interrupted comparison has complete pairs."""
    if not seeds:
        raise ValueError("no seeds to compare; use for example --seeds 3")
    return [
        dataclasses.replace(recipe, method=method, seed=seed)
        for seed in dict.fromkeys(seeds)
        for method in methods
    ]


def check_methods(methods: Sequence[str]) -> tuple[str, ...]:
    """The methods, each once; unknown names are rejected before anything is trained."""
    for method in methods:
        find_method(method)
    if not methods:
        raise ValueError("no methods to compare; use for example --methods erm mixup ic-mixup")
    return tuple(dict.fromkeys(methods))


def pick_baseline(methods: Sequence[str], baseline: str | None = None) -> str:
    """The given one, otherwise mixup if it is compared, otherwise the first."""
    if baseline is None:
        return "mixup" if "mixup" in methods else methods[0]
    if baseline not in methods:
        raise ValueError(
            f"baseline {baseline!r} is not among the methods ({', '.join(methods)}); add it to --methods"
        )
    return baseline


def default_methods(class_counts: Tensor, *, features: bool = False) -> tuple[str, ...]:
    """The methods to compare by default: for a long tail, those that address it.

    Args:
        class_counts: (C,) training images of each class.
        features: leave out methods that need images.
    """
    uneven = int(class_counts.max()) >= LONG_TAIL_RATIO * int(class_counts.min())
    methods = LONG_TAIL_METHODS if uneven else EVEN_METHODS
    return tuple(method for method in methods if mixes_features(method)) if features else methods


def delete_runs(root: Path, recipes: Sequence[Recipe]) -> None:
    """Delete existing results of these runs."""
    for recipe in recipes:
        if (root / recipe.name).exists():
            shutil.rmtree(root / recipe.name)


def write_comparison(comparison: Comparison, folder: Path) -> tuple[Path, Path]:
    """Write comparison.json and comparison.csv, each atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "comparison.json", folder / "comparison.csv"
    write_atomically(paths[0], json.dumps(comparison_as_json(comparison), indent=1, allow_nan=False).encode())
    write_atomically(paths[1], comparison_as_csv(comparison).encode())
    return paths


def read_comparison(path: Path) -> Comparison:
    """The comparison that write_comparison wrote; its statistics are computed again from its rows."""
    stored = json.loads(path.read_text())
    return summarise(
        read_recipe(stored["recipe"]),
        tuple(stored["methods"]),
        tuple(stored["seeds"]),
        stored["baseline"],
        stored["runs"],
        [Failure(**failure) for failure in stored["failures"]],
    )


def comparison_as_json(comparison: Comparison) -> dict[str, object]:
    order = {method: number for number, method in enumerate(comparison.methods)}
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


def comparison_as_csv(comparison: Comparison) -> str:
    """One row per run, including those without a result; lists are written as JSON."""
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
