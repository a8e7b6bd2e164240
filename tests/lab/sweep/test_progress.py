"""What is seen of runs: bars in a terminal, lines in a log, nothing on standard output."""

from __future__ import annotations

import dataclasses
import io
import re

import pytest
from rich.console import Console

from icmixup.lab.sweep import progress
from icmixup.lab.sweep.progress import Display, duration
from icmixup.lab.training.loop import RunProgress
from icmixup.lab.training.recipe import QUICK, Recipe

PROGRESS = RunProgress(
    epoch=15.0, epochs=60, loss=1.2345, accuracy=81.26, images_per_second=12345.6, seconds_left=75.0
)


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=terminal, width=110, color_system=None), text


RUNS = [dataclasses.replace(QUICK, method=method, seed=3) for method in ("ic-mixup", "erm", "mixup")]


def row_of(recipe: Recipe, accuracy: float, loss: float) -> dict[str, object]:
    return {"key": recipe.key, "accuracy": accuracy, "loss": loss, "minutes": 0.1}


def watch(target: Console) -> None:
    """A run that was finished before, one that ends, and one that diverges."""
    with Display(RUNS, target, finished=RUNS[2:]) as display:
        display.finish(row_of(RUNS[2], 70.0, 0.25))
        display.update(RUNS[0], PROGRESS)
        display.finish(row_of(RUNS[0], 83.21, 0.5))
        display.update(RUNS[1], PROGRESS)
        display.fail(RUNS[1], "the loss became nan")


def test_a_log_gets_one_line_a_run():
    target, text = console(terminal=False)
    watch(target)
    first, second, third = text.getvalue().splitlines()
    assert first == "[1/3] mixup seed 3: accuracy 70.0 %, loss 0.250, finished before"
    pattern = r"\[2/3\] ic-mixup seed 3: accuracy 83\.2 %, loss 0\.500, 6\.0 s; about \d\.\d s left"
    assert re.fullmatch(pattern, second)
    assert third == "[3/3] erm seed 3: no result: the loss became nan"


def test_a_long_run_gives_a_sign_of_life_in_a_log(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    target, text = console(terminal=False)
    watch(target)
    wanted = "ic-mixup seed 3: epoch 15 of 60, loss 1.234, accuracy 81.3 %, 12,346 images/s, 1:15 left"
    assert wanted in text.getvalue().splitlines()


def test_a_terminal_sees_a_bar_over_all_and_one_for_each_run_under_way():
    target, text = console(terminal=True)
    with Display(RUNS, target) as display:
        display.update(RUNS[0], PROGRESS)
        display.update(RUNS[1], PROGRESS._replace(epoch=30.0))
        display.progress.refresh()
        overall, first, second = display.progress.tasks
        assert (overall.completed, overall.total) == (0.75, 3)
        display.finish(row_of(RUNS[0], 83.21, 0.5))
        assert len(display.progress.tasks) == 2
    assert [(bar.completed, bar.total) for bar in (first, second)] == [(15, 60), (30, 60)]
    shown = text.getvalue()
    for part in ("0 of 3 runs", "ic-mixup seed 3", "erm seed 3", "[1/3] ic-mixup seed 3"):
        assert part in shown
    for part in ("loss 1.234", "accuracy 81.3 %", "12,346 images/s", "1:15 left"):
        assert part in shown


def test_the_bar_over_all_is_not_shown_for_one_run():
    with Display(RUNS[:1], console(terminal=True)[0]) as display:
        assert not display.progress.tasks[0].visible


def test_a_terminal_keeps_the_line_of_every_run():
    target, text = console(terminal=True)
    watch(target)
    for part in ("[1/3] mixup seed 3", "[2/3] ic-mixup seed 3", "[3/3] erm seed 3: no result"):
        assert part in text.getvalue()


def test_the_time_left_counts_no_run_that_was_finished_before(monkeypatch: pytest.MonkeyPatch):
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    display = Display(RUNS, console(terminal=True)[0], finished=RUNS[2:])
    display.finish(row_of(RUNS[2], 70.0, 0.25))
    clock[0] += 10
    display.update(
        RUNS[0], PROGRESS._replace(epoch=1.0)
    )  # a sixtieth of a run in 10 s; 119 sixtieths are left
    assert display.left() == "about 19:50 left"


def test_runs_that_are_added_count_and_runs_that_are_dropped_do_not(monkeypatch: pytest.MonkeyPatch):
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    target, text = console(terminal=False)
    display = Display(RUNS[:2], target)
    clock[0] += 10
    display.update(RUNS[0], PROGRESS._replace(epoch=1.0))
    assert display.left() == "about 19:50 left"  # as above
    display.expect(RUNS)
    assert display.left() == "about 29:50 left"
    display.expect(RUNS, finished=RUNS)  # what a run takes is known from the beginning
    assert display.left() == "about 29:50 left"
    display.expect(RUNS[1:2])
    assert display.left() == "about 19:50 left"  # a run that has begun is not dropped
    display.expect([RUNS[0], RUNS[2]], finished=RUNS[2:])
    display.finish(row_of(RUNS[2], 70.0, 0.25))
    assert "[1/2] mixup seed 3: accuracy 70.0 %, loss 0.250, finished before" in text.getvalue()
    assert display.left() == "about 9:50 left"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (3.14, "3.1 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.7, "1:00"),
        (309, "5:09"),
        (5025, "1:23:45"),
    ],
)
def test_durations_read_like_a_clock(seconds: float, text: str):
    assert duration(seconds) == text
