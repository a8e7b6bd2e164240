"""Whether a comparison takes the time that --budget gives it, by the clock, on this machine as it is.

    python bench/budget.py --out results/budget.csv
    python bench/budget.py 2m 5m:400 --workers 2

Each case is a budget and, after a colon, epochs: `icmixup compare digits --budget 2m --epochs 400`, with all
seven methods and the quick recipe. Loading, measuring the speed, starting processes, training, evaluation and
the report count, as they do for a user. The default cases take five minutes: methods are dropped in the
first, seeds in the second, and epochs in the third.

The load of the machine before and after is recorded: a budget can only be kept if other programs leave as
much of the machine during the runs as they did during the trials. Exits with 1 if a comparison took more
than 105 % of its budget, or less than 85 % although its epochs were cut.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import os
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from rows import append_row

from icmixup.lab.cli.compare import (
    CompareFlags,
    ComparisonPlan,
    make_live_report,
    make_overview,
    make_plan,
    report,
    train_and_compare,
)
from icmixup.lab.cli.shared import Concurrency, groups_of
from icmixup.lab.comparison.compare import Comparison
from icmixup.lab.sweep.budget import SECONDS_AFTER, Plan, describe_fit, parse_budget
from icmixup.lab.training.ranks import pick_device
from icmixup.lab.training.recipe import QUICK
from icmixup.lab.training.run_folder import provenance

CASES = ("90s", "2m", "90s:400")
MOST, LEAST = 1.05, 0.85  # of the budget
COLUMNS = (
    *("budget_s", "took_s", "share", "planned_s", "measuring_s", "slower"),
    *("workers", "epochs", "seeds", "methods", "dropped"),
    *("load_before", "load_after", "device", "torch", "commit", "date"),
)


class Times(NamedTuple):
    """Seconds since the beginning, at the end of each part."""

    measured: float
    trained: float
    reported: float


class Part(NamedTuple):
    """A part of the time, as planned for the runs that were trained, and as used."""

    name: str
    planned: float
    used: float


def measure(text: str, epochs: int, seeds: int, workers: int | None) -> tuple[dict[str, object], list[Part]]:
    """A comparison within a budget, as a row; and the parts of its time."""
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        flags = make_flags(text, epochs, seeds, workers, Path(folder))
        started = time.monotonic()
        plan = make_plan(flags, (), "quick", (), started)
        assert plan.filler is not None
        first, planned, measured = plan.filler.plan, plan.filler.planned_end(), time.monotonic() - started
        comparison, times = train(flags, plan, started, measured)
    assert plan.filler is not None
    parts = divide(first, comparison, times)
    seconds = parse_budget(text)
    row = {
        "budget_s": seconds,
        "took_s": round(times.reported, 1),
        "share": round(times.reported / seconds, 3),
        "planned_s": round(planned, 1),
        "measuring_s": round(times.measured, 1),
        "slower": round(parts[1].used / parts[1].planned, 3),
        "workers": first.workers,
        "epochs": first.epochs,
        "seeds": len(comparison.seeds),
        "methods": len(comparison.methods),
        "dropped": describe_fit(plan.filler.question.asked, plan.filler.fit),
        "load_before": round(before, 1),
        "load_after": round(os.getloadavg()[0], 1),
        **provenance(pick_device()),
    }
    return row, parts


def make_flags(text: str, epochs: int, seeds: int, workers: int | None, folder: Path) -> CompareFlags:
    """icmixup compare digits --budget TEXT --epochs EPOCHS --seeds SEEDS --workers WORKERS --out FOLDER."""
    recipe = dataclasses.replace(QUICK, dataset="digits", epochs=epochs, eval_every=epochs)
    return CompareFlags(
        model=recipe.model,
        **groups_of(recipe),
        budget=text,
        seeds=seeds,
        out=folder,
        concurrency=Concurrency(workers=workers),
    )


def train(
    flags: CompareFlags, plan: ComparisonPlan, started: float, measured: float
) -> tuple[Comparison, Times]:
    """What `icmixup compare` does after it has planned."""
    folder = flags.out / "comparison"
    overview = make_overview(plan, "quick", 0, flags)
    live = make_live_report(flags, plan, folder, overview, None)
    comparison = train_and_compare(flags, plan, None, live)
    trained = time.monotonic() - started
    comparison = dataclasses.replace(comparison, overview=overview.as_json())
    with contextlib.redirect_stdout(io.StringIO()):
        report(comparison, folder, flags.out, plan.data.class_counts.tolist(), live)
    return comparison, Times(measured, trained, time.monotonic() - started)


def divide(plan: Plan, comparison: Comparison, times: Times) -> list[Part]:
    """The time of all parts, per concurrent run: planned at the speed of the trials, and used."""
    lanes, rows = plan.workers, comparison.rows
    epochs = sum(plan.epochs * plan.epoch_seconds[row["method"]] for row in rows) / lanes
    trained = sum(60 * row["minutes"] for row in rows) / lanes
    around = plan.pool_seconds + len(rows) * plan.start_seconds / lanes
    return [
        Part("loading and measuring", times.measured, times.measured),
        Part("epochs and evaluations", epochs, trained),
        Part("starts, ends, idle workers", around, times.trained - times.measured - trained),
        Part("report", SECONDS_AFTER, times.reported - times.trained),
    ]


def show(row: dict[str, object], parts: list[Part], given: float) -> None:
    """Print a row, and where the time went."""
    print(", ".join(f"{name} {row[name]}" for name in COLUMNS[:13]))
    print(f"{'':28}{'planned':>9}{'used':>9}   % of the budget used")
    total = Part("together", sum(part.planned for part in parts), sum(part.used for part in parts))
    for part in (*parts, total):
        share = 100 * part.used / given
        print(f"{part.name:28}{part.planned:8.1f}s{part.used:8.1f}s{share:9.1f}", flush=True)


def is_kept(row: dict[str, object], epochs: int) -> bool:
    """Whether the time was kept, and used where epochs could fill it."""
    share = float(str(row["share"]))
    return share <= MOST and (share >= LEAST or row["epochs"] == epochs)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", default=CASES, help="for example 90s, 5m or 1h30m:400")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, help="found out if not given")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    kept = True
    for case in args.cases:
        text, _, number = case.partition(":")
        epochs = int(number or QUICK.epochs)
        row, parts = measure(text, epochs, args.seeds, args.workers)
        show(row, parts, parse_budget(text))
        kept = kept and is_kept(row, epochs)
        append_row(row, COLUMNS, args.out)
    return int(not kept)


if __name__ == "__main__":
    raise SystemExit(main())
