"""Processes that are forked from one that has imported torch and the lab, so that each starts at once.

A new interpreter takes seconds for these imports, which is most of the time of a test that needs a process
only to have it signalled or killed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

# What is imported late as well. There is one server in each process of pytest, so that all tests that fork
# from it need the same list; what is not installed is passed over.
PRELOADED = [
    *("torch._dynamo", "sklearn.datasets"),
    *("icmixup.large_batch", "icmixup.lab.training.loop", "icmixup.lab.cli.compare"),
    *("icmixup.lab.comparison.compare", "icmixup.lab.analysis.report.live"),
]


def forking_context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


@contextlib.contextmanager
def started_command(args: Sequence[str], folder: Path) -> Iterator[BaseProcess]:
    """`icmixup` with these arguments, in this folder and in a process group of its own.

    What it prints is in the files `stdout` and `stderr` of the folder. Whatever is left of the group at the
    end is killed: a test that failed should not leave a training run behind.
    """
    process = forking_context().Process(target=run_command, args=(list(args), folder))
    process.start()
    assert process.pid is not None
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


def run_command(args: list[str], folder: Path) -> None:
    from icmixup.lab.cli import main

    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests that run under nohup would ignore it
    os.chdir(folder)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
    sys.exit(main(args))
