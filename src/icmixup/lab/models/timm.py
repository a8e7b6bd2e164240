"""Networks of timm, with the submodules at which Manifold Mixup may mix."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec

from torch import nn


def has_timm() -> bool:
    return find_spec("timm") is not None


def is_timm_model(name: str) -> bool:
    """Whether timm is installed and has a model of this name."""
    return has_timm() and bool(import_module("timm").is_model(name))


def list_timm_models() -> list[str]:
    """Names of all models of timm, none if it is not installed."""
    return list(import_module("timm").list_models()) if has_timm() else []


def build_timm(name: str, num_classes: int, channels: int) -> nn.Module:
    """Build timm's network of that name, with `hidden` set to its stages or blocks."""
    model: nn.Module = import_module("timm").create_model(name, num_classes=num_classes, in_chans=channels)
    model.hidden = stage_names(model)  # type: ignore[assignment]
    return model


def stage_names(model: nn.Module) -> tuple[str, ...]:
    """Submodules on the main path of a timm network, which all features pass through."""
    pattern = re.compile(r"layer\d+|(stages|layers|blocks)[._]\d+")
    return tuple(name for name, _ in model.named_modules() if pattern.fullmatch(name))
