"""What the tests of all frameworks share: digits, a small network, and processes under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import icmixup as icm

ROOT = Path(__file__).parents[2]
C = 10
SECONDS = 240  # after which ranks that wait for each other are stopped, and the test fails

# Nothing is mixed, so ranks need not draw the same pairs, but every pair is contrasted with all the others.
UNMIXED = icm.Method(draw="mixup", prob=0.0, axes=icm.AXES)


def digits(number: int) -> tuple[Tensor, Tensor]:
    """(number, 1, 8, 8) images and their labels."""
    data = load_digits()
    images = torch.tensor(data.images[:number], dtype=torch.float32)[:, None] / 16
    return images, torch.tensor(data.target[:number])


def small_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, C))


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def one_batch_gradients(images: Tensor, labels: Tensor) -> list[Tensor]:
    """Gradients of the small network for the loss of one batch in one process, without a framework."""
    model = small_network()
    icm.training_loss(model, images, labels, UNMIXED).backward()
    return gradients(model)


def mean_gradients(images: Tensor, labels: Tensor, parts: int) -> list[Tensor]:
    """The mean of the gradients of each part: what ordinary accumulation computes."""
    of_parts = [
        one_batch_gradients(*part) for part in zip(images.chunk(parts), labels.chunk(parts), strict=True)
    ]
    return [torch.stack(same).mean(dim=0) for same in zip(*of_parts, strict=True)]


def run_ranks(script: str, *arguments: str, ranks: int = 2) -> str:
    """Run a script of tests/integrations/ranks in several processes; its output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    path = os.pathsep.join([str(ROOT / "src"), str(Path(__file__).parent)])
    done = subprocess.run(
        [*command, str(Path(__file__).parent / "ranks" / script), *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
