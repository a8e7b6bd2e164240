"""Break the library on purpose, one small plausible bug at a time, and see that a test notices.

    python tools/mutate.py                       every mutant, a table at the end, exit code 1 if one survives
    python tools/mutate.py --only Remix --jobs 2
    python tools/mutate.py --markdown table.md

A mutant is one exact replacement in one room, listed in mutants.py. It is made in a copy of the tree in a
temporary folder, so the working tree is never touched. A text that is not found exactly once is an error: the
list must follow the code.
"""

from __future__ import annotations

import argparse
import importlib
import io
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "scipy.stats", "hypothesis")  # imported once, before the processes part
TESTS = {
    "pairs": ["test_pairs.py"],
    "contrast": ["test_paper.py", "test_loss.py"],
    "loss": ["test_paper.py", "test_loss.py"],
    "hidden": ["test_hidden.py"],
    "methods": ["test_methods.py"],
}


class Verdict(NamedTuple):
    mutant: Mutant
    killer: str | None  # the first test that failed, None if all passed


class FirstFailure:
    """A plugin for pytest that remembers the first test, or file, that failed."""

    name: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.name is None:
            self.name = report.nodeid.split("::")[-1]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and self.name is None:
            self.name = report.nodeid


@contextmanager
def copied_tree(root: Path) -> Iterator[Path]:
    """The library, its tests and the settings they run under; the laboratory is not needed."""
    unwanted = shutil.ignore_patterns("lab", "__pycache__")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(root / "src" / "icmixup", folder / "src" / "icmixup", ignore=unwanted)
        shutil.copytree(root / "tests", folder / "tests", ignore=unwanted)
        shutil.copy(root / "pyproject.toml", folder)
        yield folder


def mutated_text(mutant: Mutant, folder: Path) -> str:
    text = (folder / "src" / "icmixup" / f"{mutant.room}.py").read_text()
    found = text.count(mutant.old)
    if found != 1:
        raise ValueError(f"{mutant.name}: found {found} times in {mutant.room}.py: {mutant.old!r}")
    return text.replace(mutant.old, mutant.new)


def first_failure(folder: Path, rooms: list[str]) -> str | None:
    """The first test that fails in a tree, None if all pass. Once a process, which imports that tree."""
    os.chdir(folder)
    sys.path.insert(0, str(folder / "src"))
    files = dict.fromkeys(f"tests/{name}" for room in rooms for name in TESTS[room])
    options = ["-x", "-m", "not slow", "-p", "no:cacheprovider", "--tb=no"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what is imported already
    failure = FirstFailure()
    with redirect_stdout(io.StringIO()) as output:
        code = pytest.main([*options, *files], [failure])
    library = Path(importlib.import_module("icmixup.pairs").__file__ or "")
    assert library.is_relative_to(folder), f"the tests ran with {library}"
    if (code == 0) != (failure.name is None):
        raise RuntimeError(f"pytest neither passed nor failed:\n{output.getvalue()}")
    return failure.name


def judge(root: Path, mutant: Mutant) -> Verdict:
    with copied_tree(root) as folder:
        (folder / "src" / "icmixup" / f"{mutant.room}.py").write_text(mutated_text(mutant, root))
        return Verdict(mutant, first_failure(folder, [mutant.room]))


def judge_all(mutants: list[Mutant], jobs: int) -> Iterator[Verdict]:
    for module in HEAVY:
        importlib.import_module(module)
    # One snapshot for all mutants, whatever happens to the working tree meanwhile.
    with (
        copied_tree(ROOT) as root,
        multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=1) as pool,
    ):
        for mutant in mutants:
            mutated_text(mutant, root)  # a mutant that does not fit is told at once
        rooms = sorted({mutant.room for mutant in mutants})
        failed = pool.apply(first_failure, (root, rooms))
        if failed is not None:
            raise RuntimeError(f"{failed} fails without any mutant")
        yield from pool.imap(partial(judge, root), mutants)


def markdown_table(verdicts: list[Verdict]) -> str:
    killed = sum(verdict.killer is not None for verdict in verdicts)
    rows = [
        f"| `{mutant.room}.py` | {mutant.name} | {f'`{killer}`' if killer else '**survived**'} |"
        for mutant, killer in verdicts
    ]
    head = [f"{killed} of {len(verdicts)} mutants killed.", "", "| room | mutant | first test that fails |"]
    return "\n".join([*head, "|---|---|---|", *rows]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Break the library on purpose, and see that a test notices.")
    parser.add_argument("--only", default="", help="mutants whose room or name contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--markdown", type=Path, help="write the table there too")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    chosen = [mutant for mutant in MUTANTS if args.only in f"{mutant.room} {mutant.name}"]
    verdicts = []
    for verdict in judge_all(chosen, args.jobs):
        fate = "survived" if verdict.killer is None else "killed  "
        print(f"{fate}  {verdict.mutant.room:9} {verdict.mutant.name}", flush=True)
        verdicts.append(verdict)
    table = markdown_table(verdicts)
    print(table)
    if args.markdown:
        args.markdown.write_text(table)
    return int(any(verdict.killer is None for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
