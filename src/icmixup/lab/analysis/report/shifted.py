"""Accuracy on shifted data: what `icmixup evaluate` left in the folders of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from icmixup.lab.analysis.corruptions import STRENGTHS
from icmixup.lab.analysis.report.study import Study
from icmixup.lab.analysis.robustness import mean_separation
from icmixup.lab.analysis.stored_evaluation import (
    EVALUATION_FILE,
    Stored,
    check_stored,
    checkpoint_digest,
    entry_of,
)
from icmixup.lab.training.run_folder import Run
from icmixup.lab.training.stored import read_json


class Shift(NamedTuple):
    """Means over the runs of each variant."""

    corruptions: tuple[str, ...]
    accuracy: Mapping[str, list[float | None]]  # by variant: without corruption, then at each strength
    outside: Mapping[str, Mapping[str, dict[str, float]]]  # by folder and variant: AUROC and FPR at 95 %
    notes: tuple[str, ...] = ()


def shifted_data(study: Study) -> Shift | None:
    """What the evaluated runs of a study have; None if no run was evaluated."""
    found: dict[str, list[Stored]] = {}
    notes: list[str] = []
    for (name, _), run in study.runs.items():
        try:
            if (stored := read_stored(run)) is not None:
                found.setdefault(name, []).append(stored)
        except ValueError as error:
            notes.append(str(error))
    if not found and not notes:
        return None
    everything = [one for own in found.values() for one in own]
    shared = [set(one["corruptions"]) for one in everything if one["corruptions"]]
    corruptions = tuple(sorted(set.intersection(*shared))) if shared else ()
    curves = {name: [accuracy_by_strength(one, corruptions) for one in own] for name, own in found.items()}
    folders = list(dict.fromkeys(folder for one in everything for folder in one["ood"]))
    changed = [folder for folder in folders if len(fingerprints(everything, folder)) > 1]
    notes += [
        f"runs were evaluated on different images in the folder {folder}, which cannot be compared; run "
        "icmixup evaluate again for all of them"
        for folder in changed
    ]
    return Shift(
        corruptions,
        {name: mean_columns(each) for name, each in curves.items()} if corruptions else {},
        {folder: outside_by_variant(found, folder) for folder in folders if folder not in changed},
        tuple(notes),
    )


def read_stored(run: Run) -> Stored | None:
    """The evaluation of a run; a ValueError if the file is damaged or of other weights."""
    path = run.folder / EVALUATION_FILE
    if not path.exists():
        return None
    stored: Stored = read_json(path)
    check_stored(stored, path)
    evaluated, now = stored["identity"].get("checkpoint"), checkpoint_digest(run.checkpoints()[0])
    if now is not None and evaluated not in (None, now):
        raise ValueError(f"{path} is of weights that the run no longer has; run icmixup evaluate again")
    return stored


def accuracy_by_strength(stored: Stored, corruptions: Sequence[str]) -> list[float | None]:
    """Accuracy without corruption and at each strength, mean over corruptions; None where one is unknown."""
    columns = [[entry_of(stored, name, strength) for name in corruptions] for strength in STRENGTHS]
    return [mean_accuracy([stored["clean"]]), *map(mean_accuracy, columns)]


def mean_accuracy(entries: Sequence[Mapping[str, object] | None]) -> float | None:
    return mean_if_known([None if entry is None else entry.get("accuracy") for entry in entries])


def mean_columns(curves: list[list[float | None]]) -> list[float | None]:
    return [mean_if_known(column) for column in zip(*curves, strict=True)]


def mean_if_known(values: Sequence[object]) -> float | None:
    known = [float(value) for value in values if isinstance(value, int | float)]
    return fmean(known) if known and len(known) == len(values) else None


def fingerprints(everything: Sequence[Stored], folder: str) -> set[object]:
    """Those of the images that a folder had when runs were evaluated on it."""
    return {one["ood"][folder].get("fingerprint") for one in everything if folder in one["ood"]}


def outside_by_variant(found: Mapping[str, list[Stored]], folder: str) -> dict[str, dict[str, float]]:
    """AUROC and FPR at 95 %, mean over the runs of each variant."""
    entries = {
        name: [one["ood"][folder] for one in own if folder in one["ood"]] for name, own in found.items()
    }
    return {name: mean_separation(each) for name, each in entries.items() if each}
