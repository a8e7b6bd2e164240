"""Images a second and memory of a whole training step, ours beside a plain PyTorch loop, in one go.

    python bench/step.py --device cuda --out results/bench.csv
    python bench/step.py --device cuda --forms compiled --at-once 1 2 3 4 --model resnet32
    python bench/step.py --device cpu --model small-cnn --images 2000 --batch-size 64 --epochs 3

Ours: data and augmentation on the device, the step as one CUDA graph where there is one. Plain: a DataLoader
that augments with Pillow in worker processes, the same model and batch, an eager loop, the loss as the
authors release it (identity matrix as probabilities). Images are random bytes of CIFAR's shape: speed does
not look at them.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from rows import append_row, choose_layers
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

import icmixup as icm
from icmixup.lab.datasets import Dataset, Split
from icmixup.lab.models import build_model
from icmixup.lab.sweep import warn_of_failure
from icmixup.lab.sweep.local import Collector, run_in_threads
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.loop import RunProgress, train
from icmixup.lab.training.recipe import Recipe
from icmixup.lab.training.run_folder import provenance

MEAN, STD = (0.50708, 0.48655, 0.44092), (0.26733, 0.25644, 0.27615)
SHOWN = ("form", "model", "method", "batch_size", "images_per_second", "ms_per_step", "peak_mb", "epochs")
COLUMNS = ("bench", *SHOWN, "device", "torch", "commit", "date")


def made_dataset(images: int, classes: int) -> Dataset:
    """Random bytes in CIFAR's shape."""
    generator = torch.Generator().manual_seed(0)

    def split(number: int) -> Split:
        pixels = torch.randint(256, (number, 3, 32, 32), generator=generator, dtype=torch.uint8)
        return Split(pixels, torch.arange(number) % classes)

    names = tuple(map(str, range(classes)))
    return Dataset("made", split(images), split(max(images // 5, classes)), names, MEAN, STD)


class PlainImages(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """CIFAR as most code reads it: an image at a time, augmented by Pillow."""

    def __init__(self, split: Split) -> None:
        self.images = [Image.fromarray(x.permute(1, 2, 0).numpy()) for x in split.images]
        self.labels = split.labels.tolist()
        self.mean, self.std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        left, top = random.randint(0, 8), random.randint(0, 8)
        image = ImageOps.expand(self.images[number], 4).crop((left, top, left + 32, top + 32))
        image = ImageOps.mirror(image) if random.random() < 0.5 else image
        image = image.rotate(random.uniform(-15, 15))
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(32, 32, 3)
        return (pixels.permute(2, 0, 1).float() / 255 - self.mean) / self.std, self.labels[number]


def authors_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Both axes with the identity matrix as probabilities, as released."""
    mixed, identity = scores @ targets.T, torch.eye(len(scores), device=scores.device)
    return F.cross_entropy(mixed, identity) + F.cross_entropy(mixed.T, identity)


def measure_plain(recipe: Recipe, data: Dataset, device: torch.device, steps: int) -> dict[str, float]:
    """Steps of a plain loop; the median time between steps counts."""
    model = build_model(recipe.model, data.num_classes, seed=0).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.lr, momentum=0.9, weight_decay=5e-4)
    workers = 0 if device.type == "cpu" else min(16, os.cpu_count() or 1)
    loader = DataLoader(
        PlainImages(data.train),
        recipe.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        pin_memory=device.type == "cuda",
    )
    loss_of = authors_loss if recipe.method.startswith("ic-") else F.cross_entropy
    times, done = [], 0
    while done < steps:
        started = time.perf_counter()
        for images, labels in loader:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            pairs = icm.draw_mixup(labels, 0.2)
            targets = icm.mix_targets(labels, pairs, data.num_classes)
            loss = loss_of(model(icm.mix_inputs(images, pairs)), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
            started = time.perf_counter()
            done += 1
            if done == steps:
                break
    # Means, not medians: a loader delivers in bursts. The first steps warm up.
    return {"seconds": statistics.fmean(times[len(times) // 5 :])}


Reports = dict[int, list[tuple[float, float]]]  # of each run: seconds, and epochs done by then


def overlapping_speed(reports: Reports, images: int) -> float:
    """Images a second of all runs together, over the time in which all of them train.

    That is from the first report of the run that starts last, to the last report of the run that ends first.
    Between two reports a run is taken to be steady.

    Args:
        images: of an epoch.
    """
    start = max(points[0][0] for points in reports.values())
    end = min(points[-1][0] for points in reports.values())
    if end <= start:
        raise ValueError(
            f"the {len(reports)} runs never train at the same time: one ends before another has done an "
            "epoch; use more --epochs"
        )
    epochs = 0.0
    for points in reports.values():
        seconds, done = zip(*points, strict=True)
        first, last = np.interp([start, end], seconds, done)
        epochs += last - first
    return epochs * images / (end - start)


def measure_together(
    recipe: Recipe, data: Dataset, device: torch.device, at_once: int, folder: Path
) -> float:
    """Images a second of `at_once` runs in threads."""
    execution = Execution(out=folder, data_dir=folder, dataset=data, device=str(device))
    reports: Reports = {seed: [] for seed in range(at_once)}

    def listen(running: Recipe, progress: RunProgress) -> None:
        reports[running.seed].append((time.perf_counter(), progress.epoch))

    recipes = [dataclasses.replace(recipe, seed=seed) for seed in reports]
    run_in_threads(recipes, execution, at_once, Collector({}, None, listen, warn_of_failure))
    return overlapping_speed(reports, len(data.train))


def measure_ours(recipe: Recipe, data: Dataset, device: torch.device, at_once: int = 1) -> dict[str, float]:
    """Our step; of several runs at once, the images that all of them take together."""
    with tempfile.TemporaryDirectory() as folder:
        if at_once > 1:
            speed = measure_together(recipe, data, device, at_once, Path(folder))
        else:
            execution = Execution(out=Path(folder), data_dir=Path(folder), dataset=data, device=str(device))
            speed = train(recipe, execution)["images_per_second"]
    return {"seconds": recipe.batch_size / speed}


def compile_model(recipe: Recipe, classes: int, device: torch.device) -> None:
    """A run of two steps, so that no row pays for the compilation, in time or in memory."""
    data = made_dataset(2 * recipe.batch_size, classes)
    measure_ours(dataclasses.replace(recipe, epochs=1, eval_every=1), data, device)


def measure(
    form: str, recipe: Recipe, data: Dataset, device: torch.device, steps: int, at_once: int = 1
) -> dict[str, object]:
    """One row: a form of the step, its speed and its peak of memory."""
    gc.collect()  # graphs of the run before hold memory until then
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    plain = form.startswith("plain")
    timed = (
        measure_plain(recipe, data, device, steps) if plain else measure_ours(recipe, data, device, at_once)
    )
    peak = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else float("nan")
    return {
        "bench": "step",
        "form": form if at_once == 1 else f"{form}, {at_once} at once",
        "model": recipe.model,
        "method": recipe.method,
        "batch_size": recipe.batch_size,
        "images_per_second": round(recipe.batch_size / timed["seconds"]),
        "ms_per_step": round(timed["seconds"] * 1000, 4),
        "peak_mb": round(peak, 1),
        "epochs": steps if plain else recipe.epochs,
        **provenance(device),
    }


def write_row(row: dict[str, object], path: Path | None) -> None:
    print("  ".join(f"{name}={row[name]}" for name in SHOWN), flush=True)
    append_row(row, COLUMNS, path)


def medians(rows: list[dict[str, object]], column: str) -> dict[tuple[str, str], float]:
    """By form and method, over repeats."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        found.setdefault((str(row["form"]), str(row["method"])), []).append(float(str(row[column])))
    return {key: statistics.median(values) for key, values in found.items()}


def print_ratios(rows: list[dict[str, object]]) -> None:
    """Ours over plain, and Infinite Class over Mixup, from these very rows."""
    speed, memory = medians(rows, "images_per_second"), medians(rows, "peak_mb")
    for (form, method), value in speed.items():
        if form != "plain" and ("plain", method) in speed:
            print(f"{form} {method}: {value / speed['plain', method]:.2f} times plain")
        if method == "ic-mixup" and (form, "mixup") in speed:
            print(
                f"{form}: a step of ic-mixup takes {speed[form, 'mixup'] / value:.4f} of mixup's, "
                f"memory {memory[form, method] / memory[form, 'mixup']:.4f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="resnet34")
    parser.add_argument("--methods", nargs="+", default=["mixup", "ic-mixup"])
    parser.add_argument(
        "--forms",
        nargs="+",
        default=["plain", "fused", "graph", "compiled"],
        help="fused: the default of `icmixup train`; graph: captured with torch's own layers; eager on a CPU",
    )
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60, help="of the plain loop")
    parser.add_argument("--repeats", type=int, default=1, help="rounds over all forms; ratios are of medians")
    parser.add_argument(
        "--at-once", type=int, nargs="+", default=[1], help="runs that share the GPU; of ours"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    data = made_dataset(args.images, args.classes)
    rows: list[dict[str, object]] = []
    rounds = itertools.product(range(args.repeats), args.forms, args.at_once, args.methods)
    for _, form, at_once, method in rounds:
        if form == "plain" and at_once > 1:
            continue
        choose_layers(form)
        recipe = Recipe(
            dataset="made",
            model=args.model,
            method=method,
            epochs=args.epochs,
            batch_size=args.batch_size,
            lr=0.01,
            compile=form == "compiled",
            eval_every=args.epochs,
        )
        if recipe.compile and not any(row["form"] == form for row in rows):
            compile_model(recipe, args.classes, device)
        rows.append(measure(form, recipe, data, device, args.steps, at_once))
        write_row(rows[-1], args.out)
    print_ratios(rows)


if __name__ == "__main__":
    main()
