"""Pretrained weights: files read safely, loaded into a network, and a report of what was loaded.

A file is in the safetensors format, or a state dict that torch.load reads with weights_only: nothing in it
is executed. The tensors may be in an entry of the file such as "state_dict", and have a prefix such as
"module.", also beside a few others, such as those of a loss.
"""

from __future__ import annotations

import argparse
import hashlib
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from icmixup.lab.wording import first_few

State = dict[str, Tensor]
# Where training scripts keep the weights in a checkpoint, an average of them first.
ENTRIES = (
    "state_dict_ema",
    "model_ema",
    "average",
    "state_dict",
    "model",
    "model_state_dict",
    "net",
    "weights",
)
PREFIXES = ("module.", "_orig_mod.", "model.", "backbone.", "encoder.")
SUFFIXES = {".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".tar"}  # of weights, in suggestions
ENOUGH = 0.9  # share of the tensors below the head that must fit
COUNTER = "num_batches_tracked"  # of BatchNorm, which nothing reads here
NAMED = 4  # tensors that a message names
# Standard deviation of a new head's weights. timm's EfficientNets start with 1 / sqrt(3 C): the scores of 50
# classes then differ by several units before the first step, and its gradients spoil the pretrained features.
# BiT, BEiT and MAE fine-tune from heads of or near zero.
HEAD_STD = 0.01


@dataclass(frozen=True)
class LoadReport:
    """What a file gave a network. All names are those of tensors, without BatchNorm's counters."""

    loaded: tuple[str, ...]
    head: tuple[str, ...]  # of the network, newly initialised
    missing: tuple[str, ...]  # of the network below its head, not in the file or of another shape
    unused: tuple[str, ...]  # of the file

    def __str__(self) -> str:
        parts = [f"{len(self.loaded)} tensors loaded", f"new head ({', '.join(self.head) or 'none'})"]
        if self.missing:
            parts.append(f"{len(self.missing)} not in the file and random ({first_few(self.missing, NAMED)})")
        if self.unused:
            parts.append(f"{len(self.unused)} of the file not used ({first_few(self.unused, NAMED)})")
        return ", ".join(parts)


class WeightsDoNotFit(ValueError):
    """Too few tensors of a file fit a network."""


def read_weights(path: Path) -> State:
    """The tensors of a file, by name; a ValueError says why a file cannot be used."""
    if path.is_dir():
        inside = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
        remedy = f"a file in it, such as {inside[0]}" if inside else "the file of the weights"
        raise ValueError(f"--weights {path} is a folder; pass {remedy}")
    if not path.is_file():
        raise ValueError(f"no weights file {str(path)!r}; pass --weights FILE or --weights pretrained")
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    try:
        # timm's train.py stores its arguments beside the weights: a Namespace holds values and runs no code.
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError, RuntimeError, LookupError, ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is not a state dict that torch can read safely (weights_only): save model.state_dict(), "
            "or use a safetensors file"
        ) from error
    state = find_state(content)
    if not state:
        raise ValueError(f"{path} has no tensors by name; save model.state_dict()")
    return state


def read_safetensors(path: Path) -> State:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ModuleNotFoundError as error:
        raise ValueError(
            f"reading {path} needs the package safetensors: pip install safetensors, or icmixup[timm]"
        ) from error
    try:
        return strip_prefixes(dict(load_file(path)))
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file, or is damaged: {error}") from error


def find_state(content: object) -> State:
    """The tensors of a checkpoint, without the entry and the prefix they lie under."""
    if not isinstance(content, Mapping):
        return {}
    for entry in ENTRIES:
        if isinstance(content.get(entry), Mapping):
            return find_state(content[entry])
    state = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    return strip_prefixes(state)


def strip_prefixes(state: State) -> State:
    """Remove prefixes that nearly all tensors share; the others keep their names, and fit nothing."""
    for prefix in PREFIXES:
        if sum(name.startswith(prefix) for name in state) >= max(1, ENOUGH * len(state)):
            return strip_prefixes({name.removeprefix(prefix): value for name, value in state.items()})
    return state


def digest_file(path: Path) -> str:
    """The first ten hexadecimal digits of a file's SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:10]


def match_weights(model: nn.Module, state: State, head: tuple[str, ...]) -> LoadReport:
    """Which tensors of a file fit a network, by name and shape.

    Args:
        head: names of the modules that are replaced; () keeps the file's head.
    """
    own = {name: value for name, value in model.state_dict().items() if not name.endswith(COUNTER)}
    in_head = tuple(name for name in own if name.rpartition(".")[0] in head)
    body = [name for name in own if name not in in_head]
    loaded = tuple(name for name in body if name in state and state[name].shape == own[name].shape)
    used = {*loaded, *in_head}
    return LoadReport(
        loaded=loaded,
        head=in_head,
        missing=tuple(name for name in body if name not in loaded),
        unused=tuple(
            name
            for name in state
            if name not in used and not name.endswith(COUNTER) and name.rpartition(".")[0] not in head
        ),
    )


def fits(report: LoadReport) -> bool:
    return len(report.loaded) >= ENOUGH * (len(report.loaded) + len(report.missing))


def check_finite(state: State, report: LoadReport, file: str) -> None:
    """Raise an error for weights of a training that diverged: all that is computed with them is NaN."""
    bad = [name for name in report.loaded if not state[name].isfinite().all()]
    if bad:
        raise ValueError(
            f"{file} has NaN or infinite values in {len(bad)} of {len(report.loaded)} tensors, the first is "
            f"{bad[0]}; the training that saved it diverged: pass an earlier checkpoint, or other weights"
        )


@torch.no_grad()
def copy_weights(model: nn.Module, state: State, report: LoadReport) -> None:
    """Copy the tensors that fit, and BatchNorm's counters where both have them."""
    own = model.state_dict()
    counters = (name for name in own if name.endswith(COUNTER) and name in state)
    for name in (*report.loaded, *counters):
        own[name].copy_(state[name])


@torch.no_grad()
def shrink_head(model: nn.Module, report: LoadReport) -> None:
    """Scale the random weights of a new head to the standard deviation HEAD_STD; its biases become 0."""
    own = model.state_dict()
    for name in report.head:
        if own[name].ndim == 1:
            own[name].zero_()
        elif (spread := own[name].float().std()) > HEAD_STD:
            own[name].mul_(HEAD_STD / spread)
