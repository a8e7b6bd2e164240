"""Photos are cropped at random and mirrored by default, unless flags or the recipe say otherwise."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from shlex import split

import numpy as np
import pytest
from PIL import Image

from icmixup.lab.analysis.report.command import repeat_command
from icmixup.lab.cli import main, parse
from icmixup.lab.cli.loading import settle_augmentation
from icmixup.lab.cli.shared import given_flags, requested_recipe
from icmixup.lab.datasets import DataSpec, load_dataset
from icmixup.lab.training.recipe import PHOTO_AUGMENTATION, RECIPES, SMALLEST_PHOTO, STRONG, Recipe

FIELDS = ("random_resized_crop", "padding", "flip", "rotation")
CROP = PHOTO_AUGMENTATION["random_resized_crop"]


def write_folder(folder: Path, height: int, width: int) -> Path:
    random = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for number in range(5):
            pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("photos"), 80, 90)


def settle(folder: str, args: list[str], size: int | None = None) -> Recipe:
    """The recipe that compare would use on a folder with these flags."""
    words = ["compare", folder, *args]
    name = requested_recipe(words) or "strong"
    data = load_dataset(DataSpec(folder, image_size=size), Path("none"))
    recipe = parse(words, name).shared_recipe()
    return settle_augmentation(recipe, data, name, given_flags(words))


def augmentation(recipe: Recipe) -> tuple[object, ...]:
    return tuple(getattr(recipe, field) for field in FIELDS)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], (CROP, 0, True, 0.0)),
        (["--recipe", "quick"], (None, 1, False, 10.0)),
        (["--recipe", "quick", "--random-resized-crop", "0.5"], (0.5, 1, False, 10.0)),
        (["--recipe", "long-tail"], (CROP, 0, True, 0.0)),
        (["--recipe", "paper"], (None, 4, True, 15.0)),
        (["--recipe", "finetune"], (0.2, 0, True, 0.0)),
        (["--recipe", "finetune", "--random-resized-crop", "0"], (None, 0, True, 0.0)),
        (["--random-resized-crop", "0.5"], (0.5, 0, True, 0.0)),
        (["--random-resized-crop=0"], (None, 4, True, 0.0)),
        (["--random_resized_crop", "0"], (None, 4, True, 0.0)),
        (["--padding", "4"], (None, 4, True, 0.0)),
        (["--padding=8", "--no-flip"], (None, 8, False, 0.0)),
        (["--padding", "2", "--random-resized-crop", "0.7"], (0.7, 2, True, 0.0)),
        (["--no-flip", "--rotation", "5"], (CROP, 0, False, 5.0)),
    ],
    ids=str,
)
def test_flags_that_are_given_count_more_than_the_default_of_photos(
    photos: Path, args: list[str], expected: tuple[object, ...]
) -> None:
    assert augmentation(settle(str(photos), args, size=72)) == expected


@pytest.mark.parametrize(
    ("side", "is_photo"), [(SMALLEST_PHOTO - 1, False), (SMALLEST_PHOTO, True), (SMALLEST_PHOTO + 1, True)]
)
def test_images_are_photos_from_the_size_that_the_network_sees(
    photos: Path, side: int, is_photo: bool
) -> None:
    found = augmentation(settle(str(photos), [], size=side))
    assert found == (tuple(PHOTO_AUGMENTATION.values()) if is_photo else augmentation(STRONG))


def test_named_datasets_keep_their_recipe_at_any_size() -> None:
    assert augmentation(settle("digits", [], size=SMALLEST_PHOTO)) == augmentation(STRONG)


def test_features_are_not_photos(tmp_path: Path) -> None:
    path = tmp_path / "features.npz"
    rows, labels = np.random.default_rng(0).normal(size=(8, 100)), np.arange(8) % 2
    np.savez(path, train_features=rows, train_labels=labels, test_features=rows, test_labels=labels)
    assert augmentation(settle(str(path), [])) == augmentation(STRONG)


def test_the_augmentation_of_photos_is_printed_and_recorded(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    args = ["compare", str(photos), "--methods", "erm", "--seeds", "1", "--epochs", "1", "--batch-size", "4"]
    args += ["--image-size", "72", "--device", "cpu", "--workers", "1", "--no-report", "--out", str(tmp_path)]
    args += ["--data-dir", str(tmp_path / "data"), "--recipe", "strong", "--model", "small-cnn"]
    assert main(args) == 0
    said = " ".join(capsys.readouterr().err.split())
    crop = f"random resized crop of {CROP:g} to 1 of the area, horizontal flip"
    assert f"photos: {crop}; --random-resized-crop 0" in said
    assert f"augmentation: {crop} " in said
    recorded = json.loads(next(tmp_path.glob("*.erm.s0.*/recipe.json")).read_text())
    assert {field: recorded[field] for field in FIELDS} == PHOTO_AUGMENTATION
    stored = json.loads(next(tmp_path.glob("*/comparison.json")).read_text())
    assert stored["recipe"]["random_resized_crop"] == CROP


@pytest.mark.parametrize("given", [{}, PHOTO_AUGMENTATION, {"random_resized_crop": 0.5}], ids=str)
@pytest.mark.parametrize("name", ["quick", "strong"])
def test_the_command_to_repeat_a_comparison_of_photos_has_their_augmentation(
    photos: Path, name: str, given: dict[str, object]
) -> None:
    recipe = replace(RECIPES[name], dataset=str(photos), method="mixup", image_size=72, **given)
    words = split(repeat_command(recipe, ["mixup"], [0], "mixup"))
    assert settle(str(photos), words[3:], size=72) == recipe
