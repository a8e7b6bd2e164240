"""results/runs.csv: a row a run, appended and never rewritten.

A row holds every field of the recipe, the metrics of the last epoch, and where the number was made: its
minutes are of a run beside `at_once` - 1 others on the same GPU or cores. A field that a recipe got after the
file was begun has its default in the older rows.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import UnionType
from typing import IO, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from icmixup.lab.training.recipe import METHOD_FIELDS, Recipe, read_recipe

Row = Mapping[str, Any]
FIELDS = tuple(entry.name for entry in dataclasses.fields(Recipe))
METRICS = (
    *("accuracy", "many", "medium", "few", "nll", "calibration_error"),
    *("nll_scaled", "calibration_error_scaled", "fitted_temperature", "loss"),
)
MADE = (
    *("minutes", "images_per_second", "train_images", "ranks", "at_once"),
    *("device", "torch", "python", "commit", "date"),
)
COLUMNS = (*FIELDS, *METRICS, *MADE)
TEXT = {"device", "torch", "python", "commit", "date"}
HOW = {"compile", "graph", "eval_every", "precision"}  # how a run is carried out, not what it asks


class Result(NamedTuple):
    """One row of the file."""

    recipe: Recipe
    numbers: dict[str, Any]  # METRICS and MADE
    line: int

    @property
    def accuracy(self) -> float:
        return float(self.numbers["accuracy"])

    @property
    def metrics(self) -> tuple[Any, ...]:
        return tuple(self.numbers[name] for name in METRICS)

    @property
    def device_minutes(self) -> float:
        """Its share of the minutes that it and the runs beside it took; 0 where the row has none."""
        return float(self.numbers["minutes"] or 0) / (self.numbers["at_once"] or 1)


class Damaged(NamedTuple):
    """A line of the file that cannot be read, and stays as it is."""

    path: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}: {self.reason}; the row is left out, the file left as it is"


class Results(NamedTuple):
    """What a file holds."""

    rows: tuple[Result, ...] = ()
    damaged: tuple[Damaged, ...] = ()


def read_rows(path: Path) -> Results:
    """Every row that can be read, and why the others cannot; no file is no rows."""
    if not path.exists():
        return Results()
    with path.open(newline="", encoding="utf-8") as file:
        return parse_rows(file, path)


def parse_rows(lines: Iterable[str], path: Path) -> Results:
    """Line by line, since a torn row may open a quote that would swallow all that follow."""
    header: Sequence[str] = ()
    rows: list[Result] = []
    damaged: list[Damaged] = []
    for number, line in enumerate(lines, start=1):
        if number == 1:
            header = read_header(line, path)
        elif line.strip():
            try:
                rows.append(parse_row(header, split(line), number))
            except (ValueError, TypeError) as error:
                damaged.append(Damaged(path, number, " ".join(str(error).split())))
    return Results(tuple(rows), tuple(damaged))


def read_header(line: str, path: Path) -> Sequence[str]:
    """The names of the columns, if every one is ours and the accuracy is among them."""
    header = split(line)
    strange = [name for name in header if name not in COLUMNS]
    if strange or "accuracy" not in header:
        why = f"has columns that are not ours, {', '.join(strange)}" if strange else "has no column accuracy"
        raise ValueError(
            f"{path} {why}: it is no file of runs, or one of a later icmixup; give another with --results"
        )
    return header


def parse_row(header: Sequence[str], values: Sequence[str], line: int) -> Result:
    if len(values) != len(header):
        raise ValueError(f"it has {len(values)} values where the header has {len(header)}")
    parsed = {name: parse_value(name, text) for name, text in zip(header, values, strict=True)}
    accuracy = parsed["accuracy"]
    if not isinstance(accuracy, int | float) or not 0 <= accuracy <= 100:
        raise ValueError(f"its accuracy is {accuracy!r}, where a percentage belongs")
    recipe = read_recipe({name: parsed[name] for name in FIELDS if name in parsed})
    return Result(recipe, {name: parsed.get(name) for name in (*METRICS, *MADE)}, line)


def parse_value(name: str, text: str) -> Any:
    if text == "":
        return None
    if name in TEXT or name in text_fields():
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise ValueError(f"{name} is {text!r}, which is no number") from None


@cache
def text_fields() -> set[str]:
    """The fields of a recipe that are words."""
    return {name for name, hint in get_type_hints(Recipe).items() if is_text(hint)}


def is_text(hint: Any) -> bool:
    if get_origin(hint) in (Union, UnionType):
        return any(is_text(one) for one in get_args(hint))
    return hint is str or get_origin(hint) is Literal


def append_rows(path: Path, runs: Iterable[tuple[Recipe, Row]]) -> list[Result]:
    """Append the rows of train() that are not there yet, and return those.

    Each comes with its recipe. A row whose recipe and metrics are there already is not added again. One with
    the same
    recipe and other metrics is added below: both stay, and both are shown. Several processes may append at
    once.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path) as file:
        file.seek(0)
        old = file.read().splitlines(keepends=True)
        header = read_header(old[0], path) if old else COLUMNS
        new = new_rows(runs, header, path, parse_rows(old, path).rows)
        # A line torn by a crash stays a line of its own.
        end = "\n" if old and not old[-1].endswith("\n") else ""
        start = "" if old else join(COLUMNS)
        file.write(end + start + "".join(join(values) for values, _ in new))
        file.flush()
        os.fsync(file.fileno())
    return [result for _, result in new]


def new_rows(
    runs: Iterable[tuple[Recipe, Row]], header: Sequence[str], path: Path, there: Iterable[Result]
) -> list[tuple[list[str], Result]]:
    """Of runs, those that are not there: their values, and how they will be read."""
    known = {identity(result) for result in there}
    new = []
    for recipe, row in runs:
        values = row_values(recipe, row, header, path)
        result = parse_row(header, values, 0)
        if identity(result) not in known:
            known.add(identity(result))
            new.append((values, result))
    return new


@contextmanager
def locked(path: Path) -> Iterator[IO[str]]:
    """The file, opened to read and append, while no other process of ours has it."""
    with path.open("a+", newline="", encoding="utf-8") as file:
        try:
            import fcntl
        except ImportError:  # Windows: one writer at a time is then the user's care
            yield file
            return
        fcntl.flock(file, fcntl.LOCK_EX)  # closing the file gives it back
        yield file


def identity(result: Result) -> tuple[str, tuple[Any, ...]]:
    return result.recipe.key, result.metrics


def check_file(path: Path, recipes: Iterable[Recipe]) -> None:
    """Refuse a file that could not take the rows of these recipes, before hours went into them."""
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            line = file.readline()
        header = read_header(line, path) if line else COLUMNS
        for recipe in recipes:
            row_values(recipe, dict.fromkeys((*METRICS, *MADE), 0.0), header, path)


def row_values(recipe: Recipe, row: Row, header: Sequence[str], path: Path) -> list[str]:
    """One run as the file's columns have it."""
    fields = recipe.fields()
    numbers = {name: row.get(name) for name in (*METRICS, *MADE)}
    values = {
        **{k: format_value(v) for k, v in fields.items()},
        **{k: format_number(v) for k, v in numbers.items()},
    }
    defaults = {name: format_value(value) for name, value in Recipe().fields().items()}
    lost = [k for k, v in values.items() if k not in header and v != defaults.get(k, "")]
    if lost:
        raise ValueError(
            f"{path} was begun before runs had {', '.join(lost)}, and rows are never rewritten: "
            "begin another file with --results"
        )
    return [values[name] for name in header]


def format_value(value: object) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def format_number(value: object) -> str:
    """Six decimals are more than a test set has."""
    if isinstance(value, float):
        return "" if math.isnan(value) else json.dumps(round(value, 6))
    return format_value(value)


def split(line: str) -> list[str]:
    return next(csv.reader([line]), [])


def join(values: Sequence[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()


def experiment(recipe: Recipe) -> tuple[object, ...]:
    """What a run asks: every field but the seed and how it is carried out, each said in one way only.

    Numbers that are the method's own, or drops at the quarters, are the same said or unsaid; an imbalance of
    100 is one of 0.01.
    """
    fields = {name: value for name, value in dataclasses.asdict(recipe).items() if name not in HOW}
    method = recipe.method_at(0)
    for name in METHOD_FIELDS:
        fields[name] = getattr(method, name)
    step = recipe.schedule == "step"
    fields |= {"lr_drops": recipe.drops if step else None, "lr_factor": recipe.lr_factor if step else None}
    fields |= {"imbalance": round(min(recipe.imbalance, 1 / recipe.imbalance), 9), "seed": None}
    return tuple(fields.values())


def conflicts(rows: Iterable[Result]) -> list[tuple[Result, ...]]:
    """Rows that have one recipe and different metrics, together."""
    by_key: dict[str, list[Result]] = {}
    for row in rows:
        by_key.setdefault(row.recipe.key, []).append(row)
    return [tuple(found) for found in by_key.values() if len({row.metrics for row in found}) > 1]
