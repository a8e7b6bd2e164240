"""--budget on a simulated machine: how much of the time is used, at random speeds, with noise and overheads.

The clock is simulated, so that nothing here depends on what else the machine does. Runs report every epoch,
take `start` seconds besides, and the machine may be slower or faster than the trials said.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest

from icmixup.lab.sweep.budget import (
    FILL_MARGIN,
    MARGIN,
    SECONDS_AFTER,
    Filler,
    Fit,
    Plan,
    Question,
    choose_fit,
    larger_fits,
    make_plan,
)
from icmixup.lab.sweep.speed import Speed
from icmixup.lab.training.loop import RunProgress
from icmixup.lab.training.recipe import QUICK, Recipe

RECIPE = dataclasses.replace(QUICK, dataset="digits", eval_every=1000)
NAMES = ("erm", "mixup", "ic-mixup", "cutmix", "ic-cutmix", "regmixup", "ic-regmixup")
TRIALS = 80


class Killed(Exception):
    """The end of a simulated session."""


class Machine:
    """Concurrent lanes that train recipes; `slower` is the factor on all times, at each time."""

    def __init__(
        self,
        speed: Speed,
        lanes: int,
        slower: Callable[[float], float] = lambda now: 1.0,
        finished: Sequence[Recipe] = (),
    ) -> None:
        self.speed, self.lanes, self.slower = speed, lanes, slower
        self.now = 0.0
        self.kill_at = float("inf")
        self.finished = list(finished)

    def clock(self) -> float:
        return self.now

    def train(self, filler: Filler, recipes_of: Callable[[Fit], Sequence[Recipe]]) -> None:
        """As run_recipes does: workers ask for more while none waits."""
        self.now += self.speed.pool * self.slower(self.now)
        first = recipes_of(filler.fit)
        filler.begin(first)
        waiting, events, order = deque(first), [], 0
        idle = self.lanes
        while True:
            while idle:
                if not waiting:
                    waiting.extend(filler.more(recipes_of))
                if not waiting:
                    break
                recipe = waiting.popleft()
                if recipe in self.finished:
                    filler.end(recipe.key)
                    continue
                idle, order = idle - 1, order + 1
                begins = self.now + self.speed.start * self.slower(self.now)
                heapq.heappush(events, (begins, order, 0, recipe))
            if not events:
                return
            self.now, order_of, done, recipe = heapq.heappop(events)
            if self.now > self.kill_at:
                raise Killed
            if done:
                filler.listen(recipe, RunProgress(done, recipe.epochs, 1.0, None, 1.0, 0.0))
            if done == recipe.epochs:
                filler.end(recipe.key)
                self.finished.append(recipe)
                idle += 1
            else:
                later = self.now + self.speed.epoch[recipe.method] * self.slower(self.now)
                heapq.heappush(events, (later, order_of, done + 1, recipe))


class Outcome(NamedTuple):
    used: float  # share of the time
    planned: float  # share of the time
    fit: Fit
    plans: list[Plan]  # as they were stored
    messages: list[str]


class Case(NamedTuple):
    """A question, a machine, and how wrong the trials were."""

    question: Question
    speed: Speed
    lanes: int
    seconds: float
    measuring: float
    error: float  # measured speeds are this many times the true ones

    def recipes_of(self, fit: Fit) -> list[Recipe]:
        recipe = dataclasses.replace(self.question.recipe, epochs=fit.epochs)
        return [
            dataclasses.replace(recipe, method=method, seed=seed)
            for seed in range(fit.seeds)
            for method in fit.methods
        ]

    def choose(self) -> Plan | None:
        """The plan from the trials, None if the time is too short."""
        epoch = {name: self.error * seconds for name, seconds in self.speed.epoch.items()}
        measured = self.speed._replace(epoch=epoch)
        left = self.seconds - self.measuring - SECONDS_AFTER
        fit = choose_fit(self.question, MARGIN * left, measured, self.lanes)
        return None if fit is None else make_plan(self.question, fit, measured, self.lanes)

    def run(self, plan: Plan, machine: Machine) -> Outcome:
        plans = [plan]
        filler = Filler(
            *(self.question, plan, self.seconds),
            elapsed=self.measuring,
            store=plans.append,
            clock=machine.clock,
        )
        messages: list[str] = []
        filler.on_change = lambda fit, message: messages.append(message)
        planned = filler.planned_end()
        used = math.nan
        with contextlib.suppress(Killed):
            machine.train(filler, self.recipes_of)
            used = self.measuring + machine.now + SECONDS_AFTER
        return Outcome(used / self.seconds, planned / self.seconds, filler.fit, plans, messages)


def draw_case(draw: random.Random, error: float = 0.0) -> Case:
    """Any speed, number of methods, seeds, epochs and workers, and a budget between too short and ample."""
    methods = NAMES[: draw.randint(2, len(NAMES))]
    recipe = dataclasses.replace(RECIPE, epochs=draw.choice((30, 60, 200)))
    base = draw.uniform(0.05, 2.0)
    epoch = {name: base * draw.uniform(0.8, 1.2) * (2 if "reg" in name else 1) for name in methods}
    lanes = draw.choice((1, 2, 4))
    speed = Speed(draw.uniform(0, 5) if lanes > 1 else 0.0, draw.uniform(0, 1), epoch)
    question = Question(recipe, methods, draw.randint(2, 6), "mixup", 20)
    work = sum(epoch.values()) * recipe.epochs * question.seeds / lanes
    seconds = 10 + work * draw.uniform(0.1, 1.3)
    factor = draw.uniform(1 - error, 1 + error)
    return Case(question, speed, lanes, seconds, seconds * draw.uniform(0.02, 0.15), factor)


def cases(error: float = 0.0) -> list[tuple[Case, Plan]]:
    """Cases whose budget is long enough."""
    draw = random.Random(0)
    drawn = [draw_case(draw, error) for _ in range(TRIALS)]
    return [(case, plan) for case in drawn if (plan := case.choose()) is not None]


def waves(draw: random.Random, seconds: float, strength: float) -> Callable[[float], float]:
    """How much slower the machine is at each time: slow and fast changes, as other programs make them."""
    parts = [(draw.uniform(0, 6.3), draw.uniform(0.1, 1) * seconds) for _ in range(3)]

    def slower(now: float) -> float:
        return 1 + strength / 3 * sum(math.sin(phase + 6.3 * now / period) for phase, period in parts)

    return slower


def test_with_exact_trials_no_budget_is_exceeded_and_what_could_be_added_would_not_fit() -> None:
    for case, plan in cases():
        outcome = case.run(plan, Machine(case.speed, case.lanes))
        assert outcome.used <= 1.0
        for larger in larger_fits(case.question, outcome.fit):
            machine = Machine(case.speed, case.lanes)
            again = case.run(plan.with_fit(larger)._replace(final=True), machine)
            # Starting processes counts here, and has passed by when the decision is made.
            assert again.used > FILL_MARGIN - 0.02


def test_where_epochs_fill_the_time_85_to_100_percent_are_used_if_trials_are_off_by_8_percent() -> None:
    shares = []
    for case, plan in cases(error=0.08):
        outcome = case.run(plan, Machine(case.speed, case.lanes))
        if outcome.fit.epochs < case.question.recipe.epochs:
            shares.append(outcome.used)
    assert len(shares) > 5
    assert 0.85 <= min(shares) <= max(shares) <= 1.0


@pytest.mark.parametrize(("error", "strength"), [(0.08, 0.0), (0.08, 0.3)])
def test_time_used_is_within_15_percent_of_what_was_planned_or_closer_to_what_was_given(
    error: float, strength: float
) -> None:
    """More than planned is used only to add seeds or methods; never much over the time given."""
    draw = random.Random(1)
    for case, plan in cases(error):
        slower = waves(draw, case.seconds, strength)
        outcome = case.run(plan, Machine(case.speed, case.lanes, slower))
        assert outcome.used <= 1.05
        grown = outcome.fit != plan.fit
        assert grown or abs(outcome.used - outcome.planned) <= 0.15


@pytest.mark.parametrize("error", [0.0, 0.5])
def test_every_method_is_trained_with_every_seed_at_the_same_epochs(error: float) -> None:
    for case, plan in cases(error):
        machine = Machine(case.speed, case.lanes)
        outcome = case.run(plan, machine)
        assert set(machine.finished) == set(case.recipes_of(outcome.fit))
        assert len(machine.finished) == len(set(machine.finished))
        assert outcome.fit.epochs == plan.epochs
        assert outcome.plans[-1].fit == outcome.fit
        assert outcome.plans[-1].final


def pessimistic(seeds: int, methods: int, error: float = 2.0) -> Case:
    """Trials that ran twice as slowly as the runs will: everything is dropped that can be."""
    speed = Speed(0.0, 0.0, dict.fromkeys(NAMES, 1.0))
    question = Question(RECIPE, NAMES[:methods], seeds, "mixup", 20)
    return Case(question, speed, 1, methods * seeds * 60 * 1.1, 0.0, error)


def test_a_machine_that_is_faster_than_its_trials_gets_methods_back_first_and_then_seeds() -> None:
    case = pessimistic(seeds=3, methods=5)
    plan = case.choose()
    assert plan is not None
    assert plan.fit == Fit(60, 2, NAMES[:3])
    outcome = case.run(plan, Machine(case.speed, 1))
    fits = [stored.fit for stored in outcome.plans]
    assert fits[:3] == [Fit(60, 2, NAMES[:3]), Fit(60, 2, NAMES[:4]), Fit(60, 2, NAMES[:5])]
    assert outcome.fit == case.question.asked
    assert 0.85 <= outcome.used <= 1.0
    assert outcome.messages == [
        "there is time for cutmix as well",
        "there is time for ic-cutmix as well",
        "there is time for seed 3 of each method",
        "",
    ]


def test_less_than_85_percent_are_used_only_if_a_reason_is_given() -> None:
    unexplained = []
    explained = 0
    for case, plan in cases(error=0.08):
        outcome = case.run(plan, Machine(case.speed, case.lanes))
        explained += "% of the time is used: " in outcome.messages[-1]
        if not outcome.messages[-1]:
            unexplained.append(outcome.used)
    assert explained > 10
    assert min(unexplained) >= 0.84  # it is an estimate


def test_a_machine_that_becomes_slower_gets_no_further_seeds() -> None:
    case = pessimistic(seeds=6, methods=2, error=1.0)
    plan = case.choose()
    assert plan is not None
    assert plan.seeds == 6
    outcome = case.run(plan, Machine(case.speed, 1, lambda now: 2.0))
    assert outcome.fit.seeds == 3
    assert outcome.used <= 1.0
    assert outcome.messages[-1] == "runs are slower than the trials were: 3 instead of 6 seeds"


def test_two_seeds_are_trained_however_slow_the_machine_becomes() -> None:
    case = pessimistic(seeds=3, methods=2, error=1.0)
    plan = case.choose()
    assert plan is not None
    outcome = case.run(plan, Machine(case.speed, 1, lambda now: 5.0))
    assert outcome.fit.seeds == 2
    assert outcome.used > 1.5


def test_a_killed_comparison_resumes_its_plan_and_a_finished_one_trains_nothing_again() -> None:
    draw = random.Random(2)
    for case, plan in cases(error=0.3)[:40]:
        machine = Machine(case.speed, case.lanes)
        machine.kill_at = draw.uniform(0, case.seconds)
        killed = case.run(plan, machine)
        stored = killed.plans[-1]
        resumed = Machine(case.speed, case.lanes, finished=machine.finished)
        outcome = case.run(stored, resumed)
        assert set(resumed.finished) == set(case.recipes_of(outcome.fit))  # no run was for nothing
        assert outcome.fit.epochs == plan.epochs
        again = Machine(case.speed, case.lanes, finished=resumed.finished)
        repeated = case.run(outcome.plans[-1], again)
        assert repeated.fit == outcome.fit
        assert repeated.plans == [outcome.plans[-1]]
        assert again.finished == resumed.finished


def test_a_method_without_runs_is_expected_to_be_as_much_slower_than_planned_as_the_others_were() -> None:
    case = pessimistic(seeds=3, methods=4)
    plan = case.choose()
    assert plan is not None
    assert plan.epoch_seconds == dict.fromkeys(NAMES[:4], 2.0)
    machine = Machine(case.speed, 1)
    filler = Filler(case.question, plan, case.seconds, store=lambda plan: None, clock=machine.clock)
    runs = case.recipes_of(Fit(60, 1, ("erm", "mixup")))
    filler.begin(runs)
    assert filler.epoch_seconds() == plan.epoch_seconds
    for machine.now, recipe, epochs in [
        (3, runs[0], 1),
        (13, runs[0], 11),
        (20, runs[1], 0),
        (26, runs[1], 2),
    ]:
        filler.listen(recipe, RunProgress(epochs, 60, 1.0, None, 1.0, 0.0))
    # 10 s for 10 epochs, 6 s for 2: together 16 s where 24 s were planned.
    wanted = {"erm": 1.0, "mixup": 3.0, "ic-mixup": 4 / 3, "cutmix": 4 / 3}
    assert filler.epoch_seconds() == pytest.approx(wanted)
    # 58 epochs of mixup are left, the first of which has taken 2 s so far.
    machine.now = 28
    assert filler.expected_end([]) == pytest.approx(28 + 58 * 3 - 2 + SECONDS_AFTER)
    filler.end(runs[1].key)
    assert filler.expected_end([]) == pytest.approx(28 + 49 - 15 + SECONDS_AFTER)
