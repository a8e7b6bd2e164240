"""The list of mutants follows the code, and docs/mutants.md lists every one as killed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def _tools() -> None:
    sys.path.insert(0, str(ROOT / "tools"))


def test_every_mutant_matches_the_code_exactly_once() -> None:
    from mutate import MUTANTS, mutated_text

    for mutant in MUTANTS:
        assert mutated_text(mutant, ROOT)  # raises if it does not match


def test_the_page_of_mutants_lists_every_one_and_none_survived() -> None:
    from mutate import MUTANTS

    page = (ROOT / "docs" / "mutants.md").read_text()
    assert f"{len(MUTANTS)} of {len(MUTANTS)} mutants killed." in page
    for mutant in MUTANTS:
        assert f"| `{mutant.module}` | {mutant.name} | `test_" in page
