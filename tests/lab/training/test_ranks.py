"""Several ranks as one run: torchrun, the command line, a kill, and another number of ranks after it."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import forking_context
from torch import distributed as dist
from torch import multiprocessing as mp

from icmixup import METHODS
from icmixup.lab.cli import main
from icmixup.lab.training.data import load_recipe_data
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.loop import Diverged, train
from icmixup.lab.training.ranks import join_ranks
from icmixup.lab.training.recipe import Recipe
from icmixup.lab.training.run_folder import runs_of

CPU = torch.device("cpu")
# 210 images in batches of 63 and 21, so that one rank has 32 and 11 of them, the other 31 and 10.
RECIPE = Recipe(
    dataset="digits",
    model="small-cnn",
    method="ic-mixup",
    per_class=21,
    epochs=10,
    batch_size=63,
    lr=0.05,
    schedule="cosine",
    nesterov=True,
    padding=1,
    flip=False,
    rotation=10.0,
    eval_every=5,
)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

# The command line with a checkpoint per epoch, and a note of the process to kill.
NOTED = """
import os, sys
from pathlib import Path
from icmixup.lab.cli import main
from icmixup.lab.training.execution import Execution

Execution.__init__.__kwdefaults__["checkpoint_seconds"] = 0.0
Path(sys.argv[1], os.environ["RANK"] + ".pid").write_text(str(os.getpid()))
sys.exit(main(sys.argv[2:]))
"""


def command(root: Path) -> list[str]:
    """RECIPE as flags."""
    plan = "--recipe quick --dataset digits --method ic-mixup --per-class 21"
    numbers = "--epochs 10 --batch-size 63 --eval-every 5 --device cpu"
    return ["train", *plan.split(), *numbers.split(), "--out", str(root)]


def kill_amid(root: Path, notes: Path, epochs: int) -> None:
    """Start two ranks and kill all of them, launcher too, once `epochs` are logged."""
    notes.mkdir()
    (notes / "noted.py").write_text(NOTED)
    words = [*TORCHRUN, str(notes / "noted.py"), str(notes), *command(root)]
    with subprocess.Popen(
        words, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as launcher:
        limit = time.monotonic() + 120
        while (
            sum(len(run.read_log()) for run in runs_of(root, RECIPE)) < epochs
            and time.monotonic() < limit
            and launcher.poll() is None
        ):
            time.sleep(0.01)
        for pid in (launcher.pid, *(int(note.read_text()) for note in notes.glob("*.pid"))):
            os.kill(pid, signal.SIGKILL)


def outcome(root: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Row and log of a finished run, without what a clock decides."""
    (run,) = runs_of(root, RECIPE)
    row = run.result()
    assert row is not None
    for name in ("minutes", "images_per_second", "memory_mb", "date", "commit"):
        row.pop(name)
    return row, [{name: line[name] for name in line if name != "seconds"} for line in run.read_log()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    root = tmp_path_factory.mktemp("whole")
    words = [*TORCHRUN, "-m", "icmixup", *command(root)]
    done = subprocess.run(words, capture_output=True, text=True, env=ENVIRONMENT, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{next(runs_of(root, RECIPE)).folder}  epoch 10/10  loss" in done.stdout
    return outcome(root)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("killed")
    kill_amid(root / "runs", root / "notes", epochs=3)
    return root / "runs"


def test_two_ranks_train_through_the_command_line(whole: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    row, log = whole
    assert row["ranks"] == 2
    assert [line["epoch"] for line in log] == list(range(1, 11))
    assert log[-1]["loss"] < log[0]["loss"]
    assert row["accuracy"] > 30  # chance is 10


def test_killed_on_two_ranks_a_run_goes_on_with_one(
    whole: tuple[dict[str, Any], list[dict[str, Any]]], killed: Path, tmp_path: Path
) -> None:
    shutil.copytree(killed, tmp_path / "runs")
    state, refused = next(runs_of(tmp_path / "runs", RECIPE)).load(CPU)
    assert state is not None
    assert refused == {}
    assert 2 <= state["epochs_done"] < RECIPE.epochs
    assert main(command(tmp_path / "runs")) == 0
    row, log = outcome(tmp_path / "runs")
    assert row["ranks"] == 1
    assert [line["epoch"] for line in log] == list(range(1, 11))
    done = state["epochs_done"]
    assert log[:done] == whole[1][:done]  # what two ranks had done stays done, and is what they did elsewhere
    assert all(math.isfinite(line["loss"]) for line in log)
    assert all(math.isfinite(row[name]) for name in ("accuracy", "nll", "nll_scaled", "fitted_temperature"))
    assert row["accuracy"] > 30


# One launch of two ranks for all that follows


def start_rank(rank: int, port: int, root: Path) -> None:
    torch.set_num_threads(1)
    names = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(names)
    tiny = dataclasses.replace(RECIPE, per_class=5, epochs=1, batch_size=15)
    data, rows = load_recipe_data(tiny, root), {}
    with join_ranks(CPU):
        train(RECIPE, Execution(out=root, data_dir=root, device="cpu"))
        for method in METHODS:
            recipe = dataclasses.replace(tiny, method=method)
            rows[method] = train(recipe, Execution(out=root, data_dir=root, dataset=data, device="cpu"))
        absurd = dataclasses.replace(tiny, method="erm", epochs=3, schedule="step", lr=1e30)
        for name, recipe in (
            ("diverged", absurd),
            ("small", dataclasses.replace(tiny, method="erm", batch_size=1)),
        ):
            try:
                train(recipe, Execution(out=root, data_dir=root, dataset=data, device="cpu"))
            except ValueError as error:
                rows[name] = {"error": type(error) is Diverged, "message": str(error)}
        dist.barrier()
    (root / f"{rank}.json").write_text(json.dumps(rows))


@pytest.fixture(scope="module")
def resumed(killed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which two ranks finished the killed run and trained every method."""
    root = tmp_path_factory.mktemp("resumed") / "runs"
    shutil.copytree(killed, root)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    forking_context()  # its server has imported what ranks need
    mp.start_processes(start_rank, (port, root), nprocs=2, start_method="forkserver")
    return root


@pytest.fixture
def rows(resumed: Path) -> list[dict[str, Any]]:
    """What train returned or raised on each rank."""
    return [json.loads((resumed / f"{rank}.json").read_text()) for rank in range(2)]


def test_killed_and_resumed_two_ranks_end_with_the_numbers_of_an_uninterrupted_run(
    whole: tuple[dict[str, Any], list[dict[str, Any]]], resumed: Path
) -> None:
    assert outcome(resumed) == whole


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_on_two_ranks(method: str, rows: list[dict[str, Any]]) -> None:
    first, second = (each[method] for each in rows)
    assert first["ranks"] == 2
    assert math.isfinite(first["loss"])
    assert math.isfinite(first["nll"])
    assert first["loss"] == second["loss"]  # the mean over ranks, known to both


def test_a_loss_gone_to_nan_stops_every_rank(rows: list[dict[str, Any]]) -> None:
    assert all(each["diverged"]["error"] for each in rows)
    assert rows[0]["diverged"]["message"] == rows[1]["diverged"]["message"]


def test_a_batch_with_fewer_images_than_ranks_is_refused(rows: list[dict[str, Any]]) -> None:
    assert all("so some of the 2 ranks would have no image" in each["small"]["message"] for each in rows)
