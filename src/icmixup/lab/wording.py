"""Numbers and lists in messages."""

from __future__ import annotations

from collections.abc import Sequence


def count(number: int, thing: str) -> str:
    """1 image, 2 images."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def first_few(names: Sequence[str], most: int) -> str:
    """cat, dog, ...: the first names, and whether there are more."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
