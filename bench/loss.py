"""Time and peak memory of the loss, forward and backward, in five forms: one CSV row a measurement.

    python bench/loss.py --out results/bench.csv --seconds 400      all sizes, the most important first
    python bench/loss.py --plot docs/loss.png --out results/bench.csv --seconds 0
    python bench/loss.py --device cpu --batches 64 128 --classes 10 --forms plain chunked      a rehearsal

bench/tune.py chooses the tiles of the kernels, shows where their time goes, and times CUDA graphs.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import itertools
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from rows import plot_loss, print_fit, print_ratios, read_rows, write_row
from torch import Tensor
from torch.nn import functional as F

from icmixup.chunked import contrast_chunked
from icmixup.fused import contrast_fused, fused_available

BATCHES = (128, 512, 2048, 8192, 16384, 32768, 65536, 131072)
CLASSES = (10, 100, 1000, 21843)
LINEAR = ("fused", "chunked")  # forms that never store S~
LARGEST_STORED = 65536  # for the forms that do
Loss = Callable[[Tensor, Tensor], Tensor]


def authors_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """The released code: dense product, identity matrix as probabilities."""
    mixed, own = scores @ targets.T, torch.eye(len(scores), device=scores.device)
    return F.cross_entropy(mixed, own) + F.cross_entropy(mixed.T, own)


def plain_loss(scores: Tensor, targets: Tensor) -> Tensor:
    mixed, own = scores @ targets.T, torch.arange(len(scores), device=scores.device)
    return F.cross_entropy(mixed, own) + F.cross_entropy(mixed.T, own)


def open_clip_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """As open_clip's ClipLoss: logits per image, logits per text, both against arange, halved."""
    per_image = scores @ targets.T
    per_text, own = per_image.T, torch.arange(len(scores), device=scores.device)
    return (F.cross_entropy(per_image, own) + F.cross_entropy(per_text, own)) / 2


def gathered_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Two columns of S for each classifier instead of a product; for torch.compile."""
    (u, v), (a, b) = (part.unbind(1) for part in targets.topk(2, dim=1))
    mixed, own = u * scores[:, a] + v * scores[:, b], torch.arange(len(scores), device=scores.device)
    return F.cross_entropy(mixed, own) + F.cross_entropy(mixed.T, own)


def fused_loss(scores: Tensor, targets: Tensor, tiles: tuple[int, ...] = ()) -> Tensor:
    rows, columns = contrast_fused(scores, targets, tiles=tiles)
    assert rows is not None
    assert columns is not None
    return rows.mean() + columns.mean()


def chunked_loss(scores: Tensor, targets: Tensor) -> Tensor:
    rows, columns = contrast_chunked(scores, targets)
    assert rows is not None
    assert columns is not None
    return rows.mean() + columns.mean()


FORMS: dict[str, Loss] = {
    "fused": fused_loss,
    "plain": plain_loss,
    "authors": authors_loss,
    "open_clip": open_clip_loss,
    "compiled": gathered_loss,
    "chunked": chunked_loss,
}


class Case(NamedTuple):
    form: str
    batch: int
    classes: int

    def matrices(self) -> float:
        """About how many B x B float32 matrices the form holds at once."""
        return {"authors": 6.0, "compiled": 2.5}.get(self.form, 0.0 if self.form in LINEAR else 4.5)

    def bytes(self) -> float:
        return 4 * (self.matrices() * self.batch**2 + 6 * self.batch * self.classes)

    def seconds(self) -> float:
        """About how long one pass takes on an H200, to know beforehand what does not fit."""
        product = 0 if self.form in ("fused", "compiled") else 6 * self.batch**2 * self.classes / 4e13
        return product + 2e-11 * self.batch**2 + (20 if self.form == "compiled" else 0)


def draw(case: Case, args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Scores that want a gradient, and Mixup targets with a lam for each pair."""
    generator = torch.Generator(args.device).manual_seed(0)
    new = {"device": args.device, "generator": generator}
    scores = 3 * torch.randn(case.batch, case.classes, **new)
    labels = torch.randint(case.classes, (2, case.batch), **new)
    lam = torch.rand(case.batch, 1, **new)
    targets = torch.zeros(case.batch, case.classes, device=args.device)
    targets.scatter_add_(1, labels[0, :, None], lam).scatter_add_(1, labels[1, :, None], 1 - lam)
    return scores.to(getattr(torch, args.dtype)).requires_grad_(), targets


def once(loss: Loss, scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and gradient."""
    value = loss(scores, targets.to(scores.dtype) if loss not in (fused_loss, chunked_loss) else targets)
    return value.detach(), torch.autograd.grad(value, scores)[0]


def median_ms(run: Callable[[], object], device: str, seconds: float = 0.5, most: int = 50) -> float:
    """Median of single runs, on the device's clock, after warming up."""
    times: list[float] = []
    for _ in range(2):
        run()
    until = time.perf_counter() + seconds
    while len(times) < 3 or (len(times) < most and time.perf_counter() < until):
        times.append(one_ms(run, device))
    return statistics.median(times)


def one_ms(run: Callable[[], object], device: str) -> float:
    if device != "cuda":
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start_event.record()
    run()
    end_event.record()
    torch.cuda.synchronize()
    return start_event.elapsed_time(end_event)


def peak_mb(run: Callable[[], object], device: str) -> float | None:
    """Most memory held at once beyond the inputs, in 10^6 bytes."""
    if device != "cuda":
        return None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def errors(loss: Loss, scores: Tensor, targets: Tensor) -> tuple[float | None, float | None]:
    """Relative error of the loss and of its gradient (norm) against float64, where that is affordable."""
    if 6 * len(scores) ** 2 * scores.shape[1] > (2e13 if scores.is_cuda else 1e10):
        return None, None
    value, gradient = once(loss, scores, targets)
    exact = scores.detach().double().requires_grad_()
    right, right_gradient = once(chunked_loss, exact, targets.double())
    if loss is open_clip_loss:
        right, right_gradient = right / 2, right_gradient / 2
    error = (gradient.double() - right_gradient).norm() / right_gradient.norm()
    return abs(value.item() / right.item() - 1), error.item()


def measure(case: Case, args: argparse.Namespace) -> dict[str, object]:
    scores, targets = draw(case, args)
    loss = FORMS[case.form]
    if case.form == "compiled":
        torch.compiler.reset()
        loss = torch.compile(loss, dynamic=False)

    def run() -> object:
        return once(loss, scores, targets)

    ms = median_ms(run, args.device)
    loss_error, grad_error = errors(loss, scores, targets)
    row = {"ms": ms, "peak_mb": peak_mb(run, args.device), "loss_error": loss_error, "grad_error": grad_error}
    return {**case._asdict(), "dtype": args.dtype, **row, **surroundings(args.device)}


def surroundings(device: str) -> dict[str, str]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = ""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": torch.__version__,
        "triton": triton,
        "commit": commit.stdout.strip() or "unknown",
        "date": datetime.date.today().isoformat(),
    }


def cases(args: argparse.Namespace) -> list[Case]:
    """B = 32,768 and C = 1,000 first, then what is large for us alone, then the rest by its cost."""
    every = [Case(*case) for case in itertools.product(args.forms, args.batches, args.classes)]
    every = [case for case in every if case.form in LINEAR or case.batch <= LARGEST_STORED]
    named = [case for case in every if (case.batch, case.classes) == (32768, 1000)]
    large = [case for case in every if case.form == "fused" and case.classes == 1000 and case not in named]
    rest = sorted((case for case in every if case not in named + large), key=Case.seconds)
    return named + sorted(large, key=lambda case: -case.batch) + rest


def fits(case: Case, left: float, device: str) -> str:
    """Why a case is left out, or nothing."""
    if case.form == "fused" and not fused_available(device):
        return "no Triton or no CUDA"
    if device == "cuda" and case.bytes() > 0.9 * torch.cuda.mem_get_info()[0]:
        return f"wants about {case.bytes() / 1e9:.0f} GB"
    if 7 * case.seconds() * (1 if case.form != "compiled" else 0.2) + 1 > left:
        return f"{left:.0f} s left"
    return ""


def measure_all(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    until = time.perf_counter() + args.seconds
    for case in cases(args):
        reason = fits(case, until - time.perf_counter(), args.device)
        if reason:
            print(f"{case.form:10} B {case.batch:6} C {case.classes:5}  left out: {reason}", flush=True)
            continue
        try:
            yield measure(case, args)
        except torch.cuda.OutOfMemoryError:
            print(f"{case.form:10} B {case.batch:6} C {case.classes:5}  out of memory", flush=True)
        if args.device == "cuda":
            torch.cuda.empty_cache()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="CSV that rows are appended to")
    parser.add_argument("--plot", type=Path, help="picture of the rows in --out, or of this run's")
    parser.add_argument("--seconds", type=float, default=500, help="time for all measurements together")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--classes", type=int, nargs="+", default=CLASSES)
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS))
    return parser.parse_args()


def main() -> None:
    args = parse()
    rows = []
    for row in measure_all(args):
        write_row(row, args.out)
        rows.append(row)
    if args.out is not None and args.out.exists():
        rows = read_rows(args.out)
    print_ratios(rows)
    print_fit(rows)
    if args.plot is not None:
        plot_loss(rows, list(FORMS), args.plot)


if __name__ == "__main__":
    main()
