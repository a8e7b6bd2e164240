"""The runs that tables still need: which, on which data, in which order, and how long they will take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from icmixup.lab.datasets.cifar import (
    LAYOUTS,
    NO_TWINS,
    TWINS_TEST,
    TWINS_TRAIN,
    TWINS_URL,
    find_layout,
    find_twins,
)
from icmixup.lab.paper.fill import STAND_INS, Index
from icmixup.lab.paper.results import experiment
from icmixup.lab.paper.spec import Cell, PaperTable
from icmixup.lab.sweep.budget import work
from icmixup.lab.training.recipe import Recipe


class Plan(NamedTuple):
    """What --run-missing is about to do."""

    recipes: tuple[Recipe, ...]  # cheapest first, the first seed of all before the second of any
    absent: Mapping[str, int]  # datasets that are not there, and how many runs wait for each
    stand_ins: tuple[str, ...]  # datasets that another one stands in for


def choose_cells(tables: Iterable[PaperTable], only: Sequence[str]) -> list[tuple[PaperTable, Cell]]:
    """The cells of tables that any of the patterns names; all if there is none."""
    cells = [(table, cell) for table in tables for cell in table.cells()]
    chosen = [(table, cell) for table, cell in cells if not only or any(names(cell, one) for one in only)]
    if not chosen:
        known = sorted({cell.recipe.method for _, cell in cells})
        columns = list(dict.fromkeys(cell.column for _, cell in cells))
        raise ValueError(
            f"--only {' '.join(only)} names no cell; there are the methods {', '.join(known)}, the columns "
            f"{', '.join(columns)}, and method/column/model with * for anything"
        )
    return chosen


def names(cell: Cell, pattern: str) -> bool:
    """Whether a pattern is a cell's method, row, column, model or dataset, or method/column/model."""
    recipe = cell.recipe
    words = (recipe.method, cell.row, cell.column, recipe.model, recipe.dataset)
    return any(fnmatch(word, pattern) for word in (*words, f"{recipe.method}/{cell.column}/{recipe.model}"))


def plan_runs(
    cells: Iterable[tuple[PaperTable, Cell]], index: Index, data_dir: Path, seeds: int | None, compiled: bool
) -> Plan:
    """The runs that cells lack, each once, where several tables ask for it.

    Args:
        seeds: runs a cell; as many as the paper made if not given.
    """
    runs: dict[tuple[object, ...], Recipe] = {}
    absent: dict[str, int] = {}
    stand_ins: dict[str, None] = {}
    for table, cell in cells:
        recipe, missing = resolve(cell.recipe, data_dir)
        if recipe.dataset != cell.recipe.dataset:
            stand_ins[cell.recipe.dataset] = None
        known = (*index.get(experiment(recipe), ()), *index.get(experiment(cell.recipe), ()))
        done = {result.recipe.seed for result in known}
        for seed in sorted(set(range(table.runs if seeds is None else seeds)) - done):
            key = (*experiment(recipe), seed)
            if missing and key not in runs:
                absent[recipe.dataset] = absent.get(recipe.dataset, 0) + 1
            runs[key] = replace(recipe, seed=seed, compile=compiled)
    ready = [recipe for recipe in runs.values() if recipe.dataset not in absent]
    ready.sort(key=lambda recipe: (recipe.seed, work(recipe)))
    return Plan(tuple(ready), absent, tuple(stand_ins))


def resolve(recipe: Recipe, data_dir: Path) -> tuple[Recipe, bool]:
    """The recipe as it can be run here, on a stand-in if it must be, and whether its data are missing."""
    if is_here(recipe.dataset, data_dir):
        return recipe, False
    stand_in = STAND_INS.get(recipe.dataset)
    if stand_in and is_here(stand_in, data_dir):
        return replace(recipe, dataset=stand_in), False
    return recipe, True


def is_here(dataset: str, data_dir: Path) -> bool:
    """Whether a dataset lies in data_dir, unpacked or packed; what is no CIFAR is taken to be there."""
    if dataset == NO_TWINS:
        return is_here("cifar10", data_dir) and has_twins(data_dir)
    if dataset not in LAYOUTS:
        return True
    packed = any((data_dir / layout.archive.file_name).exists() for layout in LAYOUTS[dataset])
    return packed or find_layout(dataset, data_dir) is not None


def has_twins(data_dir: Path) -> bool:
    try:
        return all(find_twins(data_dir, file).is_file() for file in (TWINS_TRAIN, TWINS_TEST))
    except ValueError:
        return False


def say_absent(plan: Plan, data_dir: Path) -> list[str]:
    """What to put where, for each dataset that is missing, and what can be run without it."""
    sentences = []
    for dataset, waiting in plan.absent.items():
        archive = LAYOUTS[dataset][0].archive
        twins = ""
        if dataset in STAND_INS:
            twins = (
                f", or put cifar10 there and {TWINS_TRAIN} and {TWINS_TEST} from {TWINS_URL} into "
                f"{data_dir / 'cifair'}, to test on {STAND_INS[dataset]} instead"
            )
        sentences.append(
            f"{dataset} is not in {data_dir}, and {waiting} runs wait for it: put {archive.file_name} from "
            f"{archive.url} there, or let `icmixup data get {dataset}` bring it{twins}"
        )
    return [*sentences, say_ready(plan)] if plan.absent else []


def say_ready(plan: Plan) -> str:
    """Which runs can do without the data that are missing."""
    if not plan.recipes:
        return "no run can do without"
    ready: dict[str, dict[str, None]] = {}
    for recipe in plan.recipes:
        ready.setdefault(recipe.dataset, {})[recipe.method] = None
    each = "; ".join(f"{dataset}: {' '.join(methods)}" for dataset, methods in ready.items())
    return f"{len(plan.recipes)} runs can do without, on {each}"


def say_stand_ins(plan: Plan) -> list[str]:
    return [
        f"{dataset} is not at hand: its runs are tested on {STAND_INS[dataset]} and labelled so"
        for dataset in plan.stand_ins
    ]


def past_speed(index: Index, device: str) -> float | None:
    """Seconds for a unit of work, of the results that were made on this device."""
    rows = [
        (60 * row.device_minutes, work(row.recipe))
        for rows in index.values()
        for row in rows
        if row.numbers["device"] == device and row.device_minutes
    ]
    return sum(seconds for seconds, _ in rows) / sum(units for _, units in rows) if rows else None
