"""Fine-tuning on photos: ours beside timm's train.py, and what limits ours.

    python bench/finetune.py --folder path/to/photos --timm-train path/to/train.py --out results/finetune.csv
    python bench/finetune.py --folder ... --timm-train ... --photo-sides 0 1200 --timm-settings 16+fused
    python bench/finetune.py --folder ... --timm-train ... --parts wall --models tf_efficientnet_lite0

--folder has train/ and test/, each with one folder per class; photos that train.py cannot read, such as WebP,
are written as JPEGs first, for both programs. train.py is not part of the timm package: take the file from
the tag of the installed version (https://github.com/huggingface/pytorch-image-models).

train.py decodes every photo in every epoch and ours once, so the size of the files matters. --photo-sides are
short sides that the photos are resized to before both read them; 0 leaves them as they are. The decoders and
train.py are measured for every side. Our training reads decoded photos of one size, whatever the files have,
so it is measured for the first side only, and so is everything that is compiled, which takes minutes.
Photos that are enlarged have less detail than real ones of that size, and are decoded faster.

limits    images a second of the decoder, of the augmentation alone, and of the network's step alone
speed     images a second of training, ours and train.py's with several settings; the best of them counts.
          Both train on links to the photos, --copies of each, so that an epoch is long. train.py gets the
          same augmentation as ours, which needs less of its loader than its defaults do, and of its speed
          the better of two: over whole epochs, and without the start of each epoch
wall      seconds of `icmixup compare` with four methods and three seeds, decoding included, beside one run of
          train.py, multiplied by the number of runs; for --wall-sides

The order is: decoders; ours and train.py, not compiled; train.py on other sides; wall; compiled forms. The
column `seconds` is the time of an epoch, except for wall (a whole command) and `decode once` (all photos,
without copies). `photo_side` is the short side of the files in pixels, the median if they differ.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import importlib.util
import os
import re
import shutil
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
from rows import append_row, choose_layers
from torch import nn

from icmixup.lab.datasets import Dataset
from icmixup.lab.datasets.folder import list_folder, sample_shapes, typical_side
from icmixup.lab.images.decode import SUFFIXES
from icmixup.lab.models import build_model, preprocessing_of
from icmixup.lab.training.data import load_recipe_data
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.feed import make_feed
from icmixup.lab.training.loop import RunProgress, Stopped, train
from icmixup.lab.training.recipe import RECIPES, Recipe
from icmixup.lab.training.run_folder import provenance
from icmixup.lab.training.step import GraphedEpoch, make_learner, make_step

COLUMNS = (
    *("bench", "part", "form", "settings", "model", "images", "image_size", "photo_side", "batch_size"),
    *("epochs", "runs", "images_per_second", "seconds", "device", "torch", "timm", "commit", "date"),
)
# timm's tagged name: the lab has a resnet50 of its own, for small images.
MODELS = ("tf_efficientnet_lite0", "resnet50.a1_in1k")
PARTS = ("limits", "speed", "wall")
FORMS = ("fused", "graph", "compiled")  # of our step; graph: captured with torch's own layers
METHODS = ("erm", "mixup", "ic-mixup", "ic-mixup-cutmix")
# Words of --timm-settings; a number is the number of loader processes.
TIMM_FLAGS = {
    "fused": ("--opt-kwargs", "fused=True"),
    "compile": ("--torchcompile",),
    "reduce-overhead": ("--torchcompile", "--torchcompile-mode", "reduce-overhead"),
}
TIMM_SUFFIXES = (".png", ".jpg", ".jpeg")
QUALITY = 90  # of JPEGs, for photos that are resized or that train.py does not read
CHUNK = 16  # photos that a process takes at once
LOG_INTERVAL = 5  # updates of train.py between two lines
PREFETCHED = 2  # batches that each process of a DataLoader has ready when an epoch starts
UPDATE = re.compile(r"Train: (\d+) \[ *(\d+)/(\d+) .*?\(([\d.]+)s, +([\d.]+)/s\).*Data: [\d.]+ \(([\d.]+)\)")
# Of an H200, on paper: dense bfloat16 products, and memory.
FLOPS_PER_SECOND, BYTES_PER_SECOND = 989e12, 4.8e12

Row = dict[str, object]


class PhotoFolder(NamedTuple):
    """The photos at one size, as both programs read them."""

    side: int  # of --photo-sides
    short_side: int  # of the files, in pixels
    folder: Path
    copies: Path  # links to them, --copies of each training photo


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
            f" {row['photo_side']:5} px"
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


def as_jpegs(folder: Path, target: Path, side: int = 0, limit: float | None = None) -> Path:
    """The photos as JPEGs with the given short side, for both programs.

    That is the folder itself if the side is 0 and train.py reads all its photos.
    """
    paths = [path for part in ("train", "test") for path in list_photos(folder / part)]
    if not side and all(path.suffix.lower() in TIMM_SUFFIXES for path in paths):
        return folder
    copies = [(target / path.relative_to(folder)).with_suffix(".jpg") for path in paths]
    for parent in {copy.parent for copy in copies}:
        parent.mkdir(parents=True, exist_ok=True)
    with process_pool() as pool:
        sides = [side] * len(paths)
        list(pool.map(write_jpeg, paths, copies, sides, chunksize=CHUNK, timeout=limit))
    size = f"with a short side of {side} pixels" if side else "in their size"
    print(f"# {len(copies)} photos written as JPEGs of quality {QUALITY}, {size}", flush=True)
    return target


def process_pool() -> ProcessPoolExecutor:
    """One process per core. They fork: all are used before CUDA is."""
    return ProcessPoolExecutor(count_cores(), mp_context=get_context("fork"))


def write_jpeg(source: Path, target: Path, side: int) -> None:
    with Image.open(source) as image:
        rgb = image.convert("RGB")
    if side:
        scale = side / min(rgb.size)
        width, height = (round(scale * length) for length in rgb.size)
        rgb = rgb.resize((width, height), Image.Resampling.BICUBIC)
    rgb.save(target, quality=QUALITY)


def prepare_photos(bench: Bench, side: int) -> PhotoFolder:
    """The photos with the given short side, and links to them."""
    args = bench.args
    folder = as_jpegs(args.folder, bench.scratch / f"jpegs-{side}", side, args.limit)
    copies = link_copies(folder, bench.scratch / f"photos-{side}", args.copies)
    return PhotoFolder(side, side or median_side(folder), folder, copies)


def median_side(folder: Path) -> int:
    """The median short side of the photos in pixels, from headers."""
    listed = list_folder(folder)
    return typical_side(sample_shapes([*listed.train, *listed.test]))


def link_copies(folder: Path, target: Path, copies: int) -> Path:
    """A folder of links to the photos: `copies` of each training photo, the test photos once."""
    for part, number in (("train", copies), ("test", 1)):
        for path in list_photos(folder / part):
            inside = target / path.relative_to(folder)
            inside.parent.mkdir(parents=True, exist_ok=True)
            for copy in range(number):
                (inside.parent / f"{copy}-{path.name}").symlink_to(path.resolve())
    return target


def make_recipe(args: argparse.Namespace, model: str, folder: Path, form: str = FORMS[0]) -> Recipe:
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


def measure_decoding(bench: Bench, photos: PhotoFolder) -> None:
    """Our decoding of all photos into a new cache, which is deleted."""
    recipe = make_recipe(bench.args, bench.args.models[0], photos.folder)
    cache = bench.scratch / f"decoded-{photos.side}"
    preprocessing_of(recipe.model, recipe.weights)  # imports timm, which takes seconds
    started = time.perf_counter()
    data = load_recipe_data(recipe, cache)
    seconds = time.perf_counter() - started
    count = len(data.train) + len(data.test)
    shutil.rmtree(cache, ignore_errors=True)
    bench.write(
        part="limits",
        form="decode once",
        photo_side=photos.short_side,
        images=count,
        images_per_second=count / seconds,
        seconds=seconds,
    )


def decode_photo(path: Path) -> None:
    with Image.open(path) as image:
        image.convert("RGB")


def measure_decoder(bench: Bench, photos: PhotoFolder) -> None:
    """Pillow alone in one process per core, every photo to RGB bytes."""
    paths, cores = list_photos(photos.copies / "train"), count_cores()
    with process_pool() as pool:
        list(pool.map(decode_photo, paths[: 8 * cores], timeout=bench.args.limit))  # all have started
        started = time.perf_counter()
        list(pool.map(decode_photo, paths, chunksize=CHUNK, timeout=bench.args.limit))
        seconds = time.perf_counter() - started
    bench.write(
        part="limits",
        form="Pillow",
        photo_side=photos.short_side,
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


def measure_augmentation(bench: Bench, data: Dataset, photos: PhotoFolder) -> None:
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
        photo_side=photos.short_side,
        images=feed.count,
        images_per_second=feed.count / seconds,
        seconds=seconds,
    )


def measure_network(bench: Bench, data: Dataset, photos: PhotoFolder, model: str, form: str) -> None:
    """The same steps on one fixed batch: captured on a GPU, eager elsewhere."""
    recipe = make_recipe(bench.args, model, Path("."), form)
    feed = make_feed(recipe, data.train)
    feed.fill(0)
    feed.prepare(0)
    learner = make_learner(recipe, data)
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
        photo_side=photos.short_side,
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


def measure_ours(bench: Bench, data: Dataset, photos: PhotoFolder, model: str, form: str) -> None:
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
        photo_side=photos.short_side,
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
    """Run a command, and raise an error with its last lines if it fails.

    Its output is kept in --log, each line with the seconds since the start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
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
            lines.append(f"{time.perf_counter() - started:7.2f} {line}")
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


def measure_timm(bench: Bench, photos: PhotoFolder, model: str, setting: str) -> None:
    args, out = bench.args, bench.scratch / f"timm-{model}-{setting}-{photos.side}"
    command = timm_command(args, model, photos.copies, out, setting)
    # Without a test set, it looks for the loss instead of the accuracy.
    command += ["--epochs", str(args.speed_epochs), "--val-split", "", "--eval-metric", "loss"]
    finished = run_process(command, args, out)
    speed = training_speed(finished.updates, args.batch_size, parse_setting(setting)[0])
    images, last = len(list_photos(photos.copies / "train")), finished.updates[-1]
    print(f"# train.py waits for its loader in {100 * last.waiting / last.seconds:.0f} % of its last epoch")
    bench.write(
        part="speed",
        form="train.py",
        photo_side=photos.short_side,
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


def measure_timm_run(bench: Bench, photos: PhotoFolder, model: str) -> None:
    """One run of train.py on the photos without copies, from its start to its end."""
    args = bench.args
    setting = best_setting(bench.rows, model, args.timm_settings, photos.short_side)
    out = bench.scratch / f"timm-run-{model}-{photos.side}"
    command = timm_command(args, model, photos.folder, out, setting)
    command += ["--epochs", str(args.epochs), "--val-split", "test", "--val-interval", str(args.epochs)]
    if weights := weights_of(args, model):
        command += ["--pretrained", "--pretrained-path", str(weights)]
    finished = run_process(command, args, out)
    bench.write(
        part="wall",
        form="train.py",
        photo_side=photos.short_side,
        settings=setting,
        model=model,
        images=len(list_photos(photos.folder / "train")),
        epochs=args.epochs,
        runs=1,
        seconds=finished.seconds,
    )


def best_setting(rows: Sequence[Row], model: str, settings: Sequence[str], photo_side: int) -> str:
    """The fastest setting that compiles nothing, which does not pay in a short run; else the first."""
    plain = [setting for setting in settings if not is_compiled(setting)] or list(settings)
    found = find_rows(rows, "speed", model, "train.py", photo_side)
    speeds = {str(row["settings"]): speed_of(row) for row in found}
    return max(plain, key=lambda setting: speeds.get(setting, 0.0))


def measure_compare(bench: Bench, photos: PhotoFolder, model: str, workers: int) -> None:
    """`icmixup compare` from its start to its end, with a new cache: decoding is included."""
    args, out = bench.args, bench.scratch / f"compare-{model}-{workers}-{photos.side}"
    command = [
        *("-m", "icmixup", "compare", str(photos.folder), "--recipe", "finetune", "--model", model),
        *("--methods", *args.methods, "--seeds", str(args.seeds), "--epochs", str(args.epochs)),
        *("--batch-size", str(args.batch_size), "--image-size", str(args.image_size)),
        *("--eval-every", str(args.epochs), "--device", args.device, "--workers", str(workers)),
        *("--out", str(out / "runs"), "--data-dir", str(out / "data")),
    ]
    if weights := weights_of(args, model):
        command += ["--weights", str(weights)]
    choose_layers(FORMS[0])
    finished = run_process(command, args, out)
    bench.write(
        part="wall",
        form="compare",
        photo_side=photos.short_side,
        settings=f"{workers} at once",
        model=model,
        images=len(list_photos(photos.folder / "train")),
        epochs=args.epochs,
        runs=len(args.methods) * args.seeds,
        seconds=finished.seconds,
    )


def find_rows(
    rows: Sequence[Row], part: str, model: str | None, form: str, photo_side: int | None = None
) -> list[Row]:
    """The rows of a form, which may be the start of its name; of all sizes of photos if none is given."""
    return [
        row
        for row in rows
        if row["part"] == part
        and row.get("model") == model
        and str(row["form"]).startswith(form)
        and photo_side in (None, row["photo_side"])
    ]


def fastest(rows: Sequence[Row]) -> Row | None:
    return max(rows, key=speed_of, default=None)


def speed_of(row: Row) -> float:
    return float(str(row["images_per_second"]))


def sides_of(rows: Sequence[Row]) -> list[int]:
    """The sizes of photos in the rows, in the order in which they were measured."""
    return list(dict.fromkeys(int(str(row["photo_side"])) for row in rows))


def print_decoding(rows: Sequence[Row]) -> None:
    for row in find_rows(rows, "limits", None, "decode once"):
        print(
            f"photos of {row['photo_side']} pixels: our decoding takes {row['seconds']:.1f} s, once, for "
            f"{row['images']} photos"
        )


def print_speed(rows: Sequence[Row], model: str) -> None:
    """The ratio of the best forms of both, for every size of photos; ours is measured with one of them."""
    ours = find_rows(rows, "speed", model, "ours")
    for side in sides_of(find_rows(rows, "speed", model, "train.py")):
        # train.py is compiled where ours was measured: elsewhere, neither counts compiled.
        comparable = [row for row in ours if row["photo_side"] == side or row["form"] != "ours, compiled"]
        best, theirs = fastest(comparable), fastest(find_rows(rows, "speed", model, "train.py", side))
        if best is not None and theirs is not None:
            print(
                f"{model}, photos of {side} pixels: {speed_of(best) / speed_of(theirs):.2f} times train.py "
                f"({best['form']} {speed_of(best):,.0f} images/s, train.py {theirs['settings']} "
                f"{speed_of(theirs):,.0f}); target 2"
            )


def print_limits(rows: Sequence[Row], model: str, image_size: int) -> None:
    """How far training is from its parts alone, and from the GPU on paper."""
    for form in FORMS:
        ours = fastest(find_rows(rows, "speed", model, f"ours, {form}"))
        network = fastest(find_rows(rows, "limits", model, f"network, {form}"))
        augmentation = fastest(find_rows(rows, "limits", None, "augmentation"))
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
    for row in find_rows(rows, "wall", model, "compare"):
        single = find_rows(rows, "wall", model, "train.py", int(str(row["photo_side"])))
        if single:
            one, ours, runs = (
                float(str(single[0]["seconds"])),
                float(str(row["seconds"])),
                int(str(row["runs"])),
            )
            print(
                f"{model}, photos of {row['photo_side']} pixels: compare, {row['settings']}, takes "
                f"{ours:.1f} s for {runs} runs of {row['epochs']} epochs with decoding; train.py "
                f"{runs * one:.1f} s, which is ONE measured run of {one:.1f} s times {runs}: "
                f"{runs * one / ours:.2f} times as long; target 4"
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
    parser.add_argument(
        "--forms", nargs="+", choices=FORMS, default=["fused", "compiled"], help="of our step"
    )
    parser.add_argument(
        "--timm-settings", nargs="+", default=list(settings), metavar="SETTING", help="such as 16+fused"
    )
    parser.add_argument(
        "--photo-sides",
        type=int,
        nargs="+",
        default=[0],
        metavar="PIXELS",
        help="short sides that the photos are resized to; 0: as they are",
    )
    parser.add_argument(
        "--wall-sides", type=int, nargs="+", metavar="PIXELS", help="of --photo-sides; default: the last"
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
    check_sides(parser, args)
    for text in args.weights:
        if "=" not in text or not Path(text.split("=", 1)[1]).is_file():
            parser.error(f"--weights are MODEL=FILE, for example {MODELS[0]}=model.safetensors, got {text!r}")


def check_sides(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    args.wall_sides = args.wall_sides or args.photo_sides[-1:]
    if min(args.photo_sides) < 0:
        parser.error(
            f"--photo-sides must be pixels, or 0 for photos as they are, got {min(args.photo_sides)}"
        )
    if unknown := {*args.wall_sides} - {*args.photo_sides}:
        parser.error(f"--wall-sides must be among --photo-sides {args.photo_sides}, got {min(unknown)}")


def is_compiled(setting: str) -> bool:
    """Whether a setting of train.py compiles the network."""
    return bool({"compile", "reduce-overhead"} & {*setting.split("+")})


def trains(args: argparse.Namespace) -> bool:
    """Whether parts are measured that train on copies of the photos."""
    return bool({"limits", "speed"} & {*args.parts})


def prepare_sides(bench: Bench) -> list[PhotoFolder]:
    """The photos in all sizes that are needed, without those that fail."""
    found, args = [], bench.args
    for side in dict.fromkeys(args.photo_sides if trains(args) else args.wall_sides):
        with attempt(f"photos, --photo-sides {side}"):
            found.append(prepare_photos(bench, side))
    return found


def measure_photos(bench: Bench, sides: Sequence[PhotoFolder]) -> None:
    """The decoders, for all sizes of photos."""
    for photos in sides:
        if "limits" in bench.args.parts:
            with attempt(f"Pillow, {photos.short_side} pixels"):
                measure_decoder(bench, photos)
        with attempt(f"our decoding, {photos.short_side} pixels"):
            measure_decoding(bench, photos)


def load_copies(bench: Bench, photos: PhotoFolder) -> Dataset | None:
    """Copies of the photos, to train on; None if they cannot be read."""
    with attempt(f"copies of the photos, {photos.short_side} pixels"):
        recipe = make_recipe(bench.args, bench.args.models[0], photos.copies)
        return load_recipe_data(recipe, bench.scratch / "data").to(bench.device)
    return None


def measure_training(bench: Bench, data: Dataset, photos: PhotoFolder, *, compiled: bool) -> None:
    """Ours, train.py and the network alone, of all models: without or with compilation."""
    args = bench.args
    forms = [form for form in args.forms if (form == "compiled") == compiled]
    for model in args.models:
        for form in forms if "speed" in args.parts else ():
            with attempt(f"ours, {form}, {model}"):
                choose_layers(form)
                measure_ours(bench, data, photos, model, form)
        measure_timm_settings(bench, photos, model, compiled=compiled)
        for form in forms if "limits" in args.parts else ():
            with attempt(f"network alone, {form}, {model}"):
                choose_layers(form)
                measure_network(bench, data, photos, model, form)
    print_summary(bench)


def measure_timm_settings(bench: Bench, photos: PhotoFolder, model: str, *, compiled: bool) -> None:
    """train.py with those of its settings that compile the network, or with the others."""
    for setting in bench.args.timm_settings if "speed" in bench.args.parts else ():
        if is_compiled(setting) == compiled:
            with attempt(f"train.py, {setting}, {model}, {photos.short_side} pixels"):
                measure_timm(bench, photos, model, setting)


def measure_other_sides(bench: Bench, sides: Sequence[PhotoFolder]) -> None:
    """train.py, not compiled, on the sizes of photos after the first."""
    if not sides:
        return
    print(
        "# ours is not measured again: its training does not depend on the size of the files, only decoding"
    )
    for photos in sides:
        for model in bench.args.models:
            measure_timm_settings(bench, photos, model, compiled=False)
    print_summary(bench)


def measure_wall(bench: Bench, sides: Sequence[PhotoFolder]) -> None:
    for photos in sides:
        for model in bench.args.models:
            for workers in bench.args.workers:
                with attempt(f"compare, {workers} at once, {model}, {photos.short_side} pixels"):
                    measure_compare(bench, photos, model, workers)
            with attempt(f"one run of train.py, {model}, {photos.short_side} pixels"):
                measure_timm_run(bench, photos, model)
    print_summary(bench)


def print_summary(bench: Bench) -> None:
    print_decoding(bench.rows)
    for model in bench.args.models:
        print_speed(bench.rows, model)
        print_wall(bench.rows, model)
        with attempt(f"limits of {model}"):
            print_limits(bench.rows, model, bench.args.image_size)


def measure_all(bench: Bench, sides: Sequence[PhotoFolder]) -> None:
    """All parts, those that are cheap or matter most first; compilation takes long, so it comes last."""
    args, first, data = bench.args, sides[0], None
    if trains(args):
        measure_photos(bench, sides)
        data = load_copies(bench, first)
    if data is not None:
        if "limits" in args.parts:
            with attempt("augmentation"):
                measure_augmentation(bench, data, first)
        measure_training(bench, data, first, compiled=False)
        if "speed" in args.parts:
            measure_other_sides(bench, sides[1:])
    if "wall" in args.parts:
        measure_wall(bench, [photos for photos in sides if photos.side in args.wall_sides])
    if data is not None and ("compiled" in args.forms or any(map(is_compiled, args.timm_settings))):
        measure_training(bench, data, first, compiled=True)


def main() -> None:
    args = parse_args()
    os.environ.pop("ICMIXUP_CACHE", None)  # photos are decoded again
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        bench = Bench(args, torch.device(args.device), Path(name), [])
        sides = prepare_sides(bench)
        if not sides:
            raise SystemExit("no photos could be prepared")
        measure_all(bench, sides)


if __name__ == "__main__":
    main()
