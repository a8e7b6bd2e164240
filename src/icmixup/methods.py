"""The methods, one row each: how inputs are mixed, and what the mixed inputs are trained against.

Importing this module does not import torch: the command line lists and checks methods before it is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import get_args

from icmixup._checks import AXES, ClassSizes, Draw, Duplicates, Mode, check_choice


@dataclass(frozen=True, kw_only=True)
class Method:
    """Four choices, and their numbers."""

    # How inputs are mixed.
    draw: Draw
    alpha: float = 0.2  # lam ~ Beta(alpha, alpha)
    mode: Mode = "batch"  # one lam for the batch, or one for each elem or pair
    prob: float = 1.0  # of mixing a batch at all
    cutmix_alpha: float = 1.0  # where Mixup and CutMix take turns, CutMix's own
    switch_prob: float = 0.5  # and how often it is CutMix
    kappa: float = 3.0  # Remix: how many times more common a class must be
    tau: float = 0.5  # Remix: how much of the pixels must be the rarer image's
    # What a mixed input is trained against: soft targets, unless axes are named.
    axes: tuple[str, ...] = ()
    negatives: tuple[str, ...] = ("pairs",)
    duplicates: Duplicates = "negative"
    centred: bool = False  # no image may be pushed up or down as a whole
    temperature: float = 1.0
    label_smoothing: float = 0.0
    # How much the clean input counts; RegMixup has 1.
    clean_weight: float = 0.0
    joint: bool = (
        False  # clean and mixed in one forward, as RegMixup's authors do, not in two, as this paper's do
    )
    # How class sizes count: not; as logit adjustment of every term, or of the clean term alone, since
    # Infinite Class scores are balanced already; or as weights in the Infinite Class loss.
    class_sizes: ClassSizes = "none"
    num_virtual: int = 0  # classifiers of pairs that are not in the batch

    def __post_init__(self) -> None:
        check_choice("draw", self.draw, get_args(Draw))
        check_choice("class_sizes", self.class_sizes, get_args(ClassSizes))


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
    # Ours: rows of S~ have the mean 0.
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
        draw="mixup", alpha=0.2, axes=AXES, clean_weight=1.0, class_sizes="adjust-clean"
    ),
    "balanced-ic-regmixup-cutmix": Method(
        draw="either", axes=AXES, clean_weight=1.0, class_sizes="adjust-clean"
    ),
    "ic-balanced-mixup": Method(draw="mixup", axes=AXES, class_sizes="weigh", num_virtual=1024),
    "ic-balanced-mixup-cutmix": Method(draw="either", axes=AXES, class_sizes="weigh", num_virtual=1024),
}


def find_method(name: str) -> Method:
    if name not in METHODS:
        near = get_close_matches(name, METHODS, n=3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(f"no method {name!r}; {hint}the methods are {', '.join(METHODS)}")
    return METHODS[name]
