"""Rows as CSV, and files that a user names, for example with --to: a device or a pipe is not replaced."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from icmixup.lab.training.run_folder import write_atomically


def write_output(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all; folders around it are made.

    /dev/stdout, /dev/null, a pipe or a link stays what it is: a renamed file would take its place.
    """
    make_folder(path.parent)
    if path.is_symlink() or (path.exists() and not path.is_file() and not path.is_dir()):
        with path.open("wb") as file:
            file.write(content)
    else:
        write_atomically(path, content)


def make_folder(folder: Path) -> None:
    """Make a folder and those around it; a ValueError names a file or broken link in the place of one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        taken = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        raise ValueError(f"nothing can be written to {folder}, because {taken} is not a folder") from error


def rows_as_csv(rows: Sequence[Mapping[str, object]], columns: Sequence[str] = ()) -> str:
    """A header with the names of all columns, and the rows.

    Args:
        columns: by default those of the rows, in the order in which they first appear.
    """
    names = columns or list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
