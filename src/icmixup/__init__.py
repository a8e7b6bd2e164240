"""Infinite Class Mixup: mix inputs, mix labels, contrast the interpolated classifiers.

>>> pairs = icm.draw_mixup(labels, alpha=0.2)                    # partners and mixing weights
>>> inputs = icm.mix_inputs(images, pairs)                       # Eq. 1, left
>>> targets = icm.mix_targets(labels, pairs, num_classes=100)    # Eq. 1, right
>>> loss = icm.infinite_class_loss(model(inputs), targets)       # Eq. 9
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from icmixup._checks import AXES
    from icmixup.adjustment import adjust_scores, fit_adjustment
    from icmixup.calibration import fit_temperature
    from icmixup.hidden import mix_hidden
    from icmixup.large_batch import cached_backward
    from icmixup.loss import InfiniteClassLoss, infinite_class_loss
    from icmixup.methods import METHODS, Method
    from icmixup.mixer import Mixer
    from icmixup.objective import training_loss
    from icmixup.pairs import (
        Pairs,
        draw_cutmix,
        draw_either,
        draw_mixup,
        draw_remix,
        draw_virtual,
        mix_inputs,
        mix_targets,
        mixed_accuracy,
    )

__all__ = [
    "AXES",
    "METHODS",
    "InfiniteClassLoss",
    "Method",
    "Mixer",
    "Pairs",
    "adjust_scores",
    "cached_backward",
    "draw_cutmix",
    "draw_either",
    "draw_mixup",
    "draw_remix",
    "draw_virtual",
    "fit_adjustment",
    "fit_temperature",
    "infinite_class_loss",
    "mix_hidden",
    "mix_inputs",
    "mix_targets",
    "mixed_accuracy",
    "training_loss",
]

_MODULES = {
    "_checks": ("AXES",),
    "adjustment": ("adjust_scores", "fit_adjustment"),
    "calibration": ("fit_temperature",),
    "hidden": ("mix_hidden",),
    "large_batch": ("cached_backward",),
    "loss": ("InfiniteClassLoss", "infinite_class_loss"),
    "methods": ("METHODS", "Method"),
    "mixer": ("Mixer",),
    "objective": ("training_loss",),
    "pairs": (
        *("Pairs", "draw_cutmix", "draw_either", "draw_mixup", "draw_remix", "draw_virtual"),
        *("mix_inputs", "mix_targets", "mixed_accuracy"),
    ),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: `icmixup --help` need not wait for torch."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"icmixup.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
