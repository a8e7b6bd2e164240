"""Compiled code is kept in a folder: a second process, with caches of its own, does not compile again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# A matrix product needs no C++ compiler, which would take most of the time.
CODE = """
import torch
from torch._dynamo.utils import counters
from icmixup.lab.training.artifacts import load_artifacts, save_artifacts
taken = load_artifacts()
torch.compile(lambda a, b: a @ b, dynamic=False)(torch.ones(3, 4), torch.ones(4, 5))
path = save_artifacts()
found = counters["inductor"]
print(taken, found["fxgraph_cache_hit"], found["fxgraph_cache_miss"], path)
"""


def test_options_of_the_compiler_are_not_its_defaults() -> None:
    from torch._inductor import config

    from icmixup.lab.training.step import COMPILE_OPTIONS

    defaults = config.get_config_copy()
    known = {name: value for name, value in COMPILE_OPTIONS.items() if name in defaults}
    assert known
    assert [name for name, value in known.items() if defaults[name] == value] == []


def process(own_cache: Path, **variables: str) -> tuple[list[str], str]:
    """What a new process prints: files taken, hits, misses, file written; and its warnings."""
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(own_cache), "OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), done.stderr


@pytest.mark.slow
def test_a_second_process_takes_the_code_that_the_first_compiled(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    first, _ = process(tmp_path / "a", ICMIXUP_COMPILE_CACHE=str(kept))
    assert first[:3] == ["0", "0", "1"]
    assert [str(path) for path in kept.iterdir()] == first[3:]
    (kept / "0.artifacts").write_bytes(b"not an artefact")
    second, warnings = process(tmp_path / "b", ICMIXUP_COMPILE_CACHE=str(kept))
    assert second[:3] == ["1", "1", "0"]
    assert second[3:] == first[3:]  # nothing new, so nothing is written
    assert "0.artifacts" in warnings
    assert len(list(kept.iterdir())) == 2
