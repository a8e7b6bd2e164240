"""`icmixup paper --run-missing --budget`: only runs that end in time are started."""

from __future__ import annotations

from dataclasses import replace

import pytest

from icmixup.lab.paper.deadline import MEASURED_SECONDS, Deadline
from icmixup.lab.sweep.cost import work
from icmixup.lab.training.loop import RunProgress
from icmixup.lab.training.recipe import Recipe

SMALL, MIDDLE, LARGE = (
    replace(Recipe(method="mixup", model="resnet34"), fraction=share) for share in (0.1, 0.25, 1.0)
)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def progress(share: float) -> RunProgress:
    return RunProgress(200 * share, 200, 1.0, None, 1.0, 1.0)


@pytest.mark.parametrize("concurrent", [1, 3])
def test_runs_that_would_not_end_in_time_are_passed_over(concurrent: int) -> None:
    each = 1e-4
    needed = work(MIDDLE) * each * concurrent
    in_time, too_late = (
        Deadline([LARGE, MIDDLE, SMALL], seconds, concurrent, each, Clock())
        for seconds in (1.001 * needed, 0.999 * needed)
    )
    assert [in_time.more(), in_time.more(), in_time.more()] == [[MIDDLE], [SMALL], []]
    assert [too_late.more(), too_late.more()] == [[SMALL], []]
    assert in_time.waiting == [LARGE]


def test_later_only_smaller_runs_are_started() -> None:
    clock, each = Clock(), 1e-4
    deadline = Deadline(
        [LARGE, MIDDLE, SMALL, replace(SMALL, seed=1)], 2 * work(LARGE) * each, 1, each, clock
    )
    assert deadline.more() == [LARGE]
    clock.now = deadline.end - 1.5 * work(SMALL) * each
    assert deadline.more() == [SMALL]
    clock.now = deadline.end - 0.5 * work(SMALL) * each
    assert deadline.more() == []


def test_the_speed_of_this_session_replaces_that_of_earlier_results_and_its_start_does_not_count() -> None:
    clock = Clock()
    deadline = Deadline([SMALL, MIDDLE, LARGE], 1e9, 1, 1.0, clock)
    assert deadline.more() == [SMALL]
    clock.now += 500.0  # imports and kernels
    deadline.listen(SMALL, progress(0.01))
    clock.now += MEASURED_SECONDS - 1
    deadline.listen(SMALL, progress(0.5))
    assert deadline.measured() == 1.0
    clock.now += 1
    each = MEASURED_SECONDS / (0.49 * work(SMALL))
    assert deadline.measured() == pytest.approx(each)
    deadline.end = clock.now + 1.001 * each * work(MIDDLE)
    assert [deadline.more(), deadline.more()] == [[MIDDLE], []]


def test_on_a_gpu_that_finished_runs_have_left_a_run_is_expected_to_be_faster() -> None:
    """Three workers, of which two have nothing to do any more: the third has the GPU for itself."""
    clock, each = Clock(), 1e-4
    runs = [replace(SMALL, seed=seed) for seed in range(4)]
    gpu, cpu = (Deadline(runs, 1e9, 3, each, clock, on_gpu=shared) for shared in (True, False))
    for deadline in (gpu, cpu):
        assert [deadline.more() for _ in range(3)] == [[run] for run in runs[:3]]
        deadline.end = clock.now + 1.5 * work(SMALL) * each
        assert deadline.more() == []
        for run in runs[:3]:
            deadline.listen(run, progress(1.0))
    assert [gpu.more(), cpu.more()] == [[runs[3]], []]
