"""Networks by name: ours for small images, and all of timm's if timm is installed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial

import torch
from torch import nn

from icmixup._install import install_hint
from icmixup.lab.models.small import (
    basic_block,
    bottleneck_block,
    build_post_activation,
    build_resnet32,
    build_wide_resnet,
    plain_block,
)
from icmixup.lab.models.timm import build_timm, has_timm, is_timm_model, list_timm_models

__all__ = ["MODELS", "build_model"]

# Builds a network from its number of classes and of image channels.
Builder = Callable[[int, int], nn.Module]

SEED_LOCK = threading.Lock()  # all threads share the global generator

MODELS: dict[str, Builder] = {
    "resnet18": partial(build_post_activation, basic_block, 64, (64, 128, 256, 512), (2, 2, 2, 2)),
    "resnet34": partial(build_post_activation, basic_block, 64, (64, 128, 256, 512), (3, 4, 6, 3)),
    "resnet50": partial(build_post_activation, bottleneck_block, 64, (256, 512, 1024, 2048), (3, 4, 6, 3)),
    "resnet32": build_resnet32,
    "wrn16-8": partial(build_wide_resnet, 8, 16),
    "small-cnn": partial(build_post_activation, plain_block, 32, (32, 64, 128), (1, 1, 1)),
}


def build_model(name: str, num_classes: int, *, channels: int = 3, seed: int) -> nn.Module:
    """Build a network with random weights, on the CPU in float32; the same seed gives the same weights.

    The global random state is not changed. `model.hidden` names the submodules whose input Manifold Mixup
    may mix. For our networks they are the stem, whose input is the image, and the second and third stage, as
    in the code of its authors.

    Args:
        name: a key of MODELS, or a model name of timm. For a name that both have, use timm's tagged name
            ("resnet18.a1_in1k") to get timm's. No pretrained weights are loaded.
        num_classes: C, at least 2.
        channels: of the image, at least 1.
        seed: any integer.
    """
    if num_classes < 2:
        raise ValueError(f"num_classes must be at least 2, got {num_classes}")
    if channels < 1:
        raise ValueError(f"channels must be at least 1, got {channels}")
    build = find_builder(name)
    # Only the CPU's generator: torch.manual_seed would also seed the GPUs, which are not forked here.
    with SEED_LOCK, torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return build(num_classes, channels)


def find_builder(name: str) -> Builder:
    """The builder of a network of ours, else of timm's."""
    if name in MODELS:
        return MODELS[name]
    if is_timm_model(name):
        return partial(build_timm, name)
    similar = get_close_matches(name, list(dict.fromkeys([*MODELS, *list_timm_models()])), n=5, cutoff=0.5)
    hint = f" (did you mean {' or '.join(similar)}?)" if similar else ""
    remedy = (
        "a name of timm.list_models()"
        if has_timm()
        else f"install timm for its models: {install_hint('timm')}"
    )
    raise ValueError(f"no model {name!r}{hint}: use {', '.join(MODELS)}, or {remedy}")
