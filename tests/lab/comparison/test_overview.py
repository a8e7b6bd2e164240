"""What a comparison says first, and what it writes about classes."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from icmixup.lab.cli import main
from icmixup.lab.comparison.classes import confusion_matrix, write_class_files
from icmixup.lab.comparison.compare import comparison_folder, comparison_name
from icmixup.lab.comparison.overview import describe_comparison, find_unused, find_warnings
from icmixup.lab.datasets import Dataset, Split, load_dataset
from icmixup.lab.models import build_model
from icmixup.lab.training.predictions import Predictions, make_predictions, write_predictions
from icmixup.lab.training.recipe import LONG_TAIL, QUICK

TINY = dataclasses.replace(QUICK, dataset="digits", per_class=20, epochs=1)
NAMES = ("cat", "dog", "eel")


def made(test_labels: list[int], train: int = 30) -> Dataset:
    drawn = torch.Generator().manual_seed(0)
    images, tested = (
        torch.randint(256, (number, 3, 8, 8), dtype=torch.uint8, generator=drawn)
        for number in (train, len(test_labels))
    )
    labels = torch.arange(train) % 3
    test = Split(tested, torch.tensor(test_labels))
    return Dataset("made", Split(images, labels), test, NAMES, (0.5,) * 3, (0.2,) * 3)


def test_the_block_states_what_the_data_and_the_recipe_are() -> None:
    data = load_dataset(dataclasses.replace(TINY, imbalance=0.1).data, Path("unused"))
    overview = describe_comparison(
        TINY, data, ("erm", "mixup"), range(2), recipe_name="quick", where="cpu", seconds=90.0
    )
    text = "\n".join(f"{what} {value}" for what, value in overview.lines())
    weights = sum(w.numel() for w in build_model("small-cnn", 10, channels=1, seed=0).parameters())
    for part in (
        f"{len(data.train)} for training, 599 for testing (a third of each class held out)",
        "10; smallest 8 (2), largest 0 (20)",
        "8 x 8",
        "crop after padding by 1 (zeros), rotation up to 10 degrees",
        f"small-cnn, {weights:,} parameters",
        "1 epoch",
        "erm mixup; 2 seeds each",
        "about 1:30, on cpu",
    ):
        assert part in text
    stored = json.loads(json.dumps(overview.as_json()))
    assert (stored["parameters"], stored["estimated_seconds"]) == (weights, 90.0)


def test_classes_of_equal_size_are_not_called_smallest_and_largest() -> None:
    overview = describe_comparison(
        TINY, made([0, 1, 2]), ("erm",), range(1), recipe_name="quick", where="cpu", seconds=None
    )
    assert dict(overview.lines())["classes"] == "3 of 10 images each"


def test_heads_are_trained_on_features_not_at_a_size() -> None:
    features = torch.randn(30, 12)
    split = Split(features, torch.arange(30) % 3)
    data = Dataset("made", split, split, NAMES, (0.0,), (1.0,), original_size="224 x 224")
    recipe = dataclasses.replace(TINY, model="linear")
    overview = describe_comparison(
        recipe, data, ("erm",), range(2), recipe_name="head", where="cpu", seconds=None
    )
    assert ("resolution", "224 x 224, trained on 12 features") in overview.lines()


def test_a_cosine_classifier_is_named_and_has_no_biases() -> None:
    data = load_dataset(TINY.data, Path("unused"))
    sizes = []
    for cosine in (False, True):
        recipe = dataclasses.replace(TINY, cosine_classifier=cosine)
        overview = describe_comparison(
            recipe, data, ("erm",), range(1), recipe_name="quick", where="cpu", seconds=None
        )
        sizes.append(overview.parameters)
        assert dict(overview.lines())["model"].startswith("small-cnn with a cosine classifier") == cosine
    assert sizes[0] - sizes[1] == 10


@pytest.mark.parametrize(("ema", "warned"), [(None, ""), (0.99, ""), (0.999, "55 %"), (0.9999, "94 %")])
def test_an_average_that_has_initial_weights_is_warned_about(ema: float | None, warned: str) -> None:
    recipe = dataclasses.replace(QUICK, epochs=300, batch_size=15, ema=ema)
    found = [text for text in find_warnings(recipe, made([0, 1, 2] * 10)) if "--ema" in text]
    assert len(found) == bool(warned)
    assert all(f"--ema {ema} is too slow for a run of 600 steps: {warned} of" in text for text in found)


def test_small_test_classes_show_less_of_the_balanced_accuracy() -> None:
    rare, even = made([0] * 90 + [1] * 10), made([0] * 18 + [1] * 18)
    # The variance is (v / 90 + v / 10) / 4 = v / 36, that of two classes of 18 images.
    of_rare, of_even = (
        [find_warnings(QUICK, data, measure=measure)[0] for measure in ("accuracy", "balanced-accuracy")]
        for data in (rare, even)
    )
    assert of_rare[0].startswith("100 test images can hardly show a difference below 6.2 points")
    assert of_rare[1].startswith("100 test images can hardly show a difference below 10.3 points")
    assert of_rare[1].endswith("10,671 could show 1 point")
    assert of_even[0] == of_even[1] == of_rare[1].replace("100 ", "36 ").replace("10,671", "3,842")


def test_data_that_cannot_answer_is_warned_about() -> None:
    recipe = dataclasses.replace(QUICK, epochs=20)  # 20 steps of 30 images
    few, steps, missing, _ = find_warnings(recipe, made([0, 0, 2] * 10))
    assert few.startswith("30 test images can hardly show a difference below 11.3 points")
    assert "20 epochs of 30 images: 20 steps of the optimizer, fewer than 300" in steps
    assert missing == "1 of 3 classes have no test images: dog"
    assert find_warnings(dataclasses.replace(QUICK, epochs=300), made([0, 1, 2] * 400)) == []


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"schedule": "cosine", "lr_factor": 0.5}, "--lr-factor has no effect with --schedule cosine"),
        ({"optimizer": "adamw", "momentum": 0.5}, "--momentum has no effect with --optimizer adamw"),
        ({"optimizer": "adamw", "nesterov": False}, "--nesterov has no effect with --optimizer adamw"),
        ({"optimizer": "adamw"}, None),  # the recipe's own momentum was not asked for
        ({"schedule": "step", "lr_factor": 0.5, "momentum": 0.5}, None),
        ({"mix_off_epoch": 60}, "--mix-off-epoch 60 has no effect on 60 epochs"),
        ({"mix_off_epoch": 59}, None),
    ],
)
def test_settings_of_another_schedule_or_optimizer_or_after_the_end_are_warned_about(
    changes: dict[str, Any], warning: str | None
) -> None:
    found = find_unused(dataclasses.replace(QUICK, **changes), ["mixup"], "quick")
    assert [text.split(";")[0] for text in found] == ([] if warning is None else [warning])


def test_settings_that_no_method_uses_are_warned_about() -> None:
    recipe = dataclasses.replace(QUICK, kappa=2.0, adjust_tau=2.0, mix_prob=0.5, lr_drops=(9,))
    drops = "--lr-drops has no effect with --schedule cosine; use --schedule step"
    assert find_unused(recipe, ["erm", "focal"], "quick") == [
        "--kappa has no effect on erm, focal",
        "--adjust-tau has no effect on erm, focal",
        "--mix-prob has no effect on erm, focal",
        drops,
    ]
    assert find_unused(recipe, ["erm", "remix", "balanced"], "quick") == [drops]
    assert find_unused(dataclasses.replace(recipe, schedule="step"), ["remix", "balanced"], "quick") == []
    assert find_unused(LONG_TAIL, ["erm"], "long-tail") == []  # its alpha was not asked for
    warnings = describe_comparison(
        *(recipe, made([0, 1, 2] * 400), ["erm"], [0]), recipe_name="quick", where="cpu", seconds=None
    ).warnings
    assert "--kappa has no effect on erm" in warnings


def test_class_weights_that_would_begin_after_the_last_epoch_are_warned_about() -> None:
    recipe = dataclasses.replace(QUICK, epochs=4)
    (warning,) = find_unused(recipe, ["erm", "ldam-drw"], "quick")
    assert warning.startswith("ldam-drw weighs classes from 80 % of training on, which none of its 4 epochs")
    assert find_unused(dataclasses.replace(QUICK, epochs=5), ["erm", "ldam-drw"], "quick") == []
    deferred = dataclasses.replace(recipe, method="ldam-drw")
    assert deferred.method_at(3) == deferred.method_at(0)


def test_a_test_set_with_a_long_tail_is_warned_about() -> None:
    """Its accuracy is nearly that of the largest classes."""
    warning = "classes have 1 to 6 test images, and accuracy counts images"
    assert any(found.startswith(warning) for found in find_warnings(TINY, made([0] * 6 + [1] * 3 + [2])))
    assert not any("accuracy counts" in found for found in find_warnings(TINY, made([0, 0, 0, 1, 1, 2, 2])))
    tail = made([0] * 6 + [1] * 3 + [2])
    assert not any(
        "accuracy counts" in found for found in find_warnings(TINY, tail, None, "balanced-accuracy")
    )


def test_names_of_classes_that_are_probably_one_class_are_warned_about() -> None:
    data = made([0, 1, 2] * 400)
    recipe = dataclasses.replace(QUICK, epochs=300)
    twice = dataclasses.replace(data, class_names=("Snow goose", "swan", "snow_Goose "))
    (warning,) = find_warnings(recipe, twice)
    assert warning.startswith("classes 'Snow goose' and 'snow_Goose ' differ only in case or spaces")
    assert find_warnings(recipe, dataclasses.replace(data, class_names=("a", "b", "c"))) == []


def test_test_images_that_were_trained_on_are_counted() -> None:
    clean = made([0, 1, 2] * 400)
    images = clean.test.images.clone()
    images[:3] = clean.train.images[0]  # its label is 0, theirs are 0, 1 and 2
    leaking = dataclasses.replace(clean, test=dataclasses.replace(clean.test, images=images))
    leak, conflict = find_warnings(dataclasses.replace(QUICK, epochs=300), leaking)
    assert leak.startswith("3 of 1,200 test images are identical to a training image: ")
    assert conflict.startswith("4 of 1,230 images are identical to one of another class")
    copies, conflict = find_warnings(dataclasses.replace(QUICK, epochs=300, folds=5), leaking, 1230)
    assert copies.startswith("4 of 1,230 images are identical to another one")
    assert conflict.startswith("4 of 1,230 images are identical to one of another class")


def written(runs: Path, name: str, labels: list[int], predicted: list[int]) -> None:
    scores = torch.nn.functional.one_hot(torch.tensor(predicted), 3).float()
    (runs / name).mkdir()
    write_predictions(runs / name, make_predictions(scores, torch.tensor(labels), (), NAMES))


def test_class_files_count_what_the_predictions_say(tmp_path: Path) -> None:
    labels = [0, 0, 0, 0, 2, 2]  # no test image of class 1
    written(tmp_path, "a0", labels, [0, 0, 1, 1, 2, 0])
    written(tmp_path, "a1", labels, [0, 0, 0, 1, 2, 2])
    rows = [{"folder": name, "method": "erm"} for name in ("a0", "a1")]
    write_class_files(tmp_path, tmp_path, rows, ("erm", "mixup"), [7, 8, 9])
    found = list(csv.DictReader((tmp_path / "per_class.csv").read_text().splitlines()))
    assert [(row["class"], row["train_images"], row["test_images"], row["accuracy"]) for row in found] == [
        ("cat", "7", "4", "62.5"),
        ("dog", "8", "0", ""),
        ("eel", "9", "2", "75.0"),
    ]
    matrix = list(csv.reader((tmp_path / "confusion.erm.csv").read_text().splitlines()))
    assert matrix[0] == ["true class", *NAMES]
    assert matrix[1:] == [
        ["cat", "2.5", "1.5", "0.0"],
        ["dog", "0.0", "0.0", "0.0"],
        ["eel", "0.5", "0.0", "1.5"],
    ]
    pairs = list(csv.reader((tmp_path / "confused_pairs.csv").read_text().splitlines()))[1:]
    assert pairs == [["erm", "cat", "dog", "1.5", "37.5"], ["erm", "eel", "cat", "0.5", "25.0"]]


def test_a_confusion_matrix_is_a_loop_over_images() -> None:
    draw = np.random.default_rng(0)
    scores, labels = draw.normal(size=(200, 3)).astype(np.float16), draw.integers(0, 3, 200)
    counts = np.zeros((3, 3))
    for score, label in zip(scores, labels, strict=True):
        counts[label, score.argmax()] += 1
    found = confusion_matrix(Predictions(scores, labels, ("",) * 200, NAMES))
    np.testing.assert_array_equal(found, counts)


def test_predictions_of_another_class_list_are_refused_with_both_numbers(tmp_path: Path) -> None:
    written(tmp_path, "a", [0, 1], [0, 1])
    other = make_predictions(torch.eye(2), torch.tensor([0, 1]), (), ("cat", "fox"))
    (tmp_path / "b").mkdir()
    write_predictions(tmp_path / "b", other)
    rows = [{"folder": name, "method": "erm"} for name in "ab"]
    with pytest.raises(ValueError, match=r"2 classes \(cat, fox\) and 3 \(cat, dog, eel\)"):
        write_class_files(tmp_path, tmp_path, rows, ("erm",), [1, 1, 1])


def test_two_comparisons_have_two_folders_and_share_their_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["compare", "digits", "--per-class", "20", "--epochs", "1", "--seeds", "1", "--workers", "1"]
    common += ["--device", "cpu", "--out", str(tmp_path)]
    assert main([*common, "--methods", "erm", "mixup"]) == 0
    first = {path.parent for path in tmp_path.glob("*/comparison.json")}
    assert main([*common, "--methods", "erm", "mixup", "ic-mixup"]) == 0
    assert "[2/3] mixup seed 0" in capsys.readouterr().err
    both = {path.parent for path in tmp_path.glob("*/comparison.json")}
    assert len(both) == 2
    assert first < both
    assert len(list(tmp_path.glob("*/result.json"))) == 3
    assert main([*common, "--methods", "erm", "--name", "mine"]) == 0
    assert (tmp_path / "mine" / "per_class.csv").exists()
    assert main(["analyse", str(tmp_path / "mine"), "--out", str(tmp_path / "analysis")]) == 0
    rows = list(csv.DictReader((tmp_path / "analysis" / "analysis.csv").read_text().splitlines()))
    assert {row["method"] for row in rows} == {"erm"}


def test_a_second_comparison_of_one_name_leaves_no_file_of_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A confusion matrix of other runs beside the new table would be read as part of it."""
    common = ["compare", "digits", "--per-class", "20", "--epochs", "1", "--seeds", "1", "--workers", "1"]
    common += ["--device", "cpu", "--out", str(tmp_path), "--name", "mine"]
    assert main([*common, "--methods", "erm", "mixup"]) == 0
    files = {path.name for path in (tmp_path / "mine").iterdir()}
    assert main([*common, "--methods", "erm", "mixup", "--no-report"]) == 0
    assert {path.name for path in (tmp_path / "mine").iterdir()} == files
    assert "replaced" not in capsys.readouterr().err
    assert main([*common, "--methods", "mixup", "--no-report"]) == 0
    assert "mine had a comparison of other runs, which is replaced" in capsys.readouterr().err
    left = files - {path.name for path in (tmp_path / "mine").iterdir()}
    assert left == {"confusion.erm.csv", "report.html"}


def test_a_name_follows_everything_that_defines_a_comparison() -> None:
    plain = (TINY, "quick", ("erm", "mixup"), (0, 1), "mixup", "abc")
    names = {
        comparison_name(*plain),
        comparison_name(dataclasses.replace(TINY, epochs=2), *plain[1:]),
        comparison_name(*plain[:2], ("erm", "mixup", "remix"), *plain[3:]),
        comparison_name(*plain[:3], (0, 1, 2), *plain[4:]),
        comparison_name(*plain[:4], "erm", "abc"),
        comparison_name(*plain[:5], "def"),
    }
    assert len(names) == 6
    assert comparison_name(dataclasses.replace(TINY, method="remix", seed=4), *plain[1:]) in names


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "/tmp/a"])
def test_a_name_that_is_not_one_folder_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--name must be the name of a folder"):
        comparison_folder(tmp_path, name)


def test_the_name_of_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "recipe.json").write_text("{}")
    with pytest.raises(ValueError, match="is taken by a run"):
        comparison_folder(tmp_path, "taken")
