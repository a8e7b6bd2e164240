"""icmixup analyse: its flags, and what it does with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tyro
from tyro import conf

from icmixup.lab.cli.flags import data_folder

ANALYSE_HELP = """What finished runs make of images between two classes, as in the paper's last figure.

One test image a class, all ordered pairs of classes, lam from 0 to 1 by 0.1: the mean squared norm of the
scores, of the scores less their mean and of the features, and mean and standard deviation of the score of
the first class less that of the second. Runs that differ in their seed alone are one line of the pictures.
analysis.csv, confidence.png and difference.png go into the --out folder.

  icmixup analyse runs/cifar100.resnet34.mixup.* runs/cifar100.resnet34.ic-mixup.*
  icmixup analyse runs/* --image-seed 0 1 2 --out analysis/three-choices"""


@dataclass(frozen=True, kw_only=True)
class AnalyseFlags:
    """icmixup analyse."""

    runs: conf.Positional[tuple[Path, ...]]
    """Folders of finished runs, of any methods, to be set side by side."""
    out: Path = Path("analysis")
    """Folder of analysis.csv, confidence.png and difference.png."""
    data_dir: Path = field(default_factory=data_folder)
    """Where datasets are, or are downloaded to; ICMIXUP_DATA in the environment says it too."""
    image_seed: tuple[int, ...] = ()
    """Each draws a test image of every class; if not given, the first of each is taken."""
    device: str | None = None
    """cpu, cuda, cuda:1 or mps; if not given, a GPU if there is one."""
    debug: conf.FlagCreatePairsOff[bool] = False
    """Show a traceback with an error."""


def parse_analyse(args: Sequence[str]) -> AnalyseFlags:
    return tyro.cli(
        AnalyseFlags,
        prog="icmixup analyse",
        description=ANALYSE_HELP,
        args=args,
        config=(conf.PositionalMetavarFromFieldName,),
    )


def run_analyse(flags: AnalyseFlags) -> int:
    """Analyse, print a table, write the files."""
    from icmixup.lab.analysis.scores import analyse_runs, write_analysis
    from icmixup.lab.comparison.figure import write_png
    from icmixup.lab.analysis.figure import plot_confidence, plot_difference, pooled_lines
    from icmixup.lab.training.ranks import pick_device

    if not flags.runs:
        raise ValueError("no runs to analyse; give the folders of one or more finished runs")
    rows = analyse_runs(
        flags.runs,
        data_dir=flags.data_dir,
        device=pick_device(flags.device),
        image_seeds=flags.image_seed,
    )
    paths = (
        write_analysis(rows, flags.out / "analysis.csv"),
        write_png(plot_confidence(rows), flags.out / "confidence.png"),
        write_png(plot_difference(rows), flags.out / "difference.png"),
    )
    lines = [
        (line.name, *map(middle_and_end, line.norms.values()), f"{line.means[-1]:.4g} ± {line.stds[-1]:.4g}")
        for line in pooled_lines(rows)
    ]
    return show(lines, paths)


def middle_and_end(values: Sequence[float]) -> str:
    """Where lam is 0.5, and where it is 1."""
    return f"{values[len(values) // 2]:.4g}, {values[-1]:.4g}"


def show(lines: Sequence[tuple[str, ...]], paths: Sequence[Path]) -> int:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from icmixup.lab.comparison.table import stdout_console

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    norms = ("scores", "scores less mean", "features")[: len(lines[0]) - 2]
    headings = (*(f"squared norm of {norm}\nlam 0.5, lam 1" for norm in norms), "difference\nlam 1")
    table.add_column("runs", overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right")
    for line in lines:
        table.add_row(*line)
    stdout_console().print(table, highlight=False, markup=False)
    written = "written: " + ", ".join(str(path) for path in paths)
    Console(stderr=True).print(written, highlight=False, markup=False, soft_wrap=True)
    return 0
