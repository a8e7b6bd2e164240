"""Training: equal recipes give equal numbers, whatever happens on the way."""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from icmixup import METHODS
from icmixup.lab.datasets import Dataset, DataSpec, load_dataset
from icmixup.lab.training import loop as loop_module
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.identity import identify
from icmixup.lab.training.loop import Diverged, RunProgress, Session, tensors_in, train
from icmixup.lab.training.recipe import Recipe, learning_rate
from icmixup.lab.training.run_folder import Run, open_run, runs_of
from icmixup.lab.training.step import PREPARING, make_learner, make_step

CPU = torch.device("cpu")
TINY = Recipe(
    dataset="digits",
    model="small-cnn",
    per_class=12,
    epochs=2,
    batch_size=50,
    lr=0.05,
    padding=1,
    flip=False,
    eval_every=100,
)
NOT_OF_THE_RECIPE = ("minutes", "images_per_second", "memory_mb", "date", "commit", "folder")


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load_dataset(DataSpec("digits", per_class=TINY.per_class), Path("none"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Three classes of 12 colour pictures to train on and 4 to test on, brighter from class to class."""
    root, draw = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for part, number in (("train", 12), ("val", 4)):
        for label in range(3):
            (root / part / f"class{label}").mkdir(parents=True)
            for n in range(number):
                pixels = draw.integers(80 * label, 80 * label + 90, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / part / f"class{label}" / f"{n}.png")
    return load_dataset(DataSpec(str(root)), Path("none"))


def only_run(root: Path, recipe: Recipe) -> Run:
    (run,) = runs_of(root, recipe)
    return run


def start(root: Path, data: Dataset, recipe: Recipe) -> Session:
    run = open_run(root, recipe, identify(recipe, data, "cpu"))
    return Session(run, data, make_learner(recipe, data), None)


def run_tiny(
    root: Path, data: Dataset, **changes: Any
) -> tuple[dict[str, Any], list[float], dict[str, Tensor]]:
    """The row of a run without what depends on the clock, its losses by epoch, and its weights."""
    recipe = dataclasses.replace(TINY, **changes)
    row = train(recipe, Execution(out=root, data_dir=root, dataset=data, device="cpu"))
    state, _ = only_run(root, recipe).load(CPU)
    assert state is not None
    return (
        {name: value for name, value in row.items() if name not in NOT_OF_THE_RECIPE},
        [line["loss"] for line in only_run(root, recipe).read_log()],
        state["model"],
    )


class Killed(BaseException):
    """Ends a run without the checkpoint that an interrupt writes, like SIGKILL."""


def stop_at(epoch: float) -> Callable[[RunProgress], None]:
    """Ends a run at the end of an epoch, before its checkpoint is written."""

    def listen(progress: RunProgress) -> None:
        if progress.epoch >= epoch:
            raise Killed

    return listen


@pytest.mark.parametrize("begin", [0, 1])  # before the first copy of the state, and after it
def test_epochs_go_on_while_another_thread_captures_its_steps(
    begin: int, digits: Dataset, tmp_path: Path
) -> None:
    late = threading.Timer(20, PREPARING.release)  # so that a run that waits for the lock fails here

    def listen(progress: RunProgress) -> None:
        if progress.epoch == begin:
            PREPARING.acquire()
            late.start()
        elif progress.epoch == 3:
            late.cancel()
            PREPARING.release()

    recipe = dataclasses.replace(TINY, epochs=4, eval_every=4)
    listen(RunProgress(0, 4, 0.0, None, 0.0, 0.0))
    row = train(recipe, Execution(out=tmp_path, data_dir=tmp_path, dataset=digits, device="cpu"), listen)
    assert row["epochs"] == 4


# The state that an interrupt saves


def run_epoch(session: Session, number: int) -> None:
    session.fill(number)
    session.make_epoch(number)()
    session.epochs_done = number + 1


def assert_equal_states(one: object, other: object) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def addresses(state: object) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors_in(state)]


@pytest.mark.parametrize("changes", [{}, {"optimizer": "adamw", "ema": 0.9}])
def test_the_remembered_state_is_that_of_the_end_of_an_epoch_whatever_steps_follow(
    changes: dict[str, Any], digits: Dataset, tmp_path: Path
) -> None:
    session, seen = start(tmp_path, digits, dataclasses.replace(TINY, epochs=9, **changes)), set()
    for number in range(3):
        run_epoch(session, number)
        session.remember_epoch()
        expected = copy.deepcopy(session.state())
        run_epoch(session, number + 1)  # the next epoch, or a part of it
        assert_equal_states(session.last_epoch, expected)
        assert session.last_epoch is not None
        assert not {*addresses(session.last_epoch)} & {*addresses(session.state())}
        with pytest.raises(AssertionError):
            assert_equal_states(session.last_epoch["model"], session.state()["model"])
        seen.add(tuple(addresses(session.last_epoch)))
    assert len(seen) == 1  # from the second time on, no new memory


@pytest.mark.parametrize("changes", [{}, {"optimizer": "adamw", "ema": 0.9}])
def test_after_the_last_epoch_weights_are_remembered_in_the_same_memory_and_the_optimizer_is_not(
    changes: dict[str, Any], digits: Dataset, tmp_path: Path
) -> None:
    session = start(tmp_path, digits, dataclasses.replace(TINY, epochs=2, **changes))
    for number in range(2):
        before = addresses(session.last_epoch)
        run_epoch(session, number)
        session.remember_epoch()
        assert_equal_states(session.last_epoch, session.state())
    assert session.last_epoch is not None
    assert session.last_epoch["optimizer"] is None
    assert addresses(session.last_epoch) == before[: len(addresses(session.last_epoch))]


def test_a_state_with_new_tensors_or_other_shapes_is_remembered_too(digits: Dataset, tmp_path: Path) -> None:
    session = start(tmp_path, digits, dataclasses.replace(TINY, epochs=9))
    model, optimizer = session.learner.model, session.learner.optimizer
    model.register_buffer("seen", torch.zeros(2))
    momentum, optimizer.state = optimizer.state, type(optimizer.state)(dict)
    one = torch.ones(1)
    buffers = [torch.zeros(2), torch.ones(3), torch.ones(4), torch.rand(4).double(), one.expand(4), one]
    for number, buffer in enumerate(buffers):
        for _ in range(2):
            model.seen = buffer
            session.remember_epoch()
            assert_equal_states(session.last_epoch, session.state())
            assert not {*addresses(session.last_epoch)} & {*addresses(session.state())}
        if number == 0:
            optimizer.state = momentum


def test_an_interrupt_while_the_state_is_copied_saves_a_complete_epoch(
    digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy_half(sources: list[Tensor], targets: list[Tensor]) -> None:
        for source, target in zip(sources[:9], targets[:9], strict=True):
            target.copy_(source)
        raise KeyboardInterrupt

    whole = run_tiny(tmp_path / "whole", digits, epochs=4)
    with monkeypatch.context() as patch:
        patch.setattr(loop_module, "copy_tensors", copy_half)
        with pytest.raises(KeyboardInterrupt):
            run_tiny(tmp_path / "cut", digits, epochs=4)
    state, _ = only_run(tmp_path / "cut", dataclasses.replace(TINY, epochs=4)).load(CPU)
    assert state is not None
    assert state["epochs_done"] == 2  # the first copy takes new memory, the second overwrites it
    cut = run_tiny(tmp_path / "cut", digits, epochs=4)
    assert cut[0] == whole[0]
    assert all(torch.equal(whole[2][name], weight) for name, weight in cut[2].items())


# The same numbers


def test_the_same_recipe_gives_the_same_numbers_to_the_last_bit(digits: Dataset, tmp_path: Path) -> None:
    first, second = (run_tiny(tmp_path / name, digits) for name in ("one", "two"))
    assert first[:2] == second[:2]
    assert len(first[1]) == 2
    assert all(torch.equal(first[2][name], weight) for name, weight in second[2].items())


def test_training_does_not_depend_on_the_global_generators_nor_move_them(
    digits: Dataset, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = run_tiny(tmp_path / "one", digits, method="ic-balanced-mixup-cutmix")
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert run_tiny(tmp_path / "two", digits, method="ic-balanced-mixup-cutmix")[:2] == first[:2]


def test_another_seed_gives_other_numbers(digits: Dataset, tmp_path: Path) -> None:
    assert run_tiny(tmp_path, digits, seed=1)[1] != run_tiny(tmp_path, digits)[1]


@pytest.mark.parametrize("method", ["mixup", "ic-balanced-mixup-cutmix", "ic-manifold"])
def test_runs_of_two_methods_share_weights_order_and_augmentation(
    method: str, digits: Dataset, tmp_path: Path
) -> None:
    one, two, other_seed = (
        start(tmp_path, digits, dataclasses.replace(TINY, method=name, seed=seed))
        for name, seed in (("erm", 0), (method, 0), ("erm", 1))
    )
    weights = [session.learner.model.state_dict() for session in (one, two, other_seed)]
    assert all(torch.equal(weights[0][name], value) for name, value in weights[1].items())
    assert not torch.equal(weights[0]["stem.0.weight"], weights[2]["stem.0.weight"])
    for epoch in (0, 1):
        for session in (one, two, other_seed):
            session.fill(epoch)
        assert torch.equal(one.epoch.images, two.epoch.images)
        assert torch.equal(one.epoch.labels, two.epoch.labels)
        assert not torch.equal(one.epoch.labels, other_seed.epoch.labels)
        one.make_epoch(epoch)()  # a step of one method must not shift what the next epoch draws
        two.make_epoch(epoch)()


def test_mixing_draws_anew_in_every_epoch_and_for_every_seed(digits: Dataset, tmp_path: Path) -> None:
    drawn = set()
    for seed in (0, 1):
        session = start(tmp_path, digits, dataclasses.replace(TINY, seed=seed))
        for epoch in (0, 1, 0):
            session.fill(epoch)
            drawn.add(torch.rand((), generator=session.learner.generator).item())
    assert len(drawn) == 4  # epoch 0 draws the same again when a resumed run comes back to it


def test_an_epoch_holds_every_image_once_and_the_short_last_batch_too(
    digits: Dataset, tmp_path: Path
) -> None:
    session = start(tmp_path, digits, dataclasses.replace(TINY, padding=0, rotation=0.0))
    session.fill(0)
    batches = [session.epoch.batch(k) for k in range(len(session.epoch.lrs))]
    assert [(len(labels), whole) for _, labels, _, whole in batches] == [(50, True), (50, True), (20, False)]
    seen = torch.cat([images for images, _, _, _ in batches]).flatten(1)
    assert torch.equal(seen.unique(dim=0), digits.train.images.flatten(1).unique(dim=0))
    assert not torch.equal(seen, digits.train.images.flatten(1))  # and in another order


def test_without_the_last_batch_an_epoch_holds_whole_ones_of_other_images_each_time(
    digits: Dataset, tmp_path: Path
) -> None:
    session = start(tmp_path, digits, dataclasses.replace(TINY, padding=0, rotation=0.0, drop_last=True))
    seen = []
    for number in range(2):
        session.fill(number)
        batches = [session.epoch.batch(k) for k in range(len(session.epoch.lrs))]
        assert [(len(labels), whole) for _, labels, _, whole in batches] == [(50, True), (50, True)]
        seen.append(session.epoch.images.flatten(1).unique(dim=0))
    assert not torch.equal(*seen)
    row, losses, _ = run_tiny(tmp_path, digits, drop_last=True)
    assert (row["train_images"], len(losses)) == (120, TINY.epochs)


# The schedule, by hand


@pytest.mark.parametrize(
    ("fields", "rates"),
    [
        ({"epochs": 200}, {0: 0.1, 49.99: 0.1, 50: 0.02, 100: 0.004, 149.9: 0.004, 150: 0.0008, 199: 0.0008}),
        ({"epochs": 2}, {0: 0.1, 0.5: 0.02, 1: 0.004, 1.5: 0.0008}),
        ({"epochs": 30, "lr_drops": (10,), "lr_factor": 0.5}, {9.9: 0.1, 10: 0.05, 29: 0.05}),
        ({"epochs": 30, "lr_drops": ()}, {0: 0.1, 29.9: 0.1}),
        ({"epochs": 100, "schedule": "cosine"}, {0: 0.1, 25: 0.085355, 50: 0.05, 75: 0.014645, 100: 0.0}),
        (
            {"epochs": 110, "schedule": "cosine", "warmup_epochs": 10},
            {0: 0.0, 2.5: 0.025, 9: 0.09, 10: 0.1, 60: 0.05, 110: 0.0},
        ),
        ({"epochs": 40, "warmup_epochs": 4}, {0: 0.0, 1: 0.025, 4: 0.1, 9.9: 0.1, 10: 0.02}),
    ],
)
def test_the_learning_rate_follows_its_schedule(fields: dict[str, Any], rates: dict[float, float]) -> None:
    recipe = Recipe(lr=0.1, **fields)
    assert {epoch: learning_rate(recipe, epoch) for epoch in rates} == pytest.approx(rates, abs=1e-6)


def test_every_step_has_the_rate_of_its_own_moment(digits: Dataset, tmp_path: Path) -> None:
    recipe = dataclasses.replace(TINY, epochs=6, schedule="cosine", warmup_epochs=2)
    session = start(tmp_path, digits, recipe)
    session.fill(1)
    assert session.epoch.lrs.tolist() == pytest.approx([0.05 * (1 + k / 3) / 2 for k in range(3)])
    session.fill(4)
    halves = [math.cos(math.pi * (2 + k / 3) / 4) for k in range(3)]
    assert session.epoch.lrs.tolist() == pytest.approx([0.05 * (1 + half) / 2 for half in halves])


# The step's options


def one_step(root: Path, data: Dataset, **changes: Any) -> tuple[Session, dict[str, Tensor], Tensor]:
    """A session after one step at full rate, its weights before, and the loss."""
    recipe = dataclasses.replace(TINY, schedule="cosine", **changes)
    session = start(root, data, recipe)
    session.fill(0)
    before = {name: weight.clone() for name, weight in session.learner.model.state_dict().items()}
    step = make_step(session.learner, recipe, recipe.method_at(0), data)
    return session, before, step(*session.epoch.batch(0))


def test_the_average_follows_the_weights_by_its_decay_and_is_what_is_tested(
    digits: Dataset, tmp_path: Path
) -> None:
    session, before, _ = one_step(tmp_path, digits, ema=0.9)
    after, average = session.learner.model.state_dict(), session.learner.tested.state_dict()
    assert session.learner.tested is session.learner.average
    assert not torch.equal(after["stem.0.weight"], before["stem.0.weight"])
    for name, value in average.items():
        counted = not value.is_floating_point()
        torch.testing.assert_close(value, after[name] if counted else 0.9 * before[name] + 0.1 * after[name])


def test_an_average_without_decay_gives_the_metrics_of_the_weights(digits: Dataset, tmp_path: Path) -> None:
    plain, _, _ = run_tiny(tmp_path, digits)
    averaged, _, _ = run_tiny(tmp_path, digits, ema=1e-12)
    slow, _, _ = run_tiny(tmp_path, digits, ema=0.99)
    assert averaged["nll"] == pytest.approx(plain["nll"], rel=1e-4)
    assert slow["nll"] != pytest.approx(plain["nll"], rel=2e-3)


def test_clipping_bounds_the_step_by_rate_times_norm(digits: Dataset, tmp_path: Path) -> None:
    def moved(**changes: Any) -> float:
        session, before, _ = one_step(tmp_path, digits, momentum=0.0, weight_decay=0.0, **changes)
        steps = [(w - before[name]).norm() for name, w in session.learner.model.named_parameters()]
        return torch.stack(steps).norm().item()

    assert moved(clip_norm=0.01) == pytest.approx(0.05 * 0.01, rel=1e-3)
    free = moved()
    assert free > 0.05 * 0.01
    assert moved(clip_norm=1e6) == pytest.approx(free, rel=1e-6)


def test_mixup_that_never_mixes_is_erm(digits: Dataset, tmp_path: Path) -> None:
    _, erm, _ = run_tiny(tmp_path, digits, method="erm")
    for changes in ({"mix_prob": 0.0}, {"mix_off_epoch": 0}):
        _, losses, _ = run_tiny(tmp_path, digits, method="mixup", **changes)
        assert losses == pytest.approx(erm, rel=1e-5)
    _, mixed, _ = run_tiny(tmp_path, digits, method="mixup")
    assert mixed != pytest.approx(erm, rel=1e-3)


def test_mixing_stops_after_its_epoch_and_not_before(digits: Dataset, tmp_path: Path) -> None:
    mixup = dataclasses.replace(TINY, method="mixup")
    with pytest.raises(Killed):
        train(
            mixup,
            Execution(out=tmp_path, data_dir=tmp_path, dataset=digits, checkpoint_seconds=0),
            stop_at(2),
        )
    after_one, _ = only_run(tmp_path, mixup).load(CPU)
    assert after_one is not None
    assert after_one["epochs_done"] == 1
    erm = start(tmp_path, digits, dataclasses.replace(TINY, method="erm"))
    erm.learner.load(after_one)
    erm.fill(1)
    _, losses, _ = run_tiny(tmp_path, digits, method="mixup", mix_off_epoch=1)
    assert losses[0] == after_one["loss"]
    assert losses[1] == pytest.approx(erm.make_epoch(1)().mean().item(), rel=1e-5)


def test_bfloat16_is_close_to_float32_and_not_the_same(digits: Dataset, tmp_path: Path) -> None:
    losses = [one_step(tmp_path, digits, precision=p)[2].item() for p in ("float32", "bfloat16", "auto")]
    assert losses[1] != losses[0] == losses[2]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_training_learns(digits: Dataset, tmp_path: Path) -> None:
    row, losses, _ = run_tiny(tmp_path, digits, method="erm", epochs=12, batch_size=20, schedule="cosine")
    assert losses[-1] < losses[0] / 3
    assert row["accuracy"] > 60  # chance is 10


def test_deferred_class_weights_enter_late_and_a_killed_run_resumes_to_the_last_bit(tmp_path: Path) -> None:
    data = load_dataset(DataSpec("digits", per_class=20, imbalance=0.1), tmp_path)
    settings = {"epochs": 5, "batch_size": 16, "autoaugment": True, "cutout": 4}
    whole = run_tiny(tmp_path / "whole", data, method="ldam-drw", **settings)
    never = run_tiny(tmp_path / "never", data, method="ldam", **settings)
    assert whole[1][:4] == never[1][:4]
    assert whole[1][4] != never[1][4]
    recipe = dataclasses.replace(TINY, method="ldam-drw", **settings)
    here = tmp_path / "killed"
    execution = Execution(out=here, data_dir=here, dataset=data, device="cpu", checkpoint_seconds=0.0)
    for epoch in (3, 5):
        with pytest.raises(Killed):
            train(recipe, execution, stop_at(epoch))
    again = run_tiny(here, data, method="ldam-drw", **settings)
    assert again[1] == whole[1]
    assert all(torch.equal(again[2][name], weight) for name, weight in whole[2].items())


def test_a_sampler_resumes_to_the_last_bit(digits: Dataset, tmp_path: Path) -> None:
    whole = run_tiny(tmp_path / "whole", digits, method="erm", sampler="class-balanced", epochs=3)
    recipe = dataclasses.replace(TINY, method="erm", sampler="class-balanced", epochs=3)
    here = tmp_path / "killed"
    execution = Execution(out=here, data_dir=here, dataset=digits, device="cpu", checkpoint_seconds=0.0)
    with pytest.raises(Killed):
        train(recipe, execution, stop_at(2))
    assert run_tiny(here, digits, method="erm", sampler="class-balanced", epochs=3)[1] == whole[1]


# Every method


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["digits", "folder"])
def test_every_method_trains_on_digits_and_on_a_folder(
    name: str, method: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    data: Dataset = request.getfixturevalue(name)
    row, losses, weights = run_tiny(tmp_path, data, dataset=name, method=method, epochs=1, batch_size=16)
    assert len(losses) == 1
    numbers = ("loss", "accuracy", "nll", "nll_scaled", "calibration_error_scaled", "fitted_temperature")
    assert all(math.isfinite(row[number]) for number in numbers)
    assert 0 <= row["accuracy"] <= 100
    assert len(row["class_accuracies"]) == data.num_classes
    assert all(weight.isfinite().all() for weight in weights.values())
    assert row["train_images"] == len(data.train)


# What goes wrong


def test_a_test_set_that_cannot_be_evaluated_is_refused_before_training(
    digits: Dataset, tmp_path: Path
) -> None:
    single = dataclasses.replace(digits, test=digits.test[torch.tensor([0])])
    execution = Execution(out=tmp_path, data_dir=tmp_path, device="cpu", dataset=single)

    def progress(_: RunProgress) -> None:
        raise AssertionError("it was trained")

    with pytest.raises(ValueError, match="at least 2 images, got 1"):
        train(TINY, execution, progress)


def test_a_batch_larger_than_the_data_is_refused_with_a_size_that_fits(
    digits: Dataset, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"batch_size is 121, .* only 120 .* --batch-size 30"):
        run_tiny(tmp_path, digits, batch_size=121)
    assert run_tiny(tmp_path, digits, batch_size=120)[0]["loss"] > 0


def test_a_loss_gone_to_nan_stops_the_run_and_keeps_the_last_good_checkpoint(
    digits: Dataset, tmp_path: Path
) -> None:
    """The rate becomes absurd in the second epoch."""
    recipe = dataclasses.replace(TINY, method="erm", epochs=4, lr_drops=(1,), lr_factor=1e30)
    for _ in range(2):  # the same command stops at the same place
        with pytest.raises(
            Diverged, match=r"the loss became (nan|inf) in step [23] of epoch 2 .* --lr 0.005"
        ):
            train(recipe, Execution(out=tmp_path, data_dir=tmp_path, dataset=digits, checkpoint_seconds=0))
        run = only_run(tmp_path, recipe)
        state, refused = run.load(CPU)
        assert state is not None
        assert refused == {}
        assert state["epochs_done"] == 1
        assert all(weight.isfinite().all() for weight in state["model"].values())
        assert [line["epoch"] for line in run.read_log()] == [1]
        assert run.result() is None


@pytest.mark.parametrize("part", ["weight", "statistic", "momentum"])
def test_weights_spoilt_by_the_last_step_of_an_epoch_are_never_saved(
    part: str, digits: Dataset, tmp_path: Path
) -> None:
    session = start(tmp_path, digits, TINY)
    session.check_losses(torch.ones(3), 0)
    model = session.learner.model
    weight = model.get_parameter("stem.0.weight")
    spoilt = {
        "weight": weight,
        "statistic": model.get_buffer("stem.1.running_var"),
        "momentum": session.learner.optimizer.state[weight]["momentum_buffer"],
    }[part]
    with torch.no_grad():
        spoilt.view(-1)[3] = torch.nan
    with pytest.raises(Diverged, match="the weights overflowed"):
        session.check_losses(torch.ones(3), 0)


def test_finite_weights_with_infinite_scores_are_a_divergence_as_well(
    digits: Dataset, tmp_path: Path
) -> None:
    session = start(tmp_path, digits, TINY)
    with torch.no_grad():
        for weight in session.learner.model.parameters():
            weight.mul_(1e30)
    session.check_losses(torch.ones(3), 0)
    with pytest.raises(
        Diverged, match=r"scores that are not finite .* --lr 0.005, --clip-norm 1 or .*float32$"
    ):
        session.predict()


def test_a_finished_run_is_not_trained_again(digits: Dataset, tmp_path: Path) -> None:
    reports: list[RunProgress] = []
    rows = [
        train(TINY, Execution(out=tmp_path, data_dir=tmp_path, dataset=digits, device="cpu"), reports.append)
        for _ in range(2)
    ]
    assert rows[0] == rows[1]
    assert [report.epoch for report in reports if report.epoch == int(report.epoch)] == [1, 2]
    assert reports[-1].seconds_left == 0
    assert rows[0]["accuracy"] == reports[-1].accuracy


# Trackers


def test_tensorboard_has_the_numbers_of_the_log(digits: Dataset, tmp_path: Path) -> None:
    train(
        TINY,
        Execution(out=tmp_path, data_dir=tmp_path, dataset=digits, device="cpu", trackers=("tensorboard",)),
    )
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(only_run(tmp_path, TINY).folder / "tensorboard"))
    board.Reload()
    log = only_run(tmp_path, TINY).read_log()
    for name in ("loss", "lr"):
        points = {event.step: event.value for event in board.Scalars(name)}
        assert points == pytest.approx({line["epoch"]: line[name] for line in log})


@pytest.mark.parametrize(("name", "module"), [("wandb", "wandb"), ("tensorboard", "torch.utils.tensorboard")])
def test_a_tracker_that_is_not_installed_says_what_to_install(
    name: str, module: str, digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # what Python itself does with a module it cannot have
    with pytest.raises(ValueError, match=r"is not installed: pip install 'icmixup\[trackers\]'"):
        train(TINY, Execution(out=tmp_path, data_dir=tmp_path, dataset=digits, trackers=(name,)))


def test_an_unknown_tracker_is_named_with_those_there_are(digits: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tracker 'mlflow'; there are tensorboard and wandb"):
        train(TINY, Execution(out=tmp_path, data_dir=tmp_path, dataset=digits, trackers=("mlflow",)))


@pytest.mark.parametrize("method", ["erm", "ic-mixup"])
def test_with_a_cosine_classifier_scores_do_not_depend_on_the_length_of_class_weights(
    method: str, digits: Dataset
) -> None:
    def scores(cosine: bool) -> tuple[Tensor, Tensor]:
        recipe = dataclasses.replace(TINY, method=method, cosine_classifier=cosine)
        model = make_learner(recipe, digits).model.eval()
        images = digits.test.square()[:8].float() / 255
        with torch.no_grad():
            before = model(images)
            classifier = list(model.modules())[-1]
            assert isinstance(classifier, torch.nn.Linear)
            classifier.weight *= 3
            return before, model(images)

    torch.testing.assert_close(*scores(True))
    before, after = scores(False)
    assert not torch.allclose(before, after)
