"""The command line: real commands on digits, a one-line message for every error, flags that follow Recipe."""

from __future__ import annotations

import dataclasses
import errno
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from forked import started_command

from icmixup.lab.cli import COMMANDS, compare, explain, main, parse
from icmixup.lab.cli.compare import CompareFlags
from icmixup.lab.cli.loading import check_folder, check_out_apart, last_batch_warning
from icmixup.lab.cli.shared import default_recipe
from icmixup.lab.training.recipe import QUICK, RECIPES, Afterwards, CrossValidation, Fingerprints, Recipe

TINY = ("--per-class", "20", "--epochs", "1")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ICMIXUP_DATA", raising=False)
    return tmp_path


@pytest.mark.usefixtures("forked_workers")
def test_compare_prints_a_table_and_writes_three_files(here: Path, capfd: pytest.CaptureFixture[str]):
    args = ("compare", "digits", *TINY, "--methods", "erm,mixup", "ic-mixup", "--seeds", "2")
    assert main(args) == 0  # the runs are in processes
    out, errors = capfd.readouterr()
    for text in ("accuracy %", "against mixup", "[95 % interval]", "NLL", "baseline", "Verdict: "):
        assert text in out
    assert "images:       200 for training, 599 for testing (a third of each class held out)" in errors
    assert "erm mixup ic-mixup; 2 seeds each" in errors
    assert "[6/6] " in errors
    assert "ic-mixup seed 1: accuracy" in errors
    assert "seed 1: accuracy" not in out
    (folder,) = (path.parent for path in (here / "runs").glob("*/comparison.json"))
    stored = json.loads((folder / "comparison.json").read_text())
    assert (stored["overview"]["classes"], stored["overview"]["train_images"]) == (10, 200)
    assert {name: len(entry["accuracies"]) for name, entry in stored["methods"].items()} == {
        "erm": 2,
        "mixup": 2,
        "ic-mixup": 2,
    }
    assert (folder / "comparison.csv").read_text().count("\n") == 7
    assert (folder / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_a_method_named_twice_is_planned_once(here: Path, capsys: pytest.CaptureFixture[str]):
    """A budget dropped other methods to make room for the second time."""
    args = ("compare", "digits", *TINY, "--seeds", "1", "--workers", "1", "--no-report", "--methods")
    for methods in (("erm", "mixup", "erm"), ("erm", "mixup")):
        assert main([*args, *methods]) == 0
        assert "methods:      erm mixup; 1 seed each" in capsys.readouterr().err
    assert len(list((here / "runs").glob("*/comparison.json"))) == 1


def test_train_prints_one_line_with_its_folder(here: Path, capsys: pytest.CaptureFixture[str]):
    args = ["train", "--recipe", "quick", "--dataset", "digits", *TINY, "--method", "ic-remix", "--seed", "4"]
    assert main(args) == 0
    line = capsys.readouterr().out
    folder = here / line.split()[0]
    assert "digits-20each.small-cnn.ic-remix.s4" in folder.name
    row = json.loads((folder / "result.json").read_text())
    assert f"epoch 1/1  loss {row['loss']:.3f}  accuracy {row['accuracy']:.1f}" in line


def test_default_methods_are_those_that_the_network_and_the_flags_allow(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """erm-adjusted, which needs biases, ended a comparison after most of its runs were trained."""
    tail = ("compare", "digits", *TINY, "--imbalance", "0.5", "--seeds", "1", "--workers", "1", "--no-report")
    uniform = "erm mixup ic-mixup regmixup ic-regmixup"
    balanced = "balanced balanced-mixup balanced-ic-regmixup"
    assert main([*tail, "--sampler", "class-balanced"]) == 0
    assert f"methods:      {uniform}; 1 seed each" in capsys.readouterr().err
    assert main([*tail, "--cosine-classifier"]) == 0
    assert f"methods:      {uniform} {balanced}; 1 seed each" in capsys.readouterr().err
    init = torch.nn.Linear.__init__
    monkeypatch.setattr(torch.nn.Linear, "__init__", lambda *args, **kw: init(*args, **kw | {"bias": False}))
    assert main(tail) == 0
    assert f"methods:      {uniform} {balanced}; 1 seed each" in capsys.readouterr().err
    before = list(here.rglob("recipe.json"))
    assert main([*tail, "--seed", "5", "--methods", "erm", "erm-adjusted"]) == 2
    assert "the classifier of small-cnn has no bias to adjust" in capsys.readouterr().err
    assert list(here.rglob("recipe.json")) == before  # nothing was trained


def test_a_refused_run_leaves_no_folder(here: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["train", "--per-class", "5", "--batch-size", "64"]) == 2
    assert "batch_size is 64, but digits has only 50" in capsys.readouterr().err
    assert not (here / "runs").exists()


def test_fresh_trains_again_what_is_kept_otherwise(here: Path):
    args = ["train", "--recipe", "quick", "--dataset", "digits", *TINY]

    def stamp() -> int:
        assert main(args) == 0
        return next(here.glob("runs/*/result.json")).stat().st_mtime_ns

    first = stamp()
    assert stamp() == first
    args.append("--fresh")
    assert stamp() > first


MISTAKES = [
    (["compare", "digit"], "digits"),
    (["compare", "./photso"], "did you mean photos?"),
    (["compare", "./nothing-like-it"], "folder './nothing-like-it' does not exist"),
    (["compare", "./file.txt"], "is a file"),
    (["compare", "./photos"], "photos"),
    (["compare", "--methods", "erm", "ic-mixpu"], "no method 'ic-mixpu'; did you mean ic-mixup"),
    (["compare", "--model", "small-cn"], "small-cnn"),
    (["compare", "--baseline", "remix", "--methods", "erm", "mixup"], "'remix' is not among the methods"),
    (["compare", "--seeds", "0"], "--seeds must be at least 1, got 0"),
    (["compare", "--budget", "soon"], "5m"),
    (["compare", "--device", "gpu"], "unknown device 'gpu'"),
    (["compare", "--imbalance", "0"], "imbalance"),
    (["compare", "--imbalance", "0.0001"], "imbalance 0.0001"),
    (["compare", "--fraction", "2"], "fraction"),
    (["compare", "--per-class", "5000"], "5000"),
    (["compare", "--batch-size", "5000"], "batch_size is 5000"),
    (["compare", "--epochs", "0"], "epochs"),
    (["compare", *TINY, "--lr", "1e30", "--methods", "erm", "--seeds", "1"], "no run has a result"),
    (["train", "--recipe", "quick", "--dataset", "digits", *TINY, "--lr", "1e30"], "became nan"),
    (["train", "--method", "mixpu"], "no method 'mixpu'; did you mean mixup"),
    (["data", "get"], "needs a name"),
    (["data", "check", "cifar100"], "cifar-100-binary.tar.gz"),
    (["data", "check", "cifar1000"], "did you mean cifar100"),
    (["compair"], "did you mean compare?"),
]


def test_at_most_three_folders_are_suggested_for_a_path_that_does_not_exist(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / f"photos{number}").mkdir()
    with pytest.raises(ValueError, match="does not exist; did you mean") as error:
        check_folder(str(tmp_path / "photos"))
    assert str(error.value).count(str(tmp_path / "photos")) == 1 + 3


@pytest.mark.parametrize("command", ["compare", "train"])
def test_runs_may_not_become_a_class_of_the_images(
    command: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name in ("cats/1.png", "dogs/2.png"):
        for folder in (here / "photos", here / "split" / "train", here / "split" / "test"):
            (folder / name).parent.mkdir(parents=True)
            (folder / name).touch()
    monkeypatch.chdir(here / "photos")
    for out in ("runs", ".", "cats/runs", "../split/../photos/runs"):
        assert main([command, ".", "--out", out]) == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert f"--out {out} is among the classes of ., and would be read as one of them" in last
        assert last.endswith("--out ../runs")
    for dataset, out in ((".", "../runs"), (".", ".runs"), ("../split", "../split/runs"), ("digits", "runs")):
        check_out_apart(dataset, Path(out))
    with pytest.raises(ValueError, match=r"among the classes of \.\./split/test"):
        check_out_apart("../split", Path("../split/test/runs"))


@pytest.mark.parametrize(("args", "wanted"), MISTAKES, ids=[" ".join(args) for args, _ in MISTAKES])
def test_an_error_is_one_line_with_exit_code_2(
    args: list[str], wanted: str, here: Path, capsys: pytest.CaptureFixture[str]
):
    (here / "photos").mkdir()
    (here / "file.txt").touch()
    assert main(args) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("icmixup: ")
    assert wanted in last


@pytest.mark.parametrize("args", [["--recipe", "fast"], ["--lr", "much"], ["--lrr", "1"]], ids=" ".join)
def test_a_flag_that_cannot_be_read_is_exit_code_2_too(args: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_:
        main(["compare", *args])
    assert exit_.value.code == 2
    assert args[0] in capsys.readouterr().err


def test_an_error_shows_no_traceback_without_debug(here: Path, capfd: pytest.CaptureFixture[str]):
    assert main(["compare", "--fraction", "2"]) == 2
    out, errors = capfd.readouterr()
    assert out == ""
    assert errors.startswith("icmixup: fraction")
    assert errors.count("\n") == 1
    with pytest.raises(ValueError, match=r"^fraction"):
        main(["compare", "--fraction", "2", "--debug"])


def test_errors_of_the_system_are_one_line_messages():
    full = explain(OSError(errno.ENOSPC, "No space left on device", "runs/a/checkpoint.pt"))
    assert full is not None
    assert full.startswith("the disk is full, writing runs/a/checkpoint.pt; free some space")
    assert explain(PermissionError(errno.EACCES, "Permission denied", "runs")) == "Permission denied: runs"
    assert explain(ValueError("two\n  lines")) == "two lines"
    assert "pip install 'icmixup[lab]'" in str(explain(ModuleNotFoundError("no rich", name="rich")))
    assert explain(KeyError("our mistake")) is None


def test_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compare, "run_compare", lambda *_: {}["missing"])
    with pytest.raises(KeyError):
        main(["compare"])


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "batch-system"])
def test_after_an_interrupt_the_same_command_resumes(
    sent: signal.Signals, here: Path, capsys: pytest.CaptureFixture[str]
):
    args = ["compare", "--per-class", "20", "--methods", "erm", "--seeds", "1", "--epochs", "40"]
    with started_command(args, here) as process:
        deadline = time.monotonic() + 60
        while not list(here.glob("runs/*/log.jsonl")) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert process.pid is not None
        os.kill(process.pid, sent)
        process.join(timeout=60)
    errors = (here / "stderr").read_text()
    assert process.exitcode == 128 + sent, errors
    assert "Traceback" not in errors
    assert errors.splitlines()[-1] == "icmixup: interrupted; run the same command again to resume"
    (log,) = here.glob("runs/*/log.jsonl")
    interrupted = log.read_text()
    assert main(args) == 0  # in this process, which has imported torch already
    assert "Verdict" in capsys.readouterr().out
    assert log.read_text().startswith(interrupted)  # nothing was trained again
    assert log.read_text().count("\n") == 40


@pytest.mark.parametrize("args", [["--help"], ["compare", "--help"], ["data", "list"]], ids=" ".join)
def test_a_closed_pipe_is_not_an_error(args: list[str], tmp_path: Path):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "icmixup", *args]
    done = subprocess.run(
        command, cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, timeout=120, check=False
    )
    os.close(writer)
    assert done.stderr == b""
    assert done.returncode in (141, 1)  # 1 is rich's own


def test_a_table_is_printed_in_encodings_without_its_signs(here: Path, monkeypatch: pytest.MonkeyPatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", out)
    args = ["compare", *TINY, "--methods", "erm", "mixup", "--seeds", "1", "--workers", "1", "--no-report"]
    assert main(args) == 0
    printed = out.buffer.getvalue().decode("latin-1")
    assert "accuracy %" in printed
    assert "\\u2192 scaled" in printed  # an arrow


def test_under_torchrun_only_one_rank_prints(tmp_path: Path):
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    methods = ["--methods", "erm", "mixup", "ic-mixup", "--seeds", "1", "--device", "cpu"]
    command = [*run, "icmixup", "compare", *TINY, *methods]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        out, errors = process.communicate(timeout=120)
    finally:
        process.terminate()  # torchrun then ends its ranks; killed, it would leave them behind
    assert process.returncode == 0, errors
    assert out.count("Verdict") == 1
    assert errors.count("[3/3] ic-mixup seed 0") == 1


# From files, filled in by compare --folds, or by `icmixup retrain`: not given by the user.
COMPUTED_KINDS = (Fingerprints, CrossValidation, Afterwards)
COMPUTED = [field.name for kind in COMPUTED_KINDS for field in dataclasses.fields(kind)]


@pytest.mark.parametrize("start", RECIPES)
def test_every_field_of_a_recipe_is_a_flag(start: str):
    wanted = dataclasses.replace(RECIPES[start], dataset="digits")
    assert parse(["train", "digits", "--recipe", start], start).run_recipe() == wanted
    text = help_of("train")
    for field in dataclasses.fields(Recipe):
        found = f"--{field.name.replace('_', '-')}" in text
        assert found == (field.name not in COMPUTED), field.name


def test_a_comparison_has_the_flags_of_a_recipe_but_for_data_and_method():
    text = help_of("compare")
    for field in dataclasses.fields(Recipe):
        wanted = field.name not in ("dataset", "method", *COMPUTED) or field.name == "folds"
        assert (f"--{field.name.replace('_', '-')} " in text.replace(",", " ")) == wanted, field.name


def help_of(command: str) -> str:
    text = io.StringIO()
    with redirect_stdout(text), pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    return text.getvalue()


def parse_compare(args: list[str]) -> tuple[CompareFlags, str]:
    """The flags of a comparison and its recipe, as the command finds them."""
    given: str | None = args[args.index("--recipe") + 1] if "--recipe" in args else None
    flags = parse(["compare", *args], "quick")
    start = given or default_recipe(flags.dataset, flags.where.device)
    return parse(["compare", *args], start), start


# What version 0.1.0 had: users have these in scripts. New flags are added here, none disappears.
FLAGS = {
    "compare": """methods seeds baseline budget folds workers engine address recipe out data-dir
        device trackers fresh debug model seed fraction per-class imbalance data-seed split
        image-size epochs batch-size drop-last lr schedule lr-drops lr-factor warmup-epochs momentum
        nesterov weight-decay clip-norm ema padding padding-mode flip rotation trivial alpha mode
        duplicates negatives temperature label-smoothing kappa tau joint mix-prob mix-off-epoch
        precision compile graph eval-every tune report no-report open""",
    "train": """recipe out data-dir device trackers fresh debug dataset model method seed fraction per-class
        imbalance data-seed split image-size epochs batch-size drop-last lr schedule lr-drops lr-factor
        warmup-epochs momentum nesterov weight-decay clip-norm ema padding padding-mode flip rotation trivial
        alpha mode duplicates negatives temperature label-smoothing kappa tau joint mix-prob mix-off-epoch
        precision compile graph eval-every""",
    "paper": """run-missing seeds only compile engine address workers device json markdown latex write results
        out data-dir debug""",
    "report": "to out open thumbnails no-thumbnails data-dir device debug",
    "retrain": "how tau epochs data-dir device debug",
    "predict": "to device debug",
    "export": "to debug",
    "evaluate": "corruptions strengths ood baseline json csv data-dir device fresh debug",
    "analyse": "out data-dir image-seed device debug",
    "data": "data-dir debug",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_flags_of_the_first_version_are_still_there(command: str):
    found = set(re.findall(r"--([a-z][a-z-]*)", help_of(command)))
    assert set(FLAGS[command].split()) <= found


@pytest.mark.parametrize("command", COMMANDS)
def test_help_breaks_lines_only_where_the_terminal_ends(command: str, monkeypatch: pytest.MonkeyPatch):
    width, margin = 110, 4
    monkeypatch.setenv("COLUMNS", str(width))
    lines = [line.rstrip() for line in help_of(command).splitlines()]
    early = [
        before
        for before, after in itertools.pairwise(lines)
        if re.match(r" {9,}\S", after)
        and re.search(r"\S {2,}\S|^ {9,}\S", before)  # not a flag that is too long for a text beside it
        and len(before) + 1 + len(after.split()[0]) <= width - margin
    ]
    assert early == []


@pytest.mark.parametrize("command", ["compare", "train"])
def test_help_is_grouped_with_the_most_important_options_first(command: str):
    titles = re.findall(r"^\W*(\w+ options)\W*$", help_of(command), re.M)
    groups = ("data", "pretrained", "optimisation", "augmentation", "mixing", "numerics", "where")
    assert titles[: len(groups)] == [f"{group} options" for group in groups]
    first = help_of(command).split("data options")[0]
    assert 5 < len(re.findall(r"^\W{2}(?:-h, )?--", first, re.M)) <= 18  # two rules, --help and fifteen


@pytest.mark.parametrize("command", ["compare", "train"])
def test_a_folder_has_one_name_however_it_is_completed(command: str, here: Path):
    def name_of(dataset: str) -> str:
        flags = parse([command, dataset], "quick")
        return str((flags.shared_recipe() if command == "compare" else flags.run_recipe()).dataset)

    for folder in ("photos/birds", "digits"):
        (here / folder).mkdir(parents=True)
    assert {name_of(text) for text in ("photos", "photos/", "./photos", ".//photos//")} == {"photos"}
    assert name_of("photos/birds/") == name_of("./photos/birds") == "photos/birds"
    assert name_of("digits") == "digits"
    assert name_of("./digits") == "./digits"  # a folder
    assert name_of("hf:owner/name") == "hf:owner/name"
    assert name_of("./missing/") == "./missing/"  # errors show what was passed


def test_flags_change_the_recipe_that_was_chosen():
    flags, start = parse_compare(
        ["digits", "--recipe", "paper", "--lr", "0.3", "--no-flip", "--lr-drops", "5", "9"]
    )
    wanted = dataclasses.replace(RECIPES["paper"], dataset="digits", lr=0.3, flip=False, lr_drops=(5, 9))
    assert dataclasses.replace(flags.shared_recipe(), method=wanted.method) == wanted
    assert start == "paper"


def test_digits_are_compared_with_the_quick_recipe():
    flags, start = parse_compare([])
    assert start == "quick"
    assert flags.shared_recipe() == dataclasses.replace(
        QUICK, dataset="digits", method=flags.shared_recipe().method
    )


def test_the_recipe_for_other_data_follows_the_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    flags, start = parse_compare(["cifar10"])
    assert (start, flags.model) == ("strong", RECIPES["strong"].model)
    assert parse_compare(["cifar10", "--device", "cpu"])[1] == "quick"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert parse_compare(["cifar10"])[1] == "quick"


@pytest.mark.parametrize("args", [["--help"], ["compare", "--help"]], ids=" ".join)
def test_help_shows_examples_and_loads_nothing_heavy(args: list[str]):
    code = (
        f"import sys; from icmixup.lab.cli import main; args = {args}; heavy = "
        "{'torch', 'scipy', 'sklearn', 'matplotlib', 'torchmetrics', 'datasets'}\n"
        "try: main(args)\nexcept SystemExit: pass\nsys.stderr.write(' '.join(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == ""
    assert "icmixup compare path/to/images" in done.stdout


def test_data_list_and_check_describe_what_is_here(here: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["data", "list"]) == 0
    listing = capsys.readouterr().out
    for name in ("digits", "cifar100", "hf:owner/name", "icmixup data get cifar100"):
        assert name in listing
    assert main(["data", "check", "digits"]) == 0
    assert "every class has train images" in capsys.readouterr().out
    assert main(["data", "get", "digits"]) == 0
    assert "1,198" in capsys.readouterr().out


def test_version_and_bare_command(capsys: pytest.CaptureFixture[str]):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("icmixup 0.")
    with pytest.raises(SystemExit) as exit_:
        main([])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert "usage: icmixup" in out
    assert "icmixup --version" in out


@pytest.mark.parametrize(
    ("images", "fields", "words"),
    [
        (5000, {}, "ends with a batch of 8 images, .* --drop-last"),
        (129, {}, "ends with a batch of 1 image,"),
        (5000, {"drop_last": True}, ""),
        (5120, {}, ""),
        (128 + 32, {}, ""),
        (20, {}, ""),  # rejected elsewhere
    ],
)
def test_a_very_small_last_batch_is_warned_about(images: int, fields: dict[str, bool], words: str) -> None:
    said = last_batch_warning(Recipe(batch_size=128, **fields), images)
    assert re.search(words, said) if words else said == ""
