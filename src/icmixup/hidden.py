"""Manifold Mixup: mixing the input of a module inside the network instead of the images.

A hook that is not called, or is called twice, would give a loss that looks right and is not. So the hook
counts its calls, on the host, and anything but one call is an error.

B images in a batch
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from icmixup.inputs import Inputs, call_model, map_tensors
from icmixup.large_batch import forget_cached_weights, keep_buffers, random_devices
from icmixup.pairs import Pairs, draw_uniform, like_inputs, mix_inputs

# These run their function again in the backward pass, when the hook is gone.
CHECKPOINTS = ("torch.utils.checkpoint", "deepspeed.runtime.activation_checkpointing.checkpointing")
PROBE_ROWS = 8  # inputs that find the modules on the main path
BODY = 0.9  # share of the weights from which a child is opened
TOLERANCE = 0.05  # of the difference between two images' scores, for what rounding may change

_found: WeakKeyDictionary[nn.Module, tuple[str, ...]] = WeakKeyDictionary()


@contextmanager
def mix_hidden(module: nn.Module, pairs: Pairs) -> Iterator[None]:
    """Within this context the first input of `module` is mixed; the hook is always removed at the end.

    >>> with mix_hidden(model.layer2, pairs):
    ...     scores = model(images)

    The module must run exactly once within the context; a RuntimeError is raised otherwise, since the scores
    would not belong to the mixed targets. It must not be inside a compiled model or a checkpointed segment.

    Args:
        module: any module of the network that is called with a (B, ...) tensor first.
        pairs: from draw_mixup; the box of a CutMix has the size of the images, not of hidden features.
    """
    name, calls = type(module).__name__, 0

    def mix(
        _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        nonlocal calls
        calls += 1
        check_call(name, calls)
        if args:
            return (mix_inputs(as_features(name, args[0]), pairs), *args[1:]), kwargs
        first = next(iter(kwargs), "")
        return args, {**kwargs, first: mix_inputs(as_features(name, kwargs.get(first)), pairs)}

    hook = module.register_forward_pre_hook(mix, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
    if calls == 0:
        raise RuntimeError(
            f"{name} was not called in the forward pass, so nothing was mixed: it is unused, a container "
            "such as ModuleList, or its model is compiled and ignores hooks; pass the uncompiled model, and "
            "hidden=(module, ...) with modules that run once"
        )


def check_call(name: str, calls: int) -> None:
    """Refuse a call of the hook that would give wrong scores or a wrong gradient."""
    if calls > 1:
        raise RuntimeError(
            f"{name} was called {calls} times in the forward pass, and would mix {calls} times; it is "
            "shared, or the model ran more than once: pass hidden=(module, ...) with modules that run once"
        )
    if not torch.compiler.is_compiling() and is_checkpointed(sys._getframe(1)):
        raise RuntimeError(
            f"{name} runs under gradient checkpointing, which would run it again without mixing in the "
            "backward pass; turn checkpointing off, or mix at a module outside the checkpointed segment"
        )


def is_checkpointed(frame: FrameType | None) -> bool:
    """Whether a checkpoint function is among the callers; other signs differ between its implementations."""
    while frame is not None:
        if frame.f_globals.get("__name__") in CHECKPOINTS:
            return True
        frame = frame.f_back
    return False


def as_features(name: str, features: object) -> Tensor:
    if not isinstance(features, Tensor):
        raise ValueError(
            f"{name} is called with {type(features).__name__} first; mixing needs a module whose first input "
            "is a (B, ...) tensor"
        )
    return features


@contextmanager
def mix_somewhere(
    modules: tuple[nn.Module, ...], pairs: Pairs, generator: torch.Generator | None = None
) -> Iterator[None]:
    """Mix at one of the modules, chosen at random; each of them must run exactly once within the context.

    The choice stays on the device: every module mixes, and all but the chosen one keep the whole of each
    image. So the step can be captured in a CUDA graph.
    """
    if not modules:
        raise ValueError("no modules to mix at; pass some, for example hidden=(model.layer1, model.layer2)")
    if len(set(modules)) < len(modules):
        raise ValueError(f"hidden names {len(modules)} modules, but some are the same; name each once")
    place = draw_uniform((1,), pairs.lam.device, generator) * len(modules)
    with ExitStack() as stack:
        for number, module in enumerate(modules):
            chosen = like_inputs(place.floor() == number, pairs.weight)
            here = Pairs(pairs.partner, torch.where(chosen, pairs.weight, 1.0), pairs.lam)
            stack.enter_context(mix_hidden(module, here))
        yield


def check_hidden(hidden: object) -> None:
    """Refuse a module in place of a tuple: of an nn.Sequential its children would be taken instead."""
    given = type(hidden).__name__
    if isinstance(hidden, tuple | list | nn.ModuleList):
        wrong = [type(entry).__name__ for entry in hidden if not isinstance(entry, nn.Module)]
        if not wrong:
            return
        given = f"a {given} with {wrong[0]}"
    raise TypeError(
        f"hidden must be a tuple of modules of the model, for example (model.layer1,), got {given}"
    )


def hidden_modules(model: nn.Module, inputs: Inputs | None = None) -> tuple[nn.Module, ...]:
    """Where Manifold Mixup may mix: the modules that `model.hidden` names, else those found in the model.

    Candidates are the children of the model. With `inputs`, the model runs on a few of them in evaluation
    mode, and the modules are those on the main path: they run once, and the image whose features they are
    given is the image that is scored. Branches, auxiliary heads and modules with a skip connection around
    them are not on it. The last module on the path, the classifier, is left out; the input of the first is
    the image itself, which the original method mixes too. Without `inputs` nothing is verified before mixing.

    Args:
        model: the plain module, or one wrapped by DistributedDataParallel.
        inputs: a batch, as the model takes it; the result is kept for the model.
    """
    check_not_compiled(model)
    model = model.module if isinstance(model, DistributedDataParallel) else model
    named = getattr(model, "hidden", None)
    if isinstance(named, tuple | list) and all(isinstance(name, str) for name in named):
        return tuple(model.get_submodule(name) for name in named)
    if model in _found:
        return tuple(model.get_submodule(name) for name in _found[model])
    candidates = children_of(model)
    found = tuple(candidates.values())[:-1] if inputs is None else on_main_path(model, candidates, inputs)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no modules to mix at; pass hidden=(module, ...), "
            "or let model.hidden name submodules"
        )
    return found


def children_of(model: nn.Module) -> dict[str, nn.Module]:
    """Children by name; of a child that is nearly all of the model, its own children, or most of the model
    could not be mixed in."""
    children, total = called_children(model), num_weights(model)
    while children:
        body = max(children, key=lambda name: num_weights(children[name]))
        inner = called_children(children[body], f"{body}.")
        if not inner or (len(children) > 2 and num_weights(children[body]) < BODY * total):
            break
        opened = [inner if name == body else {name: child} for name, child in children.items()]
        children = {name: child for part in opened for name, child in part.items()}
    return children


def called_children(model: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """Children by name; containers such as ModuleList have no forward, so their elements take their place."""
    children: dict[str, nn.Module] = {}
    for name, child in model.named_children():
        if getattr(child.forward, "__func__", None) is nn.Module.forward:
            children |= called_children(child, f"{prefix}{name}.")
        else:
            children[prefix + name] = child
    return children


def num_weights(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def on_main_path(model: nn.Module, candidates: dict[str, nn.Module], inputs: Inputs) -> tuple[nn.Module, ...]:
    """All but the last of the candidates at whose input exchanging images exchanges their scores."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the modules to mix at are not known yet, and looking for them cannot be captured in a CUDA "
            "graph; run a step before the capture, or pass hidden=(module, ...)"
        )
    rows = map_tensors(lambda tensor: tensor[:PROBE_ROWS].clone(), inputs)
    with evaluating(model):
        called, scores = count_calls(model, candidates, rows)
        names = [name for name, calls in called.items() if calls == 1]
        expected = scores.roll(1, dims=0)
        apart = (scores - expected).abs().amax()
        # Equal scores, of a single image or of a classifier that starts at zero, cannot show an exchange.
        verified = bool(apart > 1e-5 * scores.abs().amax())
        if verified:
            tolerance = TOLERANCE * apart
            names = [n for n in names if exchanges(model, candidates[n], rows, expected, tolerance)]
    if verified and len(names) > 1:
        _found[model] = tuple(names[:-1])
    return tuple(candidates[name] for name in names[:-1])


def count_calls(
    model: nn.Module, candidates: dict[str, nn.Module], rows: Inputs
) -> tuple[dict[str, int], Tensor]:
    """How often each candidate runs on a batch of floating-point features, in order of the first calls."""
    called: dict[str, int] = {}
    hooks = []
    for name, module in candidates.items():

        def count(
            _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], name: str = name
        ) -> None:
            first = args[0] if args else next(iter(kwargs.values()), None)
            usable = isinstance(first, Tensor) and first.is_floating_point() and first.dim() > 0
            # Two where one call would do: what cannot be mixed is not a candidate.
            called[name] = called.get(name, 0) + (1 if usable else 2)

        hooks.append(module.register_forward_pre_hook(count, with_kwargs=True))
    try:
        return called, call_model(model, rows)
    finally:
        for hook in hooks:
            hook.remove()


def exchanges(model: nn.Module, module: nn.Module, rows: Inputs, expected: Tensor, tolerance: Tensor) -> bool:
    """Whether the scores are those of the next image if the module is given that image's features."""
    number = len(expected)
    nothing = torch.zeros(number, device=expected.device)
    pairs = Pairs(torch.arange(number, device=expected.device).roll(1), nothing, nothing)
    try:
        with mix_hidden(module, pairs):
            scores = call_model(model, rows)
    except ValueError:  # its features are not (B, ...), for example (length, B, ...)
        return False
    return bool((scores - expected).abs().amax() <= tolerance)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; modes, buffers and random states are restored at the end."""
    devices = [device.index for device in random_devices(model, ())]
    try:
        with evaluation_mode(model), torch.no_grad(), torch.random.fork_rng(devices), keep_buffers(model):
            yield
    finally:
        forget_cached_weights()


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Context with model.eval(); afterwards every module gets its former mode back, also after an error."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def check_not_compiled(model: nn.Module) -> None:
    """Compiled code ignores hooks that are added later, or keeps those of the step it was compiled in."""
    if is_compiled(model):
        raise ValueError(
            f"{type(model).__name__} is compiled, and compiled code ignores the hooks of Manifold Mixup; "
            "pass the uncompiled model, or compile the modules inside those at which it mixes"
        )


def check_none_compiled(model: nn.Module, modules: tuple[nn.Module, ...]) -> None:
    """Refuse to mix at modules that run inside compiled code."""
    for outer in model.modules():
        if is_compiled(outer):
            inside = set(outer.modules()) - ({outer} if "_orig_mod" in outer._modules else set())
            if inside & set(modules):
                check_not_compiled(outer)


def is_compiled(module: nn.Module) -> bool:
    """By torch.compile(module) or by module.compile()."""
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
