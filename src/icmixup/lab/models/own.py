"""A network given in Python: the user's own function that builds it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from icmixup.lab.datasets.examples import seeded_generators

ModelFactory = Callable[..., nn.Module]
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, eq=False)
class OwnModel:
    """A builder of networks, as MODELS has them, from the user's function."""

    factory: ModelFactory
    fingerprints: dict[str, str] = field(default_factory=dict, repr=False)  # by that of the data

    def __call__(self, num_classes: int, channels: int) -> nn.Module:
        """A new network; torch's generator is already seeded, and NumPy's and Python's are seeded here."""
        seed = torch.initial_seed()
        with seeded_generators() as reseed:
            reseed(seed % 2**32)
            torch.default_generator.manual_seed(seed)
            model = call_factory(self.factory, num_classes)
        if not isinstance(model, nn.Module):
            raise ValueError(f"model must return an nn.Module, got {type(model).__name__}")
        return model


def call_factory(factory: ModelFactory, num_classes: int) -> nn.Module:
    """Call it with the number of classes if it takes that, otherwise without arguments."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # some callables of C have no signature
        return factory()
    if "num_classes" in parameters:
        return factory(num_classes=num_classes)
    required = [p for p in parameters.values() if p.kind in POSITIONAL and p.default is p.empty]
    if len(required) > 1:
        names = ", ".join(p.name for p in required)
        raise ValueError(
            f"model must be a function without arguments, or of the number of classes; it takes {names}: "
            "use functools.partial for the others"
        )
    return factory(num_classes) if required else factory()


def check_factory(model: object) -> None:
    """Raise an error for anything that cannot build a new network for every run."""
    if isinstance(model, nn.Module):
        raise ValueError(
            f"model must be a function that builds a network, got a {type(model).__name__}: every run starts "
            "from new weights; pass the class itself, or functools.partial of it"
        )
    if not callable(model):
        raise ValueError(f"model must be a name or a function that builds a network, got {model!r}")


def check_separate(first: nn.Module, second: nn.Module) -> None:
    """Raise an error if two networks of one factory share weights: a run would begin where another ended."""
    known = {id(weight) for weight in first.parameters()} | {id(owner) for owner in buffer_owners(first)}
    shared = [name for name, weight in second.named_parameters() if id(weight) in known]
    shared += [name for owner, name in buffer_owners(second).items() if id(owner) in known]
    if shared:
        raise ValueError(
            "model must build a network with weights of its own whenever it is called, but two calls share "
            f"{shared[0] or 'the network itself'}{' and others' if len(shared) > 1 else ''}: a run would "
            "start from weights that another one trained; create all modules inside the function, or use "
            "copy.deepcopy there"
        )


def buffer_owners(model: nn.Module) -> dict[nn.Module, str]:
    """Modules with buffers of their own, such as the running statistics of BatchNorm, and their names."""
    return {module: name for name, module in model.named_modules() if module._buffers}


def factory_name(factory: object) -> str:
    """A name for folders and tables: that of the function or class."""
    factory = getattr(factory, "func", factory)  # of functools.partial
    name = getattr(factory, "__name__", type(factory).__name__)
    return name if name.isidentifier() else "model"  # a lambda has no name
