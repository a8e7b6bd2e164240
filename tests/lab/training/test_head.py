"""--train head: features are what the classifier gets, are computed once, and a head is trained on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from icmixup import METHODS
from icmixup.lab.augment import normalise
from icmixup.lab.datasets import Dataset, DataSpec, load_dataset
from icmixup.lab.models import build_model, weights_digest
from icmixup.lab.training import features as module
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.features import Known, Part, compute_features, feature_dataset, mixes_features
from icmixup.lab.training.loop import train
from icmixup.lab.training.recipe import HEAD, Recipe
from icmixup.lab.training.step import initial_model, make_learner, make_step
from icmixup.pairs import draw_mixup

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load_dataset(DataSpec("digits", per_class=20), Path("none"))


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """A head on small-cnn with weights from a file."""
    path = tmp_path / "weights.pt"
    torch.save(build_model("small-cnn", 4, channels=1, seed=7).state_dict(), path)
    digest = weights_digest("small-cnn", str(path))
    return replace(
        HEAD,
        dataset="digits",
        model="small-cnn",
        weights=str(path),
        weights_digest=digest,
        epochs=20,
        min_steps=100,
        per_class=20,
        lr=0.02,
    )


def test_the_recipe_of_a_head_does_not_augment_since_features_are_computed_once() -> None:
    assert (HEAD.padding, HEAD.flip, HEAD.rotation, HEAD.random_resized_crop) == (0, False, 0.0, None)
    assert (HEAD.autoaugment, HEAD.trivial, HEAD.erasing) == (False, False, 0.0)


def hooked_features(recipe: Recipe, data: Dataset) -> Tensor:
    """What the classifier of the same network is given, by a hook."""
    model = build_model("small-cnn", 10, channels=1, seed=0, weights=recipe.weights).eval()
    seen: list[Tensor] = []
    model.classifier.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.inference_mode():
        model(normalise(data.train.images, torch.tensor(data.mean), torch.tensor(data.std)))
    return seen[0]


def test_features_are_the_input_of_the_classifier_standardised(
    recipe: Recipe, digits: Dataset, tmp_path: Path
) -> None:
    data = feature_dataset(recipe, digits, tmp_path, CPU)
    expected = hooked_features(recipe, digits)
    expected = (expected - expected.mean(dim=0)) / expected.std(dim=0, correction=0)
    torch.testing.assert_close(data.train.images, expected, rtol=1e-3, atol=1e-4)
    assert torch.equal(data.train.labels, digits.train.labels)
    assert len(data.test) == len(digits.test)


def test_features_are_computed_once_for_all_seeds_methods_and_subsets(
    recipe: Recipe, digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = feature_dataset(recipe, digits, tmp_path, CPU)

    def fail(*_: object) -> None:
        raise AssertionError("a network was built again")

    monkeypatch.setattr(module, "build_extractor", fail)
    again = feature_dataset(replace(recipe, method="mixup", seed=5, lr=0.1), digits, tmp_path, CPU)
    assert torch.equal(first.train.images, again.train.images)
    copied = tmp_path / "copy.pt"
    copied.write_bytes(Path(str(recipe.weights)).read_bytes())
    assert feature_dataset(replace(recipe, weights=str(copied)), digits, tmp_path, CPU).is_features
    fewer = load_dataset(DataSpec("digits", per_class=5), Path("none"))
    assert feature_dataset(
        recipe, replace(fewer, mean=digits.mean, std=digits.std), tmp_path, CPU
    ).is_features
    changed = replace(digits.train, images=255 - digits.train.images)
    with pytest.raises(AssertionError, match="built again"):
        feature_dataset(recipe, replace(digits, train=changed), tmp_path, CPU)
    with pytest.raises(AssertionError, match="built again"):
        feature_dataset(replace(recipe, weights_digest="other"), digits, tmp_path, CPU)


def test_features_of_an_interrupted_command_are_kept(
    recipe: Recipe, digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = feature_dataset(recipe, digits, tmp_path / "whole", CPU)
    computed: list[int] = []

    def interrupted(model: nn.Module, images: Dataset, part: Part) -> Known:
        if len(computed) == 2:
            raise KeyboardInterrupt
        computed.append(len(part.rows))
        return compute_features(model, images, part)

    monkeypatch.setattr(module, "PART", 100)
    monkeypatch.setattr(module, "compute_features", interrupted)
    with pytest.raises(KeyboardInterrupt):
        feature_dataset(recipe, digits, tmp_path, CPU)
    assert computed == [100, 100]
    rest: list[int] = []

    def counted(model: nn.Module, images: Dataset, part: Part) -> Known:
        rest.append(len(part.rows))
        return compute_features(model, images, part)

    monkeypatch.setattr(module, "compute_features", counted)
    again = feature_dataset(recipe, digits, tmp_path, CPU)
    images = torch.cat([digits.train.images, digits.test.images])
    assert sum(computed) + sum(rest) == len(images.flatten(1).unique(dim=0))  # each image once
    torch.testing.assert_close(again.train.images, whole.train.images, rtol=1e-3, atol=1e-4)


def test_without_a_terminal_lines_tell_how_many_features_are_computed(
    recipe: Recipe,
    digits: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(module, "PART", 100)
    monkeypatch.setattr(module, "SAVE_SECONDS", 0.0)
    feature_dataset(recipe, digits, tmp_path / "shown", CPU, show_progress=True)
    lines = capsys.readouterr().err.splitlines()
    images = torch.cat([digits.train.images, digits.test.images]).flatten(1).unique(dim=0)
    assert lines[0] == f"features of 100 of {len(images):,} images"
    assert lines[-1] == f"features of {len(images):,} of {len(images):,} images"
    feature_dataset(recipe, digits, tmp_path / "silent", CPU)
    assert capsys.readouterr().err == ""


def test_features_keep_the_names_of_their_files(recipe: Recipe, digits: Dataset, tmp_path: Path) -> None:
    names = tuple(f"{row}.png" for row in range(len(digits.test)))
    data = replace(digits, test=replace(digits.test, file_names=names))
    assert feature_dataset(recipe, data, tmp_path, CPU).test.file_names == names


def test_features_are_never_those_of_a_weights_file_that_has_changed(
    recipe: Recipe, digits: Dataset, tmp_path: Path
) -> None:
    torch.save(build_model("small-cnn", 4, channels=1, seed=8).state_dict(), str(recipe.weights))
    with pytest.raises(ValueError, match=r"weights\.pt has changed since this run was started"):
        feature_dataset(recipe, digits, tmp_path, CPU)
    assert not list(tmp_path.glob("*.npz"))
    with pytest.raises(ValueError, match=r"weights\.pt has changed since this run was started"):
        initial_model(replace(recipe, train="all"), digits)


def test_damaged_stored_features_are_computed_again(recipe: Recipe, digits: Dataset, tmp_path: Path) -> None:
    first = feature_dataset(recipe, digits, tmp_path, CPU)
    (path,) = tmp_path.glob("*.npz")
    path.write_bytes(path.read_bytes()[:-100])
    again = feature_dataset(recipe, digits, tmp_path, CPU)
    assert torch.equal(first.test.images, again.test.images)


@pytest.mark.parametrize("method", [name for name in METHODS if mixes_features(name)])
def test_a_head_is_trained_with_every_method_that_mixes_vectors(
    method: str, recipe: Recipe, digits: Dataset, tmp_path: Path
) -> None:
    execution = Execution(out=tmp_path, data_dir=tmp_path, device="cpu", dataset=digits)
    row = train(replace(recipe, method=method), execution)
    assert row["accuracy"] > 60  # 10 classes; random features of a small network
    assert row["train"] == "head"
    assert ".small-cnn-head." in row["folder"]


def test_only_the_head_is_trained_and_saved(recipe: Recipe, digits: Dataset, tmp_path: Path) -> None:
    row = train(recipe, Execution(out=tmp_path, data_dir=tmp_path, device="cpu", dataset=digits))
    content = (tmp_path / row["folder"] / "checkpoint.pt").read_bytes()
    (tmp_path / "head.pt").write_bytes(content[:-32])  # without its digest
    state = torch.load(tmp_path / "head.pt", weights_only=True)
    assert {name: tuple(value.shape) for name, value in state["model"].items()} == {
        "weight": (10, 128),
        "bias": (10,),
    }


@pytest.mark.parametrize("method", ["cutmix", "ic-mixup-cutmix", "manifold"])
def test_methods_that_need_images_are_refused(
    method: str, recipe: Recipe, digits: Dataset, tmp_path: Path
) -> None:
    execution = Execution(out=tmp_path, data_dir=tmp_path, device="cpu", dataset=digits)
    with pytest.raises(ValueError, match=f"{method}: .* need images.* --train all"):
        train(replace(recipe, method=method), execution)


def test_a_mixed_head_sees_mixed_features(tmp_path: Path) -> None:
    """One step of training equals a step by hand on mixed features and labels, with the same draws."""
    rows = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    labels = np.arange(40) % 2
    path = tmp_path / "made.npz"
    np.savez(path, train_features=rows, train_labels=labels, test_features=rows, test_labels=labels)
    recipe = Recipe(dataset=str(path), method="mixup", batch_size=40, alpha=5.0, train="head")
    data = load_dataset(DataSpec(str(path)), tmp_path)
    learner = make_learner(recipe, data)
    features, targets = data.train.images, data.train.labels
    weight, bias = (part.detach().clone() for part in learner.model.parameters())
    pairs = draw_mixup(targets, 5.0, generator=torch.Generator().manual_seed(3))
    mixed = pairs.lam[:, None] * features + (1 - pairs.lam[:, None]) * features[pairs.partner]
    own, other = F.one_hot(targets, 2), F.one_hot(targets[pairs.partner], 2)
    shares = pairs.lam[:, None] * own + (1 - pairs.lam[:, None]) * other
    expected = -(shares * (mixed @ weight.T + bias).log_softmax(dim=1)).sum(dim=1).mean()
    learner.generator.manual_seed(3)
    step = make_step(learner, recipe, recipe.method_at(0), data)
    torch.testing.assert_close(step(features, targets, torch.tensor(0.1), True), expected)
