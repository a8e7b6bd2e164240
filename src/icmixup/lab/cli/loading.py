"""The recipe and the data of compare and train: what depends on the data is chosen, and printed."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Collection
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from icmixup.lab.cli.pretrained import is_features, prepare_data, resolve_recipe
from icmixup.lab.cli.terminal import is_first_rank, print_note
from icmixup.lab.training.recipe import LINEAR, Recipe
from icmixup.lab.wording import count

if TYPE_CHECKING:
    from icmixup.lab.datasets import Dataset
    from icmixup.lab.training.execution import Execution

SHORT_BATCH = 0.25  # of the batch size: an incomplete last batch below that is worth a warning


def count_images_of_a_run(recipe: Recipe, data: Dataset) -> int:
    """Number of training images: of all, or of the first fold of cross-validation."""
    from icmixup.lab.comparison.folds import first_fold

    return len(first_fold(recipe, data).train)


def load_and_settle(
    recipe: Recipe,
    name: str,
    given: Collection[str],
    methods: tuple[str, ...],
    execution: Execution,
    count_images: Callable[[Recipe, Dataset], int] = count_images_of_a_run,
) -> tuple[Recipe, Execution]:
    """The recipe with what depends on weights, images and device filled in, and the execution with its data.

    Everything that can be refused is refused before it is waited for, and before a run has a folder.

    Args:
        recipe: as the flags give it.
        name: of the recipe that the flags started from.
        given: fields whose flags were given, which stay as they are.
        methods: that are named; none if they are chosen later.
        count_images: training images of the smallest run, which a batch has to fit.
    """
    from icmixup.lab.comparison.folds import first_fold
    from icmixup.lab.models import find_builder
    from icmixup.lab.training.features import check_feature_methods
    from icmixup.lab.training.loop import check_sizes
    from icmixup.lab.training.ranks import pick_device

    recipe = resolve_recipe(recipe, name)
    pick_device(execution.device)
    if recipe.model != LINEAR:
        find_builder(recipe.model)
    check_out_apart(recipe.dataset, execution.out)
    if recipe.train == "head":
        check_feature_methods(methods)
    recipe = settle_image_size(recipe, execution.data_dir, execution.device)
    data = load_data(recipe, execution.data_dir)
    recipe = settle_augmentation(recipe, data, name, given)
    recipe = settle_batch_size(recipe, count_images(recipe, data), given)
    check_sizes(recipe, first_fold(recipe, data))
    recipe, data = prepare_data(recipe, data, execution)
    return recipe, dataclasses.replace(execution, dataset=data)


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
    from icmixup.lab.training.data import load_recipe_data

    check_folder(recipe.dataset)
    data = load_recipe_data(recipe, data_dir, show_progress=sys.stderr.isatty() and is_first_rank())
    if data.skipped:
        files = count(len(data.skipped), "file")
        print_note(f"{files} could not be read and will not be used, the first is {data.skipped[0]}")
    if warning := last_batch_warning(recipe, count_images_of_a_run(recipe, data)):
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
