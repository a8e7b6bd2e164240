"""Input validation: the values an argument may take, and errors that say what was given and what is expected.

Values of tensors are only checked where that is free: on the CPU, and not while a compiler traces or within
torch.vmap. On a GPU a check would make the host wait, and the step could not be captured in a CUDA graph.

Importing this module does not import torch, so that the command line can validate its flags without it.
"""

from __future__ import annotations

import math
import sys
from numbers import Integral, Real
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Draw = Literal["none", "mixup", "remix", "cutmix", "either", "manifold"]
Mode = Literal["batch", "elem", "pair"]
Duplicates = Literal["negative", "ignore", "positive"]
ClassSizes = Literal["none", "adjust", "adjust-clean", "adjust-after", "weigh", "effective"]
Reduction = Literal["mean", "sum", "none"]

AXES = ("class", "pair")
MODES = ("batch", "elem", "pair")
NEGATIVES = (("pairs",), ("sources",), ("classes",), ("pairs", "classes"))
DUPLICATES = ("negative", "ignore", "positive")
REDUCTIONS = ("mean", "sum", "none")
SMALLEST = sys.float_info.min  # above zero; a name of its own, since torch 2.6 cannot trace sys.float_info
SHARES_TOLERANCE = 0.02  # of a row's sum: bfloat16 rounds each of many shares by 0.4 %


def can_look_at(values: Tensor) -> bool:
    """Whether reading values is free and possible: on the CPU, and not while a compiler or vmap traces."""
    import torch

    on_cpu = values.device.type == "cpu"
    return on_cpu and not torch.compiler.is_compiling() and not is_batched(values)


def is_batched(values: Tensor) -> bool:
    """Whether torch.vmap hides a dimension of the values, possibly below other transforms of torch.func."""
    from torch._C import _functorch

    while _functorch.is_functorch_wrapped_tensor(values):
        if _functorch.is_batchedtensor(values):
            return True
        values = _functorch.get_unwrapped(values)
    return False


def check_tensor(name: str, value: object) -> None:
    import torch

    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{name} must be a torch.Tensor, got {type(value).__name__}; convert with torch.as_tensor"
        )


def check_generator(generator: object) -> None:
    import torch

    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator must be a torch.Generator, got {type(generator).__name__}; of a seed: "
            "torch.Generator().manual_seed(seed)"
        )


def check_batch(labels: Tensor) -> None:
    """Of labels whose length alone matters."""
    check_tensor("labels", labels)
    if labels.dim() not in (1, 2) or len(labels) == 0:
        raise ValueError(
            f"labels have shape {tuple(labels.shape)}; expected at least one image, "
            "as (B,) integers or (B, C) class shares"
        )


def check_label_types(labels: Tensor) -> None:
    check_batch(labels)
    check_integers("labels", labels, "(B,) integers or (B, C) class shares")


def check_integers(name: str, labels: Tensor, expected: str) -> None:
    """(B,) labels must be integers, (B, C) class shares may have any real dtype."""
    import torch

    if labels.is_complex() or (
        labels.dim() == 1 and (labels.is_floating_point() or labels.dtype == torch.bool)
    ):
        raise ValueError(
            f"{name} have dtype {labels.dtype} and shape {tuple(labels.shape)}; expected {expected}"
        )


def check_whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:  # of NumPy as well
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def check_number(name: str, value: object, low: float, high: float, meaning: str, hint: str = "") -> None:
    """A finite real number within [low, high]; text, booleans and nan are refused too."""
    real = isinstance(value, Real) and not isinstance(value, bool)
    # Not math.isfinite, which torch.compile(dynamic=True) cannot trace.
    if not (real and -math.inf < value < math.inf and low <= value <= high):  # type: ignore[operator]
        raise ValueError(f"{name} must be {meaning}, got {value!r}{hint}")


def check_positive(name: str, value: object, hint: str = "") -> None:
    check_number(name, value, SMALLEST, math.inf, "a positive number", hint)


def check_share(name: str, value: object, meaning: str) -> None:
    check_number(name, value, 0, 1, f"{meaning}, from 0 to 1")


def check_smoothing(value: object) -> None:
    check_number("label_smoothing", value, 0, math.nextafter(1, 0), "at least 0 and below 1")


def check_remix(kappa: object, tau: object) -> None:
    check_number("kappa", kappa, 1, math.inf, "at least 1, the ratio of two class sizes")
    check_share("tau", tau, "a share of the pixels")


def check_size(size: object) -> None:
    whole = isinstance(size, tuple) and all(isinstance(pixels, int) and pixels > 0 for pixels in size)
    if not whole or not size:
        raise ValueError(
            f"size must be the last dimensions of the images, for example (32, 32), got {size!r}; for "
            "signals (B, T) pass size=(T,)"
        )


def check_choice(name: str, value: object, known: tuple[object, ...]) -> None:
    # By type as well: 1 equals True.
    if not any(value == choice and isinstance(value, type(choice)) for choice in known):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")


def check_partner(partner: Tensor, labels: Tensor, mode: str) -> Tensor:
    import torch

    check_tensor("partner", partner)
    if partner.shape != (len(labels),) or partner.is_floating_point() or partner.dtype == torch.bool:
        raise ValueError(
            f"partner has dtype {partner.dtype} and shape {tuple(partner.shape)}; "
            f"expected ({len(labels)},) integers, the index of each image's partner in the batch"
        )
    partner = partner.to(labels.device, torch.int64)
    if can_look_at(partner) and not 0 <= int(partner.min()) <= int(partner.max()) < len(labels):
        raise ValueError(
            f"partner ranges from {int(partner.min())} to {int(partner.max())}; expected indices of "
            f"the batch, 0 to {len(labels) - 1}"
        )
    if mode == "pair" and can_look_at(partner):
        position = torch.arange(len(partner), device=partner.device)
        if not partner[partner].equal(position):
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
    if not can_look_at(labels):
        return
    labels = labels.long()  # torch finds no minimum of uint16
    if not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise ValueError(
            f"labels range from {int(labels.min())} to {int(labels.max())}, but the classes are 0 to "
            f"{num_classes - 1}; num_classes and class_counts must be those of the whole dataset"
        )


def check_fits(weight: Tensor, images: Tensor) -> None:
    # Torch would silently broadcast images whose dimensions are 1.
    if weight.dim() != images.dim() or any(
        w != 1 and w != n  # not "in", which compares symbols of torch.compile by identity
        for w, n in zip(weight.shape, images.shape, strict=True)
    ):
        raise ValueError(
            f"images have shape {tuple(images.shape)} but the pairs' weight has shape {tuple(weight.shape)}; "
            "draw CutMix with a size that is the last dimensions of the images"
        )


def check_classes(name: str, shares: Tensor, num_classes: int) -> None:
    if shares.dim() != 2 or shares.shape[1] != num_classes:
        raise ValueError(
            f"{name} have shape {tuple(shares.shape)}; expected (B, {num_classes}), one column per class"
        )


def check_counts(class_counts: Tensor, device: torch.device) -> Tensor:
    """class_counts as float32 on `device`."""
    import torch

    check_tensor("class_counts", class_counts)
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
    check_tensor("class_counts", class_counts)
    if not can_look_at(class_counts):
        return
    counts = class_counts.double()  # torch does not compare uint16
    usable = (counts > 0) & (counts < math.inf)
    if not bool(usable.all()):
        empty = (~usable).nonzero().flatten().tolist()
        raise ValueError(
            f"class_counts of classes {empty[:10]} are not positive and finite, but this method divides by "
            "them or takes their logarithm; remove classes without training images, or count them as 1"
        )


def check_label_rows(scores: Tensor, labels: Tensor, virtual: Tensor | None) -> None:
    expected = "(B, C) class shares, as mix_targets returns them, or (B,) integers for plain cross-entropy"
    check_integers("targets", labels, expected)
    check_scores(scores)
    check_one_label_per_row(scores, labels)
    if virtual is not None:
        raise ValueError(
            "virtual classifiers extend mixed targets (B, C), but targets are integer labels (B,)"
        )
    check_labels(labels, scores.shape[1])


def check_one_label_per_row(scores: Tensor, labels: Tensor) -> None:
    if len(labels) != len(scores):
        raise ValueError(f"{len(labels)} labels but {len(scores)} rows of scores; expected one label per row")


def check_scores(scores: Tensor) -> None:
    if scores.dim() != 2:
        raise ValueError(f"scores have shape {tuple(scores.shape)}; expected (B, C)")
    if scores.numel() == 0:
        raise ValueError(f"scores have shape {tuple(scores.shape)}: an empty batch has no loss, skip it")
    check_two_classes(scores)
    if not scores.is_floating_point():
        raise ValueError(f"scores have dtype {scores.dtype}; expected floating-point logits")


def check_two_classes(scores: Tensor) -> None:
    if scores.shape[1] == 1:
        raise ValueError(
            f"scores have shape {tuple(scores.shape)}: one class; expected at least two, "
            "and a binary problem has two"
        )


def check_scored(scores: Tensor, labels: Tensor) -> None:
    """ValueError unless scores are (N, C), finite, and labels their (N,) classes, with N at least 1."""
    import torch

    check_tensor("scores", scores)
    check_tensor("labels", labels)
    if scores.dim() != 2 or labels.shape != scores.shape[:1] or scores.numel() == 0:
        raise ValueError(
            f"scores have shape {tuple(scores.shape)} and labels have shape {tuple(labels.shape)}; "
            "expected (N, C) scores and (N,) labels of the same N images, at least one"
        )
    check_two_classes(scores)
    if not scores.is_floating_point() or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(
            f"scores have dtype {scores.dtype} and labels have dtype {labels.dtype}; expected floating-point "
            "scores and integer labels (for one-hot targets: targets.argmax(dim=1))"
        )
    if not bool(scores.isfinite().all()):
        bad = int((~scores.isfinite()).any(dim=1).sum())
        raise ValueError(
            f"{bad} of {len(scores)} images have scores that are nan or infinite; the model has diverged or "
            "its scores overflow: try a lower learning rate or a higher precision"
        )
    whole = labels.long()  # torch finds no minimum of uint16
    lowest, highest = int(whole.min()), int(whole.max())
    if lowest < 0 or highest >= scores.shape[1]:
        raise ValueError(
            f"labels range from {lowest} to {highest}, but the classes are 0 to {scores.shape[1] - 1}; "
            "check that the model was built for this dataset"
        )


def check_rows(scores: Tensor, targets: Tensor) -> None:
    if scores.dim() != 2 or scores.shape != targets.shape:
        raise ValueError(
            f"scores have shape {tuple(scores.shape)} but targets have shape {tuple(targets.shape)}; "
            "expected (B, C) for both, or (B,) integer labels: mix_targets turns labels into targets"
        )
    check_scores(scores)
    check_shares("targets", targets)


def check_shares(name: str, shares: Tensor) -> None:
    """Rows of class shares are not negative and sum to 1, within what half precision can hold."""
    if not can_look_at(shares):
        return
    values = shares.detach().double()  # torch finds no minimum of uint16
    total, least = values.sum(dim=1), values.amin(dim=1)
    wrong = ~((total - 1).abs() <= SHARES_TOLERANCE) | (least < -SHARES_TOLERANCE)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"{name} must be class shares, not negative and with a sum of 1 per row, but row {row} has the "
            f"sum {total[row].item():g} and the lowest share {least[row].item():g}; multi-label targets are "
            "not supported"
        )


def check_class_weights(class_weights: Tensor) -> None:
    """Waits for the device."""
    check_tensor("class_weights", class_weights)
    if not bool((class_weights.isfinite() & (class_weights > 0)).all()):
        raise ValueError(
            f"class_weights must be positive and finite, got {class_weights.tolist()[:10]}; for example "
            "1 / class_counts"
        )


def check_extras(
    scores: Tensor, negatives: tuple[str, ...], class_weights: Tensor | None, virtual: Tensor | None
) -> None:
    num_classes = scores.shape[1]
    for name, extra in (("class_weights", class_weights), ("virtual", virtual)):
        if extra is not None:
            check_tensor(name, extra)
    if class_weights is not None and class_weights.shape != (num_classes,):
        raise ValueError(
            f"class_weights have shape {tuple(class_weights.shape)}; expected ({num_classes},), one per class"
        )
    if class_weights is not None and can_look_at(class_weights):
        check_class_weights(class_weights)
    if virtual is not None and (virtual.dim() != 2 or virtual.shape[1] != num_classes or len(virtual) == 0):
        raise ValueError(
            f"virtual targets have shape {tuple(virtual.shape)}; expected (M, {num_classes}) with M > 0, "
            "as draw_virtual returns them"
        )
    if virtual is not None and "pairs" not in negatives:
        raise ValueError(f'virtual classifiers extend the pairs, but negatives are {negatives}; add "pairs"')
    if virtual is not None:
        check_shares("virtual targets", virtual)


def check_axes(axes: object) -> None:
    if not isinstance(axes, tuple) or not set(axes) <= set(AXES) or len(set(axes)) != len(axes):
        raise ValueError(f"axes must be a tuple of one or both of {AXES}, got {axes!r}")


def check_negatives(negatives: object) -> None:
    if negatives not in NEGATIVES:
        raise ValueError(f"negatives must be one of {NEGATIVES}, got {negatives!r}")


def check_choices(
    axes: tuple[str, ...], negatives: tuple[str, ...], temperature: float, duplicates: str, reduction: str
) -> None:
    check_axes(axes)
    if not axes:
        raise ValueError(f"axes must be a tuple of one or both of {AXES}, got {axes!r}")
    check_negatives(negatives)
    check_positive("temperature", temperature)
    check_choice("duplicates", duplicates, DUPLICATES)
    check_choice("reduction", reduction, REDUCTIONS)


def check_switches(centred: object, gather: object, fused: object) -> None:
    check_choice("centred", centred, (True, False))
    check_choice("gather", gather, (True, False))
    check_choice("fused", fused, ("auto", True, False))
