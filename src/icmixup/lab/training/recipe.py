"""What one training run is: every number of the paper's implementation details, as defaults."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from icmixup._checks import check_choice
from icmixup.contrast import DUPLICATES, Duplicates
from icmixup.loss import NEGATIVES
from icmixup.methods import Method, find_method
from icmixup.pairs import MODES, Mode

Schedule = Literal["step", "cosine"]
PaddingMode = Literal["zeros", "reflect"]
Precision = Literal["auto", "float32", "bfloat16"]
# What a recipe changes of its method, where it is given.
METHOD_FIELDS = ["alpha", "mode", "duplicates", "negatives", "temperature", "label_smoothing", "kappa", "tau"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One training run, complete: two equal recipes at one commit give equal runs.

    The defaults are the paper's paragraph "Implementation details".
    """

    dataset: str = "cifar100"
    """digits, cifar10, cifar100, cifair10, cifair100, a folder of images, or hf:owner/name."""
    model: str = "resnet34"
    """resnet18, resnet34, resnet50, resnet32, wrn16-8, small-cnn, or any name of timm's."""
    method: str = "ic-mixup"
    """A row of the table of methods: erm, mixup, ic-mixup, ..."""
    seed: int = 0
    """Of the initial weights, the order of images, augmentation and mixing."""

    fraction: float = 1.0
    """Share of every class's training images to train on."""
    per_class: int | None = None
    """At most so many training images a class."""
    imbalance: float = 1.0
    """Size of the smallest class over that of the largest: 0.01, or 100, makes a long tail."""
    data_seed: int = 0
    """Of the choice of training images; equal for runs that are compared."""
    split: int | None = None
    """ciFAIR only: which split of the DEIC benchmark."""
    image_size: int | None = None
    """Side of the images of a folder; found out if not given."""

    epochs: int = 200
    """Passes over the training images."""
    batch_size: int = 128
    """Images a step, over all ranks."""
    drop_last: bool = False
    """Leave out an epoch's short last batch, whose few images would steer BatchNorm just before a test."""
    lr: float = 0.1
    """Highest learning rate, of SGD."""
    schedule: Schedule = "step"
    """How lr falls: in steps, at lr_drops, or along half a cosine to 0."""
    lr_drops: tuple[int, ...] | None = None
    """Epochs after which lr is multiplied by lr_factor; a quarter, a half and three quarters if not given."""
    lr_factor: float = 0.2
    """What a drop multiplies lr by."""
    warmup_epochs: int = 0
    """Epochs in which lr rises from 0, before the schedule begins."""
    momentum: float = 0.9
    """Of SGD."""
    nesterov: bool = False
    """Nesterov's momentum."""
    weight_decay: float = 5e-4
    """Of SGD, on all weights."""
    clip_norm: float | None = None
    """Largest norm of the gradient; no limit if not given."""
    ema: float | None = None
    """Decay of an average of the weights, which is then what is tested: 0.999, say."""

    padding: int = 4
    """Pixels of padding before a random crop."""
    padding_mode: PaddingMode = "zeros"
    """What the padding shows: black, or the image reflected."""
    flip: bool = True
    """Mirror every second image; not for digits or text."""
    rotation: float = 15.0
    """Largest angle, in degrees, either way."""
    trivial: bool = False
    """TrivialAugment besides."""

    alpha: float | None = None
    """lam ~ Beta(alpha, alpha); the method's own if not given, as for the seven below."""
    mode: Mode | None = None
    """One lam for the batch, or one for each elem or pair."""
    duplicates: Duplicates | None = None
    """Pairs with the same classifier: negative, ignore or positive."""
    negatives: tuple[str, ...] | None = None
    """Whom an image is told from on the class axis: pairs, sources, classes, or pairs classes."""
    temperature: float | None = None
    """Divides the mixed scores."""
    label_smoothing: float | None = None
    """Share of every label that is spread over all classes."""
    kappa: float | None = None
    """Remix: how many times more common a class must be to give its label away."""
    tau: float | None = None
    """Remix: it does so only if the rarer image keeps more than 1 - tau of the pixels; 1 is always."""
    joint: bool = False
    """RegMixup with clean and mixed images in one forward, not in two."""
    mix_prob: float = 1.0
    """Probability of mixing a batch."""
    mix_off_epoch: int | None = None
    """Epoch after which nothing is mixed any more."""

    precision: Precision = "auto"
    """auto is bfloat16 on GPUs and float32 elsewhere."""
    compile: bool = False
    """torch.compile the model: 20 to 40 s once, then faster on a GPU."""
    graph: bool = True
    """On a GPU, the whole step as one CUDA graph."""
    eval_every: int = 10
    """Epochs between looks at the test set; the last epoch is the one that counts."""

    def __post_init__(self) -> None:
        find_method(self.method)
        check_range("fraction", self.fraction, 0, 1, "a share of the training images, above 0 and up to 1")
        check_range("mix_prob", self.mix_prob, -1e-9, 1, "a probability, from 0 to 1")
        for name in ("epochs", "batch_size", "eval_every", "lr"):
            check_range(name, getattr(self, name), 0, float("inf"), "more than zero")
        if not self.imbalance > 0:
            raise ValueError(f"imbalance must be positive, 0.01 or 100, say, got {self.imbalance}")
        if self.lr_drops and max(self.lr_drops) >= self.epochs:
            raise ValueError(f"lr_drops {self.lr_drops} reach past the last of {self.epochs} epochs")
        check_choice("schedule", self.schedule, get_args(Schedule))
        check_choice("padding_mode", self.padding_mode, get_args(PaddingMode))
        check_choice("precision", self.precision, get_args(Precision))
        if self.mode is not None:
            check_choice("mode", self.mode, MODES)
        if self.duplicates is not None:
            check_choice("duplicates", self.duplicates, DUPLICATES)
        if self.negatives is not None and self.negatives not in NEGATIVES:
            raise ValueError(f"negatives must be one of {NEGATIVES}, got {self.negatives}")
        if self.kappa is not None:
            check_range("kappa", self.kappa, 0, float("inf"), "more than zero, 3 say")
        if self.tau is not None:
            check_range("tau", self.tau, -1e-9, 1, "a share of the pixels, from 0 to 1")
        if self.ema is not None:
            check_range("ema", self.ema, 0, 1, "a decay, 0.999 say")

    @property
    def key(self) -> str:
        """Ten letters that change when anything in the recipe does."""
        return hashlib.sha256(json.dumps(self.fields(), sort_keys=True).encode()).hexdigest()[:10]

    @property
    def title(self) -> str:
        """A run in words that need no quoting; runs of one title may still differ in other fields."""
        data = Path(self.dataset.replace("hf:", "hf-")).name if "/" in self.dataset else self.dataset
        part = "" if self.fraction == 1 else f"-{self.fraction * 100:g}pct"
        part += "" if self.per_class is None else f"-{self.per_class}each"
        part += "" if self.imbalance == 1 else f"-lt{min(self.imbalance, 1 / self.imbalance):g}"
        return f"{data}{part}.{self.model.replace('/', '-')}.{self.method}.s{self.seed}"

    @property
    def name(self) -> str:
        """What a run's folder is called."""
        return f"{self.title}.{self.key}"

    @property
    def drops(self) -> tuple[float, ...]:
        """The epochs after which lr falls: 50, 100, 150 of 200; amid an epoch where a quarter ends there."""
        if self.lr_drops is not None:
            return self.lr_drops
        return tuple(self.epochs * quarter / 4 for quarter in (1, 2, 3))

    def fields(self) -> dict[str, object]:
        """Everything, as JSON has it."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}

    def method_at(self, epoch: int) -> Method:
        """The method with this recipe's own numbers, in the given epoch (from 0)."""
        off = self.mix_off_epoch is not None and epoch >= self.mix_off_epoch
        given = {name: getattr(self, name) for name in METHOD_FIELDS if getattr(self, name) is not None}
        return dataclasses.replace(
            find_method(self.method), **given, joint=self.joint, prob=0.0 if off else self.mix_prob
        )


def read_recipe(fields: dict[str, object]) -> Recipe:
    """The recipe that Recipe.fields wrote."""
    return Recipe(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})  # type: ignore[arg-type]


def check_range(name: str, value: float, above: float, most: float, meaning: str) -> None:
    if not above < value <= most:
        raise ValueError(f"{name} must be {meaning}, got {value:g}")


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
RECIPES = {"paper": Recipe(), "strong": STRONG, "quick": QUICK}
"""Named starting points: the paper's, a strong one of today, and one for a laptop and tiny images."""
