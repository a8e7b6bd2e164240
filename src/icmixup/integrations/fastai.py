"""fastai: a callback that mixes training batches and trains with the loss of a method.

>>> learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), cbs=MixBatches("ic-mixup"))
>>> learn.fit(5)

fastai's own MixUp does not fit this loss: for integer labels it interpolates two losses, and the Infinite
Class loss is not linear in its targets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from icmixup import Method, Mixer
from icmixup.integrations._versions import require

require("fastai")

from fastai.callback.core import Callback  # noqa: E402

__all__ = ["MixBatches"]


class MixBatches(Callback):
    """Mix each training batch, and train with the loss of the method.

    The loss of the Learner stays in place for validation and prediction, on batches that are not mixed.

    Args:
        method: a Method that icmixup.Mixer takes, or its name in METHODS.
        num_classes: C; the number of classes of the DataLoaders (`dls.c`) if not given.
        class_counts: (C,) training images of each class; required if the method depends on class sizes.
        size: of the box of CutMix, by default that of the inputs behind their channels, as of icmixup.Mixer.
        generator: source of all randomness.
    """

    run_valid: ClassVar[bool] = False
    clean_loss: Callable[..., Tensor] | None = None  # the Learner's, while a method's loss is in its place

    def __init__(
        self,
        method: Method | str = "ic-mixup",
        num_classes: int | None = None,
        class_counts: Tensor | None = None,
        generator: torch.Generator | None = None,
        size: tuple[int, ...] | None = None,
    ) -> None:
        self.method, self.num_classes = method, num_classes
        self.class_counts, self.generator, self.size = class_counts, generator, size

    def before_fit(self) -> None:
        self.check_mixes_alone()
        num_classes = self.num_classes or getattr(self.dls, "c", None)
        if not num_classes:
            raise ValueError(
                "the DataLoaders have no number of classes (dls.c); pass num_classes to MixBatches"
            )
        self.mixer = Mixer(
            self.method, num_classes, self.class_counts, size=self.size, generator=self.generator
        )
        self.criterion = self.mixer.criterion()

    def check_mixes_alone(self) -> None:
        """Refuse a second callback that mixes: labels would not be those of the mixed inputs."""
        others = [other for other in self.learn.cbs if other is not self and mixes(other)]
        if others:
            raise ValueError(
                f"MixBatches would mix batches that {others[0].name} mixes too; remove one of the two, for "
                f"example with learn.remove_cb({type(others[0]).__name__})"
            )

    # Only while the loss of a training batch is computed: fastai runs no events after Ctrl-C or an error, and
    # predictions would lack the activation of the Learner's loss.

    def after_pred(self) -> None:
        self.restore_loss()
        self.clean_loss, self.learn.loss_func = self.learn.loss_func, self.loss_of_mixed

    def after_loss(self) -> None:
        self.restore_loss()

    def after_cancel_batch(self) -> None:
        self.restore_loss()

    def before_validate(self) -> None:
        self.restore_loss()

    def after_fit(self) -> None:
        self.restore_loss()

    def restore_loss(self) -> None:
        if self.clean_loss is not None:
            self.learn.loss_func, self.clean_loss = self.clean_loss, None

    def before_batch(self) -> None:
        if len(self.xb) != 1 or len(self.yb) != 1:
            raise ValueError(
                f"MixBatches needs one input and one label per sample, got {len(self.xb)} inputs and "
                f"{len(self.yb)} labels"
            )
        # fastai's tensor types refuse to be combined with each other.
        inputs, self.targets = self.mixer(self.xb[0].as_subclass(Tensor), self.yb[0].as_subclass(Tensor))
        self.learn.xb = (inputs,)

    def loss_of_mixed(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Of the mixed targets; the labels stay in the batch for metrics, as with fastai's MixUp."""
        loss: Tensor = self.criterion(scores, self.targets)
        return loss


def mixes(callback: Callback) -> bool:
    """Whether this is a MixBatches, or fastai's MixUp or CutMix (to import those imports fastai.vision)."""
    return any(base.__name__ in ("MixBatches", "MixHandler") for base in type(callback).__mro__)
