"""Images that occur more than once: a test image that was trained on makes every accuracy too high."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from icmixup.lab.datasets.photos import Photos
from icmixup.lab.datasets.subsets import Dataset, Split


class Duplicates(NamedTuple):
    """Test images that are identical to a training image, pixel by pixel."""

    images: int
    other_label: int  # those of them whose label none of these training images has


def count_duplicates(dataset: Dataset) -> Duplicates:
    """Test images that are also training images; other inputs, such as rows of a table, count as images."""
    trained: dict[bytes, set[int]] = {}
    for digest, label in labelled_digests(dataset.train):
        trained.setdefault(digest, set()).add(label)
    found = [
        (trained[digest], label) for digest, label in labelled_digests(dataset.test) if digest in trained
    ]
    return Duplicates(len(found), sum(label not in labels for labels, label in found))


def count_copies(dataset: Dataset) -> int:
    """Images, of training and test together, that are identical to another one."""
    times = Counter(digest for part in (dataset.train, dataset.test) for digest, _ in labelled_digests(part))
    return sum(count for count in times.values() if count > 1)


def labelled_digests(split: Split) -> Iterator[tuple[bytes, int]]:
    """A hash of each image, and its label."""
    return zip(image_digests(split), split.labels.tolist(), strict=True)


def image_digests(split: Split) -> Iterator[bytes]:
    for part in split.contents():
        array = part.cpu().contiguous().numpy()
        # Photos come one by one, everything else in blocks.
        for image in (array,) if isinstance(split.images, Photos) else array:
            content = hashlib.blake2b(repr(image.shape).encode(), digest_size=16)
            content.update(image.data)
            yield content.digest()
