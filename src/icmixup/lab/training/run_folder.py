"""A run's folder: recipe.json, log.jsonl, checkpoint.pt and, at the end, result.json.

Everything is written beside, flushed and renamed, so that a reader never meets half a file, whenever we are
killed.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import platform
import subprocess
import warnings
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from icmixup.lab.training.ranks import rank
from icmixup.lab.training.recipe import Recipe

State = dict[str, Any]
Row = dict[str, Any]  # the result of a run: recipe, metrics and provenance
DIGEST = 32  # bytes of the SHA-256 at the end of a checkpoint


@dataclass(frozen=True)
class Run:
    """A recipe, and the folder in which it is carried out."""

    folder: Path
    recipe: Recipe

    def result(self) -> State | None:
        """The row of a finished run, or None."""
        path = self.folder / "result.json"
        return json.loads(path.read_text()) if path.exists() else None

    def finish(self, row: State) -> State:
        """Write the row; a finished run keeps its newest checkpoint alone."""
        write_whole(self.folder / "result.json", json.dumps(row, indent=1).encode())
        self.checkpoints()[1].unlink(missing_ok=True)
        return row

    def log(self, **values: object) -> None:
        """Append one line to log.jsonl."""
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps(values) + "\n")
            file.flush()

    def read_log(self) -> list[State]:
        """The lines of the log; a line torn by a crash ends it."""
        path = self.folder / "log.jsonl"
        rows: list[State] = []
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return rows

    def cut_log(self, epochs_done: int) -> None:
        """Forget what was logged after the checkpoint that we go on from: it will be logged again."""
        kept = [json.dumps(row) + "\n" for row in self.read_log() if row["epoch"] <= epochs_done]
        write_whole(self.folder / "log.jsonl", "".join(kept).encode())

    def save(self, state: State) -> None:
        """Write a checkpoint; the one before it stays as checkpoint.previous.pt."""
        newest, previous = self.checkpoints()
        buffer = io.BytesIO()
        torch.save({**state, "recipe": self.recipe.key}, buffer)
        content = buffer.getvalue()
        write_whole(
            newest, content + hashlib.sha256(content).digest(), keep=previous if newest.exists() else None
        )

    def load(self, device: torch.device) -> tuple[State | None, dict[Path, str]]:
        """The newest good checkpoint, if there is one, and why others were refused."""
        refused: dict[Path, str] = {}
        for path in self.checkpoints():
            if not path.exists():
                continue
            try:
                return read_checkpoint(path, self.recipe, device), refused
            except ValueError as error:
                refused[path] = str(error)
        return None, refused

    def set_aside(self, refused: dict[Path, str]) -> None:
        """Rename what was refused and say why: the next checkpoint must not push out the good one for it."""
        for path, reason in refused.items():
            os.replace(path, path.with_suffix(".refused"))
            warnings.warn(reason, stacklevel=2)
            self.log(epoch=0, refused=reason)

    def checkpoints(self) -> tuple[Path, Path]:
        return self.folder / "checkpoint.pt", self.folder / "checkpoint.previous.pt"


def open_run(root: Path, recipe: Recipe) -> Run:
    """The folder of a recipe under `root`, made if it is not there."""
    run = Run(root / recipe.name, recipe)
    if rank() == 0:
        run.folder.mkdir(parents=True, exist_ok=True)
        write_whole(run.folder / "recipe.json", json.dumps(recipe.fields(), indent=1).encode())
    return run


def read_checkpoint(path: Path, recipe: Recipe, device: torch.device) -> State:
    """A checkpoint of this very recipe, whole to the last byte; a ValueError says what else it is."""
    content = path.read_bytes()
    body, digest = content[:-DIGEST], content[-DIGEST:]
    foreign = f"{path} is torn or not a checkpoint of ours; it is set aside and not used"
    if hashlib.sha256(body).digest() != digest:
        raise ValueError(foreign)
    try:
        state: State = torch.load(io.BytesIO(body), map_location=device, weights_only=True)
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:  # whole, but holds more than weights
        raise ValueError(foreign) from error
    if state.get("recipe") != recipe.key:
        raise ValueError(
            f"{path} is of recipe {state.get('recipe')}, not of {recipe.key}; it is set aside and not used"
        )
    return state


def write_whole(path: Path, content: bytes, keep: Path | None = None) -> None:
    """Write beside, flush to the disk, rename; `keep` is where the file that stood there goes."""
    beside = path.with_name(path.name + ".part")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # on a full disk half a file would only take up more room
        beside.unlink(missing_ok=True)
        error.filename = str(path)
        raise
    if keep is not None:
        os.replace(path, keep)
    os.replace(beside, path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def provenance(device: torch.device) -> State:
    """Where and with what a number was made: part of every row."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else processor_name(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "commit": read_commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def processor_name() -> str:
    """The CPU by its maker's name where Linux knows it, else by its architecture."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()


def read_commit() -> str:
    """The commit we run from, with a + if files other than results have changed since.

    ICMIXUP_COMMIT says it where git does not; an installed package has its version.
    """
    if "ICMIXUP_COMMIT" in os.environ:
        return os.environ["ICMIXUP_COMMIT"]
    try:
        ask_git("ls-files", "--error-unmatch", Path(__file__).name)  # else it is somebody else's repository
        changed = ask_git("status", "--porcelain", "--untracked-files=no", ":/", ":(top,exclude)results")
        return ask_git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return f"version {version('icmixup')}"


def ask_git(*words: str) -> str:
    git = ["git", "-C", str(Path(__file__).parent), *words]
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
