"""Image folders of every odd kind, and the hub's library on local folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from icmixup.lab.datasets import load_dataset
from icmixup.lab.datasets.inspect import check_dataset, describe_dataset

RED, GREEN, BLUE = (250, 10, 10), (10, 250, 10), (10, 10, 250)


# Image folders


def save(path: Path, image: Image.Image, **options: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)


def make_classes(root: Path, per_class: int = 5, size: tuple[int, int] = (12, 12)) -> None:
    for name, colour in (("blue", BLUE), ("green", GREEN), ("red", RED)):
        for number in range(per_class):
            shade = tuple(min(255, value + number) for value in colour)
            save(root / name / f"{number}.png", Image.new("RGB", size, shade))


def test_a_folder_of_classes_holds_out_the_same_fifth_whatever_the_seed(tmp_path: Path) -> None:
    make_classes(tmp_path, per_class=10)
    first, second = (load_dataset(str(tmp_path), data_dir=tmp_path, seed=seed) for seed in (0, 7))
    assert first.class_names == ("blue", "green", "red")
    assert first.class_counts.tolist() == [8, 8, 8]
    assert torch.bincount(first.test.labels).tolist() == [2, 2, 2]
    assert torch.equal(first.test.images, second.test.images)
    colours = torch.cat([first.train.images, first.test.images])[:, :, 0, 0].tolist()
    assert len({tuple(colour) for colour in colours}) == 30  # ten shades of three colours, none lost


@pytest.mark.parametrize(
    ("folders", "chosen"), [(["val"], "val"), (["test"], "test"), (["val", "test"], "test")]
)
def test_train_and_test_folders_are_taken_as_they_are(
    folders: list[str], chosen: str, tmp_path: Path
) -> None:
    make_classes(tmp_path / "train", per_class=4)
    for folder in folders:
        make_classes(tmp_path / folder, per_class=2 if folder == chosen else 3)
    dataset = load_dataset(str(tmp_path), data_dir=tmp_path)
    assert (len(dataset.train), len(dataset.test)) == (12, 6)


def odd_images() -> dict[str, tuple[Image.Image, dict[str, object]]]:
    """The same picture, left half red and right half blue, in every way a file can hold it."""
    plain = Image.new("RGB", (40, 20), BLUE)
    plain.paste(RED, (0, 0, 20, 20))
    plain = plain.resize((20, 20), Image.Resampling.NEAREST)
    clear = plain.convert("RGBA")
    clear.paste((0, 0, 0, 0), (0, 0, 20, 4))
    turned = Image.Exif()
    turned[0x0112] = 6  # stored a quarter turn anticlockwise
    return {
        "plain.png": (plain, {}),
        "plain.JPEG": (plain, {"quality": 95, "subsampling": 0}),
        "plain.bmp": (plain, {}),
        "plain.webp": (plain, {"lossless": True}),
        "plain.tif": (plain, {}),
        "palette.gif": (plain.convert("P", palette=Image.Palette.ADAPTIVE), {}),
        "palette.png": (plain.convert("P", palette=Image.Palette.ADAPTIVE), {}),
        "opaque.png": (plain.convert("RGBA"), {}),
        "clear.png": (clear, {}),
        "cmyk.jpg": (plain.convert("CMYK"), {"quality": 95}),
        "turned.jpg": (plain.rotate(90), {"exif": turned, "quality": 95, "subsampling": 0}),
    }


@pytest.mark.parametrize("kind", odd_images())
def test_every_kind_of_colour_file_becomes_the_same_picture(kind: str, tmp_path: Path) -> None:
    image, options = odd_images()[kind]
    for name in ("a", "b"):
        for number in range(2):
            save(tmp_path / name / f"{number}-{kind}", image, **options)
    dataset = load_dataset(str(tmp_path), data_dir=tmp_path)
    assert dataset.skipped == ()
    assert dataset.train.images.shape == (2, 3, 20, 20)
    picture = dataset.train.images[0].int()
    for x, colour in ((3, RED), (16, BLUE)):
        assert (picture[:, 15, x] - torch.tensor(colour)).abs().max() <= 12  # JPEG loses a little
    if kind == "clear.png":
        assert picture[:, 1, 3].tolist() == [255, 255, 255]


def test_grey_one_bit_and_sixteen_bit_files_keep_their_brightness(tmp_path: Path) -> None:
    ramp = np.arange(0, 256, 16, dtype=np.uint8)[None].repeat(16, 0)
    grey = {
        "grey": Image.fromarray(ramp),
        "alpha": Image.fromarray(ramp).convert("LA"),
        "deep": Image.fromarray(ramp.astype(np.uint16) * 257),
    }
    for name, image in grey.items():
        for number in range(2):
            save(tmp_path / name / f"{number}.png", image)
    dataset = load_dataset(str(tmp_path), data_dir=tmp_path)
    expected = torch.from_numpy(ramp).expand(3, 3, 16, 16)
    assert torch.equal(dataset.train.images, expected)
    for number in range(2):
        save(
            tmp_path / "bits" / f"{number}.png", Image.fromarray(ramp).convert("1", dither=Image.Dither.NONE)
        )
    bits = load_dataset(str(tmp_path), data_dir=tmp_path).train
    assert set(bits.images[bits.labels == 1].unique().tolist()) == {0, 255}


@pytest.mark.parametrize(
    ("sizes", "asked", "expected"),
    [
        ([(12, 12), (12, 12)], None, 12),
        ([(12, 12), (13, 13)], None, 32),
        ([(80, 80), (80, 80)], None, 32),
        ([(12, 20), (12, 20)], None, 32),
        ([(300, 200), (9, 7)], 24, 24),
    ],
)
def test_images_become_square_at_the_size_asked_for_or_their_own(
    sizes: list[tuple[int, int]], asked: int | None, expected: int, tmp_path: Path
) -> None:
    for name, size in zip("ab", sizes, strict=True):
        make_classes(tmp_path / name, per_class=1, size=size)
    dataset = load_dataset(str(tmp_path), data_dir=tmp_path, image_size=asked)
    assert dataset.train.images.shape[1:] == (3, expected, expected)


def test_bad_files_are_named_and_counted_and_the_others_read(tmp_path: Path) -> None:
    make_classes(tmp_path)
    (tmp_path / "red" / "text.png").write_text("this is no image")
    whole = (tmp_path / "red" / "0.png").read_bytes()
    (tmp_path / "blue" / "torn.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "blue" / "empty.jpg").touch()
    save(tmp_path / "green" / "float.tif", Image.new("F", (12, 12)))
    (tmp_path / "green" / "notes.txt").write_text("not asked to be an image")
    (tmp_path / "green" / "._0.png").write_text("a Mac's shadow file")
    dataset = load_dataset(str(tmp_path), data_dir=tmp_path)
    assert len(dataset.train) + len(dataset.test) == 15
    named = sorted(Path(line.split(": ")[0]).name for line in dataset.skipped)
    assert named == ["empty.jpg", "float.tif", "text.png", "torn.png"]
    assert any(what == "files skipped" and "4" in found for what, found in describe_dataset(dataset))


def test_folders_that_cannot_be_learnt_from_are_refused_with_the_class(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no class; two are the least"):
        load_dataset(str(tmp_path), data_dir=tmp_path)
    save(tmp_path / "only" / "0.png", Image.new("RGB", (8, 8)))
    with pytest.raises(ValueError, match=r"one class, 'only'; two are the least"):
        load_dataset(str(tmp_path), data_dir=tmp_path)
    (tmp_path / "void").mkdir()
    with pytest.raises(ValueError, match=r"class 'void' has no readable image: add images"):
        load_dataset(str(tmp_path), data_dir=tmp_path)
    (tmp_path / "void" / "0.png").write_text("this is no image")
    with pytest.raises(ValueError, match=r"'void' has no readable image \(1 of 2 files .*void/0\.png"):
        load_dataset(str(tmp_path), data_dir=tmp_path)
    save(tmp_path / "void" / "1.png", Image.new("RGB", (8, 8)))
    with pytest.raises(ValueError, match=r"class 'only' has 1 image, and one must be held out"):
        load_dataset(str(tmp_path), data_dir=tmp_path)


def test_a_test_class_that_training_lacks_is_refused(tmp_path: Path) -> None:
    make_classes(tmp_path / "train")
    make_classes(tmp_path / "val")
    save(tmp_path / "val" / "yellow" / "0.png", Image.new("RGB", (12, 12)))
    with pytest.raises(ValueError, match="class 'yellow', which the train images lack"):
        load_dataset(str(tmp_path), data_dir=tmp_path)


# The hub, from local folders


def test_hub_folders_of_images_equal_our_own_reading(tmp_path: Path) -> None:
    make_classes(tmp_path / "set" / "train")
    make_classes(tmp_path / "set" / "test", per_class=2)
    theirs = load_dataset(f"hf:{tmp_path / 'set'}", data_dir=tmp_path / "data")
    ours = load_dataset(str(tmp_path / "set"), data_dir=tmp_path)
    assert theirs.class_names == ours.class_names
    for a, b in ((theirs.train, ours.train), (theirs.test, ours.test)):
        assert torch.equal(a.labels, b.labels)
        assert torch.equal(a.images, b.images)


def hub_table(labels: list[object], kind: object = None) -> Any:
    datasets = pytest.importorskip("datasets")
    images = [Image.new("RGB", (10, 10), (number, 0, 0)) for number in range(len(labels))]
    features = datasets.Features(
        {
            "picture": datasets.Image(),
            "coarse": datasets.ClassLabel(names=["x", "y"]),
            "fine_label": kind or datasets.ClassLabel(names=["cat", "dog", "owl"]),
        }
    )
    columns = {"picture": images, "coarse": [0] * len(labels), "fine_label": labels}
    return datasets.Dataset.from_dict(columns, features=features)


def test_hub_parquet_files_find_their_columns_and_hold_out_a_fifth(tmp_path: Path) -> None:
    table = hub_table([0, 1, 2] * 5)
    (tmp_path / "set").mkdir()
    table.to_parquet(tmp_path / "set" / "train.parquet")
    dataset = load_dataset(f"hf:{tmp_path / 'set'}", data_dir=tmp_path / "data")
    assert dataset.class_names == ("cat", "dog", "owl")
    assert (dataset.class_counts.tolist(), len(dataset.test)) == ([4, 4, 4], 3)
    assert torch.equal(dataset.train.images[:, 0, 0, 0] % 3, dataset.train.labels.to(torch.uint8))


def test_hub_test_splits_with_hidden_labels_are_passed_over(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    splits = {
        "train": hub_table([0, 1, 2] * 3),
        "test": hub_table([-1] * 5),
        "validation": hub_table([0, 1, 2]),
    }
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "set")
    dataset = load_dataset(f"hf:{tmp_path / 'set'}", data_dir=tmp_path / "data")
    assert (len(dataset.train), len(dataset.test)) == (9, 3)


def test_hub_labels_that_are_words_become_classes(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    words = hub_table(["owl", "cat"] * 5, datasets.Value("string"))
    datasets.DatasetDict({"train": words}).save_to_disk(tmp_path / "set")
    dataset = load_dataset(f"hf:{tmp_path / 'set'}", data_dir=tmp_path / "data")
    assert dataset.class_names == ("cat", "owl")
    assert dataset.class_counts.tolist() == [4, 4]


def test_hub_failures_say_what_was_asked_and_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"could not load hf:\S*nowhere .*give hf:FOLDER") as caught:
        load_dataset(f"hf:{tmp_path}/nowhere", data_dir=tmp_path / "data", download=False)
    assert "\n" not in str(caught.value)


def test_a_check_finds_test_images_among_the_train_images(tmp_path: Path) -> None:
    make_classes(tmp_path / "train", per_class=4)
    make_classes(tmp_path / "test", per_class=2)
    shared = next(check for check in check_dataset(str(tmp_path), tmp_path) if "bit for bit" in check.claim)
    assert (shared.found, shared.holds) == ("6 are", False)
