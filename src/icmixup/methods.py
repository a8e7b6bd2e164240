"""The methods, one row each: how inputs are mixed, and what the mixed inputs are trained against.

Importing this module does not import torch: the command line lists and checks methods before it is needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import get_args

from icmixup._checks import (
    AXES,
    DUPLICATES,
    MODES,
    ClassSizes,
    Draw,
    Duplicates,
    Mode,
    check_axes,
    check_choice,
    check_negatives,
    check_number,
    check_positive,
    check_remix,
    check_share,
    check_smoothing,
    check_whole,
)


@dataclass(frozen=True, kw_only=True)
class Method:
    """One row: how inputs are mixed, what they are trained against, clean inputs, and class sizes.

    Every value is validated, and so are combinations: a setting that would have no effect is an error.
    """

    # How inputs are mixed.
    draw: Draw
    alpha: float = 0.2  # lam ~ Beta(alpha, alpha)
    mode: Mode = "batch"  # one lam for the batch, each image ("elem"), or each mutual pair
    prob: float = 1.0  # of mixing a batch at all
    cutmix_alpha: float = 1.0  # of CutMix, where Mixup and CutMix alternate
    switch_prob: float = 0.5  # of CutMix, where the two alternate
    kappa: float = 3.0  # Remix: how many times more common a class must be
    tau: float = 0.5  # Remix: the more common image must have less than this share of the pixels
    # What a mixed input is trained against: soft targets, unless axes are named.
    axes: tuple[str, ...] = ()
    negatives: tuple[str, ...] = ("pairs",)
    duplicates: Duplicates = "negative"
    centred: bool = False  # the pair axis cannot shift all scores of an image
    temperature: float = 1.0
    label_smoothing: float = 0.0
    # Weight of the clean input; RegMixup has 1.
    clean_weight: float = 0.0
    # Clean and mixed inputs in one forward pass, as in RegMixup's code, instead of two, as in this paper's.
    joint: bool = False
    # How class sizes enter: not at all; as logit adjustment of every term, of the clean term alone, since
    # Infinite Class scores are balanced already, or of the scores after training; as weights in the Infinite
    # Class loss; or as weights in the cross-entropy, by the effective number of images.
    class_sizes: ClassSizes = "none"
    num_virtual: int = 0  # classifiers of pairs that are not in the batch
    adjust_tau: float = 1.0  # strength of logit adjustment
    defer: float = 0.0  # share of training before the weights of "effective" enter, see `at`
    # Other forms of the cross-entropy.
    focal_gamma: float = 0.0  # focal loss: each term has the factor (1 - p)^gamma
    margin: float = 0.0  # LDAM: of the smallest class, in units of the scores

    def __post_init__(self) -> None:
        check_values(self)
        if self.draw == "none" and self.axes:
            raise ValueError(
                f'axes={self.axes} contrasts mixed inputs, but draw="none" does not mix; choose another draw'
            )
        if self.draw == "none" and not self.clean_weight:
            raise ValueError('draw="none" with clean_weight=0 has no loss; set clean_weight=1.0')
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value != entry.default and not self.uses(entry.name, value):
                raise ValueError(
                    f"{entry.name}={value!r} has no effect with draw={self.draw!r}, axes={self.axes} and "
                    f"negatives={self.negatives}; it needs {NEEDED[entry.name]}"
                )

    def uses(self, name: str, value: object = None) -> bool:
        """Whether a setting has an effect in this method; of class_sizes, whether this value has."""
        mixes = self.draw != "none"
        contrasts_pairs = "class" in self.axes and "pairs" in self.negatives
        cross_entropy = not self.axes or self.clean_weight > 0
        sizes = {
            "weigh": "pair" in self.axes,
            "adjust-clean": self.clean_weight > 0,
            "effective": cross_entropy,
        }
        effect = {
            **dict.fromkeys(("alpha", "mode", "prob"), mixes),
            **dict.fromkeys(("cutmix_alpha", "switch_prob"), self.draw == "either"),
            **dict.fromkeys(("kappa", "tau"), self.draw == "remix"),
            **dict.fromkeys(("duplicates", "temperature"), bool(self.axes)),
            "negatives": "class" in self.axes,
            "centred": "pair" in self.axes,
            "joint": self.clean_weight > 0 and self.draw not in ("none", "manifold"),
            "class_sizes": sizes.get(str(value), True),
            "num_virtual": contrasts_pairs,
            "adjust_tau": self.adjusts,
            "defer": self.class_sizes == "effective",
            **dict.fromkeys(("focal_gamma", "margin"), cross_entropy),
        }
        return effect.get(name, True)

    @property
    def adjusts(self) -> bool:
        """Whether logits are adjusted for class sizes, in training or after it."""
        return self.class_sizes in ("adjust", "adjust-clean", "adjust-after")

    def with_settings(self, **settings: object) -> Method:
        """This method with the settings that have an effect in it, for one setting over several methods.

        A setting that needs another one of them has an effect too, as temperature has together with axes.
        """
        used = {name: value for name, value in settings.items() if self.uses(name, value)}
        if not used:
            return self
        others = {name: value for name, value in settings.items() if name not in used}
        return replace(self, **used).with_settings(**others)  # type: ignore[arg-type]

    def at(self, progress: float) -> Method:
        """What is trained with at this share of training, from 0 to 1: without class weights that are
        deferred, or with them; without an adjustment that comes after training."""
        check_share("progress", progress, "the share of training that is over, such as epoch / epochs")
        if self.class_sizes == "adjust-after":
            return replace(self, class_sizes="none", adjust_tau=1.0)
        if not self.defer:
            return self
        return replace(self, defer=0.0, class_sizes=self.class_sizes if progress >= self.defer else "none")


# What a setting needs to have an effect, for the error message.
NEEDED = {
    **dict.fromkeys(("alpha", "mode", "prob"), 'a draw other than "none"'),
    **dict.fromkeys(("cutmix_alpha", "switch_prob"), 'draw="either"'),
    **dict.fromkeys(("kappa", "tau"), 'draw="remix"'),
    **dict.fromkeys(("duplicates", "temperature"), "axes"),
    "negatives": 'axes with "class"',
    "centred": 'axes with "pair"',
    "joint": 'a clean_weight above 0, and a draw other than "none" or "manifold"',
    "class_sizes": 'axes with "pair" for "weigh", a clean_weight above 0 for "adjust-clean", and no axes or '
    'a clean_weight above 0 for "effective"',
    "num_virtual": 'axes with "class" and negatives with "pairs"',
    "adjust_tau": 'class_sizes="adjust", "adjust-clean" or "adjust-after"',
    "defer": 'class_sizes="effective"',
    **dict.fromkeys(("focal_gamma", "margin"), "no axes, or a clean_weight above 0"),
}


def check_values(method: Method) -> None:
    """Refuse values that are wrong on their own."""
    check_choice("draw", method.draw, get_args(Draw))
    check_choice("mode", method.mode, MODES)
    check_choice("duplicates", method.duplicates, DUPLICATES)
    check_choice("class_sizes", method.class_sizes, get_args(ClassSizes))
    check_axes(method.axes)
    check_negatives(method.negatives)
    for name in ("alpha", "cutmix_alpha", "temperature"):
        check_positive(name, getattr(method, name))
    check_share("prob", method.prob, "the probability of mixing a batch")
    check_share("switch_prob", method.switch_prob, "the probability of CutMix")
    check_remix(method.kappa, method.tau)
    check_smoothing(method.label_smoothing)
    check_number("clean_weight", method.clean_weight, 0, math.inf, "a number of at least 0")
    check_whole("num_virtual", method.num_virtual, 0)
    for name in ("adjust_tau", "focal_gamma", "margin"):
        check_number(name, getattr(method, name), 0, math.inf, "a number of at least 0")
    check_share("defer", method.defer, "a share of training")
    for name in ("centred", "joint"):
        check_choice(name, getattr(method, name), (True, False))


METHODS = {
    "erm": Method(draw="none", clean_weight=1.0),
    "mixup": Method(draw="mixup"),
    "ic-mixup": Method(draw="mixup", axes=AXES),
    "ic-mixup-c": Method(draw="mixup", axes=("class",)),
    "ic-mixup-p": Method(draw="mixup", axes=("pair",)),
    "regmixup": Method(draw="mixup", alpha=20.0, clean_weight=1.0),
    "ic-regmixup": Method(draw="mixup", alpha=20.0, axes=AXES, clean_weight=1.0),
    "remix": Method(draw="remix"),
    "ic-remix": Method(draw="remix", axes=AXES),
    "cutmix": Method(draw="cutmix", alpha=1.0),
    "ic-cutmix": Method(draw="cutmix", alpha=1.0, axes=AXES),
    "mixup-cutmix": Method(draw="either"),
    "ic-mixup-cutmix": Method(draw="either", axes=AXES),
    "manifold": Method(draw="manifold", alpha=2.0),
    "ic-manifold": Method(draw="manifold", alpha=2.0, axes=AXES),
    # Ours: rows of S~ have mean 0.
    "ic-mixup-centred": Method(draw="mixup", axes=AXES, centred=True),
    "ic-mixup-cutmix-centred": Method(draw="either", axes=AXES, centred=True),
    # The paper's two extra baselines.
    "ic-mixup-sources": Method(draw="mixup", axes=("class",), negatives=("sources",)),
    "ic-mixup-classes": Method(draw="mixup", axes=("class",), negatives=("classes",)),
    # The strongest baselines on long tails, and our forms for that case.
    "balanced": Method(draw="none", clean_weight=1.0, class_sizes="adjust"),
    "balanced-mixup": Method(draw="mixup", class_sizes="adjust"),
    "balanced-mixup-cutmix": Method(draw="either", class_sizes="adjust"),
    "balanced-regmixup": Method(draw="mixup", alpha=20.0, clean_weight=1.0, class_sizes="adjust"),
    "balanced-ic-regmixup": Method(
        draw="mixup", alpha=1.0, axes=AXES, clean_weight=1.0, class_sizes="adjust-clean"
    ),
    "balanced-ic-regmixup-cutmix": Method(
        draw="either", alpha=1.0, axes=AXES, clean_weight=1.0, class_sizes="adjust-clean"
    ),
    "erm-adjusted": Method(draw="none", clean_weight=1.0, class_sizes="adjust-after"),
    "regmixup-adjusted": Method(draw="mixup", alpha=20.0, clean_weight=1.0, class_sizes="adjust-after"),
    "ic-regmixup-adjusted": Method(
        draw="mixup", alpha=20.0, axes=AXES, clean_weight=1.0, class_sizes="adjust-after"
    ),
    # Other baselines on long tails.
    "focal": Method(draw="none", clean_weight=1.0, focal_gamma=2.0),
    "ldam": Method(draw="none", clean_weight=1.0, margin=15.0),
    "ldam-drw": Method(draw="none", clean_weight=1.0, margin=15.0, class_sizes="effective", defer=0.8),
    "erm-drw": Method(draw="none", clean_weight=1.0, class_sizes="effective", defer=0.8),
    "ic-balanced-mixup": Method(draw="mixup", axes=AXES, class_sizes="weigh", num_virtual=1024),
    "ic-balanced-mixup-cutmix": Method(draw="either", axes=AXES, class_sizes="weigh", num_virtual=1024),
}


def as_method(method: Method | str) -> Method:
    """A method by its name; a Method stays as it is."""
    if not isinstance(method, Method | str):
        raise TypeError(f"method must be a Method or a name of METHODS, got {type(method).__name__}")
    return find_method(method) if isinstance(method, str) else method


def find_method(name: str) -> Method:
    if name not in METHODS:
        near = get_close_matches(name, METHODS, n=3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(f"no method {name!r}; {hint}the methods are {', '.join(METHODS)}")
    return METHODS[name]
