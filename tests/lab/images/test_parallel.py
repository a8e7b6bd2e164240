"""Files read in threads and in processes: the same results, and no process outlives its parent's interest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL import ImageFile as PillowFile

from icmixup.lab.datasets import DataSpec, cache, folder, load_dataset
from icmixup.lab.datasets.folder import list_folder
from icmixup.lab.images import parallel
from icmixup.lab.images.decode import ImageFile, Shape, decode_square, open_path
from icmixup.lab.images.parallel import count_processes, map_in_parallel
from icmixup.lab.images.tasks import Place, write_place

PER_CLASS = 12
linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


def write_photo(path: Path, seed: int, size: tuple[int, int] = (120, 90)) -> None:
    small = np.random.default_rng(seed).integers(0, 256, (6, 7, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(small).resize(size, Image.Resampling.BICUBIC).save(path)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Photos of several formats and sizes; four of them cannot be read."""
    root = tmp_path / "photos"
    for label, name in enumerate("ab"):
        for number in range(PER_CLASS):
            suffix = ("png", "jpg", "webp", "bmp")[number % 4]
            write_photo(root / name / f"{number:02}.{suffix}", 100 * label + number, (120 + 9 * number, 90))
    whole = (root / "a" / "00.png").read_bytes()
    (root / "a" / "cut.png").write_bytes(whole[: len(whole) // 2])  # its header is readable
    (root / "a" / "missing.png").symlink_to(root / "nowhere.png")
    (root / "b" / "text.jpg").write_text("this is not a photo")
    (root / "b" / "other.heic").write_bytes(b"nor is this")
    return root


def use_processes(monkeypatch: pytest.MonkeyPatch, number: int = 3) -> None:
    """Read even a few files in processes, on any machine."""
    monkeypatch.setattr(parallel, "count_cores", lambda: number)
    for module in (cache, folder):
        monkeypatch.setattr(module, "PHOTOS_EACH", 1)
    monkeypatch.setattr(cache, "HEADERS_EACH", 1)


def make_job(photos: Path) -> cache.Job:
    return cache.Job(list_folder(photos).train, 80, "bicubic")


def as_file(path: Path) -> ImageFile:
    return ImageFile(str(path), partial(open_path, path), 0, path)


def evaluate(expressions: list[str], processes: int = 3) -> list[object]:
    return map_in_parallel(eval, expressions, "", show_progress=False, processes=processes)


PID = "__import__('os').getpid()"
SLEEP = "__import__('time').sleep(60)"


# The same results


@pytest.mark.parametrize("memory_bytes", [0, 1 << 30])
def test_processes_decode_the_same_pixels_as_threads_and_report_the_same_failures(
    memory_bytes: int, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "MEMORY_BYTES", memory_bytes)
    folders = [photos.parent / "threads", photos.parent / "processes"]
    threads = cache.decode_photos(make_job(photos), folders[0])
    use_processes(monkeypatch)
    processes = cache.decode_photos(make_job(photos), folders[1])
    assert processes.failures == threads.failures
    assert sum(failure is not None for failure in threads.failures) == 4
    assert processes.store.sizes.equal(threads.store.sizes)
    for row, failure in enumerate(threads.failures):
        assert failure is not None or processes.store.photo(row).equal(threads.store.photo(row))


def test_processes_write_the_same_cache_as_threads(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MEMORY_BYTES", 0)

    def write(name: str) -> dict[str, bytes]:
        cache.decode_photos(make_job(photos), photos.parent / name)
        (entry,) = (path for path in (photos.parent / name).iterdir() if path.is_dir())
        return {f"{entry.name}/{path.name}": path.read_bytes() for path in entry.iterdir()}

    threads = write("threads")
    use_processes(monkeypatch)
    assert write("processes") == threads
    assert {Path(name).name for name in threads} == {"pixels.bin", "photos.json"}


def test_small_images_are_the_same_from_threads_and_processes(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = DataSpec(str(photos), image_size=24)
    threads = load_dataset(spec, photos.parent)
    use_processes(monkeypatch)
    processes = load_dataset(spec, photos.parent)
    assert processes.train.square().equal(threads.train.square())
    assert processes.skipped == threads.skipped
    assert len(threads.skipped) == 4


def test_photos_that_change_before_they_are_decoded_are_noticed_in_processes(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_processes(monkeypatch)
    job, place = make_job(photos), photos.parent / "cache"
    shapes, hashes = cache._read_shapes(job), cache.hash_files(job, photos)
    write_photo(photos / "b" / "03.bmp", 999, size=(90, 200))
    failures = cache._decode_to_memory(job, shapes).failures
    changed = [
        file.name for file, why in zip(job.files, failures, strict=True) if why and "changed while" in why
    ]
    assert changed == [str(photos / "b" / "03.bmp")]
    place.mkdir()
    with pytest.raises(ValueError, match="changed while they were decoded; run the command again"):
        cache._write_entry(place / "key", job, shapes, hashes)
    assert not list(place.glob("key*"))


def test_outputs_have_the_order_of_the_items_and_come_from_other_processes() -> None:
    pairs = evaluate([f"({number}, {PID})" for number in range(500)])
    numbers, pids = zip(*pairs, strict=True)  # type: ignore[misc]
    assert list(numbers) == list(range(500))
    assert os.getpid() not in pids
    assert len(set(pids)) <= 3


def test_the_progress_counts_every_item(capsys: pytest.CaptureFixture[str]) -> None:
    map_in_parallel(eval, ["1"] * 40, "adding", show_progress=True, processes=3)
    shown = capsys.readouterr().err
    assert "adding" in shown
    assert "100%" in shown


def test_the_settings_of_pillow_hold_in_processes(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, files = partial(decode_square, size=24), [as_file(photos / "a" / "cut.png")] * 3

    def read() -> list[object]:
        return list(map_in_parallel(decode, files, "", show_progress=False, processes=3))

    assert all(isinstance(found, str) for found in read())
    monkeypatch.setattr(PillowFile, "LOAD_TRUNCATED_IMAGES", True)
    assert all(isinstance(found, np.ndarray) for found in read())
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert all("decompression bomb" in str(found) for found in read())


def test_warnings_of_processes_follow_the_filters_of_this_one() -> None:
    warn = ["__import__('warnings').warn('an odd file')"] * 6
    with pytest.warns(UserWarning, match="an odd file"):
        evaluate(warn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert evaluate(warn) == [None] * 6


# When processes are used


def test_processes_are_used_for_many_files_on_many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "count_cores", lambda: 16)
    many = [as_file(Path(f"{number}.png")) for number in range(5000)]
    assert count_processes(many, each=200) == 16
    assert count_processes(many[:1000], each=200) == 5
    assert count_processes(many[:300], each=200) == 0
    rows = [file._replace(path=None) for file in many]
    assert count_processes(rows, each=200) == 0
    for cores in (1, 2):
        monkeypatch.setattr(parallel, "count_cores", lambda cores=cores: cores)
        assert count_processes(many, each=200) == 0


@linux
def test_a_process_counts_the_cores_that_it_may_use() -> None:
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    code += "from icmixup.lab.images.parallel import count_cores; print(count_cores())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "1\n"


def test_processes_do_not_import_torch() -> None:
    assert evaluate(["'torch' in __import__('sys').modules"] * 3) == [False] * 3


UNGUARDED = """
import sys
sys.addaudithook(lambda event, _: event == "subprocess.Popen" and print("started"))
print("script")
from pathlib import Path
from icmixup.lab.datasets import cache, DataSpec, load_dataset
from icmixup.lab.images import parallel
parallel.count_cores, cache.PHOTOS_EACH = lambda: 3, 1
data = load_dataset(DataSpec(sys.argv[1], image_size=72), Path(sys.argv[1]).parent)
print(len(data.train) + len(data.test))
"""


def test_a_script_without_a_guard_runs_once(photos: Path) -> None:
    script = photos.parent / "script.py"
    script.write_text(UNGUARDED)
    done = subprocess.run([sys.executable, script, photos], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.split() == ["script", *["started"] * 3, str(2 * PER_CLASS)]


# Errors


def test_an_error_in_a_process_is_raised_as_it_is() -> None:
    with pytest.raises(FileNotFoundError) as caught:
        evaluate(["1", "open('/nowhere/at/all')", "2"])
    assert (caught.value.strerror, caught.value.filename) == ("No such file or directory", "/nowhere/at/all")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no /dev/full")
def test_a_disk_that_is_full_is_reported_from_a_process(photos: Path) -> None:
    place = Place(as_file(photos / "a" / "00.png"), Shape(90, 120), 0)
    with Path("/dev/full").open("wb") as full:
        write = partial(write_place, short_side=90, interpolation="bicubic", descriptor=full.fileno())
        with pytest.raises(OSError, match="No space left on device"):
            map_in_parallel(write, [place] * 6, "", False, processes=3, descriptors=(full.fileno(),))


FILL_UP = """
import resource, sys
from pathlib import Path
from icmixup.lab.datasets import cache, DataSpec, load_dataset
from icmixup.lab.images import parallel
cache._allocate = lambda descriptor, size: None  # as where space cannot be reserved
cache.MEMORY_BYTES, parallel.count_cores, cache.PHOTOS_EACH = 0, lambda: 3, 1
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
load_dataset(DataSpec(sys.argv[1], image_size=72), Path(sys.argv[1]).parent)
"""


def test_a_disk_that_fills_up_in_a_process_is_reported_and_cleaned(photos: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FILL_UP, photos], capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ValueError: the decoded photos need 0.")
    assert "(File too large): set ICMIXUP_CACHE to a folder on a larger disk" in last
    assert not [path for path in (photos.parent / "cache").iterdir() if path.is_dir()]


def test_items_of_a_process_that_dies_are_done_here() -> None:
    die_elsewhere = f"{PID} == {os.getpid()} or __import__('os').kill({PID}, 9)"
    assert evaluate([*["7"] * 20, die_elsewhere, *["8"] * 20]) == [*[7] * 20, True, *[8] * 20]


def test_without_an_interpreter_to_start_everything_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert evaluate([PID] * 9) == [os.getpid()] * 9


def test_items_that_cannot_be_pickled_are_done_here() -> None:
    items = [lambda number=number: number for number in range(9)]
    assert map_in_parallel(call, items, "", show_progress=False, processes=3) == list(range(9))


def call(item: object) -> object:
    return item()  # type: ignore[operator]


def test_what_a_process_prints_is_not_taken_for_a_reply(capfd: pytest.CaptureFixture[str]) -> None:
    assert evaluate(["print('noise') or 5"] * 6) == [5] * 6
    assert capfd.readouterr().out == ""


# The end of processes

MAP = """
import os, sys
from icmixup.lab.images.parallel import map_in_parallel
folder, action = sys.argv[1:]
touch = f"open({folder!r} + '/' + str(__import__('os').getpid()), 'w').close()"
try:
    map_in_parallel(eval, [f"({touch}, {action})"] * 40, "", False, processes=3)
finally:
    try:
        os.waitpid(-1, os.WNOHANG)
        print("a child is left")
    except ChildProcessError:
        print("no child is left")
"""


def start_map(folder: Path, action: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", MAP, str(folder), action]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def wait_until(condition: object, seconds: float = 30) -> bool:
    for _ in range(int(seconds / 0.05)):
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.05)
    return False


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie, which waits for its new parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_no_process_is_left_after_an_error(tmp_path: Path) -> None:
    process = start_map(tmp_path, "1 / 0")
    output, error = process.communicate(timeout=30)
    assert output == "no child is left\n"
    assert error.count("ZeroDivisionError") == 1


@linux
def test_ctrl_c_ends_all_processes_at_once_with_one_traceback(tmp_path: Path) -> None:
    process = start_map(tmp_path, SLEEP)
    assert wait_until(lambda: len(list(tmp_path.iterdir())) == 3)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    output, error = process.communicate(timeout=10)
    assert output == "no child is left\n"
    assert error.count("Traceback") == 1
    assert error.splitlines()[-1] == "KeyboardInterrupt"


@linux
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_processes_end_when_their_parent_is_killed(how: signal.Signals, tmp_path: Path) -> None:
    process = start_map(tmp_path, SLEEP)
    assert wait_until(lambda: len(list(tmp_path.iterdir())) == 3)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert all(map(is_running, pids))
    process.send_signal(how)
    process.communicate(timeout=10)
    assert wait_until(lambda: not any(map(is_running, pids)), seconds=5)
