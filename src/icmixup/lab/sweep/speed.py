"""Speed of training on this machine as it is: short trials, as many at once as the runs themselves.

A trial is a real run in a temporary folder that is ended after a few seconds. The time of a run is

    start + epoch * (epochs + evaluations * evaluation)

with `start` for everything around its epochs, and `evaluation` in epochs. Worker processes take `pool`
seconds to start and to end, once.

Trials come in passes: in each, every worker has one trial of each cost. Whatever else the machine does then
affects all costs alike, and passes that disagree show it. Passes are added, to the same workers, until their
mean is known well enough or the time for measuring is used up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from icmixup.lab.sweep import run_recipes
from icmixup.lab.sweep.local import has_one_gpu, threads_per_run
from icmixup.lab.training.data import training_data
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.loop import RunProgress
from icmixup.lab.training.ranks import pick_device
from icmixup.lab.training.recipe import Recipe
from icmixup.lab.training.run_folder import FEATURES_FOLDER
from icmixup.methods import Method

TRIAL_SHARE = 0.05  # of the time given, for the trials of the usual passes
TRIAL_SECONDS = (0.3, 10.0)  # bounds of one trial
TRIAL_EPOCHS = 10_000  # more than any trial lasts
USUAL_PASSES = 2  # fewer if they take too long
FEWEST_TRIALS = 2  # of each worker, to separate its start from that of a run
FEWEST_SAMPLES = 3  # of the time of all costs together, to judge how well its mean is known
PRECISION = 0.03  # relative standard error of that mean at which measuring ends
MEASURING_SHARE = 0.15  # of the time given, which another pass must not exceed
FORWARD_SHARE = 1 / 3  # of a training step is its forward pass, which is all that an evaluation takes
# Settings of a method that hardly change the time of a step.
FREE_SETTINGS = {
    *("alpha", "mode", "prob", "cutmix_alpha", "switch_prob", "kappa", "tau"),
    *("duplicates", "centred", "temperature", "label_smoothing", "class_sizes"),
}


class Speed(NamedTuple):
    """Seconds that runs take, at the concurrency at which they were measured."""

    pool: float  # to start and end worker processes; 0 if runs are trained in this process
    start: float  # of a run, besides its epochs
    epoch: dict[str, float]  # of an epoch of each method
    evaluation: float = 0.0  # of the test set, in epochs

    def run_seconds(self, method: str, epochs: int, eval_every: int) -> float:
        """Time of one run."""
        evaluations = math.ceil(epochs / eval_every)
        return self.start + self.epoch[method] * (epochs + evaluations * self.evaluation)


@dataclass
class Timing:
    """When a run reported progress, in seconds since its round began, and how many epochs it had done."""

    reports: list[tuple[float, float]] = field(default_factory=list)
    ended: float = math.nan

    def add(self, seconds: float, epochs: float) -> None:
        """Store a report; of all, the first and the last are kept."""
        self.reports = [*self.reports[:1], (seconds, epochs)]

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
    def after(self) -> float:
        """Seconds from its last report to its end."""
        return self.ended - self.reports[-1][0]


def cost_of(method: Method) -> tuple[object, ...]:
    """What the time of a step depends on; methods with equal costs are measured once."""
    mixes = {"none": "not", "manifold": "hidden"}.get(method.draw, "inputs")
    settings = dataclasses.asdict(method) | {"draw": mixes, "clean_weight": method.clean_weight > 0}
    return tuple(value for name, value in settings.items() if name not in FREE_SETTINGS)


def measure_speed(recipe: Recipe, methods: Sequence[str], seconds: float, execution: Execution) -> Speed:
    """The speed of runs of all methods, from trials of each distinct cost.

    Args:
        seconds: the time that will be planned; trials take a small share of it.
        execution: with its dataset loaded and its number of concurrent runs set.
    """
    costs = {name: cost_of(dataclasses.replace(recipe, method=name).method_at(0)) for name in methods}
    measured = {cost: name for name, cost in costs.items()}
    lanes = execution.concurrent
    passes = Passes(trial_recipe(recipe), tuple(measured.values()), seconds, lanes)
    wall = run_trials(passes, dataclasses.replace(execution, workers=lanes))
    pool, start = split_overhead(list(passes.trials.values()), wall, lanes)
    processes = lanes > 1 and not has_one_gpu(execution.device)
    epoch = {name: mean_epoch(passes.trials_of(measured[cost])) for name, cost in costs.items()}
    return Speed(pool if processes else 0.0, start, epoch, evaluation_epochs(recipe, execution))


def trial_recipe(recipe: Recipe) -> Recipe:
    """The recipe of a run that is ended long before it is complete, and is not evaluated until then."""
    endless = {"epochs": TRIAL_EPOCHS, "eval_every": TRIAL_EPOCHS, "min_steps": 0}
    return dataclasses.replace(recipe, **endless, lr_drops=None, mix_off_epoch=None)  # type: ignore[arg-type]


class Passes:
    """Trials of some methods, pass by pass, and whether there are enough of them.

    Args:
        recipe: of all trials.
        methods: one for each cost.
        seconds: the time that will be planned.
        lanes: number of concurrent runs.
    """

    def __init__(
        self,
        recipe: Recipe,
        methods: tuple[str, ...],
        seconds: float,
        lanes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.recipe, self.methods, self.seconds, self.lanes = recipe, methods, seconds, lanes
        self.clock, self.began = clock, clock()
        self.number = 0
        self.trials: dict[Recipe, Timing] = {}

    @property
    def trial_seconds(self) -> float:
        """Time of one trial."""
        shortest, longest = TRIAL_SECONDS
        share = TRIAL_SHARE * self.seconds / (USUAL_PASSES * len(self.methods))
        return min(max(share, shortest), longest)

    def more(self) -> list[Recipe]:
        """The recipes of another pass, or none."""
        if self.are_enough():
            return []
        seeds = range(self.number * self.lanes, (self.number + 1) * self.lanes)
        added = [
            dataclasses.replace(self.recipe, method=m, seed=seed) for m in self.methods for seed in seeds
        ]
        self.trials |= {recipe: Timing() for recipe in added}
        self.number += 1
        return added

    def are_enough(self) -> bool:
        """Whether the mean is known well enough, or another pass like those so far would take too long."""
        if self.number * len(self.methods) < FEWEST_TRIALS:
            return False
        if self.now() * (1 + 1 / self.number) > MEASURING_SHARE * self.seconds:
            return True
        return self.number >= USUAL_PASSES and relative_error(self.totals(), self.number) <= PRECISION

    def totals(self) -> list[float]:
        """Seconds of an epoch of all methods together: one sample for each pass and worker."""
        samples: dict[int, list[float]] = {}
        for recipe, trial in self.trials.items():
            if len(trial.reports) > 1:
                samples.setdefault(recipe.seed, []).append(trial.epoch)
        return [sum(sample) for sample in samples.values() if len(sample) == len(self.methods)]

    def trials_of(self, method: str) -> list[Timing]:
        return [trial for recipe, trial in self.trials.items() if recipe.method == method]

    def now(self) -> float:
        """Seconds since the beginning."""
        return self.clock() - self.began

    def listen(self, recipe: Recipe, progress: RunProgress) -> None:
        self.trials[recipe].add(self.now(), progress.epoch)

    def end(self, recipe: Recipe, reason: str) -> None:
        trial, ended = self.trials[recipe], self.now()
        if not trial.reports:  # it diverged in its first epoch; the run itself will report that
            trial.reports = [(self.assigned(recipe), 0.0), (ended, 1.0)]
        trial.ended = ended

    def assigned(self, recipe: Recipe) -> float:
        """When a worker took this trial: at once, or when an earlier trial ended."""
        ends = sorted(trial.ended for trial in self.trials.values() if not math.isnan(trial.ended))
        index = list(self.trials).index(recipe)
        return ends[index - self.lanes] if index >= self.lanes else 0.0


def relative_error(samples: Sequence[float], passes: int) -> float:
    """Standard error of the mean of samples, relative to it; infinite for too few samples.

    Args:
        passes: number of them that are independent; trials at the same time see the same machine.
    """
    if len(samples) < FEWEST_SAMPLES:
        return math.inf
    return statistics.stdev(samples) / math.sqrt(passes) / statistics.fmean(samples)


def mean_epoch(trials: Sequence[Timing]) -> float:
    """Seconds of an epoch over all trials: if the speed of the machine varies, runs will meet that too."""
    seconds = sum(trial.measured[0] for trial in trials)
    return seconds / sum(trial.measured[1] for trial in trials)


def evaluation_epochs(recipe: Recipe, execution: Execution) -> float:
    """Time of an evaluation of the test set, in epochs."""
    data = training_data(recipe, execution)
    return FORWARD_SHARE * len(data.test) / len(data.train)


def split_overhead(trials: Sequence[Timing], wall: float, lanes: int) -> tuple[float, float]:
    """Seconds to start and end all workers, and seconds of a run besides its epochs.

    The first trial of each worker waits for the worker. Every other one begins when an earlier one ends.

    Args:
        trials: in the order in which workers took them, at least two for each lane.
        wall: seconds from the beginning of the first trial to the end of the workers.
        lanes: number of concurrent runs.
    """
    ends = sorted(trial.ended for trial in trials)
    waits = [max(0.0, trial.started - end) for trial, end in zip(trials[lanes:], ends, strict=False)]
    before, after = statistics.fmean(waits), statistics.fmean(trial.after for trial in trials)
    first = min(trial.started for trial in trials[:lanes])
    return max(0.0, first - before) + wall - ends[-1], before + after


def run_trials(passes: Passes, execution: Execution) -> float:
    """Run trials in a temporary folder until there are enough; return the time of all of them."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        features = execution.out.absolute() / FEATURES_FOLDER
        if features.is_dir():  # of --train head: computed already
            (out / FEATURES_FOLDER).symlink_to(features)
        where = dataclasses.replace(
            execution, out=out, trackers=(), trial_seconds=passes.trial_seconds, reuse=False
        )
        first = passes.more()
        run_recipes(first, where, on_progress=passes.listen, on_failure=passes.end, more=passes.more)
        return passes.now()


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
