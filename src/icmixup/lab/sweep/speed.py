"""Speed of training on this machine as it is: short trials, as many at once as the runs themselves.

A trial is a real run in a temporary folder that is ended after a few seconds. The time of a run is

    start + epoch * (epochs + evaluations * evaluation)

with `start` for everything around its epochs, and `evaluation` in epochs. Worker processes take `pool`
seconds to start, once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from icmixup.lab.sweep import run_recipes
from icmixup.lab.sweep.local import has_one_gpu, threads_per_run
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.loop import RunProgress, training_data
from icmixup.lab.training.ranks import pick_device
from icmixup.lab.training.recipe import Recipe
from icmixup.methods import Method

TRIAL_SHARE = 0.05  # of the time given, for the first trials of all methods together
TRIAL_SECONDS = (0.5, 10.0)  # bounds of one trial
TRIAL_EPOCHS = 10_000  # more than any trial lasts
TRIALS = 2  # of each cost at least, and of each worker
AGREEMENT = 1.15  # of the slowest to the fastest trial; otherwise they are repeated
MOST_ROUNDS = 3  # if there is time:
MEASURING_SHARE = 0.15  # of the time given, which another round must not exceed
FORWARD_SHARE = 1 / 3  # of a training step is its forward pass, which is all that an evaluation takes
# Settings of a method that hardly change the time of a step.
FREE_SETTINGS = {
    *("alpha", "mode", "prob", "cutmix_alpha", "switch_prob", "kappa", "tau"),
    *("duplicates", "centred", "temperature", "label_smoothing", "class_sizes"),
}


class Speed(NamedTuple):
    """Seconds that runs take, at the concurrency at which they were measured."""

    pool: float  # until worker processes are ready; 0 if runs are trained in this process
    start: float  # of a run, besides its epochs
    epoch: dict[str, float]  # of an epoch of each method
    evaluation: float = 0.0  # of the test set, in epochs

    def run_seconds(self, method: str, epochs: int, eval_every: int) -> float:
        """Time of one run."""
        evaluations = math.ceil(epochs / eval_every)
        return self.start + self.epoch[method] * (epochs + evaluations * self.evaluation)


@dataclass
class Trial:
    """When a trial reported progress, in seconds since its round began, and how many epochs it had done."""

    reports: list[tuple[float, float]] = field(default_factory=list)

    @property
    def measured(self) -> tuple[float, float]:
        """Seconds and epochs between the first and the last report: the warm-up before is not counted."""
        (first, done), (last, all_done) = self.reports[0], self.reports[-1]
        return (last, all_done) if all_done == done else (last - first, all_done - done)

    @property
    def epoch(self) -> float:
        """Seconds of an epoch."""
        seconds, epochs = self.measured
        return seconds / epochs

    @property
    def started(self) -> float:
        """When its first epoch began, judged by the time of its epochs."""
        first, done = self.reports[0]
        return max(0.0, first - done * self.epoch)

    @property
    def training(self) -> float:
        """Seconds of its epochs."""
        return self.reports[-1][1] * self.epoch


def cost_of(method: Method) -> tuple[object, ...]:
    """What the time of a step depends on; methods with equal costs are measured once."""
    mixes = {"none": "not", "manifold": "hidden"}.get(method.draw, "inputs")
    settings = dataclasses.asdict(method) | {"draw": mixes, "clean_weight": method.clean_weight > 0}
    return tuple(value for name, value in settings.items() if name not in FREE_SETTINGS)


def measure_speed(recipe: Recipe, methods: Sequence[str], seconds: float, execution: Execution) -> Speed:
    """The speed of runs of all methods, from trials of each distinct cost, repeated where they disagree.

    Args:
        seconds: the time that will be planned; trials take a small share of it.
        execution: with its dataset loaded and its number of concurrent runs set.
    """
    costs = {name: cost_of(dataclasses.replace(recipe, method=name).method_at(0)) for name in methods}
    samples: dict[object, list[Trial]] = {cost: [] for cost in costs.values()}
    shortest, longest = TRIAL_SECONDS
    limit = min(max(TRIAL_SHARE * seconds / (TRIALS * len(samples)), shortest), longest)
    overheads: list[tuple[float, float]] = []
    walls: list[float] = []
    while len(walls) < MOST_ROUNDS and (not walls or sum(walls) + max(walls) <= MEASURING_SHARE * seconds):
        measured = {cost: name for name, cost in costs.items() if not agree(samples[cost])}
        if not measured:
            break
        trials, wall = time_trials(recipe, list(measured.values()), limit, execution)
        for cost, name in measured.items():
            samples[cost] += [trial for method, trial in trials if method == name]
        overheads.append(split_overhead([trial for _, trial in trials], wall, execution.concurrent))
        walls.append(wall)
    pool, start = overheads[0]
    processes = execution.concurrent > 1 and not has_one_gpu(execution.device)
    epoch = {name: mean_epoch(samples[cost]) for name, cost in costs.items()}
    return Speed(pool if processes else 0.0, start, epoch, evaluation_epochs(recipe, execution))


def agree(trials: Sequence[Trial]) -> bool:
    """Whether there are trials, and they took about the same time."""
    epochs = [trial.epoch for trial in trials]
    return bool(epochs) and max(epochs) <= AGREEMENT * min(epochs)


def mean_epoch(trials: Sequence[Trial]) -> float:
    """Seconds of an epoch over all trials: if the speed of the machine varies, runs will meet that too."""
    seconds = sum(trial.measured[0] for trial in trials)
    return seconds / sum(trial.measured[1] for trial in trials)


def evaluation_epochs(recipe: Recipe, execution: Execution) -> float:
    """Time of an evaluation of the test set, in epochs."""
    data = training_data(recipe, execution)
    return FORWARD_SHARE * len(data.test) / len(data.train)


def split_overhead(trials: Sequence[Trial], wall: float, lanes: int) -> tuple[float, float]:
    """Seconds until workers are ready, and seconds of a run besides its epochs.

    The first trial starts after `pool + start`. All lanes together spend lanes * pool on starting workers,
    and `start` on every trial; the rest is training.

    Args:
        trials: all of one round, at least two for each lane.
        wall: seconds from the beginning to the end of the round.
        lanes: number of concurrent runs.
    """
    first = min(trial.started for trial in trials)
    overhead = lanes * wall - sum(trial.training for trial in trials)
    start = max(0.0, (overhead - lanes * first) / (len(trials) - lanes))
    return max(0.0, first - start), start


def time_trials(
    recipe: Recipe, methods: Sequence[str], seconds: float, execution: Execution
) -> tuple[list[tuple[str, Trial]], float]:
    """Trials of each method, as many by each concurrent worker, and the time of all of them."""
    lanes = execution.concurrent
    each = lanes * math.ceil(TRIALS / (lanes if len(methods) > 1 else 1))
    trial = dataclasses.replace(
        recipe,
        epochs=TRIAL_EPOCHS,
        eval_every=TRIAL_EPOCHS,
        lr_drops=None,
        mix_off_epoch=None,
        min_steps=0,
    )
    recipes = [
        dataclasses.replace(trial, method=method, seed=seed) for method in methods for seed in range(each)
    ]
    return run_trials(recipes, seconds, dataclasses.replace(execution, workers=execution.concurrent))


def run_trials(
    recipes: Sequence[Recipe], seconds: float, execution: Execution
) -> tuple[list[tuple[str, Trial]], float]:
    """Run recipes in a temporary folder, each for some seconds."""
    trials = {recipe: Trial() for recipe in recipes}
    began = time.monotonic()

    def listen(recipe: Recipe, progress: RunProgress) -> None:
        trials[recipe].reports.append((time.monotonic() - began, progress.epoch))

    def ended(recipe: Recipe, reason: str) -> None:
        if not trials[recipe].reports:  # it diverged in its first epoch; the run itself will report that
            trials[recipe].reports.append((time.monotonic() - began, 1.0))

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        features = execution.out.absolute() / "features"
        if features.is_dir():  # of --train head: computed already
            (out / "features").symlink_to(features)
        where = dataclasses.replace(execution, out=out, trackers=(), trial_seconds=seconds, reuse=False)
        run_recipes(recipes, where, on_progress=listen, on_failure=ended)
    return [(recipe.method, trial) for recipe, trial in trials.items()], time.monotonic() - began


def estimate_seconds(recipe: Recipe, method: str, runs: int, execution: Execution) -> float:
    """Time of `runs` runs, from trials of about a second with the given method, the most expensive one.

    Args:
        execution: with its dataset loaded and its number of concurrent runs set.
    """
    concurrent = execution.concurrent
    alone = dataclasses.replace(execution, concurrent=1)
    with shared_threads(concurrent, pick_device(execution.device)):
        speed = measure_speed(recipe, (method,), 0.0, alone)
    return math.ceil(runs / concurrent) * speed.run_seconds(method, recipe.epochs, recipe.eval_every)


@contextlib.contextmanager
def shared_threads(concurrent: int, device: torch.device) -> Iterator[None]:
    """On a CPU, use the number of threads that each of several concurrent runs has."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(threads_per_run(concurrent))
    try:
        yield
    finally:
        torch.set_num_threads(before)
