"""Downloads with a checksum, and archives that are unpacked without trusting their content."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import tarfile
import urllib.error
import urllib.request
import zipfile
from pathlib import Path
from typing import BinaryIO, NamedTuple

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from icmixup.lab.datasets.temporary import remove_leftovers, temporary_path

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
    remove_leftovers(path.parent)
    temporary = temporary_path(path)
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
    remove_leftovers(path.parent)
    temporary = temporary_path(path.parent / f".{archive.folder}", "unpack")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
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
