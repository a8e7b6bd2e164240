"""Runs on this machine: in turn in this process, or several at once, each worker a process of its own."""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import os
import pickle
import signal
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from icmixup.lab.datasets import Dataset
from icmixup.lab.training.ranks import join_ranks, pick_device, world_size
from icmixup.lab.training.recipe import Recipe
from icmixup.lab.training.loop import Beat, Diverged, load_recipe_data, train

Row = dict[str, Any]
DATA_FIELDS = ("dataset", "fraction", "per_class", "imbalance", "data_seed", "split", "image_size")
# Peak of ResNet-34 with a batch of 128 in RegMixup form on a CPU; small networks need less.
RUN_BYTES = 3 * 10**9
RETRIES = 1  # of a run whose process died


@dataclass(frozen=True)
class Site:
    """Where runs happen, and how."""

    root: Path
    data_dir: Path
    device: str | None = None
    threads: int | None = None  # of torch's, for one run; as many as it likes if not given
    checkpoint_seconds: float = 60.0
    trackers: tuple[str, ...] = ()
    at_once: int = 1  # how many runs share the GPU or the cores


class Outcome(NamedTuple):
    """What came of a run: its row, or why there is none."""

    row: Row | None
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """Whom to tell of runs, and the rows so far."""

    rows: dict[Recipe, Row]
    on_row: Callable[[Row], None] | None
    on_beat: Callable[[Recipe, Beat], None] | None
    on_failure: Callable[[Recipe, str], None]

    def settle(self, recipe: Recipe, outcome: Outcome) -> None:
        if outcome.row is None:
            self.on_failure(recipe, outcome.reason)
            return
        self.rows[recipe] = outcome.row
        if self.on_row is not None:
            self.on_row(outcome.row)

    def beat(self, recipe: Recipe, beat: Beat) -> None:
        if self.on_beat is not None:
            self.on_beat(recipe, beat)


def carry_out(
    recipe: Recipe, site: Site, on_beat: Callable[[Beat], None] | None, dataset: Dataset | None = None
) -> Outcome:
    """Train from where the run stands. To diverge is an outcome; whatever else goes wrong is raised."""
    if site.threads is not None:
        torch.set_num_threads(site.threads)
    device = pick_device(site.device)
    if device.type == "cuda":  # a CUDA graph is captured on the current device
        torch.cuda.set_device(device)
    try:
        row = train(
            recipe,
            site.root,
            data_dir=site.data_dir,
            dataset=dataset,
            device=device,
            on_beat=on_beat,
            checkpoint_seconds=site.checkpoint_seconds,
            trackers=site.trackers,
            at_once=site.at_once,
        )
    except Diverged as error:
        return Outcome(None, str(error))
    return Outcome(row)


def remember_data(data_dir: Path) -> Callable[[Recipe], Dataset]:
    """A reader of recipes' images that keeps the last ones it read: runs of a sweep mostly share them."""

    @functools.lru_cache(maxsize=1)
    def read(part: Recipe) -> Dataset:
        return load_recipe_data(part, data_dir)

    return lambda recipe: read(Recipe(**{name: getattr(recipe, name) for name in DATA_FIELDS}))


def run_in_turn(
    recipes: Sequence[Recipe], site: Site, report: Report, dataset: Dataset | None = None
) -> None:
    """One run after the other in this process, so that what is compiled or read once serves all."""
    read = remember_data(site.data_dir) if dataset is None else lambda _: dataset
    # Ranks join once for all runs: if they part and meet again, they may miss each other.
    with join_ranks(pick_device(site.device)):
        for recipe in recipes:
            beat = functools.partial(report.beat, recipe)
            report.settle(recipe, carry_out(recipe, site, beat, read(recipe)))


def count_workers(runs: int, device: str | None, wanted: int | None = None) -> int:
    """How many of so many runs at once: as wanted, or one a GPU, or on CPUs what cores and memory allow.

    The answer is the same each time on one machine, since the last bits of a run hang on its threads. Under
    torchrun it is one: there all processes together are one run.
    """
    if wanted is not None:
        return min(runs, wanted)
    kind = pick_device(device).type
    if world_size() > 1 or kind == "mps":
        return 1
    if kind == "cuda":
        most = torch.cuda.device_count() if device in (None, "cuda") else 1
    else:
        most = min(count_cores(), memory_bytes() // RUN_BYTES)
    return max(1, min(runs, most))


def count_cores() -> int:
    """The cores that this process may use, not those of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """The machine's memory, or a container's limit; where no one says, plenty."""
    found = [count_cores() * RUN_BYTES]
    with contextlib.suppress(OSError, ValueError, AttributeError):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with contextlib.suppress(OSError, ValueError):  # the limit may be the word max
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(found)


def share_of_threads(number: int) -> int:
    """Threads of one of so many runs at once on a CPU."""
    return max(1, torch.get_num_threads() // number)


def split_site(site: Site, number: int) -> list[Site]:
    """A place for each of so many workers: the GPUs by turns, or an equal share of torch's threads."""
    kind = pick_device(site.device).type
    if kind != "cuda":
        threads = share_of_threads(number) if kind == "cpu" else None
        return [replace(site, threads=threads, at_once=number)] * number
    gpus = torch.cuda.device_count()
    site = replace(site, at_once=math.ceil(number / gpus))
    return [replace(site, device=f"cuda:{k % gpus}") for k in range(number)]


def one_gpu(device: str | None) -> bool:
    """Whether all runs have the same GPU."""
    picked = pick_device(device)
    return picked.type == "cuda" and (device not in (None, "cuda") or torch.cuda.device_count() == 1)


def run_in_processes(recipes: Sequence[Recipe], site: Site, number: int, report: Report) -> None:
    """So many runs at once, each in a process of its own; what a dead process leaves goes to a new one."""
    crew = Crew(split_site(site, number)[: len(recipes)], recipes, report)
    try:
        crew.work()
    finally:
        for worker in crew.workers:
            worker.stop()


class Worker:
    """A process that carries out one recipe after the other, and our end of the pipe to it."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.recipe: Recipe | None = None  # under way
        # A fork would share a GPU's context and torch's threads.
        context = multiprocessing.get_context("spawn")
        self.pipe, far_end = context.Pipe()
        self.process = context.Process(target=serve, args=(far_end, site), daemon=True)
        self.process.start()
        far_end.close()  # so that the pipe ends when the process does

    def give(self, recipe: Recipe) -> None:
        self.recipe = recipe
        with contextlib.suppress(BrokenPipeError):  # it died in the meantime: the next recv will say so
            self.pipe.send(recipe)

    def stop(self) -> int | None:
        """End the process at once, a checkpoint being whole at any moment, and return its exit code."""
        self.process.kill()
        self.process.join()
        self.pipe.close()
        return self.process.exitcode


class Crew:
    """Workers, and the recipes that wait for one."""

    def __init__(self, sites: Sequence[Site], recipes: Sequence[Recipe], report: Report) -> None:
        self.report = report
        self.waiting = deque(recipes)
        self.deaths: Counter[Recipe] = Counter()
        self.workers = [Worker(site) for site in sites]

    def work(self) -> None:
        while busy := self.hand_out():
            for pipe in wait([worker.pipe for worker in busy]):
                self.hear(next(worker for worker in busy if worker.pipe is pipe))

    def hand_out(self) -> list[Worker]:
        """A recipe to everyone who has none, as long as there are any; who is at work then."""
        for worker in self.workers:
            if worker.recipe is None and self.waiting:
                worker.give(self.waiting.popleft())
        return [worker for worker in self.workers if worker.recipe is not None]

    def hear(self, worker: Worker) -> None:
        recipe = worker.recipe
        assert recipe is not None
        try:
            message = worker.pipe.recv()
        except (EOFError, OSError):  # the process died, perhaps in the midst of a message
            self.replace(worker, recipe)
            return
        if isinstance(message, Beat):
            self.report.beat(recipe, message)
        elif isinstance(message, Exception):
            raise message
        else:
            worker.recipe = None
            self.report.settle(recipe, message)

    def replace(self, dead: Worker, recipe: Recipe) -> None:
        """A new worker, which finds the dead one's last checkpoint; a run that kills twice is given up."""
        code = dead.stop()
        self.workers[self.workers.index(dead)] = Worker(dead.site)
        self.deaths[recipe] += 1
        if self.deaths[recipe] <= RETRIES:
            self.waiting.appendleft(recipe)
        else:
            self.report.settle(recipe, Outcome(None, describe_death(recipe, code)))


def describe_death(recipe: Recipe, code: int | None) -> str:
    how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
    return (
        f"the process of {recipe.name} died {RETRIES + 1} times, at last by {how}; "
        "if memory is short, give fewer --workers, and the same command goes on from its last checkpoint"
    )


def serve(pipe: Connection, site: Site) -> None:
    """What a worker does: recipes in, beats and outcomes out, until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches us too, but ending us is our parent's task
    read = remember_data(site.data_dir)
    with contextlib.suppress(EOFError, OSError):  # no one listens any more
        while True:
            pipe.send(attempt(pipe.recv(), site, pipe, read))


def attempt(
    recipe: Recipe, site: Site, pipe: Connection, read: Callable[[Recipe], Dataset]
) -> Outcome | Exception:
    try:
        return carry_out(recipe, site, pipe.send, read(recipe))
    except Exception as error:
        return portable(error, f"in the process of {recipe.name}:\n{traceback.format_exc()}")


def portable(error: Exception, note: str) -> Exception:
    """The error as it can cross a pipe, with its traceback as a note."""
    try:
        error = pickle.loads(pickle.dumps(error))
    except Exception:  # an exception with a constructor of its own
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(note)
    return error
