"""Output of the commands: tables on stdout, everything else on stderr, and only from the first rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def is_first_rank() -> bool:
    """Whether this process prints; under torchrun only the first one does."""
    return os.environ.get("RANK", "0") == "0"


def stderr_console() -> Console:
    from rich.console import Console

    return Console(stderr=True, quiet=not is_first_rank())


def print_note(text: str) -> None:
    """Print one line on stderr, without wrapping or markup."""
    if is_first_rank():
        print(text, file=sys.stderr, flush=True)


def print_rows(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Print a table on stdout; columns in `right` are right-aligned."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from icmixup.lab.comparison.table import stdout_console

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_header=any(headings))
    for number, heading in enumerate(headings):
        table.add_column(heading, overflow="fold", justify="right" if number in right else "left")
    for row in rows:
        table.add_row(*row)
    stdout_console().print(table, highlight=False, markup=False)
