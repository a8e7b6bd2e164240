"""Numbers in messages."""

from __future__ import annotations


def count(number: int, thing: str) -> str:
    """1 image, 2 images."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
