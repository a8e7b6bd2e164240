"""How long runs take: a guess from the recipe alone, and --budget 5m, as many epochs as fit."""

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

from icmixup.lab.datasets import Dataset
from icmixup.lab.datasets.subsets import DEIC_TOTAL, subset_counts
from icmixup.lab.training.recipe import Recipe
from icmixup.lab.training.run_folder import write_whole
from icmixup.lab.datasets.cifar import NO_TWINS, NUM_CLASSES, TRAIN_IMAGES
from icmixup.lab.training.loop import Beat, Diverged, train
from icmixup.lab.sweep.local import share_of_threads
from icmixup.methods import find_method

DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")
MARGIN = 0.9  # of the budget is planned with: looks at the test set and checkpoints take the rest
TRIAL_SHARE, TRIAL_SECONDS = 0.05, (1.0, 30.0)  # of the budget, within these bounds, measures an epoch
TRIAL_EPOCHS = 50  # or as many as fit into that time
# Work for one image, ResNet-18's being 1, and for one step however few its images: only the order of runs and
# the guess of their time hang on these.
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
        raise ValueError(f"budget {text!r} is no length of time; give 90s, 5m or 1h30m, say")
    return total


def plan_epochs(
    recipe: Recipe,
    methods: Sequence[str],
    num_seeds: int,
    seconds: float,
    *,
    root: Path,
    data_dir: Path,
    dataset: Dataset,
    device: torch.device,
    at_once: int = 1,
    again: bool = False,
) -> int:
    """How many epochs, at least one, let methods x seeds end within so many seconds.

    The answer is kept in root / budgets.json: the same command must go on with the same recipes, and a clock
    never says the same twice. `again` measures anew.
    """
    question = json.dumps(
        [recipe.fields() | {"epochs": None}, list(methods), num_seeds, seconds, str(device), at_once]
    )
    key = hashlib.sha256(question.encode()).hexdigest()[:10]
    path = root / "budgets.json"
    known: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}
    if again or key not in known:
        started = time.monotonic()
        slow = dataclasses.replace(recipe, method=slowest(methods))
        with beside_others(at_once, device):
            start_up, epoch = measure_epoch(slow, seconds, data_dir, dataset, device)
        left = seconds - (time.monotonic() - started)
        # Beside others a run on a GPU is slower, by nearly as much as they are many: reckoned as if in turn.
        lanes = at_once if device.type != "cuda" else min(at_once, torch.cuda.device_count())
        known[key] = fit_epochs(left, math.ceil(len(methods) * num_seeds / lanes), start_up, epoch)
        root.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(known, indent=1).encode())
    return known[key]


@contextlib.contextmanager
def beside_others(at_once: int, device: torch.device) -> Iterator[None]:
    """On a CPU, only as many threads as a run has beside the others."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(share_of_threads(at_once))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def fit_epochs(seconds: float, runs: int, start_up: float, epoch: float) -> int:
    """Epochs of `epoch` seconds that each of so many runs in turn has time for, at least one."""
    return max(1, math.floor((MARGIN * seconds / runs - start_up) / epoch))


def slowest(methods: Sequence[str]) -> str:
    """The method that costs most: two forwards before one, Infinite Class before soft targets."""

    def cost(name: str) -> tuple[bool, int, int]:
        method = find_method(name)
        return method.draw != "none" and method.clean_weight > 0, method.num_virtual, len(method.axes)

    return max(methods, key=cost)


def measure_epoch(
    recipe: Recipe, budget: float, data_dir: Path, dataset: Dataset, device: torch.device
) -> tuple[float, float]:
    """Seconds before the first epoch and seconds an epoch, from a trial run that leaves nothing behind."""
    least, most = TRIAL_SECONDS
    limit = min(max(TRIAL_SHARE * budget, least), most)
    beats: list[tuple[float, float]] = []  # when, and how many epochs were done
    started = time.monotonic()

    def listen(beat: Beat) -> None:
        beats.append((time.monotonic() - started, beat.epoch))
        if len(beats) > 2 and beats[-1][0] > limit:
            raise EnoughMeasured

    trial = dataclasses.replace(recipe, epochs=TRIAL_EPOCHS, lr_drops=None, eval_every=TRIAL_EPOCHS)
    # A trial that diverges has told its speed; its run will say the rest.
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(EnoughMeasured, Diverged):
        train(trial, Path(folder), data_dir=data_dir, dataset=dataset, device=device, on_beat=listen)
    return read_beats(beats, time.monotonic() - started)


def read_beats(beats: Sequence[tuple[float, float]], total: float) -> tuple[float, float]:
    """Start-up and epoch seconds; what comes before the first beat, warm-up included, tells no speed."""
    if len(beats) < 2 or beats[-1][1] <= beats[0][1]:
        return 0.0, total
    (first, done), (last, all_done) = beats[0], beats[-1]
    epoch = (last - first) / (all_done - done)
    return max(0.0, total - all_done * epoch), epoch


def work(recipe: Recipe) -> float:
    """How much there is to do, in images of a ResNet-18."""
    images = count_images(recipe)
    method = find_method(recipe.method)
    passes = 2 if method.clean_weight and method.draw != "none" else 1
    steps = math.ceil(images / recipe.batch_size)
    return recipe.epochs * (images * WORK.get(recipe.model, 1.0) * passes + steps * STEP_WORK)


def count_images(recipe: Recipe) -> int:
    """Train images of a recipe, without a look at them."""
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
