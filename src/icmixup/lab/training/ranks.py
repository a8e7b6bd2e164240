"""Distributed training: torchrun starts the processes, each is a rank, and rank 0 prints and writes."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
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
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"unknown device {name!r}; use cpu, cuda, cuda:1 or mps") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} is not available: torch finds no GPU; use --device cpu")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    return device


@contextmanager
def join_ranks(device: torch.device) -> Iterator[None]:
    """Join the process group of the ranks that torchrun started; a no-op for a single process."""
    if world_size() == 1 or dist.is_initialized():
        yield
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


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
