"""The plain form: S~ is stored, and cross-entropy reads its rows and its columns.

R images, K classifiers, C classes    scores S (R, C)    targets Y~ (K, C)    mixed scores S~ = S Y~^T (R, K)
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from icmixup._checks import Duplicates
from icmixup.contrast.request import Losses, Request


def contrast_plain(request: Request) -> Losses:
    """Loss of each image among the classifiers (rows of S~), of each classifier among the images (columns).

    Returns:
        (R,) and (num_matched,) losses, or their means; None for what was not requested.
    """
    scores, targets, offset = request.scores, request.targets, request.offset
    mixed = scores @ targets.T
    row_keys, column_keys = request.keys()
    same = None if row_keys is None or column_keys is None else row_keys[:, None] == column_keys
    row_losses = column_losses = None
    num_matched = request.num_matched()
    index = torch.arange(max(len(scores), num_matched), device=scores.device)
    if request.rows:
        own = index[: len(scores)] + offset if offset else index[: len(scores)]
        biased = mixed if request.bias is None else mixed + request.bias
        row_losses = own_cross_entropy(biased, own, same, request.duplicates, request.reduction)
    if request.columns:
        own = index[:num_matched] - offset if offset else index[:num_matched]
        same = None if same is None else same[:, :num_matched].T
        # Torch 2.6 differentiates a slice of all columns by a copy.
        columns = mixed if num_matched == len(targets) else mixed[:, :num_matched]
        matched = columns.T
        column_losses = own_cross_entropy(matched, own, same, request.duplicates, request.reduction)
    return row_losses, column_losses


def own_cross_entropy(
    mixed: Tensor,
    own: Tensor,
    same: Tensor | None,
    duplicates: Duplicates,
    reduction: Literal["none", "mean"] = "none",
) -> Tensor:
    """Cross-entropy of each row, whose target is its own column.

    Args:
        mixed: (R, K).
        own: (R,) int64, the column that belongs to each row.
        same: (R, K) bool, columns equal to the own one; None if duplicates are "negative".
        duplicates: equal columns are "negative" (the paper), left out ("ignore"), or as correct as the own
            one ("positive": -log of the sum of their probabilities).

    Returns:
        (R,), or its mean.
    """
    if duplicates == "negative" or same is None:
        return F.cross_entropy(mixed, own, reduction=reduction)
    if duplicates == "ignore":
        others = same.scatter(1, own[:, None], False)
        return F.cross_entropy(mixed.masked_fill(others, -torch.inf), own, reduction=reduction)
    losses = -mixed.log_softmax(dim=1).masked_fill(~same, -torch.inf).logsumexp(dim=1)
    return losses.mean() if reduction == "mean" else losses


def target_keys(targets: Tensor) -> Tensor:
    """(K, C) targets to (K,) int64 that are equal exactly where two rows are equal.

    A fixed random projection in float64: two different rows collide with a probability near 1e-16, and no
    sorting is needed, which would make the host wait for the device.
    """
    classes = torch.arange(1, targets.shape[1] + 1, device=targets.device, dtype=torch.float64)
    direction = torch.frac(torch.sin(classes) * 43758.5453123) + 2.0
    # Without contiguous(), rows of a transposed tensor would be summed in an order that depends on the row.
    return (targets.double() * direction).contiguous().sum(dim=1).view(torch.int64)
