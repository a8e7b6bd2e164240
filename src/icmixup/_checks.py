"""What bad input gets: a ValueError that names what was given, what was wanted and what to do.

Values are looked at only where that is free: on the CPU, and not while a compiler traces. On a GPU a
look would make the host wait, and no CUDA graph could be captured.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def can_look_at(values: Tensor) -> bool:
    """Whether reading values is free: on the CPU, and not while a compiler traces."""
    return values.device.type == "cpu" and not torch.compiler.is_compiling()


def check_batch(labels: Tensor) -> None:
    if labels.dim() not in (1, 2) or len(labels) == 0:
        raise ValueError(
            f"labels are of shape {tuple(labels.shape)}; wanted at least one image, "
            "as (B,) integers or (B, C) shares"
        )


def check_positive(name: str, value: float) -> None:
    if not value > 0 or math.isinf(value):
        raise ValueError(f"{name} must be a positive number, got {value}; for no mixing pass lam=1.0")


def check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} {value!r} is unknown; it is one of {', '.join(map(repr, known))}")


def check_partner(partner: Tensor, labels: Tensor, mode: str) -> Tensor:
    if partner.shape != (len(labels),) or partner.is_floating_point():
        raise ValueError(
            f"partner is {partner.dtype} of shape {tuple(partner.shape)}; wanted ({len(labels)},) integers, "
            "the index of each image's partner in the batch"
        )
    partner = partner.to(labels.device, torch.int64)
    if mode == "pair" and can_look_at(partner) and not partner[partner].equal(torch.arange(len(partner))):
        raise ValueError('mode "pair" needs partners that have each other: partner[partner[i]] == i')
    return partner


def check_lam(lam: Tensor | float, labels: Tensor) -> Tensor:
    lam = torch.as_tensor(lam)
    lam = lam.to(labels.device, lam.dtype if lam.dtype == torch.float64 else torch.float32)
    if lam.shape not in ((), (1,), (len(labels),)):
        raise ValueError(f"lam is of shape {tuple(lam.shape)}; wanted one number or ({len(labels)},)")
    if can_look_at(lam) and not bool(((lam >= 0) & (lam <= 1)).all()):
        raise ValueError(f"lam is a share, from 0 to 1, got {lam.min().item():g} to {lam.max().item():g}")
    return lam.expand(len(labels))


def check_labels(labels: Tensor, num_classes: int) -> None:
    if can_look_at(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise ValueError(
            f"labels reach from {int(labels.min())} to {int(labels.max())}, outside the classes 0 to "
            f"{num_classes - 1}; num_classes and class_counts must be those of the whole dataset"
        )


def check_fits(weight: Tensor, images: Tensor) -> None:
    # Torch would stretch images without a word where their dims are 1.
    if weight.dim() != images.dim() or any(
        w not in (1, n) for w, n in zip(weight.shape, images.shape, strict=True)
    ):
        raise ValueError(
            f"images are of shape {tuple(images.shape)} but the pairs' weight is {tuple(weight.shape)}; "
            "draw CutMix for these images, with size=images.shape[2:]"
        )


def check_classes(name: str, shares: Tensor, num_classes: int) -> None:
    if shares.dim() != 2 or shares.shape[1] != num_classes:
        raise ValueError(f"{name} are of shape {tuple(shares.shape)} but there are {num_classes} classes")


def check_counts(class_counts: Tensor, device: torch.device) -> Tensor:
    """class_counts as float32 on `device`."""
    if class_counts.dim() != 1 or len(class_counts) == 0:
        raise ValueError(
            f"class_counts are of shape {tuple(class_counts.shape)}; wanted (C,), one size a class"
        )
    return class_counts.to(device, torch.float32)


def check_some_size(class_counts: Tensor) -> None:
    if can_look_at(class_counts) and not bool((class_counts >= 0).all() & (class_counts > 0).any()):
        raise ValueError(
            f"class_counts are {class_counts.tolist()[:10]}; wanted the training images of each class, "
            "at least one of them positive and none negative"
        )


def check_no_empty_class(class_counts: Tensor) -> None:
    if can_look_at(class_counts) and not bool((class_counts > 0).all()):
        empty = (class_counts <= 0).nonzero().flatten().tolist()
        raise ValueError(
            f"class_counts of classes {empty[:10]} are not positive, but are divisors or inside a logarithm; "
            "leave out classes without training images, or count them as 1"
        )


def check_rows(scores: Tensor, targets: Tensor) -> None:
    if targets.dim() == 1:
        raise ValueError(
            f"targets are {targets.dtype} of shape {tuple(targets.shape)}, as labels are; the loss wants "
            f"(B, C) class shares like the scores {tuple(scores.shape)}: mix_targets makes them of labels"
        )
    if scores.dim() != 2 or scores.shape != targets.shape:
        raise ValueError(
            f"scores are {tuple(scores.shape)} but targets are {tuple(targets.shape)}; "
            "both must be (pairs, classes): mix_targets turns labels into targets"
        )
    if scores.numel() == 0:
        raise ValueError(f"scores are {tuple(scores.shape)}: an empty batch has no loss; skip it")
    if not scores.is_floating_point():
        raise ValueError(f"scores are {scores.dtype}; the loss wants the model's logits, in floating point")


def check_extras(
    scores: Tensor, negatives: tuple[str, ...], class_weights: Tensor | None, virtual: Tensor | None
) -> None:
    num_classes = scores.shape[1]
    if class_weights is not None and class_weights.shape != (num_classes,):
        raise ValueError(
            f"class_weights are of shape {tuple(class_weights.shape)}; wanted one a class, ({num_classes},)"
        )
    if virtual is not None and (virtual.dim() != 2 or virtual.shape[1] != num_classes or len(virtual) == 0):
        raise ValueError(
            f"virtual targets are of shape {tuple(virtual.shape)}; wanted (M, {num_classes}) with M > 0, "
            "as draw_virtual makes them"
        )
    if virtual is not None and "pairs" not in negatives:
        raise ValueError(
            f'virtual classifiers stand beside the pairs, but negatives are {negatives}; add "pairs"'
        )
