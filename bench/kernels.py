"""Where the GPU time of a training step goes: its kernels, grouped by what they do, and the idle time.

    python bench/kernels.py --model resnet34 --forms graph compiled
    python bench/kernels.py --model tf_efficientnet_lite0 --image-size 224 --images 512 --recipe finetune

Each form is profiled over whole epochs of random images, as `icmixup train` runs them. Idle is the time in
which no kernel runs, as a share of the epoch.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections import Counter

import torch
from torch.profiler import ProfilerActivity, profile

from icmixup.lab.datasets import Dataset, Split
from icmixup.lab.training import step as step_module
from icmixup.lab.training.artifacts import save_artifacts
from icmixup.lab.training.feed import make_feed
from icmixup.lab.training.recipe import RECIPES, Recipe
from icmixup.lab.training.step import GraphedEpoch, make_learner, make_step

# The first word that a kernel's name contains decides its group.
GROUPS = {
    "convolution, weights": ("wgrad", "backward_filter", "bgrad"),
    "convolution, depthwise": ("depthwise", "dw_conv", "conv2d_c1_k1", "grouped", "group_conv"),
    "convolution, input": ("dgrad", "backward_data"),
    "convolution or product": ("fprop", "conv", "gemm", "nvjet", "cutlass", "xmma", "cudnn", "implicit"),
    "layout": ("nchwToNhwc", "nhwcToNchw", "transpose", "permute"),
    "batch norm": ("batch_norm", "bn_"),
    "optimizer": ("multi_tensor", "foreach", "fused_adam", "fused_sgd", "lpnorm"),
    "compiled": ("triton",),
}


def made_dataset(images: int, image_size: int, classes: int) -> Dataset:
    """Random bytes: speed does not look at them."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (images, 3, image_size, image_size), generator=generator, dtype=torch.uint8)
    split = Split(pixels, torch.arange(images) % classes)
    return Dataset("made", split, split, tuple(map(str, range(classes))), (0.5,) * 3, (0.25,) * 3)


def group_of(name: str) -> str:
    lowered = name.lower()
    found = (group for group, words in GROUPS.items() if any(word.lower() in lowered for word in words))
    return next(found, "other")


def busy_time(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals (start, end), in the unit of the intervals."""
    busy, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy


def profile_form(recipe: Recipe, data: Dataset, form: str, epochs: int, top: int) -> None:
    recipe = dataclasses.replace(recipe, compile=form == "compiled")
    feed = make_feed(recipe, data.train)
    feed.fill(0)
    started = time.perf_counter()
    learner = make_learner(recipe, data, lambda module: module)
    step = make_step(learner, recipe, recipe.method_at(0), data)
    run = GraphedEpoch(learner, step, feed.epoch, feed.prepare)
    run()
    torch.cuda.synchronize()
    save_artifacts()
    print(f"\n{recipe.model}, {form}, batch {recipe.batch_size}: start {time.perf_counter() - started:.1f} s")
    started = time.perf_counter()
    for _ in range(epochs):
        run()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - started) / epochs
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = [
        event for event in profiler.events() or () if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    report(events, seconds, len(feed.epoch.lrs), feed.count, top)


def report(
    events: list[torch.autograd.profiler_util.FunctionEvent],
    seconds: float,
    steps: int,
    images: int,
    top: int,
) -> None:
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in events:
        times[event.name] += event.time_range.elapsed_us()
        counts[event.name] += 1
    total = sum(times.values())
    spans = [(event.time_range.start, event.time_range.end) for event in events]
    whole = max(end for _, end in spans) - min(start for start, _ in spans)
    number = sum(counts.values())
    idle = 1 - busy_time(spans) / whole
    print(
        f"{images / seconds:,.0f} images/s, {1e3 * seconds / steps:.3f} ms a step, {number / steps:.0f} "
        f"kernels a step of {total / number:.1f} us on average; idle {100 * idle:.0f} % while profiled"
    )
    groups: Counter[str] = Counter()
    for name, value in times.items():
        groups[group_of(name)] += value
    for group, value in groups.most_common():
        print(f"  {100 * value / total:5.1f} %  {value / steps:9.1f} us a step  {group}")
    for name, value in times.most_common(top):
        share, mean, calls = 100 * value / total, value / counts[name], counts[name] / steps
        print(f"    {share:5.1f} %  {mean:8.1f} us x {calls:6.1f}  {name[:110]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="resnet34")
    parser.add_argument("--method", default="ic-mixup")
    parser.add_argument("--recipe", choices=list(RECIPES), default="paper")
    parser.add_argument("--forms", nargs="+", choices=("graph", "compiled"), default=["graph", "compiled"])
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--images", type=int, default=1280, help="of an epoch")
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=20, help="that are timed")
    parser.add_argument("--cudnn-limit", type=int, help="algorithms that cuDNN tries for a convolution")
    parser.add_argument("--top", type=int, default=15, help="kernels that are listed")
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
        profile_form(recipe, data, form, args.epochs, args.top)


if __name__ == "__main__":
    main()
