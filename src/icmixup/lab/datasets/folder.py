"""Folders of image files, read as square RGB tensors.

A file that cannot be read is reported and skipped; it is an error only if its class has no readable image.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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
TEST_FOLDERS = ("test", "val", "valid", "validation")
HELD_OUT = 5  # one image in five is held out if there is no test set


class ImageFile(NamedTuple):
    """A labelled image file that has not been read yet."""

    name: str
    open: Callable[[], IO[bytes]]
    label: int


def read_folder(root: Path, *, image_size: int | None = None, show_progress: bool = False) -> Source:
    """Read a folder of `class/*.png`, or one with `train/` and `test/` (or `val/`) folders of that kind.

    Without a test folder a fifth of each class is held out, always the same one. If both `test/` and `val/`
    have classes, `test/` is read.

    Args:
        image_size: side of the square images; None keeps the size of the files if all have the same one and
            it is at most 64, else it is 32.
    """
    train_root = root / "train" if _list_classes(root / "train") else root
    names = _list_classes(train_root)
    check_class_names(names, str(train_root), "make one folder per class, with images in it")
    train_files = list_files(train_root, names)
    if train_root == root:
        return read_source(train_files, [], names, image_size, show_progress)
    test_roots = [root / name for name in TEST_FOLDERS if _list_classes(root / name)]
    test_files = list_files(test_roots[0], names) if test_roots else []
    return read_source(train_files, test_files, names, image_size, show_progress)


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
        if path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file():
            yield ImageFile(str(path), partial(_open_path, path), label)


def _open_path(path: Path) -> IO[bytes]:
    return path.open("rb")


def read_source(
    train_files: Sequence[ImageFile],
    test_files: Sequence[ImageFile],
    names: tuple[str, ...],
    image_size: int | None,
    show_progress: bool,
) -> Source:
    """Read all files at one size; without test files, a fifth of the training images is held out."""
    size = image_size or common_size([*train_files, *test_files])
    train, skipped = read_files(train_files, names, size, show_progress)
    if not test_files:
        return Source(*hold_out(train, names, HELD_OUT), names, skipped)
    test, more = read_files(test_files, names, size, show_progress)
    return Source(train, test, names, skipped + more)


def common_size(files: Sequence[ImageFile]) -> int:
    """Side of the images if all files are square, small and of the same size; else the default."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        sizes = {size for size in pool.map(_header_size, files) if size}
    width, height = sizes.pop() if len(sizes) == 1 else (0, 0)
    return width if 0 < width == height <= LARGEST_OWN_SIZE else DEFAULT_SIZE


def _header_size(file: ImageFile) -> tuple[int, int] | None:
    try:
        with file.open() as stream, Image.open(stream) as image:
            return image.size
    except Exception:  # read_files reports it
        return None


def read_files(
    files: Sequence[ImageFile], names: Sequence[str], size: int, show_progress: bool
) -> tuple[Split, tuple[str, ...]]:
    """Read the files as one split; also returns a message for each file that could not be read."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow releases the GIL while it decodes
        results = pool.map(partial(_try_image, size=size), files)
        console = Console(stderr=True)
        found = list(track(results, "reading images", len(files), console=console, disable=not show_progress))
    pixels = [image for image in found if isinstance(image, Tensor)]
    read = [file for file, image in zip(files, found, strict=True) if isinstance(image, Tensor)]
    labels = [file.label for file in read]
    skipped = tuple(reason for reason in found if isinstance(reason, str))
    _check_every_class(labels, names, skipped, files)
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
