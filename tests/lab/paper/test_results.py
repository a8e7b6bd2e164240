"""results/runs.csv: appended and never rewritten; damaged rows are reported, conflicting rows are kept."""

from __future__ import annotations

import csv
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from icmixup.lab.paper.render import results_page
from icmixup.lab.paper.results import (
    ADDED,
    COLUMNS,
    METRICS,
    PROVENANCE,
    RECIPE_COLUMNS,
    append_file,
    append_rows,
    check_file,
    conflicting_results,
    experiment,
    read_rows,
)
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.loop import train
from icmixup.lab.training.recipe import STRONG, Recipe

ROOT = Path(__file__).parents[3]
TENTH = Recipe(fraction=0.1)
TINY = Recipe(dataset="digits", model="small-cnn", per_class=4, batch_size=20, epochs=1, padding=1)


def made_run(recipe: Recipe, accuracy: float, **others: object) -> tuple[Recipe, dict[str, Any]]:
    """A recipe and its row, as train() returns it."""
    numbers = {"accuracy": accuracy, "many": None, "nll": 1.25, "fitted_temperature": 3.5, "loss": 0.5}
    made = {"minutes": 2.0, "train_images": 5000, "ranks": 1, "device": "GPU, 80 GB", "commit": "abc+"}
    return recipe, {**recipe.fields(), "key": recipe.key, **numbers, **made, **others}


def test_a_real_run_is_read_back_as_written(tmp_path: Path) -> None:
    row = train(TINY, Execution(out=tmp_path / "runs", data_dir=tmp_path))
    path = tmp_path / "results" / "runs.csv"
    append_rows(path, [(TINY, row)])
    (found,) = read_rows(path).rows
    assert found.recipe == TINY
    assert found.accuracy == pytest.approx(row["accuracy"], abs=1e-6)
    assert found.numbers["nll_scaled"] == pytest.approx(row["nll_scaled"], abs=1e-6)
    assert found.numbers["fitted_temperature"] == pytest.approx(row["fitted_temperature"], abs=1e-6)
    assert found.numbers["train_images"] == 40
    assert [found.numbers[name] for name in ("torch", "date")] == [row["torch"], row["date"]]
    assert found.recipe.per_class == 4  # the row has a metric of the same name
    with path.open(newline="") as file:
        assert next(csv.reader(file)) == list(COLUMNS)


UNUSUAL = Recipe(
    dataset="path/with, comma",
    imbalance=100,
    lr_drops=(3, 7),
    alpha=1.5,
    mode="elem",
    duplicates="ignore",
    negatives=("pairs", "classes"),
    joint=True,
    ema=0.999,
    split=3,
    precision="float32",
)


def test_every_field_of_an_unusual_recipe_is_read_back(tmp_path: Path) -> None:
    append_rows(tmp_path / "runs.csv", [made_run(UNUSUAL, 50.0), made_run(TENTH, 51.0)])
    assert [row.recipe for row in read_rows(tmp_path / "runs.csv").rows] == [UNUSUAL, TENTH]


def test_the_same_row_is_not_added_twice_and_existing_bytes_do_not_change(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    assert len(append_rows(path, [made_run(TENTH, 30.0)])) == 1
    before = path.read_bytes()
    assert append_rows(path, [made_run(TENTH, 30.0, minutes=9.0)]) == []
    assert path.read_bytes() == before
    assert len(append_rows(path, [made_run(replace(TENTH, seed=1), 30.0)])) == 1
    assert path.read_bytes().startswith(before)


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    binary = tmp_path / "weights.npz"
    binary.write_bytes(b"PK\x03\x04\x86")
    for path in (binary, tmp_path):
        with pytest.raises(ValueError, match=f"{path.name} is not a file of results"):
            read_rows(path)


def test_a_file_is_appended_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    path, other = tmp_path / "runs.csv", tmp_path / "other.csv"
    append_rows(path, [made_run(TENTH, 30.0)])
    append_rows(other, [made_run(replace(TENTH, seed=1), 31.0), made_run(replace(TENTH, seed=2), 32.0)])
    before = path.read_bytes()
    assert len(append_file(path, other)) == 2
    assert path.read_bytes().startswith(before)
    assert [row.accuracy for row in read_rows(path).rows] == [30.0, 31.0, 32.0]
    assert [row.numbers for row in read_rows(path).rows[1:]] == [row.numbers for row in read_rows(other).rows]
    assert len(append_file(tmp_path / "new.csv", other)) == 2  # a file that does not exist yet


def test_a_file_that_cannot_be_appended_is_named_and_nothing_is_lost(tmp_path: Path) -> None:
    path, other = tmp_path / "runs.csv", tmp_path / "other.csv"
    append_rows(path, [made_run(TENTH, 30.0)])
    before = path.read_bytes()

    def refused(words: str) -> None:
        with pytest.raises(ValueError, match=words):
            append_file(path, other)
        assert path.read_bytes() == before

    refused(r"other.csv does not exist")
    append_rows(other, [made_run(replace(TENTH, seed=1), 31.0), made_run(TENTH, 30.0)])
    refused(r"other.csv, line 3 is a run that .*runs.csv, line 2 has already.*nothing was appended")
    lines = other.read_text().splitlines()
    other.write_text("\n".join([lines[0], lines[1], lines[1]]) + "\n")
    refused(r"other.csv, line 3 is a run that .*other.csv, line 2 has already")
    other.write_text("\n".join([lines[0] + ",colour", lines[1] + ",red"]) + "\n")
    refused(r"other.csv has unknown columns colour")
    other.write_text("\n".join([lines[0], lines[1][:40]]) + "\n")
    refused(r"other.csv, line 2: it has .* values but the header has .*; nothing was appended")
    other.write_text(lines[0] + "\n")
    refused(r"other.csv has no rows to append")


def test_two_different_results_of_one_recipe_are_both_kept_and_shown(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    append_rows(path, [made_run(TENTH, 30.0)])
    append_rows(path, [made_run(TENTH, 31.0)])
    results = read_rows(path)
    assert [row.accuracy for row in results.rows] == [30.0, 31.0]
    ((one, other),) = conflicting_results(results.rows)
    assert (one.line, other.line) == (2, 3)
    page = results_page(results)
    assert "30.00 (GPU, 80 GB, abc+, line 2) and 31.00 (GPU, 80 GB, abc+, line 3)" in page


@pytest.mark.parametrize(
    ("torn", "reason"),
    [
        ('cifar100,resnet34,"ic-mi', "values but the header has"),
        ("{whole}".replace("ic-mixup", "ic-mixap"), "no method 'ic-mixap'"),
        ("{no accuracy}", "its accuracy is None"),
        ("{bad number}", "which is not a number"),
    ],
)
def test_a_damaged_row_is_reported_by_line_and_the_others_are_read(
    torn: str, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "runs.csv"
    append_rows(path, [made_run(TENTH, 30.0)])
    whole = path.read_text().splitlines()[1]
    lines = {
        "{whole}": whole.replace("ic-mixup", "ic-mixap"),
        "{no accuracy}": whole.replace(",30.0,", ",,"),
        "{bad number}": whole.replace(",30.0,", ",3o,"),
    }
    with path.open("a") as file:
        file.write(lines.get(torn, torn))  # without a newline, as after a crash
    damaged_file = path.read_text()
    append_rows(path, [made_run(replace(TENTH, seed=1), 31.0)])
    results = read_rows(path)
    assert [row.accuracy for row in results.rows] == [30.0, 31.0]
    (damage,) = results.damaged
    assert damage.line == 3
    assert reason in str(damage)
    assert "line 3" in str(damage)
    assert path.read_text().startswith(damaged_file)
    assert "line 3" in results_page(results)


def drop_columns(path: Path, *names: str) -> None:
    """Rewrite the file as one from before these columns existed."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    with path.open("w", newline="") as file:
        columns = [name for name in COLUMNS if name not in names]
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def test_recipe_fields_added_later_have_their_default_in_an_older_file(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    append_rows(path, [made_run(TENTH, 30.0)])
    drop_columns(path, "negatives", "joint")
    append_rows(path, [made_run(replace(TENTH, seed=1), 31.0)])
    assert [row.recipe for row in read_rows(path).rows] == [TENTH, replace(TENTH, seed=1)]


def test_rows_of_a_file_without_a_provenance_column_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    append_rows(path, [made_run(TENTH, 30.0)])
    drop_columns(path, *PROVENANCE)
    (found,) = read_rows(path).rows
    assert (found.recipe, found.accuracy, found.device_minutes) == (TENTH, 30.0, 0.0)
    assert not any(found.numbers[name] for name in PROVENANCE)


def test_a_row_that_does_not_fit_an_older_file_is_rejected_before_and_after_training(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    append_rows(path, [made_run(TENTH, 30.0)])
    drop_columns(path, "joint")
    check_file(path, [TENTH])
    before = path.read_bytes()
    for attempt in (
        lambda: check_file(path, [replace(TENTH, joint=True)]),
        lambda: append_rows(path, [made_run(replace(TENTH, joint=True), 30.0)]),
    ):
        with pytest.raises(ValueError, match=r"has no column for joint.*--results"):
            attempt()
    assert path.read_bytes() == before


@pytest.mark.parametrize("header", ["a,b,c", "dataset,method", "dataset,accuracy,flavour"])
def test_a_file_that_is_not_a_results_file_is_rejected_and_not_changed(header: str, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(header + "\n1,2,3\n")
    for attempt in (lambda: read_rows(path), lambda: append_rows(path, [made_run(TENTH, 30.0)])):
        with pytest.raises(ValueError, match="pass another file with --results"):
            attempt()
    assert path.read_text() == header + "\n1,2,3\n"


def test_a_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "runs.csv") == ((), ())


def test_concurrent_writers_lose_no_row(tmp_path: Path) -> None:
    """A lock belongs to an open file, so threads exclude each other as processes do."""
    path = tmp_path / "runs.csv"

    def append(seed: int) -> None:
        append_rows(path, [made_run(replace(TENTH, seed=seed), 30.0)])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(append, range(40)))
    results = read_rows(path)
    assert not results.damaged
    assert sorted(row.recipe.seed for row in results.rows) == list(range(40))


SAME = [
    {"seed": 7},
    {"compile": True},
    {"graph": False},
    {"eval_every": 200},
    {"precision": "float32"},
    {"alpha": 0.2},  # the default of ic-mixup
    {"mode": "batch"},
    {"duplicates": "negative"},
    {"negatives": ("pairs",)},
    {"lr_drops": (50, 100, 150)},
]


@pytest.mark.parametrize("change", SAME)
def test_seed_execution_and_explicit_defaults_do_not_change_the_experiment(change: dict[str, Any]) -> None:
    assert experiment(replace(Recipe(), **change)) == experiment(Recipe())


OTHER = {
    "dataset": "cifar10",
    "model": "resnet18",
    "method": "mixup",
    "fraction": 0.5,
    "per_class": 50,
    "imbalance": 0.01,
    "data_seed": 1,
    "split": 0,
    "image_size": 64,
    "folds": 5,
    "epochs": 100,
    "batch_size": 64,
    "drop_last": True,
    "lr": 0.2,
    "schedule": "cosine",
    "lr_drops": (60,),
    "lr_factor": 0.1,
    "warmup_epochs": 5,
    "momentum": 0.8,
    "nesterov": True,
    "weight_decay": 1e-4,
    "clip_norm": 1.0,
    "ema": 0.99,
    "cosine_classifier": True,
    "padding": 2,
    "padding_mode": "reflect",
    "flip": False,
    "rotation": 0.0,
    "trivial": True,
    "alpha": 1.0,
    "mode": "elem",
    "duplicates": "ignore",
    "negatives": ("pairs", "classes"),
    "temperature": 0.5,
    "label_smoothing": 0.1,
    "kappa": 2.0,
    "tau": 1.0,
    "joint": True,
    "mix_prob": 0.5,
    "mix_off_epoch": 150,
    "weights": "pretrained",
    "weights_digest": "0123",
    "train": "head",
    "optimizer": "adamw",
    "min_steps": 100,
    "lr_batch": 128,
    "layer_decay": 0.75,
    "warmup_fraction": 0.1,
    "decay_norms": False,
    "random_resized_crop": 0.2,
    "colour_jitter": 0.4,
    "erasing": 0.25,
    "held_out": 0.2,
    "tail_draw": "ldam",
    "after": "adjust",
    "after_tau": 1.0,
    "after_epochs": 5,
    "sampler": "class-balanced",
    "autoaugment": True,
    "cutout": 16,
    "adjust_tau": 2.0,
}


def test_every_other_field_changes_the_experiment() -> None:
    ignored = {"seed", "compile", "graph", "eval_every", "precision", "fold"}  # a fold needs folds
    assert set(OTHER) == {entry.name for entry in fields(Recipe)} - ignored
    for name, value in OTHER.items():
        # Settings without effect do not count: the first uses adjust_tau, the second kappa and tau.
        base = Recipe(method="balanced" if name == "adjust_tau" else "ic-remix")
        assert experiment(replace(base, **{name: value})) != experiment(base), name


def test_imbalances_of_100_and_0_01_are_the_same_experiment() -> None:
    assert experiment(replace(STRONG, imbalance=100)) == experiment(replace(STRONG, imbalance=0.01))


def test_columns_are_recipe_fields_metrics_and_provenance_without_repetition() -> None:
    assert (
        len(set(COLUMNS)) == len(COLUMNS) == len(RECIPE_COLUMNS) + len(METRICS) + len(PROVENANCE) + len(ADDED)
    )


def test_the_committed_page_matches_the_committed_rows() -> None:
    page = ROOT / "results" / "README.md"
    results = read_rows(ROOT / "results" / "runs.csv")
    assert not results.damaged
    assert page.read_text() == results_page(results), "run `icmixup paper --write`"


def test_a_file_without_the_added_columns_can_be_read_but_takes_no_row_that_needs_them(
    tmp_path: Path,
) -> None:
    path = tmp_path / "runs.csv"
    old = [name for name in COLUMNS if name not in ADDED]
    path.write_text(",".join(old) + "\n")
    plain = dict.fromkeys((*METRICS, *PROVENANCE), 1.0)
    row = plain | {"fingerprint": "0123456789ab", "brier_score": 0.5}
    recipe = Recipe()
    append_rows(path, [(recipe, plain)])
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"has no column for brier_score, fingerprint.*--results"):
        append_rows(path, [(recipe, row)])
    with pytest.raises(ValueError, match=r"has no column for brier_score"):
        check_file(path, [recipe])
    assert path.read_bytes() == before
    (result,) = read_rows(path).rows
    assert result.numbers["fingerprint"] is None
    fresh = tmp_path / "fresh.csv"
    append_rows(fresh, [(recipe, row)])
    (result,) = read_rows(fresh).rows
    assert (result.numbers["fingerprint"], result.numbers["brier_score"]) == ("0123456789ab", 0.5)


def test_a_value_that_no_results_file_has_a_column_for_is_an_error(tmp_path: Path) -> None:
    recipe, row = made_run(TENTH, 30.0)
    kept = row | {"key": recipe.key, "folder": "f", "class_accuracies": [1.0]}
    append_rows(tmp_path / "kept.csv", [(recipe, kept)])
    with pytest.raises(ValueError, match="no column for flavour"):
        append_rows(tmp_path / "runs.csv", [(recipe, row | {"flavour": 1.0})])
