"""What a comparison trains on what, before it trains: one block of lines, also stored in comparison.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from icmixup.lab.comparison.correction import FIRST_LOOK
from icmixup.lab.datasets import Dataset, Examples
from icmixup.lab.datasets.duplicates import count_duplicates
from icmixup.lab.models import build_model, is_own
from icmixup.lab.sweep.progress import duration
from icmixup.lab.training.recipe import FEWEST_STEPS, METHOD_FIELDS, QUICK, RECIPES, Recipe, images_per_epoch
from icmixup.lab.wording import count, first_few
from icmixup.methods import find_method

# Two trained methods often disagree on about one test image in ten. The choice of test images alone then
# moves their difference by 1.96 sqrt(0.1 / N), which is 2 points with 1,000 images.
DISAGREEMENT = 0.1
RESOLVABLE_POINTS = 2.0
INITIAL_SHARE = 0.05  # of averaged weights, above which the initial ones show in the accuracy
IN_PYTHON = "python"  # the name of the recipe of icmixup.lab.compare
LONG_TAIL_RATIO = 2  # of the largest to the smallest class, from which on class sizes matter


@dataclass(frozen=True)
class Overview:
    """Data, training and methods of a comparison."""

    classes: int
    train_images: int
    test_images: int  # all that are tested with one seed
    split_by: str
    folds: int | None  # of cross-validation, each of which is the test set once
    smallest_class: tuple[str, int]  # name, training images
    largest_class: tuple[str, int]
    original_size: str
    training_size: str
    augmentation: str
    model: str
    parameters: int
    recipe: str
    epochs: int
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    adaptive: bool  # seeds are added until the question is settled, with --seeds auto
    where: str  # device and concurrency
    estimated_seconds: float | None  # None if unknown
    budget: str  # what --budget dropped, in words
    warnings: tuple[str, ...]
    tuning: str = ""  # trials per method and their images; "" without --tune
    class_counts: tuple[int, ...] = ()  # training images of each class
    tune_parts: int | None = None  # as --tune-parts gives it

    def lines(self) -> list[tuple[str, str]]:
        """Rows (what, value) to print."""
        images = f"{self.train_images:,} for training, {self.test_images:,} for testing ({self.split_by})"
        if self.folds is not None:
            tested = f"about {round(self.test_images / self.folds):,} of {self.test_images:,} for testing"
            images = f"{self.train_images:,} for training and {tested} in each of {self.folds} folds"
        original = self.original_size or self.training_size
        same = original == self.training_size
        at = "on" if self.training_size.endswith("features") else "at"
        fewest = f"{FIRST_LOOK} to " if self.adaptive and len(self.seeds) > FIRST_LOOK else ""
        most = "at most" if self.adaptive else "about"
        time = "unknown" if self.estimated_seconds is None else f"{most} {duration(self.estimated_seconds)}"
        time = "all runs are finished" if self.estimated_seconds == 0 else f"{time}, on {self.where}"
        return [
            ("images", images),
            ("classes", f"{self.classes}{self.class_sizes()}"),
            ("resolution", original if same else f"{original}, trained {at} {self.training_size}"),
            ("augmentation", self.augmentation),
            ("model", f"{self.model}, {self.parameters:,} parameters"),
            ("training", f"{count(self.epochs, 'epoch')}, recipe {self.recipe}"),
            *([("tuning", self.tuning)] if self.tuning else []),
            ("methods", f"{' '.join(self.methods)}; {fewest}{count(len(self.seeds), 'seed')} each"),
            ("time", time + (f"; the budget leaves {self.budget}" if self.budget else "")),
        ]

    def class_sizes(self) -> str:
        """The smallest and the largest class, if they differ."""
        (small, fewest), (large, most) = self.smallest_class, self.largest_class
        if fewest == most:
            return f" of {count(most, 'image')} each"
        return f"; smallest {small} ({fewest:,}), largest {large} ({most:,})"

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def describe_comparison(
    recipe: Recipe,
    data: Dataset,
    methods: Sequence[str],
    seeds: Sequence[int],
    *,
    recipe_name: str,
    where: str,
    seconds: float | None,
    adaptive: bool = False,
    budget: str = "",
    tested: int | None = None,
    tuning: str = "",
    tune_parts: int | None = None,
    measure: str = "accuracy",
) -> Overview:
    """The overview of methods x seeds on a dataset, with warnings where the data cannot answer.

    Args:
        data: of cross-validation, one fold.
        tested: images that are tested with one seed; by default those of the test set.
    """
    tested = len(data.test) if tested is None else tested
    counts = data.class_counts
    smallest, largest = int(counts.argmin()), int(counts.argmax())
    size, parameters = describe_network(recipe, data)
    return Overview(
        classes=data.num_classes,
        train_images=len(data.train),
        test_images=tested,
        split_by=data.split_by or "given",
        folds=recipe.folds,
        smallest_class=(data.class_names[smallest], int(counts[smallest])),
        largest_class=(data.class_names[largest], int(counts[largest])),
        original_size=data.original_size,
        training_size=size,
        augmentation=describe_augmentation(recipe) if augments(data) else "none",
        model=f"{recipe.model} with a cosine classifier" if recipe.cosine_classifier else recipe.model,
        parameters=parameters,
        recipe=recipe_name if recipe.sampler == "uniform" else f"{recipe_name}, {recipe.sampler} sampling",
        epochs=recipe.epochs,
        methods=tuple(methods),
        seeds=tuple(seeds),
        adaptive=adaptive,
        where=where,
        estimated_seconds=seconds,
        budget=budget,
        warnings=(*find_warnings(recipe, data, tested, measure), *find_unused(recipe, methods, recipe_name)),
        tuning=tuning,
        class_counts=tuple(counts.tolist()),
        tune_parts=tune_parts,
    )


def describe_network(recipe: Recipe, data: Dataset) -> tuple[str, int]:
    """Size of the network's inputs, and its number of weights that are trained."""
    shape, own = tuple(data.train.images.shape[1:]), is_own(recipe.model)
    if data.is_features and not own:
        return f"{shape[0]:,} features", (shape[0] + (not recipe.cosine_classifier)) * data.num_classes
    model = build_model(
        recipe.model,
        data.num_classes,
        channels=shape[0],
        seed=0,
        image_size=shape[-1],
        cosine=recipe.cosine_classifier,
    )
    size = " x ".join(map(str, shape if own else (shape[2], shape[1])))
    return size, sum(weight.numel() for weight in model.parameters())


def augments(data: Dataset) -> bool:
    """Whether the recipe's augmentation is applied: to images, not to a torch Dataset with its own."""
    return data.train.images.dtype == torch.uint8 and not isinstance(data.train.images, Examples)


def describe_augmentation(recipe: Recipe) -> str:
    crop = recipe.random_resized_crop
    parts = [
        f"random resized crop of {crop:g} to 1 of the area" if crop is not None else "",
        f"crop after padding by {recipe.padding} ({recipe.padding_mode})"
        if recipe.padding and crop is None
        else "",
        "horizontal flip" if recipe.flip else "",
        f"rotation up to {recipe.rotation:g} degrees" if recipe.rotation else "",
        "TrivialAugment" if recipe.trivial else "",
        "AutoAugment" if recipe.autoaugment else "",
        "colour jitter" if recipe.colour_jitter else "",
        "random erasing" if recipe.erasing else "",
        f"Cutout of {recipe.cutout} pixels" if recipe.cutout else "",
    ]
    return ", ".join(part for part in parts if part) or "none"


def find_warnings(
    recipe: Recipe, data: Dataset, tested: int | None = None, measure: str = "accuracy"
) -> list[str]:
    """Why the data or the recipe may not answer which method is better.

    Args:
        tested: as in describe_comparison.
    """
    tested = len(data.test) if tested is None else tested
    found = []
    sizes = torch.bincount(data.test.labels.cpu(), minlength=data.num_classes)
    spread = spread_of_classes(sizes) if measure == "balanced-accuracy" else 1.0
    points = 196 * (DISAGREEMENT * spread / tested) ** 0.5
    if points > RESOLVABLE_POINTS:
        enough = round(DISAGREEMENT * spread * 196**2)
        found.append(
            f"{tested:,} test images can hardly show a difference below {points:.1f} points (if two "
            f"methods disagree on one image in ten); {enough:,} could show 1 point"
        )
    steps = count_steps(recipe, len(data.train))
    if steps < FEWEST_STEPS:
        found.append(
            f"{count(recipe.epochs, 'epoch')} of {len(data.train):,} images: {steps} steps of the "
            f"optimizer, fewer than {FEWEST_STEPS}: methods that learn slowly look worse than they are; use "
            "more --epochs"
        )
    if average := describe_average(recipe, len(data.train)):
        found.append(average)
    missing = untested_classes(data.test.labels, data.class_names)
    if missing:
        names = first_few(missing, 5)
        found.append(f"{len(missing)} of {data.num_classes} classes have no test images: {names}")
    fewest, most = int(sizes[sizes > 0].min()), int(sizes.max())
    if most >= LONG_TAIL_RATIO * fewest and measure == "accuracy":
        found.append(
            f"classes have {fewest} to {count(most, 'test image')}, and accuracy counts images: what helps "
            "rare classes looks worse than it is; --measure balanced-accuracy compares averages over classes"
        )
    if alike := similar_names(data.class_names):
        found.append(
            f"classes {' and '.join(map(repr, alike))} differ only in case or spaces; if they are one class, "
            "merge their folders"
        )
    return [*found, *describe_duplicates(data, folds=recipe.folds is not None)]


def count_steps(recipe: Recipe, num_images: int) -> int:
    """Steps of the optimizer in a run."""
    return recipe.epochs * -(-images_per_epoch(recipe, num_images) // recipe.batch_size)


def describe_average(recipe: Recipe, num_images: int) -> str:
    """A warning if the average of the weights, which is tested, still has some of the initial ones."""
    steps = count_steps(recipe, num_images)
    if recipe.ema is None or (initial := recipe.ema**steps) < INITIAL_SHARE:
        return ""
    return (
        f"--ema {recipe.ema:g} is too slow for a run of {count(steps, 'step')}: {100 * initial:.0f} % of the "
        "averaged weights, which are tested, are the initial ones; use a smaller decay"
    )


def spread_of_classes(sizes: Tensor) -> float:
    """How many times the variance of the accuracy that of the balanced accuracy is, if all images vary alike.

    It is 1 for classes of one size: an image of a small class counts more than others.

    Args:
        sizes: (C,) test images of each class.
    """
    tested = sizes[sizes > 0].double()
    return float(tested.sum() * (1 / tested).sum() / len(tested) ** 2)


def find_unused(recipe: Recipe, methods: Sequence[str], recipe_name: str) -> list[str]:
    """Warnings about settings that none of the methods uses, unless they are those of the named recipe."""
    named = RECIPES.get(recipe_name, QUICK)  # a comparison in Python starts from quick

    def changed(*fields: str) -> list[str]:
        return [field for field in fields if getattr(recipe, field) != getattr(named, field)]

    settings = {**{name: name for name in METHOD_FIELDS}, "joint": "joint"}
    settings |= {"mix_prob": "prob", "mix_off_epoch": "prob"}
    found = [
        f"--{field.replace('_', '-')} has no effect on {', '.join(methods)}"
        for field in changed(*settings)
        if not any(find_method(method).uses(settings[field]) for method in methods)
    ]
    if recipe.mix_off_epoch is not None and recipe.mix_off_epoch >= recipe.epochs:
        found.append(f"--mix-off-epoch {recipe.mix_off_epoch} has no effect on {recipe.epochs} epochs")
    if recipe.schedule == "cosine":
        found += [
            f"--{field.replace('_', '-')} has no effect with --schedule cosine; use --schedule step"
            for field in changed("lr_drops", "lr_factor")
        ]
    if recipe.optimizer == "adamw":
        found += [
            f"--{field} has no effect with --optimizer adamw; use --optimizer sgd"
            for field in changed("momentum", "nesterov")
        ]
    return [*found, *find_never_deferred(recipe, methods)]


def find_never_deferred(recipe: Recipe, methods: Sequence[str]) -> list[str]:
    """Warnings about methods whose class weights would begin after the last epoch."""
    last = (recipe.epochs - 1) / recipe.epochs
    return [
        f"{name} weighs classes from {100 * find_method(name).defer:.0f} % of training on, which none of its "
        f"{count(recipe.epochs, 'epoch')} begins at: it is trained without class weights; use more --epochs"
        for name in methods
        if find_method(name).defer > last
    ]


def similar_names(names: Sequence[str]) -> tuple[str, ...]:
    """The first names of classes that are the same but for case and spaces; none if there are no such."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault("".join(name.casefold().replace("_", " ").split()), []).append(name)
    return next((tuple(group) for group in groups.values() if len(group) > 1), ())


def describe_duplicates(data: Dataset, *, folds: bool = False) -> list[str]:
    """Warnings if test images are also training images, and if images are in several classes.

    Args:
        folds: data is one of the folds of cross-validation.
    """
    found, images = count_duplicates(data), len(data.train) + len(data.test)
    warnings = []
    if folds and found.copies:
        warnings.append(
            f"{found.copies:,} of {images:,} images are identical to another one: networks are tested on "
            "copies of images that they were trained on, and accuracies do not show what new images would "
            "get; remove the copies"
        )
    if not folds and found.leaked:
        warnings.append(
            f"{found.leaked:,} of {len(data.test):,} test images are identical to a training image: "
            "accuracies do not show what new images would get; remove them from one of the two"
        )
    if found.conflicts:
        warnings.append(
            f"{found.conflicts:,} of {images:,} images are identical to one of another class, so no network "
            "can be right about all of them; keep each in one class"
        )
    return warnings


def untested_classes(labels: Tensor, class_names: Sequence[str]) -> list[str]:
    """Names of the classes that (N,) test labels lack."""
    counts = torch.bincount(labels.cpu(), minlength=len(class_names)).tolist()
    return [name for name, images in zip(class_names, counts, strict=True) if not images]
