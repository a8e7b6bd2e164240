"""Mutation testing: introduce one small plausible bug at a time, and check that a test fails.

    python tools/mutate.py                       every mutant, a table at the end, exit code 1 if one survives
    python tools/mutate.py --only Remix --jobs 2
    python tools/mutate.py --markdown docs/mutants.md
    python tools/mutate.py --markdown docs/mutants.md --new      only mutants that are not on the page yet

A mutant is one exact replacement in one module, listed in mutants.py. It is applied to a copy of the tree in
a temporary folder, so the working tree is never changed. A text that does not occur exactly once is an error:
the list must follow the code.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[1]
SAMPLE = ROOT / "results" / "sampled_mutants.json"  # of sample_mutants.py
HEAVY = ("torch", "scipy.stats", "hypothesis")  # imported once, before the processes fork
TESTS = {
    "pairs": ["test_pairs.py"],
    "contrast.request": ["test_equations.py", "test_loss.py"],
    "contrast.plain": ["test_equations.py", "test_loss.py"],
    "loss": ["test_equations.py", "test_loss.py"],
    "hidden": ["test_hidden.py"],
    "objective": ["test_methods.py", "test_hidden.py"],
    "methods": ["test_methods.py"],
    "adjustment": ["test_adjustment.py"],
    "calibration": ["test_calibration.py"],
    "_checks": ["test_methods.py", "test_loss.py", "test_pairs.py"],
    "inputs": ["test_methods.py", "test_mixer.py"],
    "mixer": ["test_mixer.py"],
    "large_batch": ["test_large_batch.py"],
    "_first_order": ["test_loss.py"],
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


def markdown_page(verdicts: list[Verdict], sample: dict[str, Any]) -> str:
    head = (
        "# Mutation tests\n\n"
        "A mutant is a small plausible bug in a copy of the library; for each, a test must fail.\n"
        "This page is generated: `python tools/mutate.py --markdown docs/mutants.md`.\n\n"
    )
    return f"{head}{markdown_table(verdicts)}{markdown_sample(sample)}"


SAMPLE_PAGE = """
## A random sample of the whole package

`tools/sample_mutants.py` changes one operator, comparison or constant at a time. Of {population:,} such
mutants in the library, the integrations and the lab, {judged} were drawn at random (seed {seed}):
**{killed} of {judged} are killed** by the project's tests. The tests as they were before the draw killed
{killed_at_first}, which is the estimate for mutants that were not drawn; the others were then read, and got a
test where one was missing. `results/sampled_mutants.json` has every mutant with the test that kills it
({dates}; lines are those of commit {commit}). No test fails with these:

| place | before | after | reason |
|---|---|---|---|
{survivors}

Not mutated, since no test could notice it here: {left_out}. The head of the tool explains each.

These were drawn, and passed over for the next one by such a rule. Counted as survivors, they make it {killed}
of {drawn}.

| place | before | after | rule |
|---|---|---|---|
{passed_over}
"""


def markdown_sample(sample: dict[str, Any]) -> str:
    """What tools/sample_mutants.py found, with the reason of every survivor."""
    survivors = [row for row in sample["mutants"] if row["fate"] != "killed"]
    return SAMPLE_PAGE.format(
        **{key: value for key, value in sample.items() if key != "passed_over"},
        drawn=len(sample["mutants"]) + len(sample["passed_over"]),
        left_out=", ".join(f"{reason} ({count})" for reason, count in sample["not_mutated"].items()),
        dates=", ".join(sorted({row["date"] for row in sample["mutants"]})),
        survivors="\n".join(mutant_row(row, row["reason"]) for row in survivors),
        passed_over="\n".join(mutant_row(row, row["rule"]) for row in sample["passed_over"]),
    )


def mutant_row(row: dict[str, Any], reason: str) -> str:
    return f"| `{row['file']}:{row['line']}` | {code(row['before'])} | {code(row['after'])} | {reason} |"


def code(text: str) -> str:
    """An expression in a cell of a table."""
    return "`" + text.replace("|", "\\|") + "`"


def read_page(path: Path) -> dict[tuple[str, str], str]:
    """The test that killed each mutant on a page, by module and name."""
    row = re.compile(r"\| `(\S+)` \| (.+) \| `(.+)` \|")
    found = (row.fullmatch(line) for line in path.read_text().splitlines())
    return {(match[1], match[2]): match[3] for match in found if match}


def main() -> int:
    parser = argparse.ArgumentParser(description="Mutation testing: check that tests notice small bugs.")
    parser.add_argument("--only", default="", help="only mutants whose module or name contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="concurrent processes")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    parser.add_argument("--new", action="store_true", help="judge only mutants that are not in that file yet")
    args = parser.parse_args()
    if args.new and args.markdown is None:
        parser.error("--new compares with a page; add --markdown docs/mutants.md")
    os.environ["OMP_NUM_THREADS"] = "1"
    chosen = [mutant for mutant in MUTANTS if args.only in f"{mutant.module} {mutant.name}"]
    killers = read_page(args.markdown) if args.new else {}
    known = [m for m in chosen if (m.module, m.name) in killers]
    verdicts = [Verdict(mutant, killers[mutant.module, mutant.name]) for mutant in known]
    missing = [mutant for mutant in chosen if mutant not in known]
    for verdict in judge_all(missing, args.jobs) if missing else ():
        result = "survived" if verdict.killer is None else "killed  "
        print(f"{result}  {verdict.mutant.module:16} {verdict.mutant.name}", flush=True)
        verdicts.append(verdict)
    verdicts.sort(key=lambda verdict: chosen.index(verdict.mutant))
    print(markdown_table(verdicts))
    if args.markdown:
        args.markdown.write_text(markdown_page(verdicts, json.loads(SAMPLE.read_text())))
    return int(any(verdict.killer is None for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
