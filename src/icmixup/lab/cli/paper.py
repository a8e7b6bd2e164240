"""icmixup paper: the paper's tables and figures, our numbers beside its own, and the runs that make them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import tyro
from tyro import conf

from icmixup.lab.paper.spec import PaperTable
from icmixup.lab.cli.flags import data_folder
from icmixup.lab.training.ranks import rank
from icmixup.lab.paper.results import Results, append_rows, check_file, read_rows

PAPER_HELP = """The paper's tables and figures: its numbers, ours beside them, and the runs that make ours.

  icmixup paper                                   all of them, and how many of their cells have runs of ours
  icmixup paper table1-right                      one, paper and ours side by side
  icmixup paper table1-right --run-missing        train what is missing; stopped, the same command goes on
  timeout 50m icmixup paper --run-missing         for fifty minutes; the same command goes on
  icmixup paper --run-missing --seeds 1 --only 'ic-mixup/10 %*' 'ic-*/*0.01/resnet32'
  icmixup paper table2-right --markdown           or --latex, or --json"""

Flag = conf.FlagCreatePairsOff[bool]


@dataclass(frozen=True, kw_only=True)
class PaperFlags:
    """icmixup paper."""

    tables: conf.Positional[tuple[str, ...]] = ()
    """table1-left, figure-regmixup, long-tail, ...; all of them if not given."""
    run_missing: Flag = False
    """Train what the tables lack, cheapest first, the first seed of all before the second of any."""
    seeds: int | None = None
    """Runs a cell; as many as the paper made, mostly 3, if not given."""
    only: tuple[str, ...] = ()
    """Train these cells alone: a method, row, column, model or dataset, or method/column/model, with * for
    anything."""
    compile: Flag = False
    """torch.compile the models."""
    engine: Literal["local", "ray"] = "local"
    """Where to train: on this machine, or on a Ray cluster."""
    address: str | None = None
    """Of the Ray cluster; auto for the one this machine is part of."""
    workers: int | None = None
    """How many runs at once, 3 on a large GPU, say; if not given, one a GPU, or what the cores allow."""
    device: str | None = None
    """cpu, cuda or cuda:1; if not given, a GPU if there is one."""
    json: Flag = False
    """Print JSON."""
    markdown: Flag = False
    """Print Markdown."""
    latex: Flag = False
    """Print LaTeX, for booktabs."""
    write: Flag = False
    """Write README.md beside the results, with every table."""
    results: Path = Path("results/runs.csv")
    """The file of all runs, a row each; rows are appended, and never changed."""
    out: Path = Path("runs")
    """Folder of all runs."""
    data_dir: Path = field(default_factory=data_folder)
    """Where datasets are; ICMIXUP_DATA in the environment says it too."""
    debug: Flag = False
    """Show a traceback with an error."""


def parse_paper(args: Sequence[str]) -> PaperFlags:
    return tyro.cli(
        PaperFlags,
        prog="icmixup paper",
        description=PAPER_HELP,
        args=args,
        config=(conf.PositionalMetavarFromFieldName,),
    )


def run_paper(flags: PaperFlags) -> int:
    """Train if asked to, then show; tables go to stdout, all else to stderr."""
    from icmixup.lab.paper.published import TABLES, find_table

    check_flags(flags)
    named = [find_table(name) for name in flags.tables]
    results = read_rows(flags.results)
    for damage in results.damaged:
        tell(str(damage))
    if flags.run_missing:
        run_missing(named or list(TABLES.values()), flags, results)
        results = read_rows(flags.results)
    if rank() != 0:  # under torchrun the first speaks for all
        return 0
    if flags.write:
        from icmixup.lab.paper.render import write_page

        tell(f"written: {write_page(results, flags.results.with_name('README.md'))}")
    show(named, flags, results)
    return 0


def check_flags(flags: PaperFlags) -> None:
    if sum((flags.json, flags.markdown, flags.latex)) > 1:
        raise ValueError("give one of --json, --markdown and --latex")
    if flags.seeds is not None and flags.seeds < 1:
        raise ValueError(f"--seeds {flags.seeds} trains nothing; give 3, say")
    asked = [name for name in ("seeds", "only", "compile") if getattr(flags, name)]
    if asked and not flags.run_missing:
        raise ValueError(f"--{asked[0]} says what to train, and nothing is trained without --run-missing")


def run_missing(tables: Sequence[PaperTable], flags: PaperFlags, results: Results) -> None:
    """Train what tables lack, and append a row for each run as it ends."""
    from icmixup.lab.sweep.budget import work
    from icmixup.lab.sweep.ray import find_finished, run_recipes
    from icmixup.lab.paper.plan import (
        choose_cells,
        describe_missing_data,
        describe_stand_ins,
        plan_missing_runs,
        seconds_per_work,
    )
    from icmixup.lab.paper.fill import index_results
    from icmixup.lab.sweep.progress import Display
    from icmixup.lab.training.ranks import pick_device
    from icmixup.lab.training.run_folder import provenance

    index = index_results(results.rows)
    cells = choose_cells(tables, flags.only)
    plan = plan_missing_runs(cells, index, flags.data_dir, flags.seeds, flags.compile)
    missing_data = describe_missing_data(plan, flags.data_dir)
    if missing_data and not plan.recipes:
        raise ValueError("; ".join(missing_data))
    for sentence in (*missing_data, *describe_stand_ins(plan)):
        tell(sentence)
    check_file(flags.results, plan.recipes)
    display = Display(
        plan.recipes,
        stderr_console(),
        work=work,
        rests=find_finished(plan.recipes, flags.out),
        seconds_each=seconds_per_work(index, provenance(pick_device(flags.device))["device"]),
        title=attrgetter("title"),
    )
    with display:

        def keep(row: dict[str, Any]) -> None:
            if rank() == 0:
                append_rows(flags.results, [(display.recipes[row["key"]], row)])
            display.finish(row)

        run_recipes(
            plan.recipes,
            flags.out,
            data_dir=flags.data_dir,
            engine=flags.engine,
            address=flags.address,
            workers=flags.workers,
            device=flags.device,
            on_row=keep,
            on_beat=display.beat,
            on_failure=display.fail,
        )


def show(named: Sequence[PaperTable], flags: PaperFlags, results: Results) -> None:
    """The tables that were named, or the list of all, in the form asked for."""
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
    from icmixup.lab.paper.fill import fill_table, index_results
    from icmixup.lab.comparison.table import stdout_console

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


def stderr_console() -> Any:
    from rich.console import Console

    return Console(stderr=True, quiet=rank() != 0)


def tell(text: str) -> None:
    if rank() == 0:
        print(text, file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(run_paper(parse_paper(sys.argv[1:])))
