"""--budget: what fits into the time, and in which order seeds, methods and epochs are given up."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from icmixup.lab.datasets import load_dataset
from icmixup.lab.datasets.subsets import DataSpec, Split, hold_out, subset_counts
from icmixup.lab.sweep import budget
from icmixup.lab.sweep.budget import (
    MARGIN,
    SECONDS_AFTER,
    Fit,
    Plan,
    Question,
    choose_fit,
    describe_fit,
    describe_use,
    fit_budget,
    fit_seconds,
    format_budget,
    keep_methods,
    larger_fits,
    makespan,
    parse_budget,
)
from icmixup.lab.sweep.speed import (
    MEASURING_SHARE,
    Passes,
    Speed,
    Timing,
    cost_of,
    mean_epoch,
    measure_speed,
    relative_error,
    split_overhead,
)
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.recipe import (
    FEWEST_EPOCHS,
    FEWEST_STEPS,
    QUICK,
    RECIPES,
    Recipe,
    change_epochs,
    fewest_epochs,
)
from icmixup.methods import METHODS

RECIPE = dataclasses.replace(QUICK, dataset="digits", per_class=5, batch_size=10, epochs=60, eval_every=60)
NAMES = ("erm", "mixup", "ic-mixup", "cutmix")
# 2 s for each run and 0.5 s for each epoch: 32 s for a run of 60 epochs.
SPEED = Speed(0.0, 2.0, dict.fromkeys(METHODS, 0.5))


def ask(methods: Sequence[str] = NAMES, seeds: int = 3, floor: int = 20, baseline: str = "mixup") -> Question:
    return Question(RECIPE, tuple(methods), seeds, baseline, floor)


@pytest.fixture
def execution(tmp_path: Path) -> Execution:
    data = load_dataset(DataSpec("digits", per_class=5), tmp_path)
    return Execution(out=tmp_path, data_dir=tmp_path, device="cpu", dataset=data)


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [
        (32.0 * 12, Fit(60, 3, NAMES)),  # all that was asked for
        (32.0 * 12 - 0.1, Fit(60, 2, NAMES)),  # seeds are dropped first
        (32.0 * 8, Fit(60, 2, NAMES)),
        (32.0 * 8 - 0.1, Fit(60, 2, ("erm", "mixup", "ic-mixup"))),  # then methods, from the end
        (32.0 * 6, Fit(60, 2, ("erm", "mixup", "ic-mixup"))),
        (32.0 * 6 - 0.1, Fit(60, 2, ("mixup", "ic-mixup"))),
        (32.0 * 4, Fit(60, 2, ("mixup", "ic-mixup"))),
        (32.0 * 4 - 0.1, Fit(59, 2, ("mixup", "ic-mixup"))),  # then epochs
        (4 * (2 + 21 * 0.5), Fit(21, 2, ("mixup", "ic-mixup"))),
        (4 * (2 + 20 * 0.5), Fit(20, 2, ("mixup", "ic-mixup"))),
        (4 * (2 + 20 * 0.5) - 0.1, None),  # below the floor nothing is trained
        (0.0, None),
        (-5.0, None),
    ],
)
def test_seeds_are_dropped_first_then_methods_then_epochs_down_to_the_floor(
    seconds: float, wanted: Fit | None
) -> None:
    assert choose_fit(ask(), seconds, SPEED, lanes=1) == wanted


def test_more_time_never_gives_more_epochs_than_the_recipe_has() -> None:
    assert choose_fit(ask(), 1e9, SPEED, lanes=1) == ask().asked
    assert ask().asked.epochs == RECIPE.epochs


@pytest.mark.parametrize("lanes", [1, 2, 5])
def test_what_is_chosen_fits_and_the_next_better_choice_would_not(lanes: int) -> None:
    for seconds in range(10, 500, 7):
        fit = choose_fit(ask(), seconds, SPEED, lanes)
        better = [
            Fit(60, seeds, methods)
            for seeds, methods in [(3, NAMES), (2, NAMES), (2, NAMES[:3]), (2, NAMES[1:3])]
        ] + [Fit(epochs, 2, NAMES[1:3]) for epochs in range(59, 19, -1)]
        if fit is not None:
            assert fit_seconds(fit, RECIPE, SPEED, lanes) <= seconds
            better = better[: better.index(fit)]
        assert all(fit_seconds(other, RECIPE, SPEED, lanes) > seconds for other in better)


def test_time_is_that_of_methods_times_seeds() -> None:
    for methods, seeds in itertools.product((1, 2, 4), (1, 2, 5)):
        assert fit_seconds(Fit(60, seeds, NAMES[:methods]), RECIPE, SPEED, 1) == methods * seeds * 32.0


def test_every_fold_of_cross_validation_is_a_run() -> None:
    folded = dataclasses.replace(RECIPE, folds=3)
    assert fit_seconds(Fit(60, 2, ("erm",)), folded, SPEED, 1) == 3 * 2 * 32.0


def test_evaluations_and_the_start_of_processes_count() -> None:
    recipe = dataclasses.replace(RECIPE, eval_every=25)
    speed = Speed(7.0, 2.0, {"erm": 0.5}, evaluation=0.2)
    # 60 epochs and 3 evaluations (after 25, 50 and 60) of 0.2 epochs each.
    assert fit_seconds(Fit(60, 2, ("erm",)), recipe, speed, 1) == pytest.approx(7 + 2 * (2 + 0.5 * 60.6))


def test_concurrent_runs_end_when_the_last_of_them_does() -> None:
    assert makespan([3.0, 3.0, 3.0], 2) == 6.0
    assert makespan([1.0, 4.0, 2.0], 2) == 4.0  # the third follows the first
    assert makespan([4.0, 1.0, 2.0, 2.0], 2) == 5.0
    assert makespan([2.0], 8) == 2.0
    assert makespan([2.0, 2.0], 2, busy=[3.0]) == 4.0  # both on the lane that is free
    assert makespan([], 2, busy=[3.0]) == 3.0


def test_methods_of_different_cost_take_different_time() -> None:
    speed = Speed(0.0, 0.0, {"erm": 1.0, "mixup": 1.0, "regmixup": 2.0})
    question = Question(RECIPE, ("erm", "mixup", "regmixup"), 2, "mixup", 20)
    assert choose_fit(question, 480.0, speed, 1) == Fit(60, 2, ("erm", "mixup", "regmixup"))
    assert choose_fit(question, 479.0, speed, 1) == Fit(60, 2, ("erm", "mixup"))


def test_a_method_that_is_too_expensive_leaves_its_time_to_seeds_of_the_others() -> None:
    speed = Speed(0.0, 0.0, {"erm": 1.0, "mixup": 1.0, "regmixup": 10.0})
    question = Question(RECIPE, ("erm", "mixup", "regmixup"), 4, "mixup", 20)
    # Two seeds of all methods take 1,440 s, and each seed of the first two takes 120 s.
    assert choose_fit(question, 1440.0, speed, 1) == Fit(60, 2, ("erm", "mixup", "regmixup"))
    assert choose_fit(question, 1439.0, speed, 1) == Fit(60, 4, ("erm", "mixup"))
    assert choose_fit(question, 360.0, speed, 1) == Fit(60, 3, ("erm", "mixup"))
    assert choose_fit(question, 359.0, speed, 1) == Fit(60, 2, ("erm", "mixup"))


def test_the_baseline_is_kept_wherever_it_is_in_the_list() -> None:
    assert keep_methods(NAMES, 2, "cutmix") == ("ic-mixup", "cutmix")
    assert keep_methods(NAMES, 3, "cutmix") == ("erm", "ic-mixup", "cutmix")
    assert keep_methods(("erm", "mixup", "cutmix"), 2, "mixup") == ("erm", "mixup")
    assert keep_methods(NAMES, 3, "erm") == ("erm", "mixup", "ic-mixup")
    assert keep_methods(NAMES, 1, "ic-mixup") == ("ic-mixup",)
    assert keep_methods(NAMES, 4, "erm") == NAMES


def test_one_seed_and_one_method_are_enough_if_no_more_was_asked_for() -> None:
    assert choose_fit(ask(["erm"], 1, baseline="erm"), 12.0, SPEED, 1) == Fit(20, 1, ("erm",))
    assert choose_fit(ask(["erm"], 1, baseline="erm"), 11.9, SPEED, 1) is None


@pytest.fixture
def known_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "measure_speed", lambda *_: SPEED)


@pytest.mark.usefixtures("known_speed")
def test_a_reserve_is_kept_and_time_for_the_report(execution: Execution) -> None:
    # Measuring took next to no time here.
    enough = 384.0 / MARGIN + SECONDS_AFTER
    assert fit_budget(ask(), enough + 1, execution)[0].fit == ask().asked
    assert fit_budget(ask(), enough - 1, execution)[0].seeds == 2
    assert fit_budget(ask(), enough + 11, execution, elapsed=12.0)[0].seeds == 2


@pytest.mark.usefixtures("known_speed")
def test_there_are_not_more_workers_than_runs(execution: Execution) -> None:
    many = dataclasses.replace(execution, concurrent=16)
    assert fit_budget(ask(), 70.0, many)[0] == Plan(60, 3, NAMES, 12, 2.0, dict.fromkeys(NAMES, 0.5))
    assert fit_budget(ask(), 32.0, many)[0].workers == 4


@pytest.mark.usefixtures("known_speed")
def test_what_cannot_be_done_is_refused_with_a_budget_that_is_enough(execution: Execution) -> None:
    # 2 methods x 2 seeds x (2 s + 20 x 0.5 s) are 48 s.
    with pytest.raises(
        ValueError, match=r"mixup and ic-mixup with 2 seeds and 20 epochs.*about 48 s.*--budget 1m or"
    ):
        fit_budget(ask(), 50.0, execution)
    assert not (execution.out / "budgets.json").exists()
    assert fit_budget(ask(), parse_budget("1m"), execution)[0].epochs >= 20


def test_a_stored_answer_is_used_and_measured_again_on_request(
    execution: Execution, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "measure_speed", lambda *_: SPEED)
    first, left = fit_budget(ask(), 300.0, execution)
    monkeypatch.setattr(budget, "measure_speed", lambda *_: SPEED._replace(start=20.0))
    assert fit_budget(ask(), 300.0, execution) == (first, 300.0)
    assert left <= 300.0
    assert fit_budget(ask(), 300.0, execution, remeasure=True)[0] != first
    assert len(json.loads((execution.out / "budgets.json").read_text())) == 1
    fit_budget(ask(seeds=4), 300.0, execution)  # another question
    assert len(json.loads((execution.out / "budgets.json").read_text())) == 2


def test_what_was_dropped_is_said_in_words() -> None:
    asked = Fit(60, 3, NAMES)
    assert describe_fit(asked, asked) == ""
    assert describe_fit(asked, Fit(60, 2, NAMES)) == "2 of 3 seeds"
    assert describe_fit(asked, Fit(25, 2, ("erm", "mixup"))) == (
        "2 of 3 seeds, 2 of 4 methods (without ic-mixup, cutmix), 25 of 60 epochs"
    )


def test_what_can_be_added_is_the_method_dropped_last_or_a_seed_but_not_more_than_asked() -> None:
    fits = list(larger_fits(ask(), Fit(60, 2, ("erm", "mixup"))))
    assert fits == [Fit(60, 2, ("erm", "mixup", "ic-mixup")), Fit(60, 3, ("erm", "mixup"))]
    assert list(larger_fits(ask(), Fit(60, 3, NAMES))) == []


def test_time_that_stays_unused_is_explained() -> None:
    fit = Fit(60, 2, ("erm", "mixup", "ic-mixup"))
    method, seed = fit._replace(methods=NAMES), fit._replace(seeds=3)
    assert describe_use(fit, 86.0, [(method, 120.0)], 100.0) == ""
    assert describe_use(fit, 140.0, [(method, 224.0), (seed, 206.0)], 200.0) == (
        "about 70 % of the time is used: cutmix as well would take 112 % and seed 3 of each method would "
        "take 103 %"
    )
    assert describe_use(ask().asked, 70.0, [], 100.0) == (
        "about 70 % of the time is used: all that was asked for fits"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1, "5s"),
        (60, "1m"),
        (61, "1m5s"),
        (120, "2m"),
        (121, "3m"),
        (3600, "1h"),
        (3601, "1h5m"),
        (9000, "2h30m"),
    ],
)
def test_a_suggested_budget_is_rounded_up(seconds: float, text: str) -> None:
    assert format_budget(seconds) == text
    assert parse_budget(text) >= seconds


def test_every_recipe_states_its_fewest_epochs_and_they_are_below_its_own() -> None:
    assert FEWEST_EPOCHS.keys() == RECIPES.keys()
    for name, recipe in RECIPES.items():
        assert 1 < fewest_epochs(recipe, name, 50_000) == FEWEST_EPOCHS[name] < recipe.epochs


@pytest.mark.parametrize(
    ("images", "epochs"), [(64 * 15, 20), (64 * 14, 22), (64 * 6, 50), (64 * 5, 60), (1, 60)]
)
def test_few_images_need_more_epochs_up_to_those_of_the_recipe(images: int, epochs: int) -> None:
    assert FEWEST_STEPS == 300
    assert fewest_epochs(QUICK, "quick", images) == epochs


def test_a_shorter_recipe_keeps_the_shape_of_its_schedule() -> None:
    recipe = Recipe(epochs=200, lr_drops=(50, 100, 150), warmup_epochs=10, mix_off_epoch=180)
    short = change_epochs(recipe, 100)
    assert (short.epochs, short.lr_drops, short.warmup_epochs, short.mix_off_epoch) == (
        100,
        (25, 50, 75),
        5,
        90,
    )
    assert change_epochs(recipe, 200) == recipe
    assert change_epochs(Recipe(), 1).lr_drops is None


def test_methods_that_cost_the_same_are_measured_once() -> None:
    costs = {name: cost_of(method) for name, method in METHODS.items()}
    assert costs["mixup"] == costs["cutmix"] == costs["remix"] == costs["balanced-mixup"]
    assert costs["ic-mixup"] == costs["ic-cutmix"]
    distinct = ("erm", "mixup", "ic-mixup", "regmixup", "ic-regmixup", "manifold", "ic-balanced-mixup")
    assert len({costs[name] for name in distinct}) == len(distinct)


def test_the_mean_over_trials_is_that_of_their_time() -> None:
    def trial(seconds: float) -> Timing:
        return Timing([(3.0, 1.0), (3.0 + 2 * seconds, 3.0)])

    assert mean_epoch([trial(1.0), trial(2.0)]) == 1.5


def test_the_error_of_a_mean_is_unknown_from_two_samples_and_shrinks_with_passes() -> None:
    assert relative_error([1.0, 1.0], 2) == math.inf
    assert relative_error([1.0, 1.0, 1.0], 3) == 0.0
    assert relative_error([0.9, 1.1, 0.9, 1.1], 4) == pytest.approx(0.1155 / 2, abs=1e-4)
    assert relative_error([9.0, 11.0, 9.0, 11.0], 4) == pytest.approx(0.1155 / 2, abs=1e-4)


class Passing:
    """Simulated trials: each lane trains the trials of a pass in turn, each for one second."""

    def __init__(self, seconds: float, slower: Sequence[float], lanes: int = 2) -> None:
        self.now = 0.0
        self.passes = Passes(RECIPE, ("erm", "mixup"), seconds, lanes, clock=lambda: self.now)
        self.slower = slower
        self.lanes = lanes

    def run(self) -> int:
        """The number of passes until there are enough."""
        while added := self.passes.more():
            factor = self.slower[self.passes.number - 1]
            for first in range(0, len(added), self.lanes):
                for share in (0.5, 1.0):
                    self.now += 0.5
                    for recipe in added[first : first + self.lanes]:
                        self.passes.trials[recipe].add(self.now, share / factor)
        return self.passes.number


def test_two_passes_that_agree_are_enough_and_others_are_repeated() -> None:
    assert Passing(1000.0, [1.0, 1.0]).run() == 2
    assert Passing(1000.0, [1.0, 1.02]).run() == 2
    assert Passing(1000.0, [1.0, 1.3, *[1.1] * 50]).run() > 3


def test_one_worker_needs_three_passes_to_know_how_much_they_vary() -> None:
    assert Passing(1000.0, [1.0] * 5, lanes=1).run() == 3


def test_no_pass_is_added_that_would_exceed_the_time_for_measuring() -> None:
    # A pass takes 2 s.
    disagree = [1.0, 2.0] * 50
    assert Passing(6.0 / MEASURING_SHARE, disagree).run() == 3
    assert Passing(5.9 / MEASURING_SHARE, disagree).run() == 2
    assert Passing(0.0, disagree).run() == 1


def test_a_trial_that_reported_nothing_took_from_the_end_of_an_earlier_one_to_its_own() -> None:
    machine = Passing(0.0, [1.0], lanes=1)
    first, second = machine.passes.more()
    machine.now = 4.0
    machine.passes.end(first, "diverged")
    machine.now = 7.0
    machine.passes.end(second, "diverged")
    assert [trial.epoch for trial in machine.passes.trials.values()] == [4.0, 3.0]


def test_the_time_of_an_epoch_is_that_between_the_first_and_the_last_report() -> None:
    trial = Timing([(3.0, 0.5), (5.0, 1.5), (9.0, 3.5)])
    assert trial.epoch == 2.0  # 6 s for 3 epochs
    assert trial.started == 2.0  # half an epoch before the first report
    assert Timing([(4.0, 2.0)]).epoch == 2.0


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_time_besides_epochs_is_divided_into_that_of_workers_and_of_runs(lanes: int) -> None:
    # Workers are ready after 5 s and end in 2 s; each has three trials of 0.7 s before and 0.3 s after 3 s of
    # epochs.
    def trial(start: float) -> Timing:
        return Timing([(start + 1.7, 1.0), (start + 3.7, 3.0)], ended=start + 4.0)

    trials = [trial(start) for start in (5.0, 9.0, 13.0) for _ in range(lanes)]
    assert split_overhead(trials, wall=19.0, lanes=lanes) == pytest.approx((7.0, 1.0))


@pytest.mark.parametrize("lanes", [1, 2])
def test_speed_is_measured_with_real_runs_that_leave_nothing_behind(lanes: int, execution: Execution) -> None:
    execution = dataclasses.replace(execution, concurrent=lanes, threads=1)
    speed = measure_speed(RECIPE, ("erm", "mixup"), 1.0, execution)
    assert speed.epoch.keys() == {"erm", "mixup"}
    assert all(0 < seconds < 60 for seconds in speed.epoch.values())
    assert (speed.pool > 0) == (lanes > 1)
    assert speed.evaluation == pytest.approx(len(execution.dataset.test) / 150)  # type: ignore[union-attr]
    assert list(execution.out.iterdir()) == []


def test_a_trial_that_diverges_at_once_is_left_to_the_run_to_report(execution: Execution) -> None:
    speed = measure_speed(dataclasses.replace(RECIPE, lr=1e30), ("erm",), 1.0, execution)
    assert speed.epoch["erm"] > 0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("5m", 300), ("1h", 3600), ("1h30m", 5400), ("1h1m1s", 3661), ("1.5m", 90), (" 2M ", 120)],
)
def test_a_duration_is_read_in_hours_minutes_and_seconds(text: str, seconds: float) -> None:
    assert parse_budget(text) == seconds


def split_of(counts: Sequence[int]) -> Split:
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return Split(torch.zeros(len(labels), 1, 2, 2, dtype=torch.uint8), labels)


def test_a_class_of_exactly_two_images_keeps_one_and_is_tested_on_the_other() -> None:
    train, test = hold_out(split_of([2, 9]), ["a", "b"], parts=5)
    assert torch.bincount(train.labels).tolist() == [1, 7]
    assert torch.bincount(test.labels).tolist() == [1, 2]
    with pytest.raises(ValueError, match="class 'a' must have at least 2 images, got 1"):
        hold_out(split_of([1, 9]), ["a", "b"], parts=5)


@pytest.mark.parametrize(("per_class", "allowed"), [(0, False), (1, True), (3, True), (4, False)])
def test_images_per_class_are_from_one_to_the_size_of_the_smallest_class(
    per_class: int, allowed: bool
) -> None:
    counts = torch.tensor([3, 8])
    if allowed:
        assert subset_counts(counts, per_class=per_class).tolist() == [per_class] * 2
    else:
        with pytest.raises(ValueError, match=f"per_class must be from 1 to 3, got {per_class}"):
            subset_counts(counts, per_class=per_class)


def test_one_image_per_class_is_a_dataset_of_as_many_images_as_classes(tmp_path: Path) -> None:
    data = load_dataset(DataSpec("digits", per_class=1), tmp_path)
    assert data.class_counts.tolist() == [1] * 10
    assert subset_counts(torch.tensor([1, 1]), fraction=0.01).tolist() == [1, 1]


def test_the_long_tail_ends_with_exactly_one_image_where_the_factor_allows_one() -> None:
    assert subset_counts(torch.tensor([100, 100, 100]), imbalance=0.01).tolist() == [100, 10, 1]
    with pytest.raises(ValueError, match="leaves no image"):
        subset_counts(torch.tensor([99, 99, 99]), imbalance=0.01)
