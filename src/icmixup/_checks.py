"""Input validation: the values an argument may take, and errors that say what was given and what is expected.

Values of tensors are only checked where that is free: on the CPU, and not while a compiler traces. On a GPU a
check would make the host wait, and the step could not be captured in a CUDA graph.

Importing this module does not import torch, so that the command line can validate its flags without it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Axis = Literal["class", "pair"]
Draw = Literal["none", "mixup", "remix", "cutmix", "either", "manifold"]
Mode = Literal["batch", "elem", "pair"]
Duplicates = Literal["negative", "ignore", "positive"]
ClassSizes = Literal["none", "adjust", "adjust-clean", "weigh"]
Reduction = Literal["mean", "sum", "none"]

AXES = ("class", "pair")
MODES = ("batch", "elem", "pair")
NEGATIVES = (("pairs",), ("sources",), ("classes",), ("pairs", "classes"))
DUPLICATES = ("negative", "ignore", "positive")
REDUCTIONS = ("mean", "sum", "none")


def can_look_at(values: Tensor) -> bool:
    """Whether reading values is free: on the CPU, and not while a compiler traces."""
    import torch

    return values.device.type == "cpu" and not torch.compiler.is_compiling()


def check_batch(labels: Tensor) -> None:
    if labels.dim() not in (1, 2) or len(labels) == 0:
        raise ValueError(
            f"labels have shape {tuple(labels.shape)}; expected at least one image, "
            "as (B,) integers or (B, C) class shares"
        )


def check_positive(name: str, value: float) -> None:
    if not value > 0 or math.isinf(value):
        raise ValueError(f"{name} must be a positive number, got {value}; to disable mixing pass lam=1.0")


def check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")


def check_partner(partner: Tensor, labels: Tensor, mode: str) -> Tensor:
    import torch

    if partner.shape != (len(labels),) or partner.is_floating_point():
        raise ValueError(
            f"partner has dtype {partner.dtype} and shape {tuple(partner.shape)}; "
            f"expected ({len(labels)},) integers, the index of each image's partner in the batch"
        )
    partner = partner.to(labels.device, torch.int64)
    if mode == "pair" and can_look_at(partner) and not partner[partner].equal(torch.arange(len(partner))):
        raise ValueError('mode "pair" needs mutual partners: partner[partner[i]] == i for every i')
    return partner


def check_lam(lam: Tensor | float, labels: Tensor) -> Tensor:
    import torch

    lam = torch.as_tensor(lam)
    lam = lam.to(labels.device, lam.dtype if lam.dtype == torch.float64 else torch.float32)
    if lam.shape not in ((), (1,), (len(labels),)):
        raise ValueError(f"lam has shape {tuple(lam.shape)}; expected a number or shape ({len(labels)},)")
    if can_look_at(lam) and not bool(((lam >= 0) & (lam <= 1)).all()):
        raise ValueError(
            f"lam must be between 0 and 1, got values from {lam.min().item():g} to {lam.max().item():g}"
        )
    return lam.expand(len(labels))


def check_labels(labels: Tensor, num_classes: int) -> None:
    if can_look_at(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise ValueError(
            f"labels range from {int(labels.min())} to {int(labels.max())}, but the classes are 0 to "
            f"{num_classes - 1}; num_classes and class_counts must be those of the whole dataset"
        )


def check_fits(weight: Tensor, images: Tensor) -> None:
    # Torch would silently broadcast images whose dimensions are 1.
    if weight.dim() != images.dim() or any(
        w not in (1, n) for w, n in zip(weight.shape, images.shape, strict=True)
    ):
        raise ValueError(
            f"images have shape {tuple(images.shape)} but the pairs' weight has shape {tuple(weight.shape)}; "
            "draw CutMix for these images, with size=images.shape[2:]"
        )


def check_classes(name: str, shares: Tensor, num_classes: int) -> None:
    if shares.dim() != 2 or shares.shape[1] != num_classes:
        raise ValueError(
            f"{name} have shape {tuple(shares.shape)}; expected (B, {num_classes}), one column per class"
        )


def check_counts(class_counts: Tensor, device: torch.device) -> Tensor:
    """class_counts as float32 on `device`."""
    import torch

    if class_counts.dim() != 1 or len(class_counts) == 0:
        raise ValueError(
            f"class_counts have shape {tuple(class_counts.shape)}; expected (C,), one size per class"
        )
    return class_counts.to(device, torch.float32)


def check_some_size(class_counts: Tensor) -> None:
    if can_look_at(class_counts) and not bool((class_counts >= 0).all() & (class_counts > 0).any()):
        raise ValueError(
            f"class_counts are {class_counts.tolist()[:10]}; expected the number of training images of each "
            "class, none negative and at least one positive"
        )


def check_no_empty_class(class_counts: Tensor) -> None:
    if can_look_at(class_counts) and not bool((class_counts > 0).all()):
        empty = (class_counts <= 0).nonzero().flatten().tolist()
        raise ValueError(
            f"class_counts of classes {empty[:10]} are not positive, but this method divides by them or "
            "takes their logarithm; remove classes without training images, or count them as 1"
        )


def check_rows(scores: Tensor, targets: Tensor) -> None:
    if targets.dim() == 1:
        raise ValueError(
            f"targets have dtype {targets.dtype} and shape {tuple(targets.shape)}, like labels; the loss "
            f"expects (B, C) class shares, as the scores {tuple(scores.shape)}: mix_targets converts labels"
        )
    if scores.dim() != 2 or scores.shape != targets.shape:
        raise ValueError(
            f"scores have shape {tuple(scores.shape)} but targets have shape {tuple(targets.shape)}; "
            "both must be (pairs, classes): mix_targets turns labels into targets"
        )
    if scores.numel() == 0:
        raise ValueError(f"scores have shape {tuple(scores.shape)}: an empty batch has no loss, skip it")
    if not scores.is_floating_point():
        raise ValueError(f"scores have dtype {scores.dtype}; expected floating-point logits")


def check_extras(
    scores: Tensor, negatives: tuple[str, ...], class_weights: Tensor | None, virtual: Tensor | None
) -> None:
    num_classes = scores.shape[1]
    if class_weights is not None and class_weights.shape != (num_classes,):
        raise ValueError(
            f"class_weights have shape {tuple(class_weights.shape)}; expected ({num_classes},), one per class"
        )
    if virtual is not None and (virtual.dim() != 2 or virtual.shape[1] != num_classes or len(virtual) == 0):
        raise ValueError(
            f"virtual targets have shape {tuple(virtual.shape)}; expected (M, {num_classes}) with M > 0, "
            "as draw_virtual returns them"
        )
    if virtual is not None and "pairs" not in negatives:
        raise ValueError(f'virtual classifiers extend the pairs, but negatives are {negatives}; add "pairs"')


def check_choices(
    axes: tuple[str, ...], negatives: tuple[str, ...], temperature: float, duplicates: str, reduction: str
) -> None:
    if isinstance(axes, str) or not axes or not set(axes) <= set(AXES) or len(set(axes)) != len(axes):
        raise ValueError(f"axes must be a tuple of one or both of {AXES}, got {axes!r}")
    if negatives not in NEGATIVES:
        raise ValueError(f"negatives must be one of {NEGATIVES}, got {negatives!r}")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    check_choice("duplicates", duplicates, DUPLICATES)
    check_choice("reduction", reduction, REDUCTIONS)


def check_range(name: str, value: float, above: float, most: float, meaning: str) -> None:
    if not above < value <= most:
        raise ValueError(f"{name} must be {meaning}, got {value:g}")
