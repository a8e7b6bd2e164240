"""icmixup analyse: what finished runs do between two classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tyro import conf

from icmixup.lab.cli.shared import Machine
from icmixup.lab.cli.terminal import print_note, print_rows

SUMMARY = "Show what trained runs do with images between two classes, as in the paper's last figure."
HELP = f"""{SUMMARY}

For one test image per class, all ordered pairs of classes and lam from 0 to 1 in steps of 0.1: the mean
squared norm of the scores, of the centred scores and of the features, and mean and standard deviation of the
difference between the scores of the two classes. Runs that differ only in their seed share a line in the
figures. analysis.csv, confidence.png and difference.png are written to the --out folder.

  icmixup analyse runs/cifar100.resnet34.mixup.* runs/cifar100.resnet34.ic-mixup.*
  icmixup analyse runs/digits.small-cnn.quick.1a2b3c          all runs of a comparison
  icmixup analyse runs/* --image-seed 0 1 2 --out analysis/three-choices"""


@dataclass(frozen=True, kw_only=True)
class AnalyseFlags:
    """Show what trained runs do with images between two classes, as in the paper's last figure."""

    runs: conf.Positional[tuple[Path, ...]]
    """Folders of finished runs, of any methods, or of comparisons."""
    out: Path = Path("analysis")
    """Folder of analysis.csv, confidence.png and difference.png."""
    image_seed: tuple[int, ...] = ()
    """Each seed draws one test image per class; by default the first of each class is used."""
    where: Machine = field(default_factory=Machine)


def run_analyse(flags: AnalyseFlags) -> int:
    """Analyse, print a table, write the files."""
    from icmixup.lab.analysis.figure import plot_confidence, plot_difference, pooled_lines
    from icmixup.lab.analysis.scores import analyse_runs, write_analysis
    from icmixup.lab.comparison.figure import write_png
    from icmixup.lab.training.ranks import pick_device

    if not flags.runs:
        raise ValueError("no runs to analyse; pass the folders of one or more finished runs")
    rows = analyse_runs(
        flags.runs,
        data_dir=flags.where.data_dir,
        device=pick_device(flags.where.device),
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
    return print_summary(lines, paths)


def middle_and_end(values: Sequence[float]) -> str:
    """The values at lam 0.5 and at lam 1."""
    return f"{values[len(values) // 2]:.4g}, {values[-1]:.4g}"


def print_summary(lines: Sequence[tuple[str, ...]], paths: Sequence[Path]) -> int:
    norms = ("scores", "centred scores", "features")[: len(lines[0]) - 2]
    headings = (
        "runs",
        *(f"squared norm of {norm}\nlam 0.5, lam 1" for norm in norms),
        "difference\nlam 1",
    )
    print_rows(headings, lines, right=range(1, len(headings)))
    print_note("written: " + ", ".join(str(path) for path in paths))
    return 0
