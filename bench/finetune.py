"""Fine-tuning on photos: ours beside timm's train.py, and what limits ours.

    python bench/finetune.py --folder path/to/photos --timm-train path/to/train.py --out results/finetune.csv
    python bench/finetune.py --folder ... --timm-train ... --parts wall --models tf_efficientnet_lite0

--folder has train/ and test/, each with one folder per class; photos that train.py cannot read, such as WebP,
are written as JPEGs first, for both sides. train.py is not part of the timm package: take the file from the
tag of the installed version (https://github.com/huggingface/pytorch-image-models).

limits    images a second of the decoder, of the augmentation alone, and of the network's step alone
speed     images a second of training, ours and train.py's with several settings; the best of them counts.
          Both train on links to the photos, --copies of each, so that an epoch is long. train.py gets the
          same augmentation as ours, which needs less of its loader than its defaults do, and of its speed
          the better of two: over whole epochs, and without the start of each epoch
wall      seconds of `icmixup compare` with four methods and three seeds, decoding included, beside one run of
          train.py, multiplied by the number of runs

The column `seconds` is the time of an epoch, except for wall (a whole command).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import importlib.util
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from rows import append_row
from torch import nn

from icmixup.lab.datasets import Dataset
from icmixup.lab.images.decode import SUFFIXES
from icmixup.lab.models import build_model
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.feed import make_feed
from icmixup.lab.training.loop import RunProgress, Stopped, load_recipe_data, train
from icmixup.lab.training.recipe import RECIPES, Recipe
from icmixup.lab.training.run_folder import provenance
from icmixup.lab.training.step import GraphedEpoch, make_learner, make_step

COLUMNS = (
    *("bench", "part", "form", "settings", "model", "images", "image_size", "batch_size", "epochs", "runs"),
    *("images_per_second", "seconds", "device", "torch", "timm", "commit", "date"),
)
# timm's tagged name: the lab has a resnet50 of its own, for small images.
MODELS = ("tf_efficientnet_lite0", "resnet50.a1_in1k")
PARTS = ("limits", "speed", "wall")
FORMS = ("graph", "compiled")
METHODS = ("erm", "mixup", "ic-mixup", "ic-mixup-cutmix")
# Words of --timm-settings; a number is the number of loader processes.
TIMM_FLAGS = {
    "fused": ("--opt-kwargs", "fused=True"),
    "compile": ("--torchcompile",),
    "reduce-overhead": ("--torchcompile", "--torchcompile-mode", "reduce-overhead"),
}
TIMM_SUFFIXES = (".png", ".jpg", ".jpeg")
QUALITY = 90  # of JPEGs, for photos that train.py does not read
LOG_INTERVAL = 5  # updates of train.py between two lines
PREFETCHED = 2  # batches that each process of a DataLoader has ready when an epoch starts
UPDATE = re.compile(r"Train: (\d+) \[ *(\d+)/(\d+) .*?\(([\d.]+)s, +([\d.]+)/s\).*Data: [\d.]+ \(([\d.]+)\)")
# Of an H200, on paper: dense bfloat16 products, and memory.
FLOPS_PER_SECOND, BYTES_PER_SECOND = 989e12, 4.8e12

Row = dict[str, object]


class Bench(NamedTuple):
    """What all measurements share."""

    args: argparse.Namespace
    device: torch.device
    scratch: Path  # deleted at the end
    rows: list[Row]

    def write(self, **values: object) -> None:
        """Print a row and append it to --out."""
        args = self.args
        known = {"bench": "finetune", "image_size": args.image_size, "batch_size": args.batch_size}
        row = {**known, "timm": package_version("timm"), **provenance(self.device), **values}
        self.rows.append(row)
        speed, seconds = row.get("images_per_second"), row.get("seconds")
        print(
            f"{row['part']:7} {row.get('model') or '':22} {row['form']:14} {row.get('settings') or '':24}"
            + (f" {speed:9,.0f} images/s" if isinstance(speed, float) else "")
            + (f" {seconds:8.2f} s" if isinstance(seconds, float) else ""),
            flush=True,
        )
        append_row(row, COLUMNS, args.out)


def package_version(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None


@contextlib.contextmanager
def attempt(what: str) -> Iterator[None]:
    """Report an error and go on: the other measurements do not depend on this one."""
    started = time.perf_counter()
    try:
        yield
    except Exception:
        print(f"FAILED: {what}\n{traceback.format_exc()}", flush=True)
    print(f"# {what}: {time.perf_counter() - started:.1f} s in all", flush=True)
    gc.collect()  # graphs hold memory until then
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()


def list_photos(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)


def as_jpegs(folder: Path, target: Path) -> Path:
    """The folder itself if train.py reads all its photos; else copies of them as JPEGs, for both sides."""
    paths = [path for part in ("train", "test") for path in list_photos(folder / part)]
    if all(path.suffix.lower() in TIMM_SUFFIXES for path in paths):
        return folder
    copies = [(target / path.relative_to(folder)).with_suffix(".jpg") for path in paths]
    for parent in {copy.parent for copy in copies}:
        parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(count_cores(), mp_context=get_context("fork")) as pool:
        list(pool.map(write_jpeg, paths, copies, chunksize=16))
    print(f"# {len(copies)} photos written as JPEGs of quality {QUALITY}: train.py reads no other formats")
    return target


def write_jpeg(source: Path, target: Path) -> None:
    with Image.open(source) as image:
        image.convert("RGB").save(target, quality=QUALITY)


def link_copies(folder: Path, target: Path, copies: int) -> Path:
    """A folder of links to the photos: `copies` of each training photo, the test photos once."""
    for part, number in (("train", copies), ("test", 1)):
        for path in list_photos(folder / part):
            inside = target / path.relative_to(folder)
            inside.parent.mkdir(parents=True, exist_ok=True)
            for copy in range(number):
                (inside.parent / f"{copy}-{path.name}").symlink_to(path.resolve())
    return target


def make_recipe(args: argparse.Namespace, model: str, folder: Path, form: str = "graph") -> Recipe:
    """The lab's recipe for fine-tuning, long enough for any measurement.

    From random weights, which takes the same time.
    """
    return dataclasses.replace(
        RECIPES["finetune"],
        dataset=str(folder),
        model=model,
        method=args.method,
        batch_size=args.batch_size,
        image_size=args.image_size,
        compile=form == "compiled",
        epochs=100_000,
        eval_every=100_000,
        min_steps=0,
    )


def load_data(bench: Bench, folder: Path) -> Dataset:
    """The photos, decoded once into a new cache; a row says how fast."""
    recipe = make_recipe(bench.args, bench.args.models[0], folder)
    started = time.perf_counter()
    data = load_recipe_data(recipe, bench.scratch / "data")
    seconds = time.perf_counter() - started
    count = len(data.train) + len(data.test)
    bench.write(
        part="limits", form="decode once", images=count, images_per_second=count / seconds, seconds=seconds
    )
    return data.to(bench.device)


def decode_photo(path: Path) -> None:
    with Image.open(path) as image:
        image.convert("RGB")


def measure_decoder(bench: Bench, folder: Path) -> None:
    """Pillow alone in one process per core, every photo to RGB bytes. They fork: CUDA is not in use yet."""
    paths, cores = list_photos(folder / "train"), count_cores()
    with ProcessPoolExecutor(cores, mp_context=get_context("fork")) as pool:
        list(pool.map(decode_photo, paths[: 8 * cores]))  # all processes have started
        started = time.perf_counter()
        list(pool.map(decode_photo, paths, chunksize=16))
        seconds = time.perf_counter() - started
    bench.write(
        part="limits",
        form="Pillow",
        settings=f"{cores} processes",
        images=len(paths),
        images_per_second=len(paths) / seconds,
        seconds=seconds,
    )


def count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def repeat(run: Callable[[int], None], seconds: float, device: torch.device) -> float:
    """Seconds of one call, on average over at least `seconds` after a first one."""
    run(0)
    synchronise(device)
    started, number = time.perf_counter(), 0
    while not number or time.perf_counter() - started < seconds:
        number += 1
        run(number)
        synchronise(device)
    return (time.perf_counter() - started) / number


def measure_augmentation(bench: Bench, data: Dataset) -> None:
    """The batches of an epoch without a network."""
    feed = make_feed(make_recipe(bench.args, bench.args.models[0], Path(".")), data.train)

    def epoch(number: int) -> None:
        feed.fill(number)
        for step in range(len(feed.epoch.lrs)):
            feed.prepare(step)

    seconds = repeat(epoch, bench.args.seconds / 2, bench.device)
    bench.write(
        part="limits",
        form="augmentation",
        images=feed.count,
        images_per_second=feed.count / seconds,
        seconds=seconds,
    )


def measure_network(bench: Bench, data: Dataset, model: str, form: str) -> None:
    """The same steps on one fixed batch: captured on a GPU, eager elsewhere."""
    recipe = make_recipe(bench.args, model, Path("."), form)
    feed = make_feed(recipe, data.train)
    feed.fill(0)
    feed.prepare(0)
    learner = make_learner(recipe, data, lambda module: module)
    step = make_step(learner, recipe, recipe.method_at(0), data)
    steps = len(feed.epoch.lrs)
    if bench.device.type == "cuda":
        captured = GraphedEpoch(learner, step, feed.epoch)

    def epoch(number: int) -> None:
        if bench.device.type == "cuda":
            captured()
            return
        for k in range(steps):
            step(*feed.epoch.batch(k))

    seconds = repeat(epoch, bench.args.seconds / 2, bench.device)
    bench.write(
        part="limits",
        form=f"network, {form}",
        model=model,
        images=feed.count,
        images_per_second=feed.count / seconds,
        seconds=seconds,
    )


class Work(NamedTuple):
    """What a training step costs at least, for one image."""

    flops: float  # of matrix products and convolutions, forward and backward
    bytes: float  # to and from memory if no layers are fused, in bfloat16


def count_work(model: str, image_size: int, classes: int = 50) -> Work:
    """Work of one image, counted layer by layer without computing anything.

    Forward, a layer reads its input and writes its output. Backward, it reads the gradient of its output and
    its input, and writes the gradient of its input. Additions of shortcuts are not counted.
    """
    from torch.utils.flop_counter import FlopCounterMode

    traffic = 0

    def add(layer: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        nonlocal traffic
        traffic += 2 * (3 * inputs[0].numel() + 2 * output.numel())

    network = build_model(model, classes, seed=0, image_size=image_size).to("meta")
    for layer in network.modules():
        if not list(layer.children()) and not isinstance(layer, nn.Identity):
            layer.register_forward_hook(add)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network.eval()(torch.zeros(1, 3, image_size, image_size, device="meta"))
    # Three products of equal size: the output, the gradients of the input and of the weights. The counter's
    # own backward pass takes grouped convolutions for full ones.
    return Work(3 * counter.get_total_flops(), traffic)


def measure_ours(bench: Bench, data: Dataset, model: str, form: str) -> None:
    """Training as `icmixup train` does it, without evaluations; the first epoch is not counted."""
    recipe = make_recipe(bench.args, model, Path("photos"), form)
    reports: list[tuple[float, float]] = []  # seconds, and epochs done by then

    def listen(progress: RunProgress) -> None:
        if progress.epoch == int(progress.epoch):
            reports.append((time.perf_counter(), progress.epoch))
        if len(reports) >= 3 and reports[-1][0] - reports[0][0] >= bench.args.seconds:
            raise Stopped

    out = bench.scratch / f"ours-{model}-{form}"
    execution = Execution(out=out, data_dir=out, dataset=data, device=str(bench.device))
    with contextlib.suppress(Stopped):
        train(recipe, execution, listen)
    (start, first), (end, last) = reports[0], reports[-1]
    seconds = (end - start) / (last - first)
    bench.write(
        part="speed",
        form=f"ours, {form}",
        model=model,
        images=len(data.train),
        epochs=int(last),
        images_per_second=len(data.train) / seconds,
        seconds=seconds,
    )


class Update(NamedTuple):
    """A line of train.py about a training step."""

    time: float  # when it was printed
    epoch: int
    number: int
    updates: int  # of the epoch
    seconds: float  # of an update, on average over the epoch so far
    speed: float  # images a second, likewise
    waiting: float  # seconds of an update in which it waits for the loader, likewise


class Finished(NamedTuple):
    """A process that has ended without an error."""

    seconds: float
    updates: list[Update]


def parse_update(line: str, now: float) -> Update | None:
    """The update that a line of train.py reports, if it does."""
    found = UPDATE.search(line)
    if found is None:
        return None
    epoch, number, updates, *averages = found.groups()
    return Update(now, int(epoch), int(number), int(updates), *map(float, averages))


def run_process(command: Sequence[str], args: argparse.Namespace, folder: Path) -> Finished:
    """Run a command, keep its output in --log, and raise an error with its last lines if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    environment.pop("ICMIXUP_CACHE", None)  # photos are decoded again
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    )
    # The whole group, since loaders have processes of their own.
    timer = threading.Timer(args.limit, lambda: os.killpg(process.pid, signal.SIGKILL))
    timer.start()
    lines, updates = [], []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if update := parse_update(line, time.perf_counter()):
                updates.append(update)
        code = process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:  # interrupted
            os.killpg(process.pid, signal.SIGKILL)
    seconds = time.perf_counter() - started
    if args.log is not None:
        with args.log.open("a") as file:
            file.write(f"$ {' '.join(command)}\n{''.join(lines)}\nexit code {code}, {seconds:.2f} s\n\n")
    if code != 0:
        late = f" after the limit of {args.limit:.0f} s" if seconds >= args.limit else ""
        raise RuntimeError(f"{Path(command[0]).name} ended with {code}{late}:\n{''.join(lines[-25:])}")
    return Finished(seconds, updates)


def timm_command(args: argparse.Namespace, model: str, folder: Path, out: Path, setting: str) -> list[str]:
    """train.py with our recipe: the same crops and flips, optimizer, clipping, precision and batch."""
    recipe, size = RECIPES["finetune"], str(args.image_size)
    workers, flags = parse_setting(setting)
    classes = len([entry for entry in (folder / "train").iterdir() if entry.is_dir()])
    return [
        *(str(args.timm_train), "--data-dir", str(folder), "--train-split", "train"),
        *("--model", model, "--num-classes", str(classes), "--input-size", "3", size, size),
        *("--batch-size", str(args.batch_size), "--device", args.device.split(":")[0]),
        *("--amp", "--amp-dtype", "bfloat16", "--channels-last"),
        *("--workers", str(workers), "--pin-mem", *flags),
        *("--opt", "adamw", "--lr", str(recipe.lr), "--weight-decay", str(recipe.weight_decay)),
        *("--clip-grad", str(recipe.clip_norm), "--sched", "cosine", "--warmup-epochs", "0"),
        *("--scale", str(recipe.random_resized_crop), "1.0", "--hflip", "0.5", "--color-jitter", "0"),
        *("--train-interpolation", "bilinear", "--smoothing", "0", "--log-interval", str(LOG_INTERVAL)),
        *("--output", str(out), "--experiment", "timm"),
    ]


def parse_setting(setting: str) -> tuple[int, list[str]]:
    """Loader processes and further flags of train.py: "16+fused+compile"."""
    workers, *words = setting.split("+")
    unknown = [word for word in words if word not in TIMM_FLAGS]
    if not workers.isdigit() or unknown:
        raise SystemExit(
            f"--timm-settings are a number of loader processes and words, joined by +, of "
            f"{', '.join(TIMM_FLAGS)}: for example 16+fused+compile; got {setting!r}"
        )
    return int(workers), [flag for word in words for flag in TIMM_FLAGS[word]]


def training_speed(updates: Sequence[Update], batch_size: int, workers: int) -> float:
    """Images a second of train.py: the better of whole epochs and of epochs without their start.

    The first epoch is not counted. While the first batch of an epoch is on its way, other processes of the
    loader prepare theirs: those batches come at once, and are not counted either if the epoch is long enough.
    """
    epochs: dict[int, list[Update]] = {}
    for update in updates:
        epochs.setdefault(update.epoch, []).append(update)
    later = [lines for epoch, lines in epochs.items() if epoch > 0 or len(epochs) == 1]
    if not later:
        raise ValueError("train.py printed no updates that could be read; see --log")
    whole = statistics.median(lines[-1].speed for lines in later)
    images, seconds = 0, 0.0
    for lines in later:
        skipped = min(PREFETCHED * workers, lines[-1].updates // 2)
        steady = [line for line in lines if line.number >= skipped]
        if len(steady) >= 2:
            images += (steady[-1].number - steady[0].number) * batch_size
            seconds += steady[-1].time - steady[0].time
    return max(whole, images / seconds) if seconds else whole


def measure_timm(bench: Bench, folder: Path, model: str, setting: str) -> None:
    args, out = bench.args, bench.scratch / f"timm-{model}-{setting}"
    command = timm_command(args, model, folder, out, setting)
    # Without a test set, it looks for the loss instead of the accuracy.
    command += ["--epochs", str(args.speed_epochs), "--val-split", "", "--eval-metric", "loss"]
    finished = run_process(command, args, out)
    speed = training_speed(finished.updates, args.batch_size, parse_setting(setting)[0])
    images, last = len(list_photos(folder / "train")), finished.updates[-1]
    print(f"# train.py waits for its loader in {100 * last.waiting / last.seconds:.0f} % of its last epoch")
    bench.write(
        part="speed",
        form="train.py",
        settings=setting,
        model=model,
        images=images,
        epochs=args.speed_epochs,
        images_per_second=speed,
        seconds=images / speed,
    )


def weights_of(args: argparse.Namespace, model: str) -> Path | None:
    """The weights for a model, if --weights has any."""
    found = dict(text.split("=", 1) for text in args.weights)
    return Path(found[model]) if model in found else None


def measure_timm_run(bench: Bench, model: str) -> None:
    """One run of train.py on the photos as they are, from its start to its end."""
    args = bench.args
    setting = best_setting(bench.rows, model, args.timm_settings)
    out = bench.scratch / f"timm-run-{model}"
    command = timm_command(args, model, args.folder, out, setting)
    command += ["--epochs", str(args.epochs), "--val-split", "test", "--val-interval", str(args.epochs)]
    if weights := weights_of(args, model):
        command += ["--pretrained", "--pretrained-path", str(weights)]
    finished = run_process(command, args, out)
    bench.write(
        part="wall",
        form="train.py",
        settings=setting,
        model=model,
        images=len(list_photos(args.folder / "train")),
        epochs=args.epochs,
        runs=1,
        seconds=finished.seconds,
    )


def best_setting(rows: Sequence[Row], model: str, settings: Sequence[str]) -> str:
    """The fastest setting that compiles nothing, which does not pay in a short run; else the first."""
    plain = [setting for setting in settings if not is_compiled(setting)] or list(settings)
    speeds = {
        str(row["settings"]): row["images_per_second"]
        for row in rows
        if row["part"] == "speed" and row["form"] == "train.py" and row["model"] == model
    }
    return max(plain, key=lambda setting: speeds.get(setting, 0.0))


def measure_compare(bench: Bench, model: str, workers: int) -> None:
    """`icmixup compare` from its start to its end, with a new cache: decoding is included."""
    args, out = bench.args, bench.scratch / f"compare-{model}-{workers}"
    command = [
        *("-m", "icmixup", "compare", str(args.folder), "--recipe", "finetune", "--model", model),
        *("--methods", *args.methods, "--seeds", str(args.seeds), "--epochs", str(args.epochs)),
        *("--batch-size", str(args.batch_size), "--image-size", str(args.image_size)),
        *("--eval-every", str(args.epochs), "--device", args.device, "--workers", str(workers)),
        *("--out", str(out / "runs"), "--data-dir", str(out / "data")),
    ]
    if weights := weights_of(args, model):
        command += ["--weights", str(weights)]
    finished = run_process(command, args, out)
    bench.write(
        part="wall",
        form="compare",
        settings=f"{workers} at once",
        model=model,
        images=len(list_photos(args.folder / "train")),
        epochs=args.epochs,
        runs=len(args.methods) * args.seeds,
        seconds=finished.seconds,
    )


def find_rows(rows: Sequence[Row], part: str, model: str | None, form: str) -> list[Row]:
    return [
        row
        for row in rows
        if row["part"] == part and row.get("model") == model and str(row["form"]).startswith(form)
    ]


def fastest(rows: Sequence[Row], part: str, model: str | None, form: str) -> Row | None:
    found = find_rows(rows, part, model, form)
    return max(found, key=lambda row: float(str(row["images_per_second"])), default=None)


def speed_of(row: Row) -> float:
    return float(str(row["images_per_second"]))


def print_speed(rows: Sequence[Row], model: str) -> None:
    """The ratio of the best forms of both."""
    ours, theirs = fastest(rows, "speed", model, "ours"), fastest(rows, "speed", model, "train.py")
    if ours is not None and theirs is not None:
        print(
            f"{model}: {speed_of(ours) / speed_of(theirs):.2f} times train.py "
            f"({ours['form']} {speed_of(ours):,.0f} images/s, train.py {theirs['settings']} "
            f"{speed_of(theirs):,.0f}); target 2"
        )


def print_limits(rows: Sequence[Row], model: str, image_size: int) -> None:
    """How far training is from its parts alone, and from the GPU on paper."""
    for form in FORMS:
        ours = fastest(rows, "speed", model, f"ours, {form}")
        network = fastest(rows, "limits", model, f"network, {form}")
        augmentation = fastest(rows, "limits", None, "augmentation")
        if network is None:
            continue
        work = count_work(model, image_size)
        flops, traffic = speed_of(network) * work.flops, speed_of(network) * work.bytes
        print(
            f"{model}, {form}: the network alone takes {speed_of(network):,.0f} images/s: "
            f"{flops / 1e12:.0f} x 10^12 operations a second in matrix products "
            f"({100 * flops / FLOPS_PER_SECOND:.0f} % of an H200 on paper), and, if no layers were "
            f"fused, {traffic / 1e12:.2f} TB a second of memory ({100 * traffic / BYTES_PER_SECOND:.0f} %)"
        )
        if ours is None or augmentation is None:
            continue
        both = 1 / (1 / speed_of(network) + 1 / speed_of(augmentation))
        print(
            f"{model}, {form}: training has {100 * speed_of(ours) / speed_of(network):.0f} % of the network "
            f"alone, and {100 * speed_of(ours) / both:.0f} % of network and augmentation "
            f"({speed_of(augmentation):,.0f} images/s) one after the other"
        )


def print_wall(rows: Sequence[Row], model: str) -> None:
    """The ratio in time; train.py's is that of one run, multiplied."""
    single = find_rows(rows, "wall", model, "train.py")
    for row in find_rows(rows, "wall", model, "compare"):
        if single:
            one, ours, runs = (
                float(str(single[0]["seconds"])),
                float(str(row["seconds"])),
                int(str(row["runs"])),
            )
            print(
                f"{model}: compare, {row['settings']}, takes {ours:.1f} s for {runs} runs of {row['epochs']} "
                f"epochs with decoding; train.py {runs * one:.1f} s, which is ONE measured run of {one:.1f} "
                f"s times {runs}: {runs * one / ours:.2f} times as long; target 4"
            )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = count_cores()
    settings = dict.fromkeys([f"{cores}+fused", f"{max(1, cores * 3 // 4)}+fused", f"{cores}+fused+compile"])
    parser.add_argument("--folder", type=Path, required=True, help="photos, with train/ and test/")
    parser.add_argument("--timm-train", type=Path, required=True, help="timm's train.py")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="of our step")
    parser.add_argument(
        "--timm-settings", nargs="+", default=list(settings), metavar="SETTING", help="such as 16+fused"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--copies", type=int, default=8, help="of each training photo; limits and speed")
    parser.add_argument("--method", default="erm", help="of limits and speed")
    parser.add_argument("--seconds", type=float, default=8.0, help="least time of each of our measurements")
    parser.add_argument("--speed-epochs", type=int, default=3, help="of train.py; speed")
    parser.add_argument("--epochs", type=int, default=10, help="of each run; wall")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="wall")
    parser.add_argument("--seeds", type=int, default=3, help="wall")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 3], help="runs at once; wall")
    parser.add_argument(
        "--weights", nargs="+", default=[], metavar="MODEL=FILE", help="pretrained weights; wall"
    )
    parser.add_argument("--limit", type=float, default=180.0, help="most seconds of one other process")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--log", type=Path, help="everything that train.py and compare print")
    args = parser.parse_args()
    check_args(parser, args)
    return args


def check_args(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    args.folder = args.folder.resolve()
    for part in ("train", "test"):
        if not (args.folder / part).is_dir():
            parser.error(f"{args.folder} has no folder {part}/ with one folder per class")
    if not args.timm_train.is_file():
        parser.error(
            f"--timm-train {args.timm_train} does not exist; train.py is in timm's repository, not in its "
            f"package: take the file from the tag v{package_version('timm')} of "
            "https://github.com/huggingface/pytorch-image-models"
        )
    if importlib.util.find_spec("timm") is None:
        parser.error("timm is not installed")
    for setting in args.timm_settings:
        parse_setting(setting)
    for text in args.weights:
        if "=" not in text or not Path(text.split("=", 1)[1]).is_file():
            parser.error(f"--weights are MODEL=FILE, for example {MODELS[0]}=model.safetensors, got {text!r}")


def is_compiled(setting: str) -> bool:
    """Whether a setting of train.py compiles the network."""
    return bool({"compile", "reduce-overhead"} & {*setting.split("+")})


def measure_photos(bench: Bench, folder: Path) -> Dataset:
    """The decoder and the augmentation; returns the photos."""
    limits = "limits" in bench.args.parts
    if limits:
        with attempt("Pillow"):
            measure_decoder(bench, folder)
    data = load_data(bench, folder)
    if limits:
        with attempt("augmentation"):
            measure_augmentation(bench, data)
    return data


def measure_training(bench: Bench, data: Dataset, folder: Path, *, compiled: bool) -> None:
    """Network alone, ours and train.py, of all models: without or with compilation."""
    args, form = bench.args, "compiled" if compiled else "graph"
    for model in args.models:
        if form in args.forms and "limits" in args.parts:
            with attempt(f"network alone, {form}, {model}"):
                measure_network(bench, data, model, form)
        if form in args.forms and "speed" in args.parts:
            with attempt(f"ours, {form}, {model}"):
                measure_ours(bench, data, model, form)
        for setting in args.timm_settings if "speed" in args.parts else ():
            if is_compiled(setting) == compiled:
                with attempt(f"train.py, {setting}, {model}"):
                    measure_timm(bench, folder, model, setting)
    print_summary(bench)


def measure_wall(bench: Bench) -> None:
    for model in bench.args.models:
        for workers in bench.args.workers:
            with attempt(f"compare, {workers} at once, {model}"):
                measure_compare(bench, model, workers)
        with attempt(f"one run of train.py, {model}"):
            measure_timm_run(bench, model)
    print_summary(bench)


def print_summary(bench: Bench) -> None:
    for model in bench.args.models:
        print_speed(bench.rows, model)
        print_wall(bench.rows, model)
        with attempt(f"limits of {model}"):
            print_limits(bench.rows, model, bench.args.image_size)


def main() -> None:
    args = parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        bench, data = Bench(args, torch.device(args.device), Path(name), []), None
        folder = bench.scratch / "photos"
        args.folder = as_jpegs(args.folder, bench.scratch / "jpegs")
        if {"limits", "speed"} & {*args.parts}:
            with attempt("photos"):
                data = measure_photos(bench, link_copies(args.folder, folder, args.copies))
        # Compilation takes long, so it comes last.
        if data is not None:
            measure_training(bench, data, folder, compiled=False)
        if "wall" in args.parts:
            measure_wall(bench)
        if data is not None and ("compiled" in args.forms or any(map(is_compiled, args.timm_settings))):
            measure_training(bench, data, folder, compiled=True)


if __name__ == "__main__":
    main()
