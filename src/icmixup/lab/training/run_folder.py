"""A run's folder: its recipe and identity, log, checkpoints and result.

recipe.json, identity.json, log.jsonl and checkpoint.pt; at the end also predictions.npz and result.json. They
are written to a temporary name, flushed and renamed, so a reader never sees a partial file, even after a
kill.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import io
import json
import os
import platform
import subprocess
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from icmixup.lab.datasets.temporary import remove_leftovers, temporary_path
from icmixup.lab.training.identity import (
    Identity,
    describe_difference,
    is_same_experiment,
    package_version,
    run_key,
    settings_key,
)
from icmixup.lab.training.ranks import rank
from icmixup.lab.training.recipe import Recipe
from icmixup.lab.training.stored import read_json, read_lines, read_recipe_file, read_result

Row = dict[str, Any]  # a finished run: recipe, metrics, time and provenance, as result.json stores them
Checkpoint = dict[str, Any]
STATE = {"recipe", "epochs_done"}  # of what a checkpoint has at least
TRIALS_FOLDER = "trials"  # in the folder of all runs: trial runs of --tune
FEATURES_FOLDER = "features"  # in the folder of all runs: features of --train head
DIGEST = 32  # bytes of the SHA-256 at the end of a checkpoint


@dataclass(frozen=True)
class Run:
    """A recipe, the folder it is trained in, and its identity; None for runs of earlier versions."""

    folder: Path
    recipe: Recipe
    identity: Identity | None = None

    @property
    def key(self) -> str:
        """The end of the folder's name, different for every run."""
        return self.folder.name.rpartition(".")[2]

    def result(self) -> Row | None:
        """The row of a finished run, or None."""
        row = read_result(self.folder / "result.json", self.recipe)
        # The images may have been at another path when the run was trained.
        return None if row is None else row | {"key": self.recipe.key, "dataset": self.recipe.dataset}

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
        """The intact lines of the log; a crash can cut a line short."""
        return read_lines(self.folder / "log.jsonl")

    def cut_log(self, epochs_done: int) -> None:
        """Drop lines logged after the checkpoint to resume from: they will be logged again."""
        kept = [json.dumps(row) + "\n" for row in self.read_log() if row["epoch"] <= epochs_done]
        write_atomically(self.folder / "log.jsonl", "".join(kept).encode())

    def save(self, state: Checkpoint) -> None:
        """Write a checkpoint; the previous one is kept as checkpoint.previous.pt."""
        newest, previous = self.checkpoints()
        buffer = io.BytesIO()
        identity = None if self.identity is None else self.identity._asdict()
        torch.save({**state, "recipe": settings_key(self.recipe), "identity": identity}, buffer)
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
                return read_checkpoint(path, self.recipe, device, self.identity), rejected
            except ValueError as error:
                rejected[path] = str(error)
        return None, rejected

    def set_aside(self, rejected: dict[Path, str]) -> None:
        """Rename rejected checkpoints and warn; otherwise the next one would replace the valid one."""
        for path, reason in rejected.items():
            os.replace(path, path.with_suffix(".refused"))
            warnings.warn(reason, stacklevel=2)
            self.log(epoch=0, refused=reason)

    def checkpoints(self) -> tuple[Path, Path]:
        return self.folder / "checkpoint.pt", self.folder / "checkpoint.previous.pt"


def open_run(root: Path, recipe: Recipe, identity: Identity, *, reuse: bool = False) -> Run:
    """The run of a recipe under `root`; its folder is created if it does not exist."""
    run = locate_run(root, recipe, identity, reuse=reuse)
    if rank() == 0:
        run.folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(run.folder)
    if rank() == 0 and not (run.folder / "identity.json").exists():
        write_atomically(run.folder / "recipe.json", json.dumps(recipe.fields(), indent=1).encode())
        write_atomically(run.folder / "identity.json", json.dumps(identity._asdict(), indent=1).encode())
    return run


def locate_run(root: Path, recipe: Recipe, identity: Identity, *, reuse: bool = False) -> Run:
    """Where a run is or will be: in the folder of its recipe and identity.

    Args:
        reuse: if that folder does not exist, take a run of another version, device or precision, one that is
            finished if there is one.
    """
    run = Run(root / f"{recipe.title}.{run_key(recipe, identity)}", recipe, identity)
    if reuse and not run.folder.exists():
        found = [other for other in other_runs(run) if is_same_experiment(other.identity, identity)]
        return min(found, key=lambda other: other.result() is None, default=run)
    return run


def runs_of(root: Path, recipe: Recipe) -> Iterator[Run]:
    """All runs of a recipe under `root`, of any identity, wherever its images were."""
    for path in sorted(root.glob(f"{glob.escape(recipe.title)}.*/recipe.json")):
        with contextlib.suppress(ValueError, TypeError):  # damaged, or a recipe of another version
            found = read_recipe_file(path)
            if replace(found, dataset=recipe.dataset) == recipe:
                yield Run(path.parent, recipe, read_identity(path.parent))


def other_runs(run: Run) -> list[Run]:
    """Runs of the same recipe, but of another identity."""
    return [other for other in runs_of(run.folder.parent, run.recipe) if other.folder != run.folder]


def read_identity(folder: Path) -> Identity | None:
    """The identity of the run in a folder; None if it was trained before runs had one."""
    path = folder / "identity.json"
    if not path.exists():
        return None
    fields = read_json(path)
    if not isinstance(fields, dict) or fields.keys() != set(Identity._fields):
        raise ValueError(f"{path} is not the identity of a run: remove it, or the folder")
    return Identity(**fields)


def read_checkpoint(
    path: Path, recipe: Recipe, device: torch.device, identity: Identity | None = None
) -> Checkpoint:
    """An intact checkpoint of this recipe and identity; a ValueError says what another file is."""
    content = path.read_bytes()
    body, digest = content[:-DIGEST], content[-DIGEST:]
    foreign = f"{path} is damaged or not a checkpoint of icmixup; it is renamed and not used"
    if hashlib.sha256(body).digest() != digest:
        raise ValueError(foreign)
    try:
        state: Checkpoint = torch.load(io.BytesIO(body), map_location=device, weights_only=True)
    except Exception as error:  # intact, but contains more than weights, or is not a pickle at all
        raise ValueError(foreign) from error
    if not isinstance(state, dict) or not state.keys() >= STATE or type(state["epochs_done"]) is not int:
        raise ValueError(foreign)
    # Checkpoints of earlier versions have the key of the whole recipe.
    if state.get("recipe") not in (settings_key(recipe), recipe.key):
        raise ValueError(
            f"{path} belongs to recipe {state.get('recipe')}, not {settings_key(recipe)}; "
            "it is renamed and not used"
        )
    if identity is not None and state.get("identity") != identity._asdict():
        stored = state.get("identity")
        reason = describe_difference(None if stored is None else Identity(**stored), identity)
        raise ValueError(f"{path} belongs to another run: {reason}; it is renamed and not used")
    return state


def write_atomically(path: Path, content: bytes, keep: Path | None = None) -> None:
    """Write to a temporary file, flush it to disk, rename it; an existing file is moved to `keep`."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder, and cannot be written as a file; use another name")
    beside = temporary_path(path)
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
    given = os.environ.get("ICMIXUP_COMMIT")
    return checkout_commit() if given is None else given


@functools.cache  # what a process runs is what it imported, whatever happens to the checkout afterwards
def checkout_commit() -> str:
    try:
        ask_git("ls-files", "--error-unmatch", Path(__file__).name)  # otherwise it is another repository
        changed = ask_git("status", "--porcelain", "--untracked-files=no", ":/", ":(top,exclude)results")
        return ask_git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        found = package_version()
        return found if found == "unknown" else f"version {found}"


def ask_git(*words: str) -> str:
    git = ["git", "-C", str(Path(__file__).parent), *words]
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
