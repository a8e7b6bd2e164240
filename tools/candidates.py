"""The file of all candidates of a search: one row per run, with the columns that the search is about."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from icmixup.lab.training.run_folder import Row

# Behind the columns of a search: where and with what a row was made.
MADE = ("minutes", "device", "torch", "commit", "date")


def write_candidates(path: Path, columns: Sequence[str], rows: Sequence[Row]) -> None:
    """Replace the file; what a row has besides the columns is left out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
