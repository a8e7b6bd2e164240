"""compare --folds: every image is tested once per seed, and statistics see the folds of a seed as one run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from icmixup.lab.analysis.shifted import evaluate_runs, find_runs, make_plan
from icmixup.lab.cli import main
from icmixup.lab.comparison.compare import comparison_recipes, read_comparison
from icmixup.lab.comparison.folds import pool_predictions
from icmixup.lab.comparison.statistics import describe_sample
from icmixup.lab.comparison.variance import crossed_sample
from icmixup.lab.training.data import data_recipe
from icmixup.lab.training.predictions import Predictions, read_predictions
from icmixup.lab.training.recipe import QUICK, Recipe
from icmixup.lab.training.trained import find_run

RECIPE = dataclasses.replace(QUICK, dataset="digits", epochs=1, folds=3)
COMPARE = (
    *("compare", "digits", "--epochs", "1", "--batch-size", "200", "--methods", "erm", "mixup"),
    *("--seeds", "2", "--workers", "1", "--device", "cpu", "--out", "runs"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A real comparison with three folds."""
    root = tmp_path_factory.mktemp("folds")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert main([*COMPARE, "--folds", "3", "--name", "three"]) == 0
        yield root


def test_every_image_has_one_prediction_for_each_method_and_seed(folder: Path) -> None:
    found = json.loads((folder / "runs/three/comparison.json").read_text())
    assert len(found["runs"]) == 4
    assert len(list(folder.glob("runs/*/recipe.json"))) == 12
    tested = set()
    for row in found["runs"]:
        pooled = read_predictions(folder / "runs" / row["folder"])
        folds = [read_predictions(folder / "runs" / name) for name in row["fold_folders"]]
        assert len(pooled.labels) == 1797 == sum(len(fold.labels) for fold in folds)
        assert row["accuracy"] == pytest.approx(100 * pooled.correct.mean())
        right = sum(int(fold.correct.sum()) for fold in folds)
        assert int(pooled.correct.sum()) == right
        tested.add((pooled.file_names, pooled.labels.tobytes()))
    assert len(tested) == 1  # the same images in the same order, so that they are paired


def test_differences_are_those_of_all_images_over_seeds(folder: Path) -> None:
    found = read_comparison(folder / "runs/three/comparison.json")
    correct = {
        (row["method"], row["seed"]): read_predictions(folder / "runs" / row["folder"]).correct
        for row in found.rows
    }
    stacked = (np.stack([correct[method, seed] for seed in (0, 1)]) for method in ("erm", "mixup"))
    wanted = describe_sample(crossed_sample(*stacked))
    (erm,) = (standing for standing in found.standings if standing.method == "erm")
    assert erm.difference is not None
    assert erm.difference.low == pytest.approx(wanted.low)
    assert erm.difference.mean == pytest.approx(wanted.mean)
    assert "new test images like these 1,797" in found.footnote
    assert "in one of 3 folds" in found.footnote


def test_the_overview_states_the_folds(folder: Path) -> None:
    overview = json.loads((folder / "runs/three/comparison.json").read_text())["overview"]
    assert (overview["folds"], overview["train_images"], overview["test_images"]) == (3, 1198, 1797)


def test_the_same_command_trains_nothing_and_other_folds_are_other_runs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMPARE, "--folds", "3", "--name", "three"]) == 0
    shown = capsys.readouterr().err
    assert shown.count("finished before") == 12
    assert "1,198 for training and about 599 of 1,797 for testing in each of 3 folds" in shown
    assert main([*COMPARE, "--folds", "2", "--seeds", "1", "--name", "two"]) == 0
    assert "finished before" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--folds", "1"), "folds must be a number of folds, 2 or more, got 1"),
        (("--folds", "175"), "--folds 175 is more than the 174 images of the smallest class, '8'"),
    ],
)
def test_folds_that_cannot_be_made_are_an_error_that_names_the_numbers(
    flags: tuple[str, ...], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMPARE, *flags]) == 2
    assert message in capsys.readouterr().err


def test_runs_are_ordered_by_seed_and_fold_and_differ_in_their_keys() -> None:
    recipes = comparison_recipes(RECIPE, ("erm", "mixup"), (0, 1))
    assert [(r.seed, r.fold, r.method) for r in recipes[:4]] == [
        *((0, 1, "erm"), (0, 1, "mixup"), (0, 2, "erm"), (0, 2, "mixup")),
    ]
    assert len({recipe.key for recipe in recipes}) == len({recipe.title for recipe in recipes}) == 12
    more = comparison_recipes(dataclasses.replace(RECIPE, folds=4), ("erm",), (0,))
    assert more[0].key not in {recipe.key for recipe in recipes}


def test_a_seed_has_its_own_folds_and_methods_share_them() -> None:
    specs = {
        (seed, method): dataclasses.replace(RECIPE, seed=seed, method=method, fold=1).data
        for seed in (0, 1)
        for method in ("erm", "mixup")
    }
    assert specs[0, "erm"] == specs[0, "mixup"] != specs[1, "erm"]


def test_runs_share_their_data_only_if_they_share_the_fold_and_its_seed() -> None:
    recipes = comparison_recipes(RECIPE, ("erm", "mixup"), (0, 1))
    assert len({data_recipe(recipe) for recipe in recipes}) == 6
    assert data_recipe(recipes[0]) == data_recipe(recipes[1])
    plain = dataclasses.replace(RECIPE, folds=None)
    assert data_recipe(plain) == data_recipe(dataclasses.replace(plain, seed=1, method="mixup"))


def test_folds_cannot_be_evaluated_as_if_they_had_one_test_set(folder: Path) -> None:
    runs = find_runs([folder / "runs/three"])
    assert len(runs) == 12
    with pytest.raises(ValueError, match="tested on 6 different sets of images, since every fold") as error:
        evaluate_runs(runs, make_plan(["fog"], [1]), data_dir=folder, device=torch.device("cpu"))
    pattern = str(error.value).split()[-1]  # the runs that the message recommends have one test set
    advised = find_runs(sorted(folder.glob(str(Path(pattern).relative_to(folder)))))
    assert len({data_recipe(run.recipe) for run in advised}) == 1
    assert [run.recipe.method for run in advised] == sorted({run.recipe.method for run in runs})


def test_a_folder_of_pooled_folds_names_the_run_of_one(folder: Path) -> None:
    pooled = next((folder / "runs").glob("*-3folds.*.pooled-*"))
    with pytest.raises(ValueError, match="has the results of 3 folds, each a run of its own") as error:
        find_run(pooled)
    named = str(error.value).partition("such as ")[2].partition(";")[0]
    assert find_run(Path(named)).recipe.fold == 1


def test_a_recipe_without_folds_keeps_its_key() -> None:
    assert "folds" not in json.dumps(dataclasses.replace(RECIPE, folds=None).title)
    assert Recipe().key == Recipe(folds=None, fold=None).key
    with pytest.raises(ValueError, match="fold must be from 1 to folds, got fold 4 and folds 3"):
        dataclasses.replace(RECIPE, fold=4)
    with pytest.raises(ValueError, match="fold must be from 1 to folds, got fold 1 and folds None"):
        Recipe(fold=1)
    with pytest.raises(ValueError, match="--split 0 has its own images"):
        Recipe(folds=3, split=0)


def test_folds_of_different_partitions_are_not_pooled() -> None:
    def fold(*names: str) -> Predictions:
        size = len(names)
        return Predictions(np.zeros((size, 2), np.float16), np.zeros(size, np.int64), names, ("a", "b"))

    assert pool_predictions([fold("2", "4"), fold("1", "3")]).file_names == ("1", "2", "3", "4")
    with pytest.raises(ValueError, match="1 images are in more than one fold"):
        pool_predictions([fold("1", "2"), fold("2", "3")])


def test_intervals_cover_networks_that_differ_from_fold_to_fold() -> None:
    # Each fold of each seed has its own network, which shifts the difference on all images of the fold.
    trials, seeds, images, folds = 400, 3, 300, 5
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(trials):
        difficulty = rng.normal(0, 1, images)
        scores = np.empty((2, seeds, images))
        for seed in range(seeds):
            fold = rng.permutation(images) % folds
            for method in (0, 1):
                network = rng.normal(0, 0.3, folds)
                scores[method, seed] = difficulty + network[fold] + rng.normal(0, 0.7, images)
        found = describe_sample(crossed_sample(scores[0] > -1, scores[1] > -1))
        assert found.low is not None
        assert found.high is not None
        inside += found.low <= 0 <= found.high
    assert inside >= 0.93 * trials
