"""A run's folder after every kind of accident: what is whole is used, what is not is refused and named."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import icmixup
from icmixup.lab.datasets.temporary import temporary_path
from icmixup.lab.training import run_folder as runs
from icmixup.lab.training.identity import Identity, run_key, settings_key
from icmixup.lab.training.recipe import Recipe
from icmixup.lab.training.run_folder import (
    Run,
    checkout_commit,
    open_run,
    provenance,
    read_checkpoint,
    read_commit,
    read_identity,
    write_atomically,
)

RECIPE = Recipe(dataset="digits", model="small-cnn", epochs=4)
CPU = torch.device("cpu")
IDENTITY = Identity("images", "network", "method", "1.0", "float32", "cpu")


def make_run(root: Path, saves: int = 2) -> Run:
    """A run with checkpoints of epochs 1, 2, ..., of which the last two are there."""
    run = open_run(root, RECIPE, IDENTITY)
    for epoch in range(1, saves + 1):
        run.save(make_state(epoch))
    return run


def make_state(epoch: int) -> dict[str, object]:
    return {"epochs_done": epoch, "weights": torch.full((100,), float(epoch)), "metrics": {"few": None}}


# Checkpoints


def test_the_newest_checkpoint_is_used_and_comes_back_as_it_was(tmp_path: Path) -> None:
    state, refused = make_run(tmp_path, saves=3).load(CPU)
    assert state is not None
    assert refused == {}
    assert state["epochs_done"] == 3
    assert torch.equal(state["weights"], torch.full((100,), 3.0))
    assert state["metrics"] == {"few": None}


def test_a_fresh_folder_has_no_checkpoint_and_holds_the_recipe(tmp_path: Path) -> None:
    run = open_run(tmp_path, RECIPE, IDENTITY)
    assert run.load(CPU) == (None, {})
    assert run.folder == tmp_path / f"{RECIPE.title}.{run_key(RECIPE, IDENTITY)}"
    assert json.loads((run.folder / "recipe.json").read_text()) == RECIPE.fields()
    assert read_identity(run.folder) == IDENTITY


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "truncated": lambda content, draw: content[: draw.randrange(len(content))],
    "a bit flipped": lambda content, draw: flip_bit(content, draw.randrange(8 * len(content))),
    "zeros from somewhere on": lambda content, draw: zero_from(content, draw.randrange(len(content) - 40)),
    "a byte too many": lambda content, draw: content + b"\0",
    "empty": lambda content, draw: b"",
    "another file": lambda content, draw: draw.randbytes(1000),
}


def flip_bit(content: bytes, place: int) -> bytes:
    changed = bytearray(content)
    changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


def zero_from(content: bytes, place: int) -> bytes:
    return content[:place] + bytes(len(content) - place)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_it_used(
    damage: str, tmp_path: Path
) -> None:
    run = make_run(tmp_path)
    newest, _ = run.checkpoints()
    content = newest.read_bytes()
    draw = random.Random(damage)
    for _ in range(25):
        newest.write_bytes(DAMAGES[damage](content, draw))
        state, refused = run.load(CPU)
        assert state is not None
        assert state["epochs_done"] == 1
        assert list(refused) == [newest]
        assert "checkpoint.pt is damaged or not a checkpoint of icmixup" in refused[newest]


def test_a_checkpoint_of_another_recipe_is_refused_with_both_keys(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    newest, _ = run.checkpoints()
    other = Run(tmp_path / "other", Recipe(seed=1))
    other.folder.mkdir()
    other.save(make_state(9))
    newest.write_bytes(other.checkpoints()[0].read_bytes())
    state, refused = run.load(CPU)
    assert state is not None
    assert state["epochs_done"] == 1
    assert settings_key(RECIPE) in refused[newest]
    assert settings_key(other.recipe) in refused[newest]


def test_with_both_checkpoints_damaged_the_run_starts_over_and_both_are_named(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for path in run.checkpoints():
        path.write_bytes(b"no checkpoint")
    state, refused = run.load(CPU)
    assert state is None
    assert set(refused) == set(run.checkpoints())


def test_a_refused_checkpoint_does_not_push_out_the_good_one(tmp_path: Path) -> None:
    """Else a kill between the two renames of the next save would leave nothing to go on from."""
    run = make_run(tmp_path)
    newest, previous = run.checkpoints()
    newest.write_bytes(b"no checkpoint")
    with pytest.warns(UserWarning, match="damaged or not a checkpoint"):
        run.set_aside(run.load(CPU)[1])
    assert newest.with_suffix(".refused").read_bytes() == b"no checkpoint"
    assert "damaged" in run.read_log()[-1]["refused"]
    run.save(make_state(2))
    newest.unlink()
    assert read_checkpoint(previous, RECIPE, CPU)["epochs_done"] == 1


class Sabotage:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("sabotaged",)


def test_a_checkpoint_cannot_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one with the right sum at its end: anyone can compute a sum."""
    monkeypatch.chdir(tmp_path)
    buffer = io.BytesIO()
    torch.save({"recipe": RECIPE.key, "weights": Sabotage()}, buffer)
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(buffer.getvalue() + hashlib.sha256(buffer.getvalue()).digest())
    with pytest.raises(ValueError, match="not a checkpoint of icmixup"):
        read_checkpoint(path, RECIPE, CPU)
    assert not (tmp_path / "sabotaged").exists()


# Forks for every moment at which it can be killed, and says what a reader finds after each.
KILLED_WHILE_SAVING = """
import json, os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import test_run_folder as test_runs
from icmixup.lab.training import run_folder as runs

def die_before(name, number):
    calls, real = iter(range(number)), getattr(os, name)
    def call(*args):
        if next(calls) == number - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)
    setattr(os, name, call)

found = {}
for name, number in (("fsync", 1), ("replace", 1), ("replace", 2), ("fsync", 2), ("open", 1), ("none", 1)):
    run = test_runs.make_run(Path(sys.argv[1]) / f"{name}{number}")
    if not (child := os.fork()):
        if name != "none":
            die_before(name, number)
        run.save(test_runs.make_state(3))
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    state, refused = run.load(test_runs.CPU)
    run.save(test_runs.make_state(4))
    again, _ = run.load(test_runs.CPU)
    found[f"{name} {number}"] = code, state["epochs_done"], len(refused), again["epochs_done"]
print(json.dumps(found))
"""


def test_killed_at_any_step_of_saving_a_good_checkpoint_is_found(tmp_path: Path) -> None:
    """Real kills: before the flush, before and between the renames, before the folder is flushed."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED_WHILE_SAVING, str(tmp_path), str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert json.loads(done.stdout) == {
        "fsync 1": [-9, 2, 0, 4],  # nothing renamed yet: the newest is the one before
        "replace 1": [-9, 2, 0, 4],
        "replace 2": [-9, 2, 0, 4],  # between the two: it lies where the previous one lay
        "fsync 2": [-9, 3, 0, 4],  # renamed: the new one counts
        "open 1": [-9, 3, 0, 4],
        "none 1": [0, 3, 0, 4],
    }


# The log


def test_a_log_line_torn_anywhere_is_dropped_and_the_lines_before_it_stay(tmp_path: Path) -> None:
    run = open_run(tmp_path, RECIPE, IDENTITY)
    for epoch in (1, 2, 3):
        run.log(epoch=epoch, loss=1 / epoch)
    path = run.folder / "log.jsonl"
    content = path.read_text()
    last = content.splitlines()[-1]
    for kept in range(1, len(last)):
        path.write_text(content[: -len(last) - 1] + last[:kept])
        run.cut_log(3)
        run.log(epoch=3, loss=0.5)
        assert [(row["epoch"], row["loss"]) for row in run.read_log()] == [(1, 1.0), (2, 0.5), (3, 0.5)]


def test_cutting_the_log_forgets_epochs_after_the_checkpoint(tmp_path: Path) -> None:
    run = open_run(tmp_path, RECIPE, IDENTITY)
    assert run.read_log() == []
    run.cut_log(0)
    for epoch in (1, 2, 3):
        run.log(epoch=epoch)
    run.cut_log(2)
    assert [row["epoch"] for row in run.read_log()] == [1, 2]


# Results and files


def test_a_result_is_there_once_the_run_is_finished_and_one_checkpoint_stays(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert run.result() is None
    row = {**RECIPE.fields(), "key": RECIPE.key, "accuracy": 12.5, "loss": 2.0, "few": None}
    assert run.finish(row) == row
    assert open_run(tmp_path, RECIPE, IDENTITY).result() == row
    assert [path.exists() for path in run.checkpoints()] == [True, False]


def test_a_full_disk_leaves_the_old_file_no_half_one_and_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_atomically(path, b"old")
    temporary_path(path).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as caught:
        write_atomically(path, b"new")
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]


def test_a_file_is_replaced_whole_and_the_old_one_kept_if_asked(tmp_path: Path) -> None:
    path, kept = tmp_path / "a", tmp_path / "b"
    write_atomically(path, b"one")
    write_atomically(path, b"two", keep=kept)
    assert (path.read_bytes(), kept.read_bytes()) == (b"two", b"one")
    temporary_path(path).write_bytes(b"left by a crash, and longer than what follows")
    write_atomically(path, b"three")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"a": b"three", "b": b"one"}


def test_a_folder_in_the_place_of_a_file_is_named_and_nothing_is_left_behind(tmp_path: Path) -> None:
    (tmp_path / "found.csv").mkdir()
    with pytest.raises(ValueError, match=r"found.csv is a folder, and cannot be written as a file"):
        write_atomically(tmp_path / "found.csv", b"rows")
    assert [path.name for path in tmp_path.iterdir()] == ["found.csv"]


def test_a_row_says_where_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ICMIXUP_COMMIT", "abc1234")
    row = provenance(CPU)
    assert (row["commit"], row["torch"]) == ("abc1234", torch.__version__)
    assert row["device"]


def test_a_commit_has_a_plus_once_anything_but_results_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ICMIXUP_COMMIT", raising=False)

    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *who, *words], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    code, rows = tmp_path / "lab" / "runs.py", tmp_path / "results" / "runs.csv"
    for file in (code, rows):
        file.parent.mkdir()
        file.write_text("one")
    monkeypatch.setattr(runs, "__file__", str(code))

    def commit_now() -> str:
        checkout_commit.cache_clear()
        return read_commit()

    git("init")
    assert commit_now() == f"version {version('icmixup')}"  # a repository, but not ours
    git("add", ".")
    git("commit", "-m", "all")
    head = git("rev-parse", "--short", "HEAD")
    rows.write_text("one and two")
    assert commit_now() == head
    code.write_text("two")
    assert read_commit() == head  # of the code that this process has imported
    assert commit_now() == f"{head}+"
    checkout_commit.cache_clear()


def test_without_git_and_package_metadata_the_commit_is_unknown(tmp_path: Path) -> None:
    """A copy of the source, as on a machine to which only the files were copied."""
    source = Path(icmixup.__file__).parent
    shutil.copytree(source, tmp_path / "icmixup", ignore=shutil.ignore_patterns("__pycache__"))
    # Without site-packages there are no dependencies either, so their folders stay, and metadata is hidden.
    code = (
        "import importlib.metadata as m, torch\n"
        "real = m.Distribution.from_name.__func__\n"
        "def absent(cls, name):\n"
        "    if name == 'icmixup': raise m.PackageNotFoundError(name)\n"
        "    return real(cls, name)\n"
        "m.Distribution.from_name = classmethod(absent)\n"
        "from icmixup.lab.training.run_folder import __file__ as where, provenance\n"
        "from icmixup.lab.training.identity import package_version\n"
        "from icmixup.lab.cli import main\n"
        "print(where); print(provenance(torch.device('cpu'))['commit'], package_version())\n"
        "main(['--version'])"
    )
    environment = {"PYTHONPATH": str(tmp_path), "PATH": "/nowhere"}  # no git either
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    where, versions, shown = done.stdout.splitlines()
    assert where.startswith(str(tmp_path))
    assert versions == "unknown unknown"
    assert shown == "icmixup, version unknown"
