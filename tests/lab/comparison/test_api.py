"""icmixup.lab.compare on the user's own data, networks, transforms and methods."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pages import ROOT, blocks
from PIL import Image
from torch import Tensor, nn

from icmixup import METHODS, Method
from icmixup.lab import compare
from icmixup.lab.cli import main
from icmixup.lab.cli.compare import CompareFlags
from icmixup.lab.comparison.api import as_arguments
from icmixup.lab.models import MODELS

generator = np.random.default_rng(0)
LABELS = np.arange(48) % 3
ROWS = generator.normal(size=(48, 4)) + 2 * LABELS[:, None]
PIXELS = generator.integers(0, 256, (48, 1, 8, 8), dtype=np.uint8)
TEST_ROWS = ROWS + 0.1
QUICK: dict[str, Any] = {"seeds": 2, "epochs": 1, "batch_size": 16, "progress": False, "device": "cpu"}


def test_the_function_has_the_defaults_of_the_command() -> None:
    given = inspect.signature(compare).parameters
    for name in ("seeds", "intervals", "baseline", "tune"):
        assert given[name].default == getattr(CompareFlags(), name)
    assert Path(given["out"].default) == CompareFlags().out


class Net(nn.Module):
    def __init__(self, num_classes: int, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, num_classes))

    def forward(self, inputs: Tensor) -> Tensor:
        return activation(self.layers(inputs))


def activation(scores: Tensor) -> Tensor:
    return scores


class Items(torch.utils.data.Dataset[tuple[Tensor, int]]):
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return torch.tensor(self.rows[row]).float() + 0.1 * torch.randn(4), int(LABELS[row])


def convolutions(num_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes)
    )


def shift(image: Tensor) -> Tensor:
    return image.roll(int(torch.randint(3, ())), dims=2)


ONE_NET = Net(3)
BACKBONE = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
STATISTICS = nn.BatchNorm1d(4, affine=False)


def run(out: Path, **changes: Any) -> Any:
    given = {"train": (ROWS, LABELS), "test": (TEST_ROWS, LABELS), "model": Net, "methods": ["erm"]}
    return compare(**{**given, **QUICK, "out": out, **changes})


def finished(out: Path) -> set[str]:
    return {path.parent.name for path in out.rglob("result.json")}


def test_the_example_of_the_page_has_fewer_than_15_lines() -> None:
    """That it runs is tested with all other pages, in tests/docs."""
    (_, first), *_ = blocks(ROOT / "docs" / "python.md", "python")
    assert "compare(" in first
    assert len(first.splitlines()) < 15


def test_a_result_has_a_table_a_verdict_and_a_form_for_notebooks(tmp_path: Path) -> None:
    mine = Method(draw="mixup", alpha=0.5, axes=("class", "pair"))
    result = run(tmp_path, methods=["erm", "mixup", mine], class_names=["a", "b", "<c>"])
    name = "mixup-alpha=0.5-axes=class+pair"
    assert [standing.method for standing in result.comparison.standings] != []
    for text in (result.table(), repr(result), result._repr_html_()):
        for method in ("erm", "mixup", name):
            assert method in text
        assert "Verdict: " in text
    assert result.verdict in " ".join(result.table(width=2000).split())
    assert f"<b>{name}</b>" in result._repr_html_()
    assert result._repr_html_().count("<tr>") == 4
    assert (result.folder / "comparison.json").exists()
    assert (result.folder / f"confusion.{name}.csv").exists()
    assert len(result.figure().axes) == 2


def test_the_frame_has_a_row_per_method_or_per_run(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    result = run(tmp_path, methods=["erm", "mixup"])
    frame = result.frame()
    best = result.comparison.standings[0]
    assert list(frame.index) == [standing.method for standing in result.comparison.standings]
    assert frame.loc[best.method, "accuracy"] == best.mean
    runs = result.frame(runs=True)
    assert sorted(zip(runs.method, runs.seed, strict=True)) == [
        ("erm", 0),
        ("erm", 1),
        ("mixup", 0),
        ("mixup", 1),
    ]


def test_the_measure_compared_is_a_column_of_the_frame(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    result = run(tmp_path, methods=["erm", "mixup"], measure="balanced-accuracy")
    frame = result.frame()
    best = result.comparison.standings[0]
    assert frame.loc[best.method, "balanced_accuracy"] == best.mean
    assert frame.loc[best.method, "accuracy"] == best.average("accuracy")
    with pytest.raises(ValueError, match="measure"):
        run(tmp_path, methods=["erm", "mixup"], measure="few")


def test_a_frame_without_pandas_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(tmp_path)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        result.frame()


def test_names_given_in_python_are_unknown_afterwards(tmp_path: Path) -> None:
    models, methods = dict(MODELS), dict(METHODS)
    run(tmp_path, methods={"mine": Method(draw="mixup", alpha=0.7), "plain": "erm"})
    assert models == MODELS
    assert methods == METHODS


def test_commands_take_runs_of_data_given_in_python_as_the_page_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"train": (PIXELS, LABELS), "test": (PIXELS, LABELS)}
    result = run(tmp_path, seeds=1, methods=["erm", "mixup"], model="small-cnn", **data)
    folder = str(tmp_path / result.comparison.rows[0]["folder"])
    Image.fromarray(PIXELS[0, 0]).save(tmp_path / "image.png")
    for works in (
        ("report", str(result.folder)),
        ("predict", folder, str(tmp_path / "image.png")),
        ("export", folder, "--to", str(tmp_path / "model.safetensors")),
    ):
        assert main([*works]) == 0
    capsys.readouterr()
    for fails in (
        ("evaluate", folder),
        ("analyse", folder),
        ("retrain", folder, "--how", "adjust", "--tau", "1"),
    ):
        assert main([*fails, "--data-dir", str(tmp_path)]) == 2
        assert "data that was given in Python cannot be loaded by a command" in capsys.readouterr().err
    floats = (PIXELS / 255, LABELS)
    result = run(tmp_path, seeds=1, methods=["erm"], model="small-cnn", train=floats, test=floats)
    folder = str(tmp_path / result.comparison.rows[0]["folder"])
    assert main(["export", folder]) == 2
    assert "its inputs were not square uint8 images" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes",
    [
        {"train": (PIXELS, LABELS), "test": (PIXELS, LABELS), "model": convolutions, "padding": 1},
        {"train": (PIXELS, LABELS), "test": (PIXELS, LABELS), "model": "small-cnn"},
        {"train": (PIXELS, LABELS), "test": (PIXELS, LABELS), "model": convolutions, "transform": shift},
        {"train": (PIXELS / 255, LABELS), "test": (PIXELS / 255, LABELS), "model": convolutions},
        {"train": Items(ROWS), "test": Items(TEST_ROWS)},
        {"optimizer": "adamw"},
        {"model": lambda: Net(3)},
    ],
    ids=["bytes", "named network", "transform", "floats", "torch Dataset", "adamw", "no arguments"],
)
def test_many_kinds_of_data_and_networks_train(tmp_path: Path, changes: dict[str, Any]) -> None:
    images = not isinstance(changes.get("model", Net), type) and changes.get("train") is not None
    methods = ["erm", "ic-mixup", "cutmix", "manifold"] if images else ["erm", "ic-mixup"]
    result = run(tmp_path, methods=methods, seeds=1, **changes)
    assert not result.comparison.failures
    assert len(result.comparison.rows) == len(methods)


def test_more_training_separates_classes_that_can_be_separated(tmp_path: Path) -> None:
    result = run(tmp_path, seeds=1, epochs=40)
    assert result.comparison.standings[0].mean > 80


def test_the_same_call_trains_nothing_and_random_transforms_do_not_depend_on_the_global_seed(
    tmp_path: Path,
) -> None:
    given = {"train": Items(ROWS), "test": Items(TEST_ROWS)}
    torch.manual_seed(1)
    first = run(tmp_path / "a", **given)
    torch.manual_seed(2)
    other = run(tmp_path / "b", **given)
    assert [row["loss"] for row in first.comparison.rows] == [row["loss"] for row in other.comparison.rows]
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("result.json")}
    run(tmp_path / "a", **given)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("result.json")} == times


class Wider(Net):
    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.layers = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, num_classes))


class Scaled(Net):
    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        nn.init.zeros_(self.layers[3].weight)


Wider.__name__ = Scaled.__name__ = "Net"


@pytest.mark.parametrize(
    "changes",
    [
        {"train": (ROWS + 1e-3, LABELS)},
        {"train": (ROWS, LABELS[::-1].copy())},
        {"test": (ROWS, LABELS)},
        {"model": Wider},
        {"model": Scaled},
        {"methods": {"mine": Method(draw="mixup", alpha=0.8)}},
        {"transform": torch.sqrt},
    ],
    ids=["inputs", "labels", "test", "shapes", "initial weights", "method", "transform"],
)
def test_another_meaning_of_the_same_name_is_another_run(tmp_path: Path, changes: dict[str, Any]) -> None:
    start = {"methods": {"mine": Method(draw="mixup", alpha=0.7)}, "train": (abs(ROWS), LABELS), "seeds": 1}
    if "train" in changes:
        changes["train"] = (abs(changes["train"][0]), changes["train"][1])
    first = run(tmp_path, **start)
    before = finished(tmp_path)
    result = run(tmp_path, **(start | changes))
    new = finished(tmp_path) - before
    assert len(new) == 1
    assert result.folder != first.folder
    assert {row["folder"] for row in result.comparison.rows} == new
    assert next(iter(new)).startswith("data.Net.mine.s0.")


def test_a_network_that_differs_in_a_function_it_calls_is_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, seeds=1)
    monkeypatch.setattr(sys.modules[__name__], "activation", torch.tanh)
    run(tmp_path, seeds=1)
    assert len(finished(tmp_path)) == 2


def test_processes_get_data_network_and_methods(tmp_path: Path) -> None:
    methods = {"plain": "erm", "mine": Method(draw="mixup", alpha=0.7)}
    given = {"train": Items(ROWS), "test": Items(TEST_ROWS), "methods": methods, "seeds": 1}
    here = run(tmp_path / "1", workers=1, **given)
    run(tmp_path / "2", workers=1, **{**given, "methods": {"plain": "erm"}})  # one process is left to start
    there = run(tmp_path / "2", workers=2, **given)
    assert sorted(row["at_once"] for row in there.comparison.rows) == [1, 2]
    losses = [[row["loss"] for row in result.comparison.rows] for result in (here, there)]
    assert losses[0] == pytest.approx(losses[1])
    assert finished(tmp_path / "1") == finished(tmp_path / "2")


def test_what_processes_cannot_import_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lambda.*top level of a \.py file.*workers=1"):
        run(tmp_path, model=lambda: Net(3), workers=2)
    assert not finished(tmp_path)


SCRIPT = """
import numpy as np
from torch import nn
from icmixup.lab import compare
from icmixup.lab.comparison.api import as_arguments

rows, labels = np.ones((8, 2)), np.arange(8) % 2

def net():
    return nn.Linear(2, 2)

compare((rows, labels), (rows, labels), model=net, methods=["erm"], epochs=1, batch_size=4, workers=2)
"""


def test_a_script_without_a_main_block_is_told_to_add_one(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert 'must call compare under if __name__ == "__main__":' in done.stderr.splitlines()[-1]


class InPlaceNet(Net):
    def forward(self, inputs: Tensor) -> Tensor:
        inputs *= 2
        return super().forward(inputs)


class DoubledNet(Net):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs * 2)


def double_in_place(inputs: Tensor) -> Tensor:
    inputs *= 2
    return inputs


def double(inputs: Tensor) -> Tensor:
    return inputs * 2


@pytest.mark.parametrize(
    ("in_place", "pure"),
    [
        ({"model": InPlaceNet}, {"model": DoubledNet}),
        (
            {"transform": double_in_place, "test_transform": double_in_place},
            {"transform": double, "test_transform": double},
        ),
    ],
    ids=["network", "transform"],
)
def test_what_changes_its_input_in_place_does_not_change_the_data(
    tmp_path: Path, in_place: dict[str, Any], pure: dict[str, Any]
) -> None:
    """The next run would train and test on other data than the first."""
    rows = ROWS.astype(np.float32)
    results = [
        run(
            tmp_path / name,
            train=(rows, LABELS),
            test=(rows + 0.5, LABELS),
            eval_every=1,
            epochs=3,
            **changes,
        )
        for name, changes in (("in place", in_place), ("pure", pure))
    ]
    nll = [[row["nll"] for row in result.comparison.rows] for result in results]
    assert nll[0] == nll[1]
    np.testing.assert_array_equal(rows, ROWS.astype(np.float32))


def test_warnings_about_data_and_settings_are_printed_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(tmp_path, test=(ROWS, LABELS), seeds=1, progress=True)
    few, steps, leak = result.warnings
    assert few.startswith("48 test images can hardly show")
    assert steps.endswith("use more epochs")
    assert leak.startswith("48 of 48 test images are identical to a training image:")
    printed = " ".join(capsys.readouterr().err.split())
    for warning in result.warnings:
        assert f"warning: {warning}" in printed


def test_only_settings_that_were_given_are_warned_about(tmp_path: Path) -> None:
    """The defaults have a Nesterov momentum, which AdamW has no use for."""
    kept = {"seeds": 1, "epochs": 1, "optimizer": "adamw"}
    texts = [text for text in run(tmp_path, **kept).warnings if "no effect" in text]
    assert texts == []
    texts = [text for text in run(tmp_path, **kept, momentum=0.5).warnings if "no effect" in text]
    assert texts == ["momentum has no effect with optimizer='adamw'; use optimizer='sgd'"]


def test_min_steps_is_a_number_of_steps(tmp_path: Path) -> None:
    rows = run(tmp_path, seeds=1, epochs=1, batch_size=16, min_steps=10).comparison.rows
    assert {(row["epochs"], row["min_steps"]) for row in rows} == {(4, 0)}  # of three steps each


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    result = run(tmp_path, seeds=np.int64(2), epochs=np.int64(1), lr=np.float32(0.5))
    assert [row["seed"] for row in result.comparison.rows] == [0, 1]
    assert run(tmp_path, seeds=np.arange(2), lr=0.5).comparison.rows == result.comparison.rows


def test_messages_name_arguments_instead_of_flags(tmp_path: Path) -> None:
    assert "use seeds=3 or more" in run(tmp_path, methods=["erm", "mixup"], seeds=1).verdict
    for flags, arguments in (
        (
            "try --lr 5e-05, --clip-norm 1 or --precision float32",
            "try lr=5e-05, clip_norm=1 or precision='float32'",
        ),
        ("use --momentum 0.9 or --no-nesterov.", "use momentum=0.9 or nesterov=False."),
        ("--name must be; add it to --methods", "name must be; add it to methods"),
        ("a--b -- c", "a--b -- c"),
    ):
        assert as_arguments(flags) == arguments


@pytest.mark.parametrize("case", ["not square", "four channels", "test_transform", "as they are"])
def test_a_network_predicts_files_only_if_they_can_be_read_as_its_test_images_were(
    tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {"not square": (48, 3, 8, 12), "four channels": (48, 4, 8, 8)}.get(case, (48, 3, 8, 8))
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    changes = {"test_transform": double} if case == "test_transform" else {}
    compare((pixels, LABELS), (pixels, LABELS), methods=["erm"], out=tmp_path / "runs", **QUICK, **changes)
    Image.fromarray(pixels[0, :3].transpose(1, 2, 0)).save(tmp_path / "0.png")
    (run, _) = sorted((tmp_path / "runs").glob("*.erm.*"))
    code = main(["predict", str(run), str(tmp_path / "0.png"), "--device", "cpu"])
    assert code == (0 if case == "as they are" else 2)
    assert ("cannot be used on image files" in capsys.readouterr().err) == (code == 2)


def double(image: Tensor) -> Tensor:
    return image * 2


def test_a_report_gives_no_command_for_a_comparison_in_python(tmp_path: Path) -> None:
    methods = ["erm", "mixup"]
    result = compare((PIXELS, LABELS), (PIXELS, LABELS), methods=methods, out=tmp_path, **QUICK)
    assert main(["report", str(result.folder), "--device", "cpu"]) == 0
    assert "icmixup compare" not in (result.folder / "report.html").read_text()


def test_commands_say_that_they_do_not_know_methods_of_the_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {"mine": Method(draw="mixup", alpha=1.0)}
    result = compare((PIXELS, LABELS), (PIXELS, LABELS), methods=own, out=tmp_path, **QUICK)
    (run, _) = sorted(tmp_path.glob("*.mine.*"))
    for command in (["report", str(result.folder)], ["export", str(run)]):
        assert main(command) == 2
        assert "icmixup has no method mine" in capsys.readouterr().err


def test_tuning_is_part_of_the_result(tmp_path: Path) -> None:
    result = run(tmp_path, methods=["erm", "mixup"], tune=2, seeds=1, batch_size=12)
    assert set(result.comparison.tuned) == {"erm", "mixup"}
    assert "tuned: lr," in result.table()
    assert len((result.folder / "tuning.csv").read_text().splitlines()) == 5
    for row in result.comparison.rows:
        assert row["lr"] == result.comparison.recipe_of(row["method"]).lr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test": (ROWS, LABELS + 1)}, "test has 16 examples of labels that train lacks: 3"),
        ({"model": Net(3)}, "model must be a function that builds a network, got a Net"),
        ({"model": 3}, "a name or a function that builds a network, got 3"),
        ({"model": lambda: Net(5)}, r"must return \(2, 3\) scores .* got \(2, 5\)"),
        ({"model": lambda width, depth: Net(3)}, "it takes width, depth"),
        ({"model": lambda: ONE_NET}, "two calls share layers.1.weight and others: a run would start from"),
        (
            {"model": lambda: nn.Sequential(BACKBONE, nn.Linear(4, 3))},
            "two calls share 0.0.weight and others",
        ),
        ({"model": lambda: nn.Sequential(STATISTICS, nn.Linear(4, 3))}, "two calls share 0: a run would"),
        (
            {"model": lambda: nn.Sequential(Net(3), nn.Softmax(dim=1))},
            "returns probabilities.*remove its softmax",
        ),
        (
            {"model": lambda: Net(3).double()},
            "weights of the network are torch.float64, but inputs are float32",
        ),
        ({"model": lambda: Net(3).requires_grad_(False)}, "no weights that require a gradient"),
        ({"model": "small-cnn"}, r"takes images, but inputs are \(4,\)"),
        (
            {name: (np.ones((48, 8, 8, 3)), LABELS) for name in ("train", "test")} | {"model": "small-cnn"},
            r"\(channels, height, width\), but inputs are \(8, 8, 3\); move the channels to the front",
        ),
        ({"model": "resnet999"}, "no model 'resnet999'"),
        ({"methods": "erm"}, "list of names or Method objects"),
        ({"methods": [3]}, "a name or a Method, got int"),
        ({"methods": ["mixupp"]}, "did you mean mixup"),
        ({"methods": ["erm", "ldam"]}, "ldam classifies by cosines, and cannot find the classifier"),
        ({"cosine_classifier": True}, "cosine_classifier classifies by cosines, and cannot find the"),
        ({"methods": ["erm", "cutmix"]}, r"cutmix cannot mix inputs of shape \(4,\)"),
        ({"methods": {"mixup": "erm"}}, "'mixup' belongs to another method"),
        ({"methods": {"a/b": "erm"}}, "folders are named after it, got 'a/b'"),
        ({"class_names": ["a", "b", "a"]}, "class_names has 'a' more than once"),
        ({"baseline": "remix"}, "baseline 'remix' is not among the methods"),
        ({"epoch": 3}, "no setting 'epoch'; did you mean epochs"),
        ({"padding": 2}, "padding would have no effect"),
        ({"optimizer": "adam"}, "'sgd' or 'adamw', got 'adam'"),
        ({"seeds": 0}, "seeds must be at least 1, got 0"),
        ({"tune": 0}, "tune must be at least 1 trial per method, got 0"),
        ({"seeds": 2.5}, "seeds must be a number, or whole numbers, got 2.5"),
        ({"workers": 0}, "^workers must be at least 1, got 0"),
        ({"batch_size": 500}, "batch_size is 500, but data has only 48 training images; use batch_size=12"),
    ],
)
def test_bad_arguments_are_refused_before_training(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(tmp_path, **changes)
    assert not finished(tmp_path)


def test_a_network_without_biases_is_refused_for_their_adjustment_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init = nn.Linear.__init__
    monkeypatch.setattr(nn.Linear, "__init__", lambda *args, **kw: init(*args, **kw | {"bias": False}))
    data = dict.fromkeys(("train", "test"), (PIXELS, LABELS))
    with pytest.raises(ValueError, match="the classifier of small-cnn has no bias to adjust"):
        run(tmp_path, **data, model="small-cnn", methods=["erm", "erm-adjusted"])
    assert not finished(tmp_path)
