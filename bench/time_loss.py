"""Time one version of infinite_class_loss through its public call; bench/loss.py --baseline runs this.

    PYTHONPATH=src python bench/time_loss.py cuda '[[8192, 100, true], [8192, 100, false]]'

Each case is [pairs, classes, fused]. Prints the path of the package, then the median milliseconds of a
forward and backward pass for each case, as one line of JSON.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time

import torch
from torch import Tensor

import icmixup

SECONDS = 1.0  # for each case, after warming up
FEWEST, MOST = 5, 300  # runs


def draw(device: str, pairs: int, classes: int) -> tuple[Tensor, Tensor]:
    """Scores with a gradient, and Mixup targets with a lam for each pair."""
    generator = torch.Generator(device).manual_seed(0)
    new = {"device": device, "generator": generator}
    scores = 3 * torch.randn(pairs, classes, **new)
    labels = torch.randint(classes, (2, pairs), **new)
    lam = torch.rand(pairs, 1, **new)
    targets = torch.zeros(pairs, classes, device=device)
    targets.scatter_add_(1, labels[0, :, None], lam).scatter_add_(1, labels[1, :, None], 1 - lam)
    return scores.requires_grad_(), targets


def stamp(device: str) -> float | torch.cuda.Event:
    """Now, on the clock of the device: the host may run ahead of a GPU, as it does in training."""
    if device != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    return start.elapsed_time(end) if isinstance(start, torch.cuda.Event) else 1e3 * (end - start)


def median_ms(device: str, pairs: int, classes: int, fused: bool) -> float:
    scores, targets = draw(device, pairs, classes)

    def measure(runs: int) -> list[float]:
        stamps = [stamp(device)]
        for _ in range(runs):
            loss = icmixup.infinite_class_loss(scores, targets, fused=fused)
            torch.autograd.grad(loss, scores)
            stamps.append(stamp(device))
        if device == "cuda":
            torch.cuda.synchronize()
        return [milliseconds(start, end) for start, end in itertools.pairwise(stamps)]

    measure(3)
    expected = statistics.median(measure(3))
    return statistics.median(measure(max(FEWEST, min(MOST, int(1e3 * SECONDS / expected)))))


def main() -> None:
    device, cases = sys.argv[1], json.loads(sys.argv[2])
    print(json.dumps([icmixup.__file__, *(median_ms(device, *case) for case in cases)]))


if __name__ == "__main__":
    main()
