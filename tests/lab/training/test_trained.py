"""A trained run is used on new images: predictions, export, and loading without the dataset."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from icmixup.lab.cli import main, predict
from icmixup.lab.training.data import load_recipe_data
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.loop import train
from icmixup.lab.training.predictions import read_predictions
from icmixup.lab.training.recipe import QUICK
from icmixup.lab.training.trained import export_run, load_trained

RECIPE = dataclasses.replace(QUICK, epochs=4, batch_size=8, method="erm", image_size=16)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, draw = tmp_path_factory.mktemp("trained"), np.random.default_rng(0)
    for label, name in enumerate(("dark", "bright", "a, b")):
        for number in range(15):
            pixels = draw.integers(70 * label, 70 * label + 110, (20, 24, 3), dtype=np.uint8)
            path = root / "photos" / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    return root


@pytest.fixture(scope="module")
def run(root: Path) -> Path:
    recipe = dataclasses.replace(RECIPE, dataset=str(root / "photos"))
    row = train(recipe, Execution(out=root / "runs", data_dir=root, device="cpu"))
    return root / "runs" / row["folder"]


def test_new_images_get_the_probabilities_that_the_run_gave_its_test_images(root: Path, run: Path) -> None:
    stored = read_predictions(run)
    temperature = json.loads((run / "result.json").read_text())["fitted_temperature"]
    wanted = (torch.from_numpy(stored.scores).double() / temperature).softmax(dim=1).max(dim=1)
    found = load_trained(run).predict([root / "photos" / name for name in stored.file_names])
    assert [one.class_name for one in found] == [stored.class_names[k] for k in wanted.indices.tolist()]
    assert [one.probability for one in found] == pytest.approx(wanted.values.tolist(), abs=5e-3)


def test_digits_that_were_enlarged_get_the_scores_of_the_run_as_files_of_their_own_size(
    tmp_path: Path,
) -> None:
    recipe = dataclasses.replace(QUICK, dataset="digits", per_class=20, image_size=20, epochs=3, method="erm")
    folder = tmp_path / str(train(recipe, Execution(out=tmp_path, data_dir=tmp_path, device="cpu"))["folder"])
    trained = load_trained(folder)
    images = load_recipe_data(dataclasses.replace(recipe, image_size=None), tmp_path).test.images[:50, 0]
    prepared = torch.stack([trained.inputs.prepare(Image.fromarray(image)) for image in images.numpy()])
    stored = torch.from_numpy(read_predictions(folder).scores[:50]).double() / trained.temperature
    torch.testing.assert_close(
        trained.probabilities(prepared).double(), stored.softmax(dim=1), atol=5e-3, rtol=0
    )


def test_an_exported_file_predicts_what_the_run_predicts_without_its_folder(root: Path, run: Path) -> None:
    paths = sorted((root / "photos").rglob("*.png"))
    weights, beside = export_run(run, root / "export" / "model.safetensors")
    copied = shutil.copy(weights, root / "alone.safetensors")
    assert load_trained(copied).predict(paths) == load_trained(run).predict(paths)
    about = json.loads(beside.read_text())
    data = load_recipe_data(dataclasses.replace(RECIPE, dataset=str(root / "photos")), root)
    assert tuple(about["class_names"]) == data.class_names
    assert (tuple(about["mean"]), tuple(about["std"])) == (data.mean, data.std)
    assert (about["image_size"], about["channels"], about["model"]) == (16, 3, "small-cnn")
    assert about["fingerprint"] == data.fingerprint


def test_the_documented_lines_run(
    root: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "lab.md").read_text()
    predictions, network = (block.split("```")[0] for block in page.split("```python\n")[1:])
    monkeypatch.chdir(tmp_path)
    export_run(run, tmp_path / "model.safetensors")
    shutil.copy(root / "photos" / "dark" / "0.png", tmp_path / "photo.jpg")
    shutil.copytree(run, tmp_path / "runs" / "RUN")
    exec(predictions.replace("np.load", "load"), {"load": load_arrays})
    exec(network, {})
    assert len(network.strip().splitlines()) == 3
    assert "class_name='dark'" in capsys.readouterr().out


def load_arrays(path: str) -> dict[str, object]:
    """numpy.load, without leaving the file open."""
    with np.load(path) as stored:
        return dict(stored)


def test_predict_writes_a_csv_of_file_class_and_probability(
    root: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", str(run), str(root / "photos" / "a, b"), "--device", "cpu"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert list(rows[0]) == ["file", "class", "probability"]
    assert [row["file"] for row in rows] == sorted(map(str, (root / "photos" / "a, b").iterdir()))
    assert {row["class"] for row in rows} == {"a, b"}
    assert all(1 / 3 <= float(row["probability"]) <= 1 for row in rows)


def test_predict_reports_files_that_are_not_images_and_goes_on(
    root: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "broken.png").write_text("no image")
    good = root / "photos" / "dark" / "0.png"
    to = root / "out" / "found.csv"
    assert main(["predict", str(run), str(root / "broken.png"), str(good), "--to", str(to)]) == 1
    assert "broken.png cannot be read as an image" in capsys.readouterr().err
    assert len(to.read_text().splitlines()) == 2


def test_a_file_that_is_given_twice_is_predicted_twice(root: Path, run: Path) -> None:
    first, second = (root / "photos" / name / "0.png" for name in ("dark", "a, b"))
    found = load_trained(run).predict([first, second, first])
    assert [prediction.file for prediction in found] == [str(first), str(second), str(first)]
    assert found[0] == found[2] != found[1]


def test_grey_networks_read_colour_images_as_grey(tmp_path: Path) -> None:
    recipe = dataclasses.replace(QUICK, dataset="digits", per_class=5, epochs=1, batch_size=16)
    row = train(recipe, Execution(out=tmp_path, data_dir=tmp_path, device="cpu"))
    trained = load_trained(tmp_path / row["folder"])
    colour = Image.new("RGB", (8, 8), (200, 100, 50))
    wanted = np.asarray(colour.convert("L"))
    assert np.abs(trained.inputs.prepare(colour)[0].numpy().astype(int) - wanted).max() <= 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["predict", "RUN", "nowhere.png"], "nowhere.png does not exist"),
        (["predict", "ROOT/photos", "ROOT/photos"], "is not the folder of a run"),
        (["predict", "RUN", "RUN", "ROOT/photos"], "is the folder of a run, not of images; pass one run"),
        (["predict", "ROOT/runs", "ROOT/photos"], "contains 1 runs such as"),
        (["predict", "RUN", "ROOT/photos", "--to", "ROOT"], "--to must be a file, for example"),
        (["predict", "ROOT/none.safetensors", "ROOT/photos"], "none.safetensors does not exist"),
        (["predict", "ROOT/foreign.safetensors", "ROOT/photos"], "was not written by icmixup export"),
        (["export", "RUN", "--to", "model.pt"], "--to must end in .safetensors"),
        (["export", "ROOT/photos"], "is not the folder of a run"),
    ],
)
def test_bad_arguments_are_named(
    args: list[str], message: str, root: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "foreign.safetensors").write_bytes(b"something else")
    words = [word.replace("RUN", str(run)).replace("ROOT", str(root)) for word in args]
    assert main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("terminal", [True, False])
def test_the_command_shows_a_bar_in_a_terminal_only_and_keeps_the_order_of_the_images(
    terminal: bool,
    root: Path,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It printed nothing until the last of thousands of photos was classified."""
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=terminal, width=100)
    monkeypatch.setattr(predict, "stderr_console", lambda: console)
    to = tmp_path / "rows.csv"
    assert main(["predict", str(run), str(root / "photos"), "--device", "cpu", "--to", str(to)]) == 0
    assert ("classifying images" in shown.getvalue()) == terminal
    paths = sorted((root / "photos").rglob("*.png"))  # 45, more than a step of the bar
    wanted = [(one.file, one.class_name) for one in load_trained(run).predict(paths)]
    rows = list(csv.DictReader(to.read_text().splitlines()))
    assert [(row["file"], row["class"]) for row in rows] == wanted
