"""Plan the runs that tables lack: which recipes, on which data, in which order, and how long they take."""

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
from icmixup.lab.paper.fill import STAND_INS, Index, stand_in_recipe
from icmixup.lab.paper.results import experiment
from icmixup.lab.paper.spec import Cell, PaperTable
from icmixup.lab.sweep.cost import work
from icmixup.lab.training.recipe import Recipe


class Plan(NamedTuple):
    """What `icmixup paper --run-missing` trains."""

    recipes: tuple[Recipe, ...]  # all first seeds before any second seed, cheapest first
    missing_data: Mapping[str, int]  # datasets that were not found, and the number of runs that need each
    stand_ins: tuple[str, ...]  # datasets that are replaced by a stand-in


def choose_cells(tables: Iterable[PaperTable], only: Sequence[str]) -> list[tuple[PaperTable, Cell]]:
    """The cells that match any of the patterns; all cells if there are no patterns."""
    cells = [(table, cell) for table in tables for cell in table.cells()]
    chosen = [
        (table, cell) for table, cell in cells if not only or any(matches(cell, pattern) for pattern in only)
    ]
    if not chosen:
        known = sorted({cell.recipe.method for _, cell in cells})
        columns = list(dict.fromkeys(cell.column for _, cell in cells))
        raise ValueError(
            f"--only {' '.join(only)} matches no cell; use a method ({', '.join(known)}), a column "
            f"({', '.join(columns)}), or method/column/model, with * as a wildcard"
        )
    return chosen


def matches(cell: Cell, pattern: str) -> bool:
    """Whether a pattern matches a cell's method, row, column, model, dataset, or method/column/model."""
    recipe = cell.recipe
    words = (recipe.method, cell.row, cell.column, recipe.model, recipe.dataset)
    return any(fnmatch(word, pattern) for word in (*words, f"{recipe.method}/{cell.column}/{recipe.model}"))


def plan_missing_runs(
    cells: Iterable[tuple[PaperTable, Cell]], index: Index, data_dir: Path, seeds: int | None, compiled: bool
) -> Plan:
    """Plan the runs that cells lack; a run that several tables share is planned once.

    Args:
        seeds: runs per cell; None for the number in the paper.
        compiled: whether to torch.compile the models.
    """
    runs: dict[tuple[object, ...], Recipe] = {}
    missing_data: dict[str, int] = {}
    stand_ins: dict[str, None] = {}
    for table, cell in cells:
        recipe, available = available_recipe(cell.recipe, data_dir)
        if recipe.dataset != cell.recipe.dataset:
            stand_ins[cell.recipe.dataset] = None
        known = (*index.get(experiment(recipe), ()), *index.get(experiment(cell.recipe), ()))
        done = {result.recipe.seed for result in known}
        for seed in sorted(set(range(table.runs if seeds is None else seeds)) - done):
            key = (*experiment(recipe), seed)
            if not available and key not in runs:
                missing_data[recipe.dataset] = missing_data.get(recipe.dataset, 0) + 1
            # Only the last epoch counts.
            runs[key] = replace(recipe, seed=seed, compile=compiled, eval_every=recipe.epochs)
    ready = [recipe for recipe in runs.values() if recipe.dataset not in missing_data]
    ready.sort(key=lambda recipe: (recipe.seed, work(recipe)))
    return Plan(tuple(ready), missing_data, tuple(stand_ins))


def available_recipe(recipe: Recipe, data_dir: Path) -> tuple[Recipe, bool]:
    """The recipe, on a stand-in dataset if its own is missing, and whether its data is available."""
    if is_available(recipe.dataset, data_dir):
        return recipe, True
    stand_in = stand_in_recipe(recipe)
    if stand_in and is_available(stand_in.dataset, data_dir):
        return stand_in, True
    return recipe, False


def is_available(dataset: str, data_dir: Path) -> bool:
    """Whether data_dir has a dataset, as a folder or an archive; True for all but CIFAR and ciFAIR."""
    if dataset == NO_TWINS:
        return is_available("cifar10", data_dir) and has_duplicate_lists(data_dir)
    if dataset not in LAYOUTS:
        return True
    has_archive = any((data_dir / layout.archive.file_name).exists() for layout in LAYOUTS[dataset])
    return has_archive or find_layout(dataset, data_dir) is not None


def has_duplicate_lists(data_dir: Path) -> bool:
    """Whether data_dir has the lists of CIFAR-10 test images that have duplicates."""
    try:
        return all(find_twins(data_dir, file).is_file() for file in (TWINS_TRAIN, TWINS_TEST))
    except ValueError:
        return False


def describe_missing_data(plan: Plan, data_dir: Path) -> list[str]:
    """How to get each missing dataset, and which runs do not need it; empty if no dataset is missing."""
    sentences = []
    for dataset, waiting in plan.missing_data.items():
        archive = LAYOUTS[dataset][0].archive
        sentences.append(
            f"{dataset} is not in {data_dir} and {waiting} runs need it: run `icmixup data get {dataset}`, "
            f"or download {archive.file_name} from {archive.url} into that folder"
            f"{describe_alternative(dataset, data_dir)}"
        )
    return [*sentences, describe_ready_runs(plan)] if plan.missing_data else []


def describe_alternative(dataset: str, data_dir: Path) -> str:
    """What to add for the runs of a missing dataset to use its stand-in; empty if it has none."""
    if dataset not in STAND_INS:
        return ""
    stand_in = STAND_INS[dataset]["dataset"]
    needed = stand_in
    if stand_in == NO_TWINS:
        lists = f"{TWINS_TRAIN} and {TWINS_TEST} from {TWINS_URL}"
        needed = f"cifar10, and put {lists} into {data_dir / 'cifair'}"
    return f"; to test on {stand_in} instead, add {needed}"


def describe_ready_runs(plan: Plan) -> str:
    """The runs whose data is available."""
    if not plan.recipes:
        return "all missing runs need this data"
    ready: dict[str, dict[str, None]] = {}
    for recipe in plan.recipes:
        ready.setdefault(recipe.dataset, {})[recipe.method] = None
    by_dataset = "; ".join(f"{dataset}: {' '.join(methods)}" for dataset, methods in ready.items())
    return f"{len(plan.recipes)} runs have their data: {by_dataset}"


def describe_stand_ins(plan: Plan) -> list[str]:
    return [
        f"{dataset} was not found: its runs are tested on {STAND_INS[dataset]['dataset']}, and their results "
        "are marked"
        for dataset in plan.stand_ins
    ]


def seconds_per_work(index: Index, device: str) -> float | None:
    """Mean seconds per unit of work of the results measured on this device; None if there are none."""
    rows = [
        (60 * row.device_minutes, work(row.recipe))
        for rows in index.values()
        for row in rows
        if row.numbers["device"] == device and row.device_minutes
    ]
    return sum(seconds for seconds, _ in rows) / sum(units for _, units in rows) if rows else None
