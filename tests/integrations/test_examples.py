"""The example of each framework trains and prints an accuracy above chance."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from frameworks import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_every_framework_has_an_example():
    modules = {path.stem for path in (ROOT / "src/icmixup/integrations").glob("[a-z]*.py")}
    assert {path.stem.removesuffix("_digits") for path in EXAMPLES} == modules


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_reaches_an_accuracy_above_chance(path: Path, tmp_path: Path) -> None:
    pytest.importorskip(path.stem.removesuffix("_digits"))
    assert len(path.read_text().splitlines()) <= 60
    done = subprocess.run(
        [sys.executable, str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"accuracy ([\d.]+)  chance 0.100", done.stdout)
    assert found, done.stdout
    assert float(found[1]) > 0.7
