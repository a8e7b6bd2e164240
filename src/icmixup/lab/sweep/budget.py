"""How long runs take: an estimate from the recipe alone, and --budget 5m, as many epochs as fit."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from icmixup.lab.datasets.cifar import NO_TWINS, NUM_CLASSES, TRAIN_IMAGES
from icmixup.lab.datasets.subsets import DEIC_TOTAL, subset_counts
from icmixup.lab.sweep.local import threads_per_run
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.loop import Diverged, RunProgress, train
from icmixup.lab.training.ranks import pick_device
from icmixup.lab.training.recipe import Recipe
from icmixup.lab.training.run_folder import write_atomically
from icmixup.lab.training.stored import read_budgets
from icmixup.methods import find_method

DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")
MARGIN = 0.9  # of the budget is planned; evaluations and checkpoints take the rest
TRIAL_SHARE, TRIAL_SECONDS = 0.05, (1.0, 30.0)  # share and bounds of measuring
TRIAL_EPOCHS = 50  # or as many as fit into that time
# Work per image relative to ResNet-18, and per step regardless of its images. They only determine the order
# of runs and the estimate of their time.
WORK = {"resnet18": 1.0, "resnet34": 1.7, "resnet50": 2.5, "resnet32": 0.4, "wrn16-8": 2.2, "small-cnn": 0.1}
STEP_WORK = 20.0


class EnoughMeasured(Exception):
    """Ends a trial run."""


def parse_budget(text: str) -> float:
    """Seconds of "90s", "5m" or "1h30m"."""
    found = DURATION.fullmatch(text.strip().lower())
    hours, minutes, seconds = (float(part or 0) for part in (found.groups() if found else ("0", "0", "0")))
    total = 3600 * hours + 60 * minutes + seconds
    if total <= 0:
        raise ValueError(f"budget {text!r} is not a duration; use for example 90s, 5m or 1h30m")
    return total


def plan_epochs(
    recipe: Recipe,
    methods: Sequence[str],
    num_seeds: int,
    seconds: float,
    execution: Execution,
    *,
    remeasure: bool = False,
) -> int:
    """The number of epochs, at least one, for which methods x seeds finish within `seconds`.

    The answer is stored in budgets.json: the same command must resume the same recipes, although no two
    measurements agree. `remeasure` ignores the stored answer.

    Args:
        execution: with its dataset loaded and its number of concurrent runs set.
    """
    device, concurrent = pick_device(execution.device), execution.concurrent
    question = json.dumps(
        [
            recipe.fields() | {"epochs": None},
            None if execution.dataset is None else execution.dataset.fingerprint,
            *(list(methods), num_seeds, seconds, str(device), concurrent),
        ]
    )
    key = hashlib.sha256(question.encode()).hexdigest()[:10]
    path = execution.out / "budgets.json"
    known = read_budgets(path)
    if remeasure or key not in known:
        started = time.monotonic()
        slow = dataclasses.replace(recipe, method=slowest(methods))
        with shared_threads(concurrent, device):
            start_up, epoch = measure_epoch(slow, seconds, execution)
        left = seconds - (time.monotonic() - started)
        # Concurrent runs slow each other down on a GPU, nearly in proportion: counted as if sequential.
        lanes = concurrent if device.type != "cuda" else min(concurrent, torch.cuda.device_count())
        known[key] = fit_epochs(left, math.ceil(len(methods) * num_seeds / lanes), start_up, epoch)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(known, indent=1).encode())
    return known[key]


def estimate_seconds(recipe: Recipe, method: str, runs: int, execution: Execution) -> float:
    """Time of `runs` runs, from a trial of about a second with the given method, the most expensive one.

    Args:
        execution: with its dataset loaded and its number of concurrent runs set.
    """
    device = pick_device(execution.device)
    with shared_threads(execution.concurrent, device):
        start_up, epoch = measure_epoch(dataclasses.replace(recipe, method=method), 0.0, execution)
    return math.ceil(runs / execution.concurrent) * (start_up + recipe.epochs * epoch)


@contextlib.contextmanager
def shared_threads(concurrent: int, device: torch.device) -> Iterator[None]:
    """On a CPU, use the number of threads that each of several concurrent runs has."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(threads_per_run(concurrent))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def fit_epochs(seconds: float, runs: int, start_up: float, epoch: float) -> int:
    """Epochs of `epoch` seconds for which `runs` sequential runs have time, at least one."""
    return max(1, math.floor((MARGIN * seconds / runs - start_up) / epoch))


def slowest(methods: Sequence[str]) -> str:
    """The most expensive method: two forward passes before one, Infinite Class before soft targets."""

    def cost(name: str) -> tuple[bool, int, int]:
        method = find_method(name)
        return method.draw != "none" and method.clean_weight > 0, method.num_virtual, len(method.axes)

    return max(methods, key=cost)


def measure_epoch(recipe: Recipe, budget: float, execution: Execution) -> tuple[float, float]:
    """Seconds before the first epoch and seconds per epoch, from a trial run in a temporary folder."""
    least, most = TRIAL_SECONDS
    limit = min(max(TRIAL_SHARE * budget, least), most)
    reports: list[tuple[float, float]] = []  # time, and epochs done
    started = time.monotonic()

    def listen(progress: RunProgress) -> None:
        reports.append((time.monotonic() - started, progress.epoch))
        if len(reports) > 2 and reports[-1][0] > limit:
            raise EnoughMeasured

    trial = dataclasses.replace(recipe, epochs=TRIAL_EPOCHS, lr_drops=None, eval_every=TRIAL_EPOCHS)
    # A trial that diverges has been timed; the run itself will report the divergence.
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(EnoughMeasured, Diverged):
        train(trial, dataclasses.replace(execution, out=Path(folder), trackers=()), listen)
    return epoch_seconds(reports, time.monotonic() - started)


def epoch_seconds(reports: Sequence[tuple[float, float]], total: float) -> tuple[float, float]:
    """Seconds of start-up and of an epoch; the time before the first report, with its warm-up, is not
    counted."""
    if len(reports) < 2 or reports[-1][1] <= reports[0][1]:
        return 0.0, total
    (first, done), (last, all_done) = reports[0], reports[-1]
    epoch = (last - first) / (all_done - done)
    return max(0.0, total - all_done * epoch), epoch


def work(recipe: Recipe) -> float:
    """The cost of a run, in images of a ResNet-18."""
    images = count_images(recipe)
    method = find_method(recipe.method)
    passes = 2 if method.clean_weight and method.draw != "none" else 1
    steps = math.ceil(images / recipe.batch_size)
    return recipe.epochs * (images * WORK.get(recipe.model, 1.0) * passes + steps * STEP_WORK)


def count_images(recipe: Recipe) -> int:
    """Number of training images of a recipe, without loading them."""
    name = "cifar10" if recipe.dataset == NO_TWINS else recipe.dataset
    if name not in NUM_CLASSES:
        return TRAIN_IMAGES
    classes = NUM_CLASSES[name]
    each = TRAIN_IMAGES // classes if recipe.split is None else DEIC_TOTAL
    counts = subset_counts(
        torch.full((classes,), each),
        per_class=recipe.per_class,
        fraction=recipe.fraction,
        imbalance=recipe.imbalance,
    )
    return int(counts.sum())
