"""icmixup report: finished runs as one HTML page."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro import conf

from icmixup.lab.cli.shared import Flag, Machine
from icmixup.lab.cli.terminal import print_note
from icmixup.lab.wording import count

SUMMARY = "Write finished runs as one HTML page, with charts, mistakes and mixed images."
HELP = f"""{SUMMARY}

The page is a single file that loads nothing from elsewhere. It shows the verdict, differences to any
baseline, accuracies by class, calibration, confusions, the most confident mistakes, learning curves, cost,
and what the networks make of mixed test images. All runs must be of one dataset; they may be of several
comparisons. icmixup compare writes the same page into the folder of a comparison.

  icmixup report runs/digits.small-cnn.quick.1a2b3c              one comparison
  icmixup report runs/cifar100.* --to cifar100.html --open       all runs of a dataset
  icmixup report runs/birds.* --no-thumbnails                    without images"""


@dataclass(frozen=True, kw_only=True)
class ReportFlags:
    """Write finished runs as one HTML page, with charts, mistakes and mixed images."""

    paths: conf.Positional[tuple[Path, ...]]
    """Folders of finished runs or of comparisons, or folders that contain runs."""
    to: Annotated[Path | None, conf.arg(aliases=["--out"])] = None
    """File to write; by default report.html, in the folder of the comparison if one is passed, otherwise in
    the current folder."""
    open: Flag = False
    """Open the page in a browser."""
    thumbnails: bool = True
    """Include test images; without them the page shows file names only."""
    where: Machine = field(default_factory=Machine)


def run_report(flags: ReportFlags) -> int:
    """Write the page, and print where it is."""
    if flags.to is not None and flags.to.is_dir():
        raise ValueError(f"--to must be a file, for example {flags.to / 'report.html'}, got a folder")
    from icmixup.lab.analysis.report.make import Options, report_runs

    options = Options(flags.where.data_dir, flags.where.device, flags.thumbnails)
    page, study = report_runs(flags.paths, flags.to, options)
    for note in study.notes:
        print_note(note)
    size = page.stat().st_size / 1e6
    print_note(f"{count(len(study.runs), 'run')}, {size:.2f} MB")
    print(page)
    if flags.open:
        open_in_browser(page)
    return 0


def open_in_browser(page: Path) -> None:
    """Open the page; where there is no browser with windows, say where it is."""
    import webbrowser

    # Without a screen, webbrowser would start lynx in this terminal, and training would wait for it.
    screen = not sys.platform.startswith("linux") or {"DISPLAY", "WAYLAND_DISPLAY", "BROWSER"} & set(
        os.environ
    )
    if not screen or not webbrowser.open(page.resolve().as_uri()):
        print_note(f"no browser was found; open {page}")
