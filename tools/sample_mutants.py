"""Mutate random operators, comparisons and constants of the whole package, and see whether a test notices.

    python tools/sample_mutants.py --number 100 --seed 18 --json results/sampled_mutants.json
    python tools/sample_mutants.py ... --only lab/sweep --tests tests/lab/sweep tests/lab/cli
    python tools/sample_mutants.py --record tests/lab/sweep

mutate.py has chosen mutants of the library; this draws them from every module of src/icmixup. A mutant is
judged by the test files with its module's name, or by those of its package. The result is written after
every mutant, and a second run judges only the survivors again, and what was not judged yet: with --tests, by
other tests. The working tree is never touched.

--record runs tests with a trace of which lines each of them runs (tools/recorder), into build/lines.json.
Of recorded tests, those that run a mutant's statement judge it, wherever they are. A constant of a module or
a class, or a default value, is judged by those that run any line of the function, class or module around it.

Tests must pass without a mutation, since one that fails anyway would kill every mutant: --check runs the
tests that killed a mutant without one. Tests of the integrations run with --integrations, a Python that has
the frameworks.

What is not mutated (see `skipped`), since no test could tell, or only one of another machine:

    type hints            int | None is a union, not an operator of a running program
    __all__               concerns only import *
    TYPE_CHECKING         never runs
    zip(strict=...)       True asserts what is so: only our own bug can make a difference
    padding               widths in f"{x:>{width}}", ljust, rjust, center, and indent= of JSON
    CUDA_ONLY             functions that need a GPU; tests/lab/training/test_cuda.py has their tests
    flush=                when something is printed, not what
    looks of figures      sizes, widths and fonts in keywords of Matplotlib, which are judged by eye
    clocks                < for <= between clock readings, which are never equal
    timeouts              a second more than one of ten seconds or longer
    + 0                   - for + a constant of the module that is 0, such as the number of a table's line

Other code that needs a GPU is mutated, and survives here.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
SOURCE = Path("src/icmixup")
RECORDER = Path("tools/recorder")
SECONDS = 300.0  # of tests that may judge a mutant, if they pass
FIRST_SECONDS = 40.0  # of the tests that are tried first
PATIENCE = 6.0  # a mutant that takes this many times longer hangs
START_SECONDS = 300.0  # to import torch and collect the tests, on a busy machine
INTEGRATIONS = Path.home() / ".cache/icmixup/integrations/bin/python"  # of make test-integrations
# tests/tools compares the text of the modules with mutants.py, so that it would notice any change of text.
IGNORED_TESTS = ("tests/tools",)
# Functions and classes in which no line can run without a GPU.
CUDA_ONLY = {
    "lab/training/step.py": (
        "GraphedEpoch",
        "capture",
        "cudnn_benchmark",
        "capture_streams",
        "no_garbage_collection",
    ),
}
# Tests of modules whose name no test file has.
TESTS = {
    "_checks.py": ("tests/test_methods.py", "tests/test_loss.py", "tests/test_pairs.py"),
    "_first_order.py": ("tests/test_loss.py", "tests/contrast"),
    "_install.py": ("tests/test_integrations.py",),
    "inputs.py": ("tests/test_methods.py", "tests/test_mixer.py"),
    "objective.py": ("tests/test_methods.py", "tests/test_hidden.py"),
    "contrast/triton": ("tests/contrast",),
    "contrast/": ("tests/contrast", "tests/test_loss.py"),
    "integrations/_versions.py": ("tests/test_integrations.py",),
    "lab/analysis/corruptions/": ("tests/lab/analysis/test_corruptions.py",),
    "lab/analysis/report/": ("tests/lab/analysis/report/test_report_data.py",),
    "lab/analysis/runs.py": ("tests/lab/analysis/test_analysis.py",),
    "lab/analysis/scores.py": ("tests/lab/analysis/test_analysis.py",),
    "lab/augment/": ("tests/lab/augment",),
    "lab/datasets/examples.py": ("tests/lab/datasets/test_arrays.py",),
    "lab/datasets/pickles.py": ("tests/lab/datasets/test_cifar.py", "tests/hostile/test_cifar_files.py"),
    "lab/datasets/subsets.py": ("tests/lab/datasets/test_datasets.py",),
    "lab/datasets/temporary.py": ("tests/lab/datasets/test_cache.py",),
    "lab/models/": ("tests/lab/models/test_models.py",),
    "lab/sweep/": ("tests/lab/sweep/test_sweep.py",),
    "lab/training/step.py": ("tests/lab/training/test_loop.py", "tests/lab/training/test_artifacts.py"),
}
LOOKS = ("figsize", "dpi", "fontsize", "linewidth", "markersize", "capsize", "zorder", "labelpad", "alpha")
CLOCK = re.compile(r"\btime\.(monotonic|perf_counter|time)\(\)")
PADDING = ("ljust", "rjust", "center")
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


class Mutant(NamedTuple):
    """A change of one expression: the module, its place, and both versions."""

    file: str  # below src/icmixup
    line: int
    start: int  # offset into the file, in bytes
    end: int
    before: str
    after: str
    statement: tuple[int, int]  # lines whose tests judge it, first and last
    at_import: bool  # the statement runs at import, and the lines are those of what it belongs to
    invisible: str = ""  # why no test could notice it, see `invisible`


# Finding mutants -------------------------------------------------------------------------------------------


class Finder:
    """The mutants of a module, and how many expressions were left out for which reason."""

    def __init__(self, file: str, text: str) -> None:
        self.file, self.text = file, text
        self.content = text.encode()
        self.offsets = [0]
        for line in self.content.splitlines(keepends=True):
            self.offsets.append(self.offsets[-1] + len(line))
        self.mutants: list[Mutant] = []
        self.left_out: Counter[str] = Counter()
        tree = ast.parse(text)
        self.zeros = zeros(tree)
        self.visit_body(tree.body, (1, len(self.offsets)), at_import=True)

    def visit_body(self, body: Iterable[ast.stmt], lines: tuple[int, int], at_import: bool) -> None:
        for statement in body:
            self.visit_statement(statement, lines, at_import)

    def visit_statement(self, statement: ast.stmt, lines: tuple[int, int], at_import: bool) -> None:
        """lines: those of the function, class or module around it, which judge what runs at import."""
        if reason := skipped(statement, None, self.file):
            self.count(statement, reason)
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = (statement.lineno, statement.end_lineno or statement.lineno)
            parts = [*statement.decorator_list]
            if isinstance(statement, ast.ClassDef):
                parts += [*statement.bases, *(keyword.value for keyword in statement.keywords)]
            else:
                arguments = statement.args
                parts += [*arguments.defaults, *(each for each in arguments.kw_defaults if each)]
                hints = [arg.annotation for arg in ast.walk(arguments) if isinstance(arg, ast.arg)]
                for hint in [*hints, statement.returns]:
                    self.count(hint, "type hints")
            for part in parts:
                self.visit(part, inner, True)
            self.visit_body(statement.body, inner, at_import=isinstance(statement, ast.ClassDef))
        else:
            own = header_lines(statement)
            why = invisible(statement, self.file)
            for child in ast.iter_child_nodes(statement):
                if isinstance(child, ast.stmt):
                    self.visit_statement(child, lines, at_import)
                elif isinstance(child, ast.ExceptHandler | ast.match_case):
                    self.visit_body(child.body, lines, at_import)
                elif isinstance(statement, ast.AnnAssign) and child is statement.annotation:
                    self.count(child, "type hints")
                else:
                    self.visit(child, lines if at_import else own, at_import, why)

    def visit(self, node: ast.AST, lines: tuple[int, int], at_import: bool, why: str = "") -> None:
        why = why or invisible(node, self.file)
        if isinstance(node, ast.expr):
            for after in changed_versions(node):
                self.add(node, after, lines, at_import, why or no_difference(node, self.zeros))
        for child in ast.iter_child_nodes(node):
            if reason := skipped(child, node, self.file):
                self.count(child, reason)
            else:
                self.visit(child, lines, at_import, why)

    def add(self, node: ast.expr, after: str, lines: tuple[int, int], at_import: bool, why: str) -> None:
        start = self.offsets[node.lineno - 1] + node.col_offset
        end = self.offsets[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        before = self.content[start:end].decode()
        assert ast.dump(ast.parse(f"({before})", mode="eval").body) == ast.dump(node), (self.file, before)
        self.mutants.append(
            Mutant(self.file, node.lineno, start, end, " ".join(before.split()), after, lines, at_import, why)
        )

    def count(self, node: ast.AST | None, reason: str) -> None:
        for part in ast.walk(node) if node else ():
            self.left_out[reason] += len(list(changed_versions(part)))


def header_lines(statement: ast.stmt) -> tuple[int, int]:
    """The lines of a statement without the statements in it."""
    last = statement.end_lineno or statement.lineno
    inner = [
        child.lineno - 1
        for child in ast.walk(statement)
        if isinstance(child, ast.stmt) and child is not statement
    ]
    return statement.lineno, max(statement.lineno, min([last, *inner]))


def skipped(node: ast.AST, parent: ast.AST | None, file: str) -> str:
    """Why an expression or statement is not mutated, see the text at the top; empty if it is."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in CUDA_ONLY.get(file, ()):
        return "CUDA_ONLY"
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
        return "__all__"
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return "TYPE_CHECKING"
    if isinstance(parent, ast.FormattedValue) and node is parent.format_spec:
        return "padding"
    if isinstance(node, ast.keyword) and node.arg == "indent":
        return "padding"
    if isinstance(parent, ast.Call):
        called = parent.func
        if isinstance(node, ast.keyword) and node.arg == "strict" and ast.unparse(called) == "zip":
            return "zip(strict=...)"
        if isinstance(called, ast.Attribute) and called.attr in PADDING and node is not called:
            return "padding"
    return ""


def invisible(node: ast.AST, file: str) -> str:
    """Why no test could notice a change in a statement or keyword, see the text at the top; empty if one
    could."""
    if isinstance(node, ast.keyword) and node.arg == "flush":
        return "flush="
    if isinstance(node, ast.keyword) and node.arg in LOOKS and file.endswith("figure.py"):
        return "looks of figures"
    if isinstance(node, ast.keyword | ast.Assign) and isinstance(node.value, ast.Constant):
        name = node.arg if isinstance(node, ast.keyword) else ast.unparse(node.targets[0])
        seconds = node.value.value
        if "timeout" in str(name).lower() and isinstance(seconds, int | float) and seconds >= 10:
            return "timeouts"
    return ""


def no_difference(node: ast.expr, zeros: set[str]) -> str:
    """The same for the changed expression itself, in a module with these names of 0."""
    ordered = isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE)
    if ordered and CLOCK.search(ast.unparse(node)):
        return "clocks"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        factor = node.right.left if isinstance(node.right, ast.BinOp) else node.right
        multiplied = not isinstance(node.right, ast.BinOp) or isinstance(node.right.op, ast.Mult)
        if multiplied and ast.unparse(factor) in zeros:
            return "+ 0"
    return ""


def zeros(tree: ast.Module) -> set[str]:
    """Names of a module that are 0, or Constant(0) of Triton."""
    values = {ast.unparse(each.targets[0]): each.value for each in tree.body if isinstance(each, ast.Assign)}
    return {name for name, value in values.items() if ast.unparse(value) in ("0", "Constant(0)")}


def changed_versions(node: ast.AST) -> Iterator[str]:
    """Other versions of an expression, as source."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        if not (is_text(node.left) or is_text(node.right)):
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


def find_all() -> tuple[list[Mutant], Counter[str]]:
    """All mutants of the package, and how many were left out for which reason."""
    mutants: list[Mutant] = []
    left_out: Counter[str] = Counter()
    for path in sorted((ROOT / SOURCE).rglob("*.py")):
        file = str(path.relative_to(ROOT / SOURCE))
        finder = Finder(file, path.read_text())
        mutants += finder.mutants
        left_out += finder.left_out
    return mutants, left_out


# Recording which tests run which lines ---------------------------------------------------------------------


class Lines(NamedTuple):
    """Which tests run which lines of the package, and how long a test takes."""

    tests: dict[str, dict[int, set[str]]]  # by file and line
    seconds: dict[str, float]  # of each test


def record(tests: list[str], python: Path | None, into: Path) -> None:
    """Run tests without a mutation in a copy of the tree, and add the lines of each to a file."""
    with copied_tree() as folder, tempfile.TemporaryDirectory() as written:
        ignored = [f"--ignore={path}" for path in IGNORED_TESTS]
        words = [str(python or sys.executable), "-m", "pytest", "-p", "no:cacheprovider"]
        words += ["-p", "mutation_plugin"]
        settings = {"RECORD_LINES": written, "RECORD_SOURCE": str(folder / SOURCE)}
        done = subprocess.run(
            [*words, *ignored, *tests], cwd=folder, env={**environment(folder), **settings}, check=False
        )
        if done.returncode:
            raise SystemExit(f"tests fail without any mutation: {' '.join(tests)}")
        add_recorded(Path(written), folder / SOURCE, into)


def add_recorded(written: Path, source: Path, into: Path) -> None:
    """Add what sitecustomize.py wrote to the file of all lines; tests that ran again replace themselves."""
    stored = read_lines(into)
    found: dict[str, set[tuple[str, int]]] = defaultdict(set)
    seconds: dict[str, float] = defaultdict(float)
    for path in written.glob("*.txt"):
        test = ""
        for kind, text in (line.split(" ", 1) for line in path.read_text().splitlines()):
            if kind == "T":
                test = text
            elif kind == "S":
                duration, outcome, name = text.split(" ", 2)
                if outcome == "failed":
                    raise SystemExit(f"{name} fails without any mutation")
                seconds[name] += float(duration)
            elif test:
                module, line = text.rsplit(":", 1)
                found[test].add((str(Path(module).relative_to(source)), int(line)))
    for by_line in stored.tests.values():
        for names in by_line.values():
            names -= seconds.keys()
    for phase, places in found.items():
        name, _, step = phase.rpartition(" ")
        # A fixture of a module is set up by the first test that needs it, and others use it too.
        names = (
            [name] if step != "(setup)" else [n for n in seconds if n.split("::")[0] == name.split("::")[0]]
        )
        for file, line in places:
            stored.tests.setdefault(file, {}).setdefault(line, set()).update(names)
    stored.seconds.update(seconds)
    write_lines(stored, into)


def read_lines(path: Path) -> Lines:
    if not path.exists():
        return Lines({}, {})
    stored = json.loads(path.read_text())
    names = list(stored["seconds"])
    tests = {
        file: {int(line): {names[k] for k in numbers} for line, numbers in by_line.items()}
        for file, by_line in stored["tests"].items()
    }
    return Lines(tests, stored["seconds"])


def write_lines(lines: Lines, path: Path) -> None:
    number = {name: k for k, name in enumerate(lines.seconds)}
    tests = {
        file: {line: sorted(number[name] for name in names if name in number) for line, names in by.items()}
        for file, by in lines.tests.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"seconds": lines.seconds, "tests": tests}))


class Stage(NamedTuple):
    """Tests that judge a mutant together: files or folders, and the names in them, or None for all."""

    paths: list[str]
    names: list[str] | None
    seconds: float  # what they take without a mutation, as far as known


def stages(mutant: Mutant, lines: Lines, given: list[str] | None, seconds: float) -> list[Stage]:
    """The tests of a mutant: given ones; or those with its module's name, then others that run its lines."""
    if given:
        return [Stage(given, None, SECONDS)]
    chosen: list[list[str]] = [[], []]
    spent = 0.0
    for name in tests_that_run(mutant, lines):
        if spent + lines.seconds[name] <= seconds or not spent:
            spent += lines.seconds[name]
            chosen[spent > FIRST_SECONDS].append(name)
    near = [
        path
        for path in near_tests(mutant.file)
        if not any(name.startswith((f"{path}::", f"{path}/")) for name in lines.seconds)
    ]
    return [Stage([path], None, SECONDS) for path in near] + [
        Stage(sorted({n.split("::")[0] for n in names}), names, sum(lines.seconds[n] for n in names))
        for names in chosen
        if names
    ]


def tests_that_run(mutant: Mutant, lines: Lines) -> list[str]:
    """The recorded tests that run a mutant's statement, those with its module's name first, then the
    fastest."""
    by_line = lines.tests.get(mutant.file, {})
    first, last = mutant.statement
    names = {name for line, tests in by_line.items() if first <= line <= last for name in tests}
    if mutant.at_import and not names:  # constants of a class or a function that no test calls
        names = {name for tests in by_line.values() for name in tests}
    near = near_tests(mutant.file)

    def rank(name: str) -> tuple[int, float]:
        order = [name.startswith(path) for path in near]
        return order.index(True) if True in order else len(near), lines.seconds[name]

    return sorted((name for name in names if name in lines.seconds), key=rank)


def near_tests(file: str) -> list[str]:
    """Test files with a module's name, those in TESTS, or those of its package if there are none."""
    path = Path(file)
    folder = Path("tests", *path.parts[:-1])
    word = path.parts[-2] if path.stem == "__init__" and len(path.parts) > 1 else path.stem.strip("_")
    found = sorted(each for each in (ROOT / folder).glob("test_*.py") if word in each.stem)
    listed = [tests for name, tests in TESTS.items() if file.startswith(name)]
    return [str(each.relative_to(ROOT)) for each in found] or list(listed[0] if listed else [str(folder)])


# Judging ---------------------------------------------------------------------------------------------------


def judge(mutant: Mutant, tests: list[Stage], integrations: Path | None) -> dict[str, Any]:
    """Which test kills a mutant, if any."""
    with copied_tree() as folder:
        path = folder / SOURCE / mutant.file
        content = path.read_bytes()
        path.write_bytes(content[: mutant.start] + mutant.after.encode() + content[mutant.end :])
        for stage in tests:
            killer, message = first_failure(folder, stage, integrations)
            if killer:
                # On a busy machine a test can run out of time without any mutation.
                return {"fate": "unclear" if "Timeout" in message else "killed", "test": killer}
    return {"fate": "survived", "tests": sorted({path for stage in tests for path in stage.paths})}


@contextmanager
def copied_tree() -> Iterator[Path]:
    """A temporary checkout of the last commit, with what has changed since."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "icmixup")
        subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(folder)], check=True)
        for file in git("ls-files", "-m", "-o", "--exclude-standard").splitlines():
            if (ROOT / file).exists():
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / file, folder / file)
        yield folder


def first_failure(folder: Path, stage: Stage, integrations: Path | None) -> tuple[str, str]:
    """The first test that fails in a tree, or what else happened, and the error; empty if all pass."""
    try:
        done = run_tests(folder, stage, integrations, "-x")
    except subprocess.TimeoutExpired as late:
        return f"no end after {late.timeout:.0f} s", "Timeout"
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - (.*))?$", done.stdout, re.MULTILINE)
    if failed:
        return failed[1], failed[2] or ""
    # 5: no test is left, since the mutant changes the parameters of all
    return ("" if done.returncode in (0, 5) else f"pytest exits with {done.returncode}"), ""


def run_tests(
    folder: Path, stage: Stage, integrations: Path | None, *options: str
) -> subprocess.CompletedProcess[str]:
    frameworks = stage.paths[0].startswith("tests/integrations")
    python = integrations if frameworks and integrations is not None else Path(sys.executable)
    settings = environment(folder)
    if stage.names is not None:
        chosen = folder / "chosen_tests.txt"
        chosen.write_text("\n".join(stage.names))
        settings["CHOSEN_TESTS"] = str(chosen)
    words = ["-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "mutation_plugin"]
    return subprocess.run(
        [str(python), *words, *options, *stage.paths],
        cwd=folder,
        env=settings,
        capture_output=True,
        text=True,
        timeout=START_SECONDS + PATIENCE * stage.seconds,
        check=False,
    )


def check_killers(rows: list[dict[str, Any]], integrations: Path | None) -> int:
    """Run the tests that killed a mutant without one; returns 1 if any fails, 0 otherwise."""
    names = {row["test"] for row in rows if "::" in row.get("test", "")}
    others = {name for name in names if name.startswith("tests/integrations")}
    codes = []
    with copied_tree() as folder:
        for chosen in filter(None, (names - others, others)):
            paths = sorted({name.split("::")[0] for name in chosen})
            done = run_tests(folder, Stage(paths, sorted(chosen), 10 * SECONDS), integrations)
            print(f"{len(chosen)} tests that killed a mutant, without one:\n{done.stdout}")
            codes.append(done.returncode)
    return int(any(codes))


def environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder / "src"), str(ROOT / RECORDER)]),
        "OMP_NUM_THREADS": "1",
    }


def git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


# The result ------------------------------------------------------------------------------------------------


class Result:
    """The rows of a sample, kept in a file; those of killed mutants are not judged again."""

    def __init__(self, path: Path | None, number: int, seed: int, new_tests: bool) -> None:
        self.path, self.new_tests = path, new_tests
        mutants, left_out = find_all()
        self.head: dict[str, Any] = {"number": number, "seed": seed}
        self.head |= {"commit": git("log", "-1", "--format=%h", "--", str(SOURCE))}
        self.head |= {"source": git("rev-parse", f"HEAD:{SOURCE}")}  # the tree of the package
        left_out.update(mutant.invisible for mutant in mutants if mutant.invisible)
        visible = sum(not mutant.invisible for mutant in mutants)
        self.head |= {"population": visible, "not_mutated": dict(left_out.most_common())}
        # Left out after the shuffle, so that a new rule does not exchange the rest of the sample.
        random.Random(seed).shuffle(mutants)
        self.mutants = [mutant for mutant in mutants if not mutant.invisible][:number]
        front = mutants[: mutants.index(self.mutants[-1])]
        self.head["passed_over"] = [
            {"rule": m.invisible, "file": m.file, "line": m.line, "before": m.before, "after": m.after}
            for m in front
            if m.invisible
        ]
        stored = json.loads(path.read_text()) if path is not None and path.exists() else {}
        if stored and any(stored[name] != self.head[name] for name in ("seed", "source")):
            raise SystemExit(
                f"{path} has a sample with another seed or of other source; write to another file"
            )
        self.rows = {key(row): row for row in stored.get("mutants", [])}

    def todo(self, only: str) -> list[Mutant]:
        left = [m for m in self.mutants if self.rows.get(key(m._asdict()), {}).get("fate") != "killed"]
        return [mutant for mutant in left if only in f"{mutant.file}:{mutant.line}"]

    def add(self, mutant: Mutant, verdict: dict[str, Any]) -> None:
        row = {name: getattr(mutant, name) for name in ("file", "line", "start", "before", "after")}
        earlier = self.rows.get(key(row), {})
        row |= {"at_first": "survived" if self.new_tests else verdict["fate"], **verdict}
        row |= {"commit": git("rev-parse", "--short", "HEAD"), "date": str(datetime.date.today())}
        if verdict["fate"] != "killed" and "reason" in earlier:
            row["reason"] = earlier["reason"]
        self.rows[key(row)] = row
        self.write()

    def write(self) -> None:
        if self.path is not None:
            content = {**self.summary(), "mutants": self.sampled_rows()}
            self.path.write_text(json.dumps(content, indent=1) + "\n")

    def sampled_rows(self) -> list[dict[str, Any]]:
        keys = [key(mutant._asdict()) for mutant in self.mutants]
        return [self.rows[each] for each in keys if each in self.rows]

    def summary(self) -> dict[str, Any]:
        rows = self.sampled_rows()
        return {
            **self.head,
            "judged": len(rows),
            "killed": sum(row["fate"] == "killed" for row in rows),
            "killed_at_first": sum(row["at_first"] == "killed" for row in rows),
        }


def key(row: dict[str, Any]) -> tuple[object, ...]:
    return row["file"], row["start"], row["before"], row["after"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Mutate random expressions of the package and run its tests."
    )
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="only those of the sample whose FILE:LINE contains this")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after this time")
    parser.add_argument("--json", type=Path, help="the result; a file that exists is completed")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of recorded tests for each mutant")
    parser.add_argument("--jobs", type=int, default=1, help="mutants judged concurrently")
    parser.add_argument("--tests", nargs="+", help="judge by these tests, for example all of them: tests")
    parser.add_argument(
        "--new-tests", action="store_true", help="tests were written since the draw: not killed at first"
    )
    parser.add_argument("--check", action="store_true", help="run the tests that killed, without a mutation")
    parser.add_argument("--lines", type=Path, default=ROOT / "build/lines.json", help="lines of each test")
    parser.add_argument("--record", nargs="+", metavar="TESTS", help="record the lines of these tests")
    parser.add_argument("--integrations", type=Path, default=INTEGRATIONS, help="Python with the frameworks")
    args = parser.parse_args()
    integrations = args.integrations if args.integrations.exists() else None
    if args.record is not None:
        frameworks = args.record[0].startswith("tests/integrations")
        record(args.record, integrations if frameworks else None, args.lines)
        return 0
    result = Result(args.json, args.number, args.seed, args.new_tests)
    if args.check:
        return check_killers(result.sampled_rows(), integrations)
    lines = read_lines(args.lines)
    work = [(mutant, stages(mutant, lines, args.tests, args.seconds)) for mutant in result.todo(args.only)]
    judge_all(result, work, integrations, args.jobs, args.minutes)
    summary = result.summary()
    print(f"{summary['killed']} of {summary['judged']} mutants killed")
    return int(summary["killed"] < 0.95 * summary["judged"])


def judge_all(
    result: Result,
    work: list[tuple[Mutant, list[Stage]]],
    integrations: Path | None,
    jobs: int,
    minutes: float,
) -> None:
    limit = time.monotonic() + 60 * minutes

    def judge_in_time(mutant: Mutant, tests: list[Stage]) -> tuple[Mutant, dict[str, Any] | None]:
        in_time = time.monotonic() < limit
        return mutant, judge(mutant, tests, integrations) if in_time else None

    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(judge_in_time, *each) for each in work]):
            mutant, verdict = done.result()
            if verdict is not None:
                place = f"{mutant.file}:{mutant.line}"
                print(f"{verdict['fate']:9} {place}  {mutant.before}  ->  {mutant.after}", flush=True)
                result.add(mutant, verdict)


if __name__ == "__main__":
    sys.exit(main())
