"""Accuracy on shifted data: what `icmixup evaluate` left in the folders of runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from icmixup.lab.analysis.report.study import Study
from icmixup.lab.training.run_folder import Run
from icmixup.lab.training.stored import read_json

EVALUATION_FILE = "evaluation.json"
STRENGTHS = 5


class Shift(NamedTuple):
    """Means over the runs of each variant."""

    corruptions: tuple[str, ...]
    accuracy: Mapping[str, list[float | None]]  # by variant: without corruption, then at each strength
    outside: Mapping[str, Mapping[str, dict[str, float]]]  # by folder and variant: AUROC and FPR at 95 %
    notes: tuple[str, ...] = ()


def shifted_data(study: Study) -> Shift | None:
    """What the evaluated runs of a study have; None if no run was evaluated."""
    found: dict[str, list[dict[str, Any]]] = {}
    notes: list[str] = []
    for (name, _), run in study.runs.items():
        try:
            if (stored := read_evaluation(run)) is not None:
                found.setdefault(name, []).append(stored)
        except ValueError as error:
            notes.append(str(error))
    if not found and not notes:
        return None
    everything = [one for own in found.values() for one in own]
    shared = [set(one["corruptions"]) for one in everything if one["corruptions"]]
    corruptions = tuple(sorted(set.intersection(*shared))) if shared else ()
    curves = {name: [accuracy_by_strength(one, corruptions) for one in own] for name, own in found.items()}
    folders = dict.fromkeys(folder for one in everything for folder in one["ood"])
    return Shift(
        corruptions,
        {name: mean_columns(each) for name, each in curves.items()} if corruptions else {},
        {folder: outside_by_variant(found, folder) for folder in folders},
        tuple(notes),
    )


def read_evaluation(run: Run) -> dict[str, Any] | None:
    """The evaluation of a run, with the parts that it has; a ValueError if the file is damaged."""
    path = run.folder / EVALUATION_FILE
    if not path.exists():
        return None
    stored = read_json(path)
    if not isinstance(stored, dict) or stored.get("format") != 1:
        raise ValueError(f"{path} is not an evaluation of this version; run icmixup evaluate again")
    parts = {name: stored.get(name) or {} for name in ("corruptions", "clean", "ood")}
    strengths = [len(values) for values in parts["corruptions"].values() if isinstance(values, list)]
    if len(strengths) < len(parts["corruptions"]) or any(number != STRENGTHS for number in strengths):
        raise ValueError(f"{path} is damaged: it needs {STRENGTHS} strengths of each corruption")
    return parts


def accuracy_by_strength(stored: Mapping[str, Any], corruptions: tuple[str, ...]) -> list[float | None]:
    """Accuracy without corruption and at each strength, mean over corruptions; None where one is unknown."""
    tables = [stored["corruptions"].get(name) or [None] * STRENGTHS for name in corruptions]
    columns = [[(table[k] or {}).get("accuracy") for table in tables] for k in range(STRENGTHS)]
    return [mean_if_known([stored["clean"].get("accuracy")]), *map(mean_if_known, columns)]


def mean_columns(curves: list[list[float | None]]) -> list[float | None]:
    return [mean_if_known(column) for column in zip(*curves, strict=True)]


def mean_if_known(values: Sequence[object]) -> float | None:
    known = [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]
    return fmean(known) if known and len(known) == len(values) else None


def outside_by_variant(found: Mapping[str, list[dict[str, Any]]], folder: str) -> dict[str, dict[str, float]]:
    """AUROC and FPR at 95 %, mean over the runs of each variant."""
    means = {}
    for name, own in found.items():
        tables = [one["ood"][folder] for one in own if folder in one["ood"]]
        if tables:
            means[name] = {
                key: fmean(table[key] for table in tables)
                for key in ("auroc", "fpr95", "images")
                if all(isinstance(table.get(key), int | float) for table in tables)
            }
    return means
