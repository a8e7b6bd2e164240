"""Kernels without a GPU: Triton's interpreter, which must be chosen before Triton is imported."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHOSEN: list[str] = []  # modules that were imported for the interpreter


@contextmanager
def interpreter() -> Iterator[None]:
    """TRITON_INTERPRET=1 where there is no GPU; restored afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
        yield


def import_kernels(name: str) -> ModuleType:
    """Import a module of kernels, to be interpreted on a CPU; skips the file if Triton cannot do that."""
    chosen = CHOSEN or DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    assert chosen or "triton.language" not in sys.modules, f"Triton was imported before {name}"
    with interpreter():
        pytest.importorskip("triton.language")
        module = importlib.import_module(name)
    CHOSEN.append(name)
    if DEVICE == "cpu":
        from triton.runtime.interpreter import InterpreterBuilder

        if not hasattr(InterpreterBuilder, "get_int1_ty"):
            pytest.skip("the interpreter of Triton 3.2 has no booleans; needs a GPU", allow_module_level=True)
    return module
