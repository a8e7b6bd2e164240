"""Pytest plugin of sample_mutants.py: which test runs which lines, and a choice of tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sitecustomize import FOLDER, RECORDER


def pytest_runtest_logstart() -> None:
    RECORDER.seen.clear()


def pytest_runtest_logreport(report: Any) -> None:
    if FOLDER:
        RECORDER.write(f"S {report.duration} {report.outcome} {report.nodeid}")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Keep the tests that the file CHOSEN_TESTS lists.

    Names that do not exist are ignored, other than those on pytest's command line: a mutant can change the
    parameters of a test.
    """
    if path := os.environ.get("CHOSEN_TESTS"):
        chosen = set(Path(path).read_text().splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
        items[:] = [item for item in items if item.nodeid in chosen]
