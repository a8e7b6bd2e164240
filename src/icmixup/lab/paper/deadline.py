"""Runs that end in time: which of the missing ones to start while a GPU is available."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from icmixup.lab.sweep import run_recipes
from icmixup.lab.sweep.cost import work
from icmixup.lab.sweep.local import count_workers
from icmixup.lab.sweep.speed import estimate_seconds
from icmixup.lab.training.data import load_recipe_data
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.loop import RunProgress
from icmixup.lab.training.ranks import pick_device
from icmixup.lab.training.recipe import Recipe
from icmixup.lab.training.run_folder import Row

MEASURED_SECONDS = 20.0  # of training, before its speed is trusted more than that of earlier results


class Deadline:
    """Hands out recipes, in their order, that are expected to end before a deadline; others are passed over.

    A run takes its work x the seconds that a unit of work takes here x the number of runs that share the
    device with it: on a GPU those that are under way, on a CPU always all workers, which have cores of their
    own. A run that takes longer than expected is not stopped.

    Args:
        recipes: cheapest first.
        seconds: until the deadline.
        concurrent: number of runs at the same time.
        seconds_each: per unit of work of the whole device, from earlier results or a trial.
        clock: in seconds.
        on_gpu: whether all runs share one GPU.
    """

    def __init__(
        self,
        recipes: Sequence[Recipe],
        seconds: float,
        concurrent: int,
        seconds_each: float,
        clock: Callable[[], float] = time.monotonic,
        on_gpu: bool = False,
    ) -> None:
        self.waiting, self.concurrent, self.on_gpu = list(recipes), concurrent, on_gpu
        self.work = {recipe: work(recipe) for recipe in recipes}
        self.seconds_each, self.clock = seconds_each, clock
        self.end = clock() + seconds
        self.done: dict[Recipe, float] = {}  # share of each run
        self.under_way: set[Recipe] = set()
        self.start: tuple[float, float] | None = None  # of the first report: when it was, and the work done

    def more(self) -> list[Recipe]:
        """The next recipe that is expected to end in time, or none."""
        each, left = self.measured(), self.end - self.clock()
        sharing = len(self.under_way) + 1 if self.on_gpu else self.concurrent
        for recipe in self.waiting:
            if self.work[recipe] * each * sharing <= left:
                self.waiting.remove(recipe)
                self.under_way.add(recipe)
                return [recipe]
        return []

    def listen(self, recipe: Recipe, progress: RunProgress) -> None:
        self.done[recipe] = progress.epoch / progress.epochs
        if progress.epoch >= progress.epochs:
            self.under_way.discard(recipe)
        if self.start is None:
            self.start = self.clock(), self.worked()

    def worked(self) -> float:
        return sum(self.work[recipe] * share for recipe, share in self.done.items())

    def measured(self) -> float:
        """Seconds per unit of work: of this session once it has trained for some time, else as given.

        Time before the first report is not counted: imports, reading images, compiling kernels.
        """
        if self.start is None:
            return self.seconds_each
        began, before = self.start
        passed, done = self.clock() - began, self.worked() - before
        return passed / done if passed >= MEASURED_SECONDS and done > 0 else self.seconds_each


def run_in_time(
    recipes: Sequence[Recipe],
    execution: Execution,
    seconds: float,
    on_row: Callable[[Row], None] | None = None,
) -> list[Row]:
    """run_recipes for those recipes that are expected to end within `seconds`; the others are not started.

    Nothing is known of the machine at first: one run for each worker starts in any case, and their speed
    decides about the others.
    """
    concurrent = count_workers(max(1, len(recipes)), execution.device, execution.workers)
    deadline = Deadline(recipes, seconds, concurrent, 0.0, on_gpu=on_one_gpu(execution.device))
    return run_recipes([], execution, on_row=on_row, on_progress=deadline.listen, more=deadline.more)


def on_one_gpu(device: str | None) -> bool:
    """Whether all runs share one GPU."""
    return pick_device(device).type == "cuda" and (
        device not in (None, "cuda") or torch.cuda.device_count() == 1
    )


def measure_work(recipe: Recipe, execution: Execution) -> float:
    """Seconds per unit of work on this machine, from a short trial of a run."""
    data = load_recipe_data(recipe, execution.data_dir)
    alone = replace(execution, dataset=data, concurrent=1)
    return estimate_seconds(recipe, recipe.method, 1, alone) / work(recipe)
