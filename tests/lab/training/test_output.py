"""Files that a user names: devices, pipes and links stay what they are."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from icmixup.lab.training.output import write_output


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_output(pipe, b"rows")
    reader.join(timeout=10)
    assert found == [b"rows"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for content in (b"first", b"2nd"):
        write_output(tmp_path / "link", content)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "file").read_bytes() == content


def test_a_file_is_replaced_and_its_folder_is_made(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    write_output(path, b"first")
    before = path.stat().st_ino
    write_output(path, b"second")
    assert path.read_bytes() == b"second"
    assert path.stat().st_ino != before  # a reader never sees a part of it


@pytest.mark.parametrize("folder", ["taken", "taken/inside"])
def test_a_file_in_the_place_of_a_folder_is_named(folder: str, tmp_path: Path) -> None:
    """The message was "File exists", of a file that was not the one to write."""
    (tmp_path / "taken").write_bytes(b"kept")
    with pytest.raises(ValueError, match=r"nothing can be written to .*, because .*taken is not a folder"):
        write_output(tmp_path / folder / "rows.csv", b"rows")
    assert (tmp_path / "taken").read_bytes() == b"kept"
