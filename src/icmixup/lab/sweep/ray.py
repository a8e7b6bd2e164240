"""Where runs happen: on this machine, or on a Ray cluster.

local    one run a GPU, in turn in this process where there is one GPU, or as many at once on it as wanted;
         on CPUs as many at once as memory and cores allow
ray      every run is a task that asks for its share of a GPU or of a node's cores. A run lost with its node
         is started again elsewhere and goes on from its last checkpoint: so `root` and the data must lie at
         the same path in a file system that all nodes share, and icmixup must be installed on each

Both go on from what finished and half-finished runs left under `root`. A run's numbers are those of train()
alone, to the last bit where torch has as many threads; with more or fewer, sums are taken in another order.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from icmixup._checks import check_choice
from icmixup.lab.datasets import Dataset
from icmixup.lab.training.ranks import world_size
from icmixup.lab.training.recipe import Recipe
from icmixup.lab.training.run_folder import Run
from icmixup.lab.sweep.threads import run_in_threads
from icmixup.lab.training.loop import Beat
from icmixup.lab.sweep.local import (
    Outcome,
    Report,
    Row,
    Site,
    carry_out,
    count_workers,
    one_gpu,
    run_in_processes,
    run_in_turn,
)

ENGINES = ("local", "ray")
NODE_RETRIES = 3  # of a run lost with its node or its process
LISTEN_SECONDS = 0.5  # between looks at what a cluster has to say


def run_recipes(
    recipes: Sequence[Recipe],
    root: Path,
    *,
    data_dir: Path,
    engine: str = "local",
    address: str | None = None,
    workers: int | None = None,
    device: str | None = None,
    dataset: Dataset | None = None,
    on_row: Callable[[Row], None] | None = None,
    on_beat: Callable[[Recipe, Beat], None] | None = None,
    on_failure: Callable[[Recipe, str], None] | None = None,
    checkpoint_seconds: float = 60.0,
    trackers: tuple[str, ...] = (),
) -> list[Row]:
    """Carry recipes out, each in its folder under `root`, and return the rows of those that finished.

    A run that diverges, or whose process dies time and again, is reported, and the others go on. Any other
    error ends all; the same call goes on from there.

    Args:
        engine: "local" or "ray".
        address: of a Ray cluster, "auto" for the one this machine is part of; None starts one here.
        workers: how many runs at once; 1 is in turn in this process. On Ray: how many share a GPU, or a
            node's cores where there is no GPU; a GPU, or a core, for each if not given.
        device: cpu, cuda or cuda:1; a GPU if there is one.
        dataset: of all recipes, if it is loaded already; runs in processes of their own read it again.
        on_row: told of every row as it comes, rows from before first.
        on_beat: told a few times a second how a run is getting on.
        on_failure: told of a run without a row, and why; a warning if not given.

    Returns:
        Rows in the order of `recipes`.
    """
    check_call(engine, address, workers, device)
    site = Site(root, data_dir, device, None, checkpoint_seconds, trackers)
    report = Report({}, on_row, on_beat, warn_of_failure if on_failure is None else on_failure)
    todo = settle_finished(recipes, root, report)
    if todo and engine == "ray":
        run_on_ray(todo, site, address, workers, report)
    elif todo:
        # Of all runs, not of those left: resumed or not, a run has the same share of threads.
        run_here(todo, site, count_workers(len(recipes), device, workers), report, dataset)
    return [report.rows[recipe] for recipe in recipes if recipe in report.rows]


def check_call(engine: str, address: str | None, workers: int | None, device: str | None) -> None:
    check_choice("engine", engine, ENGINES)
    if engine == "ray" and device not in (None, "cpu", "cuda"):
        raise ValueError(f"on Ray a run is given its device, so {device!r} cannot be had; give cpu or cuda")
    if engine == "local" and address is not None:
        raise ValueError(f"address {address!r} is of a Ray cluster; give --engine ray with it")
    if workers is not None and workers < 1:
        raise ValueError(f"{workers} workers train nothing; give 1 or more, or leave the number to us")
    if world_size() > 1 and (engine == "ray" or workers not in (None, 1)):
        raise ValueError(
            f"under torchrun all {world_size()} processes are one run; start icmixup without torchrun for "
            "several runs at once or for --engine ray"
        )


def find_finished(recipes: Sequence[Recipe], root: Path) -> dict[Recipe, Row]:
    """The rows of runs that earlier sittings finished."""
    rows = {recipe: Run(root / recipe.name, recipe).result() for recipe in recipes}
    return {recipe: row for recipe, row in rows.items() if row is not None}


def settle_finished(recipes: Sequence[Recipe], root: Path, report: Report) -> list[Recipe]:
    """Report what earlier sittings finished; each of the others, once."""
    finished = find_finished(recipes, root)
    for recipe, row in finished.items():
        report.settle(recipe, Outcome(row))
    return [recipe for recipe in dict.fromkeys(recipes) if recipe not in finished]


def run_here(
    recipes: Sequence[Recipe], site: Site, number: int, report: Report, dataset: Dataset | None
) -> None:
    if number == 1:
        run_in_turn(recipes, site, report, dataset)
    elif one_gpu(site.device):
        run_in_threads(recipes, site, number, report, dataset)
    else:
        run_in_processes(recipes, site, number, report)


def warn_of_failure(recipe: Recipe, reason: str) -> None:
    warnings.warn(f"{recipe.name} has no result: {reason}", stacklevel=2)


def run_on_ray(
    recipes: Sequence[Recipe], site: Site, address: str | None, workers: int | None, report: Report
) -> None:
    """Every run a task; Ray finds it a node, and another one if that is lost."""
    ray = import_ray()
    # Ray prints what befalls its nodes; stdout is for tables.
    with contextlib.redirect_stdout(sys.stderr), joined_cluster(ray, address):
        share = ask_share(ray, site.device, workers)
        mailbox = None if report.on_beat is None else open_mailbox(ray)
        # A shared file system stumbles now and then, and a lost node may go on writing for a moment.
        task = ray.remote(carry_out_there).options(
            **share, max_retries=NODE_RETRIES, retry_exceptions=[OSError]
        )
        there = site_there(site, share)
        runs = {task.remote(recipe, there, Path.cwd(), mailbox): recipe for recipe in recipes}
        try:
            while runs:
                ended, _ = ray.wait(list(runs), timeout=LISTEN_SECONDS)
                pass_on_beats(ray, mailbox, report)
                for run in ended:
                    report.settle(runs.pop(run), collect(ray, run))
        finally:
            for run in runs:
                ray.cancel(run, force=True)


def import_ray() -> ModuleType:
    if find_spec("ray") is None:
        raise ValueError("the engine ray needs Ray, which is not installed; pip install icmixup[ray]")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no word to its makers, unless the user wants it
    return import_module("ray")


@contextlib.contextmanager
def joined_cluster(ray: ModuleType, address: str | None) -> Iterator[None]:
    """Within this context we are part of the cluster; one that was joined before stays joined after."""
    if ray.is_initialized():
        yield
        return
    start: dict[str, Any] = {"include_dashboard": False} if address is None else {}
    try:
        knock(address)
        ray.init(address=address or "local", log_to_driver=False, logging_level="warning", **start)
    except OSError as error:
        raise ValueError(
            f"no Ray cluster answers at {address!r} ({' '.join(str(error).split())}); start one with "
            "`ray start --head`, or leave --address out for one on this machine"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def knock(address: str | None) -> None:
    """An OSError if no one is there: Ray itself would knock for minutes."""
    found = re.fullmatch(r"(?:ray://)?(?P<host>.+):(?P<port>\d+)", address or "")
    if found:
        socket.create_connection((found["host"], int(found["port"])), timeout=10).close()


def ask_share(ray: ModuleType, device: str | None, workers: int | None) -> dict[str, float]:
    """What one run asks of the cluster: its share of a GPU, or of a node's cores."""
    gpus = ray.cluster_resources().get("GPU", 0)
    if device == "cuda" and not gpus:
        raise ValueError("this Ray cluster has no GPU; give --device cpu, or leave it out")
    if gpus and device != "cpu":
        return {"num_cpus": 1, "num_gpus": 1 / (workers or 1)}
    cores = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    if not any(cores):
        raise ValueError("no node of this Ray cluster offers a core; start one with `ray start --num-cpus 4`")
    smallest = min(number for number in cores if number)
    return {"num_cpus": max(1, smallest // workers) if workers else 1}


def site_there(site: Site, share: dict[str, float]) -> Site:
    """The site as a node sees it: paths from the root, and no more than the share that was asked for."""
    site = replace(site, root=site.root.resolve(), data_dir=site.data_dir.resolve())
    if "num_gpus" in share:
        return replace(site, device="cuda", at_once=round(1 / share["num_gpus"]))
    return replace(site, device="cpu", threads=int(share["num_cpus"]))


def carry_out_there(recipe: Recipe, site: Site, folder: Path, mailbox: Any) -> Outcome:
    """carry_out on a node, in the driver's folder: a recipe may name its images by a relative path."""
    on_beat = None if mailbox is None else lambda beat: mailbox.put.remote(recipe, beat)
    with contextlib.chdir(folder) if folder.is_dir() else contextlib.nullcontext():
        return carry_out(recipe, site, on_beat)


class Mailbox:
    """Keeps the latest beat of each run until the driver asks."""

    def __init__(self) -> None:
        self.beats: dict[Recipe, Beat] = {}

    def put(self, recipe: Recipe, beat: Beat) -> None:
        self.beats[recipe] = beat

    def take(self) -> dict[Recipe, Beat]:
        beats, self.beats = self.beats, {}
        return beats


def open_mailbox(ray: ModuleType) -> Any:
    """A mailbox in a process on the driver's own node: if that is lost, no one is left to read it."""
    strategies = import_module("ray.util.scheduling_strategies")
    here = strategies.NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(Mailbox).options(num_cpus=0, max_restarts=-1, scheduling_strategy=here).remote()


def pass_on_beats(ray: ModuleType, mailbox: Any, report: Report) -> None:
    if mailbox is None:
        return
    beats: dict[Recipe, Beat] = {}
    with contextlib.suppress(ray.exceptions.RayError):  # beats are for the eye; no run hangs on them
        beats = ray.get(mailbox.take.remote(), timeout=10)
    for recipe, beat in beats.items():
        report.beat(recipe, beat)


def collect(ray: ModuleType, run: Any) -> Outcome:
    """The outcome of a task that ended; an error of the run itself is raised as it was there."""
    try:
        outcome: Outcome = ray.get(run)
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, Exception) else error) from error
    except ray.exceptions.RayError as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return Outcome(None, f"it was lost {NODE_RETRIES + 1} times with its node or its process: {reason}")
    return outcome
