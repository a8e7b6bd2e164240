"""The list of mutants follows the code, and docs/mutants.md lists every one as killed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def _tools() -> None:
    sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "bench")]


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


def test_the_speed_of_runs_at_once_counts_only_the_time_in_which_all_train() -> None:
    from step import overlapping_speed

    # One epoch a second alone until 4 s, then half of that beside the other, whose first epoch ends at 6 s.
    first = [(float(t), float(t)) for t in range(1, 5)] + [(6.0, 5.0), (8.0, 6.0), (10.0, 7.0)]
    second = [(6.0, 1.0), (8.0, 2.0), (10.0, 3.0), (11.0, 4.0)]
    assert overlapping_speed({0: first, 1: second}, images=100) == pytest.approx(100.0)
    steady = {k: [(t + 0.3 * k, t / 2) for t in range(10)] for k in range(3)}
    assert overlapping_speed(steady, images=100) == pytest.approx(150.0)
    with pytest.raises(ValueError, match=r"never train at the same time.*use more --epochs"):
        overlapping_speed({0: [(1.0, 1.0), (2.0, 2.0)], 1: [(5.0, 1.0), (6.0, 2.0)]}, images=100)
