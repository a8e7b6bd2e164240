"""Recipe: one training run, complete and frozen, and the schedule it defines.

The defaults are the paper's paragraph "Implementation details". Importing this module does not import torch,
so that the command line can print its help and validate its flags at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from icmixup._checks import DUPLICATES, MODES, NEGATIVES, Duplicates, Mode
from icmixup.methods import Method, find_method

if TYPE_CHECKING:
    from icmixup.lab.datasets import DataSpec

Schedule = Literal["step", "cosine"]
PaddingMode = Literal["zeros", "reflect"]
Precision = Literal["auto", "float32", "bfloat16"]
Optimizer = Literal["sgd", "adamw"]
TrainedPart = Literal["all", "head"]
Sampler = Literal["uniform", "square-root", "class-balanced"]
TailDraw = Literal["seeded", "ldam"]
After = Literal["none", "adjust", "tau-norm", "crt"]
# The fields of version 0.1.0. Others count for the key of a recipe only if they differ from their default,
# which must therefore never change: run folders of older versions keep their names.
FIRST_FIELDS = (
    *("dataset", "model", "method", "seed"),
    *("fraction", "per_class", "imbalance", "data_seed", "split", "image_size"),
    *("epochs", "batch_size", "drop_last", "lr", "schedule", "lr_drops", "lr_factor", "warmup_epochs"),
    *("momentum", "nesterov", "weight_decay", "clip_norm", "ema"),
    *("padding", "padding_mode", "flip", "rotation", "trivial"),
    *("alpha", "mode", "duplicates", "negatives", "temperature", "label_smoothing", "kappa", "tau"),
    *("joint", "mix_prob", "mix_off_epoch", "precision", "compile", "graph", "eval_every"),
)
# Fields of a recipe that replace its method's own value where they are given.
METHOD_FIELDS = (
    *("alpha", "mode", "duplicates", "negatives", "temperature", "label_smoothing", "kappa", "tau"),
    "adjust_tau",
)
LINEAR = "linear"  # the model of a comparison on features from a file, which is not a flag


class Range(NamedTuple):
    """The values that a number may take: from `low` to `high`, without those ends that are open."""

    low: float
    high: float
    meaning: str
    open_low: bool = False
    open_high: bool = False

    def contains(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        return above and (value < self.high if self.open_high else value <= self.high)


def positive(meaning: str) -> Range:
    return Range(0, math.inf, meaning, open_low=True, open_high=True)


SEEDS = Range(0, 2**63 - 1, "a whole number from 0 to 2**63 - 1")
# Every number of a recipe: what it may be. A value that is None is the default and always allowed.
RANGES = {
    "seed": SEEDS,
    "fraction": Range(0, 1, "a share of the training images, above 0 and up to 1", open_low=True),
    "per_class": Range(1, 10**9, "a number of images, 1 or more"),
    "imbalance": positive("a positive number, for example 0.01 or 100"),
    "data_seed": SEEDS,
    "split": Range(0, 10**6, "the number of a split, 0 or more"),
    "image_size": Range(1, 4096, "a number of pixels, from 1 to 4096"),
    "folds": Range(2, 10**6, "a number of folds, 2 or more"),
    "fold": Range(1, 10**6, "the number of a fold, 1 or more"),
    "epochs": Range(1, 10**6, "a number of epochs, from 1 to 1,000,000"),
    "batch_size": Range(1, 10**7, "a number of images, 1 or more"),
    "lr": positive("more than zero and finite"),
    "lr_factor": positive("a factor above 0, for example 0.2"),
    "warmup_epochs": Range(0, 10**6, "a number of epochs, 0 or more"),
    "momentum": Range(0, 1, "at least 0 and below 1, for example 0.9", open_high=True),
    "weight_decay": Range(0, math.inf, "at least 0 and finite, for example 5e-4", open_high=True),
    "clip_norm": positive("the largest norm of a gradient, above 0, for example 1"),
    "ema": Range(0, 1, "a decay, above 0 and below 1, for example 0.999", open_low=True, open_high=True),
    "padding": Range(0, 4096, "a number of pixels, 0 or more"),
    "rotation": Range(0, 180, "an angle from 0 to 180 degrees"),
    "alpha": positive("more than zero and finite"),
    "temperature": positive("more than zero and finite"),
    "label_smoothing": Range(0, 1, "a share, at least 0 and below 1, for example 0.1", open_high=True),
    "kappa": positive("more than zero and finite, for example 3"),
    "tau": Range(0, 1, "a share of the pixels, from 0 to 1"),
    "mix_prob": Range(0, 1, "a probability, from 0 to 1"),
    "mix_off_epoch": Range(0, 10**6, "the number of an epoch, 0 or more"),
    "eval_every": Range(1, 10**6, "a number of epochs, 1 or more"),
    "min_steps": Range(0, 10**9, "a number of steps, 0 or more"),
    "lr_batch": Range(1, 10**7, "a batch size, for example 128"),
    "layer_decay": Range(0, 1, "a factor, above 0 and up to 1", open_low=True),
    "warmup_fraction": Range(0, 1, "a share of the epochs, at least 0 and below 1", open_high=True),
    "random_resized_crop": Range(0, 1, "a share of the area, above 0 and up to 1", open_low=True),
    "colour_jitter": Range(0, 1, "a share, from 0 to 1"),
    "erasing": Range(0, 1, "a probability, from 0 to 1"),
    "held_out": Range(0, 1, "a share of the training images, at least 0 and below 1", open_high=True),
    "adjust_tau": Range(0, math.inf, "the strength of logit adjustment, 0 or more", open_high=True),
    "cutout": Range(0, 4096, "the side of a square in pixels, 0 for none"),
    "after_tau": Range(0, math.inf, "0 or more and finite", open_high=True),
    "after_epochs": Range(1, 10**6, "a number of epochs, from 1 to 1,000,000"),
}
CHOICES: dict[str, tuple[object, ...]] = {
    "schedule": get_args(Schedule),
    "padding_mode": get_args(PaddingMode),
    "precision": get_args(Precision),
    "optimizer": get_args(Optimizer),
    "train": get_args(TrainedPart),
    "sampler": get_args(Sampler),
    "tail_draw": get_args(TailDraw),
    "after": get_args(After),
    "mode": MODES,
    "duplicates": DUPLICATES,
    "negatives": NEGATIVES,
}


def check_field(name: str, annotation: str, value: object) -> None:
    """Raise a ValueError unless a field of a recipe has the type of its annotation and an allowed value."""
    if value is None and "None" in annotation:
        return
    if name in CHOICES:
        if value not in CHOICES[name]:
            allowed = ", ".join(repr(choice) for choice in CHOICES[name])
            raise ValueError(f"{name} must be one of {allowed}, got {value!r}")
    elif name in RANGES:
        whole = annotation.startswith("int")
        number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not number or not RANGES[name].contains(value):  # type: ignore[arg-type]
            raise ValueError(f"{name} must be {RANGES[name].meaning}, got {value!r}")
    elif annotation == "bool" and not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    elif annotation == "str" and (not isinstance(value, str) or "\0" in value):
        raise ValueError(f"{name} must be a name, got {value!r}")
    elif annotation.startswith("tuple[int") and not is_whole_numbers(value):
        raise ValueError(f"{name} must be whole numbers, got {value!r}")


def is_whole_numbers(value: object) -> bool:
    return isinstance(value, tuple) and all(type(item) is int for item in value)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained on what."""

    dataset: str = "cifar100"
    """digits, cifar10, cifar100, cifair10, cifair100, a folder of images, hf:owner/name, or features.npz."""
    model: str = "resnet34"
    """resnet18, resnet34, resnet50, resnet32, resnet32x4, wrn16-8, small-cnn, any timm model, or
    local-dir:FOLDER."""
    method: str = "ic-mixup"
    """A row of the table of methods: erm, mixup, ic-mixup, ..."""
    seed: int = 0
    """Seed of initial weights, order of images, augmentation and mixing."""


@dataclass(frozen=True, kw_only=True)
class Subset:
    """Which training images are used. The test set is always whole."""

    fraction: float = 1.0
    """Fraction of the training images of each class to use."""
    per_class: int | None = None
    """Training images per class (with --imbalance, of the largest), at most those of the smallest class; all
    of them by default."""
    imbalance: float = 1.0
    """Size of the smallest class relative to the largest: 0.01 (or 100) makes a long tail."""
    data_seed: int = 0
    """Seed of the choice of training images; the same for runs that are compared."""
    split: int | None = None
    """Split of the DEIC benchmark on ciFAIR: train on 50 images of each class, from number 50 SPLIT on in the
    order of the files."""
    image_size: int | None = None
    """Side of the square images in pixels; by default chosen from the files and the device."""
    held_out: float = 0.0
    """Share of the chosen training images of each class that is not trained on: `icmixup retrain` chooses tau
    on them. Classes with one image keep it."""
    tail_draw: TailDraw = "seeded"
    """Which images of a long tail are kept: drawn from --data-seed, or as in the code of LDAM (the same
    images, for CIFAR in the publisher's order and --data-seed 0)."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Pretrained weights, and which part of the network is trained."""

    weights: str | None = None
    """File of pretrained weights (safetensors, or a state dict of torch), or "pretrained" for timm's own;
    random by default. The head is replaced, and images are prepared as for these weights."""
    train: TrainedPart = "all"
    """Train all weights, or only a linear head on frozen features. Features are computed once, without
    augmentation, and methods mix the features."""


@dataclass(frozen=True, kw_only=True)
class CrossValidation:
    """One fold of cross-validation, filled in by `compare --folds`."""

    folds: int | None = None
    """Number of folds of all images, training and test, drawn anew for every seed."""
    fold: int | None = None
    """The fold that this run is tested on, from 1; it is trained on the others."""


@dataclass(frozen=True, kw_only=True)
class Fingerprints:
    """What files contained, filled in by the commands: a run on other contents is another run."""

    weights_digest: str | None = None
    """First digits of the SHA-256 of the weights file."""


@dataclass(frozen=True, kw_only=True)
class Afterwards:
    """What was done with the classifier of a trained run, filled in by `icmixup retrain`."""

    after: After = "none"
    """Logit adjustment, tau-normalisation, or re-training on frozen features."""
    after_tau: float | None = None
    """Strength of the first two; None if it was chosen on held-out images."""
    after_epochs: int | None = None
    """Epochs of re-training."""


@dataclass(frozen=True, kw_only=True)
class Optimisation:
    """How the weights are trained."""

    epochs: int = 200
    """Passes over the training images."""
    min_steps: int = 0
    """Train for more epochs if --epochs has fewer steps than this; 0 if --epochs is given. --lr-drops,
    --warmup-epochs and --mix-off-epoch move along."""
    batch_size: int = 128
    """Images per step, over all ranks."""
    sampler: Sampler = "uniform"
    """How images of an epoch are drawn: uniform, each one once; or with replacement: class-balanced, so that
    all classes are equally frequent, or square-root, in proportion to the square root of their size."""
    drop_last: bool = False
    """Skip the incomplete last batch of an epoch, whose few images distort BatchNorm just before
    evaluation."""
    optimizer: Optimizer = "sgd"
    """SGD with momentum, or AdamW."""
    lr: float = 0.1
    """Peak learning rate."""
    lr_batch: int | None = None
    """Batch size that --lr is meant for: with another one it is scaled by the square root of the ratio; not
    scaled by default."""
    layer_decay: float | None = None
    """Factor of the learning rate from each layer to the one below it, for timm models; 1 for none. The
    recipe finetune uses 0.75 for transformers."""
    schedule: Schedule = "step"
    """Learning rate schedule: steps at --lr-drops, or half a cosine down to 0."""
    lr_drops: tuple[int, ...] | None = None
    """Epochs after which the learning rate is multiplied by --lr-factor; by default after a quarter, a half
    and three quarters of the epochs."""
    lr_factor: float = 0.2
    """Factor of each learning rate drop."""
    warmup_epochs: int = 0
    """Epochs of linear warm-up from 0, before the schedule begins."""
    warmup_fraction: float = 0.0
    """Share of all epochs that are warm-up, for example 0.1; --warmup-epochs counts if it is longer."""
    momentum: float = 0.9
    """Momentum of SGD."""
    nesterov: bool = False
    """Use Nesterov momentum."""
    weight_decay: float = 5e-4
    """Weight decay."""
    decay_norms: bool = True
    """Apply weight decay to biases and normalisation layers as well."""
    clip_norm: float | None = None
    """Maximum norm of the gradient; not clipped by default."""
    ema: float | None = None
    """Decay per step of a moving average of the weights, which is then evaluated: for example 0.999; no
    average by default."""
    cosine_classifier: bool = False
    """Classify by cosines of features and class weights, without biases; ldam and ldam-drw always do."""


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Random changes of each training image before it is mixed."""

    random_resized_crop: float | None = None
    """Resize a random part of each image, of at least this share of its area, for example 0.2; replaces
    --padding; 0 for none. With the recipes strong and long-tail, photos have it by default. Otherwise small
    images and the centre of photos are padded and cropped."""
    padding: int = 4
    """Pixels of padding before a random crop."""
    padding_mode: PaddingMode = "zeros"
    """Content of the padding: black, or the reflected image."""
    flip: bool = True
    """Flip horizontally with probability 0.5; not for digits or text."""
    rotation: float = 15.0
    """Maximum rotation in degrees, in either direction."""
    trivial: bool = False
    """Apply TrivialAugment as well."""
    autoaugment: bool = False
    """Apply AutoAugment's policy for CIFAR as well."""
    cutout: int = 0
    """Side in pixels of a square that is blanked at a random place: 16 is usual for CIFAR; 0 for none."""
    colour_jitter: float = 0.0
    """Change brightness, contrast and saturation by up to this share, for example 0.4."""
    erasing: float = 0.0
    """Probability of random erasing: a rectangle of the image gets a random colour."""


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """Settings of the method. By default, those of the table of methods."""

    alpha: float | None = None
    """lam ~ Beta(alpha, alpha): 0.2 leaves most images nearly pure, 20 mixes nearly half and half."""
    mode: Mode | None = None
    """Draw one lam for the batch, for each image (elem), or for each pair of images that are each other's
    partner (pair)."""
    duplicates: Duplicates | None = None
    """Treat pairs with the same classifier as negative, ignore them, or treat them as positive."""
    negatives: tuple[str, ...] | None = None
    """What an image is contrasted with on the class axis: pairs, sources, classes, or pairs classes."""
    temperature: float | None = None
    """Divides the scores of the Infinite Class loss."""
    label_smoothing: float | None = None
    """Share of every label that is spread over all classes."""
    kappa: float | None = None
    """Remix: how many times more common a class must be to give up its label."""
    tau: float | None = None
    """Remix: it does so only if the rarer image keeps more than 1 - tau of the pixels; 1 means always."""
    adjust_tau: float | None = None
    """Strength of logit adjustment: scores + adjust_tau log n_c in training, or scores - adjust_tau log n_c
    after it (the methods -adjusted); 1 by default."""
    joint: bool = False
    """RegMixup: clean and mixed images in one forward pass instead of two."""
    mix_prob: float = 1.0
    """Probability that a batch is mixed."""
    mix_off_epoch: int | None = None
    """Epoch from which nothing is mixed, counted from 0; never by default."""


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Precision, compilation and evaluation."""

    precision: Precision = "auto"
    """auto is bfloat16 on GPUs and float32 elsewhere."""
    compile: bool = False
    """Use torch.compile: takes 20 to 40 s once, then faster on a GPU."""
    graph: bool = True
    """On a GPU, capture the whole step in a CUDA graph."""
    eval_every: int = 10
    """Epochs between evaluations on the test set; only the last epoch counts."""


# Fields that are flags, in the groups in which --help shows them.
FLAG_GROUPS: dict[str, type] = {
    "data": Subset,
    "pretrained": Transfer,
    "optimisation": Optimisation,
    "augmentation": Augmentation,
    "mixing": Mixing,
    "numerics": Numerics,
}


@dataclass(frozen=True, kw_only=True)
class Recipe(
    Numerics,
    Mixing,
    Augmentation,
    Optimisation,
    Afterwards,
    Fingerprints,
    CrossValidation,
    Transfer,
    Subset,
    Task,
):
    """One training run, complete: two equal recipes at one commit give equal runs."""

    def __post_init__(self) -> None:
        for entry in dataclasses.fields(self):
            check_field(entry.name, str(entry.type), getattr(self, entry.name))
        method = find_method(self.method)
        if self.fold is not None and self.fold > (self.folds or 0):
            raise ValueError(f"fold must be from 1 to folds, got fold {self.fold} and folds {self.folds}")
        if self.folds is not None and self.split is not None:
            raise ValueError(f"--split {self.split} has its own images; use it without --folds {self.folds}")
        if self.folds is not None and (self.held_out or self.tail_draw != "seeded"):
            raise ValueError(
                f"--folds {self.folds} divides all images; use it without --held-out and --tail-draw"
            )
        if self.lr_drops and min(self.lr_drops) < 0:
            raise ValueError(f"lr_drops must be numbers of epochs, 0 or more, got {self.lr_drops}")
        if self.lr_drops and max(self.lr_drops) >= self.epochs:
            raise ValueError(f"lr_drops must be below epochs ({self.epochs}), got {self.lr_drops}")
        if self.warmup_epochs >= self.epochs:
            raise ValueError(f"warmup_epochs must be below epochs ({self.epochs}), got {self.warmup_epochs}")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0, got 0; use --momentum 0.9 or --no-nesterov")
        if self.cosine and method.class_sizes == "adjust-after":
            raise ValueError(
                f"{self.method} adjusts the biases of the classifier, and --cosine-classifier has none; "
                "leave it out, or use another method"
            )
        if self.autoaugment and self.trivial:
            raise ValueError("autoaugment and trivial are two policies; use one of --autoaugment, --trivial")
        if self.sampler != "uniform" and method.adjusts:
            raise ValueError(
                f"{self.method} corrects for class sizes by itself, and sampler={self.sampler!r} would do so "
                "again; use --sampler uniform, or another method"
            )
        if self.batch_size < 2 and method.draw != "none":
            raise ValueError(
                f"batch_size must be at least 2 for the method {self.method}, which mixes the images of a "
                f"batch with each other, got {self.batch_size}"
            )

    @property
    def key(self) -> str:
        """Ten hexadecimal digits that change when anything in the recipe does."""
        unset = {
            entry.name
            for entry in dataclasses.fields(self)
            if entry.name not in FIRST_FIELDS and getattr(self, entry.name) == entry.default
        }
        fields = {name: value for name, value in self.fields().items() if name not in unset}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:10]

    @property
    def title(self) -> str:
        """A short name without special characters; runs of one title may still differ in other fields."""
        model = self.model.rstrip("/").rpartition("/")[2] if "/" in self.model else self.model
        model += "" if self.train == "all" else "-head"
        after = "" if self.after == "none" else f"-{self.after}"
        return f"{self.data_title}.{model}.{self.method}{after}.s{self.seed}"

    @property
    def data_title(self) -> str:
        """A short name of the training images, without the path of their folder."""
        data = self.dataset.replace("hf:", "hf-")
        if not data.strip(".") or "/" in data:  # "." is a folder too
            data = Path(data).name.strip(".") or Path(data).resolve().name or "images"
        part = "" if self.fraction == 1 else f"-{self.fraction * 100:g}pct"
        part += "" if self.per_class is None else f"-{self.per_class}each"
        part += "" if self.imbalance == 1 else f"-lt{min(self.imbalance, 1 / self.imbalance):g}"
        if self.folds is not None:
            part += f"-{self.folds}folds" if self.fold is None else f"-fold{self.fold}of{self.folds}"
        return data + part

    @property
    def cosine(self) -> bool:
        """Whether the network classifies by cosines, as methods with a margin always do."""
        return self.cosine_classifier or find_method(self.method).margin > 0

    @property
    def name(self) -> str:
        """Title and key: two recipes with the same name are equal."""
        return f"{self.title}.{self.key}"

    @property
    def data(self) -> DataSpec:
        """Which images the run trains on."""
        from icmixup.lab.datasets import DataSpec

        return DataSpec(
            dataset=self.dataset,
            **{entry.name: getattr(self, entry.name) for entry in dataclasses.fields(Subset)},
            folds=self.folds,
            fold=self.fold,
            # Every seed has its own folds, so that intervals cover their choice.
            fold_seed=0 if self.folds is None else derive_seed(self.seed, 0, "folds"),
        )

    @property
    def drops(self) -> tuple[float, ...]:
        """Epochs after which the learning rate falls: 50, 100, 150 of 200; they may lie within an epoch."""
        if self.lr_drops is not None:
            return self.lr_drops
        return tuple(self.epochs * quarter / 4 for quarter in (1, 2, 3))

    @property
    def warmup(self) -> float:
        """Epochs of warm-up."""
        return max(self.warmup_epochs, self.warmup_fraction * self.epochs)

    @property
    def peak_lr(self) -> float:
        """The highest learning rate, for this batch size."""
        return self.lr if self.lr_batch is None else self.lr * math.sqrt(self.batch_size / self.lr_batch)

    def fields(self) -> dict[str, object]:
        """All fields, as JSON stores them."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}

    @property
    def whole_method(self) -> Method:
        """The method with this recipe's own settings, before and after training included."""
        given = {name: getattr(self, name) for name in METHOD_FIELDS if getattr(self, name) is not None}
        # A comparison has one recipe for several methods: settings apply to those that use them.
        return find_method(self.method).with_settings(**given, joint=self.joint, prob=self.mix_prob)

    @property
    def tau_afterwards(self) -> float | None:
        """Strength of logit adjustment after training; None for methods that have none."""
        method = self.whole_method
        return method.adjust_tau if method.class_sizes == "adjust-after" else None

    def method_at(self, epoch: int) -> Method:
        """What is trained with in the given epoch (from 0)."""
        off = self.mix_off_epoch is not None and epoch >= self.mix_off_epoch
        method = self.whole_method.at(epoch / self.epochs)
        return method.with_settings(prob=0.0) if off else method


def read_recipe(fields: object) -> Recipe:
    """The recipe that Recipe.fields wrote; anything else raises a ValueError."""
    if not isinstance(fields, dict):
        raise ValueError(f"a recipe must be a dictionary of its fields, got {type(fields).__name__}")
    known = {entry.name for entry in dataclasses.fields(Recipe)}
    if unknown := sorted(str(name) for name in fields if name not in known):
        raise ValueError(f"a recipe has no field {', '.join(unknown)}")
    return Recipe(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})  # type: ignore[arg-type]


def learning_rate(recipe: Recipe, epoch: float) -> float:
    """The learning rate `epoch` epochs into training: linear warm-up, then steps or half a cosine."""
    peak, warmup = recipe.peak_lr, recipe.warmup
    if epoch < warmup:
        return peak * epoch / warmup
    if recipe.schedule == "step":
        return peak * recipe.lr_factor ** sum(epoch >= drop for drop in recipe.drops)
    done = (epoch - warmup) / (recipe.epochs - warmup)
    return peak * (1 + math.cos(math.pi * done)) / 2


def images_per_epoch(recipe: Recipe, num_images: int) -> int:
    """All images, or those that fill whole batches if the last batch is dropped."""
    return num_images - num_images % recipe.batch_size if recipe.drop_last else num_images


def fit_batch_size(recipe: Recipe, num_images: int) -> Recipe:
    """The recipe; with fewer images than in its batch, that is a power of two, up to a quarter of them."""
    if recipe.batch_size <= num_images:
        return recipe
    return dataclasses.replace(recipe, batch_size=2 ** int(math.log2(max(2, num_images // 4))))


def lengthen(recipe: Recipe, num_images: int) -> Recipe:
    """The recipe with enough epochs for its min_steps, which is then 0."""
    steps = math.ceil(images_per_epoch(recipe, num_images) / recipe.batch_size)
    epochs = max(recipe.epochs, math.ceil(recipe.min_steps / max(steps, 1)))
    return dataclasses.replace(change_epochs(recipe, epochs), min_steps=0)


def change_epochs(recipe: Recipe, epochs: int) -> Recipe:
    """The recipe with more or fewer epochs; learning rate drops, warm-up and the end of mixing move along."""

    def scale(epoch: int) -> int:
        return epoch * epochs // recipe.epochs

    return dataclasses.replace(
        recipe,
        epochs=epochs,
        lr_drops=recipe.lr_drops and tuple(map(scale, recipe.lr_drops)),
        warmup_epochs=scale(recipe.warmup_epochs),
        mix_off_epoch=None if recipe.mix_off_epoch is None else scale(recipe.mix_off_epoch),
    )


def fewest_epochs(recipe: Recipe, name: str, num_images: int) -> int:
    """The fewest epochs at which a recipe still learns: --budget never goes below them.

    Few images need more epochs for the same number of steps.

    Args:
        name: of the recipe that `recipe` was made from.
    """
    steps = max(1, math.ceil(images_per_epoch(recipe, num_images) / recipe.batch_size))
    return min(recipe.epochs, max(FEWEST_EPOCHS[name], math.ceil(FEWEST_STEPS / steps)))


def derive_seed(seed: int, epoch: int, purpose: str) -> int:
    """A separate seed for every epoch and purpose, the same on every machine."""
    return int.from_bytes(hashlib.sha256(f"{seed} {epoch} {purpose}".encode()).digest()[:7], "big")


STRONG = Recipe(model="resnet18", schedule="cosine", nesterov=True, rotation=0.0)
# For long tails of small images, chosen on a validation part of CIFAR-100's training set: docs/longtails.md.
LONG_TAIL = dataclasses.replace(STRONG, model="resnet32", autoaugment=True, alpha=1.0)
QUICK = Recipe(
    model="small-cnn",
    epochs=60,
    batch_size=64,
    lr=0.05,
    schedule="cosine",
    nesterov=True,
    padding=1,
    flip=False,
    rotation=10.0,
    eval_every=60,
)
# Sources of these values: AutoGluon, lightly-train, DeiT and LIFT (docs/finetuning.md).
FINETUNE = Recipe(
    model="tf_efficientnet_lite0",
    optimizer="adamw",
    epochs=20,
    min_steps=1000,
    drop_last=True,
    lr=2e-4,
    lr_batch=128,
    weight_decay=0.05,
    decay_norms=False,
    schedule="cosine",
    warmup_fraction=0.1,
    clip_norm=1.0,
    random_resized_crop=0.2,
    padding=0,
    rotation=0.0,
)
TRANSFORMER_LAYER_DECAY = 0.75
HEAD = Recipe(
    model="tf_efficientnet_lite0",
    train="head",
    optimizer="adamw",
    epochs=60,
    min_steps=700,
    lr=1e-3,
    lr_batch=128,
    weight_decay=0.05,
    decay_norms=False,
    schedule="cosine",
    padding=0,
    flip=False,
    rotation=0.0,
    eval_every=60,
)
# Photos, with recipes for small images: padding by 4 hardly changes 224 pixels. Not with quick, whose short
# runs showed no clear gain (results/photo_crop.csv, docs/log.md).
PHOTO_AUGMENTATION: dict[str, Any] = {
    "random_resized_crop": 0.35,
    "padding": 0,
    "flip": True,
    "rotation": 0.0,
}
PHOTO_RECIPES = ("strong", "long-tail")
SMALLEST_PHOTO = 64  # pixels, of the images that a network sees
RECIPES = {
    "paper": Recipe(),
    "strong": STRONG,
    "long-tail": LONG_TAIL,
    "quick": QUICK,
    "finetune": FINETUNE,
    "head": HEAD,
}
"""Named starting points: the paper's, a strong recipe of today, one for long tails, one for a laptop and tiny
images, and two for pretrained weights: all of them are trained, or a linear head."""
# Below these, methods that learn slowly look worse than they are, and rankings turn around: --budget never
# trains for less. On digits, accuracies after 20 epochs of the quick recipe are within a point of those after
# 60.
FEWEST_EPOCHS = {"paper": 60, "strong": 60, "long-tail": 60, "quick": 20, "finetune": 5, "head": 20}
FEWEST_STEPS = 300  # of the optimizer, on few images
