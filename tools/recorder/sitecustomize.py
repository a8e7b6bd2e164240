"""Record which lines of the package each test runs, also in the processes that a test starts.

Python imports this module at its start if this folder is on PYTHONPATH. It does nothing unless RECORD_LINES
names a folder; every process writes a file there:

    T tests/test_loss.py::test_name (call)     what follows was run by this test, in this phase
    L /path/of/the/package/loss.py:12          a line, once for each test
    S 0.25 passed tests/test_loss.py::test_name       seconds of a phase of a test
"""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType
from typing import Any

FOLDER = os.environ.get("RECORD_LINES", "")
SOURCE = os.environ.get("RECORD_SOURCE", "")


class Recorder:
    """Writes lines at once: a process that a test kills has no time for it later."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, int]] = set()
        self.process, self.file, self.test = -1, -1, ""

    def on_call(self, frame: FrameType, event: str, value: object) -> Any:
        return self.on_line if frame.f_code.co_filename.startswith(SOURCE) else None

    def on_line(self, frame: FrameType, event: str, value: object) -> Any:
        place = (frame.f_code.co_filename, frame.f_lineno)
        if place not in self.seen:
            self.seen.add(place)
            test = os.environ.get("PYTEST_CURRENT_TEST", "")
            if test != self.test or os.getpid() != self.process:
                self.test = test
                self.write(f"T {test}")
            self.write(f"L {place[0]}:{place[1]}")
        return self.on_line

    def write(self, text: str) -> None:
        if os.getpid() != self.process:  # also in a process that was forked
            self.process = os.getpid()
            path = os.path.join(FOLDER, f"{self.process}.{threading.get_native_id()}.txt")
            self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(self.file, f"{text}\n".encode())


RECORDER = Recorder()
if FOLDER:
    threading.settrace(RECORDER.on_call)
    sys.settrace(RECORDER.on_call)
