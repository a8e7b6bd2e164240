"""Killed, damaged, out of disk: the same command resumes and ends with the numbers of an undisturbed run."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from icmixup.lab.training.execution import Execution
from icmixup.lab.training.loop import train
from icmixup.lab.training.recipe import Recipe
from icmixup.lab.training.run_folder import runs_of

RECIPE = Recipe(
    dataset="digits",
    model="small-cnn",
    per_class=30,
    epochs=12,
    batch_size=64,
    lr=0.05,
    ema=0.9,
    padding=1,
    flip=False,
    eval_every=5,
)
CPU = torch.device("cpu")
NOT_OF_THE_RECIPE = ("minutes", "images_per_second", "memory_mb", "date", "commit")

# One process imports torch and forks a child for every session, so that a kill costs no new import.
SESSIONS = """
import json, os, random, resource, signal, sys, time
from dataclasses import replace
from functools import partial
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from icmixup.lab.training.data import load_recipe_data
from icmixup.lab.training.execution import Execution
from test_resume import CPU, RECIPE, runs_of, train

root = Path(sys.argv[1])
data = load_recipe_data(RECIPE, root)
def run(recipe, out, on_progress=None):
    execution = Execution(out=out, data_dir=root, dataset=data, device="cpu", checkpoint_seconds=0)
    return train(recipe, execution, on_progress)

run(replace(RECIPE, epochs=1), root / "warm-up")  # imports what is imported late

def sit(name, *, seconds=None, last_epoch=None, file_limit=None):
    if not (child := os.fork()):
        if file_limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
        stop = lambda now: os._exit(3) if last_epoch is not None and now.epoch > last_epoch else None
        try:
            run(RECIPE, root / name, on_progress=stop)
        except OSError as error:
            os._exit(error.errno)
        os._exit(0)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, *look(name)

def look(name):
    for run in runs_of(root / name, RECIPE):
        state, refused = run.load(CPU)
        return 0 if state is None else state["epochs_done"], len(refused)
    return 0, 0

started = time.monotonic()
found = {"whole": [sit("whole")]}
took = time.monotonic() - started
draw = random.Random(0)
found["killed"] = [sit("killed", seconds=draw.uniform(0.05, 0.3) * took) for _ in range(6)] + [sit("killed")]
found["full"] = [sit("full", last_epoch=4), sit("full", file_limit=30_000), sit("full")]
found["torn"] = [sit("torn", last_epoch=4)]
newest = next(runs_of(root / "torn", RECIPE)).folder / "checkpoint.pt"
newest.write_bytes(newest.read_bytes()[:-1])
found["torn"] += [(0, *look("torn")), sit("torn")]
print(json.dumps(found))
"""


class Sessions(NamedTuple):
    root: Path  # of the folders of four runs
    found: dict[str, list[list[int]]]  # of each session: exit code, epochs saved, checkpoints refused
    stderr: str


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Sessions:
    root = tmp_path_factory.mktemp("sessions")
    done = subprocess.run(
        [sys.executable, "-c", SESSIONS, str(root), str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return Sessions(root, json.loads(done.stdout), done.stderr)


def outcome(
    root: Path, recipe: Recipe = RECIPE
) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """Row and log without what a clock decides, and the checkpoint."""
    (run,) = runs_of(root, recipe)
    row = run.result()
    state, refused = run.load(CPU)
    assert row is not None
    assert state is not None
    assert refused == {}
    lines = [{name: line[name] for name in line if name != "seconds"} for line in run.read_log()]
    return {name: row[name] for name in row if name not in NOT_OF_THE_RECIPE}, lines, state


def assert_same_weights(one: dict[str, Any], other: dict[str, Any]) -> None:
    for part in ("model", "average"):
        assert all(torch.equal(one[part][name], weight) for name, weight in other[part].items())


def test_killed_at_random_moments_a_run_ends_with_bit_identical_numbers(sessions: Sessions) -> None:
    root, found, _ = sessions
    codes = [code for code, _, _ in found["killed"]]
    assert codes[:2] == [-9, -9]  # on a machine of uneven speed, later ones may come after the end
    assert codes[-1] == 0
    saved = [epochs for _, epochs, _ in found["killed"]]
    assert saved == sorted(saved)
    assert any(0 < epochs < RECIPE.epochs for epochs in saved)  # some kills were amid the run
    assert all(refused == 0 for _, _, refused in found["killed"])
    whole, killed = outcome(root / "whole"), outcome(root / "killed")
    assert killed[0] == whole[0]
    assert killed[1] == whole[1]
    assert [line["epoch"] for line in whole[1]] == list(range(1, RECIPE.epochs + 1))
    assert_same_weights(killed[2], whole[2])


def test_on_a_full_disk_the_last_checkpoint_stays_and_the_run_resumes_from_it(sessions: Sessions) -> None:
    """A limit on the size of files stands for the full disk: the kernel writes no more, not even for root."""
    root, found, _ = sessions
    (stopped, saved, _), (failed, still_saved, refused), (ended, _, _) = found["full"]
    assert (stopped, saved) == (3, 4)
    assert (failed, still_saved, refused) == (errno.EFBIG, 4, 0)
    assert ended == 0
    assert not list((root / "full").glob("*/*.part"))
    whole, full = outcome(root / "whole"), outcome(root / "full")
    assert full[:2] == whole[:2]
    assert_same_weights(full[2], whole[2])


def test_two_processes_give_the_same_numbers(sessions: Sessions, tmp_path: Path) -> None:
    train(RECIPE, Execution(out=tmp_path, data_dir=tmp_path, device="cpu"))
    here, there = outcome(tmp_path), outcome(sessions.root / "whole")
    assert here[:2] == there[:2]
    assert_same_weights(here[2], there[2])


def test_a_damaged_checkpoint_is_reported_and_the_previous_one_is_used(sessions: Sessions) -> None:
    (_, saved, _), (_, saved_before, refused), (ended, _, _) = sessions.found["torn"]
    assert (saved, saved_before, refused, ended) == (4, 3, 1, 0)
    assert "checkpoint.pt is damaged or not a checkpoint of icmixup" in sessions.stderr
    row, lines, state = outcome(sessions.root / "torn")
    whole = outcome(sessions.root / "whole")
    assert row == whole[0]
    assert [line for line in lines if "loss" in line] == whole[1]
    assert ["checkpoint.pt is damaged" in line["refused"] for line in lines if "loss" not in line] == [True]
    assert_same_weights(state, whole[2])
