"""Many runs: on this machine or on a Ray cluster, within a budget, with progress.

local    one run per GPU; with a single GPU one after the other in this process, or several concurrently in
         threads; on CPUs as many processes as memory and cores allow
ray      every run is a task that requests its share of a GPU or of a node's cores. A run lost with its
         node is restarted elsewhere and resumes from its last checkpoint: `out` and the data must be at the
         same path in a file system that all nodes share, and icmixup must be installed on each

Both resume finished and partial runs in `out`. A run's numbers are those of train() alone, bit for bit if
torch has the same number of threads; otherwise sums are taken in another order.
"""

from __future__ import annotations

import glob
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from icmixup._checks import check_choice
from icmixup.lab.sweep.local import (
    Collector,
    Outcome,
    count_workers,
    has_one_gpu,
    run_in_processes,
    run_in_threads,
    run_sequentially,
)
from icmixup.lab.training.data import remember_data
from icmixup.lab.training.execution import ENGINES, Execution
from icmixup.lab.training.identity import Identity, describe_difference, identify, is_same_experiment
from icmixup.lab.training.lock import lock_folder
from icmixup.lab.training.loop import RunProgress
from icmixup.lab.training.predictions import finished_row
from icmixup.lab.training.ranks import pick_device, world_size
from icmixup.lab.training.recipe import Recipe
from icmixup.lab.training.run_folder import Row, Run, locate_run, other_runs


def run_recipes(
    recipes: Sequence[Recipe],
    execution: Execution,
    *,
    on_row: Callable[[Row], None] | None = None,
    on_progress: Callable[[Recipe, RunProgress], None] | None = None,
    on_failure: Callable[[Recipe, str], None] | None = None,
    more: Callable[[], Sequence[Recipe]] | None = None,
) -> list[Row]:
    """Train recipes, each in its folder under execution.out, and return the rows of those that finished.

    A run that diverges, or whose process dies repeatedly, is reported and the others continue. Any other
    error ends all runs; the same call resumes them.

    Args:
        on_row: called with every row, those of earlier sessions first.
        on_progress: called several times a second.
        on_failure: called with a run that has no row, and the reason; a warning by default.
        more: called while a worker is idle and no recipe waits; returns further recipes, which the same
            workers train, or none. Not available on Ray.

    Returns:
        Rows in the order of `recipes`, then of those added.
    """
    check_execution(execution)
    recipes = list(recipes)
    collector = Collector({}, on_row, on_progress, warn_of_failure if on_failure is None else on_failure)
    if more is not None:
        assert execution.engine == "local"
        collector = replace(collector, more=lambda: add_recipes(recipes, more, execution, collector))
    todo = collect_finished(recipes, execution, collector) or list(collector.more())
    if todo and execution.engine == "ray":
        from icmixup.lab.sweep.ray import run_on_ray

        run_on_ray(todo, execution, collector)
    elif todo or world_size() > 1:  # a rank that has nothing to do says so to the others
        # Counted over all runs, not the remaining ones: a resumed run has the same number of threads.
        runs = len(recipes) if more is None else sys.maxsize
        number = count_workers(runs, execution.device, execution.workers)
        run_locally(todo, execution, number, collector)
    return [collector.rows[recipe] for recipe in recipes if recipe in collector.rows]


def check_out(out: Path) -> None:
    """Raise an error if the folder of all runs cannot be made, before anything is trained."""
    nearest = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise ValueError(f"--out {out} cannot be a folder, because {nearest} is a file; use another path")


def check_execution(execution: Execution) -> None:
    check_out(execution.out)
    engine, device, workers = execution.engine, execution.device, execution.workers
    check_choice("engine", engine, ENGINES)
    if engine == "ray" and device not in (None, "cpu", "cuda"):
        raise ValueError(
            f"with --engine ray, --device must be cpu or cuda, got {device!r}: Ray assigns the GPU"
        )
    if engine == "local" and execution.address is not None:
        raise ValueError(f"--address {execution.address!r} needs --engine ray")
    if workers is not None and workers < 1:
        raise ValueError(f"--workers must be at least 1, got {workers}")
    if world_size() > 1 and (engine == "ray" or workers not in (None, 1)):
        raise ValueError(
            f"under torchrun all {world_size()} processes train one run together; start icmixup without "
            "torchrun for concurrent runs or for --engine ray"
        )


def find_finished(recipes: Sequence[Recipe], execution: Execution) -> dict[Recipe, Row]:
    """The rows of runs that have already finished, on the same images and with the same identity."""
    rows = {run.recipe: finished_row(run) for run, _ in locate_runs(recipes, execution)}
    return {recipe: row for recipe, row in rows.items() if row is not None}


def locate_runs(recipes: Sequence[Recipe], execution: Execution) -> Iterator[tuple[Run, Identity]]:
    """Where each run is or will be, and the identity that it would have now.

    Recipes without any run in `out` are left out, so that their images need not be loaded.
    """
    load, device = remember_data(execution), device_kind(execution)
    for recipe in dict.fromkeys(recipes):
        if any(execution.out.glob(f"{glob.escape(recipe.title)}.*")):
            identity = identify(recipe, load(recipe), device)
            yield locate_run(execution.out, recipe, identity, reuse=execution.reuse), identity


def device_kind(execution: Execution) -> str:
    """The kind of device that runs are trained on, as far as it is known here: Ray may choose another."""
    if execution.engine == "ray" and execution.device is not None:
        return execution.device
    return pick_device(execution.device).type


def describe_reuse(recipes: Sequence[Recipe], execution: Execution) -> list[str]:
    """Messages about existing runs of these recipes that differ in their identity: which, why, and whether
    they are used."""
    skipped: dict[str, list[Path]] = {}
    taken: dict[str, list[Path]] = {}
    for run, now in locate_runs(recipes, execution):
        if run.identity != now:
            taken.setdefault(describe_difference(run.identity, now), []).append(run.folder)
        elif not run.folder.exists():
            for other in other_runs(run):
                hint = "; --reuse takes them" if is_same_experiment(other.identity, now) else ""
                skipped.setdefault(describe_difference(other.identity, now) + hint, []).append(other.folder)
    return [
        *(
            f"{describe_runs(found)} not used; new runs are trained beside: {why}"
            for why, found in skipped.items()
        ),
        *(f"{describe_runs(found)} reused because of --reuse: {why}" for why, found in taken.items()),
    ]


def describe_runs(folders: Sequence[Path]) -> str:
    first = folders[0]
    return f"{first} is" if len(folders) == 1 else f"{len(folders)} runs such as {first} are"


def delete_runs(recipes: Sequence[Recipe], execution: Execution) -> None:
    """Delete existing results of these runs; runs on other images or with another identity are kept."""
    for run, _ in locate_runs(recipes, replace(execution, reuse=False)):
        if run.folder.exists():
            with lock_folder(run.folder, wait=False):
                shutil.rmtree(run.folder)


def collect_finished(recipes: Sequence[Recipe], execution: Execution, collector: Collector) -> list[Recipe]:
    """Report finished runs; return the others, each once."""
    finished = find_finished(recipes, execution)
    for recipe, row in finished.items():
        collector.record(recipe, Outcome(row))
    return [recipe for recipe in dict.fromkeys(recipes) if recipe not in finished]


def add_recipes(
    recipes: list[Recipe], more: Callable[[], Sequence[Recipe]], execution: Execution, collector: Collector
) -> list[Recipe]:
    """Recipes from `more` that have not finished, also added to all `recipes`; none once it has no more."""
    while added := more():
        recipes += added
        if todo := collect_finished(added, execution, collector):
            return todo
    return []


def run_locally(recipes: Sequence[Recipe], execution: Execution, number: int, collector: Collector) -> None:
    if number == 1:
        run_sequentially(recipes, execution, collector)
    elif has_one_gpu(execution.device):
        run_in_threads(recipes, execution, number, collector)
    else:
        run_in_processes(recipes, execution, number, collector)


def warn_of_failure(recipe: Recipe, reason: str) -> None:
    warnings.warn(f"{recipe.title} has no result: {reason}", stacklevel=2)
