"""Which runs a report is about: finished runs of one dataset, by variant and seed, with their statistics.

A variant is what differences are taken between: a method, or with several comparisons a method and the other
fields in which their recipes differ, such as "ic-mixup epochs=60".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from icmixup.lab.analysis.report.summaries import Summary
from icmixup.lab.analysis.runs import line_names
from icmixup.lab.comparison.compare import (
    NO_PREDICTIONS,
    Comparison,
    Failure,
    pick_baseline,
    read_comparison,
    summarise,
)
from icmixup.lab.comparison.statistics import Answers, Look, Standing, rank_methods, take_look
from icmixup.lab.comparison.verdict import footnote
from icmixup.lab.training.recipe import Recipe, read_recipe
from icmixup.lab.training.run_folder import TRIALS_FOLDER, Row, Run, read_identity
from icmixup.lab.training.stored import (
    FOLDS_FILE,
    UnknownMethod,
    check_methods_known,
    read_json,
    read_recipe_file,
)
from icmixup.lab.training.trained import describe_folder
from icmixup.lab.wording import count

REMEDY = "pass folders of finished runs or of comparisons, for example runs/*"
RECIPE_FIELDS = tuple(entry.name for entry in fields(Recipe))
Key = tuple[str, int]  # variant, seed


@dataclass(frozen=True)
class Collected:
    """Finished runs, and what was left out."""

    runs: tuple[Run, ...]
    comparisons: tuple[Path, ...] = ()  # folders that were passed
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Study:
    """Runs by variant and seed, and everything that is computed from their rows."""

    variants: Mapping[str, str]  # by name, the method of each
    seeds: tuple[int, ...]
    baseline: str
    runs: Mapping[Key, Run]
    rows: Mapping[Key, Row]
    standings: tuple[Standing, ...]  # highest accuracy first
    looks: tuple[Look, ...]
    verdicts: tuple[str, ...]  # one for each recipe, without that of its variants
    footnote: str
    failures: tuple[Failure, ...] = ()
    overview: Mapping[str, object] = field(default_factory=dict)
    comparison: Comparison | None = None  # if all runs are of one
    notes: tuple[str, ...] = ()

    @property
    def first_runs(self) -> dict[str, Run]:
        """The run of each variant with its first seed."""
        found: dict[str, Run] = {}
        for seed in self.seeds:
            for name in self.variants:
                if (name, seed) in self.runs:
                    found.setdefault(name, self.runs[name, seed])
        return found


def collect_runs(paths: Sequence[Path]) -> Collected:
    """The finished runs under these paths: run folders, comparisons, and folders that contain runs. Trials of
    --tune, which runs/* matches, are left out: their accuracies are not of test images."""
    if not paths:
        raise ValueError(f"no runs to report on; {REMEDY}")
    folders: list[Path] = []
    comparisons: list[Path] = []
    for path in paths:
        if (path / "comparison.json").exists():
            comparisons.append(path)
            folders += [path.parent / row["folder"] for row in load_comparison(path / "comparison.json").rows]
        elif any((path / name).exists() for name in ("recipe.json", FOLDS_FILE)):
            folders.append(path)
        elif path.is_dir() and (path.name != TRIALS_FOLDER or len(paths) == 1):
            inside = (found for name in ("recipe.json", FOLDS_FILE) for found in path.glob(f"*/{name}"))
            folders += sorted(found.parent for found in inside)
        elif not path.exists():
            raise ValueError(f"{path} does not exist; {REMEDY}")
    folders = list(dict.fromkeys(folder.resolve() for folder in folders))
    if not folders:
        raise ValueError(f"{paths[0]} {describe_folder(paths[0])} and contains no runs; {REMEDY}")
    return keep_finished(folders, tuple(comparisons))


def keep_finished(folders: Sequence[Path], comparisons: tuple[Path, ...]) -> Collected:
    """The runs that have a result; a note for each of the others."""
    runs: list[Run] = []
    notes: list[str] = []
    for folder in folders:
        run = open_run_folder(folder)
        if run is None:
            notes.append(f"{folder.name} is missing: it was moved or deleted")
        elif read_row(run) is None:
            done = max((row["epoch"] for row in run.read_log()), default=0)
            notes.append(f"{folder.name} is unfinished after {done} of {run.recipe.epochs} epochs")
        else:
            runs.append(run)
    if not runs:
        raise ValueError(
            f"none of the {len(folders)} runs is finished: {'; '.join(notes[:3])}; run the command that "
            "trained them again to resume"
        )
    runs, parts = drop_single_folds(runs)
    runs, others = drop_other_images(runs)
    runs, twins = drop_duplicates(runs)
    check_same_data(runs)
    return Collected(tuple(runs), comparisons, (*notes, *parts, *others, *twins))


def open_run_folder(folder: Path) -> Run | None:
    """The run in a folder, or the pooled folds of cross-validation; None if there is neither."""
    if (folder / "recipe.json").exists():
        return Run(folder, read_recipe_file(folder / "recipe.json"), read_identity(folder))
    if not (folder / FOLDS_FILE).exists():
        return None
    row = read_json(folder / FOLDS_FILE)
    return Run(folder, read_recipe({name: row[name] for name in RECIPE_FIELDS if name in row}))


def read_row(run: Run) -> Row | None:
    """The row of a finished run, or of pooled folds."""
    pooled = run.folder / FOLDS_FILE
    return dict(read_json(pooled)) if pooled.exists() else run.result()


def drop_single_folds(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """The runs without those of single folds, which tested a part of the images: their pooled row counts.

    A note names the folds that are not pooled yet.
    """
    whole = [run for run in runs if run.recipe.fold is None]
    pooled = {name for run in whole for name in (read_row(run) or {}).get("fold_folders", ())}
    left = [run for run in runs if run.recipe.fold is not None and run.folder.name not in pooled]
    if not whole:
        raise ValueError(
            f"{left[0].folder} is one of {left[0].recipe.folds} folds, which count together; pass the "
            "comparison, or the folder that contains all runs"
        )
    notes = [
        f"{run.folder.name} is left out: it is one of {run.recipe.folds} folds, which are not pooled among "
        "these runs"
        for run in left
    ]
    return whole, notes


def drop_other_images(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Of runs whose recipes name the same images, those on the images of the newest: a folder may have
    changed in between, and differences would then be those of the images."""
    newest: dict[tuple[object, ...], Run] = {}
    prints = {run.folder: (read_row(run) or {}).get("fingerprint") for run in runs}
    for run in sorted(runs, key=lambda run: -result_file(run).stat().st_mtime):
        if prints[run.folder] is not None:
            newest.setdefault(images_key(run), run)
    kept: list[Run] = []
    notes: list[str] = []
    for run in runs:
        newer = newest.get(images_key(run), run)
        if prints[run.folder] in (None, prints[newer.folder]):
            kept.append(run)
        else:
            notes.append(
                f"{run.folder.name} is left out: its images were others than those of the newer "
                f"{newer.folder.name}"
            )
    return kept, notes


def images_key(run: Run) -> tuple[object, ...]:
    """What decides the fingerprint of the images, while files and weights stay as they are."""
    recipe, row = run.recipe, read_row(run) or {}
    weights = (recipe.model, recipe.weights, recipe.weights_digest) if recipe.weights is not None else ()
    device = row.get("device_kind") if recipe.train == "head" else None  # features differ by rounding
    return (recipe.data, recipe.train, weights, device)


def drop_duplicates(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Of several runs with one recipe, made by other versions or on other devices, the newest."""
    newest: dict[str, Run] = {}
    notes: list[str] = []
    for run in sorted(runs, key=lambda run: -result_file(run).stat().st_mtime):
        if run.recipe.key in newest:
            twin = newest[run.recipe.key].folder.name
            notes.append(f"{run.folder.name} is left out: {twin} has the same recipe and is newer")
        newest.setdefault(run.recipe.key, run)
    return [run for run in runs if run in newest.values()], notes


def result_file(run: Run) -> Path:
    pooled = run.folder / FOLDS_FILE
    return pooled if pooled.exists() else run.folder / "result.json"


def check_same_data(runs: Sequence[Run]) -> None:
    """Raise a ValueError that lists the datasets, if there are several."""
    data: dict[str, list[Run]] = {}
    for run in runs:
        data.setdefault(run.recipe.dataset, []).append(run)
    prints = {None if run.identity is None else run.identity.data for run in runs}
    if len(data) > 1 and (len(prints) > 1 or None in prints):
        found = "; ".join(
            f"{name}: {count(len(own), 'run')} such as {own[0].folder}" for name, own in data.items()
        )
        raise ValueError(
            f"the runs are of {len(data)} datasets, whose results cannot be compared ({found}); make a "
            "report for each: icmixup report with the runs of one dataset"
        )


def check_same_classes(runs: Mapping[Key, Run], summaries: Mapping[Key, Summary]) -> None:
    """Raise a ValueError if two runs have different classes."""
    lists: dict[tuple[str, ...], Path] = {}
    for key, summary in summaries.items():
        lists.setdefault(summary.class_names, runs[key].folder)
    if len(lists) > 1:
        (first, one), (second, other) = list(lists.items())[:2]
        ours = [name for name in first if name not in second] or list(first)
        theirs = [name for name in second if name not in first] or list(second)
        raise ValueError(
            f"the runs have different classes: {one} has {len(first)}, among them {', '.join(ours[:3])}; "
            f"{other} has {len(second)}, among them {', '.join(theirs[:3])}; make a report for each: "
            "icmixup report with the runs of one list of classes"
        )


def summarised_answers(summaries: Mapping[Key, Summary], keys: Sequence[Key]) -> tuple[Answers | None, str]:
    """What each run says to each test image; None and the reason if runs cannot be paired by image."""
    if not keys or any(key not in summaries for key in keys):
        return None, NO_PREDICTIONS
    if len({summaries[key].images for key in keys}) > 1:
        return None, "runs were tested on different images"
    return Answers({key: summaries[key].correct for key in keys}, summaries[keys[0]].labels), ""


def study_runs(collected: Collected, summaries_of: Mapping[Path, Summary]) -> Study:
    """The study of runs from disk; that of a comparison if they are its runs."""
    if len(collected.comparisons) == 1:
        path = collected.comparisons[0] / "comparison.json"
        comparison = load_comparison(path)
        folders = {row["folder"] for row in comparison.rows}
        if folders == {run.folder.name for run in collected.runs}:
            runs = {(run.recipe.method, run.recipe.seed): run for run in collected.runs}
            return study_comparison(comparison, runs, collected.notes)
    return study_variants(collected, summaries_of)


def load_comparison(path: Path) -> Comparison:
    try:
        check_methods_known(*read_json(path)["methods"])
        return read_comparison(path)
    except UnknownMethod as error:
        raise ValueError(f"{path} cannot be used: {error}") from error
    except (KeyError, TypeError, ValueError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} is damaged ({error!r:.80}); run the command that made it again, or pass the folders of "
            "its runs"
        ) from error


def study_comparison(comparison: Comparison, runs: Mapping[Key, Run], notes: Sequence[str] = ()) -> Study:
    """The study of a comparison: the numbers of its table."""
    return Study(
        variants={method: method for method in comparison.methods},
        seeds=comparison.seeds,
        baseline=comparison.baseline,
        runs=runs,
        rows={(row["method"], row["seed"]): row for row in comparison.rows},
        standings=comparison.standings,
        looks=comparison.looks,
        verdicts=(comparison.verdict,),
        footnote=comparison.footnote,
        failures=comparison.failures,
        overview=comparison.overview,
        comparison=comparison,
        notes=tuple(notes),
    )


def study_variants(collected: Collected, summaries_of: Mapping[Path, Summary]) -> Study:
    """The study of any runs: those of several comparisons, or run folders."""
    dataset = collected.runs[0].recipe.dataset
    measure = common_measure(collected.comparisons)
    # The same images may have been at another path.
    recipes = [replace(run.recipe, dataset=dataset) for run in collected.runs]
    names = line_names(recipes)
    variants = {name: recipe.method for name, recipe in zip(names, recipes, strict=True)}
    runs = {(name, run.recipe.seed): run for name, run in zip(names, collected.runs, strict=True)}
    rows = {key: {**(read_row(run) or {}), "method": key[0]} for key, run in runs.items()}
    seeds = tuple(sorted({seed for _, seed in runs}))
    summaries = {key: summaries_of[run.folder] for key, run in runs.items() if run.folder in summaries_of}
    answers, reason = summarised_answers(summaries, list(runs))
    looks = (take_look(list(rows.values()), list(variants), seeds, answers, measure=measure),)
    baseline = pick_baseline(list(variants))
    standings = rank_methods(list(rows.values()), list(variants), seeds, baseline, looks)
    return Study(
        variants=variants,
        seeds=seeds,
        baseline=baseline,
        runs=runs,
        rows=rows,
        standings=standings,
        looks=looks,
        verdicts=verdict_by_recipe(runs, seeds, summaries, measure),
        footnote=footnote(standings, baseline, looks, reason, common_folds(recipes)),
        notes=collected.notes,
    )


def common_measure(comparisons: Sequence[Path]) -> str:
    """What methods were compared in; the accuracy for runs alone, or where comparisons differ."""
    found = {load_comparison(path / "comparison.json").measure for path in comparisons}
    return found.pop() if len(found) == 1 else "accuracy"


def common_folds(recipes: Sequence[Recipe]) -> int | None:
    """The number of folds of all runs; None if some have none or another number."""
    found = {recipe.folds for recipe in recipes}
    return found.pop() if len(found) == 1 else None


def verdict_by_recipe(
    runs: Mapping[Key, Run], seeds: Sequence[int], summaries: Mapping[Key, Summary], measure: str
) -> tuple[str, ...]:
    """A verdict for each group of runs that differ in method and seed alone."""
    groups: dict[str, list[Key]] = {}
    for key in runs:
        groups.setdefault(settings_of(key[0]), []).append(key)
    verdicts = [
        verdict_of([runs[key] for key in keys], keys, seeds, summaries, measure) for keys in groups.values()
    ]
    return tuple(
        f"{settings}: {verdict}" if settings else verdict
        for settings, verdict in zip(groups, verdicts, strict=True)
    )


def settings_of(variant: str) -> str:
    """What the name of a variant has besides its method."""
    return variant.partition(" ")[2]


def verdict_of(
    runs: Sequence[Run],
    keys: Sequence[Key],
    seeds: Sequence[int],
    summaries: Mapping[Key, Summary],
    measure: str,
) -> str:
    rows = [read_row(run) or {} for run in runs]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    answers, _ = summarised_answers(summaries, keys)
    if answers is not None:
        named = zip(runs, keys, strict=True)
        answers = answers._replace(
            correct={(run.recipe.method, key[1]): answers.correct[key] for run, key in named}
        )
    looks = [take_look(rows, methods, seeds, answers, measure=measure)]
    return summarise(runs[0].recipe, methods, seeds, pick_baseline(methods), rows, looks=looks).verdict
