"""What is seen of runs: bars in a terminal, lines in a log, nothing on standard output."""

from __future__ import annotations

import dataclasses
import io
import re

import pytest
from rich.console import Console

from icmixup.lab import progress
from icmixup.lab.progress import BarWatcher, LineWatcher, Watcher, duration, make_watcher
from icmixup.lab.recipe import QUICK
from icmixup.lab.train import Beat

BEAT = Beat(epoch=15.0, epochs=60, loss=1.2345, accuracy=81.26, images_per_second=12345.6, seconds_left=75.0)


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=terminal, width=110, color_system=None), text


def watch(watcher: Watcher) -> None:
    """A run, one that diverged, and one that was finished before."""
    with watcher:
        watcher.start(dataclasses.replace(QUICK, method="ic-mixup", seed=3))
        watcher.beat(BEAT)
        watcher.finish({"accuracy": 83.21, "loss": 0.5})
        watcher.start(dataclasses.replace(QUICK, method="erm", seed=3))
        watcher.beat(BEAT)
        watcher.diverge(QUICK, "the loss became nan")
        watcher.start(dataclasses.replace(QUICK, method="mixup", seed=3))
        watcher.finish({"accuracy": 70.0, "loss": 0.25})


def test_a_log_gets_one_line_a_run():
    target, text = console(terminal=False)
    watch(make_watcher(12, target))
    lines = text.getvalue().splitlines()
    assert re.fullmatch(r"\[ 1/12\] ic-mixup seed 3: accuracy 83\.2 %, loss 0\.500, \d\.\d s", lines[0])
    assert lines[1] == "[ 2/12] erm seed 3: diverged; the loss became nan"
    assert lines[2] == "[ 3/12] mixup seed 3: accuracy 70.0 %, loss 0.250, done before"
    assert len(lines) == 3


def test_a_long_run_gives_a_sign_of_life_in_a_log(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    target, text = console(terminal=False)
    watch(LineWatcher(3, target))
    wanted = "ic-mixup seed 3: epoch 15.0 of 60, loss 1.234, accuracy 81.3 %, 12,346 images/s, 1:15 left"
    assert wanted in text.getvalue().splitlines()


def test_a_terminal_sees_both_bars_with_loss_accuracy_speed_and_time_left():
    target, text = console(terminal=True)
    watcher = make_watcher(3, target)
    assert isinstance(watcher, BarWatcher)
    with watcher:
        watcher.start(dataclasses.replace(QUICK, method="ic-mixup", seed=3))
        watcher.beat(BEAT)
        watcher.progress.refresh()
        overall, current = watcher.progress.tasks
    assert (overall.completed, overall.total) == (0.25, 3)
    assert (current.completed, current.total) == (15, 60)
    shown = text.getvalue()
    assert "run 1 of 3" in shown
    assert "ic-mixup seed 3" in shown
    for part in ("loss 1.234", "accuracy 81.3 %", "12,346 images/s", "1:15 left"):
        assert part in shown


def test_a_terminal_keeps_the_line_of_every_run():
    target, text = console(terminal=True)
    watch(make_watcher(3, target))
    for part in ("[1/3] ic-mixup seed 3", "[2/3] erm seed 3: diverged", "[3/3] mixup seed 3"):
        assert part in text.getvalue()


def test_the_time_left_counts_no_run_that_was_finished_before(monkeypatch: pytest.MonkeyPatch):
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    watcher = BarWatcher(4, console(terminal=True)[0])
    watcher.start(QUICK)
    watcher.finish({"accuracy": 70.0, "loss": 0.25})
    watcher.start(QUICK)
    clock[0] += 10
    watcher.beat(BEAT)  # a quarter of a run in 10 s; two and three quarters are left
    assert watcher.progress.tasks[0].fields["detail"] == "1 done, 1:50 left"


def test_a_watcher_of_nothing_takes_everything(capfd: pytest.CaptureFixture[str]):
    watch(Watcher())
    assert capfd.readouterr() == ("", "")


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
