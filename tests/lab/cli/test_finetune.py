"""Pretrained weights and features on the command line: the default recipe, notes, errors, one comparison."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from icmixup.lab.cli import main, parse
from icmixup.lab.cli.pretrained import recipe_for
from icmixup.lab.models import build_model


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "weights.pt"
    torch.save(build_model("small-cnn", 4, channels=1, seed=7).state_dict(), path)
    return path


@pytest.fixture
def features(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    labels = np.arange(90) % 3
    rows = random.normal(size=(90, 8)) + 4 * np.eye(3, 8)[labels]
    path = tmp_path / "features.npz"
    np.savez(
        path,
        train_features=rows[:60],
        train_labels=labels[:60],
        test_features=rows[60:],
        test_labels=labels[60:],
        class_names=np.array(["cat", "dog", "owl"]),
    )
    return path


@pytest.mark.parametrize(
    ("args", "name"),
    [
        (["digits"], "quick"),
        (["digits", "--weights", "a.pt"], "finetune"),
        (["digits", "--weights", "a.pt", "--train", "head"], "head"),
        (["some/features.npz"], "head"),
    ],
)
def test_weights_and_features_choose_the_recipe(args: list[str], name: str) -> None:
    flags = parse(["compare", *args], "quick")
    assert (recipe_for(flags.dataset, flags.pretrained) or "quick") == name


def test_finetune_is_the_recipe_of_the_issue_unless_flags_change_it() -> None:
    flags = parse(["compare", "digits", "--weights", "a.pt", "--lr", "1e-3"], "finetune")
    recipe = flags.shared_recipe()
    assert (recipe.optimizer, recipe.lr, recipe.lr_batch, recipe.weight_decay) == ("adamw", 1e-3, 128, 0.05)
    assert (recipe.warmup_fraction, recipe.schedule, recipe.clip_norm) == (0.1, "cosine", 1.0)
    assert (recipe.epochs, recipe.min_steps, recipe.decay_norms) == (20, 1000, False)
    assert (recipe.random_resized_crop, recipe.flip, recipe.rotation) == (0.2, True, 0.0)
    given = parse(["compare", "digits", "--weights", "a.pt", "--epochs", "3"], "finetune")
    assert (given.shared_recipe().epochs, given.shared_recipe().min_steps) == (3, 0)


@pytest.mark.parametrize("command", [("train", "--method"), ("compare", "--methods")])
def test_a_method_that_features_cannot_have_is_refused_before_anything_is_chosen_for_it(
    command: tuple[str, str], features: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    args = [
        command[0],
        str(features),
        command[1],
        "cutmix",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "runs"),
    ]
    assert main(args) == 2
    assert capsys.readouterr().err.startswith("icmixup: cutmix: methods that cut regions")


def test_compare_on_features_needs_no_images_and_no_timm(
    features: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "runs"
    args = ["--seeds", "1", "--batch-size", "20", "--device", "cpu"]
    assert main(["compare", str(features), "--out", str(out), *args]) == 0
    stored = json.loads(next(out.glob("*/comparison.json")).read_text())
    assert set(stored["methods"]) == {"erm", "mixup", "ic-mixup", "regmixup", "ic-regmixup"}
    assert stored["recipe"]["model"] == "linear"
    assert all(entry["mean"] > 80 for entry in stored["methods"].values())
    said = " ".join(capsys.readouterr().err.split())
    assert "234 epochs" in said
    assert "model: linear" in said


def test_compare_trains_heads_and_prints_what_was_loaded(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    args = ["compare", "digits", "--per-class", "10", "--model", "small-cnn", "--weights", str(weights)]
    args += ["--train", "head", "--methods", "erm", "ic-mixup", "--seeds", "2", "--epochs", "3"]
    args += ["--batch-size", "50", "--out", str(tmp_path / "runs"), "--device", "cpu"]
    torch.set_num_threads(2)
    assert main(args) == 0
    assert torch.get_num_threads() == 1  # as the last run left it: sums of small matrices need no more
    said = " ".join(capsys.readouterr().err.split())
    assert "tensors loaded, new head (classifier.weight, classifier.bias)" in said
    assert "computed once without augmentation; methods mix the features" in said
    (cached,) = (tmp_path / "runs" / "features").glob("*.npz")
    written = cached.stat().st_mtime_ns
    weights.write_bytes(weights.read_bytes())  # the same content: nothing is trained or computed again
    assert main(args) == 0
    assert cached.stat().st_mtime_ns == written
    torch.save(build_model("small-cnn", 4, channels=1, seed=8).state_dict(), weights)
    assert main(args) == 0  # other weights: other runs and other features
    assert len(list((tmp_path / "runs" / "features").glob("*.npz"))) == 2
    rows = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob("digits*/result.json")]
    assert len(rows) == 8
    assert {row["at_once"] for row in rows} == {1}  # a run takes seconds: processes would cost more


def test_a_report_of_heads_uses_their_features_and_shows_the_images_that_they_were_tested_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, photos = tmp_path / "weights.pt", tmp_path / "photos"
    torch.save(build_model("small-cnn", 4, channels=3, seed=7).state_dict(), weights)
    random = np.random.default_rng(0)
    for number in range(24):
        folder = photos / ("test" if number % 3 == 0 else "train") / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(256, size=(8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    args = ["compare", str(photos), "--model", "small-cnn", "--weights", str(weights), "--train", "head"]
    args += ["--methods", "erm", "--seeds", "1", "--epochs", "1", "--batch-size", "8", "--device", "cpu"]
    assert main([*args, "--out", str(tmp_path / "runs")]) == 0
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (run,) = (tmp_path / "runs").glob("photos*head.erm*")
    assert main(["report", str(run), "--device", "cpu"]) == 0
    assert [path.name for path in elsewhere.iterdir()] == ["report.html"]  # no features
    assert "data:image" in Path("report.html").read_text()
    first, second, *_ = sorted((photos / "test" / "a").glob("*.png"))
    swapped = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(swapped)
    assert main(["report", str(run), "--device", "cpu"]) == 0
    page = Path("report.html").read_text()
    assert "data:image" not in page
    assert "was trained on other images" in page


def test_a_batch_that_was_not_given_fits_few_images(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    args = ["compare", "digits", "--per-class", "5", "--model", "small-cnn", "--weights", str(weights)]
    args += ["--methods", "erm", "--seeds", "1", "--epochs", "1", "--device", "cpu", "--out", str(tmp_path)]
    assert main([*args, "--no-report"]) == 0
    assert "batches of 8 images instead of 128: there are only 50 to train on" in capsys.readouterr().err
    (path,) = tmp_path.glob("digits*/result.json")
    assert json.loads(path.read_text())["batch_size"] == 8
    assert main([*args, "--batch-size", "51"]) == 2
    assert "batch_size is 51, but digits has only 50 training images" in capsys.readouterr().err


def test_the_batch_that_an_error_names_can_be_mixed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows, labels = np.zeros((6, 3)), np.arange(6) % 2
    arrays = {"train_features": rows, "train_labels": labels, "test_features": rows, "test_labels": labels}
    np.savez(tmp_path / "few.npz", **arrays)
    assert main(["train", str(tmp_path / "few.npz"), "--method", "mixup", "--batch-size", "16"]) == 2
    assert "has only 6 training images; use --batch-size 2 or" in capsys.readouterr().err


def test_fine_tuning_lengthens_short_runs_and_says_so(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    args = ["train", "--dataset", "digits", "--per-class", "10", "--model", "small-cnn", "--weights"]
    args += [
        str(weights),
        "--batch-size",
        "50",
        "--min-steps",
        "60",
        "--out",
        str(tmp_path),
        "--device",
        "cpu",
    ]
    assert main(args) == 0
    captured = capsys.readouterr()
    assert "30 epochs instead of 20, for at least 60 steps" in " ".join(captured.err.split())
    assert "epoch 30/30" in captured.out


def test_fine_tuning_from_random_weights_is_said(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    args = ["train", "digits", "--recipe", "finetune", "--model", "small-cnn", "--per-class", "5"]
    assert (
        main([*args, "--batch-size", "10", "--epochs", "1", "--out", str(tmp_path), "--device", "cpu"]) == 0
    )
    said = " ".join(capsys.readouterr().err.split())
    assert "small-cnn starts from random weights: the recipe finetune is for pretrained ones" in said


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["digits", "--train", "head"], "--train head needs the features of pretrained weights"),
        (["digits", "--model", "small-cnn", "--weights", "nowhere.pt"], "no weights file 'nowhere.pt'"),
        (["digits", "--model", "small-cnn", "--weights", "pretrained"], "has no pretrained weights"),
        (["nowhere.npz"], "no file 'nowhere.npz'"),
        (["nowhere.npz", "--methods", "erm", "cutmix"], "cutmix: methods that cut regions"),
        (["nowhere.npz", "--weights", "a.pt"], "holds features, so --weights has no use"),
        (["nowhere.npz", "--image-size", "32"], "holds features, so --image-size has no use"),
    ],
)
def test_errors_are_one_line(args: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["compare", *args, "--device", "cpu"]) == 2
    said = capsys.readouterr().err.strip()
    assert message in said
    assert len(said.splitlines()) == 1
