"""Time and peak memory of the loss, forward and backward, in six forms: one CSV row per measurement.

    python bench/loss.py --out results/bench_loss.csv --seconds 150      important cases come first
    python bench/loss.py --missing --out results/bench_loss.csv          only cases that the file lacks
    python bench/loss.py --plot docs/loss.png --out results/bench_loss.csv --seconds 0
    python bench/loss.py --device cpu --batches 64 128 --classes 10 --forms plain chunked      a quick check
    python bench/loss.py --baseline ../before/src      two versions, and the ratio of their times

Every form is timed in the same way, as in training: several runs between two events on the device's clock, so
that the host may run ahead; the median of five such groups, after warming up. Small sizes also as a CUDA
graph (plain_graph, auto_graph, fused_graph), where the host's time does not count. --baseline measures this
version and the one in another src folder in alternating processes (bench/time_loss.py). bench/tune.py chooses
the tiles of the kernels and shows where their time goes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from rows import plot_loss, print_fit, print_floor, print_ratios, read_rows, write_row
from torch import Tensor
from torch.nn import functional as F

from icmixup import infinite_class_loss
from icmixup.contrast import Request
from icmixup.contrast.chunked import contrast_chunked
from icmixup.contrast.fused import HAS_TRITON, contrast_fused, fused_available
from icmixup.lab.training.run_folder import provenance

if HAS_TRITON:
    import triton
    from triton import language as tl

    @triton.jit
    def exponentials(out, rounds, B: tl.constexpr):
        """`rounds` powers of two for each of B numbers, in registers only."""
        x = tl.arange(0, B).to(tl.float32) / B
        for _ in range(rounds):
            x = tl.exp2(-x)
        tl.store(out + tl.program_id(0), tl.sum(x, 0))


BATCHES = (128, 512, 2048, 8192, 16384, 32768, 65536, 131072)
CLASSES = (10, 100, 1000, 21843)
LINEAR = ("fused", "chunked")  # forms that never store S~
LARGEST_STORED = 65536  # for the forms that do
LARGEST_GRAPH = 8192  # beyond it the host's time does not count in any form
SLOW_SECONDS = 2.0  # a run that takes longer is timed once, since warming up hardly changes it
SOURCE = Path(__file__).parents[1] / "src"
# pairs and classes that --baseline measures, and the one where it measures the plain form too
BASELINE_SIZES = ("128x100", "2048x100", "8192x100", "8192x1000", "32768x100", "32768x1000", "65536x1000")
BASELINE_SIZES += ("8192x21843",)
PLAIN_SIZE = "32768x1000"
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
    rows, columns = contrast_fused(Request(scores, targets), tiles=tiles)
    assert rows is not None
    assert columns is not None
    return rows.mean() + columns.mean()


def chunked_loss(scores: Tensor, targets: Tensor) -> Tensor:
    rows, columns = contrast_chunked(Request(scores, targets))
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
GRAPHS: dict[str, Loss] = {
    "plain_graph": plain_loss,
    "auto_graph": infinite_class_loss,
    "fused_graph": fused_loss,
}


class Case(NamedTuple):
    form: str
    batch: int
    classes: int

    def matrices(self) -> int:
        """How many B x B float32 matrices the form holds at the same time."""
        return {"authors": 5, "compiled": 2}.get(self.form, 0 if self.form in LINEAR else 4)

    @property
    def is_graph(self) -> bool:
        return self.form in GRAPHS

    def bytes(self) -> float:
        return 4 * (self.matrices() * self.batch**2 + 6 * self.batch * self.classes)

    def run_seconds(self) -> float:
        """Approximate time of one run on an H200."""
        product = 0 if self.form in ("fused", "compiled") else 6 * self.batch**2 * self.classes / 4e13
        return product + 2e-11 * self.batch**2

    @property
    def is_slow(self) -> bool:
        return self.run_seconds() > SLOW_SECONDS

    def seconds(self) -> float:
        """Approximate time of a measurement on an H200, to skip those that do not fit into --seconds."""
        return (1 if self.is_slow else 10) * self.run_seconds() + (6 if self.form == "compiled" else 0.7)


def draw(case: Case, args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Scores with a gradient, and Mixup targets with a lam for each pair."""
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


def median_ms(run: Callable[[], object], device: str, seconds: float = 0.3, groups: int = 5) -> float:
    """Time of one run: the median over groups of consecutive runs, after warming up."""
    for _ in range(3):
        run()
    times = int(1e3 * seconds / groups / max(group_ms(run, 2, device), 1e-2))
    return statistics.median(group_ms(run, max(1, times), device) for _ in range(groups))


def group_ms(run: Callable[[], object], times: int, device: str) -> float:
    """Mean time of consecutive runs, on the device's clock."""
    if device != "cuda":
        start = time.perf_counter()
        for _ in range(times):
            run()
        return 1e3 * (time.perf_counter() - start) / times
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start_event.record()
    for _ in range(times):
        run()
    end_event.record()
    torch.cuda.synchronize()
    return start_event.elapsed_time(end_event) / times


def replayed(loss: Loss, scores: Tensor, targets: Tensor) -> Callable[[], object]:
    """Capture forward and backward in a CUDA graph; returns the function that replays it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            once(loss, scores, targets)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once(loss, scores, targets)
    return graph.replay


def exponentials_per_second(device: str) -> float | None:
    """How many exponentials per second the GPU computes when it does nothing else."""
    if device != "cuda" or not HAS_TRITON:
        return None
    programs = 16 * torch.cuda.get_device_properties(0).multi_processor_count
    rounds, out = 4096, torch.empty(programs, device=device)
    ms = median_ms(lambda: exponentials[(programs,)](out, rounds, B=1024), device, 0.1)
    return 1e3 * programs * 1024 * rounds / ms


def time_and_peak(run: Callable[[], object], device: str, slow: bool) -> tuple[float, float | None]:
    """Milliseconds of one run, and peak memory beyond the inputs, in 10^6 bytes."""
    ms = None if slow else median_ms(run, device)
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    last = group_ms(run, 1, device)
    peak = (torch.cuda.max_memory_allocated() - before) / 1e6 if device == "cuda" else None
    return last if ms is None else ms, peak


def errors(loss: Loss, scores: Tensor, targets: Tensor) -> tuple[float | None, float | None]:
    """Relative error of the loss and of its gradient (norm) against float64; None if that takes too long."""
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
    loss = (GRAPHS if case.is_graph else FORMS)[case.form]
    if case.form == "compiled":
        torch.compiler.reset()
        loss = torch.compile(loss, dynamic=False)

    def run() -> object:
        return once(loss, scores, targets)

    if case.is_graph:
        ms, memory = median_ms(replayed(loss, scores, targets), args.device), None
    else:
        ms, memory = time_and_peak(run, args.device, case.is_slow)
    loss_error, grad_error = errors(loss, scores, targets)
    row = {"ms": ms, "peak_mb": memory, "loss_error": loss_error, "grad_error": grad_error}
    return {**case._asdict(), "dtype": args.dtype, **row, **surroundings(args.device)}


def surroundings(device: str) -> dict[str, str]:
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = ""
    found = provenance(torch.device(device))
    return {"triton": triton, **{key: found[key] for key in ("device", "torch", "commit", "date")}}


def cases(args: argparse.Namespace) -> list[Case]:
    """The cases that the documentation quotes first, then the others by their cost."""
    every = [Case(*case) for case in itertools.product(args.forms, args.batches, args.classes)]
    every = [case for case in every if case.form in LINEAR or case.batch <= LARGEST_STORED]
    named = [Case(form, 32768, 1000) for form in ("fused", "plain", "authors", "compiled", "open_clip")]
    named += [Case("fused", 65536, 1000), Case("fused", 131072, 1000)]
    named += [Case(form, 128, 100) for form in ("plain", "fused")]
    first = [case for case in named if case in every]
    graphs = [
        Case(form, batch, 100)
        for batch, form in itertools.product(args.batches, GRAPHS)
        if args.device == "cuda" and batch <= LARGEST_GRAPH and Case("plain", batch, 100) in every
    ]
    return first + graphs + sorted((case for case in every if case not in first), key=Case.seconds)


def fits(case: Case, left: float, device: str) -> str:
    """Why a case is skipped; empty if it is not."""
    if case.form in ("fused", "fused_graph") and not fused_available(device):
        return "no Triton or no CUDA"
    if device == "cuda" and case.bytes() > 0.9 * torch.cuda.mem_get_info()[0]:
        return f"needs about {case.bytes() / 1e9:.0f} GB"
    if case.seconds() > left:
        return f"{left:.0f} s left"
    return ""


def known_cases(path: Path | None, device: str) -> set[Case]:
    """The cases of this device that the CSV has already."""
    if path is None or not path.exists():
        return set()
    here = surroundings(device)["device"]
    return {
        Case(row["form"], row["batch"], row["classes"]) for row in read_rows(path) if row["device"] == here
    }


def measure_all(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    until = time.perf_counter() + args.seconds
    known = known_cases(args.out, args.device) if args.missing else set()
    for case in (case for case in cases(args) if case not in known):
        reason = fits(case, until - time.perf_counter(), args.device)
        if reason:
            print(f"{case.form:11} B {case.batch:6} C {case.classes:5}  skipped: {reason}", flush=True)
            continue
        try:
            yield measure(case, args)
        except torch.cuda.OutOfMemoryError:
            print(f"{case.form:11} B {case.batch:6} C {case.classes:5}  out of memory", flush=True)
        if args.device == "cuda":
            torch.cuda.empty_cache()


def time_version(source: Path, cases: list[tuple[int, int, bool]], device: str) -> list[float]:
    """Milliseconds of each case with the package in `source`, in a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("time_loss.py")), device, json.dumps(cases)]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    package, *times = json.loads(done.stdout)
    assert Path(package).is_relative_to(source), f"measured {package} instead of {source}"
    return times


def compare_versions(args: argparse.Namespace) -> None:
    """Time this version and --baseline in turn, and print medians and ratios.

    In turn, because the clock of a GPU changes with its temperature. On a CPU both are the plain form.
    """
    on_gpu = args.device == "cuda"
    cases = [(*map(int, size.split("x")), on_gpu) for size in args.sizes]
    if on_gpu and PLAIN_SIZE in args.sizes:
        cases.append((*map(int, PLAIN_SIZE.split("x")), False))
    found: dict[Path, list[list[float]]] = {args.baseline.resolve(): [], SOURCE: []}
    for number in range(args.rounds):
        for source, times in found.items():
            times.append(time_version(source, cases, args.device))
            print(f"round {number + 1} of {args.rounds}: {source}", flush=True)
    before, now = ([statistics.median(case) for case in zip(*times, strict=True)] for times in found.values())
    print(f"{'pairs':>8} {'classes':>8} {'form':>6} {'baseline ms':>12} {'this ms':>10} {'ratio':>6}")
    for (pairs, classes, fused), old, new in zip(cases, before, now, strict=True):
        form = "fused" if fused else "plain"
        print(f"{pairs:8} {classes:8} {form:>6} {old:12.3f} {new:10.3f} {new / old:6.3f}")
    if on_gpu and PLAIN_SIZE in args.sizes:
        row = args.sizes.index(PLAIN_SIZE)
        speedups = [times[-1] / times[row] for times in (before, now)]
        print(
            f"fused at {PLAIN_SIZE}: {speedups[0]:.2f} times as fast as plain in the baseline, "
            f"{speedups[1]:.2f} times in this version"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="CSV that rows are appended to")
    parser.add_argument("--missing", action="store_true", help="measure only cases that --out lacks")
    parser.add_argument("--plot", type=Path, help="write a figure of the rows in --out, or of this run")
    parser.add_argument("--seconds", type=float, default=500, help="time limit for all measurements together")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--classes", type=int, nargs="+", default=CLASSES)
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS))
    parser.add_argument(
        "--baseline", type=Path, metavar="SRC", help="src folder of another version: print the ratio of times"
    )
    parser.add_argument(
        "--sizes", nargs="+", default=list(BASELINE_SIZES), metavar="PAIRSxCLASSES", help="for --baseline"
    )
    parser.add_argument("--rounds", type=int, default=3, help="processes per version, for --baseline")
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.baseline is not None:
        compare_versions(args)
        return
    rows = []
    for row in measure_all(args):
        write_row(row, args.out)
        rows.append(row)
    if args.out is not None and args.out.exists():
        rows = read_rows(args.out)
    print_ratios(rows)
    print_fit(rows)
    print_floor(rows, exponentials_per_second(args.device))
    if args.plot is not None:
        plot_loss(rows, list(FORMS), args.plot)


if __name__ == "__main__":
    main()
