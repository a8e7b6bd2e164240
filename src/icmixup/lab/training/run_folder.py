"""A run's folder: recipe.json, log.jsonl, checkpoint.pt and, at the end, result.json.

Files are written to a temporary name, flushed and renamed, so a reader never sees a partial file, even after
a kill.
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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from icmixup.lab.training.ranks import rank
from icmixup.lab.training.recipe import Recipe

Row = dict[str, Any]  # a finished run: recipe, metrics, time and provenance, as result.json stores them
Checkpoint = dict[str, Any]
DIGEST = 32  # bytes of the SHA-256 at the end of a checkpoint


@dataclass(frozen=True)
class Run:
    """A recipe, and the folder it is trained in."""

    folder: Path
    recipe: Recipe

    def result(self) -> Row | None:
        """The row of a finished run, or None."""
        path = self.folder / "result.json"
        return json.loads(path.read_text()) if path.exists() else None

    def finish(self, row: Row) -> Row:
        """Write the row; a finished run keeps only its newest checkpoint."""
        write_atomically(self.folder / "result.json", json.dumps(row, indent=1).encode())
        self.checkpoints()[1].unlink(missing_ok=True)
        return row

    def log(self, **values: object) -> None:
        """Append one line to log.jsonl."""
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps(values) + "\n")
            file.flush()

    def read_log(self) -> list[Row]:
        """The lines of the log, up to a line cut short by a crash."""
        path = self.folder / "log.jsonl"
        rows: list[Row] = []
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return rows

    def cut_log(self, epochs_done: int) -> None:
        """Drop lines logged after the checkpoint to resume from: they will be logged again."""
        kept = [json.dumps(row) + "\n" for row in self.read_log() if row["epoch"] <= epochs_done]
        write_atomically(self.folder / "log.jsonl", "".join(kept).encode())

    def save(self, state: Checkpoint) -> None:
        """Write a checkpoint; the previous one is kept as checkpoint.previous.pt."""
        newest, previous = self.checkpoints()
        buffer = io.BytesIO()
        torch.save({**state, "recipe": self.recipe.key}, buffer)
        content = buffer.getvalue()
        write_atomically(
            newest, content + hashlib.sha256(content).digest(), keep=previous if newest.exists() else None
        )

    def load(self, device: torch.device) -> tuple[Checkpoint | None, dict[Path, str]]:
        """The newest valid checkpoint, if there is one, and why others were rejected."""
        rejected: dict[Path, str] = {}
        for path in self.checkpoints():
            if not path.exists():
                continue
            try:
                return read_checkpoint(path, self.recipe, device), rejected
            except ValueError as error:
                rejected[path] = str(error)
        return None, rejected

    def set_aside(self, rejected: dict[Path, str]) -> None:
        """Rename rejected checkpoints and warn: the next checkpoint must not replace the valid one for
        them."""
        for path, reason in rejected.items():
            os.replace(path, path.with_suffix(".refused"))
            warnings.warn(reason, stacklevel=2)
            self.log(epoch=0, refused=reason)

    def checkpoints(self) -> tuple[Path, Path]:
        return self.folder / "checkpoint.pt", self.folder / "checkpoint.previous.pt"


def open_run(root: Path, recipe: Recipe) -> Run:
    """The folder of a recipe under `root`, created if it does not exist."""
    run = Run(root / recipe.name, recipe)
    if rank() == 0:
        run.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(run.folder / "recipe.json", json.dumps(recipe.fields(), indent=1).encode())
    return run


def read_checkpoint(path: Path, recipe: Recipe, device: torch.device) -> Checkpoint:
    """An intact checkpoint of this recipe; anything else raises a ValueError that says what it is."""
    content = path.read_bytes()
    body, digest = content[:-DIGEST], content[-DIGEST:]
    foreign = f"{path} is damaged or not a checkpoint of icmixup; it is renamed and not used"
    if hashlib.sha256(body).digest() != digest:
        raise ValueError(foreign)
    try:
        state: Checkpoint = torch.load(io.BytesIO(body), map_location=device, weights_only=True)
    except (
        pickle.UnpicklingError,
        EOFError,
        RuntimeError,
    ) as error:  # intact, but contains more than weights
        raise ValueError(foreign) from error
    if state.get("recipe") != recipe.key:
        raise ValueError(
            f"{path} belongs to recipe {state.get('recipe')}, not {recipe.key}; it is renamed and not used"
        )
    return state


def write_atomically(path: Path, content: bytes, keep: Path | None = None) -> None:
    """Write to a temporary file, flush it to disk, rename it; an existing file is moved to `keep` if
    given."""
    beside = path.with_name(path.name + ".part")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # on a full disk a partial file would only take up more space
        beside.unlink(missing_ok=True)
        error.filename = str(path)
        raise
    if keep is not None:
        os.replace(path, keep)
    os.replace(beside, path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def provenance(device: torch.device) -> Row:
    """Device, versions, commit and date: part of every row."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else processor_name(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "commit": read_commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def processor_name() -> str:
    """The CPU's model name where Linux provides it, otherwise its architecture."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()


def read_commit() -> str:
    """The commit of this checkout, with a + if files other than results have changed since.

    ICMIXUP_COMMIT overrides it. An installed package reports its version, and "unknown" without metadata.
    """
    if "ICMIXUP_COMMIT" in os.environ:
        return os.environ["ICMIXUP_COMMIT"]
    try:
        ask_git("ls-files", "--error-unmatch", Path(__file__).name)  # otherwise it is another repository
        changed = ask_git("status", "--porcelain", "--untracked-files=no", ":/", ":(top,exclude)results")
        return ask_git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        with contextlib.suppress(PackageNotFoundError):
            return f"version {version('icmixup')}"
        return "unknown"


def ask_git(*words: str) -> str:
    git = ["git", "-C", str(Path(__file__).parent), *words]
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
