"""Distributed training: torchrun starts the processes, each is a rank, and rank 0 prints and writes."""

from __future__ import annotations

import inspect
import itertools
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

Value = TypeVar("Value")


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def pick_device(name: str | None = None) -> torch.device:
    """The requested device, or this rank's GPU, or the CPU."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    found = re.fullmatch(r"cpu|cuda(?::(\d{1,4}))?", name)
    if found is None:
        reason = "; mps has no float64, which the draws need" if name.startswith("mps") else ""
        raise ValueError(f"unknown device {name!r}; use cpu, cuda or cuda:1{reason}")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} is not available: torch finds no GPU; use --device cpu")
    index = int(os.environ.get("LOCAL_RANK", "0")) if device.index is None else device.index
    if device.type == "cuda" and index >= torch.cuda.device_count():
        raise ValueError(
            f"device 'cuda:{index}' does not exist: torch finds {torch.cuda.device_count()} GPU(s), "
            "numbered from cuda:0"
        )
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    return device


@contextmanager
def join_ranks(device: torch.device) -> Iterator[None]:
    """Join the process group of the ranks that torchrun started; a no-op for a single process."""
    if world_size() == 1 or dist.is_initialized():
        yield
        return
    store = check_in()
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank(), world_size=world_size())
    try:
        yield
    finally:
        dist.destroy_process_group()


class RankError(ValueError):
    """The ranks cannot train together: one failed, or they were started differently. Raised on every rank."""


CHECK_IN_SECONDS = 600.0  # for ranks that are still reading their data
ROUNDS = itertools.count()  # of check-ins, the same on every rank
CHECKED_IN = threading.Event()  # an error is reported to other ranks only before they check in


def check_in(error: str = "", seconds: float = CHECK_IN_SECONDS) -> Any:
    """Meet the other ranks before training; an error of any of them is raised on all.

    The store needs no backend, so that a rank that failed before it had a device can still say so.
    """
    CHECKED_IN.set()
    store, own, size = next(rendezvous("env://"))
    prefix = f"icmixup/{next(ROUNDS)}"  # torchrun's store outlives a process group
    store.set_timeout(timedelta(seconds=seconds))
    store.set(f"{prefix}/{own}", error or "ready")
    try:
        states = [store.get(f"{prefix}/{number}").decode() for number in range(size)]
        store.add(f"{prefix}/read", 1)
        if own == 0:
            wait_for_readers(store, f"{prefix}/read", size)
    except RuntimeError as lost:  # torch raises a subclass on a timeout
        raise RankError(f"not all of the {size} ranks started within {seconds:.0f} s") from lost
    failed = [f"rank {number}: {state}" for number, state in enumerate(states) if state != "ready"]
    if failed and not error:
        raise RankError(f"{'; '.join(failed)}")
    store.set_timeout(dist.default_pg_timeout)
    return PrefixStore(f"{prefix}/group", store)


def wait_for_readers(store: Any, key: str, size: int) -> None:
    """The first rank may be the server of the store: it must not leave before the others have read.

    The others do not wait: the server may be gone as soon as they have all read.
    """
    limit = time.monotonic() + 5
    while store.add(key, 0) < size and time.monotonic() < limit:
        time.sleep(0.01)


def report_error(message: str) -> None:
    """Tell the other ranks about an error that occurred before training: they would wait for this one."""
    if world_size() > 1 and not CHECKED_IN.is_set():
        with suppress(RankError, RuntimeError, ValueError, KeyError):
            check_in(message, seconds=20)


@contextmanager
def compare_notes() -> Iterator[dict[str, object]]:
    """Collect notes on what this rank is about to train, and compare them with those of the other ranks.

    An error in the block, or a note that differs, is raised on every rank; without this, ranks that were
    started differently train a mixture of two runs, or wait for each other for ever.
    """
    notes: dict[str, object] = {}
    error: Exception | None = None
    try:
        yield notes
    except Exception as raised:
        error = raised
    if world_size() > 1:
        found: list[Any] = [None] * world_size()
        dist.all_gather_object(found, (notes, "" if error is None else f"{error}"))
        if error is None:
            check_notes([each for each, _ in found], [text for _, text in found])
    if error is not None:
        raise error


def check_notes(notes: list[dict[str, object]], errors: list[str]) -> None:
    """Raise a RankError that names the first ranks that failed or differ."""
    failed = [f"rank {number}: {text}" for number, text in enumerate(errors) if text]
    if failed:
        raise RankError("; ".join(failed))
    for number, other in enumerate(notes):
        differ = [
            f"{name} is {notes[0].get(name)!r} on rank 0 and {other.get(name)!r} on rank {number}"
            for name in {**notes[0], **other}
            if notes[0].get(name) != other.get(name)
        ]
        if differ:
            raise RankError(
                f"the ranks would not train the same run: {'; '.join(differ[:3])}; start every rank with the "
                "same flags, the same data, and one --out folder that all of them see"
            )


def wait_for_all() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.barrier()


def average_over_ranks(values: Tensor) -> Tensor:
    """The mean over ranks; for a single process, the values themselves."""
    if world_size() == 1:
        return values
    total = values.clone()
    dist.all_reduce(total)
    return total / world_size()


def broadcast_from_first(value: Value) -> Value:
    """The value of rank 0, on every rank; for a single process, the value itself."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def wrap_for_ranks(model: nn.Module) -> nn.Module:
    """The model with gradients averaged over ranks; for a single process, the model itself.

    Buffers are not synchronised: those of rank 0 are evaluated and saved, and training reads none. Sending
    them before each of two forward passes breaks the backward pass in torch 2.6 and later (pytorch #175024).
    """
    if world_size() == 1:
        return model
    # The option was renamed in torch 2.13, and its old name warns.
    known = inspect.signature(DistributedDataParallel).parameters
    option = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return DistributedDataParallel(model, **{option: False})  # type: ignore[arg-type]
