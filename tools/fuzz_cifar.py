"""Mutate files of CIFAR's python layout and read them: each must be read or refused, never crash or run code.

    python tools/fuzz_cifar.py                          100,000 files
    python tools/fuzz_cifar.py --files 2000 --seed 1
    python tools/fuzz_cifar.py --json results/fuzz_cifar.json

The files are read in a child process, so that a crash of the interpreter is seen; an audit hook in it records
every import, call of exec, start of a process, and every file that is opened other than the one being read.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pickle
import pickletools
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

from icmixup.lab.datasets import cifar

LAYOUT = cifar.LAYOUTS["cifar10"][1]
OPCODES = [entry.code.encode("latin1") for entry in pickletools.opcodes]
NAMES = [
    b"cnumpy\nndarray\n",
    b"cnumpy\ndtype\n",
    b"cnumpy.core.multiarray\n_reconstruct\n",
    b"cnumpy.core.multiarray\nscalar\n",
    b"cnumpy.core.numeric\n_frombuffer\n",
    b"c_codecs\nencode\n",
    b"cos\nsystem\n",
    b"cbuiltins\neval\n",
    b"cnumpy\nfromfile\n",
]
CODES = [b"O8", b"V8", b"S8", b"M8", b"U4", b"u8", b"f8", b"i4", b"c16", b"u1,u1", b"|O"]
LARGE = b"\x8a\x08" + b"\xff" * 7 + b"\x7f"
NUMBERS = [b"J\xff\xff\xff\xff", b"K\x00", b"K\xff", b"J\xff\xff\xff\x7f", LARGE]
WATCHED = ("import", "exec", "compile", "open", "subprocess", "os.", "socket", "ctypes", "pickle", "shutil")
STEP = 500  # files per child process: a crash costs no more than these


def valid_files() -> list[bytes]:
    """One image as pickles of every protocol, with labels as a list, as an array and as scalars."""
    image = np.arange(cifar.PIXELS, dtype=np.uint8)[None] * 7
    contents = [
        {"data": image, "labels": [3], "filenames": ["a.png"], "batch_label": "testing"},
        {b"data": image, b"labels": np.array([3], np.int64)},
        {"labels": [np.int64(3)], "data": np.asfortranarray(image)},
    ]
    return [pickle.dumps(content, protocol) for content in contents for protocol in range(6)]


def mutate(content: bytes, rng: random.Random) -> bytes:
    """One to four changes, mostly outside the pixels."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        place = pick_place(data, rng)
        change = rng.randrange(7)
        if change == 0:
            data[place] = rng.randrange(256)
        elif change == 1:
            data[place] ^= 1 << rng.randrange(8)
        elif change == 2:
            data[place:place] = rng.choice([*OPCODES, *NAMES, *NUMBERS])
        elif change == 3:
            del data[place : place + rng.randint(1, 40)]
        elif change == 4:
            data[place : place + 2] = rng.choice(CODES)
        elif change == 5:
            start = pick_place(data, rng)
            data[place:place] = data[start : start + rng.randint(1, 60)]
        else:
            data[place : place + 1] = rng.choice(OPCODES)
        if not data:
            return b"."
    return bytes(data)


def pick_place(data: bytearray, rng: random.Random) -> int:
    near = min(len(data), 250)
    return rng.choice([rng.randrange(near), len(data) - 1 - rng.randrange(near), rng.randrange(len(data))])


class Audit:
    """Counts the events of the interpreter that reading a file must not cause."""

    def __init__(self, path: Path) -> None:
        self.path, self.active, self.events = str(path), False, Counter[str]()
        sys.addaudithook(self.hear)

    def hear(self, event: str, args: tuple[object, ...]) -> None:
        if self.active and event.startswith(WATCHED) and not (event == "open" and str(args[0]) == self.path):
            self.events[event] += 1


def read_mutants(seed: int, numbers: range, folder: str, results: multiprocessing.Queue[object]) -> None:
    """Read the files of the given numbers and report a Counter of outcomes, and of forbidden events."""
    path = Path(folder) / f"data_batch_{numbers.start}"
    outcomes: Counter[str] = Counter()
    seeds = valid_files()
    for content in seeds:  # whatever is imported on first use is imported now
        path.write_bytes(content)
        read(path)
    audit = Audit(path)
    for number in numbers:
        rng = random.Random(f"{seed} {number}")
        path.write_bytes(mutate(rng.choice(seeds), rng))
        audit.active = True
        outcome = read(path)
        audit.active = False
        outcomes[outcome] += 1
    path.unlink()
    results.put((outcomes, audit.events))


def read(path: Path) -> str:
    try:
        pixels, labels = cifar._read_file(path, LAYOUT, 10)
    except ValueError:
        return "refused"
    except Exception as error:
        return f"unexpected {type(error).__name__}: {error}"
    sound = pixels.dtype == np.uint8 and pixels.shape == (len(labels), cifar.PIXELS)
    return "read" if sound and int(pixels.sum(dtype=np.int64)) >= 0 else "unexpected result"


def fuzz(files: int, seed: int) -> dict[str, object]:
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    outcomes: Counter[str] = Counter()
    events: Counter[str] = Counter()
    crashes: list[str] = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for first in range(0, files, STEP):
            numbers = range(first, min(first + STEP, files))
            results = context.Queue()
            child = context.Process(target=read_mutants, args=(seed, numbers, folder, results))
            child.start()
            child.join(timeout=120)
            if child.exitcode != 0:
                child.kill()
                crashes.append(f"files {numbers.start} to {numbers.stop - 1}: exit code {child.exitcode}")
                continue
            found, heard = results.get()
            outcomes += found
            events += heard
    return {
        "files": files,
        "seed": seed,
        "read": outcomes["read"],
        "refused": outcomes["refused"],
        "unexpected": {name: n for name, n in outcomes.items() if name not in ("read", "refused")},
        "crashes": crashes,
        "forbidden_events": dict(events),
        "seconds": round(time.monotonic() - started),
        "python": sys.version.split()[0],
        "numpy": np.__version__,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Mutate files of CIFAR's python layout and read them.")
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the result there too")
    args = parser.parse_args()
    result = fuzz(args.files, args.seed)
    text = json.dumps(result, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    return int(bool(result["unexpected"] or result["crashes"] or result["forbidden_events"]))


if __name__ == "__main__":
    sys.exit(main())
