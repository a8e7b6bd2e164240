"""Data, networks and methods given in Python: what names in recipes mean besides those of this package.

Recipes name a dataset, a model and a method. `Definitions.registered` gives the names a meaning for a while.
Other processes get the definitions as a pickle, so what they contain must be importable there.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from icmixup.lab.models import MODELS
from icmixup.lab.models.own import OwnModel
from icmixup.lab.training.execution import Execution
from icmixup.methods import METHODS, Method

Value = TypeVar("Value")
REMEDY = (
    "processes can only be sent what they can import: classes and functions defined at the top level of a "
    ".py file, not lambdas, not functions inside functions, nothing defined in a notebook; move them to a "
    "module, or use workers=1"
)


@dataclass(frozen=True)
class Definitions:
    """Networks and methods by name."""

    models: Mapping[str, OwnModel] = field(default_factory=dict)
    methods: Mapping[str, Method] = field(default_factory=dict)

    @contextlib.contextmanager
    def registered(self) -> Iterator[None]:
        """Context in which MODELS and METHODS contain the definitions."""
        models, methods = dict(MODELS), dict(METHODS)
        self.register()
        try:
            yield
        finally:
            restore(MODELS, models)
            restore(METHODS, methods)

    def register(self) -> None:
        """Add the definitions to MODELS and METHODS of this process."""
        MODELS.update(self.models)
        METHODS.update(self.methods)


def restore(table: dict[str, Value], before: dict[str, Value]) -> None:
    table.clear()
    table.update(before)


def pack_definitions(execution: Execution) -> Execution:
    """The execution as another process gets it: definitions and data as a pickle."""
    if execution.definitions is None:
        return execution
    try:
        packed = pickle.dumps((execution.definitions, execution.dataset))
    except Exception as error:  # pickle raises whatever the objects do
        raise ValueError(f"workers cannot be sent the data, model or methods ({error}): {REMEDY}") from error
    return replace(execution, definitions=None, packed=packed)


def unpack_definitions(execution: Execution) -> Execution:
    """The execution in another process: the definitions are registered, and the data is loaded."""
    if execution.packed is None:
        return execution
    try:
        definitions, dataset = pickle.loads(execution.packed)
    except Exception as error:
        raise ValueError(f"a worker cannot load the data, model or methods ({error}): {REMEDY}") from error
    definitions.register()
    return replace(execution, packed=None, dataset=dataset)
