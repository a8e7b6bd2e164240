"""SGD and AdamW, with a learning rate and a weight decay for each group of weights.

The learning rate of a group is a tensor on the device: lr_scale times the scheduled learning rate, computed
within the step. So a step captured in a CUDA graph follows the schedule.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor, nn

from icmixup.lab.training.recipe import Recipe


class WeightGroup(NamedTuple):
    """Weights that share a learning rate and a weight decay."""

    weights: tuple[nn.Parameter, ...]
    lr_scale: float = 1.0  # relative to the scheduled learning rate
    weight_decay: float = 0.0


def weight_groups(model: nn.Module, recipe: Recipe) -> list[WeightGroup]:
    """The weights of a network in groups: by layer with layer_decay; biases and norms may have no decay."""
    decay = recipe.weight_decay
    if recipe.layer_decay not in (None, 1.0):
        return layer_groups(model, recipe)
    if recipe.decay_norms:
        return [WeightGroup(tuple(model.parameters()), 1.0, decay)]
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    exempted = exempted_names(model)
    for name, weight in model.named_parameters():
        (plain if has_no_decay(name, weight, exempted) else decayed).append(weight)
    groups = [WeightGroup(tuple(decayed), 1.0, decay), WeightGroup(tuple(plain), 1.0, 0.0)]
    return [group for group in groups if group.weights]


def exempted_names(model: nn.Module) -> Collection[str]:
    """Weights that timm exempts from weight decay, such as position embeddings."""
    exempted: Callable[[], Collection[str]] | None = getattr(model, "no_weight_decay", None)
    return () if exempted is None else exempted()


def has_no_decay(name: str, weight: Tensor, exempted: Collection[str]) -> bool:
    """Whether a weight is a bias, of a normalisation layer, or exempted."""
    return weight.dim() <= 1 or name.endswith(".bias") or name in exempted


def layer_groups(model: nn.Module, recipe: Recipe) -> list[WeightGroup]:
    """Groups of timm's layers: each learns layer_decay times as fast as the one above it, the head fully."""
    matcher: Callable[..., object] | None = getattr(model, "group_matcher", None)
    if matcher is None:
        raise ValueError(f"layer_decay needs a timm model, got {recipe.model}; leave --layer-decay out")
    assert recipe.layer_decay is not None
    # Not timm's param_groups_layer_decay, which lacks an option in timm's older versions.
    group_parameters = import_module("timm.models").group_parameters
    layers: dict[str, int] = group_parameters(model, matcher(coarse=False), reverse=True)
    top, exempted = max(layers.values()), exempted_names(model)
    # Layers that differ in nothing become one group, which is one kernel launch.
    groups: dict[tuple[float, float], list[nn.Parameter]] = defaultdict(list)
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            plain = name in exempted or (weight.dim() <= 1 and not recipe.decay_norms)
            scale = recipe.layer_decay ** (top - layers.get(name, top))
            groups[scale, 0.0 if plain else recipe.weight_decay].append(weight)
    return [WeightGroup(tuple(weights), *values) for values, weights in groups.items()]


def make_optimizer(groups: list[WeightGroup], recipe: Recipe, lrs: Tensor) -> torch.optim.Optimizer:
    """The recipe's optimizer, with its state allocated: the warm-up of a capture can then restore it.

    Args:
        lrs: (G,) learning rate of each group; the optimizer reads it, the step writes it.
    """
    parameters = [
        {"params": list(group.weights), "lr": lr, "weight_decay": group.weight_decay}
        for group, lr in zip(groups, lrs, strict=True)
    ]
    if recipe.optimizer == "adamw":
        return make_adamw(parameters, lrs)
    optimizer = torch.optim.SGD(
        parameters, lr=lrs[0], momentum=recipe.momentum, nesterov=recipe.nesterov, fused=True
    )
    for group in groups:
        for weight in group.weights:
            optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    return optimizer


def make_adamw(parameters: list[dict[str, object]], lrs: Tensor) -> torch.optim.AdamW:
    cuda = lrs.device.type == "cuda"
    optimizer = torch.optim.AdamW(parameters, lr=lrs[0], fused=True, capturable=cuda)
    for group in optimizer.param_groups:
        for weight in group["params"]:
            optimizer.state[weight] = {
                "step": torch.zeros((), device=weight.device),
                "exp_avg": torch.zeros_like(weight),
                "exp_avg_sq": torch.zeros_like(weight),
            }
    return optimizer
