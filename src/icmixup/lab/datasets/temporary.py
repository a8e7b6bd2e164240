"""Names of temporary files that carry host and process, so that leftovers of dead processes are known."""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
from pathlib import Path

PART_SUFFIX = ".part"
OLD_SECONDS = 24 * 3600.0  # after which a temporary file of another host is a leftover too
OWNER = re.compile(r"\.(?P<host>[^.]*)-(?P<pid>\d+)(\.\w+)?\.part")


def temporary_path(path: Path, extra: str = "") -> Path:
    """A name beside `path` that no other process uses."""
    return path.with_name(f"{path.name}.{host_name()}-{os.getpid()}{extra and '.' + extra}{PART_SUFFIX}")


def host_name() -> str:
    return socket.gethostname().replace(".", "_")


def remove_leftovers(folder: Path) -> list[Path]:
    """Delete temporary files and folders that a killed process left in `folder`; returns them."""
    leftovers = [path for path in folder.glob(f"*{PART_SUFFIX}") if is_leftover(path)]
    for path in leftovers:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return leftovers


def is_leftover(path: Path) -> bool:
    """Whether the process that made a temporary file is gone; files of other hosts only count by age."""
    found = OWNER.search(path.name)
    if found is not None and found["host"] == host_name():
        return not is_alive(int(found["pid"]))
    try:
        return time.time() - path.lstat().st_mtime > OLD_SECONDS
    except FileNotFoundError:
        return False


def is_alive(pid: int) -> bool:
    """Whether a process of this host exists."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it belongs to another user
        return True
    return True
