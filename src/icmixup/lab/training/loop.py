"""train(recipe, execution): from data to loss to a result row, resumable after a kill with the same numbers.

Each epoch draws from generators seeded by (seed, epoch), so a resumed run needs only the weights, on any
number of ranks.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from icmixup.adjustment import adjust_scores
from icmixup.lab.datasets import Dataset
from icmixup.lab.training.artifacts import save_artifacts
from icmixup.lab.training.classifier import adjust_bias, bias_of, linear_of
from icmixup.lab.training.data import training_data
from icmixup.lab.training.evaluate import Metrics, check_test_size, evaluate, split_scores
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.feed import make_feed
from icmixup.lab.training.identity import Identity, autocast_dtype, identify
from icmixup.lab.training.inputs import write_inputs
from icmixup.lab.training.lock import lock_folder
from icmixup.lab.training.predictions import Predictions, finished_row, make_predictions, write_predictions
from icmixup.lab.training.ranks import (
    average_over_ranks,
    broadcast_from_first,
    compare_notes,
    join_ranks,
    pick_device,
    rank,
    wait_for_all,
    world_size,
)
from icmixup.lab.training.recipe import Recipe, derive_seed, learning_rate, lengthen
from icmixup.lab.training.run_folder import Checkpoint, Row, Run, open_run, provenance
from icmixup.lab.training.step import (
    PREPARING,
    Epoch,
    GraphedEpoch,
    Learner,
    in_gpu_thread,
    is_captured,
    make_learner,
    make_step,
)
from icmixup.lab.training.trackers import open_trackers

PROGRESS_SECONDS = 0.2
COPY_WAIT_SECONDS = 0.25  # longer than a copy or two, shorter than a capture


class RunProgress(NamedTuple):
    """How far a run is."""

    epoch: float  # epochs done
    epochs: int
    loss: float
    accuracy: float | None  # on the test set at the last evaluation, percent
    images_per_second: float
    seconds_left: float


OnProgress = Callable[[RunProgress], None]


class Diverged(ValueError):
    """The loss or the weights are no longer finite."""


class Stopped(Exception):
    """Raised by a progress callback to end the run after a checkpoint."""


def train(recipe: Recipe, execution: Execution, on_progress: OnProgress | None = None) -> Row:
    """Train a recipe in its folder under execution.out, resuming from its checkpoint, and return its row.

    A finished run of the same recipe and identity is not trained again.

    Args:
        on_progress: called several times a second, at least once per epoch; may raise Stopped.
    """
    if recipe.after != "none":
        raise ValueError(f"after={recipe.after!r} is the work of `icmixup retrain`, given a trained run")
    device = pick_device(execution.device)
    with join_ranks(device), ExitStack() as held:
        with compare_notes() as notes:
            data = training_data(recipe, execution)
            recipe = lengthen(recipe, len(data.train))
            identity = identify(recipe, data, device.type)
            run = open_run(execution.out, recipe, identity, reuse=execution.reuse)
            row = finished_row(run) if world_size() == 1 else None
            if row is None:
                check_sizes(recipe, data)
                held.enter_context(lock_run(run))
                row = finished_row(run)  # the process that held the lock may have finished it
            if world_size() > 1:
                notes.update(describe_start(run, identity, row))
        if row is not None:
            return row
        data = data.to(device)
        session = Session(run, data, make_learner(recipe, data), on_progress)
        session.biases()  # a network that has none is refused now, not after the training
        session.resume()
        with open_trackers(execution.trackers, run) as track:
            session.train(execution.checkpoint_seconds, track)
        return broadcast_from_first(session.finish(execution.concurrent) if rank() == 0 else {})


def lock_run(run: Run) -> AbstractContextManager[None]:
    """The lock of a run's folder, on rank 0. Other ranks would wait too long for a rank 0 that waits."""
    return lock_folder(run.folder, wait=world_size() == 1) if rank() == 0 else nullcontext()


def describe_start(run: Run, identity: Identity, row: Row | None) -> dict[str, object]:
    """What must be the same on every rank: recipe, identity with the images, and the state of the folder."""
    state, _ = run.load(torch.device("cpu"))
    return {
        **run.recipe.fields(),
        **{f"the identity's {name}": value for name, value in identity._asdict().items()},
        "the checkpoint's epoch": None if state is None else state["epochs_done"],
        "finished": row is not None,
    }


class Session:
    """A run in progress: its data, its learner, and its results so far."""

    def __init__(self, run: Run, data: Dataset, learner: Learner, on_progress: OnProgress | None) -> None:
        self.run, self.data, self.learner = run, data, learner
        self.recipe = run.recipe
        self.on_progress = on_progress if rank() == 0 else None
        self.epochs_done = 0
        self.seconds = 0.0  # including time before a resume
        self.speeds: list[float] = []  # images per second, by epoch
        self.loss = math.nan
        self.accuracy: float | None = None
        self.predictions: Predictions | None = None  # of the last epoch
        self.last_epoch: Checkpoint | None = None  # a copy of the state at the end of the last epoch
        self.feed = make_feed(self.recipe, data.train)
        self.images = self.feed.count
        reset_peak_memory(learner.device)

    @property
    def epoch(self) -> Epoch:
        """The images, labels and learning rates of the current epoch."""
        return self.feed.epoch

    def resume(self) -> None:
        """Continue from the newest valid checkpoint, if there is one."""
        state, rejected = self.run.load(self.learner.device)
        if state is not None:
            self.learner.load(state)
            self.epochs_done, self.seconds = state["epochs_done"], state["seconds"]
            self.accuracy, self.loss = state["accuracy"], state["loss"]
        wait_for_all()  # every rank must have read the files before they are renamed
        if rank() == 0:
            self.run.cut_log(self.epochs_done)
            self.run.set_aside(rejected)

    def train(self, checkpoint_seconds: float, track: Callable[[int, dict[str, float]], None]) -> None:
        """Train the remaining epochs, with a checkpoint from time to time and when interrupted."""
        try:
            self.train_epochs(checkpoint_seconds, track)
        except (KeyboardInterrupt, Stopped):
            self.save_last_epoch()
            raise

    def train_epochs(self, checkpoint_seconds: float, track: Callable[[int, dict[str, float]], None]) -> None:
        saved = time.monotonic()
        method, run_epoch = None, None
        for number in range(self.epochs_done, self.recipe.epochs):
            started = time.monotonic()
            if self.recipe.method_at(number) != method:  # at the start, and where mixing ends
                method = self.recipe.method_at(number)
                run_epoch = self.make_epoch(number)
                self.fill(number)  # again, since the warm-up of a capture draws from the generator
            assert run_epoch is not None
            losses = run_epoch()
            if number + 1 < self.recipe.epochs:  # queued behind the steps, so that a GPU never waits for it
                self.fill(number + 1)
                self.feed.start_first()
            self.check_losses(losses, number)
            if self.recipe.compile and rank() == 0 and not self.speeds:  # after the first epoch
                save_artifacts()
            self.epochs_done = number + 1
            self.adjust_if_due()
            self.speeds.append(self.images / (time.monotonic() - started))
            self.evaluate_if_due()
            self.seconds += time.monotonic() - started
            self.remember_epoch()
            self.report(track)
            # Clocks differ between ranks, so no rank waits for another here: rank 0 decides alone.
            if rank() == 0 and (time.monotonic() - saved >= checkpoint_seconds or self.at_end()):
                self.save()
                saved = time.monotonic()
        self.learner.optimizer.zero_grad()  # a compiled model outlives the run; its gradients need not

    def make_epoch(self, number: int) -> Callable[[], Tensor]:
        """A function that runs an epoch and returns (steps,) losses: captured on a GPU, eager elsewhere."""
        step = make_step(self.learner, self.recipe, self.recipe.method_at(number), self.data)
        if is_captured(self.recipe, self.learner.device):
            self.fill(number)
            return GraphedEpoch(self.learner, step, self.epoch, self.feed.prepare)

        def eager() -> Tensor:
            losses = torch.zeros_like(self.epoch.lrs)
            started = reported = time.monotonic()
            for k in range(len(losses)):
                if self.images - k * self.recipe.batch_size < world_size():  # a rank would have no image
                    losses[k] = losses[k - 1]
                    continue
                losses[k] = step(*self.feed.batch(k))
                if self.on_progress is not None and time.monotonic() - reported > PROGRESS_SECONDS:
                    reported = time.monotonic()
                    done = (k + 1) * self.recipe.batch_size
                    self.report_progress(losses[k].item(), done / self.images, done / (reported - started))
            return average_over_ranks(losses)

        return eager

    def fill(self, number: int) -> None:
        """The images of epoch `number`: shuffled, augmented, with the learning rate of every step."""
        self.learner.generator.manual_seed(derive_seed(self.recipe.seed, number, f"mix {rank()}"))
        self.feed.fill(number)

    def check_losses(self, losses: Tensor, number: int) -> None:
        """Store the epoch's mean loss; a loss or weights that are not finite end the run."""
        # The last step can overflow the weights after a loss that was still finite. Both are queued behind
        # the steps and waited for once: a GPU is idle from then to the next step.
        found = torch.stack([losses.mean(), self.learner.is_finite().to(losses.dtype)])
        self.loss, finite = found.tolist()
        if not math.isfinite(self.loss) or not finite:
            bad = (~losses.isfinite()).nonzero().flatten().tolist()
            what = (
                f"loss became {losses[bad[0]]:g} in step {bad[0] + 1}"
                if bad
                else "weights overflowed at the end"
            )
            raise self.diverged(f"the {what} of epoch {number + 1} of {self.run.folder.name}")

    def diverged(self, what: str) -> Diverged:
        """The error of a run that cannot go on."""
        saved = self.run.checkpoints()[0].exists()
        where = f" (the last valid checkpoint is in {self.run.folder})" if saved else ""
        return Diverged(
            f"{what}; try --lr {self.recipe.lr / 10:g}, --clip-norm 1 or --precision float32{where}"
        )

    def adjust_if_due(self) -> None:
        """Adjust the classifier for class sizes after the last epoch, for methods that do so."""
        tau = self.recipe.tau_afterwards
        if tau is not None and self.at_end():
            for bias in self.biases():
                adjust_bias(bias, self.data, tau)

    def biases(self) -> list[Tensor]:
        """The biases that are adjusted after training: of the network and of its average; none by default."""
        if self.recipe.tau_afterwards is None:
            return []
        models = filter(None, (self.learner.model, self.learner.average))
        return [bias_of(linear_of(model, self.recipe, self.data), self.recipe) for model in models]

    def evaluate_if_due(self) -> None:
        """Evaluate on the test set, every few epochs and at the end."""
        if rank() == 0 and (self.epochs_done % self.recipe.eval_every == 0 or self.at_end()):
            predictions = self.predict()
            self.accuracy = 100 * float(predictions.correct.mean())
            if self.at_end():
                self.predictions = predictions

    def predict(self) -> Predictions:
        """The scores of all test images with the current weights."""
        with PREPARING:  # evaluating a new shape must not fall into another thread's capture
            scores = in_gpu_thread(self.scores, self.learner.device)
        if not scores.isfinite().all():  # large weights, which are finite, can have infinite scores
            raise self.diverged(
                f"test images have scores that are not finite after epoch {self.epochs_done} of "
                f"{self.run.folder.name}"
            )
        test = self.data.test
        return make_predictions(scores, test.labels, test.file_names, self.data.class_names)

    def scores(self) -> Tensor:
        """(N, C) scores of the test images, adjusted for class sizes if they will be after training."""
        scores = split_scores(
            self.learner.tested,
            self.data.test,
            self.data.mean,
            self.data.std,
            autocast_dtype=autocast_dtype(self.recipe, self.learner.device),
        )
        tau = self.recipe.tau_afterwards
        if tau is None or self.at_end():  # then it is part of the weights
            return scores
        return adjust_scores(scores, self.data.class_counts.to(scores.device), tau)

    def finish(self, concurrent: int) -> Row:
        """Write predictions, then the result that is computed from them, and return it."""
        # None if the last checkpoint was complete, but the result was not written.
        predictions = self.predict() if self.predictions is None else self.predictions
        write_predictions(self.run.folder, predictions)
        write_inputs(self.run.folder, self.data)
        metrics = evaluate(*predictions.tensors(), self.data.class_counts.cpu())
        return self.run.finish(self.row(metrics, concurrent))

    def at_end(self) -> bool:
        return self.epochs_done == self.recipe.epochs

    def report(self, track: Callable[[int, dict[str, float]], None]) -> None:
        """One line in the log, one progress report, one point in each tracker."""
        if rank() != 0:
            return
        values = {"loss": self.loss, "lr": learning_rate(self.recipe, self.epochs_done - 1)}
        if self.accuracy is not None:
            values["accuracy"] = self.accuracy
        self.run.log(epoch=self.epochs_done, **values, seconds=round(self.seconds, 3))
        track(self.epochs_done, values)
        self.report_progress(self.loss, 0.0, self.speeds[-1])

    def report_progress(self, loss: float, part: float, speed: float) -> None:
        if self.on_progress is None:
            return
        epoch = self.epochs_done + part
        left = (self.recipe.epochs - epoch) * self.images / max(speed, 1e-9)
        self.on_progress(RunProgress(epoch, self.recipe.epochs, loss, self.accuracy, speed, left))

    def save(self) -> None:
        self.run.save(self.state())

    def save_last_epoch(self) -> None:
        """Write a checkpoint of the last complete epoch if the one on disk is older.

        The weights themselves may be in the middle of an epoch, from which no run could resume.
        """
        if self.last_epoch is None:
            return
        stored, _ = self.run.load(torch.device("cpu"))
        if stored is None or stored["epochs_done"] < self.last_epoch["epochs_done"]:
            self.run.save(self.last_epoch)

    def remember_epoch(self) -> None:
        """Copy the state for an interrupt, into the memory of the copy before.

        A first copy takes new memory, which must not fall into a capture of another thread. Waiting for that
        would stop every run on the GPU while one of them starts, so the state is not copied then.
        """
        if rank() != 0:
            return
        state = self.state()
        live = tensors_in(state)
        kept = tensors_in(self.last_epoch)[: len(live)]  # after the last epoch, all but the optimizer's
        if can_overwrite(kept, live):
            # An interrupt would find half a copy, but no step changes the state itself meanwhile.
            self.last_epoch = state
            copy_tensors(live, kept)
            self.last_epoch = copy.deepcopy(state, dict(zip(map(id, live), kept, strict=True)))
        elif PREPARING.acquire(timeout=COPY_WAIT_SECONDS):
            try:
                self.last_epoch = copy.deepcopy(state)
            finally:
                PREPARING.release()

    def state(self) -> Checkpoint:
        """The state of the learner and of the run, as a checkpoint stores it.

        After the last epoch no step needs the state of the optimizer, two thirds of a checkpoint with AdamW.
        """
        progress: Checkpoint = {
            "epochs_done": self.epochs_done,
            "seconds": self.seconds,
            "accuracy": self.accuracy,
            "loss": self.loss,
        }
        if self.at_end():
            progress["optimizer"] = None
        return {**self.learner.state(), **progress}

    def row(self, metrics: Metrics, concurrent: int) -> Row:
        """The run as one row: recipe, metrics, time, and where it was made."""
        speeds = sorted(self.speeds)
        # A finished run that is only evaluated again keeps what was measured when it was trained.
        before = self.run.result() or {}
        now = identify(self.recipe, self.data, self.learner.device.type)
        return {
            **self.recipe.fields(),
            "key": self.recipe.key,
            **metrics,
            "loss": self.loss,
            "train_images": len(self.data.train),
            "minutes": round(self.seconds / 60, 3),
            "images_per_second": round(speeds[len(speeds) // 2])
            if speeds
            else before.get("images_per_second"),
            # A finished run that is only evaluated again was not measured.
            "memory_mb": peak_memory(self.learner.device) if speeds else before.get("memory_mb"),
            "ranks": world_size(),
            "at_once": concurrent,  # the column's name in results/*.csv
            **joined_columns(now if self.run.identity is None else self.run.identity, now),
            **provenance(self.learner.device),
            "folder": self.run.folder.name,
        }


def tensors_in(state: object) -> list[Tensor]:
    """All tensors of nested dictionaries and lists, in their order."""
    if isinstance(state, Tensor):
        return [state]
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


def can_overwrite(tensors: list[Tensor], sources: list[Tensor]) -> bool:
    """Whether the tensors are laid out as their sources, with a place in memory for each number."""

    def layouts(tensors: list[Tensor]) -> list[tuple[object, ...]]:
        return [(tensor.dtype, tensor.device, tensor.shape, tensor.stride()) for tensor in tensors]

    return layouts(tensors) == layouts(sources) and not any(0 in tensor.stride() for tensor in tensors)


def copy_tensors(sources: list[Tensor], targets: list[Tensor]) -> None:
    """Copy many tensors in a few kernels for each dtype and device."""
    groups: dict[tuple[object, ...], list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for source, target in zip(sources, targets, strict=True):
        groups[source.dtype, source.device].append((source, target))
    for pairs in groups.values():
        torch._foreach_copy_([target for _, target in pairs], [source for source, _ in pairs])


def reset_peak_memory(device: torch.device) -> None:
    """Start measuring the peak of a GPU; that of a process cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int | None:
    """Peak memory in MB: of tensors on the GPU, with those of concurrent runs, or of the whole process."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 1e6)
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (1e6 if sys.platform == "darwin" else 1e3))


def joined_columns(then: Identity, now: Identity) -> dict[str, str]:
    """Columns of the identity; a run that --reuse resumed elsewhere names both, as in "cpu then cuda"."""
    return {
        name: first if first == last else f"{first} then {last}"
        for (name, first), last in zip(then.columns.items(), now.columns.values(), strict=True)
    }


def check_sizes(recipe: Recipe, data: Dataset) -> None:
    check_test_size(len(data.test))  # now, not after the training
    if recipe.batch_size > len(data.train):
        raise ValueError(
            f"batch_size is {recipe.batch_size}, but {recipe.dataset} has only {len(data.train)} training "
            f"images; use --batch-size {max(2, len(data.train) // 4)} or another smaller value"
        )
    if recipe.batch_size < world_size():
        raise ValueError(
            f"batch_size is {recipe.batch_size}, so some of the {world_size()} ranks would have no image; "
            f"use --batch-size {32 * world_size()} or another larger value"
        )
    empty = [
        name for name, count in zip(data.class_names, data.class_counts.tolist(), strict=True) if not count
    ]
    if recipe.sampler != "uniform" and empty:
        raise ValueError(
            f"sampler={recipe.sampler!r} draws images of every class, but {recipe.dataset} has no training "
            f"image of {', '.join(map(repr, empty[:5]))}; add some, or use --sampler uniform"
        )
    if recipe.whole_method.adjusts and empty:
        raise ValueError(
            f"{recipe.method} takes the logarithm of class sizes, but {recipe.dataset} has no training image "
            f"of {', '.join(map(repr, empty[:5]))}; add some, or use another method"
        )
    side = min(data.train.images.shape[-2:])
    if recipe.padding >= side and not data.is_features:
        raise ValueError(
            f"padding must be below {side}, the side of the images of {recipe.dataset}, got {recipe.padding}"
        )
    if recipe.cutout > side and not data.is_features:
        raise ValueError(
            f"cutout must be at most {side}, the side of the images of {recipe.dataset}, got "
            f"{recipe.cutout}: it would blank most of every image"
        )
