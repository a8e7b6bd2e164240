"""--seeds auto: seeds are added until the question is settled; methods that are clearly behind get no more.

Looking at results after every seed and stopping when they look good would find differences that do not exist.
So every look may spend a part of the error only (correction.error_at_looks), and the parts add up to 5 %.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from icmixup._checks import check_choice
from icmixup.lab.comparison.compare import (
    INTERVALS,
    Comparison,
    Failure,
    Tuned,
    check_methods,
    comparison_recipes,
    pick_baseline,
    read_answers,
    summarise,
    train_all,
)
from icmixup.lab.comparison.correction import ERROR, FIRST_LOOK, error_at_looks
from icmixup.lab.comparison.statistics import COMPARED, Answers, Decision, Look, decide, take_look
from icmixup.lab.comparison.verdict import describe_stop
from icmixup.lab.sweep.progress import Display
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.recipe import Recipe
from icmixup.lab.training.run_folder import Row

Show = Callable[[Sequence[Recipe]], AbstractContextManager[Display | None]]


def compare_adaptively(
    recipe: Recipe,
    methods: Sequence[str],
    seeds: Sequence[int],
    baseline: str | None = None,
    *,
    execution: Execution,
    show: Show | None = None,
    intervals: str = "both",
    measure: str = "accuracy",
    seconds: float | None = None,
    full_epochs: int | None = None,
    tuned: Tuned | None = None,
) -> Comparison:
    """Train all methods with a few seeds, then those that may be the best with one seed after the other.

    Args:
        recipe: everything but method and seed.
        seeds: the seeds that may be used, at least three, in this order.
        baseline: method that differences refer to; see pick_baseline.
        show: called with the recipes of each round; its display shows their progress.
        intervals: "both" covers new seeds and new test images, "seeds" covers new seeds.
        measure: one of COMPARED, what the differences are of.
        seconds: no seed is started that would take longer than this in total.
        full_epochs: of the recipe before --budget cut them, for the verdict.
        tuned: fields of the recipe that differ by method, from tuning.tune_methods.
    """
    methods = check_methods(methods)
    baseline = pick_baseline(methods, baseline)
    check_choice("intervals", intervals, INTERVALS)
    check_choice("measure", measure, COMPARED)
    error_at_looks(len(seeds))
    clock = Clock(seconds)
    rows: list[Row] = []
    failures: list[Failure] = []
    active, done, planned = methods, 0, FIRST_LOOK if seconds is None else 1
    while True:
        recipes = comparison_recipes(recipe, active, seeds[done:planned], tuned)
        with show(recipes) if show is not None else nullcontext() as display:
            finished, failed = train_all(recipes, execution, display)
        rows, failures, done = [*rows, *finished], [*failures, *failed], planned
        answers, seeds_only = read_answers(rows, execution.out, intervals)
        looks = take_looks(rows, methods, seeds, done, answers, measure)
        if done >= FIRST_LOOK:
            active = methods_to_continue(decide(looks), done, len(seeds))
        planned = done + 1
        if not active or not clock.has_time():
            break
    stop = describe_stop(looks, len(seeds), out_of_time=bool(active))
    return summarise(
        recipe,
        methods,
        seeds[:done],
        baseline,
        rows,
        failures,
        looks=looks,
        seeds_only=seeds_only,
        stop=stop,
        full_epochs=full_epochs,
        tuned=tuned,
    )


class Clock:
    """Whether there is time for one more round like the longest so far."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds, self.longest = seconds, 0.0
        self.started = self.last = time.monotonic()

    def has_time(self) -> bool:
        """To be asked after every round."""
        now = time.monotonic()
        self.longest, self.last = max(self.longest, now - self.last), now
        return self.seconds is None or now - self.started + self.longest <= self.seconds


def take_looks(
    rows: Sequence[Row],
    methods: Sequence[str],
    seeds: Sequence[int],
    done: int,
    answers: Answers | None,
    measure: str = "accuracy",
) -> list[Look]:
    """All looks at the rows of the first `done` seeds; a single one if it ends before the first look.

    Args:
        seeds: all that may be used.
    """
    errors = {number: error for number, error in error_at_looks(len(seeds)).items() if number <= done}
    return [
        take_look(rows, methods, seeds[:number], answers, error, measure)
        for number, error in (errors or {done: ERROR}).items()
    ]


def methods_to_continue(decision: Decision, seeds: int, max_seeds: int) -> tuple[str, ...]:
    """The methods that get one more seed; none if the question is settled or more seeds would not help.

    Args:
        seeds: number of seeds so far.
    """
    ends = len(decision.group) <= 1 or seeds >= max_seeds or decision.limited_by_images
    return () if ends else decision.group
