"""The lab: trains and compares methods on your data. Needs the extra `icmixup[lab]`.

>>> from icmixup.lab import compare
>>> compare((x_train, y_train), (x_test, y_test), model=Net, methods=["erm", "mixup", "ic-mixup"])
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from icmixup.lab.comparison.api import compare
    from icmixup.lab.comparison.result import ComparisonResult

__all__ = ["ComparisonResult", "compare"]

_MODULE_OF = {"compare": "comparison.api", "ComparisonResult": "comparison.result"}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: the command line need not wait for torch."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"icmixup.lab.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
