"""Two ranks that were started differently: both end within seconds, with an error that names the difference.

Both ranks are real processes over gloo; one launch goes through all cases.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import shutil
import socket
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from forked import forking_context
from torch import distributed as dist
from torch import multiprocessing as mp

from icmixup.lab.training import ranks

PLAN = (
    "--recipe quick --dataset digits --method ic-mixup --per-class 21 --epochs 2 --batch-size 63 --device cpu"
)
SWEEP = "digits --recipe quick --methods erm --seeds 1 --per-class 21 --epochs 2 --batch-size 63 --device cpu"
SECONDS = 60.0  # for a case, on a machine that does other things as well; a hang lasts for 30 minutes

# what differs: the command of rank 0, of rank 1, and the message on both
CASES = {
    "seed": (f"train {PLAN}", f"train {PLAN} --seed 1", "seed is 0 on rank 0 and 1 on rank 1"),
    "learning rate": (f"train {PLAN}", f"train {PLAN} --lr 0.01", "lr is 0.05 on rank 0 and 0.01 on rank 1"),
    "epochs": (f"train {PLAN}", f"train {PLAN} --epochs 3", "epochs is 2 on rank 0 and 3 on rank 1"),
    "method": (f"train {PLAN}", f"train {PLAN} --method mixup", "'ic-mixup' on rank 0 and 'mixup' on rank 1"),
    "batch size": (f"train {PLAN}", f"train {PLAN} --batch-size 21", "batch_size is 63 on rank 0 and 21 on"),
    "model": (f"train {PLAN}", f"train {PLAN} --model resnet32", "model is 'small-cnn' on rank 0"),
    "subset": (f"train {PLAN}", f"train {PLAN} --data-seed 1", "data_seed is 0 on rank 0 and 1 on rank 1"),
    "images": (
        f"train {PLAN} --dataset images --per-class 4 --batch-size 4",
        f"train {PLAN} --dataset images --per-class 4 --batch-size 4",
        "identity's data is",
    ),
    "checkpoint on rank 0 only": (
        f"train {PLAN} --out part",
        f"train {PLAN} --out part",
        "epoch is 1 on rank 0 and None on rank 1",
    ),
    "finished on rank 0 only": (
        f"train {PLAN} --out all",
        f"train {PLAN} --out all",
        "finished is True on rank 0",
    ),
    "sweep finished on rank 0 only": (
        f"compare {SWEEP} --out sweep",
        f"compare {SWEEP} --out sweep",
        "list of runs to train is",
    ),
    "unknown dataset on rank 1": (f"train {PLAN}", f"train {PLAN} --dataset nothing", "no dataset or folder"),
    "bad value on rank 1": (f"train {PLAN}", f"train {PLAN} --momentum 2", "momentum must be"),
    "bad value on rank 0": (f"train {PLAN} --momentum 2", f"train {PLAN}", "momentum must be"),
    "too large a batch on rank 1": (f"train {PLAN}", f"train {PLAN} --batch-size 999", "batch_size is 999"),
}


def prepare(root: Path) -> None:
    """Folders of each rank, as on two machines: other images, and a run that only rank 0 has."""
    import numpy as np
    from PIL import Image

    for rank in range(2):
        for label in "ab":
            folder = root / str(rank) / "images" / label
            folder.mkdir(parents=True)
            for number in range(6):
                pixels = np.full((8, 8, 3), 20 * number + 7 * rank + 100 * (label == "b"), np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    os.chdir(root / "0")
    from icmixup.lab.cli import main

    assert main(f"train {PLAN} --out all".split()) == 0
    assert main(f"compare {SWEEP} --out sweep".split()) == 0
    make_partial(Path("all"), Path("part"))


def make_partial(finished: Path, target: Path) -> None:
    """The run as it was after its first epoch."""
    import dataclasses

    import torch

    from icmixup.lab.training.run_folder import Run, read_identity
    from icmixup.lab.training.stored import read_recipe_file

    shutil.copytree(finished, target)
    folder = next(target.iterdir())
    run = Run(folder, read_recipe_file(folder / "recipe.json"), read_identity(folder))
    state, _ = run.load(torch.device("cpu"))
    assert state is not None
    dataclasses.replace(run).save({**state, "epochs_done": 1})
    (folder / "result.json").unlink()


def start_rank(rank: int, ports: dict[str, int], root: Path) -> None:
    if rank == 0:
        os.environ.pop("WORLD_SIZE", None)
        prepare(root)
        (root / "ready").touch()
    while not (root / "ready").exists():
        time.sleep(0.05)
    os.chdir(root / str(rank))
    from icmixup.lab.cli import main
    from icmixup.lab.training.ranks import CHECKED_IN

    os.environ.update({"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"})
    found = {}
    for name, commands in CASES.items():
        os.environ["MASTER_PORT"] = str(ports[name])
        CHECKED_IN.clear()
        errors, started = io.StringIO(), time.monotonic()
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            try:
                code = main(commands[rank].split())
            except BaseException:
                code = -1
                errors.write(traceback.format_exc())
        found[name] = {"code": code, "text": errors.getvalue(), "seconds": time.monotonic() - started}
        (root / f"{rank}.json").write_text(json.dumps(found))


def test_the_first_rank_stays_until_all_others_have_read_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the server of the store. The second rank is this test, which reads late."""
    (port,) = free_ports(1)
    settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "2"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks, "ROUNDS", itertools.count(7))
    monkeypatch.setattr(ranks, "CHECKED_IN", threading.Event())
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ranks.check_in)
        second = dist.TCPStore("127.0.0.1", port, 2, False, timeout=timedelta(seconds=SECONDS))
        second.set("icmixup/7/1", "ready")
        while second.add("icmixup/7/read", 0) == 0:  # the first rank has read
            time.sleep(0.01)
        with pytest.raises(TimeoutError):
            first.result(timeout=0.5)
        assert second.get("icmixup/7/0") == b"ready"
        second.add("icmixup/7/read", 1)
        first.result(timeout=SECONDS)


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    root = tmp_path_factory.mktemp("ranks")
    ports = dict(zip(CASES, free_ports(len(CASES)), strict=True))
    forking_context()  # its server has imported what ranks need
    processes = mp.start_processes(start_rank, (ports, root), nprocs=2, start_method="forkserver", join=False)
    limit = time.monotonic() + 540
    assert processes is not None
    while time.monotonic() < limit and not processes.join(timeout=5):
        pass
    for process in processes.processes:
        process.kill()
    return [json.loads((root / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_both_ranks_end_within_seconds_with_an_error_that_names_the_difference(
    name: str, outcomes: list[dict[str, Any]]
) -> None:
    for outcome in outcomes:
        assert name in outcome, "the case before this one never ended"
        found = outcome[name]
        assert found["code"] == 2, found["text"]
        assert CASES[name][2] in found["text"]
        assert "Traceback" not in found["text"]
        assert found["seconds"] < SECONDS
