"""Everything that the page shows, as JSON: rounded numbers, names, and the reason where a part is missing.

Lists by variant are in the order of `variants`, highest accuracy first; lists by seed in that of the seeds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from icmixup.lab.analysis.report.between import NOT_YET, STEPS, Between, MixedPair
from icmixup.lab.analysis.report.command import repeat_command
from icmixup.lab.analysis.report.shifted import Shift, shifted_data
from icmixup.lab.analysis.report.study import Key, Study, settings_of
from icmixup.lab.analysis.report.summaries import COVERAGES, Bins, Mistake, Summary
from icmixup.lab.comparison.classes import confused_rows
from icmixup.lab.comparison.overview import IN_PYTHON, Overview
from icmixup.lab.comparison.statistics import (
    Difference,
    decide,
    difference_between,
    known_mean,
    measure_key,
    paired_difference,
    row_value,
    without_none,
)
from icmixup.lab.comparison.table import accuracy_columns, calibration_columns, tuned_columns
from icmixup.lab.training.evaluate import FEW_BELOW
from icmixup.lab.training.inputs import read_inputs
from icmixup.lab.training.recipe import Recipe
from icmixup.lab.training.run_folder import Row, Run
from icmixup.lab.wording import count
from icmixup.methods import METHODS, find_method

CONFUSIONS = 8  # pairs of classes shown for each method
POINTS = 100  # of a learning curve
COLOURS = 5  # of each family, in page.css; further methods have the same colours and dashed lines
Json = dict[str, Any]


class Measure(NamedTuple):
    """A column of numbers by variant and seed."""

    key: str
    label: str
    unit: str
    higher: bool  # is better
    digits: int


MEASURES = (
    Measure("accuracy", "accuracy", "points", True, 1),
    Measure("balanced_accuracy", "balanced accuracy", "points", True, 1),
    Measure("few", f"few-shot accuracy (below {FEW_BELOW} images)", "points", True, 1),
    Measure("nll", "NLL", "nats", False, 3),
    Measure("nll_scaled", "NLL, temperature-scaled", "nats", False, 3),
    Measure("calibration_error", "calibration error", "points", False, 1),
    Measure("calibration_error_scaled", "calibration error, temperature-scaled", "points", False, 1),
)


@dataclass(frozen=True)
class Progress:
    """How far a comparison is."""

    done: int
    total: int
    left: str  # in words, such as "about 5:09 left"


@dataclass(frozen=True)
class Parts:
    """What is shown besides the rows of a study."""

    summaries: Mapping[Key, Summary] = field(default_factory=dict)
    class_counts: Sequence[int] = ()  # training images of each class; empty if unknown
    thumbnails: Mapping[int, str] = field(default_factory=dict)
    thumbnails_reason: str = ""
    between: Between = NOT_YET
    progress: Progress | None = None
    notes: tuple[str, ...] = ()


def report_data(study: Study, parts: Parts) -> Json:
    """The data of the page."""
    names = [standing.method for standing in study.standings]
    colours = assign_colours([study.variants[name] for name in names])
    compared = compared_key(study)
    shown = [measure for measure in MEASURES if any(measured(study, name, measure.key) for name in names)]
    shown.sort(key=lambda measure: measure.key != compared)  # first, where the page looks for it
    classes = class_names(study, parts.summaries)
    return {
        "variants": [{"name": name, **colour} for name, colour in zip(names, colours, strict=True)],
        "baseline": names.index(study.baseline),
        "measures": [measure._asdict() for measure in shown],
        "values": {m.key: [by_seed(study, name, m.key) for name in names] for m in shown},
        "differences": {m.key: all_differences(study, names, m.key) for m in shown},
        "classes": class_table(study, names, classes, parts),
        "calibration": [calibration(study, name, parts.summaries) for name in names],
        "risk": risk_curves(names, parts.summaries),
        "confusions": confusions(names, parts.summaries, classes),
        "mistakes": [mistakes(study, name, parts.summaries) for name in names],
        "thumbnails": dict(parts.thumbnails),
        "thumbnails_reason": parts.thumbnails_reason,
        "learning": [learning_curve(study, name) for name in names],
        "cost": [cost(study, name) for name in names],
        "between": between_as_json(parts.between, names, classes),
        "shifted": shift_as_json(shifted_data(study), names),
        "predictions_reason": predictions_reason(study, parts.summaries),
    }


def assign_colours(methods: Sequence[str]) -> list[Json]:
    """A colour for each method: warm ones for Infinite Class methods, cold ones for the others, grey for ERM.

    The order of the table METHODS decides, not the ranking, so that a method keeps its colour.
    """
    order = sorted(range(len(methods)), key=lambda place: (list(METHODS).index(methods[place]), place))
    used = {"warm": 0, "cold": 0, "plain": 0}
    found: dict[int, Json] = {}
    for place in order:
        family = "plain" if methods[place] == "erm" else "warm" if METHODS[methods[place]].axes else "cold"
        number, available = used[family], 1 if family == "plain" else COLOURS
        used[family] += 1
        name = family if family == "plain" else f"{family}-{number % COLOURS}"
        found[place] = {"colour": name, "round": number // available}
    return [found[place] for place in range(len(methods))]


def tidy(value: float | None, digits: int = 4) -> float | None:
    """A rounded number; None for one that JSON does not have."""
    return None if value is None or not math.isfinite(value) else round(float(value), digits)


def tidy_all(values: Iterable[float | None], digits: int = 4) -> list[float | None]:
    return [tidy(value, digits) for value in values]


def rows_of(study: Study, name: str) -> list[Row]:
    """The rows of a variant by seed, {} where it has none."""
    return [study.rows.get((name, seed), {}) for seed in study.seeds]


def compared_key(study: Study) -> str:
    """The key of the measure that methods are compared in."""
    return measure_key(study.looks[-1].measure)


def measured(study: Study, name: str, measure: str) -> tuple[float, ...]:
    return without_none([row_value(row, measure) for row in rows_of(study, name)])


def by_seed(study: Study, name: str, measure: str) -> list[float | None]:
    return tidy_all(row_value(row, measure) for row in rows_of(study, name))


def all_differences(study: Study, names: Sequence[str], measure: str) -> list[list[list[float] | None]]:
    """Entry [i][k]: variant i minus variant i + 1 + k, as mean, ends of the interval, and 1 if it is clear.

    What methods are compared in has the intervals of the terminal's table. Those of other measures cover new
    seeds alone.
    """
    decision = decide(study.looks)
    values = {name: [row_value(row, measure) for row in rows_of(study, name)] for name in names}

    def difference(one: str, other: str) -> Difference | None:
        if measure == compared_key(study):
            return difference_between(study.looks[-1], decision, one, other)
        return paired_difference(values[one], values[other])

    return [
        [encode_difference(difference(one, other)) for other in names[place + 1 :]]
        for place, one in enumerate(names)
    ]


def encode_difference(found: Difference | None) -> list[Any] | None:
    if found is None:
        return None
    return [*tidy_all((found.mean, found.low, found.high), 5), int(found.clear)]


def class_names(study: Study, summaries: Mapping[Key, Summary]) -> list[str]:
    """From predictions, otherwise from inputs.json, otherwise numbers."""
    for summary in summaries.values():
        return list(summary.class_names)
    for run in study.runs.values():
        try:
            return list(read_inputs(run.folder).class_names)
        except (ValueError, OSError, KeyError, TypeError):
            continue
    counts = (len(row.get("class_accuracies") or ()) for row in study.rows.values())
    return [str(number) for number in range(next(counts, 0))]


def class_table(study: Study, names: Sequence[str], classes: Sequence[str], parts: Parts) -> Json:
    """Accuracy of every class by variant, mean over seeds."""
    tested = next((summary.tested.tolist() for summary in parts.summaries.values()), None)
    known = len(parts.class_counts) == len(classes)
    return {
        "names": list(classes),
        "train": list(map(int, parts.class_counts)) if known else None,
        "test": tested,
        "accuracy": [accuracies_by_class(rows_of(study, name), len(classes)) for name in names],
    }


def accuracies_by_class(rows: Sequence[Row], num_classes: int) -> list[float | None]:
    lists = [row["class_accuracies"] for row in rows if len(row.get("class_accuracies") or ()) == num_classes]
    return [tidy(known_mean(column), 2) for column in zip(*lists, strict=True)]


def mean_of(rows: Sequence[Row], name: str) -> float | None:
    return known_mean([row.get(name) for row in rows])


def own_summaries(name: str, summaries: Mapping[Key, Summary]) -> list[Summary]:
    return [summary for (variant, _), summary in summaries.items() if variant == name]


def calibration(study: Study, name: str, summaries: Mapping[Key, Summary]) -> Json | None:
    """Reliability before and after temperature scaling, all seeds together, and the mean errors."""
    own = own_summaries(name, summaries)
    if not own:
        return None
    rows = rows_of(study, name)
    return {
        "before": reliability([summary.bins for summary in own]),
        "after": reliability([summary.bins_scaled for summary in own]),
        "error": tidy(mean_of(rows, "calibration_error")),
        "error_scaled": tidy(mean_of(rows, "calibration_error_scaled")),
        "temperature": tidy(mean_of(rows, "fitted_temperature")),
    }


def reliability(bins: Sequence[Bins]) -> list[list[float | None]]:
    """Mean confidence, accuracy and share of the images of each bin that has images."""
    images, confidence, correct = (np.sum(part, axis=0) for part in zip(*bins, strict=True))
    filled = images > 0
    columns = (
        confidence[filled] / images[filled],
        correct[filled] / images[filled],
        images[filled] / images.sum(),
    )
    return [tidy_all(point) for point in zip(*(column.tolist() for column in columns), strict=True)]


def risk_curves(names: Sequence[str], summaries: Mapping[Key, Summary]) -> Json:
    """Error rate of the most confident images against their share, mean over seeds, in percent."""
    own = [own_summaries(name, summaries) for name in names]
    means = [np.mean([one.risks for one in each], axis=0) if each else None for each in own]
    return {
        "coverage": tidy_all((100 * COVERAGES).tolist()),
        "risk": [None if mean is None else tidy_all(mean.tolist(), 3) for mean in means],
    }


def confusions(
    names: Sequence[str], summaries: Mapping[Key, Summary], classes: Sequence[str]
) -> list[list[list[object]] | None]:
    """True class, predicted class, test images per run and percent of the class, most frequent first."""
    found: list[list[list[object]] | None] = []
    for name in names:
        own = own_summaries(name, summaries)
        mean = {name: np.mean([one.confusion for one in own], axis=0)} if own else {}
        found.append([row[1:] for row in confused_rows(mean, classes)[1 : CONFUSIONS + 1]] if own else None)
    return found


def mistakes(study: Study, name: str, summaries: Mapping[Key, Summary]) -> list[Json] | None:
    """The most confident mistakes of the first run of a variant, and how many other runs got them right."""
    first = next((key for key in ((name, seed) for seed in study.seeds) if key in summaries), None)
    if first is None:
        return None
    images = summaries[first].images
    others = [one for key, one in summaries.items() if key[0] != name and one.images == images]
    return [describe_mistake(mistake, others) for mistake in summaries[first].mistakes]


def describe_mistake(mistake: Mistake, others: Sequence[Summary]) -> Json:
    right = sum(bool(other.correct[mistake.image]) for other in others)
    return mistake._asdict() | {"confidence": tidy(mistake.confidence), "right": right, "others": len(others)}


def learning_curve(study: Study, name: str) -> Json:
    """Training loss and test accuracy by epoch, mean over seeds."""
    logs = [log for key in study.runs if key[0] == name for log in read_logs(study, key)]
    losses: dict[int, list[float]] = {}
    accuracies: dict[int, list[float]] = {}
    for recipe, log in logs:
        for line in log:
            if is_number(line.get("loss")):
                losses.setdefault(line["epoch"], []).append(line["loss"])
            # In between, the log repeats the last accuracy.
            due = line["epoch"] % recipe.eval_every == 0 or line["epoch"] == recipe.epochs
            if due and is_number(line.get("accuracy")):
                accuracies.setdefault(line["epoch"], []).append(line["accuracy"])
    return {"loss": thinned(losses), "accuracy": thinned(accuracies)}


def read_logs(study: Study, key: Key) -> list[tuple[Recipe, list[Row]]]:
    """The log of a run, or those of its folds."""
    run = study.runs[key]
    folders = [run.folder.parent / name for name in study.rows[key].get("fold_folders", ())]
    return [(run.recipe, Run(folder, run.recipe).read_log()) for folder in folders or [run.folder]]


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def thinned(values: Mapping[int, Sequence[float]]) -> list[list[float | None]]:
    """[epoch, mean] at about POINTS epochs, with the first and the last."""
    epochs = sorted(values)
    step = max(1, math.ceil(len(epochs) / POINTS))
    kept = sorted({*epochs[::step], *epochs[-1:]})
    return [[epoch, tidy(fmean(values[epoch]))] for epoch in kept]


def cost(study: Study, name: str) -> Json:
    """Means over seeds; memory is the largest."""
    rows = rows_of(study, name)
    memory = without_none([row.get("memory_mb") for row in rows])
    return {
        "minutes": tidy(mean_of(rows, "minutes")),
        "speed": tidy(mean_of(rows, "images_per_second"), 0),
        "memory": max(memory) if memory else None,
        "at_once": max((row.get("at_once") or 1 for row in rows if row), default=1),
        "device": next((row["device"] for row in rows if row.get("device")), ""),
    }


def between_as_json(between: Between, names: Sequence[str], classes: Sequence[str]) -> Json:
    if between.reason:
        return {"reason": between.reason}
    return {
        "reason": "",
        "lams": [step / STEPS for step in range(STEPS + 1)],
        "pairs": [pair_as_json(pair, names, classes) for pair in between.pairs],
        "images": between.curve_images,
        "curves": [
            [
                tidy_all((point.lam, point.squared_norm, point.difference_mean, point.difference_std))
                for point in between.curves[name]
            ]
            if name in between.curves
            else None
            for name in names
        ],
    }


def pair_as_json(pair: MixedPair, names: Sequence[str], classes: Sequence[str]) -> Json:
    return {
        "classes": [classes[label] for label in pair.labels],
        "files": list(pair.file_names),
        "pictures": list(pair.pictures),
        "along": [
            None
            if name not in pair.along
            else {
                "first": tidy_all(pair.along[name].first),
                "second": tidy_all(pair.along[name].second),
                "top": [classes[label] for label in pair.along[name].top],
            }
            for name in names
        ],
    }


def shift_as_json(shift: Shift | None, names: Sequence[str]) -> Json | None:
    if shift is None:
        return None
    return {
        "corruptions": list(shift.corruptions),
        "accuracy": [tidy_all(shift.accuracy[name]) if name in shift.accuracy else None for name in names],
        "outside": {
            folder: [
                {key: tidy(value) for key, value in found[name].items()} if name in found else None
                for name in names
            ]
            for folder, found in shift.outside.items()
        },
        "notes": list(shift.notes),
    }


def predictions_reason(study: Study, summaries: Mapping[Key, Summary]) -> str:
    """Why parts that need predictions are empty or incomplete."""
    missing = [run.folder.name for key, run in study.runs.items() if key not in summaries]
    if not missing:
        return ""
    whole = "The" if len(missing) == len(study.runs) else f"{len(missing)} of {len(study.runs)}"
    return f"{whole} runs have no predictions of test images, and they could not be made from the checkpoint."


def result_table(study: Study) -> Json:
    """The terminal's table: headings, and one row per variant."""
    tuned = [] if study.comparison is None else tuned_columns(study.comparison)
    columns = [*accuracy_columns(study), *tuned, *calibration_columns()]
    return {
        "headings": ["method", *(" ".join(column.heading.split()) for column in columns)],
        "rows": [
            {
                "name": standing.method,
                "infinite": bool(find_method(study.variants[standing.method]).axes),
                "mark": "" if standing.difference is None else standing.difference.side,
                "cells": [column.cell(standing).strip() for column in columns],
            }
            for standing in study.standings
        ],
    }


def facts(study: Study, parts: Parts) -> list[tuple[str, str]]:
    """What was compared, in lines (what, value)."""
    stored = read_overview(study.overview)
    if stored is not None:
        return [line for line in stored.lines() if line[0] != "time"] + [("device", devices(study))]
    classes = class_names(study, parts.summaries)
    tested = next((len(summary.labels) for summary in parts.summaries.values()), None)
    images = {row["train_images"] for row in study.rows.values() if row.get("train_images")}
    trained = " or ".join(f"{number:,}" for number in sorted(images)) or "unknown"
    return [
        ("data", data_titles(study)),
        ("images", f"{trained} for training" + (f", {tested:,} for testing" if tested else "")),
        ("classes", str(len(classes))),
        ("model", models(study)),
        ("training", " or ".join(sorted({f"{run.recipe.epochs} epochs" for run in study.runs.values()}))),
        ("methods", f"{', '.join(study.variants)}; up to {count(len(study.seeds), 'seed')}"),
        ("device", devices(study)),
    ]


def data_titles(study: Study) -> str:
    """The training images of all runs; several with other subsets."""
    return ", ".join(sorted({run.recipe.data_title for run in study.runs.values()}))


def models(study: Study) -> str:
    return ", ".join(sorted({run.recipe.model for run in study.runs.values()}))


def devices(study: Study) -> str:
    found = {row["device"] for row in study.rows.values() if row.get("device")}
    return ", ".join(sorted(found)) or "unknown"


def read_overview(stored: Mapping[str, object]) -> Overview | None:
    """The overview of a comparison.json, also of an earlier version; None if there is none."""
    if not stored:
        return None
    known = {entry.name: str(entry.type) for entry in dataclasses.fields(Overview)}
    values = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in stored.items()
        if name in known
    }
    later = {
        name: "" if kind == "str" else None for name, kind in known.items() if kind in ("str", "int | None")
    }
    try:
        return Overview(**(later | values))  # type: ignore[arg-type]
    except TypeError:
        return None


def warnings_of(study: Study, parts: Parts) -> list[str]:
    """Why the numbers may not answer the question, and what is missing."""
    stored = read_overview(study.overview)
    failed = [f"{one.method} seed {one.seed} has no result: {one.reason}" for one in study.failures]
    return [*(stored.warnings if stored else ()), *failed, *study.notes, *parts.notes]


def commands(study: Study) -> list[str]:
    """The commands that repeat the comparison, one for each recipe; none for one that was made in Python."""
    if (stored := read_overview(study.overview)) is not None:
        if stored.recipe == IN_PYTHON:
            return []
        first = next(iter(study.runs.values()))
        recipe = first.recipe if study.comparison is None else study.comparison.recipe
        tuning = stored.tuning.split() if stored.tuning else []
        return [
            repeat_command(
                *(recipe, stored.methods, stored.seeds, study.baseline, stored.adaptive),
                measure=study.looks[-1].measure,
            )
            + (f" --tune {tuning[0]}" if tuning and tuning[0].isdigit() else "")
            + (f" --tune-parts {stored.tune_parts}" if stored.tune_parts else "")
        ]
    groups: dict[str, list[Run]] = {}
    for (name, _), run in study.runs.items():
        if run.recipe.after == "none":  # others are made from trained runs, by icmixup retrain
            groups.setdefault(settings_of(name), []).append(run)
    found = []
    for runs in groups.values():
        trained = {run.recipe.method for run in runs}
        methods = [name for name in dict.fromkeys(study.variants.values()) if name in trained]
        baseline = study.baseline if study.baseline in methods else methods[0]
        seeds = sorted({run.recipe.seed for run in runs})
        found.append(repeat_command(runs[0].recipe, methods, range(seeds[0], seeds[-1] + 1), baseline))
    return found
