"""Classifiers that are changed after training: each against its formula, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from icmixup.adjustment import TAUS, log_prior
from icmixup.calibration import mean_class_nll
from icmixup.lab.cli import main
from icmixup.lab.cli.retrain import describe_short_training
from icmixup.lab.datasets import Dataset, Split
from icmixup.lab.models import classifier_of
from icmixup.lab.training.data import load_recipe_data
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.loop import train
from icmixup.lab.training.predictions import read_predictions
from icmixup.lab.training.recipe import QUICK
from icmixup.lab.training.retrain import retrain
from icmixup.lab.training.trained import find_run, load_trained

RECIPE = dataclasses.replace(
    QUICK,
    dataset="digits",
    method="erm",
    per_class=60,
    imbalance=0.05,
    held_out=0.25,
    epochs=6,
    batch_size=16,
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return load_recipe_data(RECIPE, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def execution(tmp_path_factory: pytest.TempPathFactory) -> Execution:
    out = tmp_path_factory.mktemp("runs")
    return Execution(out=out, data_dir=out, device="cpu")


@pytest.fixture(scope="module")
def run(execution: Execution) -> Path:
    row = train(RECIPE, execution)
    assert isinstance(row["folder"], str)
    return execution.out / row["folder"]


def network(folder: Path) -> nn.Module:
    return load_trained(folder).model.eval()


def weights(folder: Path) -> tuple[Tensor, Tensor]:
    head = classifier_of(network(folder), "small-cnn")
    return head.weight.detach(), head.bias.detach()


def assert_same_features(one: Path, other: Path) -> None:
    states = [network(folder).state_dict() for folder in (one, other)]
    for name, value in states[0].items():
        assert name.startswith("classifier") or torch.equal(value, states[1][name])


def test_adjusting_afterwards_subtracts_tau_log_frequency_from_the_scores(
    run: Path, data: Dataset, execution: Execution
) -> None:
    made = execution.out / retrain(run, "adjust", execution, tau=1.5)["folder"]
    before, after = (torch.from_numpy(read_predictions(f).scores).float() for f in (run, made))
    shares = data.class_counts / len(data.train)
    wanted = before - 1.5 * shares.log()
    torch.testing.assert_close(after, wanted - wanted.amax(dim=1, keepdim=True), atol=0.02, rtol=2e-3)
    assert_same_features(run, made)


def test_tau_normalisation_divides_class_weights_by_a_power_of_their_norm(
    run: Path, execution: Execution
) -> None:
    made = execution.out / retrain(run, "tau-norm", execution, tau=0.7)["folder"]
    old, new = weights(run)[0], weights(made)[0]
    torch.testing.assert_close(new, old / old.norm(dim=1, keepdim=True) ** 0.7)
    torch.testing.assert_close(weights(made)[1], torch.zeros(10))
    assert_same_features(run, made)


@pytest.mark.parametrize("how", ["adjust", "tau-norm"])
def test_without_a_tau_the_best_one_on_the_held_out_images_is_taken(
    how: str, run: Path, data: Dataset, execution: Execution
) -> None:
    row = retrain(run, how, execution)  # type: ignore[arg-type]
    weight, bias = weights(run)
    assert data.held_out is not None
    features, labels = penultimate(run, data.held_out, data), data.held_out.labels

    def loss(tau: float) -> float:
        scores = features @ weight.T + bias - tau * log_prior(data.class_counts)
        if how == "tau-norm":
            scores = features @ (weight / weight.norm(dim=1, keepdim=True) ** tau).T
            right = (scores.argmax(dim=1) == labels).double()
            return -sum(right[labels == c].mean().item() for c in set(labels.tolist()))
        return mean_class_nll(scores, labels)

    found = {tau: loss(tau) for tau in TAUS}
    assert found[row["tau_used"]] == pytest.approx(min(found.values()), abs=1e-6)
    assert min(found.values()) < max(found.values())  # the choice matters


@pytest.mark.parametrize("ema", [None, 0.9])
def test_a_method_that_adjusts_after_training_is_the_plain_run_with_other_biases(
    execution: Execution, ema: float | None
) -> None:
    plain = dataclasses.replace(RECIPE, held_out=0.0, epochs=2, eval_every=1, ema=ema)
    adjusted = dataclasses.replace(plain, method="erm-adjusted", adjust_tau=0.8)
    first, second = (execution.out / train(one, execution)["folder"] for one in (plain, adjusted))
    made = execution.out / retrain(first, "adjust", execution, tau=0.8)["folder"]
    assert (
        json.loads((second / "result.json").read_text())["class_accuracies"]
        == (json.loads((made / "result.json").read_text())["class_accuracies"])
    )
    for one, other in zip(weights(second), weights(made), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert_same_features(first, second)
    assert (weights(second)[1] - weights(first)[1]).abs().max() > 1
    # Evaluations during training show what the run would have with so many epochs, adjusted as well.
    short = dataclasses.replace(adjusted, epochs=1, schedule="step", lr_drops=())
    long = dataclasses.replace(short, epochs=2)
    rows = [train(one, execution) for one in (short, long)]
    logged = find_run(execution.out / rows[1]["folder"]).read_log()[0]["accuracy"]
    assert logged == pytest.approx(rows[0]["accuracy"], abs=1e-3)


def test_methods_that_adjust_after_training_are_refused_where_they_cannot_work(
    execution: Execution, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = dataclasses.replace(RECIPE, method="erm-adjusted", held_out=0.0, epochs=1)
    with pytest.raises(ValueError, match=r"erm-adjusted adjusts the biases .* --cosine-classifier has none"):
        dataclasses.replace(recipe, cosine_classifier=True)
    with pytest.raises(ValueError, match="corrects for class sizes by itself"):
        dataclasses.replace(recipe, sampler="class-balanced")
    data = load_recipe_data(recipe, execution.data_dir)
    kept = torch.nonzero(data.train.labels != 3).flatten()
    holed = dataclasses.replace(data, train=data.train[kept])
    with pytest.raises(ValueError, match="takes the logarithm of class sizes, but digits has no training"):
        train(recipe, dataclasses.replace(execution, dataset=holed))
    monkeypatch.setattr(nn.Linear, "__init__", without_bias(nn.Linear.__init__))
    with pytest.raises(ValueError, match="small-cnn has no bias to adjust"):
        train(dataclasses.replace(recipe, seed=5), execution)


def test_a_network_that_cannot_be_adjusted_leaves_no_folder_of_an_unfinished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nn.Linear, "__init__", without_bias(nn.Linear.__init__))
    execution = Execution(out=tmp_path, data_dir=tmp_path, device="cpu")
    folder = tmp_path / train(dataclasses.replace(RECIPE, held_out=0.0, epochs=1), execution)["folder"]
    with pytest.raises(ValueError, match="small-cnn has no bias to adjust"):
        retrain(folder, "adjust", execution, tau=1.0)
    args = ["train", "digits", "--method", "erm-adjusted", "--per-class", "20", "--epochs", "1"]
    assert main([*args, "--out", str(tmp_path), "--device", "cpu"]) == 2
    assert "small-cnn has no bias to adjust" in capsys.readouterr().err
    assert [path.parent for path in tmp_path.glob("*/recipe.json")] == [folder]


def without_bias(init: Callable[..., None]) -> Callable[..., None]:
    return lambda self, *args, **settings: init(self, *args, **settings | {"bias": False})


def penultimate(run: Path, split: Split, data: Dataset) -> Tensor:
    model, found = network(run), []
    classifier_of(model, "small-cnn").register_forward_pre_hook(lambda _, args: found.append(args[0]))
    with torch.no_grad():
        mean, std = (torch.tensor(part).view(1, -1, 1, 1) for part in (data.mean, data.std))
        model((split.images / 255 - mean) / std)  # type: ignore[operator]
    return found[0]


def test_crt_lowers_the_class_balanced_loss_and_leaves_the_features_alone(
    run: Path, data: Dataset, execution: Execution
) -> None:
    row = retrain(run, "crt", execution, epochs=8)
    made = execution.out / row["folder"]
    assert_same_features(run, made)
    features = penultimate(run, data.train, data)
    labels, class_weights = data.train.labels, 1 / data.class_counts.float()

    def loss(folder: Path) -> float:
        weight, bias = weights(folder)
        return F.cross_entropy(features @ weight.T + bias, labels, weight=class_weights).item()

    assert loss(made) < 0.8 * loss(run)
    assert row["after_epochs"] == 8
    assert row["few"] > find_run(run).result()["few"]  # type: ignore[index]


def test_a_result_is_kept_and_is_a_run_of_its_own(run: Path, execution: Execution) -> None:
    first = retrain(run, "adjust", execution, tau=0.5)
    stamp = (execution.out / first["folder"] / "result.json").stat().st_mtime_ns
    assert retrain(run, "adjust", execution, tau=0.5)["accuracy"] == first["accuracy"]
    assert (execution.out / first["folder"] / "result.json").stat().st_mtime_ns == stamp
    assert first["made_from"] == run.name
    assert find_run(run).result()["after"] == "none"  # type: ignore[index]
    with pytest.raises(ValueError, match="itself the result of adjust; pass the run it was made from"):
        retrain(execution.out / first["folder"], "crt", execution)
    recipe = find_run(execution.out / first["folder"]).recipe
    with pytest.raises(ValueError, match="icmixup retrain"):
        train(recipe, execution)


def test_classifiers_of_heads_on_features_can_be_changed_too(
    execution: Execution, data: Dataset, tmp_path: Path
) -> None:
    flat = [
        Split(split.images.flatten(1).float(), split.labels)  # type: ignore[union-attr]
        for split in (data.train, data.test, data.held_out)
    ]
    features = dataclasses.replace(data, train=flat[0], test=flat[1], held_out=flat[2], mean=(), std=())
    there = Execution(out=tmp_path, data_dir=tmp_path, device="cpu", dataset=features)
    folder = tmp_path / train(dataclasses.replace(RECIPE, lr=0.001, epochs=3), there)["folder"]
    rows = [retrain(folder, how, there) for how in ("adjust", "tau-norm", "crt")]  # type: ignore[arg-type]
    assert len({row["folder"] for row in rows}) == 3


def test_a_new_classifier_of_few_steps_is_said_to_look_worse_than_it_is(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["retrain", str(run), "--how", "crt", "--epochs", "1", "--device", "cpu"]) == 0
    assert "fewer than 300: the new classifier looks worse than it is" in capsys.readouterr().err
    row = {"train_images": 640, "batch_size": 64}
    assert describe_short_training({**row, "after_epochs": 30}) == ""
    assert "290 steps" in describe_short_training({**row, "after_epochs": 29})


def test_what_cannot_be_done_is_named(
    run: Path, execution: Execution, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "no-weights").mkdir()
    for name in ("recipe.json", "identity.json", "result.json", "predictions.npz", "inputs.json"):
        (tmp_path / "no-weights" / name).write_bytes((run / name).read_bytes())
    with pytest.raises(ValueError, match=r"no-weights has no weights: there is no checkpoint.pt"):
        retrain(tmp_path / "no-weights", "crt", execution)
    assert [path.name for path in tmp_path.iterdir()] == ["no-weights"]  # no empty run beside it
    moved = json.loads((run / "recipe.json").read_text()) | {"dataset": "photos"}
    (tmp_path / "no-weights" / "recipe.json").write_text(json.dumps(moved))
    with pytest.raises(ValueError, match=r"no-weights was trained on photos, which cannot be loaded"):
        retrain(tmp_path / "no-weights", "crt", execution)
    whole = dataclasses.replace(RECIPE, held_out=0.0, epochs=1)
    folder = execution.out / train(whole, execution)["folder"]
    with pytest.raises(ValueError, match=r"held out no images .* pass --tau .* --held-out 0.2"):
        retrain(folder, "adjust", execution)
    for changes, cause in (
        ({"method": "ldam"}, "ldam"),
        ({"cosine_classifier": True}, "--cosine-classifier"),
    ):
        cosines = execution.out / train(dataclasses.replace(whole, **changes), execution)["folder"]
        with pytest.raises(ValueError, match=rf"trained with {cause}, .* neither norms nor biases"):
            retrain(cosines, "tau-norm", execution, tau=1.0)
    for method in ("balanced", "erm-adjusted"):
        balanced = execution.out / train(dataclasses.replace(whole, method=method), execution)["folder"]
        with pytest.raises(ValueError, match=f"{method}, which corrects for class sizes already"):
            retrain(balanced, "adjust", execution, tau=1.0)
    for how in ("tau-norm", "crt"):  # the results of erm would be reported as those of erm-adjusted
        with pytest.raises(ValueError, match=f"erm-adjusted, whose adjustment is in .* which {how} replaces"):
            retrain(balanced, how, execution)  # type: ignore[arg-type]
    for args, words in (
        (["--how", "adjust", "--tau", "-1"], "--tau must be 0 or more and finite, got -1"),
        (["--how", "crt", "--tau", "1"], "crt has no tau, got 1; leave --tau out"),
        (["--how", "adjust", "--epochs", "2"], "adjust trains nothing, got epochs=2"),
        (["--how", "crt", "--epochs", "0"], "--epochs must be at least 1, got 0"),
    ):
        assert main(["retrain", str(run), *args]) == 2
        assert words in capsys.readouterr().err
