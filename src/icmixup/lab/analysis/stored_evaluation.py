"""evaluation.json in a run's folder: what the run scores on shifted data.

format        1
identity      what the numbers depend on; if it changes, all of them are computed again
images        number of test images
clean         metrics of the test images as they are
corruptions   name to five entries, one for each strength: metrics, {} if not evaluated
ood           name of a folder to auroc, fpr95, images, skipped and the fingerprint of its files
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from icmixup.lab.analysis.corruptions import STRENGTHS, VERSION
from icmixup.lab.datasets import Dataset
from icmixup.lab.training.evaluate import Metrics
from icmixup.lab.training.identity import package_version
from icmixup.lab.training.run_folder import DIGEST, Run, write_atomically
from icmixup.lab.training.stored import read_json

EVALUATION_FILE = "evaluation.json"
FORMAT = 1

Stored = dict[str, Any]  # the content of an evaluation.json


def new_evaluation(run: Run, data: Dataset) -> Stored:
    """An evaluation without any numbers."""
    return {
        "format": FORMAT,
        "identity": evaluation_identity(run, data),
        "images": len(data.test),
        "clean": {},
        "corruptions": {},
        "ood": {},
    }


def evaluation_identity(run: Run, data: Dataset) -> dict[str, Any]:
    """What all numbers of an evaluation depend on: images, weights, version."""
    return {
        "data": data.fingerprint,
        "run": None if run.identity is None else run.identity._asdict(),
        "checkpoint": checkpoint_digest(run.checkpoints()[0]),
        "version": package_version(),
        "corruptions": VERSION,
    }


def checkpoint_digest(path: Path) -> str | None:
    """The start of the digest at the end of a checkpoint; None if there is no checkpoint."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(-min(DIGEST, path.stat().st_size), 2)
        return file.read().hex()[:12]


def entry_of(stored: Stored, name: str, strength: int) -> Metrics | None:
    """The metrics under a corruption, or None if they were not computed."""
    entries: list[Metrics] = stored["corruptions"].get(name) or no_entries()
    return entries[strength - 1] or None


def add_entry(stored: Stored, name: str, strength: int, metrics: Metrics) -> None:
    stored["corruptions"].setdefault(name, no_entries())[strength - 1] = metrics


def no_entries() -> list[Metrics]:
    return [{} for _ in STRENGTHS]


def write_evaluation(run: Run, stored: Stored) -> None:
    text = json.dumps(stored, indent=1, allow_nan=False)
    write_atomically(run.folder / EVALUATION_FILE, text.encode())


def read_evaluation(run: Run, data: Dataset) -> Stored | None:
    """What was evaluated before of the same weights and images; None if nothing, or if it is damaged."""
    path = run.folder / EVALUATION_FILE
    if not path.exists():
        return None
    try:
        stored = read_json(path)
        check_stored(stored, path)
    except ValueError as error:
        warnings.warn(f"{error}; the run is evaluated again", stacklevel=2)
        return None
    return dict(stored) if stored["identity"] == evaluation_identity(run, data) else None


def check_stored(stored: object, path: Path) -> None:
    """Raise a ValueError that names the file unless it has the structure of an evaluation."""
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        raise ValueError(f"{path} is not an evaluation of format {FORMAT}")
    if not all(isinstance(stored.get(name), dict) for name in ("identity", "clean", "corruptions", "ood")):
        raise ValueError(f"{path} is damaged: identity, clean, corruptions and ood must be objects")
    for name, entries in stored["corruptions"].items():
        if not isinstance(entries, list) or len(entries) != len(STRENGTHS):
            raise ValueError(f"{path} is damaged: {name} must have {len(STRENGTHS)} entries")
        if not all(entry == {} or has_number(entry, "accuracy") for entry in entries):
            raise ValueError(f"{path} is damaged: an entry of {name} has no accuracy")
    if stored["clean"] and not has_number(stored["clean"], "fitted_temperature"):
        raise ValueError(f"{path} is damaged: clean has no fitted_temperature")
    if not all(has_number(entry, "auroc") for entry in stored["ood"].values()):
        raise ValueError(f"{path} is damaged: an entry of ood has no auroc")


def has_number(entry: object, name: str) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get(name), int | float)
