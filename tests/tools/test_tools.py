"""The list of mutants follows the code, docs/mutants.md has all of them, and a random sample is judged."""

from __future__ import annotations

import json
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


def test_of_a_hundred_sampled_mutants_at_least_95_are_killed_and_each_survivor_has_a_reason() -> None:
    sample = json.loads((ROOT / "results" / "sampled_mutants.json").read_text())
    rows = sample["mutants"]
    assert len(rows) == sample["judged"] >= 100
    assert len({(row["file"], row["start"], row["after"]) for row in rows}) == len(rows)
    survivors = [row for row in rows if row["fate"] != "killed"]
    assert sample["killed"] == len(rows) - len(survivors) >= 0.95 * len(rows)
    assert all(row["test"] for row in rows if row["fate"] == "killed")
    page = (ROOT / "docs" / "mutants.md").read_text()
    assert f"**{sample['killed']} of {sample['judged']} are killed**" in page
    for row in survivors:
        assert row["reason"]
        assert f"| `{row['file']}:{row['line']}` |" in page


def test_expressions_that_no_test_could_judge_are_not_mutated() -> None:
    from sample_mutants import Finder

    text = """
__all__ = ["a"][0 + 1:]
if TYPE_CHECKING:
    b = 1

def f(x: Literal[1], y: Literal[2] = 3) -> Literal[4]:
    return zip(x, y, strict=True), f"{x + 5:>{y + 6}}", x.ljust(7), g(x, indent=8), x < 9
"""
    finder = Finder("module.py", text)
    found = [(mutant.before, mutant.after) for mutant in finder.mutants]
    assert found == [("3", "4"), ("x + 5", "(x - 5)"), ("5", "6"), ("x < 9", "(x <= 9)"), ("9", "10")]
    kinds = {"__all__": 3, "TYPE_CHECKING": 1, "type hints": 3, "zip(strict=...)": 1, "padding": 4}
    assert finder.left_out == kinds


def test_a_mutant_is_the_module_with_another_expression_in_its_place() -> None:
    from sample_mutants import Finder

    text = "def f(x, y):\n    é = 'é' if x is None else (x *\n        y)\n    return é and not x in y\n"
    mutants = Finder("module.py", text).mutants
    changed = [
        (text.encode()[: m.start] + m.after.encode() + text.encode()[m.end :]).decode() for m in mutants
    ]
    assert changed == [
        text.replace("x is None", "(x is not None)"),
        text.replace("x *\n        y", "(x + y)"),
        text.replace("é and not x in y", "(é or not x in y)"),
        text.replace("x in y", "(x not in y)"),
    ]
    assert [mutant.statement for mutant in mutants] == [(2, 3), (2, 3), (4, 4), (4, 4)]


def test_recorded_lines_are_those_that_a_test_runs(tmp_path: Path) -> None:
    from sample_mutants import Finder, add_recorded, read_lines, tests_that_run

    written, source = tmp_path / "written", tmp_path / "src"
    written.mkdir()
    one, two = "tests/test_a.py::test_one", "tests/test_a.py::test_two"
    (written / "1.txt").write_text(
        f"T {one} (setup)\nL {source}/a.py:2\nS 0.5 passed {one}\n"
        f"T {two} (call)\nL {source}/a.py:3\nS 1.5 passed {two}\nS 0.5 passed {two}\n"
    )
    (written / "2.txt").write_text(f"T \nL {source}/a.py:9\n")
    add_recorded(written, source, tmp_path / "lines.json")
    lines = read_lines(tmp_path / "lines.json")
    assert lines.seconds == {one: 0.5, two: 2.0}
    # What a fixture runs counts for all tests of its file.
    assert lines.tests == {"a.py": {2: {one, two}, 3: {two}}}
    mutants = Finder("a.py", "def f(x):\n    y = x + 1\n    return y < x\n").mutants
    judges = {mutant.before: tests_that_run(mutant, lines) for mutant in mutants}
    assert judges == {"x + 1": [one, two], "1": [one, two], "y < x": [two]}


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
