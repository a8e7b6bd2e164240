"""A cache of decoded photos on disk, keyed by what the files contain.

cache/hashes-*.json      SHA-256 of files that were hashed before, with the state of the file at that time
cache/KEY/pixels.bin     the photos, one after another
cache/KEY/photos.json    their sizes, and why some could not be read
cache/KEY.part/          the same while it is being written; renamed when it is complete
cache/KEY.lock           locked while KEY is being written; the system unlocks it if the process dies

KEY is a hash of the contents of all files, in order, and of the size they are decoded to. So photos that
changed have another key, and old pixels are never used for them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import Tensor

from icmixup.lab.datasets.photos import CHANNELS, Store, map_store, photo_bytes, photo_offsets
from icmixup.lab.images.decode import ImageFile, Shape, read_shape
from icmixup.lab.images.parallel import HEADERS_EACH, PHOTOS_EACH, count_processes, map_in_parallel
from icmixup.lab.images.tasks import Hashed, Place, decode_place, hash_file, recall_hash, write_place

VERSION = 1  # change it when the same file would be decoded to other pixels
MEMORY_BYTES = 128 << 20  # photos up to this size stay in memory, and are decoded again by every process
LIMIT_GB = 50.0
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR)
Output = TypeVar("Output")


class Job(NamedTuple):
    """Which files are decoded, and how."""

    files: Sequence[ImageFile]
    short_side: int
    interpolation: str
    show_progress: bool = False


class Decoded(NamedTuple):
    """Decoded photos, and for each file the reason why it could not be read, or None."""

    store: Store
    failures: list[str | None]


class CacheEntry(NamedTuple):
    """One set of photos in the cache."""

    path: Path
    photos: int
    short_side: int
    bytes: int
    used: float  # seconds since 1970


def cache_folder(data_dir: Path) -> Path:
    """The folder of the cache: ICMIXUP_CACHE, or `cache` in the folder of datasets."""
    return Path(os.environ.get("ICMIXUP_CACHE") or data_dir / "cache")


def cache_limit() -> int:
    """Largest size of the cache in bytes: ICMIXUP_CACHE_GB, or 50 GB."""
    text = os.environ.get("ICMIXUP_CACHE_GB") or str(LIMIT_GB)
    try:
        gigabytes = float(text)
    except ValueError:
        gigabytes = -1.0
    if not gigabytes >= 0:
        raise ValueError(f"ICMIXUP_CACHE_GB must be a number of gigabytes, 0 or more, got {text!r}")
    return int(gigabytes * 1e9)


def decode_photos(job: Job, folder: Path) -> Decoded:
    """Decode all files of a job: into memory if they are few, else into the cache in `folder`.

    Photos that are in the cache already are not decoded. If two processes need the same photos, one decodes
    them and the other one waits.
    """
    shapes: list[Shape | str] | None = None
    if len(job.files) * job.short_side**2 * CHANNELS <= MEMORY_BYTES:  # a lower bound: none is smaller
        shapes = _read_shapes(job)
        if photo_bytes(_sizes(shapes)) <= MEMORY_BYTES:
            return _decode_to_memory(job, shapes)
    check_writable(folder)
    hashes = hash_files(job, folder)
    entry = folder / _key(job, hashes)
    with wait_for_lock(folder, entry.name):
        if not (entry / "photos.json").exists():
            _write_entry(entry, job, shapes or _read_shapes(job), hashes)
        return _read_entry(entry)


def check_writable(folder: Path) -> None:
    """Make the folder of the cache; a ValueError names the remedy if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        if error.errno not in NOT_WRITABLE:
            raise
        raise ValueError(
            f"decoded photos cannot be stored in {folder} ({error.strerror}): set ICMIXUP_CACHE to a folder "
            "that can be written"
        ) from error


def _read_shapes(job: Job) -> list[Shape | str]:
    processes = count_processes(job.files, HEADERS_EACH)
    found = map_in_parallel(read_shape, job.files, "reading headers", job.show_progress, processes=processes)
    return [shape if isinstance(shape, str) else shape.resized(job.short_side) for shape in found]


def _sizes(shapes: Sequence[Shape | str]) -> Tensor:
    """(N, 2), zeros for a file that cannot be read."""
    sizes = [(0, 0) if isinstance(shape, str) else shape for shape in shapes]
    return torch.tensor(sizes, dtype=torch.int64).view(-1, 2)


def _decode_to_memory(job: Job, shapes: Sequence[Shape | str]) -> Decoded:
    sizes = _sizes(shapes)
    pixels = np.empty(photo_bytes(sizes), dtype=np.uint8)
    places = _places(job, shapes)
    found = _map_places(decode_place, job, places)
    for place, photo in zip(places, found, strict=True):
        if not isinstance(photo, str):
            pixels[place.start : place.start + photo.size] = photo.ravel()
    failures = [photo if isinstance(photo, str) else None for photo in found]
    return Decoded(Store(torch.from_numpy(pixels).view(-1, CHANNELS), sizes), failures)


def _places(job: Job, shapes: Sequence[Shape | str]) -> list[Place]:
    starts = (photo_offsets(_sizes(shapes)) * CHANNELS).tolist()
    return [Place(*place) for place in zip(job.files, shapes, starts, strict=True)]


def _map_places(
    decode: Callable[..., Output], job: Job, places: Sequence[Place], descriptors: Sequence[int] = ()
) -> list[Output]:
    return map_in_parallel(
        partial(decode, short_side=job.short_side, interpolation=job.interpolation),
        places,
        "decoding photos",
        job.show_progress,
        processes=count_processes(job.files, PHOTOS_EACH),
        descriptors=descriptors,
    )


# Keys


def _key(job: Job, hashes: Sequence[str]) -> str:
    settings = json.dumps([VERSION, job.short_side, job.interpolation, *hashes])
    return hashlib.sha256(settings.encode()).hexdigest()[:20]


def hash_files(job: Job, folder: Path) -> list[str]:
    """SHA-256 of the content of each file; one that has not changed since it was hashed is not read again.

    A file counts as unchanged if its size, times of modification and of status change, and inode are the
    same. The second time cannot be set by programs that preserve the first, as `cp -p` and `rsync` do.
    """
    paths = [str(file.path.absolute()) for file in job.files if file.path is not None]
    root = os.path.commonpath(paths) if paths else ""
    index = folder / f"hashes-{hashlib.sha256(root.encode()).hexdigest()[:20]}.json"
    known: dict[str, list[object]] = _read_json(index) or {}
    recall = partial(recall_hash, known=known)
    kept: Sequence[Hashed | None] = [None] * len(job.files)
    if known:
        kept = map_in_parallel(recall, job.files, "checking files", job.show_progress)
    changed = [file for file, one in zip(job.files, kept, strict=True) if one is None]
    processes = count_processes(changed, HEADERS_EACH)
    found = iter(map_in_parallel(hash_file, changed, "hashing files", job.show_progress, processes=processes))
    results = [one or next(found) for one in kept]
    settled = {one.name: [*one.state, one.digest] for one in results if one.state is not None}
    if settled and settled != known:
        _write_json(index, settled)
    return [one.digest for one in results]


# Entries


@contextlib.contextmanager
def wait_for_lock(folder: Path, key: str) -> Iterator[None]:
    """Hold the lock of a key; says so if another process holds it."""
    lock = FileLock(folder / f"{key}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print("another process is decoding these photos; waiting for it", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _write_entry(entry: Path, job: Job, shapes: Sequence[Shape | str], hashes: Sequence[str]) -> None:
    sizes = _sizes(shapes)
    needed = photo_bytes(sizes)
    part = entry.with_name(entry.name + ".part")
    remove_cache_leftovers(entry.parent, held=entry.name)
    _make_room(entry.parent, needed)
    try:
        part.mkdir()
        with (part / "pixels.bin").open("wb") as file:
            _allocate(file.fileno(), needed)
            write = partial(write_place, descriptor=file.fileno())
            failures = _map_places(write, job, _places(job, shapes), (file.fileno(),))
            os.fsync(file.fileno())
        if hash_files(job, entry.parent) != hashes:
            raise ValueError("photos have changed while they were decoded; run the command again")
        content = {"sizes": sizes.tolist(), "failures": failures, "short_side": job.short_side}
        _write_json(part / "photos.json", content)
        os.rename(part, entry)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, OSError):
            raise _no_space(entry.parent, needed, error) from error
        raise


def _allocate(descriptor: int, size: int) -> None:
    """Reserve the space, so that a full disk is noticed before anything is decoded."""
    if size and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.truncate(descriptor, size)


def _read_entry(entry: Path) -> Decoded:
    content = json.loads((entry / "photos.json").read_text())
    os.utime(entry / "photos.json")  # when it was last used
    sizes = torch.tensor(content["sizes"], dtype=torch.int64).view(-1, 2)
    pixels = entry / "pixels.bin"
    if pixels.stat().st_size != photo_bytes(sizes):
        raise ValueError(f"{pixels} is damaged; icmixup data cache --clear removes it")
    if not photo_bytes(sizes):
        return Decoded(Store(torch.empty(0, CHANNELS, dtype=torch.uint8), sizes), content["failures"])
    return Decoded(map_store(pixels, sizes), content["failures"])


def list_entries(folder: Path) -> list[CacheEntry]:
    """The complete entries of the cache, least recently used first."""
    entries = []
    for path in folder.glob("*/photos.json"):
        if path.parent.suffix == ".part":
            continue
        with contextlib.suppress(OSError, ValueError, KeyError):  # it can be removed at any time
            content = json.loads(path.read_text())
            size = (path.parent / "pixels.bin").stat().st_size
            found = (len(content["sizes"]), content["short_side"], size, path.stat().st_mtime)
            entries.append(CacheEntry(path.parent, *found))
    return sorted(entries, key=lambda entry: entry.used)


def _make_room(folder: Path, needed: int) -> None:
    """Delete the least recently used entries until `needed` bytes fit the limit and the disk."""
    limit = cache_limit()
    if needed > limit:
        raise ValueError(
            f"the decoded photos need {_gb(needed)}, but the cache is limited to {_gb(limit)}: "
            "set ICMIXUP_CACHE_GB to a larger number, or use a smaller --image-size"
        )
    entries = list_entries(folder)
    used = sum(entry.bytes for entry in entries)
    for entry in entries:
        if used + needed <= limit and needed <= shutil.disk_usage(folder).free:
            break
        # A process that uses it keeps its mapping; the space is freed when that ends.
        shutil.rmtree(entry.path, ignore_errors=True)
        used -= entry.bytes
    if needed > shutil.disk_usage(folder).free:
        raise _no_space(folder, needed)


def _no_space(folder: Path, needed: int, error: OSError | None = None) -> ValueError:
    free = _gb(shutil.disk_usage(folder).free)
    reason = f" ({error.strerror})" if error is not None else ""
    return ValueError(
        f"the decoded photos need {_gb(needed)} in {folder}, where {free} are free{reason}: "
        "set ICMIXUP_CACHE to a folder on a larger disk, or use a smaller --image-size"
    )


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.2f} MB"


def remove_cache_leftovers(folder: Path, held: str | None = None) -> None:
    """Delete what killed processes left behind; `held` is a key whose lock this process holds."""
    for part in folder.glob("*.part"):
        if part.stem == held:
            shutil.rmtree(part, ignore_errors=True)
            continue
        lock = FileLock(folder / f"{part.stem}.lock")
        with contextlib.suppress(Timeout), lock.acquire(timeout=0):  # held: it is being written
            shutil.rmtree(part, ignore_errors=True)


def clear_cache(folder: Path) -> tuple[int, int]:
    """Delete everything but what is being written; returns the number of entries and bytes deleted."""
    entries = list_entries(folder)
    remove_cache_leftovers(folder)
    for path in [*(file.parent for file in folder.glob("*/pixels.bin")), *folder.glob("hashes-*.json")]:
        if path.suffix == ".json":
            path.unlink(missing_ok=True)
        elif path.suffix != ".part":
            shutil.rmtree(path, ignore_errors=True)
    return len(entries), sum(entry.bytes for entry in entries)


def _read_json(path: Path) -> dict[str, list[object]] | None:
    """The content of a file, or None if it is missing or damaged."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _write_json(path: Path, content: object) -> None:
    """Write to a temporary file and rename it, so that other processes never read a partial one."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(content))
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
