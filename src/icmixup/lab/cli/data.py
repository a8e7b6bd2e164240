"""icmixup data: list datasets, download one, check one, or clear the cache; and loading with warnings for
the other commands."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro import conf

from icmixup._install import install_hint
from icmixup.lab.cli.pretrained import is_features
from icmixup.lab.cli.shared import Flag, data_folder
from icmixup.lab.cli.terminal import count, is_first_rank, print_note, print_rows

if TYPE_CHECKING:
    from icmixup.lab.datasets import Dataset
    from icmixup.lab.training.recipe import Recipe

SUMMARY = "List datasets, download one, check one, or show and clear the cache of decoded photos."
HELP = f"""{SUMMARY}

  icmixup data list
  icmixup data get cifar100
  icmixup data check path/to/images
  icmixup data cache --clear

Photos larger than 64 pixels are decoded once and kept in the folder cache of --data-dir. The environment
variable ICMIXUP_CACHE sets another folder, and ICMIXUP_CACHE_GB its largest size (50 by default): the least
recently used photos are deleted first."""

SHORT_BATCH = 0.25  # of the batch size: an incomplete last batch below that is worth a warning


@dataclass(frozen=True, kw_only=True)
class DataFlags:
    """List datasets, download one, check one, or show and clear the cache of decoded photos."""

    action: conf.Positional[Literal["list", "get", "check", "cache"]]
    """List all datasets, get one, check one, or show the cache of decoded photos."""
    name: conf.Positional[str | None] = None
    """digits, cifar10, cifar100, cifair10, cifair100, a folder of images, or hf:owner/name."""
    data_dir: Path = field(default_factory=data_folder)
    """Folder of datasets, also for downloads; the environment variable ICMIXUP_DATA sets the default."""
    clear: Flag = False
    """With cache: delete all decoded photos, and what interrupted commands left behind."""
    debug: Flag = False
    """Show a traceback with an error."""


def run_data(flags: DataFlags) -> int:
    """List, get or check datasets; 1 if a check failed."""
    from icmixup.lab.datasets import DATASETS
    from icmixup.lab.datasets.inspect import check_dataset, describe_dataset, get_dataset

    if flags.clear and flags.action != "cache":
        raise ValueError(f"--clear deletes decoded photos: icmixup data cache --clear, not {flags.action}")
    if flags.action == "list":
        return print_listing(flags.data_dir)
    if flags.action == "cache":
        return print_cache(flags.data_dir, clear=flags.clear)
    if flags.name is None:
        raise ValueError(f"icmixup data {flags.action} needs a name: {', '.join(DATASETS)}, or a folder")
    check_folder(flags.name)
    if flags.action == "get":
        print_rows(("", ""), describe_dataset(get_dataset(flags.name, flags.data_dir, show_progress=True)))
        return 0
    checks = check_dataset(flags.name, flags.data_dir, show_progress=True)
    marks = {True: "yes", False: "NO", None: "no, as published"}
    print_rows(("claim", "found", "holds"), [(c.claim, c.found, marks[c.holds]) for c in checks])
    return 1 if any(check.holds is False for check in checks) else 0


def print_listing(data_dir: Path) -> int:
    from icmixup.lab.datasets.inspect import list_datasets

    rows = [
        (entry.name, f"{entry.train:,}", f"{entry.test:,}", str(entry.classes), entry.size, entry.where)
        for entry in list_datasets(data_dir)
    ]
    others = "images in one subfolder per class, or in train/ and test/ folders of those"
    rows += [
        ("a folder", "", "", "", "any", others),
        ("hf:owner/name", "", "", "", "any", f"the Hugging Face hub: {install_hint('hub')}"),
    ]
    print_rows(("dataset", "train", "test", "classes", "image", "where"), rows)
    return 0


def print_cache(data_dir: Path, *, clear: bool) -> int:
    """Print the sets of decoded photos and their sizes; with `clear`, delete them."""
    from datetime import datetime

    from icmixup.lab.datasets.cache import cache_folder, cache_limit, clear_cache, list_entries

    folder = cache_folder(data_dir)
    if clear:
        entries, size = clear_cache(folder)
        print(f"deleted {count(entries, 'set')} of decoded photos, {size / 1e9:.2f} GB, from {folder}")
        return 0
    found = list_entries(folder)
    rows = [
        (
            entry.path.name,
            f"{entry.photos:,}",
            str(entry.short_side),
            f"{entry.bytes / 1e9:.2f}",
            f"{datetime.fromtimestamp(entry.used):%Y-%m-%d %H:%M}",
        )
        for entry in found
    ]
    print_rows(("decoded photos", "number", "short side", "GB", "last used"), rows)
    total = sum(entry.bytes for entry in found) / 1e9
    print(f"{total:.2f} of at most {cache_limit() / 1e9:g} GB in {folder}")
    return 0


def settle_image_size(recipe: Recipe, data_dir: Path, device: str | None) -> Recipe:
    """The recipe with the size of its images, which is chosen and printed if none was given."""
    if recipe.image_size is not None or recipe.weights is not None:  # weights have their own size
        return recipe
    from icmixup.lab.datasets import choose_image_size
    from icmixup.lab.training.ranks import pick_device

    check_folder(recipe.dataset)
    on_gpu = pick_device(device).type == "cuda"
    size = choose_image_size(recipe.dataset, data_dir, on_gpu=on_gpu)
    if size is not None:
        print_note(
            f"images of {size} x {size} pixels, chosen from the files and the device; see --image-size"
        )
    return dataclasses.replace(recipe, image_size=size)


def settle_augmentation(recipe: Recipe, data: Dataset, name: str, given: Collection[str]) -> Recipe:
    """The recipe with the augmentation of photos if its images are photos, which is printed.

    Args:
        name: of the recipe that the flags started from.
        given: fields whose flags were given, which stay as they are. --padding, and --random-resized-crop 0,
            keep the augmentation of the named recipe.
    """
    from icmixup.lab.comparison.overview import describe_augmentation
    from icmixup.lab.training.recipe import PHOTO_AUGMENTATION, PHOTO_RECIPES

    no_crop = "random_resized_crop" in given and recipe.random_resized_crop is None
    if name not in PHOTO_RECIPES or "padding" in given or no_crop or not is_photos(data):
        return recipe
    chosen = {field: value for field, value in PHOTO_AUGMENTATION.items() if field not in given}
    recipe = dataclasses.replace(recipe, **chosen)
    print_note(
        f"photos: {describe_augmentation(recipe)}; --random-resized-crop 0 for the augmentation of small "
        f"images in the recipe {name}"
    )
    return recipe


def settle_batch_size(recipe: Recipe, images: int, given: Collection[str]) -> Recipe:
    """A smaller batch than the recipe's if there are fewer images than that; says so.

    Args:
        images: to train on.
        given: fields whose flags were given; a batch size that was given stays.
    """
    from icmixup.lab.training.recipe import fit_batch_size

    smaller = recipe if "batch_size" in given else fit_batch_size(recipe, images)
    if smaller.batch_size != recipe.batch_size:
        print_note(
            f"batches of {count(smaller.batch_size, 'image')} instead of {recipe.batch_size}: there are only "
            f"{images} to train on; pass --batch-size to choose"
        )
    return smaller


def is_photos(data: Dataset) -> bool:
    """Whether images come from files or the hub, not from CIFAR or digits, and are not small."""
    from icmixup.lab.comparison.overview import augments
    from icmixup.lab.datasets import is_named
    from icmixup.lab.training.recipe import SMALLEST_PHOTO

    return augments(data) and not is_named(data.name) and data.train.images.shape[-1] >= SMALLEST_PHOTO


def load_data(recipe: Recipe, data_dir: Path) -> Dataset:
    """The recipe's images, with warnings about unreadable files and a very small last batch."""
    from icmixup.lab.comparison.folds import first_fold
    from icmixup.lab.training.data import load_recipe_data

    check_folder(recipe.dataset)
    data = load_recipe_data(recipe, data_dir, show_progress=sys.stderr.isatty() and is_first_rank())
    if data.skipped:
        files = count(len(data.skipped), "file")
        print_note(f"{files} could not be read and will not be used, the first is {data.skipped[0]}")
    if warning := last_batch_warning(recipe, len(first_fold(recipe, data).train)):
        print_note(warning)
    return data


def check_out_apart(dataset: str, out: Path) -> None:
    """Raise an error if the folder of runs lies among the classes of a folder of images: the next command
    would read it as a class, and figures as its images."""
    from icmixup.lab.datasets import is_named
    from icmixup.lab.datasets.folder import find_splits, is_visible

    check_folder(dataset)
    root = Path(dataset)
    if is_named(dataset) or not dataset.strip() or not root.is_dir():
        return
    for classes in find_splits(root):
        if classes is None or not out.resolve().is_relative_to(classes.resolve()):
            continue
        if all(map(is_visible, out.resolve().relative_to(classes.resolve()).parts)):
            outside = os.path.relpath(root.resolve().parent / "runs")
            raise ValueError(
                f"--out {out} is among the classes of {classes}, and would be read as one of them: use a "
                f"folder outside, for example --out {outside}"
            )


def last_batch_warning(recipe: Recipe, images: int) -> str:
    """A warning if the last batch is far too small for BatchNorm, otherwise an empty string."""
    batches, last = divmod(images, recipe.batch_size)
    if recipe.drop_last or not batches or not 0 < last < SHORT_BATCH * recipe.batch_size:
        return ""
    return (
        f"every epoch ends with a batch of {count(last, 'image')}, which can cost points of accuracy; "
        "--drop-last skips it"
    )


def check_folder(name: str) -> None:
    """Suggest a similar folder if a path does not exist; other names are checked by load_dataset."""
    from icmixup.lab.datasets import DATASETS

    if any("\udc80" <= letter <= "\udcff" for letter in name):
        raise ValueError(
            f"the path {name!a} has bytes that are not UTF-8, which results could not contain; rename the "
            "folder, or make a link to it"
        )
    path = Path(name)
    if name.startswith("hf:") or path.is_dir() or os.sep not in name or is_features(name):
        return
    if path.exists():
        raise ValueError(
            f"{name!r} is a file; pass the folder that contains one subfolder of images per class, or an "
            ".npz file of features"
        )
    beside = [entry.name for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []
    similar = [str(path.parent / found) for found in get_close_matches(path.name, beside, n=3)]
    hint = (
        f"did you mean {' or '.join(similar)}?"
        if similar
        else f"pass one of {', '.join(DATASETS)}, or another path"
    )
    raise ValueError(f"folder {name!r} does not exist; {hint}")
