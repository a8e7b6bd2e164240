"""Files that a user names: devices, pipes and links stay what they are."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

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
