"""Where the GPU time of a training step goes: its kernels, grouped by what they do, and the idle time.

    python bench/kernels.py --model resnet34 --forms fused graph compiled
    python bench/kernels.py --model tf_efficientnet_lite0 --image-size 224 --recipe finetune --method erm

fused       captured steps with fused layers, the default of `icmixup train`
graph       captured steps with torch's own layers
compiled    captured steps of the compiled network (--compile)

Each form is profiled over whole epochs of random images, as `icmixup train` runs them. Idle is the time in
which no kernel runs, as a share of the epoch.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rows import append_row, choose_layers
from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from icmixup.lab.datasets import Dataset, Split
from icmixup.lab.training import step as step_module
from icmixup.lab.training.artifacts import save_artifacts
from icmixup.lab.training.feed import make_feed
from icmixup.lab.training.recipe import RECIPES, Recipe
from icmixup.lab.training.run_folder import provenance
from icmixup.lab.training.step import GraphedEpoch, make_learner, make_step

COLUMNS = (
    *("bench", "model", "form", "batch_size", "image_size", "kind", "name", "us_per_step", "calls_per_step"),
    *("images_per_second", "start_s", "idle", "device", "torch", "python", "commit", "date"),
)
FORMS = ("fused", "graph", "compiled")
# Whole names: torch's own sums are at::native::reduce_kernel<...>.
OURS = {
    "fused norm": ("moments_kernel", "apply_kernel", "reduce_kernel", "input_gradient_kernel"),
    "fused pool": ("pool_forward_kernel", "pool_backward_kernel"),
    "fused depthwise": ("forward_kernel", "input_grad_kernel", "weight_grad_kernel", "sum_kernel"),
}
# Of other kernels, the first word that the name contains decides the group.
GROUPS = {
    "compiled": ("triton_",),  # first: their names list the operations that they fuse
    "convolution, depthwise": ("depthwise", "dw_conv", "c1_k1", "grouped", "group_conv"),
    "convolution, weights": ("wgrad", "backward_filter", "bgrad"),
    "convolution, input": ("dgrad", "backward_data"),
    "convolution or product": ("fprop", "conv", "gemm", "nvjet", "cutlass", "xmma", "cudnn", "implicit"),
    "layout": ("nchwToNhwc", "nhwcToNchw", "transpose", "permute"),
    "batch norm": ("batch_norm", "bn_"),
    "optimizer": ("multi_tensor", "foreach", "fused_adam", "fused_sgd", "lpnorm"),
}


def made_dataset(images: int, image_size: int, classes: int) -> Dataset:
    """Random bytes: speed does not look at them."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (images, 3, image_size, image_size), generator=generator, dtype=torch.uint8)
    split = Split(pixels, torch.arange(images) % classes)
    return Dataset("made", split, split, tuple(map(str, range(classes))), (0.5,) * 3, (0.25,) * 3)


def group_of(name: str) -> str:
    ours = [group for group, names in OURS.items() if name in names]
    lowered = name.lower()
    found = [group for group, words in GROUPS.items() if any(word.lower() in lowered for word in words)]
    return (ours + found + ["other"])[0]


def busy_time(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals (start, end), in the unit of the intervals."""
    busy, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy


def profile_form(recipe: Recipe, data: Dataset, form: str, args: argparse.Namespace) -> None:
    """Print, and append to --out, the speed of a form, its kernels by group, and the slowest ones."""
    recipe = dataclasses.replace(recipe, compile=form == "compiled")
    feed = make_feed(recipe, data.train)
    feed.fill(0)
    started = time.perf_counter()
    choose_layers(form)
    learner = make_learner(recipe, data)
    step = make_step(learner, recipe, recipe.method_at(0), data)
    run = GraphedEpoch(learner, step, feed.epoch, feed.prepare)
    run()
    torch.cuda.synchronize()
    save_artifacts()
    start = time.perf_counter() - started
    seconds = time_epochs(run, args.epochs)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = [
        event for event in profiler.events() or () if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    speed, idle = feed.count / seconds, idle_share(events)
    limited = "" if args.cudnn_limit is None else f", {args.cudnn_limit} algorithms"
    known = {"bench": "kernels", "model": recipe.model, "form": form + limited}
    known |= {"batch_size": recipe.batch_size}
    known |= {"image_size": args.image_size, "images_per_second": speed, "start_s": start, "idle": idle}
    known |= provenance(learner.device)
    print(
        f"\n{recipe.model}, {form}, batch {recipe.batch_size}: start {start:.1f} s, {speed:,.0f} images/s, "
        f"idle {100 * idle:.0f} % while profiled"
    )
    for row in kernel_rows(events, len(feed.epoch.lrs), args.top):
        calls, time_each = row["calls_per_step"], row["us_per_step"]
        print(f"  {time_each:9.1f} us a step  {calls:6.1f} calls  {row['kind']:6}  {row['name'][:110]}")
        append_row({**known, **row}, COLUMNS, args.out)


def time_epochs(run: Callable[[], Tensor], epochs: int) -> float:
    """Seconds of an epoch."""
    started = time.perf_counter()
    for _ in range(epochs):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / epochs


def idle_share(events: list[FunctionEvent]) -> float:
    """Share of the profiled time in which no kernel runs."""
    spans = [(event.time_range.start, event.time_range.end) for event in events]
    whole = max(end for _, end in spans) - min(start for start, _ in spans)
    return 1 - busy_time(spans) / whole


def kernel_rows(events: list[FunctionEvent], steps: int, top: int) -> list[dict[str, Any]]:
    """Time and calls of every group, and of the `top` slowest kernels."""
    rows = []
    for kind, key, number in (("group", group_of, None), ("kernel", str, top)):
        times: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for event in events:
            times[key(event.name)] += event.time_range.elapsed_us()
            counts[key(event.name)] += 1
        rows += [
            {"kind": kind, "name": name, "us_per_step": value / steps, "calls_per_step": counts[name] / steps}
            for name, value in times.most_common(number)
        ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="resnet34")
    parser.add_argument("--method", default="ic-mixup")
    parser.add_argument("--recipe", choices=list(RECIPES), default="paper")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--images", type=int, default=1280, help="of an epoch")
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=20, help="that are timed")
    parser.add_argument("--cudnn-limit", type=int, help="algorithms that cuDNN tries for a convolution")
    parser.add_argument("--top", type=int, default=15, help="kernels that are listed")
    parser.add_argument("--out", type=Path, help="CSV file that rows are appended to")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a GPU")
    if args.cudnn_limit is not None:
        step_module.BENCHMARK_LIMIT = args.cudnn_limit
    recipe = dataclasses.replace(
        RECIPES[args.recipe],
        **{name: getattr(args, name) for name in ("model", "method", "batch_size", "image_size")},
        epochs=10**6,
        min_steps=0,
    )
    data = made_dataset(args.images, args.image_size, args.classes).to(torch.device("cuda"))
    for form in args.forms:
        profile_form(recipe, data, form, args)


if __name__ == "__main__":
    main()
