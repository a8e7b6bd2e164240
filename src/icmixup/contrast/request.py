"""What the three forms of the loss take: one Request, instead of the same arguments written out in each.

R images, K classifiers, C classes    scores S (R, C)    targets Y~ (K, C)    mixed scores S~ = S Y~^T (R, K)
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

from icmixup._checks import Duplicates


class Request(NamedTuple):
    """Which losses to compute from S~: of its rows, of its columns, or of both.

    Args:
        scores: (R, C).
        targets: (K, C) class shares, one row per classifier.
        offset: image i and classifier i + offset belong together.
        rows: compute the loss of each image among the classifiers.
        columns: compute the loss of each classifier among the images.
        num_columns: the first `num_columns` classifiers have an image of their own, all of them by default;
            the others are only negatives on the rows.
        bias: (K,) added to every row of S~; 0 for classifiers that have an image.
        row_keys, column_keys: (R,) and (K,) integers, equal exactly where two targets are equal; needed
            unless duplicates are "negative".
        duplicates: how a classifier equal to the image's own one counts: as a "negative", not at all
            ("ignore"), or as a "positive".
        reduction: "mean" lets the plain form return means, which cross-entropy computes without a further
            kernel; the other two forms always return one loss per row and column.
    """

    scores: Tensor
    targets: Tensor
    offset: int = 0
    rows: bool = True
    columns: bool = True
    num_columns: int | None = None
    bias: Tensor | None = None
    row_keys: Tensor | None = None
    column_keys: Tensor | None = None
    duplicates: Duplicates = "negative"
    reduction: Literal["none", "mean"] = "none"

    # Methods and not properties, which torch.compile of torch 2.6 cannot trace in a NamedTuple of tensors.

    def num_matched(self) -> int:
        """Number of classifiers that have an image of their own."""
        return len(self.targets) if self.num_columns is None else self.num_columns

    def keys(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Keys of rows and columns; None where equal targets need not be found."""
        if self.duplicates == "negative" or self.row_keys is None or self.column_keys is None:
            return None, None
        return self.row_keys, self.column_keys


Losses = tuple[Tensor | None, Tensor | None]  # of rows and of columns; None for those not requested
