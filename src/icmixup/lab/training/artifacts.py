"""Compiled code that outlives its process: torch.compile's artefacts in a folder.

ICMIXUP_COMPILE_CACHE=FOLDER makes a run with --compile write what it compiled to FOLDER, and a later process
read it before its first step, on this machine or on another with the same kind of GPU and version of torch:
the folder can be copied. Torch itself checks what fits, and compiles what does not. The artefacts are code:
use only folders that you trust.
"""

from __future__ import annotations

import functools
import hashlib
import os
import warnings
from pathlib import Path

import torch

from icmixup.lab.training.run_folder import write_atomically

VARIABLE = "ICMIXUP_COMPILE_CACHE"
SUFFIX = ".artifacts"


def artifact_folder() -> Path | None:
    """The folder of the environment variable; None if it is not set, or torch cannot export artefacts."""
    folder = os.environ.get(VARIABLE)
    if not folder or not hasattr(torch.compiler, "save_cache_artifacts"):
        return None
    return Path(folder)


@functools.cache
def load_artifacts() -> int:
    """Give torch all artefacts of the folder, once per process; the number of files that it took."""
    folder, taken = artifact_folder(), 0
    for path in sorted(folder.glob(f"*{SUFFIX}")) if folder is not None else ():
        if torch.compiler.load_cache_artifacts(path.read_bytes()) is None:  # damaged, or of another version
            warnings.warn(f"torch cannot use {path}; its code is compiled again", stacklevel=2)
        else:
            taken += 1
    return taken


def save_artifacts() -> Path | None:
    """Write what this process has compiled or used; None if there is nothing, or no folder is set."""
    folder = artifact_folder()
    found = None if folder is None else torch.compiler.save_cache_artifacts()
    if folder is None or found is None:
        return None
    content, about = found
    names = sorted(key for keys in about.artifacts.values() for key in keys)
    path = folder / (hashlib.sha256("\n".join(names).encode()).hexdigest()[:16] + SUFFIX)
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    return path
