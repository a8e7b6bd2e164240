"""tools/validation_loss.py: what values chosen on held-out images have on test images, from --tune."""

from __future__ import annotations

import csv
import runpy
import sys
from pathlib import Path
from statistics import fmean

import pytest

from icmixup.lab.cli import main
from icmixup.lab.datasets import load_dataset
from icmixup.lab.training.trained import find_run, load_trained

ROOT = Path(__file__).parents[2]


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tuned")
    data = ("digits", "--per-class", "10", "--imbalance", "0.5", "--epochs", "2", "--batch-size", "20")
    methods = ("--methods", "erm", "balanced", "--seeds", "2", "--tune", "2", "--tune-parts", "2")
    where = ("--out", str(out), "--name", "tuned", "--device", "cpu", "--workers", "1", "--no-report")
    assert main(["compare", *data, *methods, *where]) == 0
    return out / "tuned"


def test_rows_have_the_trials_and_their_networks_on_the_test_images(
    comparison: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = comparison.parent / "rows.csv"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["validation_loss.py", str(comparison), "--rows", str(rows)])
        patch.syspath_prepend(ROOT / "tools")
        runpy.run_path(str(ROOT / "tools" / "validation_loss.py"), run_name="__main__")
    printed, found, trials = capsys.readouterr().out, read(rows), read(comparison / "tuning.csv")
    assert [(row["method"], row["trial"]) for row in found] == [
        *(("erm", "0"), ("erm", "1"), ("balanced", "0"), ("balanced", "1"))
    ]
    for row, trial in zip(found, trials, strict=True):
        assert row["parts"] == "2"
        for name in ("mean_class_nll", "balanced_accuracy"):
            assert float(row[name]) == pytest.approx(float(trial[name]), abs=1e-3)
        tests = [accuracy_on_test(comparison.parent / folder) for folder in trial["folder"].split()]
        assert float(row["test_balanced_accuracy"]) == pytest.approx(fmean(tests), abs=1e-3)
        assert bool(row["tau_by_loss"]) == bool(row["adjusted_by_accuracy"]) == (row["method"] == "erm")
    assert "| erm |" in printed


def accuracy_on_test(folder: Path) -> float:
    """Of a run's network on the test images, averaged over classes."""
    data = load_dataset(find_run(folder).recipe.data, Path())
    right = load_trained(folder).probabilities(data.test.square()).argmax(dim=1) == data.test.labels
    return 100 * fmean(right[data.test.labels == label].double().mean().item() for label in range(10))
