"""--budget 5m: which seeds, methods and epochs fit into the time.

All that was asked for is trained if it fits. Otherwise seeds are dropped first, down to two, then methods
from the end of the list, down to the baseline and one other (an Infinite Class method if there is one), and
only then epochs, down to the fewest at which the recipe still learns. What does not fit even then is refused.

Epochs and methods are planned from trials before the first run. Two seeds of each method are then trained in
any case. Whether there is time for more (methods that were dropped, then further seeds of all methods) is
decided when no run waits any more, from the speed of the runs themselves (Filler).
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import heapq
import json
import math
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from icmixup.lab.sweep.progress import duration
from icmixup.lab.sweep.speed import Speed, Timing, mean_epoch, measure_speed
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.loop import RunProgress
from icmixup.lab.training.ranks import pick_device
from icmixup.lab.training.recipe import Recipe
from icmixup.lab.training.run_folder import write_atomically
from icmixup.lab.training.stored import read_json
from icmixup.lab.wording import count
from icmixup.methods import find_method

DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")
BUDGETS_FILE = "budgets.json"  # in the folder of all runs
MARGIN = 0.93  # of the time is planned from trials
FILL_MARGIN = 0.98  # of the time is filled, from the speed of the runs
SECONDS_AFTER = 2.0  # for the table, the figure and the report, after the last run
WELL_USED = 0.85  # of the time; if less is used, the reason is given
FEWEST_SEEDS = 2  # an interval needs two
FEWEST_METHODS = 2


def parse_budget(text: str) -> float:
    """Seconds of "90s", "5m" or "1h30m"."""
    found = DURATION.fullmatch(text.strip().lower())
    hours, minutes, seconds = (float(part or 0) for part in (found.groups() if found else ("0", "0", "0")))
    total = 3600 * hours + 60 * minutes + seconds
    if total <= 0:
        raise ValueError(f"budget {text!r} is not a duration; use for example 90s, 5m or 1h30m")
    return total


def format_budget(seconds: float) -> str:
    """A duration of at least `seconds` that parse_budget reads: 5 s, a minute or five minutes rounded up."""
    step = 5 if seconds <= 120 else 60 if seconds <= 3600 else 300
    minutes, rest = divmod(math.ceil(seconds / step) * step, 60)
    hours, minutes = divmod(minutes, 60)
    parts = ((hours, "h"), (minutes, "m"), (rest, "s"))
    return "".join(f"{number}{unit}" for number, unit in parts if number)


class Fit(NamedTuple):
    """What is trained: every method with every seed."""

    epochs: int
    seeds: int  # number of them
    methods: tuple[str, ...]


class Plan(NamedTuple):
    """What is trained within a budget, as budgets.json stores it."""

    epochs: int
    seeds: int  # number of them
    methods: tuple[str, ...]
    workers: int  # concurrent runs; a resumed run must have the same number of threads
    start_seconds: float  # of a run, besides its epochs
    epoch_seconds: dict[str, float]  # of an epoch with its share of evaluations, of all methods asked for
    pool_seconds: float = 0.0  # to start and end worker processes
    final: bool = False  # whether it has been decided that nothing more fits

    @property
    def fit(self) -> Fit:
        return Fit(self.epochs, self.seeds, self.methods)

    def with_fit(self, fit: Fit) -> Plan:
        return self._replace(epochs=fit.epochs, seeds=fit.seeds, methods=fit.methods)

    @property
    def first(self) -> Fit:
        """What is trained in any case: the fewest seeds, unless all has been decided."""
        return self.fit if self.final else self.fit._replace(seeds=min(self.seeds, FEWEST_SEEDS))


class Question(NamedTuple):
    """What should fit into the time."""

    recipe: Recipe
    methods: tuple[str, ...]
    seeds: int
    baseline: str
    floor: int  # fewest epochs

    @property
    def asked(self) -> Fit:
        return Fit(self.recipe.epochs, self.seeds, self.methods)

    @property
    def smallest(self) -> Fit:
        """The least that still compares something."""
        methods = keep_methods(self.methods, min(len(self.methods), FEWEST_METHODS), self.baseline)
        return Fit(self.floor, min(self.seeds, FEWEST_SEEDS), methods)


def keep_methods(methods: Sequence[str], number: int, baseline: str) -> tuple[str, ...]:
    """So many methods in the order of the list: the baseline, an Infinite Class method, the first others.

    Without one with that loss, the comparison would not answer whether it helps.
    """
    others = [method for method in methods if method != baseline]
    ours = [method for method in others if find_method(method).axes][:1]
    kept = list(dict.fromkeys([baseline, *ours, *others]))[:number]
    return tuple(method for method in methods if method in kept)


def fits_at_full_length(question: Question) -> Iterator[Fit]:
    """All fits with the recipe's epochs, from what was asked down to the fewest seeds and methods."""
    epochs, least = question.recipe.epochs, question.smallest
    for seeds in range(question.seeds, least.seeds - 1, -1):
        yield Fit(epochs, seeds, question.methods)
    for number in range(len(question.methods) - 1, len(least.methods) - 1, -1):
        yield Fit(epochs, least.seeds, keep_methods(question.methods, number, question.baseline))


def larger_fits(question: Question, fit: Fit) -> Iterator[Fit]:
    """What could be added to a fit with the same epochs: the method dropped last, otherwise a seed."""
    if len(fit.methods) < len(question.methods):
        methods = keep_methods(question.methods, len(fit.methods) + 1, question.baseline)
        yield fit._replace(methods=methods)
    if fit.seeds < question.seeds:
        yield fit._replace(seeds=fit.seeds + 1)


def choose_fit(question: Question, seconds: float, speed: Speed, lanes: int) -> Fit | None:
    """The first fit, in the order in which things are dropped, that takes at most `seconds`, or None.

    Args:
        lanes: number of concurrent runs.
    """

    def takes(fit: Fit) -> float:
        return fit_seconds(fit, question.recipe, speed, lanes)

    for fit in fits_at_full_length(question):
        if takes(fit) <= seconds:
            return fill_with_seeds(question, fit, lambda larger: takes(larger) <= seconds)
    lengths, least = range(question.floor, question.recipe.epochs), question.smallest
    fitting = bisect.bisect_right(lengths, seconds, key=lambda epochs: takes(least._replace(epochs=epochs)))
    return least._replace(epochs=lengths[fitting - 1]) if fitting else None


def fill_with_seeds(question: Question, fit: Fit, fits: Callable[[Fit], bool]) -> Fit:
    """The fit with as many seeds as there is time for: a method that does not fit may leave time for some."""
    while fit.seeds < question.seeds and fits(fit._replace(seeds=fit.seeds + 1)):
        fit = fit._replace(seeds=fit.seeds + 1)
    return fit


def fit_seconds(fit: Fit, recipe: Recipe, speed: Speed, lanes: int) -> float:
    """Time of all runs: each goes to the first worker that is free, seed by seed."""
    runs = [speed.run_seconds(method, fit.epochs, recipe.eval_every) for method in fit.methods]
    return speed.pool + makespan(runs * (fit.seeds * (recipe.folds or 1)), lanes)


def count_runs(fit: Fit, recipe: Recipe) -> int:
    return len(fit.methods) * fit.seeds * (recipe.folds or 1)


def makespan(durations: Sequence[float], lanes: int, busy: Sequence[float] = ()) -> float:
    """When the last of these runs ends, if each starts in order on the first free lane.

    Args:
        busy: when lanes become free that are not free from the beginning.
    """
    free = [*sorted(busy)[:lanes], *[0.0] * (lanes - len(busy))]
    heapq.heapify(free)
    for seconds in durations:
        heapq.heapreplace(free, free[0] + seconds)
    return max(free)


def fit_budget(
    question: Question,
    seconds: float,
    execution: Execution,
    *,
    remeasure: bool = False,
    elapsed: float = 0.0,
) -> tuple[Plan, float]:
    """What fits into `seconds`, and how many of them are left after measuring.

    The answer is stored in budgets.json: the same command must resume the same recipes, although no two
    measurements agree.

    Args:
        execution: with its dataset loaded and its number of concurrent runs set.
        remeasure: ignore the stored answer.
        elapsed: how many of the seconds have passed.
    """
    stored = None if remeasure else find_plan(question, seconds, execution)
    if stored is not None:
        return stored, seconds - elapsed
    started = time.monotonic()
    fit, speed, lanes = measure_and_choose(question, seconds, execution, started - elapsed)
    spent = time.monotonic() - started + elapsed
    if fit is None:
        needed = fit_seconds(question.smallest, question.recipe, speed, lanes)
        raise ValueError(describe_refusal(question.smallest, seconds, needed, spent))
    plan = make_plan(question, fit, speed, lanes)
    store_plan(execution.out, question_key(question, seconds, execution), plan)
    return plan, seconds - spent


def find_plan(question: Question, seconds: float, execution: Execution) -> Plan | None:
    """The plan of an earlier session for the same question and time."""
    key = question_key(question, seconds, execution)
    stored = read_budgets(execution.out / BUDGETS_FILE).get(key)
    return None if stored is None else Plan(**stored | {"methods": tuple(stored["methods"])})


def measure_and_choose(
    question: Question, seconds: float, execution: Execution, began: float
) -> tuple[Fit | None, Speed, int]:
    """What fits, the speed, and the number of concurrent runs: as many as there are, each with more threads.

    Args:
        began: beginning of the seconds, by time.monotonic.
    """
    lanes = execution.concurrent
    while True:
        alike = dataclasses.replace(execution, concurrent=lanes)
        speed = measure_speed(question.recipe, question.methods, seconds, alike)
        left = seconds - (time.monotonic() - began) - SECONDS_AFTER
        fit = choose_fit(question, MARGIN * left, speed, lanes)
        runs = count_runs(question.smallest if fit is None else fit, question.recipe)
        if runs >= lanes:
            return fit, speed, lanes
        lanes = runs


def make_plan(question: Question, fit: Fit, speed: Speed, workers: int) -> Plan:
    """The plan of a fit, with the speed of all methods at its number of epochs."""
    every = question.recipe.eval_every
    epoch = {
        method: (speed.run_seconds(method, fit.epochs, every) - speed.start) / fit.epochs
        for method in question.methods
    }
    return Plan(*fit, workers, speed.start, epoch, speed.pool)


def store_plan(out: Path, key: str, plan: Plan) -> None:
    """Write a plan to budgets.json, beside those of other questions."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / BUDGETS_FILE
    write_atomically(path, json.dumps(read_budgets(path) | {key: plan._asdict()}, indent=1).encode())


def read_budgets(path: Path) -> dict[str, dict[str, Any]]:
    """The plans in a budgets.json, by question; damaged ones are reported and made again."""
    if not path.exists():
        return {}
    try:
        found = read_json(path)
    except ValueError as error:
        warnings.warn(f"{error}; speed is measured again", stacklevel=3)
        return {}
    if not isinstance(found, dict):
        warnings.warn(f"{path} is not a table of plans; speed is measured again", stacklevel=3)
        return {}
    known = {key: value for key, value in found.items() if is_plan(value)}
    if len(known) < len(found):
        bad = next(key for key in found if key not in known)
        warnings.warn(
            f"{path}: {bad} is not a plan ({found[bad]!r:.60}); speed is measured again", stacklevel=3
        )
    return known


def is_plan(plan: object) -> bool:
    """Whether a value has the fields of a Plan, with values that they can have."""
    if not isinstance(plan, dict) or plan.keys() != set(Plan._fields):
        return False
    numbers = (plan["epochs"], plan["seeds"], plan["workers"])
    methods, speeds = plan["methods"], plan["epoch_seconds"]
    return (
        all(type(number) is int and 1 <= number <= 10**6 for number in numbers)
        and isinstance(methods, list)
        and bool(methods)
        and isinstance(speeds, dict)
        and all(isinstance(name, str) and name in speeds for name in methods)
        and all(map(is_duration, (plan["start_seconds"], plan["pool_seconds"], *speeds.values())))
        and type(plan["final"]) is bool
    )


def is_duration(seconds: object) -> bool:
    return type(seconds) in (int, float) and 0 <= seconds < math.inf  # type: ignore[operator]


def make_filler(
    question: Question, plan: Plan, seconds: float, execution: Execution, elapsed: float
) -> Filler:
    """What fills the rest of a budget that fit_budget was asked about; decisions go into budgets.json."""
    key = question_key(question, seconds, execution)
    store = functools.partial(store_plan, execution.out, key)
    return Filler(question, plan, seconds, elapsed=elapsed, store=store)


class Filler:
    """Decides what else is trained, when a worker is idle and no run waits.

    First the methods that were dropped, in the order of the list and with all seeds so far, then one more
    seed of all methods, up to what was asked for. Each is added if it ends in time at the speed of the runs
    so far. All runs have the same epochs, and every method has every seed: they can be compared.

    Args:
        plan: the fit to begin with, and the speed that it was planned with.
        seconds: of the budget.
        elapsed: how many of them have passed.
        store: called with every plan that was decided on, before its runs begin.
        clock: seconds from any origin.
    """

    def __init__(
        self,
        question: Question,
        plan: Plan,
        seconds: float,
        *,
        elapsed: float = 0.0,
        store: Callable[[Plan], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.question, self.plan, self.fit = question, plan, plan.first
        self.seconds, self.clock, self.began = seconds, clock, clock() - elapsed
        self.store = store
        self.on_change: Callable[[Fit, str], None] = lambda fit, message: None
        """Called with what is trained when that is no longer what was planned, and when all is decided; and
        with a message, which may be empty."""
        self.runs: dict[Recipe, Timing] = {}
        self.ended: set[str] = set()  # keys of runs

    def planned_end(self, finished: int = 0) -> float:
        """When all that is planned should end, in seconds of the budget; to be asked before the first run.

        Args:
            finished: number of runs that have finished before.
        """
        plan, recipe = self.plan, self.question.recipe
        runs = [plan.start_seconds + plan.epochs * plan.epoch_seconds[method] for method in plan.methods]
        runs *= count_runs(plan.fit, recipe) // len(runs)
        return self.now() + plan.pool_seconds + makespan(runs[finished:], plan.workers) + SECONDS_AFTER

    def begin(self, recipes: Sequence[Recipe]) -> None:
        """Note runs that are about to be trained."""
        self.runs |= {recipe: Timing() for recipe in recipes}

    def listen(self, recipe: Recipe, progress: RunProgress) -> None:
        self.runs[recipe].add(self.now(), progress.epoch)

    def end(self, key: str) -> None:
        """Note that a run has ended, with a row or without."""
        self.ended.add(key)

    def now(self) -> float:
        """Seconds of the budget that have passed."""
        return self.clock() - self.began

    def more(self, recipes_of: Callable[[Fit], Sequence[Recipe]]) -> list[Recipe]:
        """The runs that are added, or none.

        Args:
            recipes_of: all runs of a fit.
        """
        if self.plan.final:
            return []
        refused: list[tuple[Fit, float]] = []
        for fit in larger_fits(self.question, self.fit):
            added = [recipe for recipe in recipes_of(fit) if recipe not in self.runs]
            end = self.expected_end(added)
            if end <= FILL_MARGIN * self.seconds:
                self.extend(fit, added)
                return added
            refused.append((fit, end))
        self.finish(refused)
        return []

    def extend(self, fit: Fit, added: Sequence[Recipe]) -> None:
        """Note that runs are added; what was not planned is stored first."""
        before, self.fit = self.fit, fit
        self.begin(added)
        if fit.seeds > self.plan.seeds or fit.methods != self.plan.methods:
            self.plan = self.plan.with_fit(fit)
            self.store(self.plan)
            self.on_change(fit, f"there is time for {describe_addition(before, fit)}")

    def finish(self, refused: Sequence[tuple[Fit, float]]) -> None:
        """Note that nothing more fits.

        Args:
            refused: what could have been added, and when it would have ended.
        """
        planned = self.plan.seeds
        self.plan = self.plan.with_fit(self.fit)._replace(final=True)
        self.store(self.plan)
        if self.fit.seeds < planned:
            message = f"runs are slower than the trials were: {self.fit.seeds} instead of {planned} seeds"
        else:
            message = describe_use(self.fit, self.expected_end([]), refused, self.seconds)
        self.on_change(self.fit, message)

    def expected_end(self, added: Sequence[Recipe]) -> float:
        """When the runs in progress and those added will have ended, in seconds of the budget."""
        speeds = self.epoch_seconds()
        busy = [self.run_seconds_left(recipe, speeds) for recipe in self.runs if recipe.key not in self.ended]
        durations = [self.plan.start_seconds + self.fit.epochs * speeds[recipe.method] for recipe in added]
        left = max(makespan(durations, self.plan.workers, busy), max(busy, default=0.0))
        return self.now() + left + SECONDS_AFTER

    def run_seconds_left(self, recipe: Recipe, speeds: Mapping[str, float]) -> float:
        """Time that a run in progress still takes."""
        reports = self.runs[recipe].reports
        if not reports:
            return self.plan.start_seconds + self.fit.epochs * speeds[recipe.method]
        seconds, epochs = reports[-1]
        return max(0.0, (self.fit.epochs - epochs) * speeds[recipe.method] - (self.now() - seconds))

    def epoch_seconds(self) -> dict[str, float]:
        """Seconds of an epoch of each method, as its runs had; of the others, as planned, times how much
        slower than planned the runs were."""
        observed: dict[str, list[Timing]] = {}
        for recipe, run in self.runs.items():
            if len(run.reports) > 1 and run.reports[1][1] > run.reports[0][1]:
                observed.setdefault(recipe.method, []).append(run)
        planned = self.plan.epoch_seconds
        took = sum(run.measured[0] for runs in observed.values() for run in runs)
        expected = sum(planned[name] * run.measured[1] for name, runs in observed.items() for run in runs)
        slower = took / expected if expected else 1.0
        seen = {name: mean_epoch(runs) for name, runs in observed.items()}
        return {name: seen.get(name, slower * seconds) for name, seconds in planned.items()}


def question_key(question: Question, seconds: float, execution: Execution) -> str:
    """Ten hexadecimal digits of everything that the answer depends on, besides the speed."""
    data = execution.dataset
    parts = [
        question.recipe.fields(),
        None if data is None else data.fingerprint,
        *(question.methods, question.seeds, question.baseline, question.floor, seconds),
        *(str(pick_device(execution.device)), execution.concurrent),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:10]


def describe_addition(fit: Fit, larger: Fit) -> str:
    """What a larger fit has more, in words."""
    added = [method for method in larger.methods if method not in fit.methods]
    return f"{', '.join(added)} as well" if added else f"seed {larger.seeds} of each method"


def describe_use(fit: Fit, end: float, refused: Sequence[tuple[Fit, float]], seconds: float) -> str:
    """How much of the time is used, and why not more; empty if most of it is.

    Args:
        end: when the runs of `fit` will have ended.
        refused: larger fits, and when they would have ended.
        seconds: that were given.
    """
    if end >= WELL_USED * seconds:
        return ""
    reasons = [
        f"{describe_addition(fit, larger)} would take {100 * later / seconds:.0f} %"
        for larger, later in refused
    ]
    used = f"about {100 * end / seconds:.0f} % of the time is used"
    return f"{used}: {' and '.join(reasons) or 'all that was asked for fits'}"


def describe_refusal(least: Fit, seconds: float, needed: float, spent: float) -> str:
    """That the time is too short, why, and the smallest sensible budget."""
    enough = format_budget(1.1 * (needed / MARGIN + spent + SECONDS_AFTER))  # a tenth more: speeds vary
    names, seeds = " and ".join(least.methods), count(least.seeds, "seed")
    return (
        f"--budget of {duration(seconds)} is too short: {names} with {seeds} and {least.epochs} epochs, the "
        f"fewest at which this recipe still learns, take about {duration(needed)} on this machine; use "
        f"--budget {enough} or more, a smaller --model, or fewer images"
    )


def describe_fit(asked: Fit, fit: Fit) -> str:
    """What was dropped to fit the time, in words; empty if nothing was."""
    dropped = [method for method in asked.methods if method not in fit.methods]
    parts = [
        f"{fit.seeds} of {asked.seeds} seeds" if fit.seeds < asked.seeds else "",
        f"{len(fit.methods)} of {len(asked.methods)} methods (without {', '.join(dropped)})"
        if dropped
        else "",
        f"{fit.epochs} of {asked.epochs} epochs" if fit.epochs < asked.epochs else "",
    ]
    return ", ".join(part for part in parts if part)
