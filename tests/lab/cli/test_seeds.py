"""icmixup compare --seeds auto, --max-seeds and --intervals, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from icmixup.lab.cli import main

TINY = ["--per-class", "20", "--epochs", "1", "--workers", "1", "--methods", "erm", "mixup"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--seeds", "auto", "--max-seeds", "2"], "--max-seeds must be at least 3 with --seeds auto, got 2"),
        (["--seeds", "4", "--max-seeds", "9"], "--max-seeds 9 needs --seeds auto, got --seeds 4"),
        (["--seeds", "some"], "some"),
        (["--intervals", "images"], "images"),
    ],
)
def test_a_number_of_seeds_that_cannot_be_used_is_an_error(
    args: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    try:
        code = main(["compare", *args, "--out", str(tmp_path)])
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    assert code != 0
    assert message in " ".join("".join(capsys.readouterr()).split())
    assert not list(tmp_path.iterdir())  # nothing was trained


def test_seeds_auto_reports_why_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    args = ["compare", "digits", *TINY, "--seeds", "auto", "--max-seeds", "4", "--out", str(tmp_path)]
    assert main([*args, "--name", "auto"]) == 0
    printed = capsys.readouterr()
    stored = json.loads((tmp_path / "auto" / "comparison.json").read_text())
    assert "3 to 4 seeds each" in printed.err
    assert f"stopped after {len(stored['seeds'])} seeds: {stored['stop']}" in printed.err
    assert [look["seeds"] for look in stored["looks"]] == list(range(3, len(stored["seeds"]) + 1))
    assert stored["verdict"] in " ".join(printed.out.split())


def test_the_table_marks_the_best_group_and_the_footnote_says_what_intervals_cover(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for kind, words in (("both", "new seeds and new test images"), ("seeds", "(--intervals seeds)")):
        args = ["compare", "digits", *TINY, "--seeds", "2", "--out", str(tmp_path), "--intervals", kind]
        assert main([*args, "--name", kind]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert words in printed
        stored = json.loads((tmp_path / kind / "comparison.json").read_text())
        assert any(method["in_best_group"] for method in stored["methods"].values())
        assert bool(stored["seeds_only"]) == (kind == "seeds")


def test_lost_runs_are_named_and_the_exit_code_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Scores over 1e-38 overflow, and only the Infinite Class loss divides by the temperature.
    args = ["--per-class", "20", "--epochs", "1", "--workers", "1", "--methods", "mixup", "ic-mixup"]
    args += ["--seeds", "1", "--temperature", "1e-38", "--out", str(tmp_path)]
    assert main(["compare", "digits", *args]) == 1
    assert "icmixup: ic-mixup seed 0 has no result: the loss became" in capsys.readouterr().err
