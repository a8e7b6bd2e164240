"""Runs on this machine: one after the other in this process, or several concurrently.

processes    on CPUs and on several GPUs; a run whose process dies is resumed in a new one
threads      on a single GPU, each with a CUDA stream of its own. At a batch of 128 a small network leaves
             most of a large GPU idle; a second and a third run fill the gaps. Processes would take turns on
             the GPU instead, and each would compile the model again
"""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import torch

from icmixup.lab.images.parallel import count_cores
from icmixup.lab.images.worker import portable
from icmixup.lab.sweep.signals import STOP_SECONDS, blocked_signals, interrupt_once, run_and_end
from icmixup.lab.training.data import LoadData, remember_data
from icmixup.lab.training.definitions import pack_definitions, unpack_definitions
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.loop import Diverged, OnProgress, RunProgress, Stopped, train
from icmixup.lab.training.ranks import compare_notes, join_ranks, pick_device, world_size
from icmixup.lab.training.recipe import Recipe
from icmixup.lab.training.run_folder import Row
from icmixup.lab.training.step import PREPARING, capture_streams
from icmixup.lab.wording import count

# Peak of ResNet-34 with a batch of 128 in RegMixup form on a CPU; small networks need less.
RUN_BYTES = 3 * 10**9
SILENT_SECONDS = 1.0  # of waiting for threads, before a line says so
POOL_STREAMS = 32  # that torch hands out in turn, of each priority
RETRIES = 1  # of a run whose process died
TRIAL_REPORTS = 3  # of progress at least: the time between the first and the last is measured
NOT_STARTED = (
    "a worker process failed while starting; its error is printed above. Every worker imports the main "
    'script again, so a script must call compare under if __name__ == "__main__":, or use workers=1'
)


class Outcome(NamedTuple):
    """The result of a run: its row, or the reason why there is none."""

    row: Row | None
    reason: str = ""


@dataclass(frozen=True)
class Collector:
    """The rows so far, and callbacks for rows, progress, failures and further recipes."""

    rows: dict[Recipe, Row]
    on_row: Callable[[Row], None] | None
    on_progress: Callable[[Recipe, RunProgress], None] | None
    on_failure: Callable[[Recipe, str], None]
    more: Callable[[], Sequence[Recipe]] = tuple
    """Called in the main thread while a worker is idle and no recipe waits; returns recipes to add."""

    def take(self, waiting: deque[Recipe]) -> Recipe | None:
        """Remove the next recipe from those that wait; None if there is nothing more to do."""
        if not waiting:
            waiting.extend(self.more())
        return waiting.popleft() if waiting else None

    def record(self, recipe: Recipe, outcome: Outcome) -> None:
        if outcome.row is None:
            self.on_failure(recipe, outcome.reason)
            return
        self.rows[recipe] = outcome.row
        if self.on_row is not None:
            self.on_row(outcome.row)

    def progress(self, recipe: Recipe, progress: RunProgress) -> None:
        if self.on_progress is not None:
            self.on_progress(recipe, progress)


class TrialEnded(Stopped):
    """Ends a run that only measures speed."""


def end_after(seconds: float, on_progress: OnProgress | None) -> OnProgress:
    """A progress callback that ends a run `seconds` after its first report."""
    reports: list[float] = []

    def listen(progress: RunProgress) -> None:
        reports.append(time.monotonic())
        if on_progress is not None:
            on_progress(progress)
        if len(reports) >= TRIAL_REPORTS and reports[-1] - reports[0] >= seconds:
            raise TrialEnded

    return listen


def run_recipe(recipe: Recipe, execution: Execution, on_progress: OnProgress | None) -> Outcome:
    """Train or resume one run. Divergence is an outcome; any other error is raised."""
    if execution.trial_seconds is not None:
        on_progress = end_after(execution.trial_seconds, on_progress)
    if execution.threads is not None:
        torch.set_num_threads(execution.threads)
    device = pick_device(execution.device)
    if device.type == "cuda":  # a CUDA graph is captured on the current device
        torch.cuda.set_device(device)
    try:
        return Outcome(train(recipe, execution, on_progress))
    except Diverged as error:
        return Outcome(None, str(error))
    except TrialEnded:
        return Outcome(None, "end of the trial")


def run_sequentially(recipes: Sequence[Recipe], execution: Execution, collector: Collector) -> None:
    """One run after the other in this process, sharing compiled code and data."""
    load = remember_data(execution)

    def run() -> None:
        # Ranks join once for all runs: if they left and joined again, they might miss each other.
        with join_ranks(pick_device(execution.device)):
            with compare_notes() as notes:
                notes["the list of runs to train"] = [recipe.name for recipe in recipes]
            waiting = deque(recipes)
            while (recipe := collector.take(waiting)) is not None:
                on_progress = functools.partial(collector.progress, recipe)
                outcome = run_recipe(recipe, replace(execution, dataset=load(recipe)), on_progress)
                collector.record(recipe, outcome)

    run_and_end(run)


def count_workers(runs: int, device: str | None, wanted: int | None = None) -> int:
    """How many of `runs` to train concurrently: as wanted, or one per GPU, or what cores and memory allow.

    The answer is always the same on one machine, since the last bits of a run depend on its number of
    threads. Under torchrun it is one: there all processes together train one run.
    """
    if wanted is not None:
        return min(runs, wanted)
    kind = pick_device(device).type
    if world_size() > 1:
        return 1
    if kind == "cuda":
        most = torch.cuda.device_count() if device in (None, "cuda") else 1
    else:
        most = min(count_cores(), memory_bytes() // RUN_BYTES)
    return max(1, min(runs, most))


def memory_bytes() -> int:
    """The machine's memory, or a container's limit; where neither is known, enough for every core."""
    found = [count_cores() * RUN_BYTES]
    with contextlib.suppress(OSError, ValueError, AttributeError):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with contextlib.suppress(OSError, ValueError):  # the limit may be the word max
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(found)


def threads_per_run(number: int) -> int:
    """Threads of each of `number` concurrent runs on a CPU."""
    return max(1, torch.get_num_threads() // number)


def split_execution(execution: Execution, number: int) -> list[Execution]:
    """One execution per worker: the GPUs in turn, or an equal share of torch's threads."""
    kind = pick_device(execution.device).type
    execution = without_dataset(execution)
    if kind != "cuda":
        threads = threads_per_run(number) if kind == "cpu" else None
        return [replace(execution, threads=threads, concurrent=number)] * number
    gpus = torch.cuda.device_count()
    execution = replace(execution, concurrent=math.ceil(number / gpus))
    return [replace(execution, device=f"cuda:{k % gpus}") for k in range(number)]


def without_dataset(execution: Execution) -> Execution:
    """The execution as it is sent to another process, which loads the images again and verifies them."""
    data = execution.dataset
    packed = pack_definitions(execution)
    return replace(packed, dataset=None, fingerprint=None if data is None else data.fingerprint)


def has_one_gpu(device: str | None) -> bool:
    """Whether all runs share one GPU."""
    picked = pick_device(device)
    return picked.type == "cuda" and (device not in (None, "cuda") or torch.cuda.device_count() == 1)


def run_in_processes(
    recipes: Sequence[Recipe], execution: Execution, number: int, collector: Collector
) -> None:
    """`number` concurrent runs, each in its own process; a run whose process dies moves to a new one."""
    pool = ProcessPool(split_execution(execution, number), recipes, collector)
    run_and_end(pool.run, pool.stop)


class Worker:
    """A process that trains one recipe after the other, and our end of the pipe to it."""

    def __init__(self, execution: Execution) -> None:
        self.execution = execution
        self.recipe: Recipe | None = None  # in progress
        self.started = False  # whether it has sent anything
        # A fork would share a GPU's context and torch's threads.
        context = multiprocessing.get_context("spawn")
        self.pipe, far_end = context.Pipe()
        self.process = context.Process(target=serve, args=(far_end, execution), daemon=True)
        # It starts a process of its own and unblocks SIGINT afterwards: so before, not within, the block.
        resource_tracker.ensure_running()
        with blocked_signals():
            self.process.start()
        far_end.close()  # so that the pipe ends when the process does

    def assign(self, recipe: Recipe) -> None:
        self.recipe = recipe
        with contextlib.suppress(BrokenPipeError):  # it died in the meantime: the next recv reports it
            self.pipe.send(recipe)

    def stop(self) -> int | None:
        """End the process and return its exit code: it may write a checkpoint first, for which it has
        STOP_SECONDS; killing it is safe as well, since checkpoints are atomic."""
        self.process.terminate()
        self.process.join(STOP_SECONDS)
        self.process.kill()
        self.process.join()
        self.pipe.close()
        return self.process.exitcode


class ProcessPool:
    """Worker processes, and the recipes that wait for one."""

    def __init__(
        self, executions: Sequence[Execution], recipes: Sequence[Recipe], collector: Collector
    ) -> None:
        self.collector = collector
        self.waiting = deque(recipes)
        self.deaths: Counter[Recipe] = Counter()
        self.executions = executions  # of all workers that there may be
        self.workers: list[Worker] = []

    def run(self) -> None:
        while busy := self.assign():
            for pipe in wait([worker.pipe for worker in busy]):
                self.receive(next(worker for worker in busy if worker.pipe is pipe))

    def stop(self) -> None:
        """End all workers; they write their checkpoints at the same time."""
        for worker in self.workers:
            worker.process.terminate()
        for worker in self.workers:
            worker.stop()

    def assign(self) -> list[Worker]:
        """Give a recipe to every idle worker while there are any, start workers as they are needed, and
        return the busy ones."""
        for worker in self.workers:
            if worker.recipe is None and (recipe := self.collector.take(self.waiting)) is not None:
                worker.assign(recipe)
        for execution in self.executions[len(self.workers) :]:
            if (recipe := self.collector.take(self.waiting)) is None:
                break
            self.workers.append(Worker(execution))
            self.workers[-1].assign(recipe)
        return [worker for worker in self.workers if worker.recipe is not None]

    def receive(self, worker: Worker) -> None:
        recipe = worker.recipe
        assert recipe is not None
        try:
            message = worker.pipe.recv()
        except (EOFError, OSError):  # the process died, possibly in the middle of a message
            self.replace(worker, recipe)
            return
        worker.started = True
        if isinstance(message, RunProgress):
            self.collector.progress(recipe, message)
        elif isinstance(message, Warning):
            warnings.warn(message, stacklevel=2)
        elif isinstance(message, Exception):
            raise message
        else:
            worker.recipe = None
            self.collector.record(recipe, message)

    def replace(self, dead: Worker, recipe: Recipe) -> None:
        """Start a new worker, which resumes from the last checkpoint; give up a run that dies twice."""
        code = dead.stop()
        if code == 1 and not dead.started:  # an error, not a signal: it would happen again
            raise RuntimeError(NOT_STARTED) from None
        self.workers[self.workers.index(dead)] = Worker(dead.execution)
        self.deaths[recipe] += 1
        if self.deaths[recipe] <= RETRIES:
            self.waiting.appendleft(recipe)
        else:
            self.collector.record(recipe, Outcome(None, describe_death(recipe, code)))


def describe_death(recipe: Recipe, code: int | None) -> str:
    how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
    return (
        f"the process of {recipe.title} died {RETRIES + 1} times, the last time with {how}; if memory is "
        "short, use fewer --workers and run the same command again to resume from its last checkpoint"
    )


def serve(pipe: Connection, execution: Execution) -> None:
    """The loop of a worker process: recipes in, progress and outcomes out, until the pipe ends."""
    signal.signal(signal.SIGTERM, interrupt_once)  # from Worker.stop; Ctrl-C is blocked here
    try:
        execution = unpack_definitions(execution)
    except ValueError as error:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # there is nothing to save
        pipe.send(error)
        return
    load, sending = remember_data(execution), threading.RLock()

    def send(message: object) -> None:
        with sending:  # a thread of a tracker may warn while this one reports progress
            pipe.send(message)

    # The parent shows warnings as it shows its own; printed here, they would be in the middle of its lines.
    warnings.showwarning = lambda message, category, *_: send(plain_warning(message, category))
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):  # the parent is gone, or ends us
        while True:
            send(attempt(pipe.recv(), execution, send, load))


def attempt(
    recipe: Recipe, execution: Execution, on_progress: OnProgress, load: LoadData
) -> Outcome | Exception:
    try:
        return run_recipe(recipe, replace(execution, dataset=load(recipe)), on_progress)
    except Exception as error:
        sent = portable(error)
        sent.add_note(f"in the process of {recipe.title}:\n{traceback.format_exc()}")
        return sent


def plain_warning(message: Warning | str, category: type[Warning]) -> Warning:
    """The warning in a form that can cross a pipe: of a category that every process has."""
    return (category if category.__module__ == "builtins" else UserWarning)(str(message))


def run_in_threads(
    recipes: Sequence[Recipe], execution: Execution, number: int, collector: Collector
) -> None:
    """`number` concurrent runs in threads; an error in one ends all, each at its next progress report."""
    import_compiler()
    pool = ThreadPool(recipes, replace(execution, concurrent=number), number)
    run_and_end(functools.partial(pool.run, collector), pool.stop)


def import_compiler() -> None:
    """Import what torch imports when it is first used: an optimizer does, and so does a compiled model.

    The two packages import each other, and threads that meet in the middle see half of a module.
    """
    import torch._dynamo
    import torch._inductor  # noqa: F401


class Message(NamedTuple):
    """What a thread reports about its run; an outcome or an error is the end of it."""

    thread: int
    recipe: Recipe | None
    content: RunProgress | Outcome | BaseException


class ThreadPool:
    """Threads, each with an inbox of recipes and a CUDA stream, and their messages to the main thread."""

    def __init__(self, recipes: Sequence[Recipe], execution: Execution, number: int) -> None:
        self.execution = execution
        self.waiting = deque(recipes)
        self.inboxes: list[SimpleQueue[Recipe | None]] = [SimpleQueue() for _ in range(number)]
        self.messages: SimpleQueue[Message] = SimpleQueue()
        self.stopped = threading.Event()
        self.loading = threading.Lock()
        self.load = remember_data(execution)
        self.streams = thread_streams(pick_device(execution.device), number)
        self.threads = [threading.Thread(target=self.work, args=(k,), name=f"run {k}") for k in range(number)]

    def run(self, collector: Collector) -> None:
        for thread in self.threads:
            thread.start()
        self.listen(collector)

    def work(self, thread: int) -> None:
        """The body of a thread: one recipe after the other, on its own CUDA stream."""
        recipe = None
        try:
            with torch.cuda.stream(self.streams[thread]):
                while (recipe := self.inboxes[thread].get()) is not None:
                    with self.loading:
                        execution = replace(self.execution, dataset=self.load(recipe))
                    on_progress = functools.partial(self.progress, thread, recipe)
                    self.messages.put(Message(thread, recipe, run_recipe(recipe, execution, on_progress)))
        except BaseException as error:
            self.messages.put(Message(thread, recipe, error))

    def progress(self, thread: int, recipe: Recipe, progress: RunProgress) -> None:
        if self.stopped.is_set():
            raise Stopped
        self.messages.put(Message(thread, recipe, progress))

    def listen(self, collector: Collector) -> None:
        """Pass messages on in the main thread, which owns the terminal, until all runs are done."""
        busy = sum(self.assign(thread, collector) for thread in range(len(self.inboxes)))
        while busy:
            thread, recipe, content = self.messages.get()
            if isinstance(content, BaseException):
                raise content
            assert recipe is not None
            if isinstance(content, RunProgress):
                collector.progress(recipe, content)
            else:
                collector.record(recipe, content)
                busy -= not self.assign(thread, collector)

    def assign(self, thread: int, collector: Collector) -> bool:
        """Give the next recipe to a thread; whether there is one."""
        recipe = collector.take(self.waiting)
        if recipe is not None:
            self.inboxes[thread].put(recipe)
        return recipe is not None

    def stop(self) -> None:
        """End all threads: those that wait at once, the others at their next progress report."""
        self.stopped.set()
        for inbox in self.inboxes:
            inbox.put(None)
        begun = [thread for thread in self.threads if thread.is_alive()]  # an interrupt may come before that
        join_threads(begun)


def join_threads(threads: Sequence[threading.Thread]) -> None:
    """Wait for all of them; if that takes long, say for what."""
    deadline = time.monotonic() + SILENT_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if runs := sum(thread.is_alive() for thread in threads):
        what = f"{count(runs, 'run')} to finish the current epoch and write a checkpoint"
        line = f"waiting for {what}; to end at once: kill -KILL {os.getpid()}"
        with contextlib.suppress(OSError):  # after SIGHUP there may be no terminal
            print(line, file=sys.stderr, flush=True)
    for thread in threads:
        thread.join()


def thread_streams(device: torch.device, number: int) -> list[torch.cuda.Stream | None]:
    """The streams of `number` threads; None on a CPU. More threads than torch has streams share them."""
    if device.type != "cuda":
        return [None] * number
    streams = streams_beside_captures(device)
    return [streams[k % len(streams)] for k in range(number)]


@functools.cache
def streams_beside_captures(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    """All streams of torch's pool but those of captures, which would record what another thread runs there.

    torch hands out its streams in turn: if every thread took a new one, it would be one of those some day.
    """
    with PREPARING:  # so that no capture takes its streams meanwhile
        taken = capture_streams(device)
        drawn = [torch.cuda.Stream(device) for _ in range(POOL_STREAMS)]  # type: ignore[no-untyped-call]
    return tuple(stream for stream in dict.fromkeys(drawn) if stream not in taken)
