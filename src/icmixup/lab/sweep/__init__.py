"""Many runs: on this machine or on a Ray cluster, within a budget, with progress.

local    one run per GPU; with a single GPU one after the other in this process, or several concurrently in
         threads; on CPUs as many processes as memory and cores allow
ray      every run is a task that requests its share of a GPU or of a node's cores. A run lost with its node
is
         restarted elsewhere and resumes from its last checkpoint: `out` and the data must be at the same path
         in a file system that all nodes share, and icmixup must be installed on each

Both resume finished and partial runs in `out`. A run's numbers are those of train() alone, bit for bit if
torch has the same number of threads; otherwise sums are taken in another order.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
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
from icmixup.lab.training.execution import ENGINES, Execution
from icmixup.lab.training.loop import RunProgress
from icmixup.lab.training.ranks import world_size
from icmixup.lab.training.recipe import Recipe
from icmixup.lab.training.run_folder import Row, Run


def run_recipes(
    recipes: Sequence[Recipe],
    execution: Execution,
    *,
    on_row: Callable[[Row], None] | None = None,
    on_progress: Callable[[Recipe, RunProgress], None] | None = None,
    on_failure: Callable[[Recipe, str], None] | None = None,
) -> list[Row]:
    """Train recipes, each in its folder under execution.out, and return the rows of those that finished.

    A run that diverges, or whose process dies repeatedly, is reported and the others continue. Any other
    error ends all runs; the same call resumes them.

    Args:
        on_row: called with every row, those of earlier sessions first.
        on_progress: called several times a second.
        on_failure: called with a run that has no row, and the reason; a warning by default.

    Returns:
        Rows in the order of `recipes`.
    """
    check_execution(execution)
    collector = Collector({}, on_row, on_progress, warn_of_failure if on_failure is None else on_failure)
    todo = collect_finished(recipes, execution.out, collector)
    if todo and execution.engine == "ray":
        from icmixup.lab.sweep.ray import run_on_ray

        run_on_ray(todo, execution, collector)
    elif todo:
        # Counted over all runs, not the remaining ones: a resumed run has the same number of threads.
        number = count_workers(len(recipes), execution.device, execution.workers)
        run_locally(todo, execution, number, collector)
    return [collector.rows[recipe] for recipe in recipes if recipe in collector.rows]


def check_execution(execution: Execution) -> None:
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


def find_finished(recipes: Sequence[Recipe], out: Path) -> dict[Recipe, Row]:
    """The rows of runs that have already finished."""
    rows = {recipe: Run(out / recipe.name, recipe).result() for recipe in recipes}
    return {recipe: row for recipe, row in rows.items() if row is not None}


def collect_finished(recipes: Sequence[Recipe], out: Path, collector: Collector) -> list[Recipe]:
    """Report finished runs; return the others, each once."""
    finished = find_finished(recipes, out)
    for recipe, row in finished.items():
        collector.record(recipe, Outcome(row))
    return [recipe for recipe in dict.fromkeys(recipes) if recipe not in finished]


def run_locally(recipes: Sequence[Recipe], execution: Execution, number: int, collector: Collector) -> None:
    if number == 1:
        run_sequentially(recipes, execution, collector)
    elif has_one_gpu(execution.device):
        run_in_threads(recipes, execution, number, collector)
    else:
        run_in_processes(recipes, execution, number, collector)


def warn_of_failure(recipe: Recipe, reason: str) -> None:
    warnings.warn(f"{recipe.name} has no result: {reason}", stacklevel=2)
