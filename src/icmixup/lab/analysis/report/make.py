"""From run folders to a page: predictions, thumbnails and scores between classes are read or computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from icmixup.lab.analysis.report.between import NOT_YET, OTHER_IMAGES, between_classes
from icmixup.lab.analysis.report.data import Parts, Progress
from icmixup.lab.analysis.report.page import write_page
from icmixup.lab.analysis.report.pictures import thumbnails
from icmixup.lab.analysis.report.study import (
    Key,
    Study,
    check_same_classes,
    collect_runs,
    open_run_folder,
    study_comparison,
    study_runs,
)
from icmixup.lab.analysis.report.summaries import Summary, images_digest, summarise_predictions
from icmixup.lab.analysis.runs import load_model
from icmixup.lab.comparison.compare import Comparison
from icmixup.lab.datasets import DataSpec, Split
from icmixup.lab.training.data import LoadData, load_recipe_data, remember_data
from icmixup.lab.training.evaluate import split_scores
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.identity import autocast_dtype
from icmixup.lab.training.predictions import Predictions, make_predictions, read_predictions
from icmixup.lab.training.ranks import pick_device
from icmixup.lab.training.run_folder import Row, Run
from icmixup.lab.training.trained import load_run_data

REPORT_FILE = "report.html"
NO_THUMBNAILS = "the report was made with --no-thumbnails"
Summaries = dict[Path, Summary]  # by run folder


class Options(NamedTuple):
    """Where data and networks are, and what is shown."""

    data_dir: Path
    device: str | None = None
    thumbnails: bool = True


def report_runs(paths: Sequence[Path], out: Path | None, options: Options) -> tuple[Path, Study]:
    """Write the report of finished runs.

    Args:
        paths: run folders, comparisons, and folders that contain runs, all of one dataset.
        out: by default report.html in the folder of the comparison, or here if several paths are given.
    """
    collected = collect_runs(paths)
    # Beside the runs are the features of heads, which would otherwise be computed again, and stored here.
    beside = collected.runs[0].folder.parent
    load = remember_data(Execution(out=beside, data_dir=options.data_dir, device=options.device))
    device = pick_device(options.device)
    summaries: Summaries = {}
    reasons = []
    for run in collected.runs:
        try:
            summaries[run.folder] = summarise_predictions(find_predictions(run, load, device))
        except (ValueError, OSError, ModuleNotFoundError) as error:
            reasons.append(f"{run.folder.name} has no predictions: {error}")
    check_same_classes(
        {(str(run.folder), 0): run for run in collected.runs},
        {(str(folder), 0): summary for folder, summary in summaries.items()},
    )
    study = study_runs(collected, summaries)
    if out is None:
        out = (
            collected.comparisons[0] if len(paths) == 1 and collected.comparisons else Path()
        ) / REPORT_FILE
    parts = complete_parts(study, summaries, load, options)
    return write_page(out, study, dataclasses.replace(parts, notes=tuple(reasons))), study


def find_predictions(run: Run, load: LoadData, device: torch.device) -> Predictions:
    """The stored predictions, otherwise those of the checkpoint; a ValueError with both reasons."""
    try:
        return read_predictions(run.folder)
    except ValueError as error:
        reason = str(error)
    try:
        data = load_run_data(run, load)
        model = load_model(run, data, device)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        raise ValueError(f"{reason}; not made from the checkpoint, since {error}") from error
    dtype = autocast_dtype(run.recipe, device)
    scores = split_scores(model, data.test, data.mean, data.std, autocast_dtype=dtype)
    return make_predictions(scores, data.test.labels, data.test.file_names, data.class_names)


def report_comparison(
    comparison: Comparison,
    folder: Path,
    execution: Execution,
    *,
    progress: Progress | None = None,
    cache: Summaries | None = None,
) -> Path:
    """Write report.html into the folder of a comparison, finished or in progress.

    Args:
        folder: of the comparison; its runs are in execution.out.
        cache: summaries of runs by folder; those of new runs are added to it.
    """
    runs = {
        (row["method"], row["seed"]): run
        for row in comparison.rows
        if (run := open_run_folder(execution.out / row["folder"])) is not None
    }
    study = study_comparison(comparison, runs)
    cache = {} if cache is None else cache
    read_summaries((run.folder for run in runs.values()), cache)
    options = Options(execution.data_dir, execution.device)
    parts = complete_parts(study, cache, remember_data(execution), options, finished=progress is None)
    return write_page(folder / REPORT_FILE, study, dataclasses.replace(parts, progress=progress))


def read_summaries(folders: Iterable[Path], cache: Summaries) -> None:
    """Add the summaries of these runs to the cache, unless it has them."""
    for folder in folders:
        if folder not in cache:
            cache[folder] = summarise_predictions(read_predictions(folder))


def complete_parts(
    study: Study,
    summaries_of: Mapping[Path, Summary],
    load: LoadData,
    options: Options,
    *,
    finished: bool = True,
) -> Parts:
    """What a page shows besides rows: summaries, class sizes, thumbnails, scores between classes."""
    summaries: dict[Key, Summary] = {
        key: summaries_of[run.folder] for key, run in study.runs.items() if run.folder in summaries_of
    }
    counts, why = class_counts(study, load)
    pictures, reason = mistake_thumbnails(study, summaries, load, options, finished=finished)
    between = NOT_YET
    if finished:
        device = pick_device(options.device)
        between = between_classes(study, summaries, load, device, with_pictures=options.thumbnails)
    return Parts(summaries, counts, pictures, reason or why * (not pictures), between)


def class_counts(study: Study, load: LoadData) -> tuple[Sequence[int], str]:
    """Training images of each class, from the comparison or the dataset; empty, and why, if unknown."""
    stored = study.overview.get("class_counts")
    if isinstance(stored, list | tuple) and stored:
        return [int(count) for count in stored], ""
    if len({training_subset(run) for run in study.runs.values()}) > 1:
        return (), ""  # those of one would stand beside the accuracies of others
    key, run = next(iter(study.runs.items()))
    try:
        return load_run_data(first_fold_of(run, study.rows[key]), load).class_counts.tolist(), ""
    except (ValueError, OSError, ModuleNotFoundError) as error:
        return (), str(error)


def training_subset(run: Run) -> DataSpec:
    """Which training images a run has, wherever they are and at whatever size; folds have equally many."""
    return dataclasses.replace(run.recipe.data, dataset="", image_size=None, fold_seed=0)


def first_fold_of(run: Run, row: Row) -> Run:
    """The run that was trained: of pooled folds the first, since a fold alone has their training images."""
    if "fold_folders" not in row:
        return run
    folder = run.folder.parent / row["fold_folders"][0]
    found = open_run_folder(folder)
    if found is None:
        raise ValueError(f"{folder} is missing")
    return found


def mistake_thumbnails(
    study: Study,
    summaries: Mapping[Key, Summary],
    load: LoadData,
    options: Options,
    *,
    finished: bool,
) -> tuple[dict[int, str], str]:
    """Thumbnails of the most confident mistakes of each variant, and why there are none."""
    if not options.thumbnails:
        return {}, NO_THUMBNAILS
    if not summaries:
        return {}, ""
    if any(run.recipe.folds is not None for run in study.runs.values()):
        return {}, "with --folds the test images are in several parts of the dataset"
    if not finished and any(run.recipe.train == "head" for run in study.runs.values()):
        return {}, "images behind features are loaded when all runs are finished"
    try:
        split = shown_images(study, load, options.data_dir)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        return {}, str(error)
    images = next(iter(summaries.values())).images
    if images_digest(split.labels.cpu().numpy(), split.file_names) != images:
        return {}, OTHER_IMAGES
    return thumbnails(split, shown_rows(study, summaries, images)), ""


def shown_images(study: Study, load: LoadData, data_dir: Path) -> Split:
    """The test images; those behind features too."""
    run = next(iter(study.runs.values()))
    if run.recipe.dataset.endswith(".npz"):
        raise ValueError(f"{run.recipe.dataset} holds features, not images")
    trained_on = load_run_data(run, load)
    return load_recipe_data(run.recipe, data_dir).test if run.recipe.train == "head" else trained_on.test


def shown_rows(study: Study, summaries: Mapping[Key, Summary], images: str) -> Iterable[int]:
    """Rows of the test images that the page shows as mistakes, the most confident of each variant first."""
    shown = [
        [mistake.image for mistake in summary.mistakes]
        for run in study.first_runs.values()
        for key, summary in summaries.items()
        if study.runs[key] is run and summary.images == images
    ]
    for place in range(max(map(len, shown), default=0)):
        yield from (rows[place] for rows in shown if place < len(rows))
