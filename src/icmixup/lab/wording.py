"""Numbers and lists in messages and tables."""

from __future__ import annotations

from collections.abc import Sequence

NO_VALUE = "-"


def count(number: int, thing: str) -> str:
    """1 image, 2 images."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def format_or_dash(value: float | None, form: str) -> str:
    return NO_VALUE if value is None else f"{value:{form}}"


def with_spread(mean: float | None, std: float | None) -> str:
    """70.1 ± 0.3, or 70.1 where a single run has no standard deviation."""
    return format_or_dash(mean, ".1f") + ("" if std is None else f" ± {std:.1f}")


def first_few(names: Sequence[str], most: int) -> str:
    """cat, dog, ...: the first names, and whether there are more."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
