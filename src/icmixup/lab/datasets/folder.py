"""Folders of image files, read as square tensors if they are small, else as photos.

A file that cannot be read is reported and skipped; it is an error only if its class has no readable image.
"""

from __future__ import annotations

import math
import os
import statistics
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from icmixup.lab.datasets.cache import Job, decode_photos
from icmixup.lab.datasets.photos import Photos
from icmixup.lab.datasets.preprocessing import Preprocessing
from icmixup.lab.datasets.subsets import Source, Split, hold_out
from icmixup.lab.images.decode import (
    OTHER_SUFFIXES,
    SUFFIXES,
    ImageFile,
    Shape,
    decode_square,
    open_path,
    read_shape,
)
from icmixup.lab.images.parallel import PHOTOS_EACH, count_processes, map_in_parallel

LARGEST_OWN_SIZE = 64  # pixels: small images keep their size
CPU_SIZE, GPU_SIZE = 96, 224  # side of square images of photos, if none is given
SAMPLED = 500  # files whose headers are read to choose a size
# Names of split folders, in any case; the first that has classes is used.
TRAIN_FOLDERS = ("train", "training")
TEST_FOLDERS = ("test", "testing", "val", "valid", "validation")
NOT_CLASSES = ("__MACOSX", "__pycache__")  # folders that programs leave behind; hidden ones are ignored too
HELD_OUT = 5  # one image in five is held out if there is no test set


class ReadOptions(NamedTuple):
    """How image files are read."""

    cache: Path
    """Folder of decoded photos."""
    image_size: int | None = None
    """Side of the square images in pixels; None chooses it from the files and the device."""
    preprocessing: Preprocessing | None = None
    """Size, crop and interpolation of pretrained weights, which replace image_size."""
    on_gpu: bool = False
    """Whether a GPU will train on the images: then photos may be larger."""
    show_progress: bool = False


def read_folder(root: Path, options: ReadOptions) -> Source:
    """Read a folder of `class/*.png`, or one with `train/` and `test/` (or `val/`) folders of that kind.

    Split folders may also be called `training`, `testing`, `valid` or `validation`, in upper or lower case; a
    folder `train` beside folders of images is a class. Without a test folder a fifth of each class is
    held out, always the same one. If both `test/` and `val/` have classes, `test/` is read. The test set may
    lack classes.
    """
    source = read_source(list_folder(root), options)
    return source._replace(train=name_from(source.train, root), test=name_from(source.test, root))


class Listed(NamedTuple):
    """The files of a dataset, before any is decoded."""

    train: list[ImageFile]
    test: list[ImageFile]
    class_names: tuple[str, ...]
    split_by: str  # how training and test images were separated, if there are test files


def list_folder(root: Path) -> Listed:
    """The image files of a folder that `read_folder` reads."""
    train_root, test_root = find_splits(root)
    folders = _list_classes(train_root)
    check_class_names(folders, str(train_root), describe_remedy(train_root, folders))
    check_distinct(train_root, folders)
    train_files, names = list_files(train_root, folders), tuple(map(printable, folders))
    if test_root is None:
        return Listed(train_files, [], names, "")
    test_files = list_files(test_root, folders)
    if not test_files:  # images held out instead would be another test set than the one meant
        raise ValueError(
            f"{test_root} has folders of classes but no images: add test images, or remove the folder, and a "
            "fifth of the training images is held out"
        )
    return Listed(train_files, test_files, names, f"folders {train_root.name} and {test_root.name}")


def describe_remedy(root: Path, folders: Sequence[str]) -> str:
    """What to do about a folder with fewer than two classes."""
    if folders and len(_list_classes(root / folders[0])) > 1 and not has_images(root / folders[0]):
        return f"pass {root / folders[0]}, if its folders are the classes, or make one folder per class"
    return "make one folder per class, with images in it"


def find_splits(root: Path) -> tuple[Path, Path | None]:
    """The folders of training and test classes; the second is None if there is no test set.

    A split contains folders and no images of its own. If a folder beside them contains images, it is a class,
    and so is `train`; but it is an error if folders inside of `train` have the names of those beside it, or
    of those in `test`.
    """
    folders = [root / name for name in _list_classes(root)]
    splits = [folder for folder in folders if _list_classes(folder) and not has_images(folder)]
    trains, tests = (
        [folder for name in names for folder in splits if folder.name.lower() == name]
        for names in (TRAIN_FOLDERS, TEST_FOLDERS)
    )
    known = {*TRAIN_FOLDERS, *TEST_FOLDERS}
    check_no_strays([folder for folder in folders if folder.name.lower() in known])
    beside = [folder for folder in folders if folder.name.lower() not in known and has_images(folder)]
    if not trains or beside:
        check_no_split(folders, [*trains, *tests])
        check_no_images_beside(trains, tests, beside)
        check_no_split_names(folders)
        check_no_splits_inside(splits)
        return root, None
    if len(trains) > 1:
        raise ValueError(
            f"{root} has several folders of training images, {' and '.join(one.name for one in trains)}: "
            "keep one of them"
        )
    if not tests:
        check_no_test_set_of_another_name(trains[0], splits)
    return trains[0], tests[0] if tests else None


def check_no_strays(splits: Sequence[Path]) -> None:
    """Raise an error if an image lies beside the classes of a split, which would then not count as one."""
    for split in splits:
        others = {name for other in splits if other != split for name in _list_classes(other)}
        stray = next((path for path in sorted(split.iterdir()) if is_image(path)), None)
        if stray is not None and others.intersection(_list_classes(split)):
            raise ValueError(
                f"{printable(str(stray))} lies beside the folders of classes in {split.name}/: move such "
                "images into the folder of a class, or elsewhere"
            )


def check_no_split(folders: Sequence[Path], splits: Sequence[Path]) -> None:
    """Raise an error if classes lie beside a split with the same classes, which would become a class too."""
    beside = {folder.name for folder in folders if folder not in splits}
    for split in splits:
        shared = [name for name in _list_classes(split) if name in beside]
        if shared:
            raise ValueError(
                f"{split.parent} has classes such as {shared[0]!r} beside {split.name}/, which has folders "
                f"of the same names: move the classes into {split.parent / 'train'}, or {split.name}/ "
                "elsewhere"
            )


def check_no_images_beside(trains: Sequence[Path], tests: Sequence[Path], beside: Sequence[Path]) -> None:
    """Raise an error if two splits of the same classes would become classes, because of images beside."""
    for train in trains:
        test = next((one for one in tests if set(_list_classes(one)) & set(_list_classes(train))), None)
        if test is not None:
            raise ValueError(
                f"{train.parent} has {train.name}/ and {test.name}/ with folders of the same names, and "
                f"images in {printable(beside[0].name)}/ beside them: move these images into the folders of "
                "classes, or elsewhere"
            )


def check_no_split_names(folders: Sequence[Path]) -> None:
    """Raise an error if two classes are named like splits, such as seg_train and seg_test: a network would
    learn which split an image is from."""
    known = {folder.name.lower(): folder for folder in folders}
    for name, folder in known.items():
        partners = (
            name.replace(train, test) for train in TRAIN_FOLDERS if train in name for test in TEST_FOLDERS
        )
        partner = next((known[other] for other in partners if other in known), None)
        if partner is not None:
            raise ValueError(
                f"{folder.parent} has the folders {printable(folder.name)!r} and "
                f"{printable(partner.name)!r}, which would be classes: if they are training and test images, "
                "name them train and test, with one folder per class in each"
            )


def check_no_splits_inside(folders: Sequence[Path]) -> None:
    """Raise an error if a class has a training and a test folder, whose images would be mixed."""
    for folder in folders:
        inside = {name.lower(): name for name in _list_classes(folder)}
        train = next((inside[name] for name in TRAIN_FOLDERS if name in inside), None)
        test = next((inside[name] for name in TEST_FOLDERS if name in inside), None)
        if train is not None and test is not None:
            raise ValueError(
                f"{printable(str(folder))} would be a class, but has {train}/ and {test}/: pass it if it is "
                f"the dataset; if it is a class, the splits come first, {train}/{printable(folder.name)} and "
                f"{test}/{printable(folder.name)}"
            )


def check_no_test_set_of_another_name(train: Path, splits: Sequence[Path]) -> None:
    """Raise an error if a folder beside the training images has the same classes: it would be ignored, and
    training images would be held out in its place."""
    classes = set(_list_classes(train))
    for other in splits:
        if other != train and classes.intersection(_list_classes(other)):
            raise ValueError(
                f"{printable(str(other))} has folders of the same names as {train.name}/, but only a folder "
                f"called {', '.join(TEST_FOLDERS[:-1])} or {TEST_FOLDERS[-1]} is read as the test set: "
                "name it test, or move it elsewhere"
            )


def has_images(folder: Path) -> bool:
    """Whether a folder directly contains image files."""
    return any(is_image(path) for path in folder.iterdir())


def is_image(path: Path) -> bool:
    """Whether a path is to be read as an image; a broken link and a file in a format that is not read are, so
    that they are reported as unreadable."""
    named = path.suffix.lower() in SUFFIXES | OTHER_SUFFIXES and not path.name.startswith(".")
    return named and (path.is_file() or (path.is_symlink() and not path.exists()))


def name_from(split: Split, root: Path) -> Split:
    """The split with file names relative to the dataset's folder."""
    prefix = Path(printable(str(root)))
    names = tuple(Path(name).relative_to(prefix).as_posix() for name in split.file_names)
    return replace(split, file_names=names)


def printable(name: str) -> str:
    r"""A name with bytes that are not UTF-8, as old archives have them, written as \xff: such a name could
    not be printed or stored."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _list_classes(folder: Path) -> tuple[str, ...]:
    """Names of the class folders, sorted."""
    if not folder.is_dir():
        return ()
    found = (entry.name for entry in folder.iterdir() if entry.is_dir())
    return tuple(sorted(name for name in found if is_visible(name)))


def is_visible(name: str) -> bool:
    """Whether a folder of this name may contain images of the user."""
    return not name.startswith(".") and name not in NOT_CLASSES


def check_class_names(names: Sequence[str], where: str, remedy: str) -> None:
    """Raise an error if there are fewer than two classes."""
    if len(names) < 2:
        found = f"one class, {names[0]!r}" if names else "no class"
        raise ValueError(f"{where} has {found}, expected at least two: {remedy}")


def check_distinct(folder: Path, names: Sequence[str]) -> None:
    """Raise an error if two classes differ only in the form of accents: one class would be two."""
    known: dict[str, str] = {}
    for name in names:
        same = known.setdefault(unicodedata.normalize("NFC", name), name)
        if same != name:
            raise ValueError(
                f"{folder} has the classes {same!a} and {name!a}, which look the same: move the images of "
                "one into the folder of the other, or rename it"
            )


def list_files(folder: Path, names: Sequence[str]) -> list[ImageFile]:
    """All image files under the class folders, in a fixed order."""
    unknown = sorted(set(_list_classes(folder)) - set(names))
    if unknown:
        check_spelling(folder, unknown[0], names)
        raise ValueError(
            f"{folder} has class {unknown[0]!r}, which has no training images: "
            "remove that class, or add training images"
        )
    return [file for label, name in enumerate(names) for file in _class_files(folder / name, label)]


def check_spelling(folder: Path, unknown: str, names: Sequence[str]) -> None:
    """Raise an error if a class differs from a training class only in case or in the form of accents, which
    archives from macOS store as characters of their own: both names look the same."""
    same = next((name for name in names if plain_name(name) == plain_name(unknown)), None)
    if same is not None:
        raise ValueError(
            f"{folder} has class {unknown!a}, but the class of the training images is {same!a}: give both "
            "the same name, in case and in Unicode form"
        )


def plain_name(name: str) -> str:
    """A name in lower case, with composed accents."""
    return unicodedata.normalize("NFC", name).casefold()


def _class_files(folder: Path, label: int) -> Iterator[ImageFile]:
    for path in find_images(folder):
        yield ImageFile(printable(str(path)), partial(open_path, path), label, path)


def find_images(folder: Path) -> list[Path]:
    """All image files in a folder and the folders inside of it, sorted; none if it does not exist.

    Links to folders are followed, each folder once, but not a link to a folder around this one, which
    contains the images of other classes as well.
    """
    if not folder.is_dir():
        return []
    around = {str(parent) for parent in folder.resolve().parents}
    seen: set[str] = set()
    found: list[Path] = []
    for root, folders, names in os.walk(folder, followlinks=True, onerror=_raise):
        place = os.path.realpath(root)
        if place in seen or place in around:
            folders.clear()
            continue
        seen.add(place)
        folders[:] = filter(is_visible, folders)
        found += [path for path in (Path(root, name) for name in names) if is_image(path)]
    return sorted(found)


def _raise(error: OSError) -> None:
    raise error


def read_source(listed: Listed, options: ReadOptions) -> Source:
    """Read all files at one size; without test files, a fifth of the training images is held out."""
    files = [*listed.train, *listed.test]
    images, failures = read_images(files, options)
    skipped = [f"{file.name}: {why}" for file, why in zip(files, failures, strict=True) if why is not None]
    bounds = (0, len(listed.train), len(files))
    train, test = (_make_split(images, files, failures, range(*part)) for part in (bounds[:2], bounds[1:]))
    _check_every_class(train, listed, failures)
    split_by = listed.split_by
    if not listed.test:
        train, test = hold_out(train, listed.class_names, HELD_OUT)
        split_by = "a fifth of each class held out"
    elif not len(test):
        raise ValueError(
            f"none of the {len(listed.test)} test images can be read, first {skipped[-len(listed.test)]}"
        )
    sizes = describe_sizes(sample_shapes(files))
    return Source(train, test, listed.class_names, tuple(skipped), split_by, sizes)


def _make_split(
    images: Tensor | Photos, files: Sequence[ImageFile], failures: Sequence[str | None], part: range
) -> Split:
    """The readable images of some of the files."""
    rows = [row for row in part if failures[row] is None]
    labels = torch.tensor([files[row].label for row in rows], dtype=torch.int64)
    chosen = images[torch.tensor(rows, dtype=torch.int64)]
    return Split(chosen, labels, tuple(files[row].name for row in rows))


def describe_sizes(shapes: Sequence[Shape]) -> str:
    """Width and height of the files, or the smallest and the largest by area: 640 x 480 to 4000 x 3000."""
    if not shapes:
        return ""
    ordered = sorted(shapes, key=lambda shape: (shape.height * shape.width, shape.width, shape.height))
    ends = [f"{shape.width} x {shape.height}" for shape in (ordered[0], ordered[-1])]
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def read_images(
    files: Sequence[ImageFile], options: ReadOptions
) -> tuple[Tensor | Photos, Sequence[str | None]]:
    """Images of all files, and why some could not be read (their rows are arbitrary).

    Up to 64 pixels they are one tensor of centre crops. Larger ones are photos with their aspect ratio.
    """
    prepared = options.preprocessing or choose_preprocessing(files, options)
    if options.preprocessing is None and prepared.image_size <= LARGEST_OWN_SIZE:
        return _read_squares(files, prepared.image_size, options.show_progress)
    job = Job(files, prepared.resize_size, prepared.interpolation, options.show_progress)
    store, failures = decode_photos(job, options.cache)
    photos = Photos(store, torch.arange(len(files)), prepared.image_size, prepared.interpolation)
    return photos, failures


def choose_preprocessing(files: Sequence[ImageFile], options: ReadOptions) -> Preprocessing:
    """The size of the images as given or as it suits the files and the device.

    The resized short side is 8/7 of the image, as is usual for photos, unless files are too small for that.
    """
    typical = typical_side(sample_shapes(files))
    size = options.image_size or choose_size(typical, on_gpu=options.on_gpu)
    return Preprocessing(image_size=size, crop_pct=0.875 if typical * 0.875 >= size else 1.0)


def choose_size(typical: int, *, on_gpu: bool) -> int:
    """Side of the square images for photos whose short side is `typical` pixels.

    Small images keep their size. Photos get 224 pixels on a GPU and 96 without one, where training at 224
    takes too long; at most what they have, in multiples of 32.
    """
    if typical <= LARGEST_OWN_SIZE:
        return typical
    largest = GPU_SIZE if on_gpu else CPU_SIZE
    return max(LARGEST_OWN_SIZE, min(largest, typical // 32 * 32))


def typical_side(shapes: Sequence[Shape]) -> int:
    """The median of the short sides; 1 if no file could be read, which is reported later."""
    return statistics.median_low([min(shape) for shape in shapes]) if shapes else 1


def sample_shapes(files: Sequence[ImageFile]) -> list[Shape]:
    """Sizes of up to SAMPLED files, evenly spaced, without those that cannot be read."""
    step = math.ceil(len(files) / SAMPLED)
    found = map_in_parallel(read_shape, files[:: max(1, step)], "", show_progress=False)
    return [shape for shape in found if isinstance(shape, Shape)]


def _read_squares(
    files: Sequence[ImageFile], size: int, show_progress: bool
) -> tuple[Tensor, Sequence[str | None]]:
    decode = partial(decode_square, size=size)
    processes = count_processes(files, PHOTOS_EACH)
    found = map_in_parallel(decode, files, "reading images", show_progress, processes=processes)
    failures = [image if isinstance(image, str) else None for image in found]
    blank = np.zeros((3, size, size), dtype=np.uint8)
    squares = np.stack([blank if isinstance(image, str) else image for image in found])
    return torch.from_numpy(squares), failures


def _check_every_class(train: Split, listed: Listed, failures: Sequence[str | None]) -> None:
    empty = sorted(set(range(len(listed.class_names))) - set(train.labels.tolist()))
    if empty:
        failed = [f"{file.name}: {why}" for file, why in zip(listed.train, failures, strict=False) if why]
        bad = (
            f" ({len(failed)} of {len(listed.train)} files could not be read, first {failed[0]})"
            if failed
            else ""
        )
        name = listed.class_names[empty[0]]
        raise ValueError(f"class {name!r} has no readable image{bad}: add images to it, or remove the class")
