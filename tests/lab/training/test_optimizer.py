"""Optimisers: SGD as before, AdamW by its formula, groups of weights, and bit-identical after kill -9."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forked import forking_context
from torch import nn

from icmixup.lab.datasets import Dataset, DataSpec, load_dataset
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.loop import RunProgress, train
from icmixup.lab.training.optimizer import make_optimizer, weight_groups
from icmixup.lab.training.recipe import Recipe
from icmixup.lab.training.run_folder import runs_of
from icmixup.lab.training.step import make_learner, make_step

RECIPE = Recipe(
    dataset="digits",
    model="small-cnn",
    method="ic-mixup",
    per_class=20,
    epochs=6,
    batch_size=50,
    optimizer="adamw",
    lr=1e-3,
    weight_decay=0.05,
    decay_norms=False,
    warmup_fraction=0.1,
    clip_norm=1.0,
    ema=0.9,
    schedule="cosine",
    padding=1,
    flip=False,
)


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load_dataset(DataSpec("digits", per_class=20), Path("none"))


def one_step(
    recipe: Recipe, data: Dataset, lr: float, steps: int = 1
) -> tuple[nn.Module, nn.Module, list[nn.Module]]:
    """The model before and after steps on the same batch, and the gradients of each step as models."""
    learner = make_learner(recipe, data)
    before = make_learner(recipe, data).model
    step = make_step(learner, recipe, recipe.method_at(0), data)
    gradients = []
    for number in range(steps):
        learner.generator.manual_seed(number)
        step(data.train.images[:50], data.train.labels[:50], torch.tensor(lr), True)
        gradients.append([weight.grad.clone() for weight in learner.model.parameters()])
    return before, learner.model, gradients


def test_adamw_follows_its_formula_and_spares_norms_and_biases(digits: Dataset) -> None:
    recipe = replace(RECIPE, clip_norm=None, ema=None, method="erm")
    lr, decay = 1e-3, recipe.weight_decay
    before, after, gradients = one_step(recipe, digits, lr, steps=3)
    spared = 0
    for number, (old, new) in enumerate(zip(before.parameters(), after.parameters(), strict=True)):
        weight = old.detach().double()
        first, second = torch.zeros_like(weight), torch.zeros_like(weight)
        for t, gradient in enumerate((step[number].double() for step in gradients), start=1):
            first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
            weight = weight * (1 - lr * decay * (weight.dim() > 1))
            weight = weight - lr * (first / (1 - 0.9**t)) / ((second / (1 - 0.999**t)).sqrt() + 1e-8)
        spared += weight.dim() <= 1
        torch.testing.assert_close(new.detach().double(), weight, rtol=1e-4, atol=1e-6)
    assert 0 < spared < len(list(before.parameters()))


def test_sgd_is_bit_identical_to_torchs_with_one_group_and_a_plain_number(digits: Dataset) -> None:
    recipe = Recipe(dataset="digits", model="small-cnn", method="erm", batch_size=50, nesterov=True)
    before, after, gradients = one_step(recipe, digits, 0.1, steps=3)
    optimizer = torch.optim.SGD(
        before.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True
    )
    for step in gradients:
        for weight, gradient in zip(before.parameters(), step, strict=True):
            weight.grad = gradient
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))


def test_each_group_has_its_own_learning_rate() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    groups = [
        weight_groups(layer, Recipe())[0]._replace(lr_scale=scale, weight_decay=0.0)
        for layer, scale in zip(model, (0.25, 1.0), strict=True)
    ]
    scales = torch.tensor([group.lr_scale for group in groups])
    lrs = torch.zeros(2)
    optimizer = make_optimizer(groups, Recipe(momentum=0.0), lrs)
    before = [weight.detach().clone() for weight in model.parameters()]
    torch.mul(scales, torch.tensor(0.1), out=lrs)  # as the step does
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for number, (old, new) in enumerate(zip(before, model.parameters(), strict=True)):
        rate = 0.1 * groups[number // 2].lr_scale
        torch.testing.assert_close(new.detach(), old - rate * new.grad)


def test_groups_hold_every_weight_once() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    groups = weight_groups(model, RECIPE)
    held = [id(weight) for group in groups for weight in group.weights]
    assert sorted(held) == sorted(id(weight) for weight in model.parameters())
    assert [group.weight_decay for group in groups] == [0.05, 0.0]
    assert {weight.dim() for weight in groups[1].weights} == {1}


def test_layer_decay_without_a_timm_model_is_refused(digits: Dataset) -> None:
    with pytest.raises(ValueError, match="layer_decay needs a timm model, got small-cnn"):
        make_learner(replace(RECIPE, layer_decay=0.75), digits)


def test_clipping_bounds_the_gradient(digits: Dataset) -> None:
    _, _, gradients = one_step(replace(RECIPE, clip_norm=0.01), digits, 1e-3)
    assert math.sqrt(sum(float(part.square().sum()) for part in gradients[0])) == pytest.approx(
        0.01, rel=1e-3
    )


def train_until(epoch: float, out: Path) -> None:
    """Train, and end by SIGKILL when an epoch is reached: no handler runs, nothing is flushed."""
    torch.set_num_threads(1)

    def kill(progress: RunProgress) -> None:
        if progress.epoch >= epoch:
            os.kill(os.getpid(), signal.SIGKILL)

    train(RECIPE, Execution(out=out, data_dir=Path(), device="cpu", checkpoint_seconds=0), kill)


def test_after_kill_9_a_run_with_adamw_ends_with_bit_identical_numbers(tmp_path: Path) -> None:
    for epoch in (2, 4):
        arguments = (epoch, tmp_path / "killed")
        process = forking_context().Process(target=train_until, args=arguments, daemon=True)
        process.start()
        process.join(timeout=120)
        assert process.exitcode == -signal.SIGKILL
        state, rejected = next(runs_of(tmp_path / "killed", RECIPE)).load(torch.device("cpu"))
        assert state is not None
        assert rejected == {}
        assert 0 < state["epochs_done"] < RECIPE.epochs
        entries = state["optimizer"]["state"].values()
        assert all(set(entry) == {"step", "exp_avg", "exp_avg_sq"} for entry in entries)
    for folder in ("killed", "whole"):
        train(RECIPE, Execution(out=tmp_path / folder, data_dir=tmp_path, device="cpu"))
    runs = [next(runs_of(tmp_path / folder, RECIPE)) for folder in ("killed", "whole")]
    (killed, _), (whole, _) = (run.load(torch.device("cpu")) for run in runs)
    assert killed is not None
    assert whole is not None
    assert [line["loss"] for line in runs[0].read_log()] == [line["loss"] for line in runs[1].read_log()]
    for part in ("model", "average"):
        assert all(torch.equal(killed[part][name], value) for name, value in whole[part].items())
