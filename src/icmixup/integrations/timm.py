"""timm: a Mixup with the arguments of timm.data.Mixup, and the loss that belongs to it.

The loss alone is two lines in timm's train.py, behind timm's own Mixup:

>>> import icmixup as icm
>>> train_loss_fn = icm.InfiniteClassLoss()    # where mixup_active is true

In a loop of your own this Mixup takes timm's place:

>>> mixup_fn = Mixup(mixup_alpha=0.2, num_classes=10)
>>> criterion = mixup_fn.criterion()
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from icmixup import AXES, Method, Mixer
from icmixup.integrations._versions import require

require("timm")

from timm.data import Mixup as TimmMixup  # noqa: E402

__all__ = ["Mixup"]


class Mixup(TimmMixup):
    """timm.data.Mixup with random partners, batches of any size, and Remix if class sizes are passed.

    Differences from timm: partners are drawn at random, not by reversing the batch; `prob` decides for a
    whole batch in every mode; random numbers come from torch, not from NumPy; inputs are not changed in
    place; and labels are not smoothed by default, because smoothing only rescales the class axis of the
    Infinite Class loss, and adds a constant to the scores of an image on its pair axis.

    >>> mixup_fn = Mixup(mixup_alpha=0.2, cutmix_alpha=1.0, num_classes=10)
    >>> inputs, targets = mixup_fn(images, labels)

    Args:
        mixup_alpha, cutmix_alpha: alpha of each, 0 to turn it off; with both, `switch_prob` chooses CutMix.
        prob: probability of mixing a batch.
        mode: one lam for the "batch", for each "elem", or for each "pair".
        label_smoothing: share of each label that is spread over all classes.
        num_classes: C.
        cutmix_minmax, correct_lam, multi_label: only their defaults are supported.
        class_counts: (C,) training images of each class; Mixup is then Remix. Not with CutMix.
        generator: source of all randomness.
    """

    def __init__(
        self,
        mixup_alpha: float = 1.0,
        cutmix_alpha: float = 0.0,
        cutmix_minmax: None = None,
        prob: float = 1.0,
        switch_prob: float = 0.5,
        mode: Literal["batch", "elem", "pair"] = "batch",
        correct_lam: bool = True,
        label_smoothing: float = 0.0,
        num_classes: int = 1000,
        multi_label: bool = False,
        *,
        class_counts: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if cutmix_minmax is not None or not correct_lam:
            raise ValueError(
                f"cutmix_minmax={cutmix_minmax} and correct_lam={correct_lam} are not supported: lam is "
                "always the share of pixels that is kept; use timm.data.Mixup, which works with the loss too"
            )
        if multi_label:
            raise ValueError("multi_label=True is not supported: the loss needs class shares that sum to 1")
        super().__init__(
            mixup_alpha,
            cutmix_alpha,
            None,
            prob,
            switch_prob,
            mode,
            correct_lam,
            label_smoothing,
            num_classes,
        )
        self.class_counts = class_counts
        # One for all batches: in a DataLoader's workers it reseeds the generator, once.
        self._mixer = Mixer(self.method(), num_classes, class_counts, generator=generator)

    def method(self) -> Method:
        """The row of settings that the arguments, and mixup_enabled, stand for."""
        draw = self.draw()
        both = (
            {"cutmix_alpha": self.cutmix_alpha, "switch_prob": self.switch_prob} if draw == "either" else {}
        )
        return Method(
            draw=draw,
            alpha=self.cutmix_alpha if draw == "cutmix" else self.mixup_alpha,
            mode=self.mode,
            prob=self.mix_prob if self.mixup_enabled else 0.0,
            label_smoothing=self.label_smoothing,
            axes=AXES,
            **both,
        )

    def draw(self) -> Literal["mixup", "remix", "cutmix", "either"]:
        if self.mixup_alpha <= 0 and self.cutmix_alpha <= 0:
            raise ValueError(
                f"mixup_alpha={self.mixup_alpha} and cutmix_alpha={self.cutmix_alpha}; one must be positive"
            )
        if self.class_counts is not None and self.cutmix_alpha > 0:
            raise ValueError("class_counts select Remix, which is not defined for CutMix; set cutmix_alpha=0")
        if self.class_counts is not None:
            return "remix"
        if self.cutmix_alpha <= 0:
            return "mixup"
        return "either" if self.mixup_alpha > 0 else "cutmix"

    def mixer(self) -> Mixer:
        self._mixer.method = self.method()
        return self._mixer

    def criterion(self) -> nn.Module:
        """The Infinite Class loss; cross-entropy on integer labels, for validation."""
        return self.mixer().criterion()

    def __call__(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """(B, ...) images and (B,) labels to mixed inputs and (B, C) targets."""
        inputs, targets = self.mixer()(x, target)
        assert isinstance(inputs, Tensor)
        return inputs, targets
