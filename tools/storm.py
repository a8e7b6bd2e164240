"""Kill commands with SIGKILL at random moments, run them to the end, and compare with uninterrupted ones.

    python tools/storm.py                               200 kills
    python tools/storm.py --kills 20 --seed 1
    python tools/storm.py --json results/storm.json

A round is one command in a fresh folder: it is killed, with all of its processes, again and again until
the round's kills are spent, then runs to its end. The round holds if the command succeeds, its results equal
those of an uninterrupted run bit for bit, and no temporary file or lock is left.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).parents[1]
PHOTOS = 1_600
PER_ROUND = 4  # kills before a command may end
TRAIN = "--recipe quick --dataset digits --method ic-mixup --per-class 20 --epochs 30 --batch-size 20"
COMPARE = "digits --recipe quick --methods erm mixup --seeds 1 --per-class 20 --epochs 15 --batch-size 20"
COMMANDS = {
    "train": f"train {TRAIN} --device cpu --out runs",
    "compare": f"compare {COMPARE} --device cpu --workers 2 --out runs",
    "paper": "paper --write --results results/runs.csv",
    "cache": "data check images --data-dir data",  # more photos than stay in memory: into the cache
    "analyse": "analyse runs/* --out analysis --device cpu",
    "evaluate": "evaluate runs --corruptions fog --strengths 1 3 --device cpu",
    "report": "report runs --to page/report.html --device cpu",
}
CHANGING = ("minutes", "images_per_second", "memory_mb", "date", "commit", "seconds", "predictions")


def start(command: str, folder: Path) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "icmixup", *command.split()]
    if "*" in command:  # no shell expands it here
        words = [part for word in words for part in expand(word, folder)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "src"),
        "ICMIXUP_COMMIT": "storm",
    }
    return subprocess.Popen(
        words,
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def expand(word: str, folder: Path) -> list[str]:
    if not word.endswith("/*"):
        return [word]
    return sorted(str(path.relative_to(folder)) for path in folder.glob(word) if path.is_dir())


def finish(command: str, folder: Path) -> float:
    """Run a command to its end; returns its seconds."""
    started = time.monotonic()
    process = start(command, folder)
    _, errors = process.communicate(timeout=600)
    if process.returncode not in (0, 1):
        raise RuntimeError(f"{command} exited with {process.returncode}: {errors.decode()[-2000:]}")
    return time.monotonic() - started


def kill_within(command: str, folder: Path, seconds: float) -> bool:
    """Start a command and kill its processes after some time; False if it had ended before."""
    process = start(command, folder)
    try:
        process.communicate(timeout=seconds)
        return False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return True


def prepare(name: str, folder: Path, root: Path) -> None:
    """The files that a command needs before it starts; `root` has those of the uninterrupted commands."""
    folder.mkdir(parents=True)
    images, runs = root / "reference-cache" / "images", root / "reference-compare" / "runs"
    if name == "paper":
        (folder / "results").mkdir()
        shutil.copy(ROOT / "results" / "runs.csv", folder / "results")
    if name == "cache" and images.exists():
        shutil.copytree(images, folder / "images", copy_function=os.link)
    elif name == "cache":
        make_images(folder / "images")
    if name in ("analyse", "evaluate", "report"):
        shutil.copytree(runs, folder / "runs")


def make_images(folder: Path) -> None:
    """Photos of one colour each, three times as wide as high: small files that take much space decoded."""
    for number in range(PHOTOS):
        path = folder / ("even", "odd")[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (360, 120), (number % 256, number // 256, 0)).save(path)


def results_of(folder: Path) -> dict[str, Any]:
    """All results in a folder, without what depends on the clock."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("result.json")):
        row = json.loads(path.read_text())
        found[path.parent.name] = {key: value for key, value in row.items() if key not in CHANGING}
    for path in sorted(folder.rglob("log.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found[f"log of {path.parent.name}"] = [(line["epoch"], line.get("loss")) for line in lines]
    for path in sorted(folder.rglob("analysis.csv")):
        with path.open(newline="") as file:
            found[path.name] = [dict(row) for row in csv.DictReader(file)]
    for path in sorted(folder.glob("data/cache/*/*")):
        found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    for path in sorted(folder.rglob("evaluation.json")):
        found[str(path.relative_to(folder))] = json.loads(path.read_text())
    for path in sorted(folder.glob("page/report.html")):
        found[path.name] = read_page(path)
    for path in sorted(folder.rglob("README.md")):
        found[str(path.relative_to(folder))] = path.read_text()
    return found


def read_page(path: Path) -> Any:
    """The data of a report: the rest of the page has the time at which it was written."""
    return json.loads(path.read_text().split('id="data">')[1].split("</script>")[0])


def leftovers(folder: Path) -> list[str]:
    names = (path.name for path in folder.rglob("*"))
    return sorted(name for name in names if name.endswith(".part") or name == "lock.json")


def storm(kills: int, seed: int, minutes: float) -> dict[str, Any]:
    rng = random.Random(seed)
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        expected, seconds = run_references(root)
        spent, limit = 0, time.monotonic() + 60 * minutes
        while spent < kills and time.monotonic() < limit:
            for command, text in COMMANDS.items():
                if spent < kills and time.monotonic() < limit:
                    folder = root / f"round-{len(rounds)}"
                    prepare(command, folder, root)
                    wanted = min(PER_ROUND, kills - spent)
                    done = one_round(command, text, folder, wanted, seconds, rng)
                    done["identical"] = results_of(folder) == expected[command]
                    done["leftovers"] = leftovers(folder)
                    rounds.append(done)
                    spent += done["kills"]
                    print(json.dumps({"spent": spent, **done}), file=sys.stderr, flush=True)
                    shutil.rmtree(folder)
    return summarise(kills, seed, rounds)


def run_references(root: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """The results of every command without a kill, and its seconds."""
    expected, seconds = {}, {}
    for name, text in COMMANDS.items():
        folder = root / f"reference-{name}"
        prepare(name, folder, root)
        seconds[name] = finish(text, folder)
        expected[name] = results_of(folder)
    return expected, seconds


def one_round(
    name: str, text: str, folder: Path, wanted: int, seconds: dict[str, float], rng: random.Random
) -> dict[str, Any]:
    """Kill a command up to `wanted` times, then let it finish; one that ends too early ends the round."""
    killed = 0
    while killed < wanted:
        started = time.monotonic()
        if not kill_within(text, folder, rng.uniform(0.02, 1.0) * seconds[name]):
            seconds[name] = min(seconds[name], time.monotonic() - started)  # the next kills come earlier
            break
        killed += 1
    finish(text, folder)
    return {"command": name, "kills": killed}


def summarise(kills: int, seed: int, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    by_command = {
        name: {
            "rounds": sum(each["command"] == name for each in rounds),
            "kills": sum(each["kills"] for each in rounds if each["command"] == name),
            "identical": sum(each["identical"] for each in rounds if each["command"] == name),
            "with_leftovers": sum(bool(each["leftovers"]) for each in rounds if each["command"] == name),
        }
        for name in COMMANDS
    }
    return {
        "kills": sum(each["kills"] for each in rounds),
        "asked": kills,
        "seed": seed,
        "rounds": len(rounds),
        "identical_rounds": sum(each["identical"] for each in rounds),
        "rounds_with_leftovers": sum(bool(each["leftovers"]) for each in rounds),
        "by_command": by_command,
        "python": sys.version.split()[0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill commands at random moments and compare their results.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e9, help="start no round after this time")
    parser.add_argument("--json", type=Path, help="write the result there too")
    args = parser.parse_args()
    result = storm(args.kills, args.seed, args.minutes)
    text = json.dumps(result, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    return int(result["identical_rounds"] < result["rounds"] or bool(result["rounds_with_leftovers"]))


if __name__ == "__main__":
    sys.exit(main())
