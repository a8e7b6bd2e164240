"""The kernels of the loss: which tiles are fastest, and how much time each kernel takes.

python bench/tune.py tiles --seconds 200        forward and backward separately, with their errors
python bench/tune.py profile                    time by kernel
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator

import torch
from loss import Case, chunked_loss, draw, fused_loss, median_ms, once
from torch import Tensor

from icmixup.contrast import Request
from icmixup.contrast.fused import contrast_fused
from icmixup.contrast.triton_forward import Tiles

# classifiers, images, warps, groups per multiprocessor
SUMS = (
    *((256, 32, 8, 1), (256, 32, 16, 1), (512, 32, 16, 1), (128, 32, 8, 1), (128, 32, 4, 2), (256, 32, 8, 2)),
    *((128, 32, 8, 2), (256, 16, 8, 2), (128, 16, 4, 4), (256, 16, 16, 2), (512, 16, 16, 1), (128, 64, 8, 2)),
    *((64, 32, 4, 4), (128, 64, 16, 1), (64, 32, 4, 8), (128, 128, 8, 2), (32, 128, 4, 4)),
)
# chunks, entries, images, warps
GRADIENTS = (
    *((16, 4, 32, 16), (16, 8, 32, 16), (32, 4, 32, 16), (8, 8, 32, 8), (8, 4, 32, 8), (4, 8, 32, 4)),
    *((16, 4, 32, 8), (16, 8, 32, 8), (32, 8, 32, 16), (1, 8, 128, 1), (1, 16, 128, 1), (2, 8, 128, 2)),
    *((4, 8, 128, 4), (2, 8, 64, 1), (4, 8, 64, 4), (16, 8, 16, 8), (32, 4, 16, 8), (8, 16, 32, 8)),
)


def candidates(cores: int) -> Iterator[tuple[str, Tiles]]:
    """Forward and backward tiles alternately, so that a short run measures some of both."""
    sums = [Tiles(*size[:3], sum_groups=size[3] * cores) for size in SUMS]
    gradients = [
        Tiles(grad_chunks=c, grad_entries=n, grad_images=i, grad_warps=w) for c, n, i, w in GRADIENTS
    ]
    for pair in itertools.zip_longest(sums, gradients):
        yield from ((name, tiles) for name, tiles in zip(("sums", "gradient"), pair, strict=True) if tiles)


def gradient_run(scores: Tensor, targets: Tensor, tiles: Tiles) -> Callable[[], object]:
    loss = fused_loss(scores, targets, tuple(tiles))
    return lambda: torch.autograd.grad(loss, scores, retain_graph=True)


def sums_run(scores: Tensor, targets: Tensor, tiles: Tiles) -> Callable[[], object]:
    return lambda: contrast_fused(Request(scores.detach(), targets), tiles=tuple(tiles))


def relative_error(scores: Tensor, targets: Tensor, tiles: Tiles, exact: tuple[Tensor, Tensor]) -> float:
    """Relative error of the gradient, or of the loss if that is larger."""
    value = fused_loss(scores, targets, tuple(tiles))
    (gradient,) = torch.autograd.grad(value, scores)
    of_loss = (value.detach() / exact[0] - 1).abs()
    return torch.maximum(of_loss, (gradient - exact[1]).norm() / exact[1].norm()).item()


def tune(args: argparse.Namespace) -> None:
    """Print every candidate as it is timed, then the three fastest of each kind."""
    scores, targets = draw(Case("fused", args.batch, args.classes), args)
    exact = once(chunked_loss, scores, targets)
    cores = torch.cuda.get_device_properties(0).multi_processor_count if args.device == "cuda" else 2
    until, found = time.perf_counter() + args.seconds, []
    for name, tiles in candidates(cores):
        if time.perf_counter() > until:
            print("out of time")
            break
        try:
            run = (sums_run if name == "sums" else gradient_run)(scores, targets, tiles)
            ms, error = median_ms(run, args.device, 0.1), relative_error(scores, targets, tiles, exact)
        except Exception as problem:  # a tile that does not compile or fit is one line of the table
            print(
                f"{name:9} {describe(name, tiles):24} {type(problem).__name__}: {str(problem)[:80]}",
                flush=True,
            )
            continue
        found.append((name, ms, error, tiles))
        print(f"{name:9} {describe(name, tiles):24} {ms:8.3f} ms  error {error:.1e}", flush=True)
    for name in ("sums", "gradient"):
        best = sorted((row for row in found if row[0] == name and row[2] < 1e-4), key=lambda row: row[1])
        for _, ms, error, tiles in best[:3]:
            print(f"best {name:9} {describe(name, tiles):24} {ms:8.3f} ms  error {error:.1e}")


def describe(name: str, tiles: Tiles) -> str:
    return " ".join(map(str, tiles[:4] if name == "sums" else tiles[4:8]))


def profile(args: argparse.Namespace) -> None:
    scores, targets = draw(Case("fused", args.batch, args.classes), args)
    for _ in range(3):
        once(fused_loss, scores, targets)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if args.device == "cuda" else []
    with torch.profiler.profile(activities=kinds) as found:
        for _ in range(5):
            once(fused_loss, scores, targets)
        torch.cuda.synchronize() if args.device == "cuda" else None
    order = "self_cuda_time_total" if args.device == "cuda" else "self_cpu_time_total"
    print(found.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=50))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("tiles", "profile"))
    parser.add_argument("--batch", type=int, default=32768)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=300)
    args = parser.parse_args()
    {"tiles": tune, "profile": profile}[args.what](args)


if __name__ == "__main__":
    main()
