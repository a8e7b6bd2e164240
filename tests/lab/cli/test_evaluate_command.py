"""icmixup evaluate: tables, files, reuse, and one line for each mistake."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from icmixup.lab.cli import main

TINY = ["--per-class", "30", "--epochs", "3", "--batch-size", "50", "--device", "cpu"]
FAST = ["--corruptions", "contrast", "pixelate", "--strengths", "1", "5", "--device", "cpu"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of two methods with two seeds on digits, trained once."""
    root = tmp_path_factory.mktemp("trained")
    args = ["compare", "digits", *TINY, "--methods", "erm", "mixup", "--seeds", "2", "--workers", "1"]
    assert main([*args, "--out", str(root / "runs"), "--name", "both", "--data-dir", str(root)]) == 0
    return root


@pytest.fixture
def here(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(trained / "runs", tmp_path / "runs")
    (tmp_path / "noise").mkdir()
    generator = np.random.default_rng(0)
    for number in range(5):
        pixels = generator.integers(0, 256, (20, 16), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "noise" / f"{number}.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ICMIXUP_DATA", raising=False)
    return tmp_path


def cells(output: str, start: str) -> list[str]:
    return next(line for line in output.splitlines() if line.strip().startswith(start)).split()


def test_the_command_prints_tables_and_writes_files(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--csv", "out/all.csv", "--json", "out/all.json"]
    assert main(["evaluate", "runs/both", *FAST, "--ood", "noise", *files, "--baseline", "erm"]) == 0
    output = capsys.readouterr()
    stored = json.loads((here / "out" / "all.json").read_text())
    assert (stored["dataset"], stored["baseline"], len(stored["runs"])) == ("digits", "erm", 4)
    mixup = stored["methods"]["mixup"]
    shown = cells(output.out, "mixup")
    assert shown[1:3] == ["2", f"{mixup['clean']['accuracy']:.1f}"]
    assert f"{mixup['corrupted']['accuracy']:.1f}" in shown
    assert f"{mixup['by_strength']['5']:.1f}" in shown
    assert f"{mixup['corruption_error']:.1f}" in shown
    assert "baseline" in cells(output.out, "erm")
    assert cells(output.out, "pixelate")[1:] == [
        f"{stored['methods'][line]['by_corruption']['pixelate']:.1f}" for line in stored["methods"]
    ]
    noise = mixup["ood"]["noise"]
    assert f"{noise['auroc']:.1f}, {noise['fpr95']:.1f}" in output.out
    assert "evaluation.json in 4 run folders" in output.err
    with (here / "out" / "all.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 * (1 + 2 * 2 + 1)
    accuracies = [
        float(row["accuracy"])
        for row in rows
        if (row["method"], row["images"], row["strength"]) == ("mixup", "pixelate", "5")
    ]
    assert len(accuracies) == 2
    both = [
        float(row["accuracy"]) for row in rows if row["method"] == "mixup" and row["strength"] in ("1", "5")
    ]
    assert np.mean(both) == pytest.approx(mixup["corrupted"]["accuracy"])


def test_a_folder_of_runs_a_comparison_and_single_runs_are_the_same_runs(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = []
    for folders in (
        ["runs"],
        ["runs/both"],
        [str(path.parent) for path in sorted(here.glob("runs/*/recipe.json"))],
    ):
        assert main(["evaluate", *folders, *FAST]) == 0
        tables.append(capsys.readouterr().out)
    assert len(set(tables)) == 1


def test_one_method_is_not_compared(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder,) = here.glob("runs/*erm.s0*")
    assert main(["evaluate", str(folder), *FAST]) == 0
    assert "mCE" not in capsys.readouterr().out


MISTAKES = [
    (["evaluate"], "no runs to evaluate"),
    (["evaluate", "nowhere"], "nowhere does not exist; pass the folder of a finished run"),
    (["evaluate", "noise"], "noise is not the folder of a run"),
    (["evaluate", "runs", "--corruptions", "fogg"], "unknown corruption 'fogg'; did you mean fog?"),
    (["evaluate", "runs", "--strengths", "0"], "strengths are 1 (weakest) to 5 (strongest), got 0"),
    (["evaluate", "runs", "--strengths", "3", "6"], "got 6"),
    (["evaluate", "runs", "--ood", "nowhere"], "nowhere does not exist"),
    (["evaluate", "runs", "--ood", "empty"], "empty contains no image files"),
    (["evaluate", "runs", "--baseline", "remix"], "baseline 'remix' is not among the methods"),
    (["evaluate", "runs", "--device", "gpu"], "unknown device 'gpu'"),
    (["evaluat", "runs"], "did you mean evaluate?"),
]


@pytest.mark.parametrize(("args", "wanted"), MISTAKES, ids=[" ".join(args) for args, _ in MISTAKES])
def test_a_mistake_is_one_line_with_exit_code_2(
    args: list[str], wanted: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "empty").mkdir()
    assert main(args) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("icmixup: ")
    assert wanted in line
    assert list(here.glob("runs/*/evaluation.json")) == []
