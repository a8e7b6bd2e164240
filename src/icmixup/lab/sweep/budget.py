"""--budget 5m: which seeds, methods and epochs fit into the time; and the cost of a run, from its recipe.

All that was asked for is trained if it fits. Otherwise seeds are dropped first, down to two, then methods
from the end of the list, down to the baseline and one other, and only then epochs, down to the fewest at
which the recipe still learns. What does not fit even then is refused.
"""

from __future__ import annotations

import bisect
import hashlib
import heapq
import json
import math
import re
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from icmixup.lab.datasets.cifar import NO_TWINS, NUM_CLASSES, TRAIN_IMAGES
from icmixup.lab.datasets.subsets import DEIC_TOTAL, subset_counts
from icmixup.lab.sweep.progress import duration
from icmixup.lab.sweep.speed import Speed, measure_speed
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.ranks import pick_device
from icmixup.lab.training.recipe import Recipe
from icmixup.lab.training.run_folder import write_atomically
from icmixup.lab.training.stored import read_budgets
from icmixup.methods import find_method

DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")
MARGIN = 0.9  # of the budget is planned
FEWEST_SEEDS = 2  # an interval needs two
FEWEST_METHODS = 2
# Work per image relative to ResNet-18, and per step regardless of its images. They only determine the order
# of runs and the estimate of their time.
WORK = {"resnet18": 1.0, "resnet34": 1.7, "resnet50": 2.5, "resnet32": 0.4, "wrn16-8": 2.2, "small-cnn": 0.1}
STEP_WORK = 20.0


def parse_budget(text: str) -> float:
    """Seconds of "90s", "5m" or "1h30m"."""
    found = DURATION.fullmatch(text.strip().lower())
    hours, minutes, seconds = (float(part or 0) for part in (found.groups() if found else ("0", "0", "0")))
    total = 3600 * hours + 60 * minutes + seconds
    if total <= 0:
        raise ValueError(f"budget {text!r} is not a duration; use for example 90s, 5m or 1h30m")
    return total


def format_budget(seconds: float) -> str:
    """A duration of at least `seconds` that parse_budget reads: 5 s, a minute or five minutes rounded up."""
    step = 5 if seconds <= 120 else 60 if seconds <= 3600 else 300
    minutes, rest = divmod(math.ceil(seconds / step) * step, 60)
    hours, minutes = divmod(minutes, 60)
    parts = ((hours, "h"), (minutes, "m"), (rest, "s"))
    return "".join(f"{number}{unit}" for number, unit in parts if number)


class Fit(NamedTuple):
    """What is trained: every method with every seed."""

    epochs: int
    seeds: int  # number of them
    methods: tuple[str, ...]


class Question(NamedTuple):
    """What should fit into the time."""

    recipe: Recipe
    methods: tuple[str, ...]
    seeds: int
    baseline: str
    floor: int  # fewest epochs

    @property
    def asked(self) -> Fit:
        return Fit(self.recipe.epochs, self.seeds, self.methods)

    @property
    def smallest(self) -> Fit:
        """The least that still compares something."""
        methods = keep_methods(self.methods, min(len(self.methods), FEWEST_METHODS), self.baseline)
        return Fit(self.floor, min(self.seeds, FEWEST_SEEDS), methods)


def keep_methods(methods: Sequence[str], number: int, baseline: str) -> tuple[str, ...]:
    """The first methods of the list, the baseline among them."""
    others = [method for method in methods if method != baseline][: number - 1]
    return tuple(method for method in methods if method == baseline or method in others)


def fits_at_full_length(question: Question) -> Iterator[Fit]:
    """All fits with the recipe's epochs, from what was asked down to the fewest seeds and methods."""
    epochs, least = question.recipe.epochs, question.smallest
    for seeds in range(question.seeds, least.seeds - 1, -1):
        yield Fit(epochs, seeds, question.methods)
    for number in range(len(question.methods) - 1, len(least.methods) - 1, -1):
        yield Fit(epochs, least.seeds, keep_methods(question.methods, number, question.baseline))


def choose_fit(question: Question, seconds: float, speed: Speed, lanes: int) -> Fit | None:
    """The first fit, in the order in which things are dropped, that takes at most `seconds`, or None.

    Args:
        lanes: number of concurrent runs.
    """

    def takes(fit: Fit) -> float:
        return fit_seconds(fit, question.recipe, speed, lanes)

    for fit in fits_at_full_length(question):
        if takes(fit) <= seconds:
            return fit
    lengths, least = range(question.floor, question.recipe.epochs), question.smallest
    fitting = bisect.bisect_right(lengths, seconds, key=lambda epochs: takes(least._replace(epochs=epochs)))
    return least._replace(epochs=lengths[fitting - 1]) if fitting else None


def fit_seconds(fit: Fit, recipe: Recipe, speed: Speed, lanes: int) -> float:
    """Time of all runs: each goes to the first worker that is free, seed by seed."""
    runs = [speed.run_seconds(method, fit.epochs, recipe.eval_every) for method in fit.methods]
    return speed.pool + makespan(runs * (fit.seeds * (recipe.folds or 1)), lanes)


def makespan(durations: Sequence[float], lanes: int) -> float:
    """When the last of these runs ends, if each starts in order on the first free lane."""
    free = [0.0] * lanes
    for seconds in durations:
        heapq.heapreplace(free, free[0] + seconds)
    return max(free)


def fit_budget(
    question: Question, seconds: float, execution: Execution, *, remeasure: bool = False
) -> tuple[Fit, float]:
    """What fits into `seconds`, and how many of them are left after measuring.

    The answer is stored in budgets.json: the same command must resume the same recipes, although no two
    measurements agree.

    Args:
        execution: with its dataset loaded and its number of concurrent runs set.
        remeasure: ignore the stored answer.
    """
    key = question_key(question, seconds, execution)
    path = execution.out / "budgets.json"
    known = read_budgets(path)
    if key in known and not remeasure:
        return Fit(known[key]["epochs"], known[key]["seeds"], tuple(known[key]["methods"])), seconds
    started = time.monotonic()
    speed = measure_speed(question.recipe, question.methods, seconds, execution)
    measuring = time.monotonic() - started
    fit = choose_fit(question, MARGIN * (seconds - measuring), speed, execution.concurrent)
    if fit is None:
        needed = fit_seconds(question.smallest, question.recipe, speed, execution.concurrent)
        raise ValueError(describe_refusal(question.smallest, seconds, needed, measuring))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(known | {key: fit._asdict()}, indent=1).encode())
    return fit, seconds - measuring


def question_key(question: Question, seconds: float, execution: Execution) -> str:
    """Ten hexadecimal digits of everything that the answer depends on, besides the speed."""
    data = execution.dataset
    parts = [
        question.recipe.fields(),
        None if data is None else data.fingerprint,
        *(question.methods, question.seeds, question.baseline, question.floor, seconds),
        *(str(pick_device(execution.device)), execution.concurrent),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:10]


def describe_refusal(least: Fit, seconds: float, needed: float, measuring: float) -> str:
    """That the time is too short, why, and the smallest sensible budget."""
    enough = format_budget(1.1 * (needed / MARGIN + measuring))  # a tenth more: speeds vary
    names, several = " and ".join(least.methods), "s" if least.seeds > 1 else ""
    return (
        f"--budget of {duration(seconds)} is too short: {names} with {least.seeds} seed{several} and "
        f"{least.epochs} epochs, the fewest at which this recipe still learns, take about "
        f"{duration(needed)} on this machine; use --budget {enough} or more, a smaller --model, or fewer "
        "images"
    )


def describe_fit(asked: Fit, fit: Fit) -> str:
    """What was dropped to fit the time, in words; empty if nothing was."""
    dropped = [method for method in asked.methods if method not in fit.methods]
    parts = [
        f"{fit.seeds} of {asked.seeds} seeds" if fit.seeds < asked.seeds else "",
        f"{len(fit.methods)} of {len(asked.methods)} methods (without {', '.join(dropped)})"
        if dropped
        else "",
        f"{fit.epochs} of {asked.epochs} epochs" if fit.epochs < asked.epochs else "",
    ]
    return ", ".join(part for part in parts if part)


def slowest(methods: Sequence[str]) -> str:
    """The most expensive method: two forward passes before one, Infinite Class before soft targets."""

    def cost(name: str) -> tuple[bool, int, int]:
        method = find_method(name)
        return method.draw != "none" and method.clean_weight > 0, method.num_virtual, len(method.axes)

    return max(methods, key=cost)


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
