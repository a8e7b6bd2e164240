"""Methods x seeds on the same images and the same initial weights: runs, statistics, a verdict, files.

comparison.json    what was compared; accuracies and metrics by method and seed; the recipe, every row, the
                   verdict
comparison.csv     one row per run
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from icmixup._checks import check_choice
from icmixup.lab.comparison.folds import fold_recipes, pool_folds
from icmixup.lab.comparison.overview import LONG_TAIL_RATIO
from icmixup.lab.comparison.statistics import COMPARED, Answers, Look, Standing, rank_methods, take_look
from icmixup.lab.comparison.variance import Sample
from icmixup.lab.comparison.verdict import cut_short, footnote, hardly_learnt, verdict
from icmixup.lab.sweep import find_finished, run_recipes
from icmixup.lab.sweep.budget import Filler, Fit
from icmixup.lab.sweep.progress import Display
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.features import mixes_features
from icmixup.lab.training.loop import RunProgress
from icmixup.lab.training.output import rows_as_csv
from icmixup.lab.training.predictions import read_predictions
from icmixup.lab.training.ranks import rank
from icmixup.lab.training.recipe import Recipe, read_recipe
from icmixup.lab.training.run_folder import FEATURES_FOLDER, TRIALS_FOLDER, Row, write_atomically
from icmixup.lab.training.stored import read_run_names
from icmixup.methods import find_method

EVEN_METHODS = ("erm", "mixup", "ic-mixup", "cutmix", "ic-cutmix", "regmixup", "ic-regmixup")
# The paper's forms with their counterparts of soft targets, and forms that know the class sizes.
LONG_TAIL_METHODS = (
    "erm",
    "mixup",
    "ic-mixup",
    "regmixup",
    "ic-regmixup",
    "balanced",
    "balanced-mixup",
    "balanced-ic-regmixup",
    "erm-adjusted",
)
INTERVALS = ("both", "seeds")
Tuned = Mapping[str, Mapping[str, float]]  # by method, fields of its recipe
RESERVED = (TRIALS_FOLDER, FEATURES_FOLDER, "budgets.json")  # in the folder of all runs
# Files of a comparison that not every one has: confusions are by method, and others depend on flags.
OPTIONAL_FILES = (
    "comparison.png",
    "confused_pairs.csv",
    "confusion.*.csv",
    "per_class.csv",
    "report.html",
    "tuning.csv",
)
NO_PREDICTIONS = "no predictions of test images"


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
    looks: tuple[Look, ...]  # what the standings and the verdict were computed from
    seeds_only: str = ""  # why intervals do not account for test images, if they do not
    stop: str = ""  # why --seeds auto added no more seeds
    full_epochs: int | None = None  # of the recipe, if --budget cut them
    overview: Mapping[str, object] = field(default_factory=dict)  # what was compared, as JSON
    tuned: Tuned = field(default_factory=dict)  # by method, what --tune chose; empty without it

    @property
    def measure(self) -> str:
        """What methods are compared in, one of COMPARED."""
        return self.looks[-1].measure

    def recipe_of(self, method: str) -> Recipe:
        """The recipe that a method was trained with, for the first seed."""
        return dataclasses.replace(self.recipe, method=method, **self.tuned.get(method, {}))  # type: ignore[arg-type]


def compare(
    recipe: Recipe,
    methods: Sequence[str],
    seeds: Sequence[int],
    baseline: str | None = None,
    *,
    execution: Execution,
    display: Display | None = None,
    intervals: str = "both",
    measure: str = "accuracy",
    full_epochs: int | None = None,
    tuned: Tuned | None = None,
    filler: Filler | None = None,
) -> Comparison:
    """Train every method with every seed, and compare their accuracies seed by seed.

    A seed determines initial weights, order and augmentation, and all runs share the training images, so two
    methods with the same seed differ in the method only. Finished runs in execution.out are reused. A run
    that diverges or is lost does not stop the others.

    Args:
        recipe: everything but method and seed.
        baseline: method that differences refer to; see pick_baseline.
        display: shows the progress of every run.
        intervals: "both" covers new seeds and new test images, "seeds" covers new seeds.
        measure: one of COMPARED, what the differences are of.
        full_epochs: of the recipe before --budget cut them, for the verdict.
        tuned: fields of the recipe that differ by method, from tuning.tune_methods.
        filler: decides how many of the methods and seeds are trained, within a budget.
    """
    methods = check_methods(methods)
    baseline = pick_baseline(methods, baseline)
    check_choice("intervals", intervals, INTERVALS)
    check_choice("measure", measure, COMPARED)
    if filler is None:
        rows, failures = train_all(comparison_recipes(recipe, methods, seeds, tuned), execution, display)
    else:
        rows, failures = train_within_budget(recipe, seeds, execution, display, filler)
        methods, seeds = filler.fit.methods, seeds[: filler.fit.seeds]
    answers, seeds_only = read_answers(rows, execution.out, intervals)
    looks = [take_look(rows, methods, seeds, answers, measure=measure)]
    return summarise(
        *(recipe, methods, seeds, baseline, rows, failures),
        looks=looks,
        seeds_only=seeds_only,
        full_epochs=full_epochs,
        tuned=tuned,
    )


def train_all(
    recipes: Sequence[Recipe],
    execution: Execution,
    display: Display | None,
    filler: Filler | None = None,
    more: Callable[[], Sequence[Recipe]] | None = None,
) -> tuple[list[Row], list[Failure]]:
    """The rows of all runs that finished, folds pooled, and the runs that have none.

    Args:
        filler: is told about all runs.
        more: as in run_recipes.
    """
    failures: list[Failure] = []
    trained = list(recipes)

    def finish(row: Row) -> None:
        if filler is not None:
            filler.end(row["key"])
        if display is not None:
            display.finish(row)

    def update(recipe: Recipe, progress: RunProgress) -> None:
        if filler is not None:
            filler.listen(recipe, progress)
        if display is not None:
            display.update(recipe, progress)

    def fail(failed: Recipe, reason: str) -> None:
        failures.append(Failure(failed.method, failed.seed, reason))
        if filler is not None:
            filler.end(failed.key)
        if display is not None:
            display.fail(failed, reason)

    def add() -> Sequence[Recipe]:
        added = () if more is None else more()
        trained.extend(added)
        return added

    rows = run_recipes(
        recipes,
        execution,
        on_row=finish,
        on_progress=update,
        on_failure=fail,
        more=None if more is None else add,
    )
    return pool_folds(trained, rows, execution), failures


def train_within_budget(
    recipe: Recipe, seeds: Sequence[int], execution: Execution, display: Display | None, filler: Filler
) -> tuple[list[Row], list[Failure]]:
    """train_all for as many methods and seeds as the filler decides on.

    Args:
        recipe: everything but method and seed.
        seeds: all that may be used.
    """

    def recipes_of(fit: Fit) -> list[Recipe]:
        return comparison_recipes(recipe, fit.methods, seeds[: fit.seeds])

    def show(fit: Fit, message: str) -> None:
        if display is not None:
            recipes = recipes_of(fit)
            display.expect(recipes, find_finished(recipes, execution))
            if message:
                display.print(message)

    filler.on_change = show
    first = recipes_of(filler.fit)
    filler.begin(first)
    return train_all(first, execution, display, filler, lambda: filler.more(recipes_of))


def read_answers(rows: Sequence[Row], runs: Path, intervals: str = "both") -> tuple[Answers | None, str]:
    """What each run says to each test image; None, and the reason, if that cannot be used.

    Args:
        runs: folder that contains the run folders of `rows`.
        intervals: "seeds" does without.
    """
    if intervals == "seeds":
        return None, "--intervals seeds"
    if rank() > 0:  # only the first rank reports, and files may not be visible to others yet
        return None, NO_PREDICTIONS
    try:
        found = {(row["method"], row["seed"]): read_predictions(runs / row["folder"]) for row in rows}
    except (KeyError, ValueError) as error:
        return None, f"{NO_PREDICTIONS}: {error}" if isinstance(error, ValueError) else NO_PREDICTIONS
    named = {one.file_names for one in found.values()}
    labels = {one.labels.tobytes() for one in found.values()}
    if len(labels) > 1 or (len(named) > 1 and not have_same_fingerprint(rows)):
        return None, "runs were tested on different images"
    if not found:
        return None, NO_PREDICTIONS
    correct = {run: predictions.correct for run, predictions in found.items()}
    return Answers(correct, next(iter(found.values())).labels), ""


def have_same_fingerprint(rows: Sequence[Row]) -> bool:
    """Whether runs have the same images in the same order, by their content: files may have been renamed.

    Pooled folds are ordered by the names of files, so these must agree as well.
    """
    found = {row.get("fingerprint") for row in rows}
    return len(found) == 1 and None not in found and not any(row.get("fold_folders") for row in rows)


def summarise(
    recipe: Recipe,
    methods: Sequence[str],
    seeds: Sequence[int],
    baseline: str,
    rows: Sequence[Row],
    failures: Sequence[Failure] = (),
    overview: Mapping[str, object] | None = None,
    *,
    looks: Sequence[Look] | None = None,
    seeds_only: str = "",
    stop: str = "",
    full_epochs: int | None = None,
    tuned: Tuned | None = None,
) -> Comparison:
    """A comparison from the rows of its runs.

    Args:
        looks: as statistics.take_look returns them; by default one, which covers seeds alone.
        seeds_only: why test images are not accounted for, if they are not.
        stop: why --seeds auto added no more seeds.
        full_epochs: of the recipe before --budget cut them.
    """
    looks = looks or [take_look(rows, methods, seeds)]
    if not any(sample.images for sample in looks[-1].samples.values()):
        seeds_only = seeds_only or NO_PREDICTIONS
    failed = [(failure.method, failure.seed) for failure in failures]
    standings = rank_methods(rows, methods, seeds, baseline, looks, failed)
    return Comparison(
        recipe=dataclasses.replace(recipe, method=baseline, seed=seeds[0]),
        methods=tuple(methods),
        seeds=tuple(seeds),
        baseline=baseline,
        rows=tuple(rows),
        failures=tuple(failures),
        standings=standings,
        verdict=cut_short(recipe.epochs, full_epochs)
        + hardly_learnt(rows)
        + verdict(standings, baseline, looks),
        footnote=footnote(standings, baseline, looks, seeds_only, recipe.folds, tuned=bool(tuned)),
        looks=tuple(looks),
        seeds_only=seeds_only,
        stop=stop,
        full_epochs=full_epochs,
        overview=overview or {},
        tuned=tuned or {},
    )


def comparison_recipes(
    recipe: Recipe, methods: Sequence[str], seeds: Sequence[int], tuned: Tuned | None = None
) -> list[Recipe]:
    """The recipes to train, seed by seed and fold by fold; if interrupted, there are complete pairs."""
    if not seeds:
        raise ValueError("no seeds to compare; use for example --seeds 3")
    return [
        dataclasses.replace(fold, method=method, seed=seed, **(tuned or {}).get(method, {}))  # type: ignore[arg-type]
        for seed in dict.fromkeys(seeds)
        for fold in fold_recipes(recipe)
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


def comparison_name(
    recipe: Recipe,
    recipe_name: str,
    methods: Sequence[str],
    seeds: Sequence[int | str],
    baseline: str,
    data: str,
    tune: int | None = None,
    tune_parts: int = 1,
    measure: str = "accuracy",
) -> str:
    """A folder name of a comparison: data, model and recipe, and a key of everything else that defines it.

    Args:
        seeds: with "auto" among them if they are added one by one.
        data: fingerprint of the images.
        tune: trials per method, if values are tuned.
        tune_parts: parts of the training images that trials are validated on.
        measure: what methods are compared in.
    """
    plain = dataclasses.replace(recipe, dataset="", method="erm", seed=0)
    tuning = [] if tune is None else [f"tune {tune}" + f" parts {tune_parts}" * (tune_parts > 1)]
    other = [] if measure == "accuracy" else [measure]
    parts = json.dumps([plain.key, list(methods), list(seeds), baseline, data, *tuning, *other])
    key = hashlib.sha256(parts.encode()).hexdigest()[:6]
    recipe_name += "" if tune is None else "-tuned"
    return f"{recipe.data_title}.{recipe.model.replace('/', '-')}.{recipe_name}.{key}"


def comparison_folder(out: Path, name: str) -> Path:
    """out / name; a ValueError if the name is not that of a folder, or is taken by a run."""
    if name in ("", ".", "..") or Path(name).name != name:
        raise ValueError(f"--name must be the name of a folder, without / or .., got {name!r}")
    if name in RESERVED:
        raise ValueError(f"--name {name!r} is what icmixup itself stores in {out}; use another name")
    if (out / name / "recipe.json").exists() or (out / name).is_file():
        raise ValueError(f"--name {name!r} is taken by a run or a file in {out}; use another name")
    return out / name


def write_comparison(comparison: Comparison, folder: Path) -> tuple[Path, Path]:
    """Write comparison.json and comparison.csv, each atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "comparison.json", folder / "comparison.csv"
    write_atomically(paths[0], json.dumps(comparison_as_json(comparison), indent=1, allow_nan=False).encode())
    write_atomically(paths[1], comparison_as_csv(comparison).encode())
    return paths


def replaces_other_runs(comparison: Comparison, folder: Path) -> bool:
    """Whether the folder has the files of a comparison of other runs, for example with the same --name."""
    stored = folder / "comparison.json"
    if not stored.exists():
        return False
    now = {name for row in comparison.rows for name in row.get("fold_folders") or [row["folder"]]}
    try:
        return set(read_run_names(stored)) != now
    except ValueError:  # a damaged file, which is written again
        return True


def changes_verdict(comparison: Comparison, folder: Path) -> bool:
    """Whether the folder has another verdict, for example on the same runs in another --measure."""
    try:
        stored = json.loads((folder / "comparison.json").read_text())
    except (OSError, ValueError):
        return False
    return not isinstance(stored, dict) or stored.get("verdict") != comparison.verdict


def remove_outdated(folder: Path, written: Sequence[Path]) -> None:
    """Delete the files of an earlier comparison in this folder that the present one did not write again."""
    for pattern in OPTIONAL_FILES:
        for path in set(folder.glob(pattern)) - set(written):
            path.unlink()


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
        stored.get("overview", {}),
        looks=[read_look(look) for look in stored["looks"]] if "looks" in stored else None,
        seeds_only=stored.get("seeds_only", ""),
        stop=stored.get("stop", ""),
        full_epochs=stored.get("full_epochs"),
        tuned=stored.get("tuned", {}),
    )


def comparison_as_json(comparison: Comparison) -> dict[str, object]:
    order = {method: number for number, method in enumerate(comparison.methods)}
    standings = sorted(comparison.standings, key=lambda standing: order[standing.method])
    return {
        "verdict": comparison.verdict,
        "footnote": comparison.footnote,
        "baseline": comparison.baseline,
        "measure": comparison.measure,
        "seeds": comparison.seeds,
        "methods": {standing.method: standing_as_json(standing) for standing in standings},
        "overview": dict(comparison.overview),
        "recipe": comparison.recipe.fields(),
        "failures": [failure._asdict() for failure in comparison.failures],
        "looks": [look_as_json(look) for look in comparison.looks],
        "seeds_only": comparison.seeds_only,
        "stop": comparison.stop,
        "full_epochs": comparison.full_epochs,
        "tuned": {method: dict(values) for method, values in comparison.tuned.items()},
        "runs": comparison.rows,
    }


def look_as_json(look: Look) -> dict[str, object]:
    """The numbers that intervals and verdict follow from, to compute them without predictions."""
    pairs = [
        {"first": first, "second": second, **{name: float(value) for name, value in sample._asdict().items()}}
        for (first, second), sample in look.samples.items()
    ]
    return look._asdict() | {"samples": pairs}


def read_look(stored: dict[str, Any]) -> Look:
    """The look that look_as_json wrote."""
    samples = {
        (pair["first"], pair["second"]): Sample(*(np.asarray(pair[name]) for name in Sample._fields))
        for pair in stored["samples"]
    }
    return Look(**(stored | {"samples": samples}))


def standing_as_json(standing: Standing) -> dict[str, object]:
    difference = standing.difference
    return {
        "accuracies": standing.accuracies,
        "mean": standing.mean,
        "std": standing.std,
        "difference": None if difference is None else dataclasses.asdict(difference),
        "to_best": None if standing.to_best is None else dataclasses.asdict(standing.to_best),
        "in_best_group": standing.in_best_group,
        "stopped_after": standing.stopped_after,
        "metrics": dict(standing.metrics),
    }


def comparison_as_csv(comparison: Comparison) -> str:
    """One row per run, including those without a result; lists are written as JSON."""
    failed: list[Row] = [
        {
            **dataclasses.replace(comparison.recipe_of(method), seed=seed).fields(),
            "status": "no result",
        }
        for method, seed, _ in comparison.failures
    ]
    rows: list[Row] = [*({**row, "status": "finished"} for row in comparison.rows), *failed]
    return rows_as_csv(
        [{k: json.dumps(v) if isinstance(v, list | tuple) else v for k, v in row.items()} for row in rows]
    )
