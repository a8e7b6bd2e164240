"""Transformers: a mixin for Trainer that trains with any method, and evaluates as before.

>>> class MixupTrainer(MixupTrainerMixin, Trainer):
...     pass
>>> trainer = MixupTrainer(model, args, train_dataset=dataset, method="ic-mixup")
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from icmixup import Method, training_loss
from icmixup.integrations._mixins import check_in_front
from icmixup.integrations._versions import require
from icmixup.methods import as_method

require("transformers")

__all__ = ["MixupTrainerMixin"]


class MixupTrainerMixin:
    """Goes in front of Trainer, for models that classify: an image, a signal or a text per label.

    Training batches are mixed after they reach the device, and labels do not reach the model: float labels
    would switch it to multi-label classification. Evaluation and prediction use integer labels and the loss
    of the model itself. With gradient accumulation the loss of each batch is divided by their number.

    Inputs that are token ids can only be mixed at a hidden layer: method="ic-manifold" and
    hidden=(module, ...), modules that receive floating-point features.

    Args:
        method: a Method, or a name of METHODS.
        class_counts: (C,) training samples of each class; required if the method depends on class sizes.
        hidden: the modules at which Manifold Mixup may mix.
        size: last dimensions of the inputs that a box of CutMix spans: (T,) for signals (B, T), (F, T) for
            spectrograms (B, F, T), (H, W) for videos (B, T, C, H, W). By default all behind (B, C).
        generator: source of all randomness of the mixing.
    """

    # The loss is the mean of a batch, so the Trainer has to divide it by the number of accumulated batches.
    # This attribute tells current versions; model_accepts_loss_kwargs, below, tells versions since 4.48.
    loss_is_scaled_for_ga = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_in_front(cls, MixupTrainerMixin, "Trainer")
        check_no_loss_behind(cls)

    def __init__(
        self,
        *args: Any,
        method: Method | str = "ic-mixup",
        class_counts: Tensor | None = None,
        hidden: tuple[nn.Module, ...] | None = None,
        size: tuple[int, ...] | None = None,
        generator: torch.Generator | None = None,
        **kwargs: Any,
    ) -> None:
        self.method = as_method(method)
        self.class_counts, self.hidden = class_counts, hidden
        self.size, self.generator = size, generator
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False
        self.check_no_other_loss()

    def check_no_other_loss(self) -> None:
        if getattr(self, "compute_loss_func", None) is not None:
            raise ValueError("compute_loss_func has no effect on the loss of a method; remove one of the two")
        smoothing = self.args.label_smoothing_factor  # type: ignore[attr-defined]
        if smoothing:
            raise ValueError(
                f"label_smoothing_factor={smoothing} has no effect on the loss of a method; pass "
                f"method=dataclasses.replace(METHODS[...], label_smoothing={smoothing}) instead"
            )
        config = getattr(self.model, "config", None)  # type: ignore[attr-defined]
        problem = getattr(config, "problem_type", None)
        if problem not in (None, "single_label_classification"):
            raise ValueError(
                f"the model has problem_type={problem!r}, but methods need one class per sample; "
                "set model.config.problem_type = None if that is what the labels are"
            )

    def name_of_labels(self, inputs: dict[str, Any]) -> str:
        """Of the labels in a batch: "labels", or the name that TrainingArguments or the model gives them."""
        names = ("labels", *(getattr(self, "label_names", None) or ()))
        return next((name for name in names if inputs.get(name) is not None), "labels")

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        if not model.training:
            check_integer_labels(inputs.get(self.name_of_labels(inputs)))
            return super().compute_loss(model, inputs, return_outputs)  # type: ignore[misc]
        if return_outputs:
            raise ValueError(
                "compute_loss returns no outputs in training, whose inputs are mixed; call it with "
                "return_outputs=False, and compute metrics in evaluation"
            )
        inputs = dict(inputs)
        labels = inputs.pop(self.name_of_labels(inputs), None)
        if labels is None:
            raise ValueError(
                f'the training batch has no "labels", only {", ".join(map(repr, inputs))}; a dataset of the '
                'Trainer names its labels "labels" or "label", or TrainingArguments(label_names=[...]) does'
            )
        return training_loss(
            model,
            inputs,
            labels,
            self.method,
            self.class_counts,
            hidden=self.hidden,
            size=self.size,
            generator=self.generator,
        )


def check_no_loss_behind(cls: type) -> None:
    """Raise TypeError if a class behind the mixin has a loss of its own, which training would not use."""
    behind = cls.__mro__[cls.__mro__.index(MixupTrainerMixin) + 1 :]
    owner = next((base for base in behind if "compute_loss" in vars(base)), None)
    if owner is not None and not owner.__module__.startswith("transformers."):
        raise TypeError(
            f"compute_loss of {owner.__name__} has no effect on the loss of a method in training; remove it, "
            f"or override compute_loss in {cls.__name__} and call super() there"
        )


def check_integer_labels(labels: Tensor | None) -> None:
    """Refuse soft targets in evaluation: the model would take them for multi-label classification."""
    if labels is not None and labels.is_floating_point():
        raise ValueError(
            f"evaluation labels have dtype {labels.dtype} and shape {tuple(labels.shape)}; expected (B,) "
            "integers. The Trainer mixes training batches itself: do not mix in the dataset or the collator"
        )
