"""Image files of any kind as square RGB tensors, and folders of them.

A file that cannot be read is named and left out; an error is raised only when a class has none left.
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
HELD_OUT = 5  # one image in five is held out where no test set is given


class ImageFile(NamedTuple):
    """One labelled image that has not been read yet."""

    name: str
    open: Callable[[], IO[bytes]]
    label: int


def read_folder(root: Path, *, image_size: int | None = None, show_progress: bool = False) -> Source:
    """A folder of `class/*.png`, or `train/` and `test/` (or `val/`) of those.

    Without a test folder a fifth of each class is held out, the same fifth always. Where both `test/` and
    `val/` hold classes, `test/` is read.

    Args:
        image_size: side of the square images; None takes the files' own where all agree and it is at most 64,
            else 32.
    """
    train_root = root / "train" if _class_names(root / "train") else root
    names = _class_names(train_root)
    _need_two_classes(names, train_root)
    train_files = list_files(train_root, names)
    if train_root == root:
        return read_source(train_files, [], names, image_size, show_progress)
    test_roots = [root / name for name in TEST_FOLDERS if _class_names(root / name)]
    test_files = list_files(test_roots[0], names) if test_roots else []
    return read_source(train_files, test_files, names, image_size, show_progress)


def _class_names(folder: Path) -> tuple[str, ...]:
    """Names of the class folders, sorted; hidden folders and a Mac's shadow folder are none."""
    if not folder.is_dir():
        return ()
    found = (entry.name for entry in folder.iterdir() if entry.is_dir())
    return tuple(sorted(name for name in found if not name.startswith((".", "__"))))


def _need_two_classes(names: Sequence[str], where: Path | str) -> None:
    if len(names) < 2:
        found = f"one class, {names[0]!r}" if names else "no class"
        raise ValueError(
            f"{where} has {found}; two are the least: make one folder a class, with images in each"
        )


def list_files(folder: Path, names: Sequence[str]) -> list[ImageFile]:
    """Every image file under the class folders, in a fixed order."""
    strange = sorted(set(_class_names(folder)) - set(names))
    if strange:
        raise ValueError(
            f"{folder} has class {strange[0]!r}, which the train images lack: remove it or train on it"
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
    """Read all files at one size; where there are no test files, hold some of the train images out."""
    size = image_size or common_size([*train_files, *test_files])
    train, skipped = read_files(train_files, names, size, show_progress)
    if not test_files:
        return Source(*hold_out(train, names, HELD_OUT), names, skipped)
    test, more = read_files(test_files, names, size, show_progress)
    return Source(train, test, names, skipped + more)


def common_size(files: Sequence[ImageFile]) -> int:
    """The side that all files share, if they are square and small; else the default."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        sizes = {size for size in pool.map(_header_size, files) if size}
    width, height = sizes.pop() if len(sizes) == 1 else (0, 0)
    return width if 0 < width == height <= LARGEST_OWN_SIZE else DEFAULT_SIZE


def _header_size(file: ImageFile) -> tuple[int, int] | None:
    try:
        with file.open() as stream, Image.open(stream) as image:
            return image.size
    except Exception:  # it is named when it is read in full
        return None


def read_files(
    files: Sequence[ImageFile], names: Sequence[str], size: int, show_progress: bool
) -> tuple[Split, tuple[str, ...]]:
    """Read the files as one split, and say which could not be read."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow decodes outside the interpreter's lock
        waiting = pool.map(partial(_try_image, size=size), files)
        console = Console(stderr=True)
        shown = track(waiting, "reading images", len(files), console=console, disable=not show_progress)
        found = list(shown)
    pixels = [image for image in found if isinstance(image, Tensor)]
    labels = [file.label for file, image in zip(files, found, strict=True) if isinstance(image, Tensor)]
    skipped = tuple(reason for reason in found if isinstance(reason, str))
    _need_every_class(labels, names, skipped, files)
    return Split(torch.stack(pixels), torch.tensor(labels)), skipped


def _need_every_class(
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
    except (
        Exception
    ) as error:  # a bad file raises nearly anything, and must not end the reading of the others
        return f"{file.name}: {str(error) or type(error).__name__}"


def to_square(image: Image.Image, size: int) -> Tensor:
    """(3, size, size) uint8: turned as its EXIF says, RGB, its middle square scaled.

    Transparent pixels become white, 16-bit grey keeps its upper 8 bits, an animation gives its first frame.
    """
    rgb = to_rgb(ImageOps.exif_transpose(image))
    if rgb.size != (size, size):
        rgb = ImageOps.fit(rgb, (size, size), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(rgb)).permute(2, 0, 1).contiguous()


def to_rgb(image: Image.Image) -> Image.Image:
    """Any mode of Pillow's to RGB."""
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers of unknown range: save it with 8 bits")
    if image.mode.startswith("I"):  # convert("RGB") would clip 16-bit values at 255
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")
