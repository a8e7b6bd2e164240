"""Runs end with the numbers of train() alone, wherever they run and whatever is killed meanwhile."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch

from icmixup.lab import sweep
from icmixup.lab.sweep import local as workers
from icmixup.lab.sweep import ray as engine
from icmixup.lab.sweep import run_recipes
from icmixup.lab.sweep import signals as stop_signals
from icmixup.lab.sweep.local import run_in_threads
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.lock import lock_folder
from icmixup.lab.training.loop import RunProgress, train
from icmixup.lab.training.recipe import QUICK, Recipe
from icmixup.lab.training.step import capture_streams

TINY = dataclasses.replace(QUICK, dataset="digits", per_class=12, epochs=3, batch_size=40, eval_every=2)
SWEEP = [
    dataclasses.replace(TINY, method="erm"),
    dataclasses.replace(TINY, method="ic-mixup"),
    dataclasses.replace(TINY, method="ic-mixup", seed=1, per_class=10),
]
DIVERGES = dataclasses.replace(TINY, method="mixup", lr=1e30)
# What differs between two runs of one recipe: times, and how many ran concurrently.
CLOCKS = ("minutes", "images_per_second", "memory_mb", "at_once")
Row = dict[str, Any]
RAY_SECONDS = 480  # about 30 on two idle cores


def test_a_trial_ends_with_the_first_report_after_its_time_and_never_before_three() -> None:
    progress = RunProgress(0.5, 1, 0.0, None, 1.0, 1.0)
    heard: list[RunProgress] = []
    listen = workers.end_after(0.0, heard.append)
    listen(progress)
    listen(progress)
    with pytest.raises(workers.TrialEnded):
        listen(progress)
    assert heard == [progress] * 3  # the last one too
    endless = workers.end_after(3600.0, None)
    for _ in range(10):
        endless(progress)


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """A TimeoutError in the midst of whatever takes longer."""

    def complain(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, complain)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def numbers(rows: list[Row]) -> list[Row]:
    return [{name: value for name, value in row.items() if name not in CLOCKS} for row in rows]


def longer(recipes: list[Recipe], epochs: int) -> list[Recipe]:
    return [dataclasses.replace(recipe, epochs=epochs, eval_every=epochs) for recipe in recipes]


def run_alone(recipes: list[Recipe], root: Path) -> list[Row]:
    return numbers([train(recipe, Execution(out=root, data_dir=root)) for recipe in recipes])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """The rows of the sweep, one call of train() after the other."""
    return run_alone(SWEEP, tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("number", [1, 2])
def test_rows_are_those_of_train_and_a_run_that_diverges_is_reported(
    number: int, alone: list[Row], tmp_path: Path
) -> None:
    """One after the other in this process, and two concurrently in their own processes."""
    reported: dict[Recipe, list[float]] = defaultdict(list)
    failures: dict[Recipe, str] = {}
    rows: list[Row] = []
    found = run_recipes(
        [DIVERGES, *SWEEP],
        Execution(out=tmp_path, data_dir=tmp_path, workers=number),
        on_row=rows.append,
        on_progress=lambda recipe, progress: reported[recipe].append(progress.epoch),
        on_failure=failures.__setitem__,
    )
    assert numbers(found) == alone
    assert sorted(row["key"] for row in rows) == sorted(row["key"] for row in found)
    assert [reported[recipe][-1] for recipe in SWEEP] == [3, 3, 3]
    assert list(failures) == [DIVERGES]
    assert "of epoch 1 of" in failures[DIVERGES]


def test_threads_of_one_process_come_to_the_same_rows(alone: list[Row], tmp_path: Path) -> None:
    """As runs do that share a GPU."""
    failures: dict[Recipe, str] = {}
    reported: dict[Recipe, list[float]] = defaultdict(list)
    report = workers.Collector(
        {}, None, lambda recipe, progress: reported[recipe].append(progress.epoch), failures.__setitem__
    )
    run_in_threads([DIVERGES, *SWEEP], Execution(out=tmp_path, data_dir=tmp_path, device="cpu"), 2, report)
    assert numbers([report.rows[recipe] for recipe in SWEEP]) == alone
    assert [reported[recipe] for recipe in SWEEP] == [[1, 2, 3]] * 3
    assert {row["at_once"] for row in report.rows.values()} == {2}
    assert list(failures) == [DIVERGES]


STARTS_THREADS = """
import sys
from pathlib import Path

from icmixup.lab.sweep import local
from icmixup.lab.training.execution import Execution

assert "torch._dynamo" not in sys.modules  # otherwise this shows nothing


def work(pool, thread):
    imported = [name in sys.modules for name in ("torch._dynamo", "torch._inductor")]
    pool.messages.put(local.Message(thread, None, SystemExit(str(imported))))


local.ThreadPool.work = work
collector = local.Collector({}, None, None, lambda *_: None)
local.run_in_threads(["a", "b"], Execution(out=Path("."), data_dir=Path("."), device="cpu"), 2, collector)
"""


def test_threads_start_after_the_compiler_is_imported_which_two_threads_cannot_do_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", STARTS_THREADS], capture_output=True, text=True)
    assert done.stderr.strip() == "[True, True]"


def test_an_error_in_a_thread_is_raised_here_and_ends_the_others_at_their_next_progress_report(
    tmp_path: Path,
) -> None:
    missing = dataclasses.replace(SWEEP[0], dataset="no/such/folder")
    endless = longer(SWEEP, 10_000)
    before = threading.active_count()
    report = workers.Collector({}, None, None, lambda *_: None)
    with time_limit(60), pytest.raises(ValueError, match="no dataset or folder 'no/such/folder'"):
        run_in_threads(
            [endless[0], missing, *endless[1:]],
            Execution(out=tmp_path, data_dir=tmp_path, device="cpu"),
            2,
            report,
        )
    assert threading.active_count() == before
    assert report.rows == {}


def test_an_interrupt_ends_the_threads_too_and_nothing_is_lost(tmp_path: Path) -> None:
    """However long ago the last checkpoint was: a run that is stopped writes one first."""
    recipes = longer(SWEEP[:2], 40)
    expected = run_alone(recipes, tmp_path / "alone")
    latest: dict[Recipe, float] = {}
    before = threading.active_count()

    def interrupt(recipe: Recipe, progress: RunProgress) -> None:
        latest[recipe] = progress.epoch
        if len(latest) == 2 and min(latest.values()) >= 3:
            raise KeyboardInterrupt

    execution = Execution(out=tmp_path / "threads", data_dir=tmp_path, device="cpu", checkpoint_seconds=3600)
    with time_limit(60), pytest.raises(KeyboardInterrupt):
        run_in_threads(recipes, execution, 2, workers.Collector({}, None, interrupt, lambda *_: None))
    assert threading.active_count() == before
    after: dict[Recipe, list[float]] = defaultdict(list)
    found = workers.Collector(
        {}, None, lambda run, progress: after[run].append(progress.epoch), lambda *_: None
    )
    run_in_threads(recipes, execution, 2, found)
    # int: on a busy machine there are reports within an epoch, which is then trained again.
    assert all(after[recipe][0] > int(latest[recipe]) for recipe in recipes)
    assert numbers([found.rows[recipe] for recipe in recipes]) == expected


def test_an_interrupt_before_all_threads_have_started_ends_those_that_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, start = threading.active_count(), threading.Thread.start

    def start_one(thread: threading.Thread) -> None:
        if thread.name != "run 0":
            raise KeyboardInterrupt
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    execution = Execution(out=tmp_path, data_dir=tmp_path, device="cpu")
    with time_limit(60), pytest.raises(KeyboardInterrupt):
        run_in_threads(SWEEP, execution, 3, workers.Collector({}, None, None, lambda *_: None))
    assert threading.active_count() == before


def test_a_long_wait_for_threads_is_explained(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "SILENT_SECONDS", 0.1)
    threads = [threading.Thread(target=time.sleep, args=(seconds,)) for seconds in (0.0, 0.5)]
    for thread in threads:
        thread.start()
    workers.join_threads(threads)
    assert not any(thread.is_alive() for thread in threads)
    expected = f"waiting for 1 run to finish .* kill -KILL {os.getpid()}\n"
    assert re.fullmatch(expected, capsys.readouterr().err)
    workers.join_threads(threads)
    assert capsys.readouterr().err == ""


def stop_handlers() -> list[object]:
    return [signal.getsignal(number) for number in stop_signals.STOP_SIGNALS]


def raise_all() -> None:
    for number in stop_signals.STOP_SIGNALS:
        signal.raise_signal(number)


@pytest.fixture
def _all_interrupt() -> Iterator[None]:
    """Every signal raises KeyboardInterrupt, as in a command."""
    before = [
        (number, signal.signal(number, signal.default_int_handler)) for number in stop_signals.STOP_SIGNALS
    ]
    yield
    for number, handler in before:
        signal.signal(number, handler)


@pytest.mark.usefixtures("_all_interrupt")
@pytest.mark.parametrize("number", stop_signals.STOP_SIGNALS)
def test_a_signal_interrupts_runs_once_and_their_end_never(number: signal.Signals) -> None:
    """Also on the way out of the runs, where one that trains in this thread writes its checkpoint."""
    before, done = stop_handlers(), []

    def run() -> None:
        try:
            signal.raise_signal(number)
        finally:
            raise_all()
            done.append("run")

    def end() -> None:
        raise_all()
        done.append("end")

    with pytest.raises(KeyboardInterrupt):
        stop_signals.run_and_end(run, end)
    assert done == ["run", "end"]
    assert stop_handlers() == before


@pytest.mark.usefixtures("_all_interrupt")
def test_an_error_or_no_error_before_the_end_leaves_the_signals_as_they_were() -> None:
    before, done = stop_handlers(), []
    stop_signals.run_and_end(lambda: None, lambda: done.append("end"))
    assert stop_handlers() == before
    with pytest.raises(ZeroDivisionError):
        stop_signals.run_and_end(lambda: 1 / 0, lambda: done.append("end"))
    assert stop_handlers() == before
    with pytest.raises(ZeroDivisionError):
        stop_signals.run_and_end(lambda: None, lambda: 1 / 0)
    assert stop_handlers() == before
    assert done == ["end", "end"]


@pytest.mark.usefixtures("_all_interrupt")
@pytest.mark.parametrize("run", [lambda: None, lambda: 1 / 0], ids=["no error", "an error"])
def test_a_first_signal_at_the_end_is_not_lost(run: Callable[[], None]) -> None:
    done = []

    def end() -> None:
        raise_all()
        done.append("end")

    with pytest.raises(KeyboardInterrupt):
        stop_signals.run_and_end(run, end)
    assert done == ["end"]


@pytest.mark.usefixtures("_all_interrupt")
def test_an_interrupt_between_the_runs_and_their_end_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_signals, "STOP_SECONDS", 0.0)
    hold, done = stop_signals.StopSignals.hold, []

    def interrupted_hold(signals: stop_signals.StopSignals) -> None:
        if not signals.interrupted:
            signal.raise_signal(signal.SIGINT)
        hold(signals)

    def end() -> None:
        raise_all()
        done.append("end")

    monkeypatch.setattr(stop_signals.StopSignals, "hold", interrupted_hold)
    with pytest.raises(KeyboardInterrupt):
        stop_signals.run_and_end(lambda: None, end)
    assert done == ["end"]


@pytest.mark.usefixtures("_all_interrupt")
def test_runs_that_go_on_after_an_interrupt_can_be_interrupted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first may come where Python ignores errors, for example in __del__."""
    monkeypatch.setattr(stop_signals, "STOP_SECONDS", 0.5)
    interrupts = []

    def run() -> None:
        for wait in (0.0, 0.0, 0.6):
            time.sleep(wait)
            try:
                raise_all()
            except KeyboardInterrupt:
                interrupts.append(wait)

    stop_signals.run_and_end(run)
    assert interrupts == [0.0, 0.6]


def test_a_handler_that_does_not_interrupt_gets_every_signal() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        stop_signals.run_and_end(
            lambda: [signal.raise_signal(signal.SIGINT) for _ in range(3)],
            lambda: signal.raise_signal(signal.SIGINT),
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT] * 4


def test_signals_that_are_ignored_stay_ignored() -> None:
    """nohup ignores SIGHUP."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        stop_signals.run_and_end(lambda: signal.raise_signal(signal.SIGINT))
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_runs_in_threads_can_be_started_from_any_thread(alone: list[Row], tmp_path: Path) -> None:
    """Where no signal handler can be set."""
    report = workers.Collector({}, None, None, lambda *_: None)
    execution = Execution(out=tmp_path, data_dir=tmp_path, device="cpu")
    caller = threading.Thread(target=run_in_threads, args=(SWEEP[:1], execution, 2, report))
    caller.start()
    caller.join()
    assert numbers(list(report.rows.values())) == alone[:1]


class FakeStream:
    """torch.cuda.Stream: of each priority 32, handed out in turn."""

    taken: ClassVar[Counter[int]] = Counter()

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.id = device, priority, self.taken[priority] % 32
        self.taken[priority] += 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeStream) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)


@pytest.mark.parametrize("skipped", [0, 5, 30])
def test_threads_of_all_sweeps_share_a_few_streams_that_captures_do_not_use(
    skipped: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many streams were taken from torch between the first capture and the first sweep."""
    used: list[FakeStream] = []
    device = torch.device("cuda", 64 + skipped)  # which has no streams in the caches
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(used.append(stream)))
    monkeypatch.setattr(workers, "pick_device", lambda name: device)
    captures = capture_streams(device)
    for _ in range(skipped):
        torch.cuda.Stream(device)
    for _ in range(40):
        torch.cuda.Stream(device)  # somebody else's
        pool = workers.ThreadPool([], Execution(out=tmp_path, data_dir=tmp_path), 3)
        for thread in range(3):
            pool.inboxes[thread].put(None)
            pool.work(thread)
    assert len(set(captures)) == 3
    assert len(used) == 3 * 40
    assert len(set(used)) == 3
    assert not set(used) & set(captures)
    everyone = workers.thread_streams(device, 50)
    assert set(everyone) | set(captures) == {FakeStream(device) for _ in range(32)}
    assert not set(everyone) & set(captures)


def kill_workers(most: int | None = None) -> int:
    processes = multiprocessing.active_children()[:most]
    for process in processes:
        os.kill(process.pid or 0, signal.SIGKILL)
    return len(processes)


@pytest.mark.usefixtures("forked_workers")
def test_the_run_of_a_killed_process_resumes_from_its_checkpoint_with_the_same_numbers(
    tmp_path: Path,
) -> None:
    recipes = longer(SWEEP[:2], 12)
    expected = run_alone(recipes, tmp_path / "alone")
    latest: dict[Recipe, float] = {}
    killed, after = 0, []

    def kill_once(recipe: Recipe, progress: RunProgress) -> None:
        nonlocal killed
        latest[recipe] = progress.epoch
        if killed:
            after.append(progress.epoch)
        elif len(latest) == 2 and min(latest.values()) >= 3:
            killed = kill_workers(most=1)

    with time_limit(180):
        rows = run_recipes(
            recipes,
            Execution(out=tmp_path, data_dir=tmp_path, checkpoint_seconds=0, workers=2),
            on_progress=kill_once,
        )
    assert killed == 1
    assert numbers(rows) == expected
    assert min(after) >= 3  # not from the start
    assert multiprocessing.active_children() == []


@pytest.mark.usefixtures("forked_workers")
def test_a_run_that_loses_every_process_is_given_up_and_the_others_finish(
    alone: list[Row], tmp_path: Path
) -> None:
    doomed = longer(SWEEP[1:2], 400)[0]
    failures: dict[Recipe, str] = {}

    def kill_doomed(recipe: Recipe, _: RunProgress) -> None:
        if recipe == doomed:
            kill_workers()

    report = workers.Collector({}, None, kill_doomed, failures.__setitem__)
    with time_limit(180):
        workers.run_in_processes(
            [doomed, SWEEP[0]], Execution(out=tmp_path, data_dir=tmp_path, device="cpu"), 1, report
        )
    assert numbers(list(report.rows.values())) == alone[:1]
    assert list(failures) == [doomed]
    assert "died 2 times, the last time with signal SIGKILL" in failures[doomed]


def test_a_failure_without_a_callback_is_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"mixup.*has no result: the loss became"):
        assert run_recipes([DIVERGES], Execution(out=tmp_path, data_dir=tmp_path, workers=1)) == []


def test_finished_runs_are_not_trained_again_and_equal_recipes_are_one_run(tmp_path: Path) -> None:
    first = run_recipes(SWEEP[:1], Execution(out=tmp_path, data_dir=tmp_path, workers=1))
    heard: list[Recipe] = []

    def hear(recipe: Recipe, _: RunProgress) -> None:
        heard.append(recipe)

    rows = run_recipes(
        [SWEEP[0], SWEEP[1], SWEEP[1]],
        Execution(out=tmp_path, data_dir=tmp_path, workers=1),
        on_progress=hear,
    )
    assert rows == [*first, rows[1], rows[1]]
    assert set(heard) == {SWEEP[1]}


@pytest.mark.usefixtures("forked_workers")
def test_an_error_in_a_process_is_raised_here_with_its_traceback_and_ends_the_others(tmp_path: Path) -> None:
    missing = dataclasses.replace(SWEEP[0], dataset="no/such/folder")
    with pytest.raises(ValueError, match="no dataset or folder 'no/such/folder'") as caught:
        run_recipes([missing, *longer(SWEEP, 400)], Execution(out=tmp_path, data_dir=tmp_path, workers=2))
    assert "load_dataset" in caught.value.__notes__[0]
    assert multiprocessing.active_children() == []


class Odd(UserWarning):
    """A category that another process does not have."""


@pytest.mark.usefixtures("forked_workers")
def test_a_warning_in_a_process_is_a_warning_here(tmp_path: Path) -> None:
    execution = Execution(out=tmp_path, data_dir=tmp_path, workers=2)
    recipes = [dataclasses.replace(recipe, epochs=1) for recipe in SWEEP[:2]]
    busy = tmp_path / train(recipes[0], execution)["folder"]
    (busy / "result.json").unlink()
    lock = ExitStack()
    lock.enter_context(lock_folder(busy))
    heard: list[str] = []

    def hear(message: Warning | str, *_: object) -> None:
        heard.append(str(message))
        lock.close()

    with warnings.catch_warnings(), time_limit(100):
        warnings.simplefilter("always")
        warnings.showwarning = hear
        assert len(run_recipes(recipes, execution)) == 2
    assert [f"{os.getpid()}" in text and text.endswith("waiting for it") for text in heard] == [True]
    assert type(workers.plain_warning(Odd("x"), Odd)) is UserWarning
    assert type(workers.plain_warning("x", FutureWarning)) is FutureWarning


class Stubborn(Exception):
    """Cannot be made anew from what pickle keeps of it."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


def test_an_error_that_cannot_be_pickled_crosses_the_pipe_in_words() -> None:
    assert str(workers.portable(Stubborn("no ", "way"))) == "Stubborn: no way"
    assert isinstance(workers.portable(ValueError("as it is")), ValueError)


def test_workers_are_no_more_than_runs_cores_and_memory_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert workers.count_workers(1, "cpu") == 1
    assert [workers.count_workers(3, "cpu", wanted) for wanted in (1, 2, 8)] == [1, 2, 3]
    assert 1 <= workers.count_workers(10_000, "cpu") <= workers.count_cores()
    monkeypatch.setattr(workers, "RUN_BYTES", 10**18)
    monkeypatch.setattr(workers, "count_cores", lambda: 8)
    assert workers.count_workers(10_000, "cpu") == 1


def test_the_number_of_concurrent_runs_depends_on_all_runs_not_on_the_remaining_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_recipes(SWEEP[:1], Execution(out=tmp_path, data_dir=tmp_path, workers=1))
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(sweep, "count_workers", lambda runs, *_: runs)
    monkeypatch.setattr(
        sweep, "run_locally", lambda todo, _, number, *rest: asked.append((len(todo), number))
    )
    run_recipes(SWEEP, Execution(out=tmp_path, data_dir=tmp_path))
    assert asked == [(2, 3)]


def test_workers_share_torch_s_threads() -> None:
    torch.set_num_threads(8)
    execution = Execution(out=Path(), data_dir=Path(), device="cpu")
    assert [one.threads for one in workers.split_execution(execution, 3)] == [2, 2, 2]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"engine": "rey"}, "engine must be one of 'local', 'ray', got 'rey'"),
        ({"address": "auto"}, "needs --engine ray"),
        ({"workers": 0}, "--workers must be at least 1, got 0"),
        ({"engine": "ray", "device": "cuda:1"}, "--device must be cpu or cuda"),
        ({"engine": "ray", "address": "127.0.0.1:1"}, "no Ray cluster answers at '127.0.0.1:1'.*ray start"),
        ({"engine": "ray", "address": "nonsense"}, "Invalid address format: nonsense"),
    ],
)
def test_an_invalid_execution_is_rejected(given: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence):
        run_recipes(SWEEP, Execution(out=tmp_path, data_dir=tmp_path, **given))


def test_without_ray_the_engine_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"pip install 'icmixup\[ray\]'"):
        run_recipes(SWEEP, Execution(out=tmp_path, data_dir=tmp_path, engine="ray"))


class Fault(NamedTuple):
    """What came of a sweep during which a node was killed."""

    rows: list[Row]
    failures: list[Recipe]
    under_way: int  # runs, when the node was killed
    epochs_after: list[float]  # of their progress reports since


def sweep_with_a_fault(recipes: list[Recipe], root: Path, answer: Connection) -> None:
    """A sweep on a Ray cluster of two nodes with a core each; with a run on each, the second is killed."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = cluster.add_node(num_cpus=1)
    latest: dict[Recipe, float] = {}
    under_way: set[Recipe] = set()
    epochs_after: list[float] = []
    failures: list[Recipe] = []

    def kill_once(recipe: Recipe, progress: RunProgress) -> None:
        latest[recipe] = progress.epoch
        if recipe in under_way:
            epochs_after.append(progress.epoch)
        busy = {recipe for recipe, epoch in latest.items() if 3 <= epoch < recipe.epochs}
        if not under_way and len(busy) == 2:
            under_way.update(busy)
            cluster.remove_node(second, allow_graceful=False)

    rows = run_recipes(
        recipes,
        Execution(out=root, data_dir=root, checkpoint_seconds=0, engine="ray", address=cluster.address),
        on_progress=kill_once,
        on_failure=lambda recipe, _: failures.append(recipe),
    )
    answer.send(Fault(rows, failures, len(under_way), epochs_after))
    cluster.shutdown()


def test_runs_on_a_ray_cluster_that_loses_a_node_end_with_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="pip install icmixup[ray]")
    recipes = longer([DIVERGES, *SWEEP], 60)
    expected = run_alone(recipes[1:], tmp_path / "alone")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    context = multiprocessing.get_context(
        "spawn"
    )  # a process of its own: Ray may hang where no alarm is heard
    answer, far_end = context.Pipe()
    # Not in pytest's folder: the path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        process = context.Process(target=sweep_with_a_fault, args=(recipes, tmp_path, far_end))
        process.start()
        far_end.close()
        answered = answer.poll(RAY_SECONDS)
        fault: Fault | None = answer.recv() if answered else None
        process.join(20)
        process.kill()
    assert fault is not None, f"no answer after {RAY_SECONDS} s"
    assert fault.under_way == 2
    assert numbers(fault.rows) == expected
    assert min(fault.epochs_after) >= 3  # from a checkpoint, not from the start
    assert fault.failures == recipes[:1]


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("how", ["in turn", "processes", "threads"])
def test_recipes_that_are_added_while_others_run_come_to_the_same_rows(
    how: str, alone: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More recipes than workers, in two portions; the first of them has finished before."""
    monkeypatch.setattr("icmixup.lab.sweep.has_one_gpu", lambda device: how == "threads")
    lanes = 1 if how == "in turn" else 2
    execution = Execution(out=tmp_path, data_dir=tmp_path, device="cpu", workers=lanes)
    run_recipes(SWEEP[1:2], execution)
    portions = [[SWEEP[1]], [SWEEP[2]]]
    ended: list[str] = []
    asked_after: list[int] = []

    def more() -> list[Recipe]:
        asked_after.append(len(ended))
        return portions.pop(0) if portions else []

    rows = run_recipes(SWEEP[:1], execution, on_row=lambda row: ended.append(row["key"]), more=more)
    assert numbers(rows) == alone
    assert sorted(ended) == sorted(recipe.key for recipe in SWEEP)
    assert portions == []
    # A second worker is idle from the beginning; a single one asks after its first run.
    assert asked_after[0] == (1 if how == "in turn" else 0)


def test_if_all_runs_have_finished_more_is_asked_for_at_once(alone: list[Row], tmp_path: Path) -> None:
    execution = Execution(out=tmp_path, data_dir=tmp_path, device="cpu", workers=1)
    run_recipes(SWEEP[:2], execution)
    portions = [SWEEP[1:2], SWEEP[2:]]
    rows = run_recipes(SWEEP[:1], execution, more=lambda: portions.pop(0) if portions else [])
    assert numbers(rows) == alone
