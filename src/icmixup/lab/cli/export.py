"""icmixup export: the weights of a run as safetensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro import conf

from icmixup.lab.cli.shared import Flag
from icmixup.lab.cli.terminal import print_note

SUMMARY = "Write the weights of a trained run as safetensors, with what is needed to use them."
HELP = f"""{SUMMARY}

Class names, normalisation, image size and temperature are written as JSON beside the weights, and into the
metadata of the file. Three lines of Python use it:

  from icmixup.lab.training.trained import load_trained
  network = load_trained("model.safetensors")
  print(network.predict(["photo.jpg"]))

  icmixup export runs/photos.small-cnn.ic-mixup.s0.* --to model.safetensors"""


@dataclass(frozen=True, kw_only=True)
class ExportFlags:
    """Write the weights of a trained run as safetensors, with what is needed to use them."""

    run: conf.Positional[Path]
    """Folder of a finished run."""
    to: Path = Path("model.safetensors")
    """File to write, ending in .safetensors."""
    debug: Flag = False
    """Show a traceback with an error."""


def run_export(flags: ExportFlags) -> int:
    """Write both files."""
    from icmixup.lab.training.trained import export_run

    paths = export_run(flags.run, flags.to)
    print_note("written: " + ", ".join(str(path) for path in paths))
    return 0
