"""Bad command lines: each gets one message and a non-zero exit code at once, never a traceback or a run."""

from __future__ import annotations

import contextlib
import io
import shlex
import shutil
import warnings
from pathlib import Path

import pytest

from icmixup.lab.cli import main

TRAIN = "train --recipe quick --dataset digits --per-class 5 --epochs 2 --batch-size 10 --device cpu"
COMPARE = "compare digits --per-class 5 --epochs 2 --batch-size 10 --methods erm mixup --device cpu"

# a field of the recipe: values that no one can mean, and the start of the message
NUMBERS = {
    "seed": "-1 -99 9223372036854775808 99999999999999999999",
    "fraction": "0 -0.5 1.5 nan inf -inf",
    "per-class": "0 -3 1000000000000",
    "imbalance": "0 -1 nan inf -inf",
    "data-seed": "-1 99999999999999999999",
    "split": "-1 99999999999",
    "image-size": "0 -8 4097 100000000",
    "epochs": "0 -1 1000001 99999999999999999999",
    "batch-size": "0 -1 1 99999999999",
    "lr": "0 -0.1 nan inf -inf",
    "lr-factor": "0 -1 nan inf",
    "lr-drops": "-1 2 99",
    "warmup-epochs": "-1 2 99",
    "momentum": "-0.1 1 2 nan inf",
    "weight-decay": "-1 nan inf",
    "clip-norm": "0 -1 nan inf",
    "ema": "0 1 1.5 -0.5 nan inf",
    "padding": "-1 8 100 99999",
    "rotation": "-5 181 nan inf",
    "alpha": "0 -1 nan inf",
    "temperature": "0 -1 nan inf",
    "label-smoothing": "-0.1 1 2 nan inf",
    "kappa": "0 -1 nan inf",
    "tau": "-0.1 1.1 nan inf",
    "mix-prob": "-0.1 1.1 nan inf",
    "mix-off-epoch": "-1 -99",
    "eval-every": "0 -1",
}
WORDS = "abc 1x 0,5 '' 1e 0x10 [] 1;2"  # as any number
CHOICES = {
    "schedule": "linear STEP ''",
    "padding-mode": "edge constant",
    "precision": "float16 fp8 64",
    "mode": "group x",
    "duplicates": "keep none",
    "negatives": "nothing 'pairs pairs' 'classes pairs' 'sources classes'",
    "trackers": "mlflow csv",
    "recipe": "papers fast ''",
    "method": "ic-mixupp Mixup '' ../mixup",
    "model": "resnet99 small-cnnn ResNet18 '' ../../etc/passwd",
    "device": "mps meta xla cuda:7 cuda:-1 cuda:99999 gpu cpu:0:0 '' tpu hpu vulkan cuda:x",
    "dataset": "cifar1000 digit '' nothing no/such/folder ./no hf: data_batch_1",
}
BOOLEANS = "drop-last nesterov flip trivial joint compile graph fresh"

# whole command lines, and what the message says
LINES = {
    "trian": "did you mean train",
    "compar": "did you mean compare",
    "frobnicate": "unknown command",
    "../train": "unknown command",
    "train extra words": "",
    "train --recipe": "",
    "train --epochs": "",
    "train --epochs 1 2": "",
    "train -x": "",
    "train --no-such-flag": "",
    "train --no-such-flag 3": "",
    "--frobnicate": "",
    f"{TRAIN} --batch-size 51": "batch_size is 51",
    f"{TRAIN} --per-class 5000": "per_class must be from 1 to",
    f"{TRAIN} --imbalance 0.0001": "leaves no image of class",
    f"{TRAIN} --split 3": "no split 3",
    f"{TRAIN} --nesterov --momentum 0": "nesterov needs a momentum",
    f"{TRAIN} --padding 9 --padding-mode reflect": "padding must be below 8",
    f"{TRAIN} --cutout 9": "cutout must be at most 8",
    f"{TRAIN} --image-size 4096 --per-class 100": "needs",
    f"{TRAIN} --warmup-epochs 2": "warmup_epochs must be below epochs",
    f"{TRAIN} --lr-drops 1 2": "lr_drops must be below epochs",
    f"{TRAIN} --out /dev/null": "cannot be a folder",
    f"{TRAIN} --out /dev/null/x": "cannot be a folder",
    f"{TRAIN} --dataset file": "no dataset or folder",
    f"{TRAIN} --dataset ./file": "is a file",
    f"{TRAIN} --dataset cifar10 --data-dir empty": "cifar",
    f"{TRAIN} --dataset cifar10-notwins --data-dir empty": "",
    f"{TRAIN} --dataset empty": "",
    f"{TRAIN} --dataset one": "one class",
    f"{TRAIN} --dataset hf:no/such/thing": "could not load",
    f"{TRAIN} --dataset {'x' * 300}": "",
    f"{TRAIN} --out {'y' * 300}": "too long",
    f"{COMPARE} --seeds 0": "--seeds must be at least 1",
    f"{COMPARE} --seeds -3": "--seeds must be at least 1",
    f"{COMPARE} --seeds 1.5": "",
    f"{COMPARE} --methods": "",
    f"{COMPARE} --methods erm mixupp": "did you mean mixup",
    f"{COMPARE} --methods ,": "no methods to compare",
    f"{COMPARE} --baseline ic-mixup": "baseline 'ic-mixup' is not among the methods",
    f"{COMPARE} --baseline nothing": "baseline 'nothing'",
    f"{COMPARE} --budget 0s": "not a duration",
    f"{COMPARE} --budget -5m": "",
    f"{COMPARE} --budget 5": "not a duration",
    f"{COMPARE} --budget five": "not a duration",
    f"{COMPARE} --budget 5d": "not a duration",
    f"{COMPARE} --budget ''": "not a duration",
    f"{COMPARE} --budget 5m --engine ray": "--budget measures this machine",
    f"{COMPARE} --workers 0": "--workers must be at least 1",
    f"{COMPARE} --workers -1": "--workers must be at least 1",
    f"{COMPARE} --workers two": "",
    f"{COMPARE} --engine slurm": "",
    f"{COMPARE} --engine ray --device cuda:1": "--device must be cpu or cuda",
    f"{COMPARE} --address auto": "needs --engine ray",
    f"{COMPARE} --method mixup": "",
    f"{COMPARE} digits again": "",
    f"{COMPARE} --model nothing": "no model 'nothing'",
    f"{COMPARE} --momentum 2": "momentum must be",
    f"{COMPARE} --batch-size 1": "batch_size must be at least 2",
    f"{COMPARE} --device mps": "unknown device 'mps'",
    f"{COMPARE} --padding 100": "padding must be below 8",
    f"{COMPARE} --out file": "--out file cannot be a folder, because file is a file",
    f"{COMPARE} --out file/runs": "--out file/runs cannot be a folder, because",
    f"{TRAIN} --out file": "--out file cannot be a folder, because file is a file",
    f"{COMPARE} --fresh --reuse": "--fresh trains again what --reuse would take",
    f"{TRAIN} --fresh --reuse": "--fresh trains again what --reuse would take",
    f"{COMPARE} --name trials": "'trials' is what icmixup itself stores in runs",
    f"{COMPARE} --name features": "'features' is what icmixup itself stores in runs",
    "compare photos\udcff": "bytes that are not UTF-8",
    "train photos\udcff": "bytes that are not UTF-8",
    "compare nothing": "no dataset or folder",
    "compare no/such": "does not exist",
    "compare file": "no dataset or folder",
    "compare ./file": "is a file",
    "compare one": "one class",
    "paper nothing": "nothing",
    "paper --seeds 2": "needs --run-missing",
    "paper --only erm": "needs --run-missing",
    "paper --compile": "needs --run-missing",
    "paper --json --latex": "exclude each other",
    "paper --json --markdown --latex": "exclude each other",
    "paper --run-missing --seeds 0": "--seeds must be at least 1",
    "paper --run-missing --seeds -1": "--seeds must be at least 1",
    "paper --run-missing --only nothing/at/all": "nothing",
    "paper --run-missing --engine slurm": "",
    "paper --results one": "",
    "analyse": "",
    "analyse empty": "is not the folder of a run",
    "analyse no/such": "does not exist",
    "analyse file": "is a file",
    "analyse empty --device mps": "unknown device",
    "analyse empty --image-seed x": "",
    "evaluate": "no runs to evaluate",
    "evaluate empty": "is not the folder of a run",
    "evaluate no/such": "does not exist",
    "evaluate file": "is a file",
    "evaluate empty --strengths 0": "strengths are 1",
    "evaluate empty --strengths x": "",
    "evaluate empty --corruptions rain": "unknown corruption",
    "evaluate empty --ood empty": "contains no image files",
    "data": "",
    "data list extra more": "",
    "data fetch cifar10": "",
    "data get": "needs a name",
    "data check": "needs a name",
    "data get nothing": "no dataset or folder",
    "data check nothing": "no dataset or folder",
    "data check no/such": "does not exist",
    "data check ./file": "is a file",
    "data check empty": "",
    "data check one": "one class",
    "data check cifar10 --data-dir empty": "is not in",
    "data check cifar100 --data-dir empty": "is not in",
    "data check cifair10 --data-dir empty": "is not in",
    "data check cifar10 --data-dir file": "",
    "data check cifar10-notwins --data-dir empty": "",
}


def command_table() -> dict[str, str]:
    """Every command line, and a part of the message that it gets."""
    table = {}
    for name, values in NUMBERS.items():
        for value in [*shlex.split(values), *shlex.split(WORDS)]:
            table[f"{TRAIN} --{name}={shlex.quote(value)}"] = ""
    for name, values in CHOICES.items():
        for value in shlex.split(values):
            separate = value if name == "negatives" else shlex.quote(value)
            table[f"{TRAIN} --{name} {separate}"] = ""
    for name in BOOLEANS.split():
        table[f"{TRAIN} --{name} maybe"] = ""
    return table | LINES


TABLE = command_table()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("commands")
    (root / "empty").mkdir()
    (root / "one" / "class").mkdir(parents=True)
    (root / "file").write_text("not a folder")
    return root


def test_the_table_has_at_least_400_command_lines() -> None:
    assert len(TABLE) >= 400


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """No case may reach the network: names resolve to nothing."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("socket.getaddrinfo", refuse_network)


def refuse_network(*args: object, **kwargs: object) -> None:
    raise OSError("no network in this test")


@pytest.mark.parametrize("line", TABLE)
def test_a_bad_command_line_gets_a_message_and_trains_nothing(line: str, folder: Path) -> None:
    errors, output = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(output), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            code = main(shlex.split(line))
        except SystemExit as exit_:  # of the parser
            code = exit_.code if isinstance(exit_.code, int) else 1
    text = errors.getvalue() + output.getvalue()
    trained = bool(list(folder.glob("runs/*/log.jsonl")))
    shutil.rmtree(folder / "runs", ignore_errors=True)
    assert code != 0, text
    assert not trained
    assert "Traceback" not in text
    assert text.strip()
    assert TABLE[line].lower() in text.lower()
