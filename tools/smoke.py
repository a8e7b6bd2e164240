"""What a new user does first with the installed package, in an environment with torch alone."""

from __future__ import annotations

import subprocess
import sys
import warnings
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

import icmixup as icm


def main() -> None:
    warnings.simplefilter("error")  # torch itself warns, on import, that NumPy is missing
    place = Path(icm.__file__).resolve()
    assert place.is_relative_to(Path(sys.prefix).resolve()), f"{place} is not the installed package"
    assert (place.parent / "py.typed").exists()
    for absent in ("rich", "tyro", "sklearn", "timm", "lightning"):
        assert find_spec(absent) is None, f"{absent} is installed; the test needs torch alone"
    train()
    command = Path(sys.executable).with_name("icmixup")
    done = subprocess.run([command, "compare"], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "icmixup[lab]" in done.stderr, done.stderr
    code = [sys.executable, "-c", "import icmixup.integrations.timm"]
    done = subprocess.run(code, capture_output=True, text=True, check=False)
    assert "needs timm" in done.stderr, done.stderr
    print(f"icmixup {version('icmixup')} with torch {torch.__version__}: ok")


def train() -> None:
    """The loss of a linear model falls with every method."""
    torch.manual_seed(0)
    labels = torch.arange(64) % 4
    images = torch.nn.functional.one_hot(labels, 4).float()[:, :, None, None].expand(
        -1, -1, 4, 4
    ) + torch.randn(64, 4, 4, 4)
    counts = torch.bincount(labels)
    for method in icm.METHODS:
        layers = [torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)]
        model = torch.nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(40):
            loss = icm.training_loss(model, images, labels, method, counts)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert sum(losses[-5:]) < sum(losses[:5]), f"{method}: the loss does not fall"


if __name__ == "__main__":
    main()
