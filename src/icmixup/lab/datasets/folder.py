"""Folders of image files, read as square RGB tensors.

A file that cannot be read is reported and skipped; it is an error only if its class has no readable image.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from rich.console import Console
from rich.progress import track
from torch import Tensor

from icmixup.lab.datasets.subsets import Source, Split, hold_out

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
DEFAULT_SIZE, LARGEST_OWN_SIZE = 32, 64
# Names of split folders, in any case; the first that has classes is used.
TRAIN_FOLDERS = ("train", "training")
TEST_FOLDERS = ("test", "testing", "val", "valid", "validation")
HELD_OUT = 5  # one image in five is held out if there is no test set


class ImageFile(NamedTuple):
    """A labelled image file that has not been read yet."""

    name: str
    open: Callable[[], IO[bytes]]
    label: int


def read_folder(root: Path, *, image_size: int | None = None, show_progress: bool = False) -> Source:
    """Read a folder of `class/*.png`, or one with `train/` and `test/` (or `val/`) folders of that kind.

    Split folders may also be called `training`, `testing`, `valid` or `validation`, in upper or lower case; a
    folder `train` beside folders of images is a class. Without a test folder a fifth of each class is
    held out, always the same one. If both `test/` and `val/` have classes, `test/` is read. The test set may
    lack classes.

    Args:
        image_size: side of the square images; None keeps the size of the files if all have the same one and
            it is at most 64, else it is 32.
    """
    train_root, test_root = find_splits(root)
    names = _list_classes(train_root)
    check_class_names(names, str(train_root), "make one folder per class, with images in it")
    train_files = list_files(train_root, names)
    test_files = [] if test_root is None else list_files(test_root, names)
    split_by = "" if test_root is None else f"folders {train_root.name} and {test_root.name}"
    source = read_source(train_files, test_files, names, image_size, show_progress, split_by)
    return source._replace(train=name_from(source.train, root), test=name_from(source.test, root))


def find_splits(root: Path) -> tuple[Path, Path | None]:
    """The folders of training and test classes; the second is None if there is no test set.

    A split contains folders and no images of its own. If a folder beside them contains images, it is a class,
    and so is `train`.
    """
    by_name = {name.lower(): root / name for name in _list_classes(root)}
    is_split = {name for name, folder in by_name.items() if _list_classes(folder) and not has_images(folder)}
    trains = [by_name[name] for name in TRAIN_FOLDERS if name in is_split]
    tests = [by_name[name] for name in TEST_FOLDERS if name in is_split]
    others = set(by_name) - {*TRAIN_FOLDERS, *TEST_FOLDERS}
    if not trains or any(has_images(by_name[name]) for name in others):
        return root, None
    return trains[0], tests[0] if tests else None


def has_images(folder: Path) -> bool:
    """Whether a folder directly contains image files."""
    return any(is_image(path) for path in folder.iterdir())


def is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()


def name_from(split: Split, root: Path) -> Split:
    """The split with file names relative to the dataset's folder."""
    names = tuple(Path(name).relative_to(root).as_posix() for name in split.file_names)
    return replace(split, file_names=names)


def _list_classes(folder: Path) -> tuple[str, ...]:
    """Names of the class folders, sorted, without hidden folders and `__MACOSX`."""
    if not folder.is_dir():
        return ()
    found = (entry.name for entry in folder.iterdir() if entry.is_dir())
    return tuple(sorted(name for name in found if not name.startswith((".", "__"))))


def check_class_names(names: Sequence[str], where: str, remedy: str) -> None:
    """Raise an error if there are fewer than two classes."""
    if len(names) < 2:
        found = f"one class, {names[0]!r}" if names else "no class"
        raise ValueError(f"{where} has {found}, expected at least two: {remedy}")


def list_files(folder: Path, names: Sequence[str]) -> list[ImageFile]:
    """All image files under the class folders, in a fixed order."""
    unknown = sorted(set(_list_classes(folder)) - set(names))
    if unknown:
        raise ValueError(
            f"{folder} has class {unknown[0]!r}, which has no training images: "
            "remove that class, or add training images"
        )
    return [file for label, name in enumerate(names) for file in _class_files(folder / name, label)]


def _class_files(folder: Path, label: int) -> Iterator[ImageFile]:
    for path in sorted(folder.rglob("*")):
        if is_image(path):
            yield ImageFile(str(path), partial(_open_path, path), label)


def _open_path(path: Path) -> IO[bytes]:
    return path.open("rb")


def read_source(
    train_files: Sequence[ImageFile],
    test_files: Sequence[ImageFile],
    names: tuple[str, ...],
    image_size: int | None,
    show_progress: bool,
    split_by: str,
) -> Source:
    """Read all files at one size; without test files, a fifth of the training images is held out."""
    sizes = header_sizes([*train_files, *test_files])
    size = image_size or common_size(sizes)
    train, skipped = read_files(train_files, names, size, show_progress)
    if not test_files:
        split_by = "a fifth of each class held out"
        return Source(*hold_out(train, names, HELD_OUT), names, skipped, split_by, describe_sizes(sizes))
    test, more = read_files(test_files, names, size, show_progress, every_class=False)
    return Source(train, test, names, skipped + more, split_by, describe_sizes(sizes))


def header_sizes(files: Sequence[ImageFile]) -> set[tuple[int, int]]:
    """All widths and heights of the files, from their headers."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return {size for size in pool.map(_header_size, files) if size}


def common_size(sizes: set[tuple[int, int]]) -> int:
    """Side of the images if all files are square, small and of the same size; else the default."""
    width, height = next(iter(sizes)) if len(sizes) == 1 else (0, 0)
    return width if 0 < width == height <= LARGEST_OWN_SIZE else DEFAULT_SIZE


def describe_sizes(sizes: set[tuple[int, int]]) -> str:
    """The size of the files, or the smallest and the largest by area: 640 x 480 to 4000 x 3000."""
    if not sizes:
        return ""
    ends = [
        f"{width} x {height}" for width, height in sorted(sizes, key=lambda size: (size[0] * size[1], size))
    ]
    return ends[0] if len(ends) == 1 else f"{ends[0]} to {ends[-1]}"


def _header_size(file: ImageFile) -> tuple[int, int] | None:
    try:
        with file.open() as stream, Image.open(stream) as image:
            return image.size
    except Exception:  # read_files reports it
        return None


def read_files(
    files: Sequence[ImageFile],
    names: Sequence[str],
    size: int,
    show_progress: bool,
    *,
    every_class: bool = True,
) -> tuple[Split, tuple[str, ...]]:
    """Read the files as one split; also returns a message for each file that could not be read.

    Args:
        every_class: raise an error if a class has no readable image.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow releases the GIL while it decodes
        results = pool.map(partial(_try_image, size=size), files)
        console = Console(stderr=True)
        found = list(track(results, "reading images", len(files), console=console, disable=not show_progress))
    pixels = [image for image in found if isinstance(image, Tensor)]
    read = [file for file, image in zip(files, found, strict=True) if isinstance(image, Tensor)]
    labels = [file.label for file in read]
    skipped = tuple(reason for reason in found if isinstance(reason, str))
    if every_class:
        _check_every_class(labels, names, skipped, files)
    elif not labels:
        raise ValueError(f"none of the {len(files)} test images can be read, first {skipped[0]}")
    return Split(torch.stack(pixels), torch.tensor(labels), tuple(file.name for file in read)), skipped


def _check_every_class(
    labels: Sequence[int], names: Sequence[str], skipped: Sequence[str], files: Sequence[ImageFile]
) -> None:
    empty = sorted(set(range(len(names))) - set(labels))
    if empty:
        bad = (
            f" ({len(skipped)} of {len(files)} files could not be read, first {skipped[0]})"
            if skipped
            else ""
        )
        raise ValueError(
            f"class {names[empty[0]]!r} has no readable image{bad}: add images to it, or remove the class"
        )


def _try_image(file: ImageFile, size: int) -> Tensor | str:
    try:
        with file.open() as stream, Image.open(stream) as image:
            return to_square(image, size)
    except Exception as error:  # a broken file can raise nearly anything and must not stop the others
        return f"{file.name}: {str(error) or type(error).__name__}"


def to_square(image: Image.Image, size: int) -> Tensor:
    """(3, size, size) uint8: rotated according to EXIF, converted to RGB, centre-cropped and resized.

    Transparent pixels become white, 16-bit grey keeps its upper 8 bits, and of an animation the first frame
    is read.
    """
    rgb = to_rgb(ImageOps.exif_transpose(image))
    if rgb.size != (size, size):
        rgb = ImageOps.fit(rgb, (size, size), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(rgb)).permute(2, 0, 1).contiguous()


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image of any Pillow mode to RGB."""
    if image.mode == "F":
        raise ValueError("floating-point pixels have no known range: save the image with 8 bits per channel")
    if image.mode.startswith("I"):  # convert("RGB") would clip 16-bit values at 255
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")
