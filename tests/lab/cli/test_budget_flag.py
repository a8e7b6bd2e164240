"""compare --budget: what is dropped is said, and a verdict on runs that were cut short begins with that."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from icmixup.lab.cli import main
from icmixup.lab.comparison.compare import read_comparison
from icmixup.lab.comparison.verdict import cut_short
from icmixup.lab.sweep import budget
from icmixup.lab.sweep.progress import Display
from icmixup.lab.sweep.speed import Speed
from icmixup.methods import METHODS

DATA = ("digits", "--per-class", "5", "--batch-size", "50", "--model", "small-cnn", "--device", "cpu")
COMPARE = ("compare", *DATA, "--methods", "erm", "mixup", "ic-mixup", "--workers", "1", "--out", "runs")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    # One step is an epoch here; 300 would take too long for a test.
    monkeypatch.setattr("icmixup.lab.training.recipe.FEWEST_STEPS", 20)
    # A second for each epoch and nothing else, whatever this machine does meanwhile.
    monkeypatch.setattr(budget, "measure_speed", lambda *_: Speed(0.0, 0.0, dict.fromkeys(METHODS, 1.0)))
    # Loading data takes no time.
    monkeypatch.setattr("icmixup.lab.cli.compare.time", SimpleNamespace(monotonic=lambda: 0.0))
    return tmp_path


def read_only_comparison(folder: Path) -> dict[str, object]:
    (path,) = folder.glob("runs/*/comparison.json")
    found: dict[str, object] = json.loads(path.read_text())
    assert read_comparison(path).verdict == found["verdict"]
    return found


@pytest.fixture
def nothing_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of a test are faster than a second for each epoch; do not let them fill the time."""
    monkeypatch.setattr(budget, "FILL_MARGIN", 0.0)


@pytest.mark.usefixtures("nothing_added")
def test_a_verdict_on_runs_that_were_cut_short_says_so_first(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # 2 methods x 2 seeds x 21 epochs are 84 s, 2 s are for the report, and 7 % of the rest is a reserve.
    assert main([*COMPARE, "--budget", "94s"]) == 0
    shown = capsys.readouterr()
    dropped = "2 of 3 seeds, 2 of 3 methods (without erm), 21 of 60 epochs"
    assert f"warning: to fit into 94s, only {dropped}" in shown.err
    found = read_only_comparison(here)
    assert str(found["verdict"]).startswith("runs were cut short, to 21 of the recipe's 60 epochs; ")
    assert "Verdict: runs were cut short, to 21 of the recipe's 60 epochs" in shown.out
    assert found["full_epochs"] == 60
    assert found["overview"]["budget"] == dropped  # type: ignore[index]
    assert (found["seeds"], list(found["methods"])) == ([0, 1], ["mixup", "ic-mixup"])  # type: ignore[call-overload]
    assert len(list(here.glob("runs/*/result.json"))) == 4
    assert main([*COMPARE, "--budget", "94s"]) == 0  # the same plan: nothing is trained again
    again = capsys.readouterr().err
    assert again.count("finished before") == 4
    assert "measuring" not in again
    assert "resuming with what was chosen for this budget before" in again
    assert "all runs are finished" in again
    assert read_only_comparison(here)["methods"] == found["methods"]


def test_methods_and_seeds_that_were_dropped_are_trained_after_all_if_runs_are_faster_than_trials(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMPARE, "--budget", "94s"]) == 0
    shown = capsys.readouterr().err
    assert "warning: to fit into 94s, only 2 of 3 seeds, 2 of 3 methods (without erm)" in shown
    assert "there is time for erm as well" in shown
    assert "there is time for seed 3 of each method" in shown
    assert "% of the time is used: all that was asked for fits" in shown
    assert "took 0.0 s of the 1:34 of --budget" in shown
    found = read_only_comparison(here)
    assert (found["seeds"], list(found["methods"])) == ([0, 1, 2], ["erm", "mixup", "ic-mixup"])  # type: ignore[call-overload]
    assert str(found["verdict"]).startswith("runs were cut short, to 21 of the recipe's 60 epochs; ")
    assert found["overview"]["budget"] == "21 of 60 epochs"  # type: ignore[index]
    assert found["overview"]["seeds"] == [0, 1, 2]  # type: ignore[index]
    # Another machine would decide otherwise; the same command does not.
    monkeypatch.setattr(budget, "FILL_MARGIN", 0.0)
    assert main([*COMPARE, "--budget", "94s"]) == 0
    assert capsys.readouterr().err.count("finished before") == 9
    assert read_only_comparison(here)["seeds"] == [0, 1, 2]


def test_a_comparison_that_is_killed_after_seeds_were_added_resumes_with_them(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = 0

    def stop(self: Display, row: dict[str, object]) -> None:
        nonlocal ended
        ended += 1
        if ended == 7:  # the first of seed 3
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("icmixup.lab.analysis.report.live.ReportingDisplay.finish", stop)
        assert main([*COMPARE, "--budget", "94s"]) == 130
    (plan,) = json.loads((here / "runs" / "budgets.json").read_text()).values()
    assert (plan["seeds"], plan["methods"], plan["final"]) == (3, ["erm", "mixup", "ic-mixup"], False)
    assert main([*COMPARE, "--budget", "94s"]) == 0
    assert "[9/9]" in capsys.readouterr().err
    assert read_only_comparison(here)["seeds"] == [0, 1, 2]
    assert len(list(here.glob("runs/*/result.json"))) == 9


def test_budgets_of_different_length_are_different_comparisons_that_share_runs(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMPARE, "--epochs", "1", "--budget", "94s"]) == 0
    assert main([*COMPARE, "--epochs", "1", "--budget", "95s"]) == 0
    assert capsys.readouterr().err.count("finished before") == 9
    assert len(list(here.glob("runs/*/comparison.json"))) == 2


def test_a_budget_that_is_too_short_is_an_error_with_one_that_is_not(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # 2 methods x 2 seeds x 20 epochs are 80 s.
    assert main([*COMPARE, "--budget", "30s"]) == 2
    message = capsys.readouterr().err
    assert "--budget of 30 s is too short: mixup and ic-mixup with 2 seeds and 20 epochs" in message
    assert "use --budget 1m40s or more" in message
    assert list(here.glob("runs/*/result.json")) == []


def test_with_seeds_auto_a_budget_too_short_for_two_seeds_is_refused_as_well(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*COMPARE, "--seeds", "auto", "--budget", "30s"]) == 2
    assert "too short" in capsys.readouterr().err


def test_seeds_auto_keeps_its_epochs_and_the_budget_ends_it(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("icmixup.lab.comparison.adaptive.Clock.has_time", lambda self: self.seconds > 1e6)
    assert main([*COMPARE, "--epochs", "1", "--seeds", "auto", "--budget", "10m"]) == 0
    assert "stopped after 1 seed: the budget is used up" in capsys.readouterr().err
    found = read_only_comparison(here)
    assert found["recipe"]["epochs"] == found["full_epochs"] == 1  # type: ignore[index]
    assert len(list(here.glob("runs/*/result.json"))) == 3


def test_runs_of_full_length_are_not_called_short() -> None:
    assert cut_short(60, 60) == cut_short(60, None) == ""
    assert cut_short(59, 60) == "runs were cut short, to 59 of the recipe's 60 epochs; "
