"""One process at a time trains in a run folder.

The lock is the kernel's (flock), which ends with its process however that dies: a lock file that a killed
process left behind locks nothing. The file says who holds the lock.
"""

from __future__ import annotations

import errno
import json
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from icmixup.lab.datasets.temporary import host_name

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

FILE = "lock.json"
LOCK_POLL_SECONDS = 0.2
UNSUPPORTED = (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL)


class Busy(ValueError):
    """Another process trains in the folder."""


@contextmanager
def lock_folder(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a run folder; if another process has it, warn and wait, or raise Busy."""
    path = folder / FILE
    descriptor = acquire(path, wait)
    try:
        yield
    finally:
        if descriptor is not None:
            path.unlink(missing_ok=True)  # before the lock is released: a successor makes its own file
            os.close(descriptor)


def acquire(path: Path, wait: bool) -> int | None:
    """The descriptor of the locked file; None where the file system has no locks."""
    warned = False
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        state = try_lock(descriptor, path)
        if state == "held":
            write_owner(descriptor)
            return descriptor
        os.close(descriptor)
        if state == "unsupported":
            return None
        if state == "busy":
            if not wait:
                raise Busy(describe_holder(path))
            if not warned:
                warnings.warn(f"{describe_holder(path)}; waiting for it", stacklevel=4)
                warned = True
            time.sleep(LOCK_POLL_SECONDS)


def try_lock(descriptor: int, path: Path) -> str:
    """held, busy, gone (the file was deleted in the meantime), or unsupported."""
    if fcntl is None:
        return "unsupported"
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "busy"
    except OSError as error:
        if error.errno in UNSUPPORTED:
            return "unsupported"
        raise
    try:
        same = os.fstat(descriptor).st_ino == path.stat().st_ino
    except FileNotFoundError:
        same = False
    return "held" if same else "gone"


def write_owner(descriptor: int) -> None:
    started = datetime.now().astimezone().isoformat(timespec="seconds")
    owner = {"pid": os.getpid(), "host": host_name(), "since": started}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(owner).encode(), 0)


def describe_holder(path: Path) -> str:
    """Who trains in the folder of a lock file."""
    try:
        owner = json.loads(path.read_text())
        who = f"process {owner['pid']} on {owner['host']} since {owner['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # it has not written its name yet
        who = "another process"
    return f"{path.parent} is in use by {who}"
