"""Downloads with a checksum, and archives and pickles that are read without trusting their content."""

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
    """A published archive: its URL, its MD5 sum, and the folder it unpacks to."""

    url: str
    md5: str
    folder: str

    @property
    def file_name(self) -> str:
        return self.url.rsplit("/", 1)[-1]


def fetch_archive(archive: Archive, data_dir: Path, *, show_progress: bool = False) -> Path:
    """Unpack the archive in data_dir, downloading it first if it is not there; returns its folder."""
    path = data_dir / archive.file_name
    if not path.exists():
        data_dir.mkdir(parents=True, exist_ok=True)
        download(archive, path, show_progress=show_progress)
    return unpack(archive, path)


def download(archive: Archive, path: Path, *, show_progress: bool = False) -> None:
    """Download the archive to `path`: to a temporary file that is renamed once its checksum is verified."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(temporary, "wb") as file:
            _stream(archive, file, path, show_progress)
        verify_md5(
            archive, temporary, f"the download of {archive.url} to {path}", "it was deleted; try again"
        )
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


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
            f"download that file by other means and save it as {path}"
        ) from error


def _progress(show: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    return Progress(
        *columns, TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True), disable=not show
    )


def verify_md5(archive: Archive, path: Path, description: str, remedy: str) -> None:
    """Raise an error if the MD5 sum of a file is not the publisher's."""
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != archive.md5:
        raise ValueError(f"{description} has MD5 sum {found}, expected {archive.md5}: {remedy}")


def unpack(archive: Archive, path: Path) -> Path:
    """Verify an archive and unpack it to a temporary folder that is renamed when it is complete."""
    verify_md5(archive, path, str(path), f"remove it and download {archive.url} again")
    target = path.parent / archive.folder
    temporary = Path(tempfile.mkdtemp(prefix=f".{archive.folder}.", dir=path.parent))
    try:
        _extract(path, temporary)
        if not (temporary / archive.folder).is_dir():
            raise ValueError(
                f"{path} does not contain the folder {archive.folder}: download {archive.url} again"
            )
        if not target.exists():  # another process may have been faster
            os.replace(temporary / archive.folder, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _extract(path: Path, folder: Path) -> None:
    try:
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                archive.extractall(folder)  # zipfile itself drops ".." and leading slashes
        else:
            with tarfile.open(path) as archive:
                archive.extractall(folder, filter="data")
    except (tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"could not unpack {path} ({error}): remove it and download it again") from error


class RefusedPickle(ValueError):
    """A pickle refers to something other than plain values and NumPy arrays."""


def _latin1_bytes(text: str, encoding: str = "latin1") -> bytes:
    """Replaces _codecs.encode, which old pickles use for bytes; codecs other than latin1 are refused."""
    if encoding != "latin1":
        raise RefusedPickle(f"it refers to the codec {encoding!r}, and only latin1 is allowed")
    return text.encode("latin1")


def _constructors() -> dict[tuple[str, str], Callable[..., object]]:
    """NumPy's constructors of arrays and scalars, under the module names of its old and new versions."""
    array = np.zeros(1, np.uint8)
    found: dict[str, Any] = {"_reconstruct": array.__reduce__()[0], "scalar": np.uint8(0).__reduce__()[0]}
    from_buffer: Any = array.__reduce_ex__(5)[0]
    allowed: dict[tuple[str, str], Callable[..., object]] = {
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("_codecs", "encode"): _latin1_bytes,
    }
    for core in ("numpy.core", "numpy._core"):
        allowed |= {(f"{core}.multiarray", name): constructor for name, constructor in found.items()}
        allowed[f"{core}.numeric", "_frombuffer"] = from_buffer
    return allowed


class ArrayUnpickler(pickle.Unpickler):
    """Reads plain values and NumPy arrays; any other name in the pickle is refused before it is imported."""

    allowed = _constructors()

    def find_class(self, module: str, name: str) -> Callable[..., object]:
        if (module, name) not in self.allowed:
            raise RefusedPickle(
                f"it refers to {module}.{name}, and only plain values and NumPy arrays are allowed"
            )
        return self.allowed[module, name]


def read_pickle(path: Path) -> dict[str, object]:
    """Read a pickled dictionary of arrays and lists without executing it; keys are converted to str."""
    try:
        with open(path, "rb") as file:
            content = ArrayUnpickler(file, encoding="latin1").load()
    except RefusedPickle as error:
        raise RefusedPickle(
            f"refused to load the pickle {path}: {error}; download it from its publisher"
        ) from error
    except OSError:
        raise
    except Exception as error:  # a truncated pickle can raise nearly anything
        raise ValueError(
            f"{path} is truncated or not a pickle ({error}): remove it and download it again"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} must contain a dictionary of arrays, got {type(content).__name__}: download it again"
        )
    return {key.decode("latin1") if isinstance(key, bytes) else str(key): v for key, v in content.items()}
