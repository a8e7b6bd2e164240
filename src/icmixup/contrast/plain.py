"""Who belongs to whom, in plain torch: the B x B matrix S~ is stored once, and both its axes are read.

R images, K classifiers, C classes    scores S (R, C)    targets Y~ (K, C)    mixed scores S~ = S Y~^T (R, K)
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Duplicates = Literal["negative", "ignore", "positive"]
DUPLICATES = ("negative", "ignore", "positive")


def contrast(
    scores: Tensor,
    targets: Tensor,
    *,
    offset: int = 0,
    rows: bool = True,
    columns: bool = True,
    num_columns: int | None = None,
    bias: Tensor | None = None,
    row_keys: Tensor | None = None,
    column_keys: Tensor | None = None,
    duplicates: Duplicates = "negative",
    reduction: Literal["none", "mean"] = "none",
) -> tuple[Tensor | None, Tensor | None]:
    """Loss of each image among the classifiers (rows of S~), and of each classifier among the images
    (columns).

    Args:
        scores: (R, C).
        targets: (K, C) class shares.
        offset: image i and classifier i + offset belong together.
        rows, columns: which of the two to compute.
        num_columns: how many leading classifiers have an image; those behind are only negatives on the rows.
        bias: (K,) added to every row of S~; 0 for classifiers that have an image.
        row_keys, column_keys: (R,), (K,) equal where two targets are; needed unless duplicates are
            "negative".
        duplicates: what a classifier equal to the own one is.
        reduction: "mean" saves the kernels that would add up what cross-entropy can return added up.

    Returns:
        (R,) and (num_columns,) losses, or their means, or None in place of what was not asked for.
    """
    mixed = scores @ targets.T
    same = None if row_keys is None or column_keys is None else row_keys[:, None] == column_keys
    row_losses = column_losses = None
    number = len(targets) if num_columns is None else num_columns
    place = torch.arange(max(len(scores), number), device=scores.device)
    if rows:
        own = place[: len(scores)] + offset if offset else place[: len(scores)]
        row_losses = pick(mixed if bias is None else mixed + bias, own, same, duplicates, reduction)
    if columns:
        own = place[:number] - offset if offset else place[:number]
        same = None if same is None else same[:, :number].T
        column_losses = pick(mixed[:, :number].T, own, same, duplicates, reduction)
    return row_losses, column_losses


def pick(
    mixed: Tensor,
    own: Tensor,
    same: Tensor | None,
    duplicates: Duplicates,
    reduction: Literal["none", "mean"] = "none",
) -> Tensor:
    """Cross-entropy of picking, in each row, its own column.

    Args:
        mixed: (R, K).
        own: (R,) int64, the column that belongs to each row.
        same: (R, K) bool, columns equal to the own one; None if duplicates are "negative".
        duplicates: equal columns are "negative" (the paper), left out ("ignore"), or as right as the own one
            ("positive": -log of the sum of their probabilities).

    Returns:
        (R,), or the mean of it.
    """
    if duplicates == "negative" or same is None:
        return F.cross_entropy(mixed, own, reduction=reduction)
    if duplicates == "ignore":
        others = same.scatter(1, own[:, None], False)
        return F.cross_entropy(mixed.masked_fill(others, -torch.inf), own, reduction=reduction)
    losses = -mixed.log_softmax(dim=1).masked_fill(~same, -torch.inf).logsumexp(dim=1)
    return losses.mean() if reduction == "mean" else losses


def target_keys(targets: Tensor) -> Tensor:
    """(K, C) targets to (K,) int64 that are equal exactly where two rows are.

    A fixed random projection in float64: two different rows meet with a probability near 1e-16, and no
    sorting is needed, which would make the host wait for the device.
    """
    classes = torch.arange(1, targets.shape[1] + 1, device=targets.device, dtype=torch.float64)
    direction = torch.frac(torch.sin(classes) * 43758.5453123) + 2.0
    # Rows of a transposed tensor would be summed in an order that depends on their place.
    return (targets.double() * direction).contiguous().sum(dim=1).view(torch.int64)
