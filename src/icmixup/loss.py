"""The Infinite Class Mixup loss.

B pairs on this rank    N pairs on all ranks    C classes    M virtual classifiers
scores S (B, C)         targets Y~ (B, C)       mixed scores S~ = S Y~^T (B, N)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from icmixup._checks import check_choice, check_extras, check_label_rows, check_rows
from icmixup.contrast.chunked import contrast_chunked
from icmixup.contrast.fused import contrast_fused, prefer_chunked, prefer_fused
from icmixup.contrast.plain import DUPLICATES, Duplicates, pick, target_keys
from icmixup.contrast.plain import contrast as contrast_plain
from icmixup.distributed import Ranks, gather_rows, meet_ranks

AXES = ("class", "pair")
NEGATIVES = (("pairs",), ("sources",), ("classes",), ("pairs", "classes"))
REDUCTIONS = ("mean", "sum", "none")
Reduction = Literal["mean", "sum", "none"]
Fused = Literal["auto"] | bool
Contrast = Callable[..., tuple[Tensor | None, Tensor | None]]


def infinite_class_loss(
    scores: Tensor,
    targets: Tensor,
    axes: tuple[str, ...] = AXES,
    *,
    negatives: tuple[str, ...] = ("pairs",),
    temperature: float = 1.0,
    class_weights: Tensor | None = None,
    virtual: Tensor | None = None,
    duplicates: Duplicates = "negative",
    centred: bool = False,
    reduction: Reduction = "mean",
    gather: bool = True,
    fused: Fused = "auto",
) -> Tensor:
    """Contrast each mixed image with its own interpolated classifier, on both axes  (Eq. 9).

    Row j of Y~ mixes the class weights into a classifier W y~_j (Eq. 2), and image i scores
    r_i^T W y~_j = S_i y~_j under it. So S~ = S Y~^T holds every image under every classifier,
    and neither features nor classifiers are needed:

        class axis   rows of S~      image i among all classifiers    (Z_cc, Eq. 5)
        pair axis    columns of S~   classifier i among all images    (Z_ci, Eq. 7)

    Takes what F.cross_entropy takes with soft targets, and can stand in its place. "All" is the pairs of
    every rank; averaged by DDP, the gradient is that of one process with the whole batch.

    >>> scores = model(icm.mix_inputs(images, pairs))
    >>> loss = icm.infinite_class_loss(scores, icm.mix_targets(labels, pairs, num_classes=100))

    Args:
        scores: (B, C) logits of this rank's mixed images.
        targets: (B, C) class shares they were mixed in; or (B,) integer labels, for validation: the loss is
            then plain cross-entropy of this rank's scores. Only `reduction` applies, and ranks do not
            communicate.
        axes: "class", "pair", or both.
        negatives: whom an image is told from on the class axis: ("pairs",) is the paper; ("sources",) its own
            two classes; ("classes",) the C original ones; ("pairs", "classes") the pairs and the original
            ones.
        temperature: divides S~.
        class_weights: (C,) for the pair axis, 1 / class size say: pair i counts sum_c y~_ic class_weights_c
            there, scaled to a mean of 1 over the batch, so that classifiers of rare classes are found as
            carefully.
        virtual: (M, C) targets of pairs that are not in the batch, more negatives for the class axis;
            together they weigh as much as the batch does. See draw_virtual.
        duplicates: pairs with the very same classifier are "negative" (the paper), left out ("ignore"), or
            "positive": picking any of them is right.
        centred: take the mean off each row of S~, so that the pair axis cannot push all scores of an image
            together, which changes no prediction; the class axis stays as it is. Ours, not the paper's.
        reduction: "mean", "sum", or "none" for one number a pair, (B,).
        gather: contrast with the pairs of every rank, if there are several.
        fused: True never stores S~ (Triton kernels, on a GPU); False stores it; "auto" does what is faster,
            and keeps memory linear in B wherever S~ would be large.

    Returns:
        Scalar, the mean over pairs on each axis, summed over axes (CLIP would halve it).
    """
    check_choices(axes, negatives, temperature, duplicates, reduction)
    if targets.dim() == 1:
        return label_loss(scores, targets, virtual, reduction)
    check_rows(scores, targets)
    check_extras(scores, negatives, class_weights, virtual)
    # Autocast would run the product in bfloat16, where near-equal classifiers tie.
    with torch.autocast(scores.device.type, enabled=False):
        # Told to the other ranks as they came in; a rank with other options would leave them waiting.
        choices = {
            "dtype of scores": scores.dtype,
            "dtype of targets": targets.dtype,
            "axes": axes,
            "negatives": negatives,
            "duplicates": duplicates,
            "centred": centred,
            "class_weights": "none" if class_weights is None else "given",
        }
        dtype = torch.promote_types(torch.promote_types(scores.dtype, targets.dtype), torch.float32)
        scores, targets = scores.to(dtype), targets.to(dtype)
        scores = scores if temperature == 1 else scores / temperature
        ranks = meet_ranks(scores, choices) if gather else Ranks((len(scores),), 0)
        at_once = reduction == "mean" and class_weights is None and ranks.alone
        class_losses, pair_losses = axis_losses(
            scores, targets, axes, negatives, virtual, duplicates, centred, ranks, fused, at_once
        )
        if pair_losses is not None and class_weights is not None:
            pair_losses = pair_losses * pair_weights(targets, class_weights.to(targets), ranks)
        parts = [part for part in (class_losses, pair_losses) if part is not None]
        losses = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        return reduce(losses, reduction, ranks)


def label_loss(
    scores: Tensor, labels: Tensor, virtual: Tensor | None = None, reduction: Reduction = "mean"
) -> Tensor:
    """Cross-entropy of (B,) integer labels, on this rank alone: one rank may validate while others do not."""
    check_label_rows(scores, labels, virtual)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return F.cross_entropy(scores, labels.long(), reduction=reduction)


def reduce(losses: Tensor, reduction: Reduction, ranks: Ranks) -> Tensor:
    """(B,) losses as asked for; () ones are means already."""
    if reduction == "sum":
        return losses.sum()
    if reduction == "none" or losses.dim() == 0:
        return losses
    # Ranks may hold unequal batches; DDP divides by their number, and N pairs share the mean.
    share = len(ranks.sizes) * len(losses) / ranks.total
    return losses.mean() if share == 1 else losses.mean() * share


class InfiniteClassLoss(nn.Module):
    """infinite_class_loss with its choices made once, to stand where nn.CrossEntropyLoss stood.

    >>> criterion = InfiniteClassLoss(temperature=0.5)
    >>> loss = criterion(model(inputs), targets)
    """

    class_weights: Tensor | None

    def __init__(
        self,
        axes: tuple[str, ...] = AXES,
        *,
        negatives: tuple[str, ...] = ("pairs",),
        temperature: float = 1.0,
        class_weights: Tensor | None = None,
        duplicates: Duplicates = "negative",
        centred: bool = False,
        reduction: Reduction = "mean",
        gather: bool = True,
        fused: Fused = "auto",
    ) -> None:
        super().__init__()
        check_choices(axes, negatives, temperature, duplicates, reduction)
        self.axes, self.negatives, self.temperature = axes, negatives, temperature
        self.duplicates, self.centred, self.reduction = duplicates, centred, reduction
        self.gather, self.fused = gather, fused
        self.register_buffer("class_weights", class_weights)

    def forward(self, scores: Tensor, targets: Tensor, virtual: Tensor | None = None) -> Tensor:
        """The loss of (B, C) scores.

        Args:
            scores: (B, C).
            targets: (B, C) class shares, or (B,) integer labels for plain cross-entropy.
            virtual: (M, C) virtual targets, drawn anew for every batch.
        """
        return infinite_class_loss(
            scores,
            targets,
            self.axes,
            negatives=self.negatives,
            temperature=self.temperature,
            class_weights=self.class_weights,
            virtual=virtual,
            duplicates=self.duplicates,
            centred=self.centred,
            reduction=self.reduction,
            gather=self.gather,
            fused=self.fused,
        )

    def extra_repr(self) -> str:
        return (
            f"axes={self.axes}, negatives={self.negatives}, temperature={self.temperature}, "
            f"duplicates={self.duplicates!r}, centred={self.centred}, reduction={self.reduction!r}"
        )


def axis_losses(
    scores: Tensor,
    targets: Tensor,
    axes: tuple[str, ...],
    negatives: tuple[str, ...],
    virtual: Tensor | None,
    duplicates: Duplicates,
    centred: bool,
    ranks: Ranks,
    fused: Fused,
    at_once: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Losses on the class axis and on the pair axis, (B,) or their mean; None for an axis not asked for."""
    among_pairs = "class" in axes and "pairs" in negatives
    classifiers: Tensor = gather_rows(targets, ranks)
    scores = centre(scores, classifiers) if centred else scores
    bias: Tensor | None = None
    if among_pairs and (virtual is not None or "classes" in negatives):
        classifiers, bias = add_classifiers(classifiers, "classes" in negatives, virtual)
    keys = None if duplicates == "negative" else target_keys(classifiers)
    own_keys = None if keys is None else keys[ranks.start : ranks.start + len(targets)]
    contrast = choose_contrast(fused, scores, classifiers, at_once)
    # This rank's rows of S~; on a single process they are all of S~, and its columns are at hand too.
    class_losses, pair_losses = contrast(
        scores,
        classifiers,
        offset=ranks.start,
        rows=among_pairs,
        columns="pair" in axes and ranks.alone,
        num_columns=len(targets),
        bias=bias,
        row_keys=own_keys,
        column_keys=keys,
        duplicates=duplicates,
    )
    if "pair" in axes and not ranks.alone:
        _, pair_losses = contrast(
            gather_rows(scores, ranks),
            targets,
            offset=-ranks.start,
            rows=False,
            row_keys=None if keys is None else keys[: ranks.total],
            column_keys=own_keys,
            duplicates=duplicates,
        )
    if "class" in axes and not among_pairs:
        class_losses = among_classes(scores, targets, negatives, duplicates)
    return class_losses, pair_losses


def centre(scores: Tensor, classifiers: Tensor) -> Tensor:
    """(B, C) scores of which every row of S~ has the mean 0, since each classifier's shares sum to 1."""
    return scores - (scores @ classifiers.mean(dim=0))[:, None]


def choose_contrast(fused: Fused, scores: Tensor, classifiers: Tensor, at_once: bool) -> Contrast:
    """Which form computes S~: the kernels, its parts one after another, or all of it, means included."""
    entries, device = (len(scores), len(classifiers)), scores.device
    if fused is True:
        return contrast_fused
    plain = partial(contrast_plain, reduction="mean") if at_once else contrast_plain
    if fused is False or classifiers.requires_grad:  # the other two know gradients of scores alone
        return plain
    if prefer_fused(*entries, scores.shape[1], device) and scores.dtype == torch.float32:
        return contrast_fused
    return contrast_chunked if prefer_chunked(*entries) else plain


def add_classifiers(targets: Tensor, classes: bool, virtual: Tensor | None) -> tuple[Tensor, Tensor]:
    """The classifiers behind those of the N pairs: the C original ones, and virtual ones with their bias.

    A classifier is a row of class shares. M virtual ones score log(M / N) less, so that they weigh as much as
    the N pairs of the batch.
    """
    parts, bias = [targets], [targets.new_zeros(len(targets))]
    if classes:
        parts.append(torch.eye(targets.shape[1], device=targets.device, dtype=targets.dtype))
        bias.append(targets.new_zeros(targets.shape[1]))
    if virtual is not None:
        parts.append(virtual.to(targets))
        bias.append(targets.new_full((len(virtual),), -math.log(len(virtual) / len(targets))))
    return torch.cat(parts), torch.cat(bias)


def among_classes(
    scores: Tensor, targets: Tensor, negatives: tuple[str, ...], duplicates: Duplicates
) -> Tensor:
    """The paper's two extra baselines (Sec. 4.1): the own classifier among original classes.

    The sources of a pair are the two largest shares of its target; a pair within one class has one source.
    """
    own = (scores * targets).sum(dim=1, keepdim=True)
    rivals = scores
    if negatives == ("sources",):
        share, source = targets.topk(min(2, targets.shape[1]), dim=1)
        rivals = scores.gather(1, source).masked_fill(share == 0, -torch.inf)
        same = share == 1
    else:
        same = targets == 1
    same = torch.cat([torch.ones_like(same[:, :1]), same], dim=1)
    return pick(torch.cat([own, rivals], dim=1), torch.zeros_like(own[:, 0]).long(), same, duplicates)


def pair_weights(targets: Tensor, class_weights: Tensor, ranks: Ranks) -> Tensor:
    """(B,) weights sum_c y~_ic class_weights_c, with a mean of 1 over the pairs of all ranks."""
    weights = targets @ class_weights
    return weights / gather_rows(weights, ranks).mean()


def check_choices(
    axes: tuple[str, ...], negatives: tuple[str, ...], temperature: float, duplicates: str, reduction: str
) -> None:
    if isinstance(axes, str) or not axes or not set(axes) <= set(AXES) or len(set(axes)) != len(axes):
        raise ValueError(f"axes must be a tuple of one or both of {AXES}, got {axes!r}")
    if negatives not in NEGATIVES:
        raise ValueError(f"negatives must be one of {NEGATIVES}, got {negatives!r}")
    if not temperature > 0:
        raise ValueError(f"temperature divides the scores and must be positive, got {temperature}")
    check_choice("duplicates", duplicates, DUPLICATES)
    check_choice("reduction", reduction, REDUCTIONS)
