"""Manifold Mixup: mixing what a module inside the network is fed, instead of the images."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from icmixup.pairs import Pairs, draw_uniform, like_inputs, mix_inputs


@contextmanager
def mix_hidden(module: nn.Module, pairs: Pairs) -> Iterator[None]:
    """Within this context the first input of `module` is mixed; its hook is removed at the end, come what
    may.

    >>> with mix_hidden(model.layer2, pairs):
    ...     scores = model(images)

    Args:
        module: any module of the network that is called with a (B, ...) tensor first.
        pairs: from draw_mixup; the box of a CutMix has the size of the images, not of hidden features.
    """

    def mix(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (mix_inputs(args[0], pairs), *args[1:])

    hook = module.register_forward_pre_hook(mix)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def mix_somewhere(
    modules: tuple[nn.Module, ...], pairs: Pairs, generator: torch.Generator | None = None
) -> Iterator[None]:
    """Mix at one of the modules, chosen at random.

    The choice stays on the device: every module mixes, and all but the chosen one keep the whole of each
    image. So the step can be captured in a CUDA graph.
    """
    if not modules:
        raise ValueError("no modules to mix at; name some, as hidden=(model.layer1, model.layer2)")
    place = draw_uniform((1,), pairs.lam.device, generator) * len(modules)
    with ExitStack() as stack:
        for number, module in enumerate(modules):
            chosen = like_inputs(place.floor() == number, pairs.weight)
            here = pairs._replace(weight=torch.where(chosen, pairs.weight, 1.0))
            stack.enter_context(mix_hidden(module, here))
        yield


def hidden_modules(model: nn.Module) -> tuple[nn.Module, ...]:
    """Where Manifold Mixup may mix: what `model.hidden` names, else the model's children but the last one.

    The input of the first child is the image itself, which the original method mixes too.
    """
    named = getattr(model, "hidden", None)
    if named is not None:
        return tuple(model.get_submodule(name) for name in named)
    children = tuple(model.children())[:-1]
    if not children:
        raise ValueError(
            f"{type(model).__name__} has no modules to mix at; pass hidden=(module, ...), "
            "or let model.hidden name submodules"
        )
    return children
