"""Files of other people: fetched with a checksum, unpacked with care, unpickled without trust."""

from __future__ import annotations

import hashlib
import http.client
import os
import pickle
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

CHUNK = 1 << 18
TIMEOUT_S = 30.0


class Archive(NamedTuple):
    """A publisher's archive: where it lies, its MD5 sum, and the folder it unpacks to."""

    url: str
    md5: str
    folder: str

    @property
    def file_name(self) -> str:
        return self.url.rsplit("/", 1)[-1]


def fetch_archive(archive: Archive, data_dir: Path, *, show_progress: bool = False) -> Path:
    """The archive's folder under data_dir, downloaded and unpacked if it is not there."""
    path = data_dir / archive.file_name
    if not path.exists():
        data_dir.mkdir(parents=True, exist_ok=True)
        download(archive, path, show_progress=show_progress)
    return unpack(archive, path)


def download(archive: Archive, path: Path, *, show_progress: bool = False) -> None:
    """Bring the archive to `path`: written beside, its sum checked, then renamed."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(beside, "wb") as file:
            _stream(archive, file, path, show_progress)
        check_sum(
            archive, beside, f"what came from {archive.url} for {path}", "it was thrown away, try again"
        )
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _stream(archive: Archive, file: BinaryIO, path: Path, show_progress: bool) -> None:
    try:
        with urllib.request.urlopen(archive.url, timeout=TIMEOUT_S) as response:
            length = response.headers.get("Content-Length")
            with _progress(show_progress) as progress:
                task = progress.add_task(path.name, total=int(length) if length else None)
                while chunk := response.read(CHUNK):
                    file.write(chunk)
                    progress.update(task, advance=len(chunk))
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
        raise ValueError(
            f"could not download {archive.url} ({getattr(error, 'reason', None) or error}): "
            f"bring that file by hand to {path}"
        ) from error


def _progress(show: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    return Progress(
        *columns, TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True), disable=not show
    )


def check_sum(archive: Archive, path: Path, what: str, way_out: str) -> None:
    """Refuse a file whose MD5 sum is not the publisher's."""
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != archive.md5:
        raise ValueError(f"{what} has MD5 sum {found} where the publisher's is {archive.md5}: {way_out}")


def unpack(archive: Archive, path: Path) -> Path:
    """Check an archive and unpack it beside its folder's place, then rename: no half folder is ever seen."""
    check_sum(archive, path, str(path), f"remove it and fetch {archive.url} again")
    target = path.parent / archive.folder
    beside = Path(tempfile.mkdtemp(prefix=f".{archive.folder}.", dir=path.parent))
    try:
        _extract(path, beside)
        if not (beside / archive.folder).is_dir():
            raise ValueError(f"{path} holds no folder {archive.folder}: fetch {archive.url} again")
        if not target.exists():  # another process may have been faster
            os.replace(beside / archive.folder, target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return target


def _extract(path: Path, folder: Path) -> None:
    try:
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as pages:
                pages.extractall(folder)  # zipfile itself drops ".." and leading slashes
        else:
            with tarfile.open(path) as tape:
                tape.extractall(folder, filter="data")
    except (tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"{path} could not be unpacked ({error}): remove it and fetch it again") from error


class RefusedPickle(ValueError):
    """A pickle asked for something that no array needs."""


def _latin1_bytes(text: str, encoding: str = "latin1") -> bytes:
    """Stands for _codecs.encode, by which Python 3 writes bytes to old pickles; other codecs are refused."""
    if encoding != "latin1":
        raise RefusedPickle(f"a pickle asks for the codec {encoding!r}, which no array needs")
    return text.encode("latin1")


def _constructors() -> dict[tuple[str, str], Callable[..., object]]:
    """Numpy's own constructors of arrays and scalars, under the module names of its old and new versions."""
    array = np.zeros(1, np.uint8)
    found: dict[str, Any] = {"_reconstruct": array.__reduce__()[0], "scalar": np.uint8(0).__reduce__()[0]}
    from_buffer: Any = array.__reduce_ex__(5)[0]
    allowed: dict[tuple[str, str], Callable[..., object]] = {
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("_codecs", "encode"): _latin1_bytes,
    }
    for core in ("numpy.core", "numpy._core"):
        allowed |= {(f"{core}.multiarray", name): maker for name, maker in found.items()}
        allowed[f"{core}.numeric", "_frombuffer"] = from_buffer
    return allowed


class ArrayUnpickler(pickle.Unpickler):
    """Reads plain values and numpy arrays; any other name in the pickle is refused before it is imported."""

    allowed = _constructors()

    def find_class(self, module: str, name: str) -> Callable[..., object]:
        if (module, name) not in self.allowed:
            raise RefusedPickle(f"a pickle asks for {module}.{name}, which no array needs")
        return self.allowed[module, name]


def read_pickle(path: Path) -> dict[str, object]:
    """A publisher's dictionary of arrays and lists, its keys as text."""
    try:
        with open(path, "rb") as file:
            content = ArrayUnpickler(file, encoding="latin1").load()
    except RefusedPickle as error:
        raise RefusedPickle(
            f"{path} was refused, and nothing of it ran: {error}; get it from its publisher"
        ) from error
    except OSError:
        raise
    except Exception as error:  # a torn pickle can raise nearly anything
        raise ValueError(f"{path} is torn or no pickle ({error}): remove it and fetch it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__} where a dictionary of arrays belongs")
    return {key.decode("latin1") if isinstance(key, bytes) else str(key): v for key, v in content.items()}
