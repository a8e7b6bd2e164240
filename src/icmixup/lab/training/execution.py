"""Execution: where and how runs happen, made once and passed on as one object."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from icmixup.lab.datasets import Dataset
    from icmixup.lab.training.definitions import Definitions

Engine = Literal["local", "ray"]
ENGINES = get_args(Engine)


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Where and how runs happen. None of it changes what a run computes, apart from the order of sums."""

    out: Path
    """Folder of all run folders."""
    data_dir: Path
    """Folder of datasets."""
    device: str | None = None
    """cpu, cuda or cuda:1; a GPU if there is one by default."""
    workers: int | None = None
    """Concurrent runs; 1 trains one after the other in this process. By default one per GPU, or what cores
    and memory allow. On Ray: how many share a GPU, or a node's cores where there is no GPU."""
    engine: Engine = "local"
    address: str | None = None
    """Address of a Ray cluster, "auto" for the one this machine belongs to; None starts one here."""
    trackers: tuple[str, ...] = ()
    """"tensorboard", "wandb", or both."""
    checkpoint_seconds: float = 60.0
    """Minimum time between two checkpoints."""
    reuse: bool = False
    """Take runs of another version of icmixup, device or precision, if all else agrees."""
    dataset: Dataset | None = field(default=None, repr=False, compare=False)
    """Images of all runs, if already loaded; other processes load them again."""
    definitions: Definitions | None = field(default=None, repr=False, compare=False)
    """Networks and methods given in Python; they must be registered in this process."""
    validation: int | None = None
    """For tuning: test on this part of the training images, and train on the others (validation_dataset); if
    `dataset` is given, it must be that part already."""
    # Set for each worker by the sweep.
    packed: bytes | None = field(default=None, repr=False)
    """Definitions and dataset for another process, as a pickle."""
    fingerprint: str | None = None
    """Fingerprint of the images that were loaded before; a worker that loads others raises an error."""
    threads: int | None = None
    """Threads of torch for one run; torch's own choice by default."""
    concurrent: int = 1
    """How many runs share the GPU or the cores; recorded, since a row's minutes depend on it."""
    trial_seconds: float | None = None
    """End every run after this time of training, without a result: to measure speed."""

    @property
    def loaded(self) -> Dataset:
        """`dataset`, where it is known to be loaded."""
        assert self.dataset is not None
        return self.dataset
