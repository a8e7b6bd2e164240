"""icmixup predict: classify images with a trained run."""

from __future__ import annotations

import codecs
import csv
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tyro import conf

from icmixup.lab.cli.shared import Flag
from icmixup.lab.cli.terminal import print_note, stderr_console
from icmixup.lab.wording import count

if TYPE_CHECKING:
    from icmixup.lab.training.trained import Prediction

SUMMARY = "Classify images with a trained run."
HELP = f"""{SUMMARY}

Prints one line per image: file, class, probability. The probability is that of the most probable class, after
temperature scaling. Files that cannot be read are reported and left out; the exit code is then 1.

  icmixup predict runs/photos.small-cnn.ic-mixup.s0.* photo.jpg folder/of/photos
  icmixup predict model.safetensors folder/of/photos --to predictions.csv"""

BAR_STEP = 32  # images in a step of the progress bar


@dataclass(frozen=True, kw_only=True)
class PredictFlags:
    """Classify images with a trained run."""

    run: conf.Positional[Path]
    """Folder of a finished run, or a file that `icmixup export` wrote."""
    paths: conf.Positional[tuple[Path, ...]]
    """Image files, and folders of them."""
    to: Path | None = None
    """CSV file to write; standard output by default."""
    device: str | None = None
    """cpu, cuda or cuda:1; a GPU if there is one by default."""
    debug: Flag = False
    """Show a traceback with an error."""


def run_predict(flags: PredictFlags) -> int:
    """Classify all images, write the CSV."""
    from rich.progress import track

    from icmixup.lab.datasets.folder import printable
    from icmixup.lab.training.ranks import pick_device
    from icmixup.lab.training.trained import list_images, load_trained

    if not flags.paths:
        raise ValueError("no images to classify; pass image files or folders of them after the run")
    if flags.to is not None and flags.to.is_dir():  # before anything is classified
        raise ValueError(f"--to must be a file, for example {flags.to / 'predictions.csv'}, got a folder")
    paths = list(list_images(flags.paths))
    trained = load_trained(flags.run, pick_device(flags.device))
    skipped: list[ValueError] = []
    console = stderr_console()
    found: list[Prediction] = []
    for start in track(
        range(0, len(paths), BAR_STEP),
        "classifying images",
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ):
        found += trained.predict(paths[start : start + BAR_STEP], skipped.append)
    for reason in skipped:
        print_note(printable(str(reason)))
    if not found:
        raise ValueError(f"none of the {count(len(paths), 'file')} could be read")
    write_rows(found, flags.to)
    return 1 if skipped else 0


def write_rows(found: list[Prediction], to: Path | None) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("file", "class", "probability"))
    writer.writerows((file, name, f"{probability:.6f}") for file, name, probability in found)
    if to is None:
        # Names of files may have bytes that are not UTF-8; other encodings may lack letters of names as well.
        if isinstance(sys.stdout, io.TextIOWrapper) and codecs.lookup(sys.stdout.encoding).name == "utf-8":
            sys.stdout.reconfigure(errors="surrogateescape")
        sys.stdout.write(text.getvalue())
    else:
        from icmixup.lab.training.output import write_output

        write_output(to, text.getvalue().encode(errors="surrogateescape"))
        print_note(f"written: {to}, {count(len(found), 'image')}")
