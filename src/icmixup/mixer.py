"""Mixer: a method's mixing as one object, for frameworks that take a function of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from icmixup._checks import (
    check_batch,
    check_counts,
    check_generator,
    check_label_types,
    check_tensor,
    check_whole,
)
from icmixup.inputs import Inputs, first_tensor, mix_batch
from icmixup.loss import ExactBuffers, label_loss
from icmixup.methods import Method, as_method
from icmixup.objective import clean_loss, draw_pairs, mixed_loss, needs_class_counts
from icmixup.pairs import mix_targets, unmixed

Entry = TypeVar("Entry")  # of a tuple or dict of inputs: a tensor, a flag or None


class Mixer:
    """Mix a batch as a method does: inputs and labels in, mixed inputs and (B, C) targets out.

    >>> mixer = icm.Mixer("ic-mixup", num_classes=100)
    >>> inputs, targets = mixer(images, labels)
    >>> loss = icm.infinite_class_loss(model(inputs), targets)

    It takes the place of timm's `mixup_fn`, and in a DataLoader it follows the default collate function:

    >>> def collate(samples):    # not a lambda, which does not reach workers that are not forked
    ...     return mixer(*default_collate(samples))
    >>> loader = DataLoader(dataset, 128, collate_fn=collate)

    Mixing is half of a method and the loss is the other half: `criterion()` returns the loss that belongs to
    it. Methods that also need the model, to mix at a hidden layer or to score the clean inputs, are refused;
    training_loss computes them.

    While `mixup_enabled` is False, inputs stay as they are and labels only become (B, C) targets. Workers of
    a DataLoader have copies: with persistent_workers they keep the value that they started with.

    Args:
        method: a Method, or a name of METHODS.
        num_classes: C.
        class_counts: (C,) training images of each class; required if the method depends on class sizes.
        size: of the box of CutMix, by default that of the inputs behind their channels; see training_loss.
        generator: source of all randomness. In a DataLoader's workers it is reseeded once per worker, so that
            workers do not draw the same pairs.
    """

    def __init__(
        self,
        method: Method | str,
        num_classes: int,
        class_counts: Tensor | None = None,
        *,
        size: tuple[int, ...] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        name = repr(method) if isinstance(method, str) else "this method"
        self.method = as_method(method)
        check_expressible(self.method, name)
        check_whole("num_classes", num_classes, 2)
        check_generator(generator)
        needs_class_counts(self.method, class_counts)
        if class_counts is not None:
            check_tensor("class_counts", class_counts)
        if class_counts is not None and class_counts.shape != (num_classes,):
            raise ValueError(
                f"class_counts have shape {tuple(class_counts.shape)}; expected ({num_classes},), "
                "one size per class"
            )
        self.num_classes, self.class_counts = num_classes, class_counts
        self.size, self.generator = size, generator
        self.mixup_enabled = True  # the name of timm, whose train.py sets it to False at --mixup-off-epoch
        self._worker_seed: int | None = None

    @overload
    def __call__(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]: ...
    @overload
    def __call__(self, inputs: Mapping[str, Entry], labels: Tensor) -> tuple[Mapping[str, Entry], Tensor]: ...
    @overload
    def __call__(self, inputs: Sequence[Entry], labels: Tensor) -> tuple[Sequence[Entry], Tensor]: ...
    @overload
    def __call__(self, inputs: Inputs, labels: Tensor) -> tuple[Inputs, Tensor]: ...
    def __call__(self, inputs: Inputs, labels: Tensor) -> tuple[Inputs, Tensor]:
        """Mix one batch.

        Args:
            inputs: (B, ...) floating point, or a tuple or dict of such tensors.
            labels: (B,) integers, or (B, C) class shares, on the device of the inputs.

        Returns:
            The mixed inputs, of the same structure, and (B, C) targets.
        """
        check_label_types(labels)
        self._reseed_in_a_worker()
        smoothing = self.method.label_smoothing
        if self.method.draw == "none" or not self.mixup_enabled:
            return inputs, mix_targets(labels, unmixed(labels), self.num_classes, label_smoothing=smoothing)
        device = first_tensor(inputs).device
        counts = None if self.class_counts is None else check_counts(self.class_counts, device)
        pairs = draw_pairs(inputs, labels, self.method, counts, self.generator, self.size)
        targets = mix_targets(labels, pairs, self.num_classes, label_smoothing=smoothing)
        return mix_batch(inputs, pairs), targets

    def criterion(self) -> MethodLoss:
        """The method's loss of scores and the targets that this mixer returns; of labels, cross-entropy."""
        return MethodLoss(self.method, self.class_counts, generator=self.generator)

    def __repr__(self) -> str:
        return f"Mixer({self.method}, num_classes={self.num_classes})"

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        if self.generator is not None and get_spawning_popen() is not None:
            # Torch sends the numbers of a generator as shared memory, and frees it before the process starts.
            state["generator"] = self.generator.device, self.generator.get_state().tolist()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self.generator, tuple):
            device, numbers = self.generator
            self.generator = torch.Generator(device)
            self.generator.set_state(torch.tensor(numbers, dtype=torch.uint8))

    def _reseed_in_a_worker(self) -> None:
        if self.generator is None:
            return
        # Workers start with copies of the generator in the same state, in every epoch anew.
        worker = get_worker_info()
        if worker is not None and worker.seed != self._worker_seed:
            self._worker_seed = worker.seed
            self.generator.manual_seed((self.generator.initial_seed() + worker.seed) % 2**63)


class MethodLoss(ExactBuffers):
    """The loss of a method on mixed inputs, for training; cross-entropy on integer labels, for validation.

    Args:
        method: a Method, or a name of METHODS.
        class_counts: (C,) training images of each class; required if the method depends on class sizes.
        generator: source of virtual classifiers, if the method has them.
    """

    class_counts: Tensor | None

    def __init__(
        self,
        method: Method | str,
        class_counts: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.method = as_method(method)
        needs_class_counts(self.method, class_counts)
        self.generator = generator
        self.register_buffer("class_counts", class_counts, persistent=False)

    def forward(self, scores: Tensor, targets: Tensor) -> Tensor:
        """(B, C) scores and (B, C) targets to the method's loss; with (B,) integers, plain cross-entropy."""
        check_tensor("scores", scores)
        check_batch(targets)
        if targets.dim() == 1:
            return label_loss(scores, targets)
        counts = None if self.class_counts is None else check_counts(self.class_counts, scores.device)
        if self.method.draw == "none":  # clean inputs, whose targets the mixer has smoothed already
            return self.method.clean_weight * clean_loss(scores, targets, self.method, counts, smoothed=True)
        return mixed_loss(scores, targets, self.method, counts, self.generator)

    def extra_repr(self) -> str:
        return str(self.method)


def check_expressible(method: Method, name: str) -> None:
    """Refuse methods that need the model, not just a batch."""
    if method.draw == "manifold":
        raise ValueError(
            f"Mixer cannot express {name}: it mixes inside the model, not inputs; "
            "use training_loss(model, inputs, labels, method)"
        )
    if method.clean_weight and method.draw != "none":
        raise ValueError(
            f"Mixer cannot express {name}: its loss also scores the clean inputs "
            f"(clean_weight={method.clean_weight:g}); use training_loss(model, inputs, labels, method), "
            "or a method without clean inputs"
        )
