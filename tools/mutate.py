"""Break the library on purpose, one small plausible bug at a time, and see that a test notices.

    python tools/mutate.py                       every mutant, a table at the end, exit code 1 if one survives
    python tools/mutate.py --only remix --jobs 2
    python tools/mutate.py --markdown table.md

A mutant is one exact replacement in one room, listed in mutants.py. It is made in a copy of the tree in a
temporary folder, so the working tree is never touched. A text that is not found exactly once is an error: the
list must follow the code.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[1]
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


def copy_tree(root: Path, folder: Path) -> None:
    """The library, its tests and the settings they run under; the laboratory is not needed."""
    unwanted = shutil.ignore_patterns("lab", "__pycache__")
    shutil.copytree(root / "src" / "icmixup", folder / "src" / "icmixup", ignore=unwanted)
    shutil.copytree(root / "tests", folder / "tests", ignore=unwanted)
    shutil.copy(root / "pyproject.toml", folder)


def apply(mutant: Mutant, folder: Path) -> None:
    path = folder / "src" / "icmixup" / f"{mutant.room}.py"
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(
            f"{mutant.name}: found {text.count(mutant.old)} times in {mutant.room}.py: {mutant.old!r}"
        )
    path.write_text(text.replace(mutant.old, mutant.new))


def first_failure(folder: Path, rooms: list[str]) -> str | None:
    """The name of the first test that fails in a tree, None if all pass."""
    files = dict.fromkeys(f"tests/{name}" for room in rooms for name in TESTS[room])
    # PYTHONPATH comes before an installed package, editable or not.
    env = {**os.environ, "PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}
    options = ["-x", "-m", "not slow", "-p", "no:cacheprovider", "--no-header", "--tb=no"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if not lines:
        raise RuntimeError(f"pytest neither passed nor failed:\n{done.stdout}\n{done.stderr}")
    return lines[0].split(" - ")[0].split("::")[-1].removeprefix("ERROR ")


def judge(mutant: Mutant, root: Path) -> Verdict:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_tree(root, folder)
        apply(mutant, folder)
        verdict = Verdict(mutant, first_failure(folder, [mutant.room]))
    print(
        f"{'survived' if verdict.killer is None else 'killed  '}  {mutant.room:9} {mutant.name}", flush=True
    )
    return verdict


def check_unbroken(mutants: list[Mutant], root: Path) -> None:
    """Every mutant fits, and without any the tests pass: else a kill would mean nothing."""
    for mutant in mutants:
        with tempfile.TemporaryDirectory() as name:
            copy_tree(root, Path(name))
            apply(mutant, Path(name))
    failed = first_failure(root, sorted({mutant.room for mutant in mutants}))
    if failed is not None:
        raise RuntimeError(f"{failed} fails without any mutant")


def markdown_table(verdicts: list[Verdict]) -> str:
    killed = sum(verdict.killer is not None for verdict in verdicts)
    rows = [
        f"| `{mutant.room}.py` | {mutant.name} | {f'`{killer}`' if killer else '**survived**'} |"
        for mutant, killer in verdicts
    ]
    head = [f"{killed} of {len(verdicts)} mutants killed.", "", "| room | mutant | first test that fails |"]
    return "\n".join([*head, "|---|---|---|", *rows]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutants whose room or name contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--markdown", type=Path, help="write the table there too")
    args = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if args.only in f"{mutant.room} {mutant.name}"]
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(args.jobs) as pool:
        # One snapshot for all mutants, whatever happens to the working tree meanwhile.
        copy_tree(ROOT, Path(name))
        check_unbroken(chosen, Path(name))
        verdicts = list(pool.map(lambda mutant: judge(mutant, Path(name)), chosen))
    table = markdown_table(verdicts)
    print(table)
    if args.markdown:
        args.markdown.write_text(table)
    return int(any(verdict.killer is None for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
