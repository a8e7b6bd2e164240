"""Photos a second from files to batches on the device: ours beside a DataLoader that decodes with Pillow.

    python bench/photos.py                          2,000 made JPEGs of 500 x 375 pixels
    python bench/photos.py --folder path/to/photos --image-size 224
    python bench/photos.py --images 20000 --quality 75 --loader-batches 20

Both make the same batches of bytes: RandomResizedCrop (area 0.2 to 1, bilinear, antialiased) and flip. Ours
decodes every file once into the cache and then crops on the device; the DataLoader decodes every file in
every epoch, in as many worker processes as there are cores. JPEGs of the loader use Pillow's draft mode too.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import resource
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rows import append_row
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from icmixup.lab.datasets import Dataset as Photos
from icmixup.lab.datasets import DataSpec, cache, load_dataset
from icmixup.lab.training.feed import make_feed
from icmixup.lab.training.recipe import Recipe
from icmixup.lab.training.run_folder import provenance

COLUMNS = (
    *("bench", "form", "images", "image_size", "batch_size", "images_per_second", "seconds", "resident_mb"),
    *("device", "torch", "commit", "date"),
)


def make_photos(root: Path, count: int, quality: int) -> None:
    """JPEGs of random gradients with noise: about as many bytes as real photos of that size."""
    for number in range(count):
        (root / ("train" if number % 10 else "test") / f"class{number // 10 % 10}").mkdir(
            parents=True, exist_ok=True
        )
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        list(pool.map(make_photo, [(root, number, quality) for number in range(count)], chunksize=50))


def make_photo(task: tuple[Path, int, int]) -> None:
    root, number, quality = task
    generator = np.random.default_rng(number)
    coarse = generator.integers(0, 256, (8, 10, 3), dtype=np.uint8)
    photo = np.asarray(Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC)).astype(int)
    photo = photo + generator.integers(-20, 21, photo.shape)
    path = root / ("train" if number % 10 else "test") / f"class{number // 10 % 10}" / f"{number}.jpg"
    Image.fromarray(photo.clip(0, 255).astype(np.uint8)).save(path, quality=quality)


class Files(Dataset[tuple[Tensor, int]]):
    """Photos that are decoded, cropped and flipped when they are asked for, as in many training scripts."""

    def __init__(self, root: Path, side: int) -> None:
        self.paths = sorted(path for path in root.rglob("*") if path.is_file())
        self.side = side

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        with Image.open(self.paths[number]) as image:
            image.draft("RGB", (2 * self.side, 2 * self.side))
            photo = image.convert("RGB")
        left, top, width, height = draw_box(*photo.size)
        box = (left, top, left + width, top + height)
        crop = photo.resize((self.side, self.side), Image.Resampling.BILINEAR, box=box)
        if random.random() < 0.5:
            crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(crop)).permute(2, 0, 1), 0


def draw_box(width: int, height: int) -> tuple[int, int, int, int]:
    for _ in range(10):
        area = width * height * random.uniform(0.2, 1)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if w <= width and h <= height:
            return random.randint(0, width - w), random.randint(0, height - h), w, h
    return 0, 0, width, height


def resident_mb() -> float:
    """Most memory that this process has used so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def measure_loader(root: Path, args: argparse.Namespace, device: torch.device) -> dict[str, object]:
    files = Files(root / "train" if (root / "train").is_dir() else root, args.image_size)
    loader = DataLoader(
        files,
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=args.workers,
        persistent_workers=True,
        pin_memory=device.type == "cuda",
    )
    batches = iter(loader)
    next(batches)[0].to(device)  # the workers have started
    count = min(args.loader_batches, len(loader) - 1)
    started = time.perf_counter()
    for _ in range(count):
        next(batches)[0].to(device, non_blocking=True)
    synchronise(device)
    seconds = time.perf_counter() - started
    return {"form": "loader", "seconds": seconds, "images_per_second": count * args.batch_size / seconds}


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_decoding(root: Path, args: argparse.Namespace, folder: Path, form: str) -> tuple[Photos, dict]:
    started = time.perf_counter()
    data = load_dataset(DataSpec(str(root), image_size=args.image_size), folder)
    seconds = time.perf_counter() - started
    count = len(data.train) + len(data.test)
    return data, {"form": form, "seconds": seconds, "images_per_second": count / seconds}


def measure_feed(data: Photos, args: argparse.Namespace, device: torch.device) -> dict[str, object]:
    recipe = Recipe(
        dataset="photos", batch_size=args.batch_size, random_resized_crop=0.2, rotation=0.0, drop_last=True
    )
    feed = make_feed(recipe, data.to(device).train)
    feed.fill(0)
    feed.prepare(0)
    synchronise(device)
    started, epochs = time.perf_counter(), 0
    while not epochs or time.perf_counter() - started < args.seconds:
        feed.fill(epochs)
        for step in range(len(feed.epoch.lrs)):
            feed.prepare(step)
        synchronise(device)
        epochs += 1
    seconds = (time.perf_counter() - started) / epochs
    return {"form": "ours", "seconds": seconds, "images_per_second": feed.count / seconds}


def write_row(row: dict[str, object], path: Path | None) -> None:
    print(
        f"{row['form']:13} {row['images_per_second']:9,.0f} images/s  {row['seconds']:8.2f} s  "
        f"resident {row['resident_mb']:,.0f} MB",
        flush=True,
    )
    append_row(row, COLUMNS, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--folder", type=Path, help="of photos; made ones by default")
    parser.add_argument("--images", type=int, default=2000, help="made photos")
    parser.add_argument("--quality", type=int, default=90, help="of their JPEG files")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="of the DataLoader")
    parser.add_argument("--loader-batches", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=10.0, help="least time of our epochs")
    parser.add_argument("--epochs", type=int, default=20, help="of the ratio in total time")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    cache.MEMORY_BYTES = 0  # always through the cache on disk
    with tempfile.TemporaryDirectory() as name:
        root = args.folder or Path(name) / "photos"
        if args.folder is None:
            make_photos(root, args.images, args.quality)
        folder = Path(name) / "data"
        torch.zeros(1, device=device)  # libraries of a GPU take memory too
        print(f"resident before the photos: {resident_mb():,.0f} MB")
        data, decoding = measure_decoding(root, args, folder, "decode once")
        _, again = measure_decoding(root, args, folder, "second load")
        feed = measure_feed(data, args, device)
        rows = [decoding, again, feed]
        known = {"bench": "photos", "images": len(data.train), **provenance(device)}
        known |= {"image_size": args.image_size, "batch_size": args.batch_size, "resident_mb": resident_mb()}
        rows.append(measure_loader(root, args, device))
        for row in rows:
            write_row({**known, **row}, args.out)
        print_ratios(rows, len(data.train), args.epochs)


def print_ratios(rows: list[dict], images: int, epochs: int) -> None:
    decoding, _, ours, loader = rows
    print(f"per epoch: {ours['images_per_second'] / loader['images_per_second']:.1f} times the DataLoader")
    theirs = epochs * images / loader["images_per_second"]
    total = decoding["seconds"] + epochs * ours["seconds"]
    print(
        f"{epochs} epochs with decoding: {theirs / total:.1f} times ({total:.0f} s instead of {theirs:.0f} s)"
    )


if __name__ == "__main__":
    main()
