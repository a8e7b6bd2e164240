"""A run is reused only if its images, network, method, version, precision and device agree."""

from __future__ import annotations

import dataclasses
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from icmixup import METHODS
from icmixup.lab import models
from icmixup.lab.datasets import Dataset, Split
from icmixup.lab.datasets.cifar import LAYOUTS
from icmixup.lab.sweep import delete_runs, describe_reuse, find_finished, run_recipes
from icmixup.lab.training import identity
from icmixup.lab.training.data import load_recipe_data
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.identity import Identity, identify, run_key
from icmixup.lab.training.loop import train
from icmixup.lab.training.predictions import PREDICTIONS_FILE, read_predictions
from icmixup.lab.training.recipe import QUICK, Recipe
from icmixup.lab.training.run_folder import locate_run, open_run, read_identity, runs_of

TINY = dataclasses.replace(QUICK, dataset="photos", epochs=1, batch_size=8, method="erm", image_size=8)


def save(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def make_photos(root: Path, first: int = 0) -> None:
    for label, name in enumerate(("cat", "dog")):
        for number in range(10):
            save(root / name / f"{number}.png", first + 100 * label + number)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a folder of photos and one finished run on them."""
    monkeypatch.chdir(tmp_path)
    make_photos(tmp_path / "photos")
    train(TINY, execution())
    assert len(find_finished([TINY], execution())) == 1
    return tmp_path


def execution(**changes: Any) -> Execution:
    return Execution(out=Path("runs").absolute(), data_dir=Path("data"), device="cpu", **changes)


def add_image(here: Path) -> None:
    save(here / "photos" / "cat" / "10.png", 999)


def replace_image(here: Path) -> None:
    for number in range(10):  # one of them is in the training set
        save(here / "photos" / "cat" / f"{number}.png", 999 + number)


def replace_test_image(here: Path) -> None:
    save(here / "photos" / load_recipe_data(TINY, here).test.file_names[0], 999)


def add_class(here: Path) -> None:
    for number in range(10):
        save(here / "photos" / "eel" / f"{number}.png", 300 + number)


def rename_class(here: Path) -> None:
    (here / "photos" / "dog").rename(here / "photos" / "dogs")


def swap_labels(here: Path) -> None:
    (here / "photos" / "cat" / "0.png").rename(here / "photos" / "dog" / "10.png")


CHANGES: dict[str, Callable[[Path], None]] = {
    "an image is added": add_image,
    "images are replaced": replace_image,
    "a test image is replaced": replace_test_image,
    "a class is added": add_class,
    "a class is renamed": rename_class,
    "an image has another label": swap_labels,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_on_other_images_is_not_reused_and_the_message_says_so(change: str, here: Path) -> None:
    CHANGES[change](here)
    assert find_finished([TINY], execution()) == {}
    (message,) = describe_reuse([TINY], execution(reuse=True))  # --reuse is not for other images
    assert "other images or labels (fingerprint " in message
    assert "photos.small-cnn.erm.s0." in message
    (old,) = runs_of(here / "runs", TINY)
    row = train(TINY, execution())
    assert row["folder"] != old.folder.name
    assert old.result() is not None  # kept beside the new one
    assert len(list(runs_of(here / "runs", TINY))) == 2


def test_the_same_relative_path_from_another_folder_is_another_run(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = execution()
    make_photos(here / "elsewhere" / "photos", first=5000)
    monkeypatch.chdir(here / "elsewhere")
    assert find_finished([TINY], runs) == {}
    shutil.rmtree(here / "elsewhere" / "photos")
    shutil.copytree(here / "photos", here / "elsewhere" / "photos")
    (row,) = find_finished([TINY], runs).values()
    assert row["key"] == TINY.key


def test_the_same_images_at_another_path_are_the_same_run(here: Path) -> None:
    (here / "moved").mkdir()
    shutil.copytree(here / "photos", here / "moved" / "photos")
    moved = dataclasses.replace(TINY, dataset="moved/photos")
    (row,) = find_finished([moved], execution()).values()
    assert (row["dataset"], row["key"]) == ("moved/photos", moved.key)
    assert train(moved, execution())["folder"] == row["folder"]


def test_another_data_dir_with_other_images_is_another_run(here: Path) -> None:
    recipe = dataclasses.replace(TINY, dataset="cifar10", image_size=None)
    for seed, folder in enumerate(("first", "second")):
        write_cifar10(here / folder, seed)
    first, second = (dataclasses.replace(execution(), data_dir=here / name) for name in ("first", "second"))
    train(recipe, first)
    assert len(find_finished([recipe], first)) == 1
    assert find_finished([recipe], second) == {}


def write_cifar10(data_dir: Path, seed: int) -> None:
    """CIFAR-10 in its binary format, with two random images of each class in each file."""
    layout = next(layout for layout in LAYOUTS["cifar10"] if layout.header)
    folder, random = data_dir / layout.archive.folder, np.random.default_rng(seed)
    folder.mkdir(parents=True)
    for file in (*layout.train, layout.test):
        records = random.integers(0, 256, (20, 1 + 3072), dtype=np.uint8)
        records[:, 0] = np.arange(20) % 10
        (folder / file).write_bytes(records.tobytes())
    (folder / layout.names).write_text("\n".join(f"class{n}" for n in range(10)))


def make_dataset(seed: int, name: str) -> Dataset:
    """Twenty random images of two classes, ten of them to test on, always under the same name."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (30, 3, 8, 8), dtype=torch.uint8, generator=generator)
    labels = torch.arange(30) % 2
    train_part, test_part = Split(images[:20], labels[:20]), Split(images[20:], labels[20:])
    return Dataset(name, train_part, test_part, ("a", "b"), (0.5,) * 3, (0.25,) * 3)


def test_another_version_of_the_package_is_another_run_unless_reuse_is_set(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "package_version", lambda: "99.0")
    assert find_finished([TINY], execution()) == {}
    (message,) = describe_reuse([TINY], execution())
    assert "now 99.0; --reuse takes them" in message
    assert len(find_finished([TINY], execution(reuse=True))) == 1
    (message,) = describe_reuse([TINY], execution(reuse=True))
    assert "reused because of --reuse: icmixup" in message


def test_cpu_in_float32_and_gpu_in_bfloat16_are_two_runs(here: Path) -> None:
    data = load_recipe_data(TINY, here)
    cpu, gpu = (identify(TINY, data, device) for device in ("cpu", "cuda"))
    assert (cpu.device, cpu.precision) == ("cpu", "float32")
    assert (gpu.device, gpu.precision) == ("cuda", "bfloat16")
    runs = here / "runs"
    assert locate_run(runs, TINY, cpu).result() is not None
    assert locate_run(runs, TINY, gpu).result() is None
    assert locate_run(runs, TINY, gpu, reuse=True).result() is not None


def test_another_dataset_under_the_same_name_from_python_is_another_run(here: Path) -> None:
    row = train(TINY, execution(dataset=make_dataset(0, "photos")))
    assert row["folder"] != train(TINY, execution(dataset=make_dataset(1, "photos")))["folder"]
    assert row["folder"] == train(TINY, execution(dataset=make_dataset(0, "photos")))["folder"]


class Shallow(nn.Sequential):
    """A network of ours whose forward pass can be replaced."""

    hidden = ()


class Doubled(Shallow):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(images)


def test_another_network_under_the_same_name_from_python_is_another_run(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(kind: type[nn.Module], width: int, classes: int, channels: int) -> nn.Module:
        flat = nn.Flatten()
        return kind(flat, nn.Linear(64 * channels, width), nn.ReLU(), nn.Linear(width, classes))

    folders = set()
    # Another network than before; another width; the same weights with other code.
    for kind, width in ((Shallow, 4), (Shallow, 5), (Doubled, 5)):
        monkeypatch.setitem(
            models.MODELS, "small-cnn", lambda c, ch, kind=kind, width=width: build(kind, width, c, ch)
        )
        (message,) = set(describe_reuse([TINY], execution()))
        assert "another network of the same name" in message
        folders.add(train(TINY, execution())["folder"])
    assert len(folders) == 3


@pytest.mark.parametrize(
    "changed",
    [
        {"label_smoothing": 0.3},
        {"class_sizes": "effective", "defer": 0.8},  # has no effect in the first epoch
        {"class_sizes": "adjust-after"},  # has no effect in training
    ],
    ids=lambda changed: ", ".join(changed),
)
def test_another_method_under_the_same_name_from_python_is_another_run(
    changed: dict[str, Any], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "erm", dataclasses.replace(METHODS["erm"], **changed))
    assert find_finished([TINY], execution()) == {}
    (message,) = describe_reuse([TINY], execution())
    assert "another method of the same name" in message


def test_a_run_without_a_fingerprint_is_not_reused(here: Path) -> None:
    (run,) = runs_of(here / "runs", TINY)
    (run.folder / "identity.json").unlink()
    old = run.folder.rename(run.folder.with_name(TINY.name))
    assert find_finished([TINY], execution()) == {}
    (message,) = describe_reuse([TINY], execution(reuse=True))
    assert f"{old} is not used" in message
    assert "no fingerprint" in message


def test_a_half_finished_run_on_other_images_is_not_resumed(here: Path) -> None:
    long = dataclasses.replace(TINY, epochs=3)

    def stop(progress: object) -> None:
        if getattr(progress, "epoch", 0) >= 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(long, execution(checkpoint_seconds=0), stop)
    (half,) = runs_of(here / "runs", long)
    assert (half.folder / "checkpoint.pt").exists()
    add_image(here)
    row = train(long, execution())
    assert row["folder"] != half.folder.name
    assert half.result() is None


def test_a_checkpoint_copied_from_a_run_on_other_images_is_refused(here: Path) -> None:
    (old,) = runs_of(here / "runs", TINY)
    add_image(here)
    now = identify(TINY, load_recipe_data(TINY, here), "cpu")
    new = open_run(here / "runs", TINY, now)
    shutil.copy(old.folder / "checkpoint.pt", new.folder)
    state, refused = new.load(torch.device("cpu"))
    assert state is None
    assert "belongs to another run: other images or labels" in refused[new.folder / "checkpoint.pt"]


def test_a_row_and_a_folder_carry_the_identity(here: Path) -> None:
    (run,) = runs_of(here / "runs", TINY)
    row = run.result()
    assert row is not None
    data = load_recipe_data(TINY, here)
    now = identify(TINY, data, "cpu")
    assert read_identity(run.folder) == now
    assert run.key == run_key(TINY, now)
    assert {name: row[name] for name in now.columns} == now.columns
    assert row["fingerprint"] == data.fingerprint


def test_a_key_changes_with_every_part_of_the_identity() -> None:
    first = Identity("a", "b", "c", "1", "float32", "cpu")
    others = [first._replace(**{name: "other"}) for name in Identity._fields]
    assert len({run_key(TINY, each) for each in (first, *others)}) == len(Identity._fields) + 1
    assert run_key(dataclasses.replace(TINY, lr=0.3), first) != run_key(TINY, first)


def test_a_fingerprint_is_the_same_on_every_device_and_after_loading_again(here: Path) -> None:
    data = load_recipe_data(TINY, here)
    assert load_recipe_data(TINY, here).fingerprint == data.fingerprint
    assert data.to("cpu").fingerprint == dataclasses.replace(data).fingerprint == data.fingerprint


@pytest.mark.usefixtures("forked_workers")
def test_a_worker_that_loads_other_images_than_the_command_ends_the_sweep(here: Path) -> None:
    data = load_recipe_data(TINY, here)
    add_image(here)
    recipes: list[Recipe] = [dataclasses.replace(TINY, seed=seed) for seed in (1, 2)]
    with pytest.raises(ValueError, match="have changed since this command started"):
        run_recipes(recipes, execution(dataset=data, workers=2))


def test_fresh_deletes_only_the_run_on_the_present_images(here: Path) -> None:
    (old,) = runs_of(here / "runs", TINY)
    add_image(here)
    train(TINY, execution())
    delete_runs([TINY], execution())
    assert [run.folder for run in runs_of(here / "runs", TINY)] == [old.folder]


def test_a_run_with_damaged_predictions_is_named_and_evaluated_again_from_its_checkpoint(here: Path) -> None:
    (run,) = runs_of(here / "runs", TINY)
    before, scores = run.result(), read_predictions(run.folder).scores
    (run.folder / PREDICTIONS_FILE).write_bytes(b"damaged")
    with pytest.warns(UserWarning, match=r"predictions.npz is damaged .* is evaluated again"):
        (row,) = run_recipes([TINY], execution())
    assert row == before
    np.testing.assert_array_equal(read_predictions(run.folder).scores, scores)
    assert [line["epoch"] for line in run.read_log()] == [1]  # nothing was trained
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run_recipes([TINY], execution()) == [row]
    assert json.loads((run.folder / "result.json").read_text()) == row
