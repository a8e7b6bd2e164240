"""Confidence and class difference along lam: compared with loops, symmetry, a linear model, and runs."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.collections import PolyCollection
from torch import Tensor, nn

from icmixup.lab.analysis.figure import plot_confidence, plot_difference, pooled_lines
from icmixup.lab.analysis.runs import expand_comparisons, line_names, load_model
from icmixup.lab.analysis.scores import (
    LAMS,
    analyse_runs,
    choose_rows,
    chosen_images,
    compute_curve,
    find_run,
    ordered_pairs,
)
from icmixup.lab.augment import normalise
from icmixup.lab.cli import parse
from icmixup.lab.cli.analyse import run_analyse
from icmixup.lab.datasets import Dataset, DataSpec, Split, load_dataset
from icmixup.lab.models import build_model
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.loop import train
from icmixup.lab.training.recipe import QUICK, Recipe
from icmixup.lab.training.trained import load_run_data

K, C = 4, 6
LABELS = torch.tensor([5, 0, 3, 2])
CPU = torch.device("cpu")
TINY = dataclasses.replace(QUICK, dataset="digits", per_class=10, epochs=2, batch_size=50, eval_every=2)


@pytest.fixture
def images() -> Tensor:
    return torch.randn(K, 1, 5, 5, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model() -> nn.Module:
    return build_model("small-cnn", C, channels=1, seed=3)


def features_of(model: nn.Module, images: Tensor) -> Tensor:
    """Input of the classifier of a small CNN."""
    maps = model.stem(images)
    for stage in model.stages:
        maps = model.get_submodule(stage)(maps)
    return model.tail(maps).mean(dim=(2, 3))


@torch.no_grad()
def looped_curve(model: nn.Module, images: Tensor, labels: Tensor) -> list[tuple[float, ...]]:
    """One mixed image at a time, with statistics of the standard library."""
    model.eval()
    points = []
    for step in range(11):
        lam, norms, centred, features, differences = step / 10, [], [], [], []
        for a in range(len(images)):
            for b in range(len(images)):
                if a != b:
                    mixed = lam * images[a] + (1 - lam) * images[b]
                    scores = model(mixed[None])[0].tolist()
                    norms.append(sum(score**2 for score in scores))
                    centred.append(sum((score - statistics.fmean(scores)) ** 2 for score in scores))
                    features.append(features_of(model, mixed[None]).square().sum().item())
                    differences.append(scores[labels[a]] - scores[labels[b]])
        points.append(
            (
                lam,
                len(norms),
                *(statistics.fmean(part) for part in (norms, centred, features)),
                statistics.fmean(differences),
                statistics.pstdev(differences),
            )
        )
    return points


@pytest.mark.parametrize("block", [1, 5, 1000])
def test_a_curve_matches_a_loop_for_every_block_size(block: int, model: nn.Module, images: Tensor) -> None:
    found = compute_curve(model, images, LABELS, block=block)
    assert len(found) == len(LAMS) == 11
    for point, looped in zip(found, looped_curve(model, images, LABELS), strict=True):
        assert tuple(point) == pytest.approx(looped, rel=1e-4, abs=1e-5)


def test_the_model_is_analysed_in_evaluation_mode_and_left_unchanged(
    model: nn.Module, images: Tensor
) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    in_training = compute_curve(model, images, LABELS)
    assert model.training
    assert compute_curve(model.eval(), images, LABELS) == in_training
    for name, value in model.state_dict().items():  # including the running statistics of BatchNorm
        assert torch.equal(value, before[name])


def test_swapping_the_images_of_each_pair_mirrors_the_curve(model: nn.Module, images: Tensor) -> None:
    points = compute_curve(model, images, LABELS)
    for point, mirrored in zip(points, reversed(points), strict=True):
        assert point.difference_mean == pytest.approx(-mirrored.difference_mean, abs=1e-5)
        assert point.difference_std == pytest.approx(mirrored.difference_std, rel=1e-4)
        assert point.squared_norm == pytest.approx(mirrored.squared_norm, rel=1e-4)
    assert points[5].difference_mean == pytest.approx(0, abs=1e-6)


def test_a_linear_model_has_a_linear_difference_and_a_quadratic_norm(images: Tensor) -> None:
    torch.manual_seed(0)
    linear = nn.Sequential(nn.Flatten(), nn.Linear(25, C))
    points = compute_curve(linear, images, LABELS)
    first, last = points[0].difference_mean, points[-1].difference_mean
    assert abs(last - first) > 0.1
    for point in points:
        assert point.difference_mean == pytest.approx(first + point.lam * (last - first), abs=1e-5)
    norms = torch.tensor([point.squared_norm for point in points])
    second_differences = norms.diff(n=2)
    torch.testing.assert_close(second_differences, second_differences[:1].expand(9), rtol=1e-3, atol=1e-4)
    assert second_differences[0] > 0


def test_a_constant_added_to_all_scores_changes_only_the_norm_of_the_scores(
    model: nn.Module, images: Tensor
) -> None:
    before = compute_curve(model, images, LABELS)
    with torch.no_grad():
        model.classifier.bias += 3
    for point, moved in zip(before, compute_curve(model, images, LABELS), strict=True):
        assert moved.squared_norm > point.squared_norm + 1
        assert moved.centred_norm == pytest.approx(point.centred_norm, rel=1e-4)
        assert moved.feature_norm == point.feature_norm


def test_a_model_without_a_linear_layer_has_no_feature_norm(images: Tensor) -> None:
    flat = nn.Sequential(nn.Conv2d(1, C, 5), nn.Flatten())
    assert all(math.isnan(point.feature_norm) for point in compute_curve(flat, images, LABELS))


def test_a_hundred_classes_have_9_900_ordered_pairs() -> None:
    pairs = ordered_pairs(100, CPU)
    assert pairs.shape == (9900, 2)
    assert len({(a, b) for a, b in pairs.tolist() if a != b}) == 9900


def test_one_image_per_class_is_chosen_the_first_or_one_drawn_with_the_seed() -> None:
    labels = torch.tensor([4, 1, 1, 4, 0, 1, 4, 4, 1])
    split = Split(torch.zeros(len(labels), 1, 2, 2, dtype=torch.uint8), labels)
    assert choose_rows(split, None).tolist() == [4, 1, 0]
    drawn = [choose_rows(split, seed) for seed in range(20)]
    assert all(labels[rows].tolist() == [0, 1, 4] for rows in drawn)
    assert {rows[1].item() for rows in drawn} == {1, 2, 5, 8}
    assert torch.equal(choose_rows(split, 7), drawn[7])


def test_images_are_normalised_as_in_training_and_a_single_class_is_rejected() -> None:
    data = load_dataset(DataSpec("digits"), Path())
    images, labels = chosen_images(data, None, CPU)
    row = (data.test.labels == 3).nonzero()[0]
    expected = normalise(data.test.images[row], torch.tensor(data.mean), torch.tensor(data.std))
    assert labels.tolist() == list(range(10))
    torch.testing.assert_close(images[3:4], expected)
    lonely = Dataset("lonely", data.train, data.test[row], data.class_names, data.mean, data.std)
    with pytest.raises(ValueError, match="the test set of lonely has images of 1 class"):
        chosen_images(lonely, None, CPU)


def test_lines_are_named_by_method_and_the_fields_that_differ() -> None:
    mixup, ic = Recipe(method="mixup"), Recipe(method="ic-mixup")
    assert line_names([mixup, ic, dataclasses.replace(ic, seed=4)]) == ["mixup", "ic-mixup", "ic-mixup"]
    sharp = dataclasses.replace(ic, alpha=1.0)
    assert line_names([mixup, ic, sharp]) == ["mixup", "ic-mixup", "ic-mixup alpha=1.0"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def folders(root: Path) -> list[Path]:
    """Runs on digits: mixup, ic-mixup with two seeds, and mixup with averaged weights."""
    recipes = [
        dataclasses.replace(TINY, method="mixup"),
        dataclasses.replace(TINY, method="ic-mixup"),
        dataclasses.replace(TINY, method="ic-mixup", seed=1),
        dataclasses.replace(TINY, method="mixup", ema=0.9),
    ]
    return [root / train(recipe, Execution(out=root, data_dir=root))["folder"] for recipe in recipes]


def test_a_run_is_analysed_with_the_weights_it_was_tested_with(folders: list[Path], root: Path) -> None:
    data = load_dataset(DataSpec("digits", per_class=10), root)
    inputs = normalise(data.test.images, torch.tensor(data.mean), torch.tensor(data.std))
    for folder in folders:
        network = load_model(find_run(folder), data, CPU).eval()
        with torch.no_grad():
            nll = nn.functional.cross_entropy(network(inputs), data.test.labels).item()
        tested = json.loads((folder / "result.json").read_text())["nll"]
        assert nll == pytest.approx(tested, rel=1e-5)


def analyse(*args: object) -> int:
    return run_analyse(parse(["analyse", *map(str, args)], "quick"))


def test_the_command_writes_files_and_prints_a_row_per_line(
    folders: list[Path], root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert analyse(*folders[:3], "--out", tmp_path, "--data-dir", root, "--device", "cpu") == 0
    with (tmp_path / "analysis.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [
        *("line", "run", "dataset", "model", "method", "seed"),
        *("device", "torch", "commit", "date", "image_seed", "lam", "images"),
        *("squared_norm", "centred_norm", "feature_norm", "difference_mean", "difference_std"),
    ]
    assert [row["run"] for row in rows[::11]] == [folder.name for folder in folders[:3]]
    assert [float(row["lam"]) for row in rows[:11]] == list(LAMS)
    assert {row["images"] for row in rows} == {"90"}
    assert all(row["torch"] and row["commit"] and row["date"] for row in rows)
    for name in ("confidence.png", "difference.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    output = capsys.readouterr()
    assert [line.split()[0] for line in output.out.splitlines() if "mixup" in line] == ["mixup", "ic-mixup"]
    assert "difference.png" in output.err


def test_rows_match_the_curves_of_the_loaded_model(folders: list[Path], root: Path) -> None:
    rows = analyse_runs(folders[:1], data_dir=root, device=CPU, image_seeds=(0, 1))
    data = load_dataset(DataSpec("digits", per_class=10), root)
    network = load_model(find_run(folders[0]), data, CPU)
    expected = [compute_curve(network, *chosen_images(data, seed, CPU)) for seed in (0, 1)]
    assert [row["image_seed"] for row in rows] == [0] * 11 + [1] * 11
    assert [row["difference_mean"] for row in rows] == [
        p.difference_mean for points in expected for p in points
    ]
    assert expected[0] != expected[1]


def some_rows() -> list[dict[str, Any]]:
    """Two curves of ic-mixup and one of mixup, at two lams."""
    about = {"dataset": "digits", "model": "small-cnn", "images": 2}
    values = {
        ("mixup", 0): (5.0, 1.0, 1.0),
        ("ic-mixup", 0): (7.0, 2.0, 2.0),
        ("ic-mixup", 1): (9.0, 4.0, 4.0),
    }
    return [
        about
        | {"line": method, "method": method, "seed": seed, "lam": lam}
        | {"squared_norm": norm, "centred_norm": norm - 1, "feature_norm": math.nan}
        | {"difference_mean": mean * (2 * lam - 1), "difference_std": std}
        for (method, seed), (norm, mean, std) in values.items()
        for lam in (0.0, 1.0)
    ]


def test_curves_of_one_line_are_pooled_over_all_their_pairs() -> None:
    ours = pooled_lines(some_rows())[1]
    pairs = [2 - 2, 2 + 2, 4 - 4, 4 + 4]  # two pairs with mean 2 and std 2, two with mean 4 and std 4
    assert (ours.name, ours.curves) == ("ic-mixup", 2)
    assert ours.norms == {"squared_norm": [8.0, 8.0], "centred_norm": [7.0, 7.0]}
    assert ours.means[1] == statistics.fmean(pairs)
    assert ours.stds[1] == pytest.approx(statistics.pstdev(pairs))


def test_figures_have_a_line_per_method_and_a_band_of_one_standard_deviation() -> None:
    axes, centred = plot_confidence(some_rows()).axes  # no panel for the norm that was not measured
    assert [line.get_ydata().tolist() for line in axes.lines] == [[5.0, 5.0], [8.0, 8.0]]
    assert [line.get_ydata().tolist() for line in centred.lines] == [[4.0, 4.0], [7.0, 7.0]]
    assert centred.get_ylabel() == "mean squared norm of the scores minus their mean"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["mixup", "ic-mixup (2 curves)"]
    (axes,) = plot_difference(some_rows()).axes
    assert [line.get_ydata().tolist() for line in axes.lines[:2]] == [[-1.0, 1.0], [-3.0, 3.0]]
    bands = [band for band in axes.collections if isinstance(band, PolyCollection)]
    assert len(bands) == 2
    heights = bands[0].get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (-2.0, 2.0)
    assert axes.lines[0].get_color() != axes.lines[1].get_color()


def test_folders_that_are_not_finished_runs_are_rejected(
    folders: list[Path], root: Path, tmp_path: Path
) -> None:
    def rejected(folder: Path, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            analyse(folder, "--data-dir", root, "--out", tmp_path)

    rejected(tmp_path / "nowhere", "nowhere does not exist; pass the folder of a finished run")
    rejected(root, r"contains 4 runs such as digits-10each")
    rejected(tmp_path, "is not the folder of a run")
    half = tmp_path / "half"
    half.mkdir()
    (half / "recipe.json").write_bytes((folders[0] / "recipe.json").read_bytes())
    (half / "log.jsonl").write_text('{"epoch": 1}\n')
    rejected(half, "half is unfinished after 1 of 2 epochs")
    (half / "result.json").write_bytes((folders[0] / "result.json").read_bytes())
    rejected(half, "half has no weights: there is no checkpoint.pt")
    recipe = dataclasses.replace(find_run(folders[0]).recipe, dataset=str(tmp_path / "gone"))
    (half / "recipe.json").write_text(json.dumps(recipe.fields()))
    rejected(half, "half was trained on .*gone, which cannot be loaded: .*; run the command where that path")


@pytest.mark.parametrize(("dataset", "helps"), [("cifar100", True), ("hf:a/b", True), ("photos", False)])
def test_data_dir_is_recommended_only_where_it_helps(
    folders: list[Path], tmp_path: Path, dataset: str, helps: bool
) -> None:
    run = find_run(folders[0])
    run = dataclasses.replace(run, recipe=dataclasses.replace(run.recipe, dataset=dataset))
    other = load_dataset(DataSpec("digits", per_class=11), tmp_path)

    def lose(recipe: Recipe) -> Dataset:
        raise ValueError("it is not there")

    for load, message in ((lose, "which cannot be loaded"), (lambda _: other, "on other images")):
        with pytest.raises(ValueError, match=message) as error:
            load_run_data(run, load)
        assert ("--data-dir" in str(error.value)) == helps


def test_trials_and_features_are_left_out(tmp_path: Path) -> None:
    beside = [tmp_path / name for name in ("features", "run", "trials")]
    assert expand_comparisons(beside) == [tmp_path / "run"]
    with pytest.raises(ValueError, match="trials is the folder of trials"):
        expand_comparisons([tmp_path / "trials"])


def test_weights_for_another_number_of_classes_are_rejected(folders: list[Path], root: Path) -> None:
    data = load_dataset(DataSpec("digits", per_class=10), root)
    fewer = dataclasses.replace(data, class_names=data.class_names[:9])
    with pytest.raises(ValueError, match="do not fit small-cnn with the 9 classes of digits"):
        load_model(find_run(folders[0]), fewer, CPU)
