"""`icmixup paper --run-missing`: what is trained, in which order, and on which data."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from icmixup.lab.cli import parse
from icmixup.lab.cli.paper import PaperFlags, run_missing, run_paper
from icmixup.lab.cli.shared import Concurrency, Machine
from icmixup.lab.datasets import Dataset, DataSpec, Split, load_dataset
from icmixup.lab.datasets.cifar import LAYOUTS
from icmixup.lab.models import build_model
from icmixup.lab.paper.fill import fill_table, index_results
from icmixup.lab.paper.plan import (
    choose_cells,
    describe_missing_data,
    describe_stand_ins,
    plan_missing_runs,
    seconds_per_work,
)
from icmixup.lab.paper.published import TABLES, find_table
from icmixup.lab.paper.render import results_page
from icmixup.lab.paper.results import METRICS, Result, Results, append_rows, experiment, read_rows
from icmixup.lab.paper.spec import PaperTable
from icmixup.lab.sweep.cost import count_images, work
from icmixup.lab.sweep.progress import Display, duration
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.loop import RunProgress, train
from icmixup.lab.training.recipe import QUICK, Recipe


def made_result(recipe: Recipe, accuracy: float, **numbers: object) -> Result:
    empty: dict[str, Any] = dict.fromkeys((*METRICS, "minutes", "commit", "date"))
    made = {"accuracy": accuracy, "device": "H200", "at_once": 1}
    return Result(recipe, {**empty, **made, **numbers}, 2)


CELLS = [(table, cell) for table in TABLES.values() for cell in table.cells()]
CLASSES = 10


def reduced(recipe: Recipe) -> Recipe:
    """The recipe on a synthetic dataset with a small network; only the way it trains is kept."""
    data = {"dataset": "made", "fraction": 1.0, "per_class": None, "imbalance": 1.0, "split": None}
    small = {
        "epochs": 1,
        "batch_size": 2 * CLASSES,
        "model": "small-cnn",
        "padding": 1,
        "precision": "float32",
    }
    return replace(recipe, **data, **small)


REDUCED = list(dict.fromkeys(reduced(cell.recipe) for _, cell in CELLS))
MODELS = sorted({cell.recipe.model for _, cell in CELLS})


@pytest.fixture(scope="module")
def made() -> Dataset:
    """Two synthetic training images per class, and one to test."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (3 * CLASSES, 3, 16, 16), generator=generator, dtype=torch.uint8)
    labels = torch.arange(3 * CLASSES) % CLASSES
    train_split, test_split = (
        Split(images[part], labels[part]) for part in (slice(0, 2 * CLASSES), slice(2 * CLASSES, None))
    )
    names = tuple(str(label) for label in range(CLASSES))
    return Dataset("made", train_split, test_split, names, (0.5,) * 3, (0.25,) * 3)


def test_every_cell_can_be_trained_and_is_filled_by_its_row(made: Dataset, tmp_path: Path) -> None:
    """Cells whose reduced recipes are equal share a run."""
    rows = {
        small: train(small, Execution(out=tmp_path / "runs", data_dir=tmp_path, dataset=made, device="cpu"))
        for small in REDUCED
    }
    path = tmp_path / "runs.csv"
    append_rows(path, [(cell.recipe, rows[reduced(cell.recipe)]) for _, cell in CELLS])
    index = index_results(read_rows(path).rows)
    for table in TABLES.values():
        filled = fill_table(table, index)
        assert filled.cells_with_runs == len(filled.trainable)
        for cell in table.cells():
            ours = next(o for o in filled.entry(cell.row, cell.column).ours if o.variant == cell.variant)
            assert ours.mean == pytest.approx(rows[reduced(cell.recipe)]["accuracy"], abs=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_every_network_of_the_tables_takes_a_training_step(name: str) -> None:
    model = build_model(name, 100, seed=0)
    scores = model(torch.randn(2, 3, 32, 32))
    scores.square().mean().backward()
    assert scores.shape == (2, 100)
    assert all(weight.grad is not None for weight in model.parameters())


def write_images(folder: Path, per_class: int) -> None:
    """CIFAR-10 in its binary layout with synthetic images, per_class in each file, and ciFAIR's lists."""
    layout = LAYOUTS["cifar10"][0]
    (folder / layout.archive.folder).mkdir(parents=True)
    labels = torch.arange(10 * per_class) % 10
    pixels = torch.randint(256, (len(labels), 3072), generator=torch.Generator().manual_seed(1))
    content = torch.cat([labels[:, None], pixels], dim=1).to(torch.uint8).numpy().tobytes()
    for file in (*layout.train, layout.test):
        (folder / layout.archive.folder / file).write_bytes(content)
    for file in ("duplicates_cifar10.csv", "duplicates_cifar10_test.csv"):
        (folder / file).write_text("TestID,TrainID\n3,13\n")


def test_every_subset_of_cifar10_in_a_table_has_as_many_images_as_work_assumes(tmp_path: Path) -> None:
    """The files have a tenth of the images of CIFAR-10, and so does every subset."""
    write_images(tmp_path, per_class=100)
    recipes = {cell.recipe for _, cell in CELLS if cell.recipe.dataset in ("cifar10", "cifair10")}
    names = ("per_class", "fraction", "imbalance")
    subsets = {(r.split, *(getattr(r, name) for name in names)): count_images(r) for r in recipes}
    for (split, *subset), images in subsets.items():
        fields = dict(zip(names, subset, strict=True))
        data = load_dataset(DataSpec("cifar10-notwins", split=split, **fields), tmp_path, download=False)
        expected = images if fields["per_class"] else images / 10
        assert len(data.train) == pytest.approx(expected, abs=CLASSES)  # counts are rounded down by class
        assert len(data.test) == 998


QUICKER = replace(QUICK, epochs=2, per_class=4, batch_size=40)
TINY = PaperTable(
    name="tiny",
    title="Two methods on digits",
    rows={"ERM": {"method": "erm"}, "IC-Mixup": {"method": "ic-mixup"}},
    columns={"digits": {"dataset": "digits"}},
    base=QUICKER,
    published={"ERM": (10.0,)},
    gains=(("IC-Mixup", "ERM"),),
)


def training_flags(results: Path, **changes: Any) -> PaperFlags:
    """--run-missing on a CPU, one run at a time, with everything in the folder of the results."""
    folder = results.parent
    return PaperFlags(
        run_missing=True,
        results=results,
        out=folder / "runs",
        where=Machine(data_dir=folder, device="cpu"),
        concurrency=Concurrency(workers=changes.pop("workers", 1)),
        **changes,
    )


def test_missing_runs_are_trained_and_appended_as_they_finish(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results" / "runs.csv"
    flags = training_flags(path, seeds=2)
    run_missing([TINY], replace(flags, only=("erm",)), read_rows(path))
    assert [(row.recipe.method, row.recipe.seed) for row in read_rows(path).rows] == [("erm", 0), ("erm", 1)]
    run_missing([TINY], flags, read_rows(path))
    rows = read_rows(path).rows
    assert [(row.recipe.method, row.recipe.seed) for row in rows[2:]] == [("ic-mixup", 0), ("ic-mixup", 1)]
    filled = fill_table(TINY, index_results(rows))
    assert filled.cells_with_runs == 2
    assert filled.entry("IC-Mixup minus ERM", "digits").ours[0].n == 2
    before = path.read_bytes()
    run_missing([TINY], flags, read_rows(path))
    assert path.read_bytes() == before
    path.unlink()  # the runs are still in their folders
    run_missing([TINY], flags, read_rows(path))
    assert {row.recipe: row.accuracy for row in read_rows(path).rows} == {
        row.recipe: row.accuracy for row in rows
    }
    said = capsys.readouterr().err
    assert re.search(r"\[1/2\] digits-4each\.small-cnn\.erm\.s0: accuracy [\d.]+ %, .*left", said)
    assert "finished before" in said


@pytest.mark.parametrize("workers", [1, 2])
def test_only_runs_that_end_within_the_budget_are_trained(
    workers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "runs.csv"
    flags = training_flags(path, seeds=1, workers=workers, budget="1h")
    # ERM needs about 18 minutes beside another run, by earlier results, and IC-Mixup with 100 epochs more.
    longer = replace(TINY, rows={**TINY.rows, "IC-Mixup": {"method": "ic-mixup", "epochs": 100}})
    plan = plan_missing_runs(choose_cells([longer], ()), {}, tmp_path, 1, False)
    each = 1000 / work(plan.recipes[0]) / workers
    monkeypatch.setattr("icmixup.lab.paper.plan.seconds_per_work", lambda index, device: each)
    assert run_missing([longer], flags, read_rows(path)) == []
    assert [row.recipe.method for row in read_rows(path).rows] == ["erm"]
    said = capsys.readouterr().err
    assert "[1/1] digits-4each.small-cnn.erm.s0: accuracy" in said
    assert "would not have ended within --budget 1h: 1 of 2 runs" in said
    run_missing([longer], replace(flags, budget="1s"), read_rows(path))
    assert len(read_rows(path).rows) == 1
    path.unlink()  # what is finished is found again, whatever the time
    run_missing([longer], replace(flags, budget="1s"), read_rows(path))
    assert [row.recipe.method for row in read_rows(path).rows] == ["erm"]


def test_a_trial_tells_whether_runs_end_in_time_on_a_machine_without_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runs.csv"
    flags = training_flags(path, seeds=1, budget="10m")
    endless = replace(TINY, rows={**TINY.rows, "IC-Mixup": {"method": "ic-mixup", "epochs": 10**6}})
    run_missing([endless], flags, read_rows(path))
    assert [row.recipe.method for row in read_rows(path).rows] == ["erm"]
    said = capsys.readouterr().err
    assert "measuring the speed of this machine" in said
    assert "--budget 10m: 1 of 2 runs" in said


def test_a_lost_run_is_named_and_the_others_are_appended(tmp_path: Path) -> None:
    # Scores over 1e-38 overflow, and only the Infinite Class loss divides by the temperature.
    overflowing = replace(TINY, base=replace(QUICKER, temperature=1e-38))
    path = tmp_path / "runs.csv"
    flags = training_flags(path, seeds=1)
    lost = run_missing([overflowing], flags, read_rows(path))
    assert [text.partition(":")[0] for text in lost] == ["digits-4each.small-cnn.ic-mixup.s0 has no result"]
    assert [row.recipe.method for row in read_rows(path).rows] == ["erm"]


def test_the_remaining_time_follows_the_remaining_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("icmixup.lab.sweep.progress.time.monotonic", lambda: clock[0])
    runs = [replace(Recipe(method="mixup"), seed=seed) for seed in range(4)]
    with Display(runs, Console(file=io.StringIO()), finished=runs[:1]) as display:
        assert display.left() == "time left unknown"
        clock[0] = 100.0
        display.update(runs[1], RunProgress(1.0, 200, 0.5, None, 1.0, 1.0))
        assert display.left() == f"about {duration(599 * 100)} left"  # of 600 epochs, one took 100 s
        display.update(runs[2], RunProgress(151.0, 200, 0.5, None, 1.0, 1.0))  # resumes from epoch 150
        assert display.left() == f"about {duration((599 - 151) * 50)} left"
        for run in runs[1:]:
            display.fail(run, "it diverged")
        assert display.left() == "nothing left"


def test_before_the_first_epoch_the_remaining_time_comes_from_earlier_results_on_this_device() -> None:
    done = Recipe(method="mixup", fraction=0.5)
    rows = [made_result(done, 50.0, minutes=10.0), made_result(done, 50.0, minutes=99.0, device="another")]
    speed = seconds_per_work(index_results(rows), "H200")
    twice = [replace(done, seed=1), replace(done, seed=2)]
    display = Display(twice, Console(file=io.StringIO()), work=work, seconds_each=speed)
    assert display.left() == "about 20:00 left"
    assert seconds_per_work(index_results(rows), "a third") is None
    shared = [made_result(done, 50.0, minutes=20.0, at_once=2)]
    assert seconds_per_work(index_results(shared), "H200") == speed


@pytest.mark.parametrize("pattern", ["ic-mixup", "IC-Mixup", "ic-mix*p/10 %/resnet34", "*/10 %/*"])
def test_cells_are_chosen_by_method_row_or_method_column_model(pattern: str) -> None:
    chosen = choose_cells([TABLES["table1-right"]], [pattern])
    assert {cell.column for _, cell in chosen} == (
        {"10 %"} if "10 %" in pattern else set(TABLES["table1-right"].columns)
    )
    assert any(cell.recipe.method == "ic-mixup" for _, cell in chosen)
    assert len(chosen) < 20


def test_a_pattern_that_matches_no_cell_is_rejected_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"--only ic-mixap matches no cell; .*ic-mixup-c.*10 %"):
        choose_cells([TABLES["table1-right"]], ["ic-mixap"])


def put_data(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / LAYOUTS[name][0].archive.folder).mkdir(parents=True)
    return folder


def test_missing_runs_are_sorted_by_cost_and_shared_between_tables(tmp_path: Path) -> None:
    put_data(tmp_path, "cifar10", "cifar100", "cifair10", "cifair100")
    tables = [TABLES[name] for name in ("table1-left", "table1-right", "figure-confidence", "lam")]
    done = replace(Recipe(), method="mixup", seed=1, precision="float32")
    index = index_results([made_result(done, 70.0)])
    plan = plan_missing_runs(choose_cells(tables, ()), index, tmp_path, 2, True)
    planned = [(*experiment(recipe), recipe.seed) for recipe in plan.recipes]
    assert len(set(planned)) == len(planned)
    assert set(planned) | {(*experiment(done), 1)} == {
        (*experiment(cell.recipe), seed) for table in tables for cell in table.cells() for seed in (0, 1)
    }
    assert (*experiment(done), 1) not in planned
    order = [(recipe.seed, work(recipe)) for recipe in plan.recipes]
    assert order == sorted(order)
    assert all(recipe.compile for recipe in plan.recipes)


def test_work_counts_the_training_images(tmp_path: Path) -> None:
    """Against the published sizes of LT-CIFAR."""
    totals = {
        ("cifar10", 0.1): 20431,
        ("cifar10", 0.01): 12406,
        ("cifar100", 0.1): 19573,
        ("cifar100", 0.01): 10847,
    }
    for (dataset, imbalance), total in totals.items():
        assert count_images(Recipe(dataset=dataset, imbalance=imbalance)) == total
    assert count_images(Recipe(fraction=0.1)) == 5000
    tuned = TABLES["table2-middle"].recipe("+ IC-RegMixup", "ciFAIR-10")
    assert tuned is not None
    assert count_images(replace(tuned, dataset="cifar10-notwins")) == 500
    assert work(Recipe(method="regmixup")) > work(Recipe(method="mixup"))


def test_runs_on_cifair_use_the_stand_in_if_its_lists_are_available(tmp_path: Path) -> None:
    put_data(tmp_path, "cifar10")
    cells = choose_cells([TABLES["table2-left"]], ())
    without = plan_missing_runs(cells, {}, tmp_path, 1, False)
    assert (without.recipes, dict(without.missing_data)) == ((), {"cifair100": 5, "cifair10": 5})
    for file in ("duplicates_cifar10.csv", "duplicates_cifar10_test.csv"):
        (tmp_path / file).write_text("TestID,TrainID\n")
    plan = plan_missing_runs(cells, {}, tmp_path, 1, False)
    assert {recipe.dataset for recipe in plan.recipes} == {"cifar10-notwins"}
    assert (dict(plan.missing_data), plan.stand_ins) == ({"cifair100": 5}, ("cifair10",))
    assert describe_stand_ins(plan) == [
        "cifair10 was not found: its runs are tested on cifar10-notwins, and their results are marked"
    ]


def test_runs_on_cifair_100_are_shared_with_those_on_a_tenth_of_cifar_100(tmp_path: Path) -> None:
    put_data(tmp_path, "cifar100")
    tenth = Recipe(fraction=0.1, eval_every=200)  # at the end alone
    done = index_results([made_result(replace(tenth, method="mixup"), 30.0)])
    alone = plan_missing_runs(choose_cells([TABLES["table2-left"]], ("cifair100",)), done, tmp_path, 1, False)
    methods = ("erm", "ic-mixup", "regmixup", "ic-regmixup")
    assert set(alone.recipes) == {replace(tenth, method=method) for method in methods}
    assert (dict(alone.missing_data), alone.stand_ins) == ({}, ("cifair100",))
    tables = [TABLES[name] for name in ("table1-right", "figure-regmixup", "table2-left")]
    cells = choose_cells(tables, ("10 %", "CIFAR-100 10 %", "ciFAIR-100"))
    shared = plan_missing_runs(cells, done, tmp_path, 1, False)
    axes = {replace(tenth, method=method) for method in ("ic-mixup-c", "ic-mixup-p")}
    assert len(shared.recipes) == len(set(shared.recipes))
    assert set(shared.recipes) == set(alone.recipes) | axes
    put_data(tmp_path, "cifair100")
    own = plan_missing_runs(choose_cells([TABLES["table2-left"]], ("cifair100",)), done, tmp_path, 1, False)
    assert {(recipe.dataset, recipe.per_class) for recipe in own.recipes} == {("cifair100", 50)}
    assert len(own.recipes) == 5


def test_a_missing_dataset_is_reported_with_its_source_and_the_runs_that_do_not_need_it(
    tmp_path: Path,
) -> None:
    flags = PaperFlags(run_missing=True, where=Machine(data_dir=tmp_path), results=tmp_path / "runs.csv")
    with pytest.raises(
        ValueError,
        match=r"ciFAIR-100\.zip from https://\S+ into that.*cifar10-notwins.*all missing runs need",
    ):
        run_missing([TABLES["table2-left"]], flags, Results())
    put_data(tmp_path, "cifair10")
    plan = plan_missing_runs(choose_cells([TABLES["table2-left"]], ("*mixup",)), {}, tmp_path, 1, False)
    sentences = describe_missing_data(plan, tmp_path)
    assert "4 runs need it" in sentences[0]
    assert sentences[0].endswith("into that folder; to test on cifar100 instead, add cifar100")
    assert sentences[1] == "4 runs have their data: cifair10: mixup ic-mixup regmixup ic-regmixup"


def test_an_unknown_table_is_rejected_with_similar_and_all_names() -> None:
    with pytest.raises(
        ValueError, match=r"no table or figure 'table1-rigth'; did you mean table1-right.*long-tail"
    ):
        find_table("table1-rigth")


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--json", "--latex"], "--json, --markdown and --latex exclude each other"),
        (["--run-missing", "--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--only", "mixup"], "needs --run-missing"),
        (["--budget", "5m"], "--budget selects what to train and needs --run-missing"),
        (["--budget", "5m", "--run-missing", "--engine", "ray"], "--budget needs --engine local"),
        (["tabel1"], "no table or figure"),
    ],
)
def test_invalid_flags_are_rejected(args: list[str], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        run_paper(parse(["paper", *args, "--results", str(tmp_path / "runs.csv")], "quick"))


def test_the_command_lists_all_tables_and_shows_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runs.csv"
    recipe = Recipe(method="mixup", fraction=0.1)
    append_rows(path, [(recipe, {"accuracy": 30.8}), (replace(recipe, seed=1), {"accuracy": 31.2})])
    with path.open("a") as file:
        file.write("torn\n")
    assert run_paper(parse(["paper", "--results", str(path)], "quick")) == 0
    out = capsys.readouterr()
    assert re.search(r"table1-right +1 of 20 +2 ", out.out)
    assert "line 4" in out.err
    run_paper(parse(["paper", "table1-right", "--results", str(path)], "quick"))
    assert re.search(r"Mixup +28\.21 +31\.00 ± 0\.28 \(2\) +\+2\.79", capsys.readouterr().out)
    run_paper(parse(["paper", "table1-right", "lam", "--json", "--results", str(path)], "quick"))
    stored = json.loads(capsys.readouterr().out)
    assert [table["name"] for table in stored["tables"]] == ["table1-right", "lam"]
    assert len(stored["damaged"]) == 1
    run_paper(parse(["paper", "--write", "--markdown", "--results", str(path)], "quick"))
    assert (tmp_path / "README.md").read_text() == results_page(read_rows(path))
