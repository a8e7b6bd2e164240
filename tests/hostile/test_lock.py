"""Two processes in one run folder, leftovers of dead ones, and interrupts."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from forked import started_command

from icmixup.lab import sweep
from icmixup.lab.datasets import load_dataset
from icmixup.lab.datasets.subsets import DataSpec
from icmixup.lab.datasets.temporary import host_name, is_leftover, remove_leftovers, temporary_path
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.lock import FILE, Busy, lock_folder
from icmixup.lab.training.loop import RunProgress, train
from icmixup.lab.training.recipe import QUICK
from icmixup.lab.training.run_folder import Run, runs_of, write_atomically

RECIPE = dataclasses.replace(
    QUICK, dataset="digits", method="erm", per_class=5, epochs=6, batch_size=10, eval_every=2
)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
HOLDER = """
import sys, time
from pathlib import Path
from icmixup.lab.training.lock import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""
LINE = "--recipe quick --dataset digits --method erm --per-class 20 --batch-size 10 --device cpu"


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def start_holder(folder: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", HOLDER, str(folder)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    return process


def test_a_held_lock_names_its_process_and_host(tmp_path: Path) -> None:
    holder = start_holder(tmp_path)
    try:
        with pytest.raises(Busy, match=f"in use by process {holder.pid} on {host_name()} since"):
            lock_folder(tmp_path, wait=False).__enter__()
    finally:
        holder.kill()
        holder.wait()
        assert holder.stdout is not None
        holder.stdout.close()


def test_the_lock_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    holder = start_holder(tmp_path)
    holder.kill()
    holder.wait()
    assert holder.stdout is not None
    holder.stdout.close()
    assert json.loads((tmp_path / FILE).read_text())["pid"] == holder.pid  # it was left behind
    with lock_folder(tmp_path, wait=False):
        assert json.loads((tmp_path / FILE).read_text())["pid"] == os.getpid()
    assert not (tmp_path / FILE).exists()


def test_two_identical_commands_at_once_both_end_with_the_same_result(tmp_path: Path) -> None:
    out = tmp_path / "runs"
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    args = ["train", *LINE.split(), "--epochs", "12", "--out", str(out)]
    with started_command(args, folders[0]) as one, started_command(args, folders[1]) as other:
        for process in (one, other):
            process.join(timeout=200)
    texts = [[(folder / name).read_text() for name in ("stdout", "stderr")] for folder in folders]
    assert [one.exitcode, other.exitcode] == [0, 0], texts
    assert texts[0][0] == texts[1][0]  # the line with loss and accuracy
    folder = next(out.iterdir())
    epochs = [json.loads(line)["epoch"] for line in (folder / "log.jsonl").read_text().splitlines()]
    assert epochs == list(range(1, 13))  # trained once
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoint.pt",
        "identity.json",
        "inputs.json",
        "log.jsonl",
        "predictions.npz",
        "recipe.json",
        "result.json",
    ]


@pytest.mark.parametrize("name", ["result.json.{host}-{pid}.part", ".cifar.{host}-{pid}.unpack.part"])
def test_leftovers_of_dead_processes_are_removed_and_those_of_living_ones_stay(
    name: str, tmp_path: Path
) -> None:
    dead = tmp_path / name.format(host=host_name(), pid=dead_pid())
    mine = tmp_path / name.format(host=host_name(), pid=os.getpid())
    foreign = tmp_path / name.format(host="another-host", pid=dead_pid())
    old = tmp_path / name.format(host="an-old-host", pid=1)
    for path in (dead, mine, foreign, old):
        if "unpack" in name:
            path.mkdir()
            (path / "inside").touch()
        else:
            path.touch()
    two_days_ago = time.time() - 48 * 3600
    os.utime(old, (two_days_ago, two_days_ago))
    assert sorted(remove_leftovers(tmp_path)) == sorted([dead, old])
    assert sorted(tmp_path.iterdir()) == sorted([mine, foreign])


def test_a_file_that_another_process_has_renamed_meanwhile_is_not_a_leftover(tmp_path: Path) -> None:
    assert not is_leftover(tmp_path / "result.json.another-host-1.part")


def test_a_temporary_name_is_that_of_this_process_and_is_renamed_away(tmp_path: Path) -> None:
    assert f"-{os.getpid()}." in temporary_path(tmp_path / "a").name
    write_atomically(tmp_path / "a", b"content")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def find_only_run(root: Path) -> Run:
    return next(runs_of(root, RECIPE))


@pytest.mark.parametrize("epoch", [1.0, 3.0])
def test_an_interrupted_run_keeps_its_last_epoch_and_resumes_to_the_same_bits(
    epoch: float, tmp_path: Path
) -> None:
    data = load_dataset(DataSpec("digits", per_class=5), tmp_path)

    def interrupt(progress: RunProgress) -> None:
        if progress.epoch > epoch:  # within the next epoch, or at its end
            raise KeyboardInterrupt

    cut = Execution(out=tmp_path / "cut", data_dir=tmp_path, dataset=data, device="cpu")
    with pytest.raises(KeyboardInterrupt):
        train(RECIPE, cut, interrupt)
    state, _ = find_only_run(cut.out).load(torch.device("cpu"))
    assert state is not None
    assert epoch <= state["epochs_done"] <= epoch + 1
    resumed = train(RECIPE, cut)
    whole = train(RECIPE, dataclasses.replace(cut, out=tmp_path / "whole"))
    assert (resumed["loss"], resumed["nll"]) == (whole["loss"], whole["nll"])
    runs = [find_only_run(tmp_path / name) for name in ("cut", "whole")]
    weights = [run.load(torch.device("cpu"))[0] for run in runs]
    assert weights[0] is not None
    assert weights[1] is not None
    assert all(torch.equal(value, weights[1]["model"][name]) for name, value in weights[0]["model"].items())


def count_begun(root: Path) -> int:
    """How many runs have logged an epoch."""
    return sum(path.stat().st_size > 0 for path in root.glob("runs/*/log.jsonl"))


def wait_until(is_true: Callable[[], bool], seconds: float = 100) -> None:
    limit = time.monotonic() + seconds
    while not is_true() and time.monotonic() < limit:
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("sent", "workers"),
    [(signal.SIGINT, "1"), (signal.SIGINT, "2"), (signal.SIGTERM, "2"), (signal.SIGHUP, "2")],
)
def test_a_signal_to_the_group_ends_a_comparison_quietly_with_checkpoints(
    sent: signal.Signals, workers: str, tmp_path: Path
) -> None:
    args = ["compare", "digits", "--per-class", "20", "--methods", "erm", "mixup", "--seeds", "1"]
    args += ["--epochs", "4000", "--device", "cpu", "--workers", workers]
    with started_command(args, tmp_path) as process:
        wait_until(lambda: count_begun(tmp_path) == int(workers))
        assert process.pid is not None
        os.killpg(process.pid, sent)  # as a terminal does: to the workers too
        process.join(timeout=60)
    errors = (tmp_path / "stderr").read_text()
    assert process.exitcode == 128 + sent, errors
    assert "Traceback" not in errors
    assert errors.splitlines()[-1] == "icmixup: interrupted; run the same command again to resume"
    assert len(list(tmp_path.glob("runs/*/checkpoint.pt"))) == int(workers)
    assert not list(tmp_path.glob("runs/*/*.part"))


def run_with_a_long_end(how: str, args: list[str], folder: Path) -> None:
    """`icmixup` that does not end its worker processes or write a checkpoint until there is a file `go`."""
    sweep.has_one_gpu = lambda device: how == "threads"
    for owner, name in ((Run, "save"), (BaseProcess, "terminate")):
        setattr(owner, name, delayed(getattr(owner, name), folder))
    forked.run_command(args, folder)


def delayed(function: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    def run(*args: object) -> None:
        if count_begun(folder):  # not in the trial that measures the speed
            (folder / "ending").touch()
            wait_until((folder / "go").exists)
        function(*args)

    return run


@pytest.mark.parametrize(("how", "workers"), [("train", 1), ("in turn", 1), ("threads", 2), ("processes", 2)])
def test_signals_after_the_first_do_not_interrupt_the_last_checkpoints(
    how: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked, "run_command", functools.partial(run_with_a_long_end, how))
    compared = ["--methods", "erm", "mixup", "--seeds", "1", "--workers", str(workers)]
    command, own = ("train", ["--method", "erm"]) if how == "train" else ("compare", compared)
    args = [command, "digits", "--per-class", "20", "--epochs", "4000", "--device", "cpu", *own]
    with started_command(args, tmp_path) as process:
        wait_until(lambda: count_begun(tmp_path) == workers)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGTERM)
        wait_until((tmp_path / "ending").exists)
        for sent in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGINT):
            os.kill(process.pid, sent)  # not to the workers, which would end by themselves
            time.sleep(0.1)  # or two signals could be one interrupt
        (tmp_path / "go").touch()
        process.join(timeout=60)
    errors = (tmp_path / "stderr").read_text()
    assert process.exitcode == 128 + signal.SIGTERM, errors
    assert "Traceback" not in errors
    assert len(list(tmp_path.glob("runs/*/checkpoint.pt"))) == workers
    assert not list(tmp_path.glob("runs/*/*.part"))


FIRST_WORKER = """
import sys
from pathlib import Path
from icmixup.lab.sweep.local import Worker
from icmixup.lab.training.execution import Execution
if __name__ == "__main__":
    worker = Worker(Execution(out=Path(sys.argv[1]), data_dir=Path(sys.argv[1])))
    lines = Path(f"/proc/{worker.process.pid}/status").read_text().splitlines()
    print(next(line.split()[1] for line in lines if line.startswith("SigBlk")))
    worker.process.kill()
    worker.stop()
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the signal mask from /proc")
def test_the_first_worker_of_a_process_never_sees_ctrl_c(tmp_path: Path) -> None:
    script = tmp_path / "first.py"  # in a new process: multiprocessing starts its resource tracker once
    script.write_text(FIRST_WORKER)
    words = [sys.executable, str(script), str(tmp_path)]
    mask = int(subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=True).stdout, 16)
    assert all(mask >> (number - 1) & 1 for number in (signal.SIGINT, signal.SIGHUP))
