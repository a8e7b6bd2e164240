"""Mutation testing: introduce one small plausible bug at a time, and check that a test fails.

    python tools/mutate.py                       every mutant, a table at the end, exit code 1 if one survives
    python tools/mutate.py --only Remix --jobs 2
    python tools/mutate.py --markdown docs/mutants.md

A mutant is one exact replacement in one module, listed in mutants.py. It is applied to a copy of the tree in
a temporary folder, so the working tree is never changed. A text that does not occur exactly once is an error:
the list must follow the code.
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
HEAVY = ("torch", "scipy.stats", "hypothesis")  # imported once, before the processes fork
TESTS = {
    "pairs": ["test_pairs.py"],
    "contrast.request": ["test_equations.py", "test_loss.py"],
    "contrast.plain": ["test_equations.py", "test_loss.py"],
    "loss": ["test_equations.py", "test_loss.py"],
    "hidden": ["test_hidden.py"],
    "methods": ["test_methods.py"],
}


class Verdict(NamedTuple):
    mutant: Mutant
    killer: str | None  # the first test that failed, None if all passed


class FirstFailure:
    """Pytest plugin that records the first test, or file, that failed."""

    name: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.name is None:
            self.name = report.nodeid.split("::")[-1]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and self.name is None:
            self.name = report.nodeid


@contextmanager
def copied_tree(root: Path) -> Iterator[Path]:
    """Copy the library, its tests and their settings to a temporary folder, without the lab."""
    ignored = shutil.ignore_patterns("lab", "__pycache__")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(root / "src" / "icmixup", folder / "src" / "icmixup", ignore=ignored)
        shutil.copytree(root / "tests", folder / "tests", ignore=ignored)
        shutil.copy(root / "pyproject.toml", folder)
        yield folder


def module_path(module: str, folder: Path) -> Path:
    return (folder / "src" / "icmixup").joinpath(*module.split(".")).with_suffix(".py")


def mutated_text(mutant: Mutant, folder: Path) -> str:
    text = module_path(mutant.module, folder).read_text()
    found = text.count(mutant.old)
    if found != 1:
        raise ValueError(
            f"mutant {mutant.name!r} must match exactly once, but occurs {found} times in "
            f"{mutant.module}: {mutant.old!r}"
        )
    return text.replace(mutant.old, mutant.new)


def first_failure(folder: Path, modules: list[str]) -> str | None:
    """The first test that fails in a tree, None if all pass. Once per process, which imports that tree."""
    os.chdir(folder)
    sys.path.insert(0, str(folder / "src"))
    files = dict.fromkeys(f"tests/{name}" for module in modules for name in TESTS[module])
    options = ["-x", "-m", "not slow", "-p", "no:cacheprovider", "--tb=no"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # about modules imported already
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
        module_path(mutant.module, folder).write_text(mutated_text(mutant, root))
        return Verdict(mutant, first_failure(folder, [mutant.module]))


def judge_all(mutants: list[Mutant], jobs: int) -> Iterator[Verdict]:
    for module in HEAVY:
        importlib.import_module(module)
    # One snapshot for all mutants, even if the working tree changes meanwhile.
    with (
        copied_tree(ROOT) as root,
        multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=1) as pool,
    ):
        for mutant in mutants:
            mutated_text(mutant, root)  # fail early if a mutant does not match
        modules = sorted({mutant.module for mutant in mutants})
        failed = pool.apply(first_failure, (root, modules))
        if failed is not None:
            raise RuntimeError(f"{failed} fails without any mutant; fix it first")
        yield from pool.imap(partial(judge, root), mutants)


def markdown_table(verdicts: list[Verdict]) -> str:
    killed = sum(verdict.killer is not None for verdict in verdicts)
    rows = [
        f"| `{mutant.module}` | {mutant.name} | {f'`{killer}`' if killer else '**survived**'} |"
        for mutant, killer in verdicts
    ]
    head = [f"{killed} of {len(verdicts)} mutants killed.", "", "| module | mutant | first test that fails |"]
    return "\n".join([*head, "|---|---|---|", *rows]) + "\n"


def markdown_page(verdicts: list[Verdict]) -> str:
    head = (
        "# Mutation tests\n\n"
        "A mutant is a small plausible bug in a copy of the library; for each, a test must fail.\n"
        "This page is generated: `python tools/mutate.py --markdown docs/mutants.md`.\n\n"
    )
    return head + markdown_table(verdicts)


def main() -> int:
    parser = argparse.ArgumentParser(description="Mutation testing: check that tests notice small bugs.")
    parser.add_argument("--only", default="", help="only mutants whose module or name contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="concurrent processes")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    chosen = [mutant for mutant in MUTANTS if args.only in f"{mutant.module} {mutant.name}"]
    verdicts = []
    for verdict in judge_all(chosen, args.jobs):
        result = "survived" if verdict.killer is None else "killed  "
        print(f"{result}  {verdict.mutant.module:16} {verdict.mutant.name}", flush=True)
        verdicts.append(verdict)
    print(markdown_table(verdicts))
    if args.markdown:
        args.markdown.write_text(markdown_page(verdicts))
    return int(any(verdict.killer is None for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
