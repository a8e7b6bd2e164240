"""Mutate random operators, comparisons and constants of the whole package, and see whether a test notices.

    python tools/sample_mutants.py --number 100
    python tools/sample_mutants.py --number 20 --seed 1 --only lab/sweep
    python tools/sample_mutants.py --json results/mutants_sample.json

mutate.py has chosen mutants of the library; this draws them from every module. A mutant is judged by the
tests that mirror its module (tests/lab/x/test_y.py for lab/x/y.py), then by those of its package, then by the
whole suite with --whole. Tests must pass without a mutation first: one that fails anyway would kill every
mutant.
The working tree is never touched.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
SOURCE = Path("src/icmixup")
SECONDS = 600.0
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
}
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
# Kernels need a GPU, and drawings are judged by eye.
SKIPPED = ("contrast/triton_", "lab/report", "/figure.py", "lab/sweep/ray.py", "integrations/")


class Mutant(NamedTuple):
    """A change of one expression: the module, its place, and both versions."""

    module: str
    line: int
    start: int  # offset into the file, in bytes
    end: int
    old: str
    new: str


def find_mutants(path: Path, root: Path) -> Iterator[Mutant]:
    text = path.read_text()
    offsets = [0]
    for line in text.encode().splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    for node in ast.walk(ast.parse(text)):
        old = ast.unparse(node) if isinstance(node, ast.expr) else ""
        for new in changed_versions(node):
            start = offsets[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
            end = offsets[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
            module = str(path.relative_to(root / SOURCE))
            yield Mutant(module, node.lineno, start, end, old, new)  # type: ignore[attr-defined]


def changed_versions(node: ast.AST) -> Iterator[str]:
    """Other versions of an expression, as source."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        if not any(
            isinstance(side, ast.Constant | ast.JoinedStr) and is_text(side)
            for side in (node.left, node.right)
        ):
            yield f"({ast.unparse(ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right))})"
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        swapped = [COMPARISONS[type(node.ops[0])](), *node.ops[1:]]
        yield f"({ast.unparse(ast.Compare(node.left, swapped, node.comparators))})"
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield f"({ast.unparse(ast.BoolOp(other, node.values))})"
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield repr(node.value + 1)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield repr(not node.value)


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)


def inside_annotation_or_docstring(mutant: Mutant, text: bytes) -> bool:
    """Type hints such as int | None are unions, not operators of a running program."""
    line = text.decode().splitlines()[mutant.line - 1].strip()
    return line.startswith(("def ", "Bytes =", "Row =")) or "->" in line or "|" in mutant.old


def tests_for(module: str, whole: bool) -> list[tuple[str, ...]]:
    """The tests of a module, nearest first: those that mirror it, those of its package, all."""
    path = Path(module)
    mirror = Path("tests", *path.parts[:-1], f"test_{path.stem.lstrip('_')}.py")
    folder = Path("tests", *path.parts[:-1])
    stages: list[tuple[str, ...]] = [(str(mirror),)] if (ROOT / mirror).exists() else []
    if len(path.parts) > 1 and (ROOT / folder).is_dir():
        stages.append((str(folder),))
    elif len(path.parts) == 1:
        stages.append(
            tuple(sorted(str(file.relative_to(ROOT)) for file in (ROOT / "tests").glob("test_*.py")))
        )
    if whole or not stages:
        stages.append(("tests", "--ignore", "tests/integrations"))
    return stages


def judge(mutant: Mutant, whole: bool) -> str:
    """killed, survived, or timeout (which counts as killed)."""
    with copied_tree() as folder:
        path = folder / SOURCE / mutant.module
        content = path.read_bytes()
        path.write_bytes(content[: mutant.start] + mutant.new.encode() + content[mutant.end :])
        fates = (run_tests(folder, tests) for tests in tests_for(mutant.module, whole))
        return next((fate for fate in fates if fate != "survived"), "survived")


@contextmanager
def copied_tree() -> Iterator[Path]:
    """A temporary checkout of the last commit, with what has changed since."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "icmixup")
        subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(folder)], check=True)
        listed = subprocess.run(
            ["git", "ls-files", "-m", "-o", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        for file in listed.stdout.splitlines():
            if (ROOT / file).exists():
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / file, folder / file)
        yield folder


def run_tests(folder: Path, tests: tuple[str, ...]) -> str:
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            words, cwd=folder, env=environment, capture_output=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return "timeout"
    return "survived" if done.returncode == 0 else "killed"


def check_unmutated(mutants: list[Mutant], whole: bool, jobs: int) -> None:
    """Raise an error unless all tests that will judge pass as the code is."""
    # The last set of a module contains the others.
    sets = sorted({tests_for(mutant.module, whole)[-1] for mutant in mutants})
    with copied_tree() as folder, ThreadPoolExecutor(jobs) as pool:
        fates = dict(zip(sets, pool.map(lambda tests: run_tests(folder, tests), sets), strict=True))
    failing = [" ".join(tests) for tests, fate in fates.items() if fate != "survived"]
    if failing:
        raise SystemExit(f"these tests fail without any mutation: {'; '.join(failing)}")


def draw(number: int, seed: int, only: str) -> list[Mutant]:
    mutants = []
    for path in sorted((ROOT / SOURCE).rglob("*.py")):
        module = str(path.relative_to(ROOT / SOURCE))
        if only in module and not any(part in f"/{module}" for part in SKIPPED):
            text = path.read_bytes()
            mutants += [m for m in find_mutants(path, ROOT) if not inside_annotation_or_docstring(m, text)]
    return random.Random(seed).sample(mutants, min(number, len(mutants)))


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Mutate random expressions of the package and run its tests."
    )
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="modules whose path contains this")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after this time")
    parser.add_argument("--json", type=Path, help="write the result there too")
    parser.add_argument("--jobs", type=int, default=1, help="mutants judged concurrently")
    parser.add_argument("--whole", action="store_true", help="let the whole suite judge what survives")
    args = parser.parse_args()
    result = run(args)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['killed']} of {result['judged']} mutants killed")
    return int(result["killed"] < 0.95 * result["judged"])


def run(args: argparse.Namespace) -> dict[str, Any]:
    limit = time.monotonic() + 60 * args.minutes
    mutants = draw(args.number, args.seed, args.only)
    check_unmutated(mutants, args.whole, args.jobs)

    def judge_in_time(mutant: Mutant) -> dict[str, Any] | None:
        if time.monotonic() > limit:
            return None
        fate = judge(mutant, args.whole)
        print(f"{fate:9} {mutant.module}:{mutant.line}  {mutant.old}  ->  {mutant.new}", flush=True)
        return {"fate": fate, **mutant._asdict()}

    with ThreadPoolExecutor(args.jobs) as pool:
        judged = [each for each in pool.map(judge_in_time, mutants) if each is not None]
    killed = sum(each["fate"] != "survived" for each in judged)
    survivors = [each for each in judged if each["fate"] == "survived"]
    return {"seed": args.seed, "judged": len(judged), "killed": killed, "survivors": survivors}


if __name__ == "__main__":
    sys.exit(main())
