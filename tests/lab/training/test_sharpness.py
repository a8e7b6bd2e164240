"""Sharpness-aware minimisation: a step by its formula, with the same mixed images in both passes."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from icmixup.lab.datasets import Dataset, DataSpec, load_dataset
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.loop import train
from icmixup.lab.training.recipe import Recipe
from icmixup.lab.training.sharpness import perturbed
from icmixup.lab.training.step import Learner, make_inputs, make_learner, make_step

RECIPE = Recipe(
    dataset="digits",
    model="small-cnn",
    method="ic-mixup",
    per_class=20,
    epochs=2,
    batch_size=50,
    lr=0.1,
    momentum=0.0,
    weight_decay=0.0,
    alpha=1.0,
    padding=1,
    flip=False,
    sam=0.5,
)


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load_dataset(DataSpec("digits", per_class=20), Path("none"))


def after_one_step(recipe: Recipe, data: Dataset, lr: float = 0.1) -> Learner:
    learner = make_learner(recipe, data)
    learner.seed(3)
    step = make_step(learner, recipe, recipe.method_at(0), data)
    step(data.train.images[:50], data.train.labels[:50], torch.tensor(lr), True)
    return learner


def test_a_step_takes_the_gradient_at_the_weights_moved_by_rho_along_the_gradient(digits: Dataset) -> None:
    recipe = replace(RECIPE, method="erm", alpha=None)
    found = list(after_one_step(recipe, digits).model.parameters())

    model = make_learner(recipe, digits).model
    weights = list(model.parameters())
    images = make_inputs(digits, torch.device("cpu"))(digits.train.images[:50])
    gradient = torch.autograd.grad(F.cross_entropy(model(images), digits.train.labels[:50]), weights)
    length = torch.cat([part.flatten() for part in gradient]).norm()
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for weight, part in zip(moved.parameters(), gradient, strict=True):
            weight += recipe.sam * part / length
    loss = F.cross_entropy(moved(images), digits.train.labels[:50])
    worst = torch.autograd.grad(loss, list(moved.parameters()))
    for new, old, part in zip(found, weights, worst, strict=True):
        torch.testing.assert_close(new, old - 0.1 * part, rtol=1e-4, atol=1e-6)
    plain = after_one_step(replace(recipe, sam=None), digits).model.parameters()
    assert not any(torch.allclose(a, b, atol=1e-4) for a, b in zip(found, plain, strict=True) if a.dim() > 1)


@pytest.mark.parametrize("method", ["ic-mixup", "mixup-cutmix", "ic-balanced-mixup", "manifold"])
def test_both_passes_mix_the_same_images(method: str, digits: Dataset) -> None:
    """With a tiny rho the second gradient is the first one, unless something else was drawn for it."""
    recipe = replace(RECIPE, method=method, sam=1e-6)
    found, plain = (after_one_step(each, digits).model for each in (recipe, replace(recipe, sam=None)))
    for a, b in zip(found.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_weights_return_to_where_they_were(digits: Dataset) -> None:
    before = make_learner(RECIPE, digits).model
    after = after_one_step(RECIPE, digits, lr=0.0).model
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))


def test_the_second_pass_leaves_the_running_statistics_of_batchnorm_alone(digits: Dataset) -> None:
    found, plain = (
        dict(after_one_step(each, digits).model.named_buffers())
        for each in (RECIPE, replace(RECIPE, sam=None))
    )
    running = [name for name in plain if name.endswith(("running_mean", "running_var"))]
    assert running
    assert all(torch.equal(found[name], plain[name]) for name in running)


def test_a_gradient_of_zero_moves_nothing() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.zeros(3)
    with perturbed([weight], 0.5):
        assert torch.equal(weight, torch.ones(3))


def test_a_run_resumed_after_one_epoch_ends_with_the_same_weights(tmp_path: Path) -> None:
    def run(name: str, stop: bool) -> float:
        def interrupt(progress: object) -> None:
            if stop and progress.epoch >= 1:  # type: ignore[attr-defined]
                raise KeyboardInterrupt

        execution = Execution(out=tmp_path / name, data_dir=tmp_path, device="cpu")
        return train(replace(RECIPE, epochs=3), execution, interrupt)["loss"]

    with pytest.raises(KeyboardInterrupt):
        run("resumed", stop=True)
    assert run("resumed", stop=False) == run("whole", stop=False)
