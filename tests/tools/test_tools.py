"""The list of mutants follows the code, and the log tells of every one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def _tools() -> None:
    sys.path.insert(0, str(ROOT / "tools"))


def test_every_mutant_fits_the_code_in_one_place() -> None:
    from mutate import MUTANTS, mutated_text

    for mutant in MUTANTS:
        assert mutated_text(mutant, ROOT)  # raises where it does not fit


def test_the_log_tells_of_every_mutant_and_that_none_survived() -> None:
    from mutate import MUTANTS

    log = (ROOT / "docs" / "log.md").read_text()
    assert f"{len(MUTANTS)} of {len(MUTANTS)} mutants killed." in log
    for mutant in MUTANTS:
        assert f"| `{mutant.room}.py` | {mutant.name} | `test_" in log
