"""Infinite Class Mixup: mix inputs, mix labels, contrast the mixed classifiers.

>>> pairs = icm.draw_mixup(labels, alpha=0.2)                    # whom to mix, and how much
>>> inputs = icm.mix_inputs(images, pairs)                       # Eq. 1, left
>>> targets = icm.mix_targets(labels, pairs, num_classes=100)    # Eq. 1, right
>>> loss = icm.infinite_class_loss(model(inputs), targets)       # Eq. 9
"""

from icmixup.large_batch import cached_backward
from icmixup.hidden import mix_hidden
from icmixup.loss import AXES, InfiniteClassLoss, infinite_class_loss
from icmixup.methods import METHODS, Method, training_loss
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
from icmixup.calibration import fit_temperature

__all__ = [
    "AXES",
    "METHODS",
    "InfiniteClassLoss",
    "Method",
    "Pairs",
    "cached_backward",
    "draw_cutmix",
    "draw_either",
    "draw_mixup",
    "draw_remix",
    "draw_virtual",
    "fit_temperature",
    "infinite_class_loss",
    "mix_hidden",
    "mix_inputs",
    "mix_targets",
    "mixed_accuracy",
    "training_loss",
]
