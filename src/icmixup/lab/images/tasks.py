"""What is done with one file, here or in another process: hash it, decode it, write its pixels."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from icmixup.lab.images.decode import ImageFile, Shape, decode_photo

SETTLED_NS = 2 * 10**9  # a file changed less than this before it was hashed could change again unnoticed


class Hashed(NamedTuple):
    """Name and SHA-256 of a file, and its state if that can be relied on."""

    name: str
    state: list[int] | None
    digest: str


def hash_file(file: ImageFile) -> Hashed:
    """Hash of a file's content, and its state before it was read."""
    if file.path is None:
        return Hashed(file.name, None, digest(file))
    name, now = str(file.path.absolute()), time.time_ns()
    with contextlib.suppress(OSError):  # a file that cannot be opened is reported when it is decoded
        stat = os.stat(file.path)
        settled = max(stat.st_mtime_ns, stat.st_ctime_ns) < now - SETTLED_NS
        return Hashed(name, file_state(stat) if settled else None, digest(file))
    return Hashed(name, None, "unreadable")


def recall_hash(file: ImageFile, known: dict[str, list[object]]) -> Hashed | None:
    """The hash of a file whose state is the one in `known`; None for another file."""
    if file.path is None:
        return None
    name = str(file.path.absolute())
    with contextlib.suppress(OSError):
        if name in known and known[name][:-1] == (state := file_state(os.stat(name))):
            return Hashed(name, state, str(known[name][-1]))
    return None


def file_state(stat: os.stat_result) -> list[int]:
    """What changes with the content of a file, by which it is known to be unchanged."""
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def digest(file: ImageFile) -> str:
    """SHA-256 of a file."""
    try:
        with file.open() as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]
    except OSError:
        return "unreadable"


class Place(NamedTuple):
    """A file, the shape of its photo or why it has none, and the photo's first byte among all photos."""

    file: ImageFile
    shape: Shape | str
    start: int


def decode_place(place: Place, short_side: int, interpolation: str) -> npt.NDArray[np.uint8] | str:
    """(height, width, 3) of a photo, or why it cannot be read."""
    if isinstance(place.shape, str):
        return place.shape
    return decode_photo(place.file, short_side, interpolation, place.shape)


def write_place(place: Place, short_side: int, interpolation: str, descriptor: int) -> str | None:
    """Write a photo into an open file; returns why it cannot be read, or None."""
    photo = decode_place(place, short_side, interpolation)
    if isinstance(photo, str):
        return photo
    write_photo(descriptor, place.start, photo)
    return None


def write_photo(descriptor: int, start: int, photo: npt.NDArray[np.uint8]) -> None:
    # Not through a mapping, whose pages would count as memory of this process until they are on disk.
    rest = memoryview(photo.tobytes())
    while rest:
        written = os.pwrite(descriptor, rest, start)
        rest, start = rest[written:], start + written
