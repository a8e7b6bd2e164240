"""Both axes of S~ = S Y~^T in three forms: stored whole, computed in chunks, or fused into Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from icmixup.contrast.chunked import contrast_chunked
from icmixup.contrast.fused import HAS_TRITON, contrast_fused
from icmixup.contrast.plain import contrast_plain
from icmixup.contrast.request import Losses, Request

__all__ = ["Fused", "Losses", "Request", "choose"]

Fused = Literal["auto"] | bool
# Fitted to results/bench_loss.csv (one H200); a test compares the rule with every row of it. For the plain
# form an entry of S~ costs as much as 440 classes. The kernels, whose launches take the host 3 ms, are faster
# from this much work on: 8,600 pairs of 100 classes, 5,300 of 1,000, 1,350 of 21,843.
ENTRY_COST = 440
FUSED_WORK = 4 * 10**10
# Where the kernels do not run, a larger S~ is computed in chunks: slower than the plain form, but not stored.
CHUNKED_ENTRIES = 2**27


def choose(request: Request, fused: Fused = "auto") -> Callable[[Request], Losses]:
    """Choose the form for a request: the one that `fused` asks for, or the fastest whose memory suffices."""
    if fused is True:
        return contrast_fused
    scores, classifiers = request.scores, request.targets
    if fused is False or classifiers.requires_grad:  # the other two forms have gradients of scores only
        return contrast_plain
    entries = (len(scores), len(classifiers))
    if prefer_fused(*entries, scores.shape[1], scores.device) and scores.dtype == torch.float32:
        return contrast_fused
    return contrast_chunked if prefer_chunked(*entries) else contrast_plain


def prefer_fused(num_rows: int, num_columns: int, num_classes: int, device: torch.device) -> bool:
    """Whether the kernels are at least as fast as the plain form, according to the benchmark.

    Inside a CUDA graph, where the host's time does not count, they are faster from about 2,000 pairs on. That
    cannot be detected here: pass fused=True in that case.
    """
    work = num_rows * num_columns * (ENTRY_COST + num_classes)
    return device.type == "cuda" and HAS_TRITON and work >= FUSED_WORK


def prefer_chunked(num_rows: int, num_columns: int) -> bool:
    """Whether S~ is too large to be stored where the kernels do not run."""
    return num_rows * num_columns > CHUNKED_ENTRIES
