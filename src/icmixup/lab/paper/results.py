"""results/runs.csv: one row per run; rows are appended and never rewritten.

A row holds every field of the recipe, the metrics of the last epoch, and provenance: device, versions,
commit, and `minutes`, measured while `at_once` - 1 other runs shared the GPU or the cores. A file may lack
columns that were added later: its rows then have the default of the recipe field, or None. A row with a value
that the file has no column for is not appended: that is an error.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import UnionType
from typing import IO, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from icmixup.lab.training.recipe import METHOD_FIELDS, Recipe, read_recipe
from icmixup.lab.training.run_folder import Row

RECIPE_COLUMNS = tuple(entry.name for entry in dataclasses.fields(Recipe))
METRICS = (
    *("accuracy", "many", "medium", "few", "nll", "calibration_error"),
    *("nll_scaled", "calibration_error_scaled", "fitted_temperature", "loss"),
)
# Columns that earlier rows lack, and that an earlier file may lack.
ADDED_METRICS = ("brier_score", "adaptive_calibration_error", "risk_coverage_area", "coverage_at_5_risk")
IDENTITY = ("fingerprint", "version", "dtype", "device_kind")
ADDED = (*ADDED_METRICS, *IDENTITY)
PROVENANCE = (
    *("minutes", "images_per_second", "train_images", "ranks", "at_once"),
    *("device", "torch", "python", "commit", "date"),
)
COLUMNS = (*RECIPE_COLUMNS, *METRICS, *PROVENANCE, *ADDED)
# Of a run's row: they stay in its folder.
UNSTORED = {"key", "class_accuracies", "folder", "memory_mb", "tau_used", "made_from"}
TEXT_COLUMNS = {"device", "torch", "python", "commit", "date", *IDENTITY}
EXECUTION_FIELDS = {"compile", "graph", "eval_every", "precision"}  # they do not define the experiment


class Result(NamedTuple):
    """One row of the file."""

    recipe: Recipe
    numbers: dict[str, Any]  # METRICS, PROVENANCE and ADDED
    line: int

    @property
    def accuracy(self) -> float:
        return float(self.numbers["accuracy"])

    @property
    def metrics(self) -> tuple[Any, ...]:
        return tuple(self.numbers[name] for name in METRICS)

    @property
    def key(self) -> tuple[str, tuple[Any, ...]]:
        """Two results with the same recipe and metrics are one run."""
        return self.recipe.key, self.metrics

    @property
    def device_minutes(self) -> float:
        """Minutes of the device, shared equally with concurrent runs; 0 if the row has no minutes."""
        return float(self.numbers["minutes"] or 0) / (self.numbers["at_once"] or 1)


class DamagedLine(NamedTuple):
    """A line of the file that cannot be parsed."""

    path: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}: {self.reason}; the row is ignored and the file is not changed"


class Results(NamedTuple):
    """The contents of a results file."""

    rows: tuple[Result, ...] = ()
    damaged: tuple[DamagedLine, ...] = ()


def read_rows(path: Path) -> Results:
    """Read every row that can be parsed, and the reason for each that cannot; no rows if there is no file."""
    if not path.exists():
        return Results()
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return parse_rows(file, path)
    except (UnicodeDecodeError, IsADirectoryError) as error:
        raise ValueError(f"{path} is not a file of results: {error}") from error


def parse_rows(lines: Iterable[str], path: Path) -> Results:
    """Parse line by line, since an incomplete row may open a quote that would swallow the following rows."""
    header: Sequence[str] = ()
    rows: list[Result] = []
    damaged: list[DamagedLine] = []
    for number, line in enumerate(lines, start=1):
        if number == 1:
            header = read_header(line, path)
        elif line.strip():
            try:
                rows.append(parse_row(header, split_line(line), number))
            except (ValueError, TypeError) as error:
                damaged.append(DamagedLine(path, number, " ".join(str(error).split())))
    return Results(tuple(rows), tuple(damaged))


def read_header(line: str, path: Path) -> Sequence[str]:
    """The column names; a ValueError if one is unknown or there is no accuracy."""
    header = split_line(line)
    unknown = [name for name in header if name not in COLUMNS]
    if unknown or "accuracy" not in header:
        reason = f"has unknown columns {', '.join(unknown)}" if unknown else "has no column accuracy"
        raise ValueError(
            f"{path} {reason}: it is not a results file, or was written by a newer version of icmixup; "
            "pass another file with --results"
        )
    return header


def parse_row(header: Sequence[str], values: Sequence[str], line: int) -> Result:
    if len(values) != len(header):
        raise ValueError(f"it has {len(values)} values but the header has {len(header)} columns")
    parsed = {name: parse_value(name, text) for name, text in zip(header, values, strict=True)}
    accuracy = parsed["accuracy"]
    if not isinstance(accuracy, int | float) or not 0 <= accuracy <= 100:
        raise ValueError(f"its accuracy is {accuracy!r}, expected a percentage from 0 to 100")
    recipe = read_recipe({name: parsed[name] for name in RECIPE_COLUMNS if name in parsed})
    return Result(recipe, {name: parsed.get(name) for name in (*METRICS, *PROVENANCE, *ADDED)}, line)


def parse_value(name: str, text: str) -> Any:
    if text == "":
        return None
    if name in TEXT_COLUMNS or name in text_fields():
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise ValueError(f"{name} is {text!r}, which is not a number") from None


@cache
def text_fields() -> set[str]:
    """The fields of a recipe that hold text."""
    return {name for name, hint in get_type_hints(Recipe).items() if is_text(hint)}


def is_text(hint: Any) -> bool:
    if get_origin(hint) in (Union, UnionType):
        return any(is_text(one) for one in get_args(hint))
    return hint is str or get_origin(hint) is Literal


def append_rows(path: Path, runs: Iterable[tuple[Recipe, Row]]) -> list[Result]:
    """Append the rows that the file does not have yet, and return them.

    A row is skipped if the file has its recipe with the same metrics. A row with the same recipe but
    different metrics is appended: both are kept and both are shown. Several processes may append at the same
    time.

    Args:
        runs: each a recipe and the row that train() returned for it.
    """
    with locked(path) as (file, old, header):
        new = new_rows(runs, header, path, parse_rows(old, path).rows)
        write_lines(file, old, [values for values, _ in new])
    return [result for _, result in new]


def append_file(path: Path, other: Path) -> list[Result]:
    """Append the rows of another results file: all of them, or none, with an error that says why.

    A row that the file has already, or that cannot be read, and a column that is unknown are errors.
    """
    if not other.exists():
        raise ValueError(f"{other} does not exist; pass a file of results")
    found = read_rows(other)
    if found.damaged:
        raise ValueError(
            f"{other}, line {found.damaged[0].line}: {found.damaged[0].reason}; nothing was appended"
        )
    if not found.rows:
        raise ValueError(f"{other} has no rows to append")
    with locked(path) as (file, old, header):
        known = {result.key: f"{path}, line {result.line}" for result in parse_rows(old, path).rows}
        for result in found.rows:
            if result.key in known:
                raise ValueError(
                    f"{other}, line {result.line} is a run that {known[result.key]} has already; "
                    "remove it from the file to append; nothing was appended"
                )
            known[result.key] = f"{other}, line {result.line}"
        write_lines(file, old, [row_values(row.recipe, row.numbers, header, path) for row in found.rows])
    return list(found.rows)


def write_lines(file: IO[str], old: Sequence[str], new: Iterable[Sequence[str]]) -> None:
    """Append rows to an opened file, with a header if it has none, and flush them to disk."""
    # If a crash left an incomplete last line, new rows start on a line of their own.
    end = "\n" if old and not old[-1].endswith("\n") else ""
    start = "" if old else join_line(COLUMNS)
    file.write(end + start + "".join(join_line(values) for values in new))
    file.flush()
    os.fsync(file.fileno())


def new_rows(
    runs: Iterable[tuple[Recipe, Row]], header: Sequence[str], path: Path, existing: Iterable[Result]
) -> list[tuple[list[str], Result]]:
    """The runs that are not in the file yet: the values to write, and the result they are read back as."""
    known = {result.key for result in existing}
    new = []
    for recipe, row in runs:
        values = row_values(recipe, row, header, path)
        result = parse_row(header, values, 0)
        if result.key not in known:
            known.add(result.key)
            new.append((values, result))
    return new


@contextmanager
def locked(path: Path) -> Iterator[tuple[IO[str], list[str], Sequence[str]]]:
    """The file, opened to append while no other process does, its lines and its columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", newline="", encoding="utf-8") as file:
        with suppress(ImportError):  # Windows has no fcntl, so concurrent writers are not protected there
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed
        file.seek(0)
        lines = file.read().splitlines(keepends=True)
        yield file, lines, read_header(lines[0], path) if lines else COLUMNS


def check_file(path: Path, recipes: Iterable[Recipe]) -> None:
    """Raise before training if the file lacks a column that the rows of these recipes need."""
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            line = file.readline()
        header = read_header(line, path) if line else COLUMNS
        for recipe in recipes:
            row_values(recipe, dict.fromkeys((*METRICS, *PROVENANCE, *ADDED), 0.0), header, path)


def row_values(recipe: Recipe, row: Row, header: Sequence[str], path: Path) -> list[str]:
    """The values of one run, in the order of the file's columns."""
    fields = recipe.fields()
    unknown = [name for name in row if name not in COLUMNS and name not in UNSTORED]
    if unknown:
        raise ValueError(
            f"results files have no column for {', '.join(unknown)}; add it to ADDED or UNSTORED"
        )
    numbers = {name: row.get(name) for name in (*METRICS, *PROVENANCE, *ADDED)}
    values = {
        **{k: format_value(v) for k, v in fields.items()},
        **{k: format_number(v) for k, v in numbers.items()},
    }
    defaults = {name: format_value(value) for name, value in Recipe().fields().items()}
    lost = [k for k, v in values.items() if k not in header and v != defaults.get(k, "")]
    if lost:
        raise ValueError(
            f"{path} has no column for {', '.join(lost)}, and existing files are not rewritten; "
            "start a new file with --results"
        )
    return [values[name] for name in header]


def format_value(value: object) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def format_number(value: object) -> str:
    """Round to six decimals, which is finer than one image of any test set."""
    if isinstance(value, float):
        return "" if math.isnan(value) else json.dumps(round(value, 6))
    return format_value(value)


def split_line(line: str) -> list[str]:
    return next(csv.reader([line]), [])


def join_line(values: Sequence[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()


def experiment(recipe: Recipe) -> tuple[object, ...]:
    """A key of the experiment that a recipe belongs to: all fields except the seed and EXECUTION_FIELDS.

    Equivalent recipes have equal keys: a default of the method or of the schedule may be explicit or omitted,
    and an imbalance of 100 equals one of 0.01.
    """
    fields = {
        name: value for name, value in dataclasses.asdict(recipe).items() if name not in EXECUTION_FIELDS
    }
    method = recipe.whole_method
    for name in METHOD_FIELDS:
        fields[name] = getattr(method, name)
    step = recipe.schedule == "step"
    fields |= {"lr_drops": recipe.drops if step else None, "lr_factor": recipe.lr_factor if step else None}
    fields |= {"imbalance": round(min(recipe.imbalance, 1 / recipe.imbalance), 9), "seed": None}
    return tuple(fields.values())


def conflicting_results(rows: Iterable[Result]) -> list[tuple[Result, ...]]:
    """Groups of rows that have the same recipe but different metrics."""
    by_key: dict[str, list[Result]] = {}
    for row in rows:
        by_key.setdefault(row.recipe.key, []).append(row)
    return [tuple(group) for group in by_key.values() if len({row.metrics for row in group}) > 1]
