"""Damaged files of a run: the file is named, what is intact is used, and no command ends with a traceback."""

from __future__ import annotations

import contextlib
import io
import json
import math
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from icmixup.lab.cli import main
from icmixup.lab.sweep.budget import read_budgets
from icmixup.lab.training.run_folder import Run
from icmixup.lab.training.stored import read_recipe_file

LINE = "--recipe quick --dataset digits --method erm --per-class 3 --epochs 2 --batch-size 10 --device cpu"

GARBAGE: dict[str, bytes] = {
    "empty": b"",
    "cut short": b'{"accuracy": 9',
    "not JSON": b"hello",
    "bytes": bytes(range(256)),
    "zeros": bytes(100),
    "null": b"null",
    "number": b"3",
    "string": b'"finished"',
    "list": b"[1, 2]",
    "empty object": b"{}",
    "nested": b"[" * 100_000,
    "NaN": b"NaN",
    "two objects": b"{}{}",
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbf{}",
    "huge number": b"1" * 5000,
}


def change(**values: object) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda row: {**row, **values}


def drop(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda row: {key: value for key, value in row.items() if key != name}


# a result.json that is JSON, but not a result of this recipe
MISTYPED: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "accuracy NaN": change(accuracy=math.nan),
    "accuracy infinite": change(accuracy=math.inf),
    "accuracy a string": change(accuracy="90"),
    "accuracy missing": drop("accuracy"),
    "accuracy null": change(accuracy=None),
    "accuracy above 100": change(accuracy=900.0),
    "accuracy true": change(accuracy=True),
    "loss NaN": change(loss=math.nan),
    "loss missing": drop("loss"),
    "loss a list": change(loss=[1.0]),
    "key a number": change(key=3),
    "key missing": drop("key"),
    "another method": change(method="mixup"),
    "another seed": change(seed=1),
    "seed a string": change(seed="0"),
    "epochs a float": change(epochs=2.0),
    "lr null": change(lr=None),
}
RECIPES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "epochs a string": change(epochs="2"),
    "epochs negative": change(epochs=-2),
    "epochs a float": change(epochs=2.0),
    "method unknown": change(method="nothing"),
    "method a list": change(method=["erm"]),
    "model a number": change(model=3),
    "lr NaN": change(lr=math.nan),
    "flip a string": change(flip="yes"),
    "lr_drops strings": change(lr_drops=["a"]),
    "negatives a string": change(negatives="pairs"),
    "unknown field": change(nothing=1),
    "schedule unknown": change(schedule="linear"),
    "dataset null": change(dataset=None),
}


def run_command(line: str) -> tuple[int, str]:
    errors, output = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(output), warnings.catch_warnings():
        warnings.simplefilter("default")
        code = main(line.split())
    return code, errors.getvalue() + output.getvalue()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("finished") / "runs"
    assert main(f"train {LINE} --out {root}".split()) == 0
    return root


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Run:
    """A copy of a finished run that a test may damage."""
    shutil.copytree(finished, tmp_path / "runs")
    folder = next((tmp_path / "runs").iterdir())
    return Run(folder, read_recipe_file(folder / "recipe.json"))


def is_as_before(run: Run, finished: Path) -> bool:
    """Whether the run has its result again, with the numbers of the undamaged one."""
    original = json.loads((finished / run.folder.name / "result.json").read_text())
    found = json.loads((run.folder / "result.json").read_text())
    return all(found[name] == original[name] for name in ("accuracy", "loss", "nll", "key", "method"))


@pytest.mark.parametrize("name", GARBAGE)
def test_a_damaged_result_is_named_and_made_again_from_the_checkpoint(
    name: str, run: Run, finished: Path
) -> None:
    (run.folder / "result.json").write_bytes(GARBAGE[name])
    code, text = run_command(f"train {LINE} --out {run.folder.parent}")
    assert code == 0, text
    assert "result.json" in text
    assert "Traceback" not in text
    assert is_as_before(run, finished)


@pytest.mark.parametrize("name", MISTYPED)
def test_a_mistyped_result_is_not_a_result(name: str, run: Run, finished: Path) -> None:
    path = run.folder / "result.json"
    path.write_text(json.dumps(MISTYPED[name](json.loads(path.read_text()))))
    with pytest.warns(UserWarning, match=r"result\.json is not a result: its"):
        assert run.result() is None
    code, text = run_command(f"train {LINE} --out {run.folder.parent}")
    assert code == 0, text
    assert is_as_before(run, finished)


@pytest.mark.parametrize("file", ["result.json", "recipe.json", "checkpoint.pt"])
@pytest.mark.parametrize("name", GARBAGE)
def test_analyse_names_a_damaged_file(file: str, name: str, run: Run, tmp_path: Path) -> None:
    (run.folder / file).write_bytes(GARBAGE[name])
    code, text = run_command(f"analyse {run.folder} --out {tmp_path / 'analysis'} --device cpu")
    assert code == 2
    assert file in text
    assert "Traceback" not in text


@pytest.mark.parametrize("name", RECIPES)
def test_a_mistyped_recipe_is_named_with_its_field(name: str, run: Run, tmp_path: Path) -> None:
    path = run.folder / "recipe.json"
    path.write_text(json.dumps(RECIPES[name](json.loads(path.read_text()))))
    code, text = run_command(f"analyse {run.folder} --out {tmp_path / 'analysis'} --device cpu")
    assert code == 2
    assert "recipe.json" in text
    with pytest.raises(ValueError, match=r"recipe\.json is not the recipe of a run"):
        read_recipe_file(path)


@pytest.mark.parametrize("name", GARBAGE)
def test_a_damaged_log_loses_only_its_damaged_lines(name: str, run: Run, finished: Path) -> None:
    path = run.folder / "log.jsonl"
    path.write_bytes(path.read_bytes() + GARBAGE[name].replace(b"\n", b" ").replace(b"\r", b" ") + b"\n")
    assert [row["epoch"] for row in run.read_log()] == [1, 2]
    (run.folder / "result.json").unlink()
    code, text = run_command(f"train {LINE} --out {run.folder.parent}")
    assert code == 0, text
    assert is_as_before(run, finished)
    assert [row["epoch"] for row in run.read_log()] == [1, 2]


@pytest.mark.parametrize("name", GARBAGE)
def test_a_damaged_checkpoint_is_set_aside_and_the_run_starts_again(
    name: str, run: Run, finished: Path
) -> None:
    (run.folder / "checkpoint.pt").write_bytes(GARBAGE[name])
    (run.folder / "result.json").unlink()
    code, text = run_command(f"train {LINE} --out {run.folder.parent}")
    assert code == 0, text
    assert "checkpoint.pt" in text
    assert is_as_before(run, finished)
    assert (run.folder / "checkpoint.refused").exists()


@pytest.mark.parametrize("name", sorted(GARBAGE.keys() - {"empty object", "byte order mark", "UTF-16"}))
def test_damaged_budgets_are_named_and_measured_again(name: str, tmp_path: Path) -> None:
    path = tmp_path / "budgets.json"
    path.write_bytes(GARBAGE[name])
    with pytest.warns(UserWarning, match=r"budgets\.json"):
        assert read_budgets(path) == {}


GOOD_PLAN = {
    **{"epochs": 7, "seeds": 2, "methods": ["erm"], "workers": 1, "final": False},
    **{"start_seconds": 0.5, "epoch_seconds": {"erm": 0.25}, "pool_seconds": 0.0},
}


@pytest.mark.parametrize(
    "value",
    [
        *(7, None, [3], {}, {"epochs": 7}, GOOD_PLAN | {"methods": []}, GOOD_PLAN | {"methods": [1]}),
        *(GOOD_PLAN | {"epochs": value} for value in (0, -1, 1.5, "3", None, True, 10**7)),
        *(GOOD_PLAN | {"seeds": 0}, GOOD_PLAN | {"methods": "erm"}, GOOD_PLAN | {"other": 1}),
        *(GOOD_PLAN | {"workers": 0}, GOOD_PLAN | {"final": 1}, GOOD_PLAN | {"methods": ["mixup"]}),
        *(GOOD_PLAN | {"start_seconds": value} for value in (-1, "1", None, math.inf, math.nan)),
        *(GOOD_PLAN | {"epoch_seconds": value} for value in (1, [], {}, {"erm": -1}, {"erm": "x"})),
    ],
)
def test_a_mistyped_budget_is_ignored_and_the_others_are_kept(value: object, tmp_path: Path) -> None:
    path = tmp_path / "budgets.json"
    path.write_text(json.dumps({"good": GOOD_PLAN, "bad": value}))
    with pytest.warns(UserWarning, match="bad is not a plan"):
        assert read_budgets(path) == {"good": GOOD_PLAN}
