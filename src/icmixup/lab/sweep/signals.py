"""Ctrl-C and other signals that stop runs: one interrupt, and time for the last checkpoints."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TypeVar

Result = TypeVar("Result")
STOP_SECONDS = 10.0  # for the checkpoint of an interrupted run
STOP_SIGNALS = [signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def run_and_end(run: Callable[[], Result], end: Callable[[], None] = lambda: None) -> Result:
    """run(), then end() in any case; signals interrupt run() once, and end() never. Returns what run() does.

    One stop can be several signals: `timeout` sends SIGTERM to its command and then to the process group, and
    a shell repeats the SIGHUP of its terminal. The second would interrupt the last checkpoints.
    """
    signals = StopSignals()
    try:
        try:
            signals.install()
            return run()
        finally:
            signals.hold()
    finally:
        signals.hold()  # again: the first interrupt may have come instead of the other call
        try:
            end()
        finally:
            signals.release()


class StopSignals:
    """Lets SIGINT, SIGTERM and SIGHUP interrupt the main thread once, and not at all after hold().

    After an interrupt they are ignored for STOP_SECONDS, not longer: something may have swallowed it, or hang
    on its way out. Signals without a handler in Python are left alone. In other threads there is nothing to
    do: signals do not interrupt them, and they cannot set handlers.
    """

    def __init__(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        found = {number: signal.getsignal(number) for number in STOP_SIGNALS if is_main}
        self.before = {number: handler for number, handler in found.items() if callable(handler)}
        self.ignored_until = -math.inf
        self.interrupted = False
        self.ignored: int | None = None

    def install(self) -> None:
        for number in self.before:
            signal.signal(number, self.handle)

    def handle(self, signum: int, frame: FrameType | None) -> None:
        if time.monotonic() < self.ignored_until:
            self.ignored = signum
            return
        self.interrupted, self.ignored_until = True, time.monotonic() + STOP_SECONDS
        self.before[signal.Signals(signum)](signum, frame)
        self.interrupted, self.ignored_until = False, -math.inf  # a handler that raised nothing

    def hold(self) -> None:
        self.ignored_until = math.inf

    def release(self) -> None:
        """Restore the handlers; they get a signal that came after hold(), unless another has interrupted."""
        self.ignored_until = -math.inf
        for number, handler in self.before.items():
            signal.signal(number, handler)
        if self.ignored is not None and not self.interrupted:
            signal.raise_signal(self.ignored)


@contextlib.contextmanager
def blocked_signals() -> Iterator[None]:
    """Block the signals of a terminal: a process that starts now never sees them.

    Ctrl-C reaches all processes of a terminal, and only the parent shall act on it, after this block.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def interrupt_once(signum: int, frame: object) -> None:
    """End the run; further signals must not interrupt its last checkpoint."""
    signal.signal(signum, signal.SIG_IGN)
    raise KeyboardInterrupt
