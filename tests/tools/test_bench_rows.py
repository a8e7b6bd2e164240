"""bench/rows.py: rows in the columns of their file."""

from __future__ import annotations

import csv
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))


@pytest.mark.parametrize(
    ("module", "name"),
    [
        *(("rows", "bench_loss"), ("step", "bench"), ("budget", "budget"), ("kernels", "kernels")),
        ("finetune", "finetune"),
    ],
)
def test_a_benchmark_appends_to_its_file_of_results(module: str, name: str) -> None:
    with (ROOT / "results" / f"{name}.csv").open(newline="") as file:
        assert next(csv.reader(file)) == list(importlib.import_module(module).COLUMNS)


def test_rows_are_appended_below_one_header_and_values_without_a_column_are_left_out(tmp_path: Path) -> None:
    from rows import append_row

    path = tmp_path / "new" / "rows.csv"
    append_row({"form": "plain", "ms": 1.23456789, "note": "unused"}, ("form", "ms"), path)
    append_row({"form": "fused"}, ("form", "ms"), path)
    assert path.read_text() == "form,ms\nplain,1.23457\nfused,\n"


def test_a_row_is_not_appended_below_other_columns(tmp_path: Path) -> None:
    from rows import append_row

    path = tmp_path / "rows.csv"
    append_row({"form": "plain", "ms": 1.0}, ("form", "ms"), path)
    before = path.read_text()
    with pytest.raises(ValueError, match="has the columns form, ms, not form, mb"):
        append_row({"form": "plain", "mb": 2.0}, ("form", "mb"), path)
    assert path.read_text() == before
