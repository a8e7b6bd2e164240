"""train(recipe): from data to loss to a row. Killed at any moment, it goes on to the same numbers.

Each epoch draws from generators seeded by (seed, epoch), so a resumed run needs nothing but the weights, on
as many ranks as there are then.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from icmixup.lab.augment import augment
from icmixup.lab.datasets import Dataset, DataSpec, load_dataset
from icmixup.lab.training.evaluate import evaluate, split_scores
from icmixup.lab.training.ranks import (
    average_over_ranks,
    from_first,
    join_ranks,
    pick_device,
    rank,
    wait_for_all,
    world_size,
    wrap_for_ranks,
)
from icmixup.lab.training.recipe import Recipe
from icmixup.lab.training.run_folder import Run, open_run, provenance
from icmixup.lab.training.schedule import images_an_epoch, learning_rate, mix_seed
from icmixup.lab.training.step import PREPARING, Epoch, GraphedEpoch, Learner, autocast_dtype, make_learner, make_step
from icmixup.lab.training.trackers import open_trackers

BEAT_SECONDS = 0.2


class Beat(NamedTuple):
    """A sign of life of a run."""

    epoch: float  # epochs done
    epochs: int
    loss: float
    accuracy: float | None  # on the test set at the last look, percent
    images_per_second: float
    seconds_left: float


class Diverged(ValueError):
    """The loss is no longer a number."""


class Stopped(Exception):
    """Raised by who is told of a beat, to end the run there."""


def train(
    recipe: Recipe,
    root: Path,
    *,
    data_dir: Path,
    dataset: Dataset | None = None,
    device: torch.device | None = None,
    on_beat: Callable[[Beat], None] | None = None,
    checkpoint_seconds: float = 60.0,
    trackers: tuple[str, ...] = (),
    at_once: int = 1,
) -> dict[str, Any]:
    """Carry a recipe out in root / recipe.name, from where it stands, and return its row.

    Args:
        data_dir: where datasets are, or are put.
        dataset: the recipe's own, if it is loaded already.
        device: a GPU if there is one.
        on_beat: called a few times a second, at least once an epoch; may raise Stopped.
        checkpoint_seconds: least time between checkpoints.
        trackers: "tensorboard", "wandb".
        at_once: how many runs share the GPU or the cores, for the row: its minutes hang on it.
    """
    device = pick_device() if device is None else device
    run = open_run(root, recipe)
    if (row := run.result()) is not None:
        return row
    with join_ranks(device):
        data = (load_recipe_data(recipe, data_dir) if dataset is None else dataset).to(device)
        check_sizes(recipe, data)
        session = Session(run, data, make_learner(recipe, data, wrap_for_ranks), on_beat)
        session.resume()
        with open_trackers(trackers, run) as track:
            session.train(checkpoint_seconds, track)
        return from_first(run.finish(session.row(at_once)) if rank() == 0 else {})


def load_recipe_data(recipe: Recipe, data_dir: Path, *, show_progress: bool = False) -> Dataset:
    """The part of a dataset that a recipe trains on."""
    spec = DataSpec(
        recipe.dataset,
        fraction=recipe.fraction,
        per_class=recipe.per_class,
        imbalance=recipe.imbalance,
        data_seed=recipe.data_seed,
        split=recipe.split,
        image_size=recipe.image_size,
    )
    return load_dataset(spec, data_dir, show_progress=show_progress)


class Session:
    """A run under way: data, learner, and what is known of it so far."""

    def __init__(
        self, run: Run, data: Dataset, learner: Learner, on_beat: Callable[[Beat], None] | None
    ) -> None:
        self.run, self.data, self.learner = run, data, learner
        self.recipe = run.recipe
        self.on_beat = on_beat if rank() == 0 else None
        self.epochs_done = 0
        self.seconds = 0.0  # of all sittings
        self.speeds: list[float] = []  # images a second, by epoch
        self.loss = math.nan
        self.accuracy: float | None = None
        self.metrics: dict[str, Any] = {}
        self.order = torch.Generator(learner.device)
        self.images = images_an_epoch(self.recipe, len(data.train))
        self.epoch = Epoch(
            torch.empty_like(data.train.images[: self.images]),
            torch.empty_like(data.train.labels[: self.images]),
            torch.empty(math.ceil(self.images / self.recipe.batch_size), device=learner.device),
            self.recipe.batch_size,
        )

    def resume(self) -> None:
        """Go on from the newest good checkpoint, if there is one."""
        state, refused = self.run.load(self.learner.device)
        if state is not None:
            self.learner.load(state)
            self.epochs_done, self.seconds = state["epochs_done"], state["seconds"]
            self.accuracy, self.loss, self.metrics = state["accuracy"], state["loss"], state["metrics"]
        wait_for_all()  # until every rank has read what is now set aside
        if rank() == 0:
            self.run.cut_log(self.epochs_done)
            self.run.set_aside(refused)

    def train(self, checkpoint_seconds: float, track: Callable[[int, dict[str, float]], None]) -> None:
        """Epoch by epoch to the end, with a checkpoint now and then."""
        saved = time.monotonic()
        method, run_epoch = None, None
        for number in range(self.epochs_done, self.recipe.epochs):
            started = time.monotonic()
            if self.recipe.method_at(number) != method:  # at the start, and where mixing stops
                method = self.recipe.method_at(number)
                run_epoch = self.make_epoch(number)
                self.fill(number)  # also where the epoch before did: a warm-up draws from its generator
            assert run_epoch is not None
            losses = run_epoch()
            if number + 1 < self.recipe.epochs:  # queued behind the steps, so that a GPU never waits for it
                self.fill(number + 1)
            self.check_losses(losses, number)
            self.epochs_done = number + 1
            self.speeds.append(self.images / (time.monotonic() - started))
            self.look()
            self.seconds += time.monotonic() - started
            try:
                self.report(track)
            except Stopped:  # between two epochs, so that nothing need be lost
                self.save()
                raise
            # Clocks differ, so no rank may wait here for another: the first one saves when its own says so.
            if rank() == 0 and (time.monotonic() - saved >= checkpoint_seconds or self.at_end()):
                self.save()
                saved = time.monotonic()
        self.learner.optimizer.zero_grad()  # a compiled model outlives the run; its gradients need not

    def make_epoch(self, number: int) -> Callable[[], Tensor]:
        """What runs an epoch and returns (steps,) losses: captured steps on a GPU, eager ones elsewhere."""
        step = make_step(self.learner, self.recipe, self.recipe.method_at(number), self.data)
        if self.recipe.graph and self.learner.device.type == "cuda" and world_size() == 1:
            self.fill(number)
            return GraphedEpoch(self.learner, step, self.epoch)

        def eager() -> Tensor:
            losses = torch.zeros_like(self.epoch.lrs)
            started = beaten = time.monotonic()
            for k in range(len(losses)):
                images, labels, lr, whole = self.epoch.batch(k)
                if len(labels) < world_size():  # a rank would have nothing to learn from
                    losses[k] = losses[k - 1]
                    continue
                losses[k] = step(images[rank() :: world_size()], labels[rank() :: world_size()], lr, whole)
                if self.on_beat is not None and time.monotonic() - beaten > BEAT_SECONDS:
                    beaten = time.monotonic()
                    done = (k + 1) * self.recipe.batch_size
                    self.beat(losses[k].item(), done / self.images, done / (beaten - started))
            return average_over_ranks(losses)

        return eager

    def fill(self, number: int) -> None:
        """The images of epoch `number`: shuffled, augmented, with the learning rate of every step."""
        recipe, train = self.recipe, self.data.train
        self.order.manual_seed(mix_seed(recipe.seed, number, "order"))
        self.learner.generator.manual_seed(mix_seed(recipe.seed, number, f"mix {rank()}"))
        place = torch.randperm(len(train), generator=self.order, device=self.order.device)[: self.images]
        self.epoch.labels.copy_(train.labels[place])
        augmented = augment(
            train.images[place],
            padding=recipe.padding,
            padding_mode=recipe.padding_mode,
            flip=recipe.flip,
            rotation=recipe.rotation,
            trivial=recipe.trivial,
            generator=self.order,
        )
        self.epoch.images.copy_(augmented)
        steps = len(self.epoch.lrs)
        lrs = [learning_rate(recipe, number + k / steps) for k in range(steps)]
        self.epoch.lrs.copy_(torch.tensor(lrs))

    def check_losses(self, losses: Tensor, number: int) -> None:
        """The epoch's mean loss, if it and the weights are numbers; if not, the run ends here."""
        self.loss = losses.mean().item()
        # A last step can spoil the weights after a loss that was still a number.
        if not math.isfinite(self.loss) or not self.learner.is_finite():
            bad = (~losses.isfinite()).nonzero().flatten().tolist()
            what = (
                f"loss became {losses[bad[0]]:g} in step {bad[0] + 1}"
                if bad
                else "weights overflowed at the end"
            )
            raise Diverged(
                f"the {what} of epoch {number + 1} of {self.recipe.name}; try --lr {self.recipe.lr / 10:g}, "
                f"--clip-norm 1 or --precision float32 (the last good checkpoint is in {self.run.folder})"
            )

    def look(self) -> None:
        """Look at the test set, every few epochs and at the end."""
        if rank() == 0 and (self.epochs_done % self.recipe.eval_every == 0 or self.at_end()):
            with PREPARING:  # a look at a new shape must not fall into another thread's capture
                scores = split_scores(
                    self.learner.tested,
                    self.data.test,
                    self.data.mean,
                    self.data.std,
                    autocast_dtype=autocast_dtype(self.recipe, self.learner.device),
                )
            top = scores.argmax(dim=1)
            self.accuracy = 100 * (top == self.data.test.labels.cpu()).double().mean().item()
            if self.at_end():
                self.metrics = evaluate(scores, self.data.test.labels.cpu(), self.data.class_counts.cpu())

    def at_end(self) -> bool:
        return self.epochs_done == self.recipe.epochs

    def report(self, track: Callable[[int, dict[str, float]], None]) -> None:
        """One line in the log, one beat, one point in each tracker."""
        if rank() != 0:
            return
        values = {"loss": self.loss, "lr": learning_rate(self.recipe, self.epochs_done - 1)}
        if self.accuracy is not None:
            values["accuracy"] = self.accuracy
        self.run.log(epoch=self.epochs_done, **values, seconds=round(self.seconds, 3))
        track(self.epochs_done, values)
        self.beat(self.loss, 0.0, self.speeds[-1])

    def beat(self, loss: float, part: float, speed: float) -> None:
        if self.on_beat is None:
            return
        epoch = self.epochs_done + part
        left = (self.recipe.epochs - epoch) * self.images / max(speed, 1e-9)
        self.on_beat(Beat(epoch, self.recipe.epochs, loss, self.accuracy, speed, left))

    def save(self) -> None:
        progress = {
            "epochs_done": self.epochs_done,
            "seconds": self.seconds,
            "accuracy": self.accuracy,
            "loss": self.loss,
            "metrics": self.metrics,
        }
        self.run.save({**self.learner.state(), **progress})

    def row(self, at_once: int) -> dict[str, Any]:
        """The run as one row: recipe, metrics, time, and where it was made."""
        speeds = sorted(self.speeds)
        return {
            **self.recipe.fields(),
            "key": self.recipe.key,
            **self.metrics,
            "loss": self.loss,
            "train_images": len(self.data.train),
            "minutes": round(self.seconds / 60, 3),
            "images_per_second": round(speeds[len(speeds) // 2]) if speeds else None,
            "ranks": world_size(),
            "at_once": at_once,
            **provenance(self.learner.device),
            "folder": self.run.folder.name,
        }


def check_sizes(recipe: Recipe, data: Dataset) -> None:
    if recipe.batch_size > len(data.train):
        raise ValueError(
            f"a batch of {recipe.batch_size} is larger than the {len(data.train)} training images of "
            f"{recipe.dataset}; give --batch-size {max(1, len(data.train) // 4)}, say"
        )
    if recipe.batch_size < world_size():
        raise ValueError(
            f"a batch of {recipe.batch_size} leaves some of {world_size()} ranks without an image; "
            f"give --batch-size {32 * world_size()}, say"
        )
