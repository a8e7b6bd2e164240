"""tools/long_tail_baselines.py: rows of every kind of baseline; long_tail_test.py: runs behind its rows."""

from __future__ import annotations

import csv
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from icmixup.lab.paper.results import read_rows
from icmixup.lab.training.recipe import HEAD

ROOT = Path(__file__).parents[2]
LINES = ("erm, then adjusted, tau 1", "erm, then tau-normalised, tau chosen", "balanced")


def run_tool(name: str, *flags: str) -> None:
    """Run a script with these flags, in this process, which has imported torch already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.syspath_prepend(ROOT / "tools")
        patch.setattr(sys, "argv", [f"{name}.py", *flags])
        runpy.run_path(str(ROOT / "tools" / f"{name}.py"), run_name="__main__")


def run_baselines(*flags: str) -> None:
    run_tool("long_tail_baselines", *flags)


def test_rows_of_methods_and_of_what_is_done_after_training_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.csv"
    data = ("--dataset", "digits", "--per-class", "20", "--imbalance", "0.2", "--recipe", "quick")
    short = ("--epochs", "1", "--seeds", "2", "--device", "cpu", "--out", str(tmp_path / "runs"))
    run_baselines(*data, *short, "--rows", str(rows), "--only", *LINES)
    printed = capsys.readouterr().out
    with rows.open(newline="") as file:
        found = list(csv.DictReader(file))
    kinds = [(row["method"], row["after"], row["seed"]) for row in found]
    both = ("0", "1")
    assert kinds == [
        *(("balanced", "none", seed) for seed in both),
        *(("erm", how, seed) for seed in both for how in ("adjust", "tau-norm")),
    ]
    assert {row["after_tau"] for row in found if row["after"] == "adjust"} == {"1.0"}
    assert all(f"| {name} |" in printed for name in LINES)
    # One run for both lines, and one that holds out images.
    assert printed.count("trained digits-20each-lt0.2.small-cnn.erm.s0") == 2


def test_a_run_that_has_a_row_is_trained_again_only_where_its_weights_are_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On another machine there are the rows of earlier runs, but not their folders."""
    rows = tmp_path / "rows.csv"
    data = ("--dataset", "digits", "--per-class", "20", "--imbalance", "0.2", "--recipe", "quick")
    short = ("--epochs", "1", "--seeds", "2", "--device", "cpu", "--rows", str(rows))
    run_baselines(*data, *short, "--out", str(tmp_path / "first"), "--only", "balanced", "erm")
    before, printed = rows.read_text(), capsys.readouterr().out
    table = [line for line in printed.splitlines() if line.startswith("|")]
    run_baselines(*data, *short, "--out", str(tmp_path / "other"), "--only", "balanced", "erm")
    again = capsys.readouterr().out
    assert "trained" not in again
    assert rows.read_text() == before
    cells = [
        [line.split("|")[1:4] for line in text if "%" not in line] for text in (table, again.splitlines())
    ]
    assert cells[0] == [cell for cell in cells[1] if len(cell) == 3]
    run_baselines(*data, *short, "--out", str(tmp_path / "other"), "--only", LINES[0])
    assert capsys.readouterr().out.count("trained digits-20each-lt0.2.small-cnn.erm.s") == 2


def test_runs_that_would_not_end_in_time_are_not_started_and_their_lines_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.csv"
    data = ("--dataset", "digits", "--per-class", "20", "--imbalance", "0.2", "--recipe", "quick")
    short = ("--epochs", "1", "--seeds", "1", "--device", "cpu", "--out", str(tmp_path / "runs"))
    run_baselines(*data, *short, "--rows", str(rows), "--budget", "1h", "--only", *LINES)
    assert rows.read_text().count("\n") == 4  # a header, and a row for each line
    assert "not trained" not in capsys.readouterr().out
    long = ("--epochs", "200", "--seeds", "3", "--device", "cpu", "--out", str(tmp_path / "long"))
    run_baselines(*data, *long, "--budget", "1s", "--only", "balanced")
    printed = capsys.readouterr().out
    assert printed.count("trained digits") == 1
    assert [f"balanced, seed {seed}: not trained within --budget" in printed for seed in range(3)] == [
        False,
        True,
        True,
    ]


def test_runs_that_are_lengthened_to_their_least_number_of_steps_have_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, features = tmp_path / "rows.csv", tmp_path / "made.npz"
    labels = np.arange(300) % 3
    arrays = {"features": np.eye(3)[labels] + 0.1, "labels": labels}
    np.savez(
        features, **{f"{part}_{name}": array for part in ("train", "test") for name, array in arrays.items()}
    )
    data = ("--dataset", str(features), "--imbalance", "0.5", "--recipe", "head", "--device", "cpu")
    flags = (*data, "--seeds", "1", "--rows", str(rows), "--only", "balanced")
    run_baselines(*flags, "--out", str(tmp_path / "runs"))
    with rows.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [(row["method"], int(row["epochs"]) > HEAD.epochs) for row in found] == [("balanced", True)]
    assert "trained" in capsys.readouterr().out
    run_baselines(*flags, "--out", str(tmp_path / "other"))
    assert "trained" not in capsys.readouterr().out


def test_a_table_has_no_accuracy_of_small_classes_where_there_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ("--dataset", "digits", "--per-class", "30", "--imbalance", "0.9", "--recipe", "quick")
    short = ("--epochs", "1", "--seeds", "1", "--device", "cpu", "--out", str(tmp_path / "runs"))
    run_baselines(*data, *short, "--only", "balanced")
    (line,) = [text for text in capsys.readouterr().out.splitlines() if text.startswith("| balanced |")]
    assert line.split("|")[3] == " - "
    run_baselines(*data, *short, "--only", "erm")
    assert "no table, since balanced" in capsys.readouterr().out


def test_lines_that_do_not_exist_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        run_baselines("--only", "nothing*", "--out", str(tmp_path))
    assert exit_.value.code == 2
    assert "--only nothing* matches no line of erm, focal" in capsys.readouterr().err


def test_every_row_of_the_tested_long_tail_recipe_is_a_run_of_the_tool_and_is_not_trained_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    from long_tail_test import METHODS, RECIPES, make_recipes, without_finished

    results = ROOT / "results" / "long_tail.csv"
    networks = ("resnet32", "resnet18", "resnet32x4")
    # Those that change biases, which cosines lack, and a weak baseline.
    others = ("erm-adjusted", "regmixup-adjusted", "ic-regmixup-adjusted", "mixup")
    of_recipe = {name: METHODS if name == "proco-code" else (*METHODS, *others) for name in RECIPES}
    recipes = [
        one for name, methods in of_recipe.items() for one in make_recipes(networks, methods, 3, recipe=name)
    ]
    # Longer training, and as many passes as ProCo makes with three views.
    recipes += make_recipes(("resnet18", "resnet32x4"), METHODS, 3, epochs=400)
    recipes += make_recipes(("resnet32",), ("balanced",), 1, epochs=600, recipe="proco")
    todo = without_finished(recipes, results)
    assert len(recipes) - len(todo) == len(read_rows(results).rows)
    assert make_recipes(networks, METHODS, 1)[0] not in todo  # resnet32, balanced, seed 0
    assert make_recipes(["resnet32x4"], ["balanced-regmixup"], 1)[0] in todo


@pytest.mark.parametrize("tool", ["long_tail_test", "long_tail_baselines"])
def test_a_file_that_cannot_take_the_rows_is_an_error_before_training(tool: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    header = (ROOT / "results" / "runs.csv").read_text().splitlines()[0].split(",")
    rows.write_text(
        ",".join(name for name in header if name not in ("cosine_classifier", "tau", "kappa", "alpha")) + "\n"
    )
    flags = {
        "long_tail_test": ["--recipe", "proco-code", "--results", str(rows)],
        "long_tail_baselines": ["--rows", str(rows), "--recipe", "long-tail"],
    }
    out = tmp_path / "runs"
    with pytest.raises(ValueError, match="has no column for"):
        run_tool(tool, *flags[tool], "--out", str(out), "--device", "cpu")
    assert not out.exists()
