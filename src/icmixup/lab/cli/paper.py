"""icmixup paper: the paper's tables and figures, our results beside its own, and the runs that produce
them."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from tyro import conf

from icmixup.lab.cli.shared import Concurrency, Flag, Machine
from icmixup.lab.cli.terminal import is_first_rank, print_note, stderr_console
from icmixup.lab.training.execution import Execution
from icmixup.lab.wording import count

if TYPE_CHECKING:
    from icmixup.lab.paper.deadline import Deadline
    from icmixup.lab.paper.plan import Plan
    from icmixup.lab.paper.results import Results
    from icmixup.lab.paper.spec import PaperTable
    from icmixup.lab.sweep.progress import Display
    from icmixup.lab.training.loop import RunProgress
    from icmixup.lab.training.recipe import Recipe
    from icmixup.lab.training.run_folder import Row

SUMMARY = "Show the paper's tables and figures with our results beside them, or train what is missing."
HELP = f"""{SUMMARY}

  icmixup paper                                   all of them, and how many of their cells have runs
  icmixup paper table1-right                      one table, the paper's numbers and ours side by side
  icmixup paper table1-right --run-missing        train what is missing; the same command resumes
  timeout 50m icmixup paper --run-missing         train for fifty minutes; unfinished runs resume later
  icmixup paper --run-missing --budget 50m        start only runs that will end within fifty minutes
  icmixup paper --run-missing --seeds 1 --only 'ic-mixup/10 %*' 'ic-*/*0.01/resnet32'
  icmixup paper table2-right --markdown           or --latex, or --json"""


@dataclass(frozen=True, kw_only=True)
class PaperFlags:
    """Show the paper's tables and figures with our results beside them, or train what is missing."""

    tables: conf.Positional[tuple[str, ...]] = ()
    """table1-left, figure-regmixup, long-tail, ...; all of them by default."""
    run_missing: Flag = False
    """Train what the tables lack, cheapest first, the first seed of all cells before the second of any."""
    seeds: int | None = None
    """Runs per cell; as many as in the paper by default, mostly 3."""
    only: tuple[str, ...] = ()
    """Train only these cells: a method, row, column, model or dataset, or method/column/model; * matches
    anything."""
    budget: str | None = None
    """Start only runs that are expected to end within this time, such as 90s, 50m or 1h30m; for a machine
    that loses its files afterwards."""
    compile: Flag = False
    """Use torch.compile."""
    json: Flag = False
    """Print JSON."""
    markdown: Flag = False
    """Print Markdown."""
    latex: Flag = False
    """Print LaTeX, for booktabs."""
    write: Flag = False
    """Write README.md beside the results, with every table."""
    results: Path = Path("results/runs.csv")
    """File of all runs, one row each; rows are appended and never changed."""
    append: Path | None = None
    """Append the rows of this file, made elsewhere by the same command, to --results: all of them or none."""
    out: Path = Path("runs")
    """Folder of all runs."""
    reuse: Flag = False
    """Also use runs of another version of icmixup, kind of device or precision, if images, network and recipe
    agree."""
    where: Machine = field(default_factory=Machine)
    concurrency: Concurrency = field(default_factory=Concurrency)

    def execution(self) -> Execution:
        return Execution(
            out=self.out,
            data_dir=self.where.data_dir,
            device=self.where.device,
            reuse=self.reuse,
            **dataclasses.asdict(self.concurrency),
        )


def run_paper(flags: PaperFlags) -> int:
    """Train if asked to, then print the tables."""
    from icmixup.lab.paper.published import TABLES, find_table
    from icmixup.lab.paper.results import read_rows

    check_paper(flags)
    named = [find_table(name) for name in flags.tables]
    if flags.append is not None:
        from icmixup.lab.paper.results import append_file

        rows = append_file(flags.results, flags.append)
        print_note(f"appended: {count(len(rows), 'row')} of {flags.append}")
    results = read_rows(flags.results)
    for damage in results.damaged:
        print_note(str(damage))
    lost: list[str] = []
    if flags.run_missing:
        lost = run_missing(named or list(TABLES.values()), flags, results)
        results = read_rows(flags.results)
    if not is_first_rank():
        return 1 if lost else 0
    if flags.write:
        from icmixup.lab.paper.render import write_page

        print_note(f"written: {write_page(results, flags.results.with_name('README.md'))}")
    print_tables(named, flags, results)
    for text in lost:
        print_note(f"icmixup: {text}")
    return 1 if lost else 0


def check_paper(flags: PaperFlags) -> None:
    if sum((flags.json, flags.markdown, flags.latex)) > 1:
        raise ValueError("--json, --markdown and --latex exclude each other; use one of them")
    if flags.seeds is not None and flags.seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {flags.seeds}")
    needing = [name for name in ("seeds", "only", "compile", "budget") if getattr(flags, name)]
    if needing and not flags.run_missing:
        raise ValueError(f"--{needing[0]} selects what to train and needs --run-missing")
    if flags.budget is not None and flags.concurrency.engine != "local":
        raise ValueError("--budget needs --engine local: on Ray the order of runs is up to the cluster")


def run_missing(tables: Sequence[PaperTable], flags: PaperFlags, results: Results) -> list[str]:
    """Train what the tables lack, and append a row for each run as it ends; returns which runs were lost."""
    from icmixup.lab.paper.fill import index_results
    from icmixup.lab.paper.plan import choose_cells, plan_missing_runs, seconds_per_work
    from icmixup.lab.paper.results import check_file
    from icmixup.lab.sweep import find_finished
    from icmixup.lab.sweep.cost import work
    from icmixup.lab.sweep.progress import Display
    from icmixup.lab.training.ranks import pick_device
    from icmixup.lab.training.run_folder import provenance

    index = index_results(results.rows)
    plan = plan_missing_runs(
        choose_cells(tables, flags.only), index, flags.where.data_dir, flags.seeds, flags.compile
    )
    print_notes(plan, flags)
    check_file(flags.results, plan.recipes)
    finished = find_finished(plan.recipes, flags.execution())
    seconds_each = seconds_per_work(index, provenance(pick_device(flags.where.device))["device"])
    deadline = make_deadline(
        [recipe for recipe in plan.recipes if recipe not in finished], flags, seconds_each
    )
    display = Display(
        plan.recipes if deadline is None else list(finished),
        stderr_console(),
        work=work,
        finished=finished,
        seconds_each=seconds_each,
        title=attrgetter("title"),
    )
    with display:
        lost = train_missing(flags, display, deadline)
    if deadline is not None and deadline.waiting:
        print_note(
            f"not started, since they would not have ended within --budget {flags.budget}: "
            f"{len(deadline.waiting)} of {len(plan.recipes)} runs"
        )
    return lost


def make_deadline(
    recipes: Sequence[Recipe], flags: PaperFlags, seconds_each: float | None
) -> Deadline | None:
    """What keeps --budget; None without it."""
    if flags.budget is None:
        return None
    from icmixup.lab.paper.deadline import Deadline, measure_work, on_one_gpu
    from icmixup.lab.sweep.budget import parse_budget
    from icmixup.lab.sweep.local import count_workers
    from icmixup.lab.training.ranks import world_size

    if world_size() > 1:
        raise ValueError("--budget is not available under torchrun: clocks of its processes differ")
    started, seconds = time.monotonic(), parse_budget(flags.budget)
    concurrent = count_workers(max(1, len(recipes)), flags.where.device, flags.concurrency.workers)
    if seconds_each is None and recipes:  # the cheapest first
        print_note("measuring the speed of this machine, of which there are no results yet")
        seconds_each = measure_work(recipes[0], flags.execution())
    seconds -= time.monotonic() - started
    on_gpu = on_one_gpu(flags.where.device)
    return Deadline(recipes, seconds, concurrent, seconds_each or 0.0, on_gpu=on_gpu)


def print_notes(plan: Plan, flags: PaperFlags) -> None:
    """Say what cannot be trained, what stands in for missing data, and which runs are not reused."""
    from icmixup.lab.paper.plan import describe_missing_data, describe_stand_ins
    from icmixup.lab.sweep import describe_reuse

    missing = describe_missing_data(plan, flags.where.data_dir)
    if missing and not plan.recipes:
        raise ValueError("; ".join(missing))
    for sentence in (*missing, *describe_stand_ins(plan), *describe_reuse(plan.recipes, flags.execution())):
        print_note(sentence)


def train_missing(flags: PaperFlags, display: Display, deadline: Deadline | None) -> list[str]:
    """Train the runs of the display and those that a deadline adds, and append their rows; returns which
    runs were lost."""
    from icmixup.lab.paper.results import append_rows
    from icmixup.lab.sweep import run_recipes

    lost: list[str] = []

    def fail(recipe: Recipe, reason: str) -> None:
        lost.append(f"{recipe.title} has no result: {reason}")
        display.fail(recipe, reason)

    def keep(row: Row) -> None:
        if is_first_rank():
            append_rows(flags.results, [(display.recipes[row["key"]], row)])
        display.finish(row)

    def show(recipe: Recipe, progress: RunProgress) -> None:
        if deadline is not None:
            deadline.listen(recipe, progress)
        display.update(recipe, progress)

    def start_next() -> list[Recipe]:
        assert deadline is not None
        found = deadline.more()
        display.expect([*display.recipes.values(), *found])
        return found

    run_recipes(
        list(display.recipes.values()),
        flags.execution(),
        on_row=keep,
        on_progress=show,
        on_failure=fail,
        more=None if deadline is None else start_next,
    )
    return lost


def print_tables(named: Sequence[PaperTable], flags: PaperFlags, results: Results) -> None:
    """The named tables, or the list of all, in the requested format."""
    from icmixup.lab.comparison.table import stdout_console
    from icmixup.lab.paper.fill import fill_table, index_results
    from icmixup.lab.paper.published import TABLES
    from icmixup.lab.paper.render import (
        conflict_notes,
        overview_as_markdown,
        overview_table,
        print_table,
        table_as_json,
        table_as_latex,
        table_as_markdown,
    )

    index = index_results(results.rows)
    filled = [fill_table(table, index) for table in named or TABLES.values()]
    if flags.json:
        damaged = [str(damage) for damage in results.damaged]
        tables_json = [table_as_json(table) for table in filled]
        print(json.dumps({"tables": tables_json, "damaged": damaged}, indent=1))
    elif flags.latex:
        print("\n".join(table_as_latex(table) for table in filled), end="")
    elif flags.markdown:
        tables = "\n".join(table_as_markdown(table) for table in filled)
        print(tables if named else overview_as_markdown(filled))
    elif named:
        for table in filled:
            print_table(table, stdout_console())
    else:
        stdout_console().print(overview_table(filled))
        for text in conflict_notes(results.rows):
            print(text)
