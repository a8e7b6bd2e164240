"""The process that `icmixup.lab.images.parallel` starts: a function applied to lists of items.

stdin      a Task, then lists of items; its end is the end of this process
stdout     a Reply to each list
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

from PIL import Image
from PIL import ImageFile as PillowFile

from icmixup.lab.images.decode import ignore_large_images


class Task(NamedTuple):
    """What is done with each item, and the settings of Pillow that a script may have changed."""

    function: Callable[[Any], Any]
    max_image_pixels: int | None
    load_truncated_images: bool


class Reply(NamedTuple):
    """Outputs or an error, and the warnings issued: message, category, file and line."""

    outputs: list[Any] | Exception
    warnings: list[tuple[str, type[Warning], str, int]]


def main() -> None:
    """Reply to lists of items until the parent closes the pipe or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Windows, Ctrl-C reaches this process too
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not come between the replies
    requests: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=receive, args=(requests,), daemon=True).start()
    task: Task = requests.get()
    Image.MAX_IMAGE_PIXELS = task.max_image_pixels
    PillowFile.LOAD_TRUNCATED_IMAGES = task.load_truncated_images
    while True:
        pickle.dump(apply(task.function, requests.get()), replies)
        replies.flush()


def receive(requests: SimpleQueue[Any]) -> None:
    """Queue what the parent sends; when it is gone, end this process even in the middle of a photo."""
    try:
        with contextlib.suppress(EOFError):
            while True:
                requests.put(pickle.load(sys.stdin.buffer))
    finally:
        os._exit(0)


def apply(function: Callable[[Any], Any], items: Sequence[Any]) -> Reply:
    """The outputs of some items, or the first error."""
    outputs: list[Any] | Exception
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        with ignore_large_images():
            try:
                outputs = [function(item) for item in items]
            except Exception as error:
                outputs = portable(error)
    return Reply(outputs, [(str(one.message), one.category, one.filename, one.lineno) for one in caught])


def portable(error: Exception) -> Exception:
    """The error in a form that can cross a pipe: its text if it cannot be pickled."""
    try:
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]
    except Exception:  # an exception with its own constructor
        return RuntimeError(f"{type(error).__name__}: {error}")
