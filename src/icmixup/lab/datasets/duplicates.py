"""Images that occur more than once: a test image that was trained on makes every accuracy too high."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

from icmixup.lab.datasets.photos import Photos
from icmixup.lab.datasets.subsets import Dataset, Split


class Duplicates(NamedTuple):
    """Images that are identical to another one, pixel by pixel."""

    leaked: int  # test images that are identical to a training image
    copies: int  # images, of training and test together, that are identical to another one
    conflicts: int  # those of them that are identical to one with another label


def count_duplicates(dataset: Dataset) -> Duplicates:
    """Images that are identical to another one; other inputs, such as rows of a table, count as images."""
    train, test = (labels_by_digest(part) for part in (dataset.train, dataset.test))
    same = [[*train.get(digest, ()), *test.get(digest, ())] for digest in train.keys() | test.keys()]
    return Duplicates(
        sum(len(labels) for digest, labels in test.items() if digest in train),
        sum(len(labels) for labels in same if len(labels) > 1),
        sum(len(labels) for labels in same if len(set(labels)) > 1),
    )


def labels_by_digest(split: Split) -> dict[bytes, list[int]]:
    """The labels of the images with each hash."""
    found: dict[bytes, list[int]] = {}
    for digest, label in zip(image_digests(split), split.labels.tolist(), strict=True):
        found.setdefault(digest, []).append(label)
    return found


def image_digests(split: Split) -> Iterator[bytes]:
    for part in split.contents():
        array = part.cpu().contiguous().numpy()
        # Photos come one by one, everything else in blocks.
        for image in (array,) if isinstance(split.images, Photos) else array:
            content = hashlib.blake2b(repr(image.shape).encode(), digest_size=16)
            content.update(image.data)
            yield content.digest()
