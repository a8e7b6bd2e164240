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
from typing import TYPE_CHECKING, Literal, get_args

from icmixup._checks import DUPLICATES, MODES, NEGATIVES, Duplicates, Mode, check_choice, check_range
from icmixup.methods import Method, find_method

if TYPE_CHECKING:
    from icmixup.lab.datasets import DataSpec

Schedule = Literal["step", "cosine"]
PaddingMode = Literal["zeros", "reflect"]
Precision = Literal["auto", "float32", "bfloat16"]
Optimizer = Literal["sgd", "adamw"]
Trained = Literal["all", "head"]
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
METHOD_FIELDS = ["alpha", "mode", "duplicates", "negatives", "temperature", "label_smoothing", "kappa", "tau"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained on what."""

    dataset: str = "cifar100"
    """digits, cifar10, cifar100, cifair10, cifair100, a folder of images, hf:owner/name, or features.npz."""
    model: str = "resnet34"
    """resnet18, resnet34, resnet50, resnet32, wrn16-8, small-cnn, any timm model, or local-dir:FOLDER."""
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
    """Maximum number of training images per class."""
    imbalance: float = 1.0
    """Size of the smallest class relative to the largest: 0.01 (or 100) makes a long tail."""
    data_seed: int = 0
    """Seed of the choice of training images; the same for runs that are compared."""
    split: int | None = None
    """ciFAIR only: split of the DEIC benchmark."""
    image_size: int | None = None
    """Side of the square images; chosen automatically by default."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Pretrained weights, and which part of the network is trained."""

    weights: str | None = None
    """File of pretrained weights (safetensors, or a state dict of torch), or "pretrained" for timm's own;
    random by default. The head is replaced, and images are prepared as for these weights."""
    train: Trained = "all"
    """Train all weights, or only a linear head on frozen features. Features are computed once, without
    augmentation, and methods mix the features."""


@dataclass(frozen=True, kw_only=True)
class Fingerprints:
    """What files contained, filled in by the commands: a run on other contents is another run."""

    weights_digest: str | None = None
    """First digits of the SHA-256 of the weights file."""


@dataclass(frozen=True, kw_only=True)
class Optimisation:
    """How the weights are trained."""

    epochs: int = 200
    """Passes over the training images."""
    min_steps: int = 0
    """Train for more epochs if --epochs has fewer steps than this; 0 if --epochs is given."""
    batch_size: int = 128
    """Images per step, over all ranks."""
    drop_last: bool = False
    """Skip the incomplete last batch of an epoch, whose few images distort BatchNorm just before
    evaluation."""
    optimizer: Optimizer = "sgd"
    """SGD with momentum, or AdamW."""
    lr: float = 0.1
    """Peak learning rate."""
    lr_batch: int | None = None
    """Batch size that --lr is meant for: with another one it is scaled by the square root of the ratio."""
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
    """Decay of a moving average of the weights, which is then evaluated: for example 0.999."""


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Random changes of each training image before it is mixed."""

    random_resized_crop: float | None = None
    """Resize a random part of each image, of at least this share of its area, for example 0.2; replaces
    --padding. By default, the centre of photos and the whole of small images are padded and cropped."""
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
    colour_jitter: float = 0.0
    """Change brightness, contrast and saturation by up to this share, for example 0.4."""
    erasing: float = 0.0
    """Probability of random erasing: a rectangle of the image gets a random colour."""


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """Settings of the method. By default, those of the table of methods."""

    alpha: float | None = None
    """lam ~ Beta(alpha, alpha)."""
    mode: Mode | None = None
    """Draw one lam per batch, or one per elem or pair."""
    duplicates: Duplicates | None = None
    """Treat pairs with the same classifier as negative, ignore them, or treat them as positive."""
    negatives: tuple[str, ...] | None = None
    """What an image is contrasted with on the class axis: pairs, sources, classes, or pairs classes."""
    temperature: float | None = None
    """Divides the mixed scores."""
    label_smoothing: float | None = None
    """Share of every label that is spread over all classes."""
    kappa: float | None = None
    """Remix: how many times more common a class must be to give up its label."""
    tau: float | None = None
    """Remix: it does so only if the rarer image keeps more than 1 - tau of the pixels; 1 means always."""
    joint: bool = False
    """RegMixup: clean and mixed images in one forward pass instead of two."""
    mix_prob: float = 1.0
    """Probability that a batch is mixed."""
    mix_off_epoch: int | None = None
    """Epoch from which nothing is mixed."""


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


@dataclass(frozen=True, kw_only=True)
class Recipe(Numerics, Mixing, Augmentation, Optimisation, Fingerprints, Transfer, Subset, Task):
    """One training run, complete: two equal recipes at one commit give equal runs."""

    def __post_init__(self) -> None:
        find_method(self.method)
        check_range("fraction", self.fraction, 0, 1, "a share of the training images, above 0 and up to 1")
        check_range("mix_prob", self.mix_prob, -1e-9, 1, "a probability, from 0 to 1")
        for name in ("epochs", "batch_size", "eval_every", "lr"):
            check_range(name, getattr(self, name), 0, float("inf"), "more than zero")
        if not self.imbalance > 0:
            raise ValueError(f"imbalance must be positive, for example 0.01 or 100, got {self.imbalance}")
        if self.lr_drops and max(self.lr_drops) >= self.epochs:
            raise ValueError(f"lr_drops must be below epochs ({self.epochs}), got {self.lr_drops}")
        check_choice("schedule", self.schedule, get_args(Schedule))
        check_choice("padding_mode", self.padding_mode, get_args(PaddingMode))
        check_choice("precision", self.precision, get_args(Precision))
        self._check_augmentation()
        self._check_mixing()
        self._check_optimiser()

    def _check_augmentation(self) -> None:
        if self.random_resized_crop is not None:
            crop = self.random_resized_crop
            check_range("random_resized_crop", crop, 0, 1, "a share of the area, above 0 and up to 1")
        check_range("colour_jitter", self.colour_jitter, -1e-9, 1, "a share, from 0 to 1")
        check_range("erasing", self.erasing, -1e-9, 1, "a probability, from 0 to 1")

    def _check_mixing(self) -> None:
        if self.mode is not None:
            check_choice("mode", self.mode, MODES)
        if self.duplicates is not None:
            check_choice("duplicates", self.duplicates, DUPLICATES)
        if self.negatives is not None and self.negatives not in NEGATIVES:
            raise ValueError(f"negatives must be one of {NEGATIVES}, got {self.negatives}")
        if self.kappa is not None:
            check_range("kappa", self.kappa, 0, float("inf"), "more than zero, for example 3")
        if self.tau is not None:
            check_range("tau", self.tau, -1e-9, 1, "a share of the pixels, from 0 to 1")
        if self.ema is not None:
            check_range("ema", self.ema, 0, 1, "a decay, for example 0.999")

    def _check_optimiser(self) -> None:
        check_choice("optimizer", self.optimizer, get_args(Optimizer))
        check_choice("train", self.train, get_args(Trained))
        check_range("warmup_fraction", self.warmup_fraction, -1e-9, 1, "a share of the epochs, from 0 to 1")
        if self.layer_decay is not None:
            check_range("layer_decay", self.layer_decay, 0, 1, "a factor, above 0 and up to 1")
        if self.lr_batch is not None:
            check_range("lr_batch", self.lr_batch, 0, float("inf"), "a batch size, for example 128")

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
        data = Path(self.dataset.replace("hf:", "hf-")).name if "/" in self.dataset else self.dataset
        part = "" if self.fraction == 1 else f"-{self.fraction * 100:g}pct"
        part += "" if self.per_class is None else f"-{self.per_class}each"
        part += "" if self.imbalance == 1 else f"-lt{min(self.imbalance, 1 / self.imbalance):g}"
        model = self.model.rstrip("/").rpartition("/")[2] if "/" in self.model else self.model
        model += "" if self.train == "all" else "-head"
        return f"{data}{part}.{model}.{self.method}.s{self.seed}"

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return f"{self.title}.{self.key}"

    @property
    def data(self) -> DataSpec:
        """Which images the run trains on."""
        from icmixup.lab.datasets import DataSpec

        return DataSpec(
            dataset=self.dataset,
            **{entry.name: getattr(self, entry.name) for entry in dataclasses.fields(Subset)},
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

    def method_at(self, epoch: int) -> Method:
        """The method with this recipe's own settings, in the given epoch (from 0)."""
        off = self.mix_off_epoch is not None and epoch >= self.mix_off_epoch
        given = {name: getattr(self, name) for name in METHOD_FIELDS if getattr(self, name) is not None}
        return dataclasses.replace(
            find_method(self.method), **given, joint=self.joint, prob=0.0 if off else self.mix_prob
        )


def read_recipe(fields: dict[str, object]) -> Recipe:
    """The recipe that Recipe.fields wrote."""
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


def lengthen(recipe: Recipe, num_images: int) -> Recipe:
    """The recipe with enough epochs for its min_steps, which is then 0; lr_drops move along."""
    steps = math.ceil(images_per_epoch(recipe, num_images) / recipe.batch_size)
    epochs = max(recipe.epochs, math.ceil(recipe.min_steps / max(steps, 1)))
    drops = recipe.lr_drops and tuple(drop * epochs // recipe.epochs for drop in recipe.lr_drops)
    return dataclasses.replace(recipe, epochs=epochs, min_steps=0, lr_drops=drops)


def derive_seed(seed: int, epoch: int, purpose: str) -> int:
    """A separate seed for every epoch and purpose, the same on every machine."""
    return int.from_bytes(hashlib.sha256(f"{seed} {epoch} {purpose}".encode()).digest()[:7], "big")


STRONG = Recipe(model="resnet18", schedule="cosine", nesterov=True, rotation=0.0)
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
    lr=2e-4,
    lr_batch=128,
    weight_decay=0.05,
    decay_norms=False,
    schedule="cosine",
    warmup_fraction=0.1,
    clip_norm=1.0,
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
RECIPES = {"paper": Recipe(), "strong": STRONG, "quick": QUICK, "finetune": FINETUNE, "head": HEAD}
"""Named starting points: the paper's, a strong recipe of today, one for a laptop and tiny images, and two for
pretrained weights: all of them are trained, or a linear head."""
