"""Runs on a Ray cluster: every run is a task, and a run lost with its node is resumed on another one."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from icmixup._install import install_hint
from icmixup.lab.sweep.local import Collector, Outcome, run_recipe, without_dataset
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.loop import RunProgress
from icmixup.lab.training.recipe import Recipe

NODE_RETRIES = 3  # of a run lost with its node or its process
POLL_SECONDS = 0.5  # between looks at the state of the cluster


def run_on_ray(recipes: Sequence[Recipe], execution: Execution, collector: Collector) -> None:
    """Submit every run as a task; Ray assigns it a node, and another one if that is lost."""
    ray = import_ray()
    # Ray prints the state of its nodes; stdout is for tables.
    with contextlib.redirect_stdout(sys.stderr), joined_cluster(ray, execution.address):
        share = requested_resources(ray, execution.device, execution.workers)
        mailbox = None if collector.on_progress is None else open_mailbox(ray)
        # A shared file system fails now and then, and a lost node may keep writing for a moment.
        task = ray.remote(run_on_node).options(**share, max_retries=NODE_RETRIES, retry_exceptions=[OSError])
        on_node = execution_on_node(execution, share)
        runs = {task.remote(recipe, on_node, Path.cwd(), mailbox): recipe for recipe in recipes}
        try:
            while runs:
                ended, _ = ray.wait(list(runs), timeout=POLL_SECONDS)
                forward_progress(ray, mailbox, collector)
                for run in ended:
                    collector.record(runs.pop(run), collect(ray, run))
        finally:
            for run in runs:
                ray.cancel(run, force=True)


def import_ray() -> ModuleType:
    if find_spec("ray") is None:
        raise ValueError(f"--engine ray needs Ray, which is not installed: {install_hint('ray')}")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry, unless the user enables it
    return import_module("ray")


@contextlib.contextmanager
def joined_cluster(ray: ModuleType, address: str | None) -> Iterator[None]:
    """Join the cluster for this context; a cluster that was joined before stays joined."""
    if ray.is_initialized():
        yield
        return
    start: dict[str, Any] = {"include_dashboard": False} if address is None else {}
    try:
        check_reachable(address)
        ray.init(address=address or "local", log_to_driver=False, logging_level="warning", **start)
    except OSError as error:
        raise ValueError(
            f"no Ray cluster answers at {address!r} ({' '.join(str(error).split())}); start one with "
            "`ray start --head`, or omit --address to start one on this machine"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def check_reachable(address: str | None) -> None:
    """Raise an OSError if nothing listens there: Ray itself would retry for minutes."""
    found = re.fullmatch(r"(?:ray://)?(?P<host>.+):(?P<port>\d+)", address or "")
    if found:
        socket.create_connection((found["host"], int(found["port"])), timeout=10).close()


def requested_resources(ray: ModuleType, device: str | None, workers: int | None) -> dict[str, float]:
    """What one run requests from the cluster: its share of a GPU, or of a node's cores."""
    gpus = ray.cluster_resources().get("GPU", 0)
    if device == "cuda" and not gpus:
        raise ValueError("this Ray cluster has no GPU; use --device cpu or omit it")
    if gpus and device != "cpu":
        return {"num_cpus": 1, "num_gpus": 1 / (workers or 1)}
    cores = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    if not any(cores):
        raise ValueError(
            "no node of this Ray cluster offers CPU cores; start one with `ray start --num-cpus 4`"
        )
    smallest = min(number for number in cores if number)
    return {"num_cpus": max(1, smallest // workers) if workers else 1}


def execution_on_node(execution: Execution, share: dict[str, float]) -> Execution:
    """The execution as a node sees it: absolute paths, and no more than the requested share."""
    out, data_dir = execution.out.resolve(), execution.data_dir.resolve()
    execution = replace(without_dataset(execution), out=out, data_dir=data_dir)
    if "num_gpus" in share:
        return replace(execution, device="cuda", concurrent=round(1 / share["num_gpus"]))
    return replace(execution, device="cpu", threads=int(share["num_cpus"]))


def run_on_node(recipe: Recipe, execution: Execution, folder: Path, mailbox: Any) -> Outcome:
    """run_recipe on a node, in the driver's folder: a recipe may contain a relative path of images."""
    on_progress = None if mailbox is None else lambda progress: mailbox.put.remote(recipe, progress)
    with contextlib.chdir(folder) if folder.is_dir() else contextlib.nullcontext():
        return run_recipe(recipe, execution, on_progress)


class Mailbox:
    """Keeps the latest progress of each run until the driver asks."""

    def __init__(self) -> None:
        self.latest: dict[Recipe, RunProgress] = {}

    def put(self, recipe: Recipe, progress: RunProgress) -> None:
        self.latest[recipe] = progress

    def take(self) -> dict[Recipe, RunProgress]:
        latest, self.latest = self.latest, {}
        return latest


def open_mailbox(ray: ModuleType) -> Any:
    """A mailbox in a process on the driver's own node, where its reader is."""
    strategies = import_module("ray.util.scheduling_strategies")
    here = strategies.NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(Mailbox).options(num_cpus=0, max_restarts=-1, scheduling_strategy=here).remote()


def forward_progress(ray: ModuleType, mailbox: Any, collector: Collector) -> None:
    if mailbox is None:
        return
    latest: dict[Recipe, RunProgress] = {}
    with contextlib.suppress(ray.exceptions.RayError):  # progress is only displayed; no run depends on it
        latest = ray.get(mailbox.take.remote(), timeout=10)
    for recipe, progress in latest.items():
        collector.progress(recipe, progress)


def collect(ray: ModuleType, run: Any) -> Outcome:
    """The outcome of a task that ended; an error of the run itself is raised here."""
    try:
        outcome: Outcome = ray.get(run)
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, Exception) else error) from error
    except ray.exceptions.RayError as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return Outcome(None, f"it was lost {NODE_RETRIES + 1} times with its node or its process: {reason}")
    return outcome
