"""The Infinite Class Mixup loss.

B pairs on this rank    N pairs on all ranks    C classes    M virtual classifiers
scores S (B, C)         targets Y~ (B, C)       mixed scores S~ = S Y~^T (B, N)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from icmixup._checks import (
    AXES,
    Duplicates,
    Reduction,
    check_choices,
    check_class_weights,
    check_extras,
    check_label_rows,
    check_rows,
    check_switches,
    check_tensor,
)
from icmixup.contrast import Fused, Losses, Request, choose
from icmixup.contrast.plain import own_cross_entropy, target_keys
from icmixup.distributed import Ranks, gather_rows, meet_ranks


class Options(NamedTuple):
    """How pairs are contrasted: the arguments of infinite_class_loss with these names."""

    axes: tuple[str, ...]
    negatives: tuple[str, ...]
    temperature: float
    duplicates: Duplicates
    centred: bool
    reduction: Reduction
    fused: Fused

    def contrasts_pairs(self) -> bool:
        """Whether the class axis contrasts an image with the classifiers of the other pairs."""
        return "class" in self.axes and "pairs" in self.negatives


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

    Takes the same arguments as F.cross_entropy with soft targets, and can replace it. "All" means the pairs
    of every rank; averaged by DDP, the gradient is that of one process with the whole batch.

    >>> scores = model(icm.mix_inputs(images, pairs))
    >>> loss = icm.infinite_class_loss(scores, icm.mix_targets(labels, pairs, num_classes=100))

    Args:
        scores: (B, C) logits of this rank's mixed images.
        targets: (B, C) class shares they were mixed in; or (B,) integer labels, for validation: the loss is
            then plain cross-entropy of this rank's scores. Only `reduction` applies, and ranks do not
            communicate.
        axes: "class", "pair", or both.
        negatives: what each image is contrasted with on the class axis: ("pairs",) as in the paper;
            ("sources",) the two classes it was mixed from; ("classes",) the C original classes;
            ("pairs", "classes") the pairs and the original classes.
        temperature: divides S~.
        class_weights: (C,) for the pair axis, for example 1 / class size, so that rare classes count as much
            as others: the weight of pair i is sum_c y~_ic class_weights_c, scaled to a mean of 1 per batch.
        virtual: (M, C) targets of pairs that are not in the batch: more negatives for the class axis, which
            together weigh as much as the batch does. See draw_virtual.
        duplicates: pairs with exactly the same classifier are "negative" (the paper), left out ("ignore"),
            or "positive": each of them is a correct answer.
        centred: subtract the mean from each row of S~, so that the pair axis cannot shift all scores of an
            image, which changes no prediction; the class axis does not change. Not part of the paper.
        reduction: "mean", "sum", or "none" for one loss per pair, (B,).
        gather: contrast with the pairs of every rank, if there are several.
        fused: True never stores S~ (Triton kernels, on a GPU); False stores it; "auto" chooses the faster
            one, and keeps memory linear in B where S~ would be large. Targets that require a gradient need
            one of the last two. Second derivatives need fused=False, and gather=False on several ranks.

    Values are checked where that is free. On a GPU a check would make the host wait, so there targets whose
    rows do not sum to 1, and class_weights that are not positive, are not noticed.

    Returns:
        Scalar, the mean over pairs on each axis, summed over axes (CLIP would halve it).
    """
    options = Options(axes, negatives, temperature, duplicates, centred, reduction, fused)
    check_choices(axes, negatives, temperature, duplicates, reduction)
    check_switches(centred, gather, fused)
    check_tensor("scores", scores)
    check_tensor("targets", targets)
    if targets.dim() == 1:
        return label_loss(scores, targets, virtual, reduction)
    check_rows(scores, targets)
    check_extras(scores, negatives, class_weights, virtual)
    # Autocast would run the product in bfloat16, where near-equal classifiers tie.
    with torch.autocast(scores.device.type, enabled=False):
        # What must be the same on all ranks: with other options one rank would leave the others waiting.
        shared = {
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
        ranks = meet_ranks(scores, shared) if gather else Ranks((len(scores),), 0)
        # Cross-entropy can return means, unless pairs are weighted or shared between ranks.
        mean_inside = reduction == "mean" and class_weights is None and ranks.alone()
        class_losses, pair_losses = axis_losses(scores, targets, virtual, options, ranks, mean_inside)
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
    """Reduce (B,) losses; () losses are means already."""
    if reduction == "sum":
        return losses.sum()
    if reduction == "none" or losses.dim() == 0:
        return losses
    # Ranks may hold unequal batches; DDP divides by their number, and N pairs share the mean.
    share = len(ranks.sizes) * len(losses) / ranks.total()
    return losses.mean() if share == 1 else losses.mean() * share


def is_half(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize < 4


class ExactBuffers(nn.Module):
    """Buffers that stay as exact as they are when a model with this module is converted to half precision."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            after = self._buffers[name]
            if buffer is not None and after is not None and is_half(after) and not is_half(buffer):
                self._buffers[name] = buffer.to(after.device)
        return self


class InfiniteClassLoss(ExactBuffers):
    """infinite_class_loss as a module with fixed options, to replace nn.CrossEntropyLoss.

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
        check_switches(centred, gather, fused)
        if class_weights is not None:
            check_class_weights(class_weights)
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
    virtual: Tensor | None,
    options: Options,
    ranks: Ranks,
    mean_inside: bool,
) -> Losses:
    """Losses on the class axis and on the pair axis: (B,), or their mean; None for an axis not in options."""
    axes, negatives, duplicates = options.axes, options.negatives, options.duplicates
    classifiers: Tensor = gather_rows(targets, ranks)
    scores = centre(scores, classifiers) if options.centred else scores
    bias: Tensor | None = None
    if options.contrasts_pairs() and (virtual is not None or "classes" in negatives):
        classifiers, bias = add_classifiers(classifiers, "classes" in negatives, virtual)
    keys = None if duplicates == "negative" else target_keys(classifiers)
    own_keys = None if keys is None else keys[ranks.start() : ranks.start() + len(targets)]
    # This rank's rows of S~; on a single process they are all of S~, so the columns are complete as well.
    request = Request(
        scores,
        classifiers,
        offset=ranks.start(),
        rows=options.contrasts_pairs(),
        columns="pair" in axes and ranks.alone(),
        num_columns=len(targets),
        bias=bias,
        row_keys=own_keys,
        column_keys=keys,
        duplicates=duplicates,
        reduction="mean" if mean_inside else "none",
    )
    contrast = choose(request, options.fused)
    class_losses, pair_losses = contrast(request)
    if "pair" in axes and not ranks.alone():
        column_request = Request(
            gather_rows(scores, ranks),
            targets,
            offset=-ranks.start(),
            rows=False,
            row_keys=None if keys is None else keys[: ranks.total()],
            column_keys=own_keys,
            duplicates=duplicates,
        )
        _, pair_losses = contrast(column_request)
    if "class" in axes and not options.contrasts_pairs():
        class_losses = among_classes(scores, targets, negatives, duplicates)
    return class_losses, pair_losses


def centre(scores: Tensor, classifiers: Tensor) -> Tensor:
    """Shift (B, C) scores so that every row of S~ has the mean 0: the shares of a classifier sum to 1."""
    return scores - (scores @ classifiers.mean(dim=0))[:, None]


def add_classifiers(targets: Tensor, classes: bool, virtual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Append the C original classifiers and the virtual ones to those of the N pairs, with a bias for each.

    A classifier is a row of class shares. The bias of M virtual ones is -log(M / N), so that they weigh as
    much as the N pairs of the batch.
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
    """The paper's two extra baselines (Sec. 4.1): each own classifier among original classes.

    The sources of a pair are the two largest shares of its target; a pair within one class has one source.
    Label smoothing gives every class a share, so the lowest of three or more is not that of a source.
    """
    own = (scores * targets).sum(dim=1, keepdim=True)
    negative_scores = scores
    if negatives == ("sources",):
        share, source = targets.topk(min(2, targets.shape[1]), dim=1)
        floor = targets.amin(dim=1, keepdim=True) if targets.shape[1] > 2 else torch.zeros_like(share)
        alone = (share <= floor) & (share < share[:, :1])
        negative_scores = scores.gather(1, source).masked_fill(alone, -torch.inf)
        same = share == 1
    else:
        same = targets == 1
    same = torch.cat([torch.ones_like(same[:, :1]), same], dim=1)
    candidates = torch.cat([own, negative_scores], dim=1)
    return own_cross_entropy(candidates, torch.zeros_like(own[:, 0]).long(), same, duplicates)


def pair_weights(targets: Tensor, class_weights: Tensor, ranks: Ranks) -> Tensor:
    """(B,) weights sum_c y~_ic class_weights_c, with a mean of 1 over the pairs of all ranks."""
    weights = targets @ class_weights
    return weights / gather_rows(weights, ranks).mean()
