"""icmixup evaluate: finished runs on shifted data."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tyro import conf

from icmixup.lab.cli.shared import Flag, Machine
from icmixup.lab.cli.terminal import print_note, print_rows, stderr_console
from icmixup.lab.wording import NO_VALUE, count, format_or_dash, with_spread

if TYPE_CHECKING:
    from icmixup.lab.analysis.robustness import Summary
    from icmixup.lab.analysis.shifted import OnProgress

SUMMARY = "Evaluate trained runs on shifted data: corrupted test images, and images of other classes."
HELP = f"""{SUMMARY}

The test images of the runs under 15 common corruptions (noise, blur, weather, compression) at five strengths,
after Hendrycks and Dietterich (2019); every run sees the same corrupted images. With --ood, how well the
confidence of a network separates its test images from the images of another folder. The results of each run
are stored as evaluation.json in its folder and reused.

  icmixup evaluate runs/digits.small-cnn.quick.1a2b3c         all runs of a comparison
  icmixup evaluate runs/photos.resnet18.* --ood other/photos --csv shifted.csv
  icmixup evaluate runs --corruptions fog snow --strengths 3 5 --baseline erm"""
QUIET_SECONDS = 30.0  # between two lines of progress where there is no terminal


@dataclass(frozen=True, kw_only=True)
class EvaluateFlags:
    """Evaluate trained runs on shifted data: corrupted test images, and images of other classes."""

    runs: conf.Positional[tuple[Path, ...]]
    """Folders of finished runs of one dataset, of comparisons, or a folder that contains runs."""
    corruptions: tuple[str, ...] = ()
    """Names of corruptions, for example fog jpeg_compression; all 15 by default."""
    strengths: tuple[int, ...] = (1, 2, 3, 4, 5)
    """Strengths from 1 to 5."""
    ood: tuple[Path, ...] = ()
    """Folders of images of other classes (out-of-distribution data)."""
    baseline: str | None = None
    """Method that the others are compared with; mixup by default, or the first method."""
    json: Path | None = None
    """JSON file to write: summaries, and the evaluation of every run."""
    csv: Path | None = None
    """CSV file to write: one row per run, corruption and strength."""
    fresh: Flag = False
    """Evaluate again what was evaluated before."""
    where: Machine = field(default_factory=Machine)


def run_evaluate(flags: EvaluateFlags) -> int:
    """Evaluate, print tables, write the files."""
    from icmixup.lab.analysis.corruptions import CORRUPTIONS
    from icmixup.lab.analysis.robustness import (
        evaluations_as_csv,
        evaluations_as_json,
        pick_baseline_line,
        summarise,
    )
    from icmixup.lab.analysis.shifted import evaluate_runs, find_runs, make_plan
    from icmixup.lab.analysis.stored_evaluation import EVALUATION_FILE
    from icmixup.lab.training.ranks import pick_device

    plan = make_plan(flags.corruptions or tuple(CORRUPTIONS), flags.strengths, flags.ood)
    device = pick_device(flags.where.device)
    runs = find_runs(flags.runs)
    baseline = pick_baseline_line(runs, flags.baseline)
    with show_progress() as on_progress:
        evaluated = evaluate_runs(
            runs,
            plan,
            data_dir=flags.where.data_dir,
            device=device,
            fresh=flags.fresh,
            on_progress=on_progress,
        )
    summaries = summarise(evaluated, plan, baseline)
    print_summaries(summaries, baseline)
    if flags.json is not None:
        content = evaluations_as_json(evaluated, summaries, baseline)
        write_file(flags.json, json.dumps(content, indent=1, allow_nan=False))
    if flags.csv is not None:
        write_file(flags.csv, evaluations_as_csv(evaluated))
    print_note(f"results of each run: {EVALUATION_FILE} in {count(len(runs), 'run folder')}")
    return 0


@contextmanager
def show_progress() -> Iterator[OnProgress]:
    """A bar in a terminal, a line from time to time elsewhere, on stderr."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = stderr_console()
    columns = (TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.percentage:>3.0f} %"))
    printed = time.monotonic()
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("loading data", total=None)

        def report(what: str, done: int, total: int) -> None:
            nonlocal printed
            bar.update(task, description=what, completed=done, total=total)
            if not console.is_terminal and time.monotonic() - printed > QUIET_SECONDS:
                printed = time.monotonic()
                print_note(f"{what}: {100 * done / total:.0f} % of all images")

        yield report


def write_file(path: Path, text: str) -> None:
    from icmixup.lab.training.output import write_output

    write_output(path, text.encode())
    print_note(f"written: {path}")


def print_summaries(summaries: Sequence[Summary], baseline: str | None) -> None:
    """Accuracy; probabilities and other images; accuracy under each corruption."""
    print_accuracies(summaries, baseline)
    print_probabilities(summaries)
    rows = [
        (name, *(f"{summary.by_corruption[name]:.1f}" for summary in summaries))
        for name in summaries[0].by_corruption
    ]
    lines = [summary.line for summary in summaries]
    print_rows(("accuracy % under", *lines), rows, right=range(1, 1 + len(lines)))
    if baseline is not None:
        print_note(
            "differences are paired by seed, and their intervals cover new seeds, not new test images; "
            "mCE is the corruption error relative to the baseline's, in percent"
        )


def print_accuracies(summaries: Sequence[Summary], baseline: str | None) -> None:
    strengths = list(summaries[0].by_strength)
    headings = ["method", "runs", "clean %", "corrupted %", *(f"strength\n{s}" for s in strengths)]
    rows = [
        [
            summary.line,
            str(len(summary.seeds)),
            with_spread(summary.clean["accuracy"], summary.clean_std),
            with_spread(summary.corrupted["accuracy"], summary.corrupted_std),
            *(f"{accuracy:.1f}" for accuracy in summary.by_strength.values()),
        ]
        for summary in summaries
    ]
    if baseline is not None:
        headings += ["mCE", f"corrupted, against {baseline}\n[95 % interval]"]
        for row, summary in zip(rows, summaries, strict=True):
            row += compared_cells(summary, baseline)
    print_rows(headings, rows, right=range(1, len(headings)))


def compared_cells(summary: Summary, baseline: str) -> list[str]:
    if summary.line == baseline:
        return ["100", "baseline"]
    difference = NO_VALUE if summary.difference is None else str(summary.difference)
    return [format_or_dash(summary.corruption_error, ".1f"), difference]


def print_probabilities(summaries: Sequence[Summary]) -> None:
    """Quality of the probabilities on clean and corrupted images, and separation from other images."""
    others = list(summaries[0].ood)
    headings = [
        "method",
        "NLL\nclean → corrupted",
        "calib. error %\nclean → corrupted",
        "after scaling\nclean → corrupted",
        *(f"{name}\nAUROC %, FPR95 %" for name in others),
    ]
    rows = [
        [
            summary.line,
            clean_and_corrupted(summary, "nll", ".2f"),
            clean_and_corrupted(summary, "calibration_error", ".1f"),
            clean_and_corrupted(summary, "calibration_error_scaled", ".1f"),
            *(f"{summary.ood[name]['auroc']:.1f}, {summary.ood[name]['fpr95']:.1f}" for name in others),
        ]
        for summary in summaries
    ]
    print_rows(headings, rows, right=range(1, len(headings)))


def clean_and_corrupted(summary: Summary, metric: str, form: str) -> str:
    return " → ".join(format_or_dash(part[metric], form) for part in (summary.clean, summary.corrupted))
