"""One function for many files: in threads, or in processes if there are enough files for that.

Pillow releases Python's lock while it decodes, but takes it for the many short steps around that: threads
keep two or three cores busy, processes all of them.

The processes are neither forked, because this one may use a GPU and threads of torch, nor started by
multiprocessing, which runs the main script again in each of them. They run `icmixup.lab.images.worker`.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from PIL import Image
from PIL import ImageFile as PillowFile
from rich.console import Console
from rich.progress import track

from icmixup.lab.images.decode import ImageFile, ignore_large_images
from icmixup.lab.images.worker import Reply, Task

# Files per process. Processes need 0.4 s to start, in which threads decode 300 photos of 256 pixels, or read
# the headers of 3,000 or hash them.
PHOTOS_EACH, HEADERS_EACH = 200, 1000
FEWEST = 3  # two processes on two cores decode 980 photos (JPEG, 256 pixels) a second, threads 950
CHUNK = 32  # most items in one message: a message takes about 0.2 ms, a photo 1 ms and more
START_WORKER = "import sys; sys.path[:] = sys.argv[1:]; from icmixup.lab.images.worker import main; main()"
ENVIRONMENT = {
    # Arrays are only copied: the threads of a library of linear algebra would be many and idle.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    # glibc would return the memory of each photo to the system: 300 page faults, a quarter of the time.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
}
SHOWN: dict[Any, Any] = {}  # warnings of processes, by the rules of the warnings module
Item = TypeVar("Item")
Output = TypeVar("Output")


def count_cores() -> int:
    """The cores that this process may use, not those of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_processes(files: Sequence[ImageFile], each: int) -> int:
    """The number of processes that pay off, with at least `each` files for one of them; 0 for threads.

    A row of a table is read by this process, which has the table open. A program that is frozen into one file
    has no interpreter that could be started.
    """
    number = min(count_cores(), len(files) // each)
    possible = sys.executable and not getattr(sys, "frozen", False)
    return number if possible and number >= FEWEST and all(file.path is not None for file in files) else 0


def map_in_parallel(
    function: Callable[[Item], Output],
    items: Sequence[Item],
    text: str,
    show_progress: bool,
    *,
    processes: int = 0,
    descriptors: Sequence[int] = (),
) -> list[Output]:
    """function(item) for all items, in order.

    Args:
        processes: 0 for threads. Otherwise the function must be importable without torch, and everything that
            it gets and returns is pickled.
        descriptors: open files that the function uses, also in other processes.
    """
    if not items:
        return []
    if os.name == "nt" and descriptors:  # which Windows does not pass on
        processes = 0
    outputs = (
        in_processes(function, items, processes, descriptors) if processes else in_threads(function, items)
    )
    with ignore_large_images(), outputs as results:
        console = Console(stderr=True)
        return list(track(results, text, len(items), console=console, disable=not show_progress))


@contextlib.contextmanager
def in_threads(function: Callable[[Item], Output], items: Sequence[Item]) -> Iterator[Iterator[Output]]:
    """The outputs of all items, from threads."""
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        yield pool.map(function, items)
    finally:
        pool.shutdown(cancel_futures=True)  # otherwise Ctrl-C could wait for all items


@contextlib.contextmanager
def in_processes(
    function: Callable[[Item], Output], items: Sequence[Item], number: int, descriptors: Sequence[int]
) -> Iterator[Iterator[Output]]:
    """The outputs of all items, from processes, each with a thread that waits for its replies."""
    size = min(CHUNK, math.ceil(len(items) / (4 * number)))
    chunks = [items[start : start + size] for start in range(0, len(items), size)]
    workers, pool = Workers(function), ThreadPoolExecutor(number)
    try:
        workers.start(number, descriptors)
        yield chain.from_iterable(pool.map(workers.run, chunks))
    finally:
        workers.kill()
        pool.shutdown(cancel_futures=True)
        workers.close()


class Workers(Generic[Item, Output]):
    """Processes that apply one function; what one of them cannot do is done in this process instead."""

    def __init__(self, function: Callable[[Item], Output]) -> None:
        self.function = function
        self.processes: list[subprocess.Popen[bytes]] = []
        self.idle: SimpleQueue[subprocess.Popen[bytes] | None] = SimpleQueue()
        self.stopped = False

    def start(self, number: int, descriptors: Sequence[int]) -> None:
        """Start processes; where the system refuses, None takes the place of one."""
        task = pickle.dumps(Task(self.function, Image.MAX_IMAGE_PIXELS, PillowFile.LOAD_TRUNCATED_IMAGES))
        for _ in range(number):
            try:
                self.processes.append(start_worker(descriptors))
                send(self.processes[-1], task)
            except OSError:
                self.idle.put(None)
            else:
                self.idle.put(self.processes[-1])

    def run(self, items: Sequence[Item]) -> list[Output]:
        """The outputs of some items from the next idle process; an error in there is raised here."""
        process = self.idle.get()
        reply = None if process is None else ask(process, items)
        self.idle.put(None if reply is None else process)
        if self.stopped:
            raise RuntimeError("the processes were stopped")
        if reply is None:  # it died, or was not started: for example, the system had no memory for it
            return [self.function(item) for item in items]
        for warning in reply.warnings:
            warnings.warn_explicit(*warning, registry=SHOWN)
        if isinstance(reply.outputs, Exception):
            raise reply.outputs
        return reply.outputs

    def kill(self) -> None:
        """End all processes at once: they keep nothing that could be lost."""
        self.stopped = True
        for process in self.processes:
            process.kill()

    def close(self) -> None:
        """Close all pipes, when no thread uses them any more."""
        for process in self.processes:
            with contextlib.suppress(OSError):  # of a message that was not sent completely
                process.communicate()


def start_worker(descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
    """A process that runs `icmixup.lab.images.worker`, found where this process found it."""
    paths = [path for path in sys.path if isinstance(path, str)]
    names = {"PYTHONUTF8": str(sys.flags.utf8_mode)}  # of files, decoded as they are here
    return subprocess.Popen(
        [sys.executable, "-c", START_WORKER, *paths],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **ENVIRONMENT, **names},
        pass_fds=descriptors,
        process_group=0,  # Ctrl-C reaches this process only, which stops the others
    )


def send(process: subprocess.Popen[bytes], message: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(message)
    process.stdin.flush()


def ask(process: subprocess.Popen[bytes], items: Sequence[Any]) -> Reply | None:
    """The reply of a process to a message with items; None if there is none, or not a complete one."""
    assert process.stdout is not None
    try:
        send(process, pickle.dumps(items))
        reply = pickle.load(process.stdout)
    except Exception:  # bytes that are not a reply can raise nearly anything
        return None
    return reply if isinstance(reply, Reply) else None
