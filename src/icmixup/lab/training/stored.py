"""JSON files of a run folder, read with suspicion: a damaged file is reported and not used."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from pathlib import Path
from typing import Any

from icmixup.lab.training.recipe import Recipe, Task, read_recipe
from icmixup.methods import METHODS

FOLDS_FILE = "folds.json"  # in the folder of the pooled predictions of cross-validation
TASK = {entry.name for entry in dataclasses.fields(Task)}


def read_json(path: Path) -> Any:
    """The content of a JSON file; a ValueError names the file if it is damaged."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def read_result(path: Path, recipe: Recipe) -> dict[str, Any] | None:
    """The row of a finished run; a damaged file, or one of another recipe, is reported and not used."""
    if not path.exists():
        return None
    try:
        row = read_json(path)
        check_row(row, recipe)
    except ValueError as error:
        reason = str(error) if str(error).startswith(str(path)) else f"{path} is not a result: {error}"
        warnings.warn(f"{reason}; the run continues from its last checkpoint", stacklevel=3)
        return None
    return dict(row)


def check_row(row: object, recipe: Recipe) -> None:
    if not isinstance(row, dict):
        raise ValueError(f"it contains {type(row).__name__}, not the fields of a run")
    for name, value in recipe.fields().items():
        if name in row and name != "dataset" and (type(row[name]), row[name]) != (type(value), value):
            raise ValueError(f"its {name} is {row[name]!r}, not {value!r} as in the recipe")
    if not isinstance(row.get("key"), str):  # which one depends on the path of the images
        raise ValueError(f"its key is {row.get('key')!r}, not a string")
    for name, most in (("accuracy", 100.0), ("loss", math.inf)):
        value = row.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise ValueError(f"its {name} is {value!r}, not a finite number")
        if value > most:
            raise ValueError(f"its {name} is {value!r}, above {most}")


def read_recipe_file(path: Path) -> Recipe:
    """The recipe in a recipe.json; a ValueError names the file if it is damaged or mistyped."""
    fields = read_json(path)
    try:
        if isinstance(fields, dict) and (missing := TASK - fields.keys()):
            raise ValueError(f"it has no {', '.join(sorted(missing))}")  # the defaults are another run
        if isinstance(fields, dict):
            check_methods_known(fields["method"])
        return read_recipe(fields)
    except ValueError as error:
        raise ValueError(f"{path} is not the recipe of a run: {error}") from error


class UnknownMethod(ValueError):
    """A stored method that is not in the table of methods."""


def check_methods_known(*methods: object) -> None:
    """Raise an error for methods of the user, which have a meaning within icmixup.lab.compare alone."""
    unknown = [name for name in methods if isinstance(name, str) and name not in METHODS]
    if unknown:
        raise UnknownMethod(
            f"icmixup has no method {' or '.join(unknown)}; runs of methods of your own can be used by "
            "icmixup.lab.compare only, which was given them"
        )


def read_run_names(path: Path) -> list[str]:
    """The folders of the runs in a comparison.json or a folds.json; a ValueError names a damaged file."""
    found = read_json(path)
    try:
        rows = [found] if path.name == FOLDS_FILE else found["runs"]
        return [str(name) for row in rows for name in row.get("fold_folders") or [row["folder"]]]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a comparison: it has no list of runs with their folders") from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The intact lines of a log.jsonl: those that are objects with the number of an epoch."""
    rows: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and type(row.get("epoch")) is int:
            rows.append(row)
    return rows
