"""The cache of decoded photos: complete or absent, never old, never larger than allowed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from icmixup.lab.cli import main
from icmixup.lab.datasets import DataSpec, cache, load_dataset
from icmixup.lab.images import tasks

PER_CLASS = 8


@pytest.fixture(autouse=True)
def on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a few photos go to the disk."""
    monkeypatch.setattr(cache, "MEMORY_BYTES", 0)
    for name in ("ICMIXUP_CACHE", "ICMIXUP_CACHE_GB"):
        monkeypatch.delenv(name, raising=False)


def write_photo(path: Path, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    for label, name in enumerate("ab"):
        for number in range(PER_CLASS):
            write_photo(root / name / f"{number}.bmp", 100 * label + number)
    return root


def load(photos: Path, image_size: int = 80) -> Tensor:
    """All photos, training images first."""
    data = load_dataset(DataSpec(str(photos), image_size=image_size), photos.parent)
    return torch.cat([data.train.square(), data.test.square()])


def refuse_to_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> str:
        raise AssertionError("a photo was decoded")

    monkeypatch.setattr(tasks, "decode_photo", fail)


def test_photos_are_decoded_once(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load(photos)
    refuse_to_decode(monkeypatch)
    assert torch.equal(load(photos), first)


def test_a_moved_folder_is_not_decoded_again(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load(photos)
    moved = photos.rename(photos.with_name("moved"))
    refuse_to_decode(monkeypatch)
    assert torch.equal(load(moved), first)


def test_another_size_is_another_entry(photos: Path) -> None:
    assert load(photos).shape[-1] == 80
    assert load(photos, 72).shape[-1] == 72
    assert len(cache.list_entries(photos.parent / "cache")) == 2


@pytest.mark.parametrize("settled", [True, False])
def test_a_photo_that_changed_without_another_size_or_time_is_decoded_again(
    settled: bool, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Settled: hashes of the first loading are kept. Otherwise files were too new to rely on their state.
    monkeypatch.setattr(tasks, "SETTLED_NS", -(10**12) if settled else 10**12)
    before = load(photos)
    changed = photos / "a" / "3.bmp"
    stat = changed.stat()
    write_photo(changed, 999)
    os.utime(changed, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (changed.stat().st_size, changed.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    after = load(photos)
    assert (before != after).flatten(1).any(dim=1).sum() == 1


def test_unchanged_files_are_not_read_again(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "SETTLED_NS", -(10**12))
    first = load(photos)

    def fail(file: object) -> str:
        raise AssertionError("a file was read")

    monkeypatch.setattr(tasks, "digest", fail)
    assert torch.equal(load(photos), first)


def test_added_and_removed_photos_are_noticed(photos: Path) -> None:
    assert len(load(photos)) == 2 * PER_CLASS
    write_photo(photos / "b" / "more.bmp", 5)
    assert len(load(photos)) == 2 * PER_CLASS + 1
    (photos / "b" / "more.bmp").unlink()
    (photos / "a" / "0.bmp").unlink()
    assert len(load(photos)) == 2 * PER_CLASS - 1


def test_photos_that_change_while_they_are_decoded_are_refused(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = tasks.decode_photo

    def change_and_decode(*args: object) -> object:
        write_photo(photos / "a" / "1.bmp", 777)
        return decode(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(tasks, "decode_photo", change_and_decode)
    with pytest.raises(ValueError, match="changed while they were decoded; run the command again"):
        load(photos)
    assert not list((photos.parent / "cache").glob("*.part"))
    monkeypatch.setattr(tasks, "decode_photo", decode)
    assert len(load(photos)) == 2 * PER_CLASS


# Processes

LOAD_SLOWLY = """
import hashlib, os, sys, time
from pathlib import Path
from icmixup.lab.datasets import cache, DataSpec, load_dataset
from icmixup.lab.images import tasks
cache.MEMORY_BYTES = 0
decode = tasks.decode_photo
def slow(file, *rest):
    with open(sys.argv[2], "a") as log:
        log.write(file.name + "\\n")
    while sys.argv[3] == "wait" and not Path(sys.argv[2] + ".go").exists():
        time.sleep(0.05)
    return decode(file, *rest)
tasks.decode_photo = slow
photos = Path(sys.argv[1])
data = load_dataset(DataSpec(str(photos), image_size=80), photos.parent)
print(hashlib.sha256(data.train.square().numpy().tobytes()).hexdigest())
"""


def start(photos: Path, *mode: str, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", LOAD_SLOWLY, str(photos), str(photos.parent / "log"), *mode]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,  # type: ignore[call-overload, no-any-return]
    )


def wait_for(path: Path) -> None:
    for _ in range(600):
        if path.exists() and path.read_text():
            return
        time.sleep(0.1)
    raise AssertionError(f"{path} was not written")


@pytest.mark.slow
def test_a_command_killed_while_it_decodes_leaves_nothing_that_is_used(photos: Path) -> None:
    process = start(photos, "wait")
    wait_for(photos.parent / "log")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    folder = photos.parent / "cache"
    assert len(list(folder.glob("*.part"))) == 1
    assert cache.list_entries(folder) == []
    after = load(photos)
    assert not list(folder.glob("*.part"))
    shutil.rmtree(folder)
    assert torch.equal(load(photos), after)


@pytest.mark.slow
def test_what_a_killed_command_left_is_removed_by_the_next_one_for_other_photos(photos: Path) -> None:
    process = start(photos, "wait")
    wait_for(photos.parent / "log")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    load(photos, 72)
    assert not list((photos.parent / "cache").glob("*.part"))


@pytest.mark.slow
def test_of_two_commands_at_once_one_decodes_and_the_other_waits(photos: Path) -> None:
    first = start(photos, "wait")
    wait_for(photos.parent / "log")
    second = start(photos, "wait")
    assert second.stderr is not None
    assert "another process is decoding these photos; waiting for it" in second.stderr.readline()
    (photos.parent / "log.go").touch()
    results = [process.communicate(timeout=120) for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], results
    assert results[0][0] == results[1][0] != ""
    log = (photos.parent / "log").read_text().split()
    assert len(log) == len(set(log)) == 2 * PER_CLASS


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_names_the_setting_that_moves_it(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (photos.parent / "file").write_text("")
    monkeypatch.setenv("ICMIXUP_CACHE", str(photos.parent / "file" / "cache"))
    with pytest.raises(ValueError, match=r"cannot be stored in .*cache .*: set ICMIXUP_CACHE to a folder"):
        load(photos)


def test_a_full_disk_is_reported_with_the_space_that_is_needed(photos: Path) -> None:
    # A file system of its own, in a name space of its own: no other process sees it.
    small = photos.parent / "small"
    small.mkdir()
    mount = f"mount -t tmpfs -o size=200k tmpfs {small} && "
    code = LOAD_SLOWLY.replace("'", '"')
    probe = subprocess.run(["unshare", "-rm", "sh", "-c", mount + "true"], capture_output=True)
    if probe.returncode:
        pytest.skip("cannot mount a small file system here")
    command = f"{mount} {sys.executable} -c '{code}' {photos} {photos.parent / 'log'} go; ls -A {small}"
    environment = {**os.environ, "ICMIXUP_CACHE": str(small)}
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command], capture_output=True, text=True, env=environment
    )
    expected = f"the decoded photos need 0.41 MB in {small}, where 0.20 MB are free"
    assert expected in done.stderr  # 16 photos of 80 x 106 pixels
    assert "set ICMIXUP_CACHE to a folder on a larger disk" in done.stderr
    assert not (photos.parent / "log").exists()  # noticed before anything was decoded
    assert "pixels" not in done.stdout


@pytest.mark.slow
def test_a_disk_that_fills_up_meanwhile_is_reported_and_cleaned(photos: Path) -> None:
    import resource

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    process = start(photos, "go", preexec_fn=limit)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "the decoded photos need" in error.splitlines()[-1]
    assert "File too large" in error.splitlines()[-1]
    assert not [path for path in (photos.parent / "cache").iterdir() if path.is_dir()]


# Limits and clean-up


def test_the_least_recently_used_photos_make_room(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (80, 81, 82):
        load(photos, size)
    folder = photos.parent / "cache"
    entries = {entry.short_side: entry for entry in cache.list_entries(folder)}
    now = time.time()
    for age, side in enumerate(sorted(entries)):  # 80 is the newest
        os.utime(entries[side].path / "photos.json", (now - 100 * (age + 1), now - 100 * (age + 1)))
    total = sum(entry.bytes for entry in entries.values())
    monkeypatch.setenv("ICMIXUP_CACHE_GB", str((total + 1000) / 1e9))
    load(photos, 66)
    kept = sorted(entry.short_side for entry in cache.list_entries(folder))
    assert kept == sorted([int(66 / 0.875), *sorted(entries)[:2]])
    assert sum(entry.bytes for entry in cache.list_entries(folder)) <= total + 1000


def test_photos_beyond_the_limit_are_refused_with_what_they_need(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ICMIXUP_CACHE_GB", "0.0001")
    with pytest.raises(
        ValueError, match=r"need 0\.\d\d MB, but the cache is limited to 0\.10 MB: set ICMIXUP"
    ):
        load(photos)
    monkeypatch.setenv("ICMIXUP_CACHE_GB", "much")
    with pytest.raises(ValueError, match="must be a number of gigabytes, 0 or more, got 'much'"):
        load(photos)


def test_a_damaged_entry_is_refused(photos: Path) -> None:
    load(photos)
    pixels = cache.list_entries(photos.parent / "cache")[0].path / "pixels.bin"
    pixels.write_bytes(pixels.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"pixels\.bin is damaged; icmixup data cache --clear removes it"):
        load(photos)


def test_the_command_lists_and_clears_the_cache(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = load(photos)
    folder = photos.parent / "cache"
    (folder / "0123.part").mkdir()
    assert main(["data", "cache", "--data-dir", str(photos.parent)]) == 0
    listed = capsys.readouterr().out
    assert cache.list_entries(folder)[0].path.name in listed
    assert "of at most 50 GB" in listed
    assert main(["data", "cache", "--clear", "--data-dir", str(photos.parent)]) == 0
    assert "deleted 1 set of decoded photos" in capsys.readouterr().out
    assert [path.suffix for path in folder.iterdir()] == [".lock"] * len(list(folder.iterdir()))
    assert torch.equal(load(photos), before)
    assert main(["data", "list", "--clear"]) == 2
