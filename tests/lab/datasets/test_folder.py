"""Folders of image files, and the `datasets` library on local folders."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from icmixup.lab.cli import main
from icmixup.lab.datasets import DataSpec, load_dataset
from icmixup.lab.datasets.inspect import check_dataset, describe_dataset, get_dataset

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


def test_a_folder_of_classes_holds_out_the_same_fifth_for_every_seed(tmp_path: Path) -> None:
    make_classes(tmp_path, per_class=10)
    first, second = (load_dataset(DataSpec(str(tmp_path), data_seed=seed), tmp_path) for seed in (0, 7))
    assert first.class_names == ("blue", "green", "red")
    assert first.class_counts.tolist() == [8, 8, 8]
    assert torch.bincount(first.test.labels).tolist() == [2, 2, 2]
    assert torch.equal(first.test.images, second.test.images)
    colours = torch.cat([first.train.images, first.test.images])[:, :, 0, 0].tolist()
    assert len({tuple(colour) for colour in colours}) == 30  # ten shades of three colours, none lost


@pytest.mark.parametrize(
    ("folders", "chosen"), [(["val"], "val"), (["test"], "test"), (["val", "test"], "test")]
)
def test_train_and_test_folders_are_read_as_they_are(folders: list[str], chosen: str, tmp_path: Path) -> None:
    make_classes(tmp_path / "train", per_class=4)
    for folder in folders:
        make_classes(tmp_path / folder, per_class=2 if folder == chosen else 3)
    dataset = load_dataset(DataSpec(str(tmp_path)), tmp_path)
    assert (len(dataset.train), len(dataset.test)) == (12, 6)


def image_variants() -> dict[str, tuple[Image.Image, dict[str, object]]]:
    """The same image, left half red and right half blue, in many file formats and colour modes."""
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


@pytest.mark.parametrize("kind", image_variants())
def test_every_format_and_colour_mode_becomes_the_same_image(kind: str, tmp_path: Path) -> None:
    image, options = image_variants()[kind]
    for name in ("a", "b"):
        for number in range(2):
            save(tmp_path / name / f"{number}-{kind}", image, **options)
    dataset = load_dataset(DataSpec(str(tmp_path)), tmp_path)
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
    dataset = load_dataset(DataSpec(str(tmp_path)), tmp_path)
    expected = torch.from_numpy(ramp).expand(3, 3, 16, 16)
    assert torch.equal(dataset.train.images, expected)
    for number in range(2):
        save(
            tmp_path / "bits" / f"{number}.png", Image.fromarray(ramp).convert("1", dither=Image.Dither.NONE)
        )
    bits = load_dataset(DataSpec(str(tmp_path)), tmp_path).train
    assert set(bits.images[bits.labels == 1].unique().tolist()) == {0, 255}


@pytest.mark.parametrize(
    ("sizes", "image_size", "expected"),
    [
        ([(12, 12), (12, 12)], None, 12),
        ([(12, 12), (13, 13)], None, 12),
        ([(80, 80), (80, 80)], None, 64),
        ([(300, 200), (200, 300)], None, 224 if torch.cuda.is_available() else 96),
        ([(12, 20), (12, 20)], None, 12),
        ([(300, 200), (9, 7)], 24, 24),
    ],
)
def test_images_become_square_with_the_given_size_or_their_own(
    sizes: list[tuple[int, int]], image_size: int | None, expected: int, tmp_path: Path
) -> None:
    for name, size in zip("ab", sizes, strict=True):
        make_classes(tmp_path / name, per_class=1, size=size)
    dataset = load_dataset(DataSpec(str(tmp_path), image_size=image_size), tmp_path)
    assert dataset.train.images.shape[1:] == (3, expected, expected)


def test_unreadable_files_are_skipped_and_reported(tmp_path: Path) -> None:
    make_classes(tmp_path)
    (tmp_path / "red" / "text.png").write_text("this is not an image")
    whole = (tmp_path / "red" / "0.png").read_bytes()
    (tmp_path / "blue" / "truncated.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "blue" / "empty.jpg").touch()
    save(tmp_path / "green" / "float.tif", Image.new("F", (12, 12)))
    (tmp_path / "green" / "notes.txt").write_text("has no suffix of an image")
    (tmp_path / "green" / "._0.png").write_text("metadata written by macOS")
    dataset = load_dataset(DataSpec(str(tmp_path)), tmp_path)
    assert len(dataset.train) + len(dataset.test) == 15
    reported = sorted(Path(line.split(": ")[0]).name for line in dataset.skipped)
    assert reported == ["empty.jpg", "float.tif", "text.png", "truncated.png"]
    assert any(name == "files skipped" and "4" in value for name, value in describe_dataset(dataset))


def test_images_in_formats_that_are_not_read_are_reported(tmp_path: Path) -> None:
    """A folder of photos of which some are HEIC would be trained on the others without a word."""
    make_classes(tmp_path)
    red = Image.new("RGB", (12, 12), RED)
    save(tmp_path / "red" / "a.JFIF", red, format="JPEG")
    save(tmp_path / "red" / "b.jpe", red, format="JPEG")
    save(tmp_path / "red" / "c.ppm", red)
    (tmp_path / "red" / "d.HEIC").write_bytes(b"\0\0\0\x18ftypheic")
    (tmp_path / "red" / "notes.txt").write_text("not an image")
    dataset = load_dataset(DataSpec(str(tmp_path)), tmp_path)
    assert len(dataset.train) + len(dataset.test) == 15 + 2
    assert dataset.skipped == tuple(
        f"{tmp_path}/red/{name}: {suffix} files are not read; convert it to PNG or JPEG"
        for name, suffix in (("c.ppm", ".ppm"), ("d.HEIC", ".HEIC"))
    )


def test_links_to_folders_are_followed_once_and_never_to_other_classes(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    make_classes(root)
    for number in range(3):
        save(elsewhere / f"{number}.png", Image.new("RGB", (12, 12), RED))
    (root / "red" / "linked").symlink_to(elsewhere)
    (root / "red" / "again").symlink_to(elsewhere)
    (root / "red" / "itself").symlink_to(root / "red")
    (root / "red" / "all").symlink_to(root)
    save(root / "red" / ".ipynb_checkpoints" / "0-checkpoint.png", Image.new("RGB", (12, 12), RED))
    dataset = load_dataset(DataSpec(str(root)), tmp_path)
    totals = torch.bincount(torch.cat([dataset.train.labels, dataset.test.labels]))
    assert dict(zip(dataset.class_names, totals.tolist(), strict=True)) == {"blue": 5, "green": 5, "red": 8}


def test_a_class_may_be_called_anything_that_programs_do_not_leave_behind(tmp_path: Path) -> None:
    make_classes(tmp_path)
    for name in ("__background__", "_noise_", "-dash", "__MACOSX", ".hidden"):
        (tmp_path / name).mkdir()
        for number in range(2):
            save(tmp_path / name / f"{number}.png", Image.new("RGB", (12, 12), RED))
    names = load_dataset(DataSpec(str(tmp_path)), tmp_path).class_names
    assert set(names) == {"blue", "green", "red", "__background__", "_noise_", "-dash"}


def test_names_that_are_not_utf8_can_be_printed_and_stored(tmp_path: Path) -> None:
    make_classes(tmp_path)
    os.rename(os.fsencode(tmp_path / "red" / "0.png"), os.fsencode(tmp_path / "red") + b"/\xff.png")
    os.rename(os.fsencode(tmp_path / "red"), os.fsencode(tmp_path) + b"/r\xe9d")
    dataset = load_dataset(DataSpec(str(tmp_path)), tmp_path)
    assert dataset.class_names == ("blue", "green", r"r\xe9d")
    assert r"r\xe9d/\xff.png" in (*dataset.train.file_names, *dataset.test.file_names)


def test_folders_with_too_few_classes_or_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no class, expected at least two"):
        load_dataset(DataSpec(str(tmp_path)), tmp_path)
    save(tmp_path / "only" / "0.png", Image.new("RGB", (8, 8)))
    with pytest.raises(ValueError, match=r"has one class, 'only', expected at least two"):
        load_dataset(DataSpec(str(tmp_path)), tmp_path)
    (tmp_path / "void").mkdir()
    with pytest.raises(ValueError, match=r"class 'void' has no readable image: add images"):
        load_dataset(DataSpec(str(tmp_path)), tmp_path)
    (tmp_path / "void" / "0.png").write_text("this is not an image")
    with pytest.raises(ValueError, match=r"'void' has no readable image \(1 of 2 files .*void/0\.png"):
        load_dataset(DataSpec(str(tmp_path)), tmp_path)
    save(tmp_path / "void" / "1.png", Image.new("RGB", (8, 8)))
    with pytest.raises(
        ValueError, match=r"class 'only' must have at least 2 images, got 1, because one is held out"
    ):
        load_dataset(DataSpec(str(tmp_path)), tmp_path)


def test_a_test_class_without_training_images_is_refused(tmp_path: Path) -> None:
    make_classes(tmp_path / "train")
    make_classes(tmp_path / "val")
    save(tmp_path / "val" / "yellow" / "0.png", Image.new("RGB", (12, 12)))
    with pytest.raises(ValueError, match="class 'yellow', which has no training images"):
        load_dataset(DataSpec(str(tmp_path)), tmp_path)


# Hugging Face datasets, from local folders


@pytest.mark.parametrize("other", ["Oie Cendr\u00e9e", "oie cendre\u0301e"])
def test_a_class_name_in_another_case_or_unicode_form_is_shown_beside_the_known_one(
    other: str, tmp_path: Path
) -> None:
    """The message was that a class has no training images, whose folder could be seen in train/."""
    for part, name in (("train", "oie cendr\u00e9e"), ("train", "red"), ("test", other), ("test", "red")):
        save(tmp_path / part / name / "0.png", Image.new("RGB", (12, 12), RED))
    with pytest.raises(ValueError, match="give both the same name, in case and in Unicode form") as error:
        load_dataset(DataSpec(str(tmp_path)), tmp_path)
    assert ascii(other) in str(error.value)
    assert ascii("oie cendr\u00e9e") in str(error.value)


def test_two_classes_that_look_the_same_are_an_error(tmp_path: Path) -> None:
    """Archives from macOS store an accent as a character of its own, and one class became two."""
    for name in ("oie cendr\u00e9e", "oie cendre\u0301e", "red", "Red"):
        save(tmp_path / name / "0.png", Image.new("RGB", (12, 12), RED))
    with pytest.raises(ValueError, match="look the same: move the images of one") as error:
        load_dataset(DataSpec(str(tmp_path)), tmp_path)
    assert ascii("oie cendre\u0301e") in str(error.value)


def test_hub_and_folder_readers_agree_on_a_folder_of_images(tmp_path: Path) -> None:
    make_classes(tmp_path / "set" / "train")
    make_classes(tmp_path / "set" / "test", per_class=2)
    theirs = load_dataset(DataSpec(f"hf:{tmp_path / 'set'}"), tmp_path / "data")
    ours = load_dataset(DataSpec(str(tmp_path / "set")), tmp_path)
    assert theirs.class_names == ours.class_names
    for a, b in ((theirs.train, ours.train), (theirs.test, ours.test)):
        assert torch.equal(a.labels, b.labels)
        assert torch.equal(a.images, b.images)


def hub_table(labels: list[object], label_type: object = None) -> Any:
    datasets = pytest.importorskip("datasets")
    images = [Image.new("RGB", (10, 10), (number, 0, 0)) for number in range(len(labels))]
    features = datasets.Features(
        {
            "picture": datasets.Image(),
            "coarse": datasets.ClassLabel(names=["x", "y"]),
            "fine_label": label_type or datasets.ClassLabel(names=["cat", "dog", "owl"]),
        }
    )
    columns = {"picture": images, "coarse": [0] * len(labels), "fine_label": labels}
    return datasets.Dataset.from_dict(columns, features=features)


def test_hub_columns_are_found_in_parquet_files_and_a_fifth_is_held_out(tmp_path: Path) -> None:
    table = hub_table([0, 1, 2] * 5)
    (tmp_path / "set").mkdir()
    table.to_parquet(tmp_path / "set" / "train.parquet")
    dataset = load_dataset(DataSpec(f"hf:{tmp_path / 'set'}"), tmp_path / "data")
    assert dataset.class_names == ("cat", "dog", "owl")
    assert (dataset.class_counts.tolist(), len(dataset.test)) == ([4, 4, 4], 3)
    assert torch.equal(dataset.train.images[:, 0, 0, 0] % 3, dataset.train.labels.to(torch.uint8))


def test_hub_test_splits_with_hidden_labels_are_skipped(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    splits = {
        "train": hub_table([0, 1, 2] * 3),
        "test": hub_table([-1] * 5),
        "validation": hub_table([0, 1, 2]),
    }
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "set")
    dataset = load_dataset(DataSpec(f"hf:{tmp_path / 'set'}"), tmp_path / "data")
    assert (len(dataset.train), len(dataset.test)) == (9, 3)


def test_hub_labels_that_are_strings_become_classes(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    words = hub_table(["owl", "cat"] * 5, datasets.Value("string"))
    datasets.DatasetDict({"train": words}).save_to_disk(tmp_path / "set")
    dataset = load_dataset(DataSpec(f"hf:{tmp_path / 'set'}"), tmp_path / "data")
    assert dataset.class_names == ("cat", "owl")
    assert dataset.class_counts.tolist() == [4, 4]


def test_hub_test_labels_mean_the_names_of_their_own_split(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    others = hub_table([0, 1, 0, 1], datasets.ClassLabel(names=["owl", "dog"]))
    datasets.DatasetDict({"train": hub_table([0, 1, 2] * 3), "test": others}).save_to_disk(tmp_path / "set")
    dataset = load_dataset(DataSpec(f"hf:{tmp_path / 'set'}"), tmp_path / "data")
    assert [dataset.class_names[label] for label in dataset.test.labels.tolist()] == ["owl", "dog"] * 2
    strange = hub_table([0, 1], datasets.ClassLabel(names=["dog", "emu"]))
    datasets.DatasetDict({"train": hub_table([0, 1, 2] * 3), "test": strange}).save_to_disk(tmp_path / "two")
    with pytest.raises(ValueError, match="test has label 'emu' in row 1, expected one of its 3 classes"):
        load_dataset(DataSpec(f"hf:{tmp_path / 'two'}"), tmp_path / "data")


@pytest.mark.parametrize("label", [None, ["cat", "owl"]])
def test_hub_rows_without_one_label_are_named(tmp_path: Path, label: object) -> None:
    datasets = pytest.importorskip("datasets")
    kind = datasets.Value("string")
    labels, kind = (["cat", None], kind) if label is None else ([["cat"], label], datasets.Sequence(kind))
    datasets.DatasetDict({"train": hub_table(labels, kind)}).save_to_disk(tmp_path / "set")
    with pytest.raises(
        ValueError, match=r"in column 'fine_label', row [01], but every image needs one label"
    ):
        load_dataset(DataSpec(f"hf:{tmp_path / 'set'}"), tmp_path / "data")


def test_hub_errors_name_the_dataset_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"could not load hf:\S*nowhere .*use hf:FOLDER") as caught:
        load_dataset(DataSpec(f"hf:{tmp_path}/nowhere"), tmp_path / "data", download=False)
    assert "\n" not in str(caught.value)


def test_a_check_counts_test_images_that_are_also_training_images(tmp_path: Path) -> None:
    make_classes(tmp_path / "train", per_class=4)
    make_classes(tmp_path / "test", per_class=2)
    check = next(c for c in check_dataset(get_dataset(str(tmp_path), tmp_path)) if "identical" in c.claim)
    assert (check.found, check.holds) == ("6 are", False)


def test_a_check_counts_images_that_have_two_labels(tmp_path: Path) -> None:
    make_classes(tmp_path / "train", per_class=4)
    make_classes(tmp_path / "test", per_class=0)
    save(tmp_path / "train" / "red" / "also_blue.png", Image.open(tmp_path / "train" / "blue" / "0.png"))
    save(tmp_path / "test" / "green" / "also_blue.png", Image.open(tmp_path / "train" / "blue" / "0.png"))
    save(tmp_path / "test" / "red" / "known.png", Image.open(tmp_path / "train" / "red" / "1.png"))
    checks = {check.claim: check for check in check_dataset(get_dataset(str(tmp_path), tmp_path))}
    assert checks["no image is identical to one of another class"].found == "3 are"
    assert checks["no test image is identical to a train image"].found == "2 are"


def test_a_check_shows_what_it_checks_and_how_test_images_were_separated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_classes(tmp_path, per_class=10)
    assert main(["data", "check", str(tmp_path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "train images 24 test images 6 separated by a fifth of each class held out classes 3" in shown


# Splits


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("Train", "Test"),
        ("TRAIN", "TEST"),
        ("training", "testing"),
        ("train", "Validation"),
        ("Training", "val"),
    ],
)
def test_split_folders_are_found_in_any_case(train: str, test: str, tmp_path: Path) -> None:
    make_classes(tmp_path / train, per_class=4)
    make_classes(tmp_path / test, per_class=2)
    (tmp_path / "annotations").mkdir()  # neither a split nor a class
    dataset = load_dataset(DataSpec(str(tmp_path)), tmp_path)
    assert dataset.class_names == ("blue", "green", "red")
    assert (len(dataset.train), len(dataset.test)) == (12, 6)
    assert dataset.split_by == f"folders {train} and {test}"
    assert dataset.test.file_names[0] == f"{test}/blue/0.png"


@pytest.mark.parametrize("other", ["training", "Training"])
def test_several_folders_of_training_images_are_refused(other: str, tmp_path: Path) -> None:
    for name in ("train", other, "test"):
        make_classes(tmp_path / name)
    with pytest.raises(ValueError, match=rf"several folders of training images, .*{other}"):
        load_dataset(DataSpec(str(tmp_path)), tmp_path)


def test_a_class_called_train_beside_other_classes_is_a_class(tmp_path: Path) -> None:
    for number, name in enumerate(("bus", "car", "train")):
        for k in range(5):
            save(tmp_path / name / f"{k}.png", Image.new("RGB", (8, 8), (80 * number, k, 0)))
    (tmp_path / "train" / "more").mkdir()
    save(tmp_path / "train" / "more" / "5.png", Image.new("RGB", (8, 8), (160, 5, 0)))
    dataset = load_dataset(DataSpec(str(tmp_path)), tmp_path)
    assert dataset.class_names == ("bus", "car", "train")
    assert int(dataset.class_counts.sum()) + len(dataset.test) == 16
    assert dataset.split_by == "a fifth of each class held out"


@pytest.mark.parametrize("split", ["test", "Val", "train"])
def test_a_split_beside_its_own_classes_does_not_become_a_class(split: str, tmp_path: Path) -> None:
    make_classes(tmp_path)
    make_classes(tmp_path / split)
    with pytest.raises(ValueError, match=rf"classes such as 'blue' beside {split}/, which has folders of"):
        load_dataset(DataSpec(str(tmp_path)), tmp_path)


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_stray_image_does_not_turn_splits_into_classes(split: str, tmp_path: Path) -> None:
    for folder in ("train", "val"):
        make_classes(tmp_path / folder)
    save(tmp_path / split / "overview.png", Image.new("RGB", (12, 12)))
    with pytest.raises(ValueError, match=rf"overview\.png lies beside the folders of classes in {split}/"):
        load_dataset(DataSpec(str(tmp_path)), tmp_path)


def test_images_beside_do_not_turn_splits_into_classes(tmp_path: Path) -> None:
    for folder in ("train", "test"):
        make_classes(tmp_path / folder)
    save(tmp_path / "to_classify" / "new.png", Image.new("RGB", (12, 12)))
    with pytest.raises(
        ValueError, match=r"train/ and test/ with folders of the same .* in to_classify/ beside"
    ):
        load_dataset(DataSpec(str(tmp_path)), tmp_path)


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("seg_train", "seg_test"),
        ("Training Data", "Test Data"),
        ("trainset", "valset"),
        ("training-1", "validation-1"),
    ],
)
@pytest.mark.parametrize("nested", [True, False])
def test_splits_of_other_names_do_not_become_classes(
    train: str, test: str, nested: bool, tmp_path: Path
) -> None:
    for name in (train, test):
        make_classes(tmp_path / name if nested else tmp_path)
        if not nested:
            (tmp_path / "blue").rename(tmp_path / name)
    with pytest.raises(
        ValueError, match=rf"'{train}' and '{test}', which would be classes: .* name them train"
    ):
        load_dataset(DataSpec(str(tmp_path)), tmp_path)


def test_flat_training_and_test_images_do_not_become_classes(tmp_path: Path) -> None:
    for name in ("train", "test"):
        save(tmp_path / name / "1.png", Image.new("RGB", (12, 12)))
    with pytest.raises(
        ValueError, match=r"'train' and 'test', which would be classes: .* one folder per class"
    ):
        load_dataset(DataSpec(str(tmp_path)), tmp_path)


def test_test_images_inside_of_the_folders_of_classes_are_not_trained_on(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        for split in ("Train", "Test"):
            save(tmp_path / name / split / "1.png", Image.new("RGB", (12, 12)))
    with pytest.raises(
        ValueError, match=r"cat would be a class, but has Train/ and Test/: .*Train/cat and Test/cat"
    ):
        load_dataset(DataSpec(str(tmp_path)), tmp_path)


def test_a_test_set_of_another_name_is_not_replaced_by_training_images(tmp_path: Path) -> None:
    for name in ("train", "dev"):
        make_classes(tmp_path / name)
    with pytest.raises(ValueError, match=r"dev has folders of the same names as train/, .*: name it test"):
        load_dataset(DataSpec(str(tmp_path)), tmp_path)


def test_a_test_folder_without_images_is_not_replaced_by_training_images(tmp_path: Path) -> None:
    make_classes(tmp_path / "train")
    (tmp_path / "test" / "blue").mkdir(parents=True)
    (tmp_path / "test" / "blue" / "labels.csv").write_text("")
    with pytest.raises(ValueError, match=r"test has folders of classes but no images: add test images"):
        load_dataset(DataSpec(str(tmp_path)), tmp_path)


def test_a_folder_around_the_classes_names_the_one_to_pass(tmp_path: Path) -> None:
    make_classes(tmp_path / "images")
    with pytest.raises(ValueError, match=rf"one class, 'images', .*: pass {tmp_path / 'images'}"):
        load_dataset(DataSpec(str(tmp_path)), tmp_path)


def test_pixels_without_a_known_range_are_reported_and_not_black(tmp_path: Path) -> None:
    make_classes(tmp_path, size=(80, 80))
    ramp = np.arange(6400).reshape(80, 80) % 256  # as 16 bits, all of it would be black
    save(tmp_path / "blue" / "integers.tif", Image.fromarray(ramp.astype(np.int32)))
    save(tmp_path / "blue" / "floats.tif", Image.fromarray(ramp.astype(np.float32)))
    skipped = load_dataset(DataSpec(str(tmp_path)), tmp_path).skipped
    assert [text.partition(": ")[2][:14] for text in skipped] == ["floating-point", "32-bit pixels "]


def test_a_test_set_that_lacks_a_class_is_accepted(tmp_path: Path) -> None:
    make_classes(tmp_path / "train", per_class=4)
    make_classes(tmp_path / "test", per_class=2)
    for path in (tmp_path / "test" / "green").iterdir():
        path.unlink()
    dataset = load_dataset(DataSpec(str(tmp_path)), tmp_path)
    assert torch.bincount(dataset.test.labels, minlength=3).tolist() == [2, 0, 2]
    (tmp_path / "test" / "green").rmdir()
    assert load_dataset(DataSpec(str(tmp_path)), tmp_path).fingerprint == dataset.fingerprint


def test_file_names_follow_their_images_through_subsets_and_resizing(tmp_path: Path) -> None:
    make_classes(tmp_path, per_class=10)
    dataset = load_dataset(DataSpec(str(tmp_path), per_class=3, image_size=6), tmp_path)
    for split in (dataset.train, dataset.test):
        for image, name in zip(split.images, split.file_names, strict=True):
            with Image.open(tmp_path / name) as file:
                assert tuple(image[:, 0, 0].tolist()) == file.getpixel((0, 0))
