"""scikit-learn's handwritten digits, which need no download."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from icmixup.lab.datasets.subsets import Source, Split, hold_out


def read_digits() -> Source:
    """Return 1,797 grey images of 8 x 8 pixels, with a third of each class held out for testing."""
    images, labels, names = parse_digits()
    train, test = hold_out(Split(images, labels), names, parts=3)
    return Source(train, test, names, split_by="a third of each class held out")


@functools.cache  # scikit-learn parses text every time
def parse_digits() -> tuple[Tensor, Tensor, tuple[str, ...]]:
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.from_numpy(np.rint(found.images * (255 / 16)).astype(np.uint8))[:, None]
    return images, torch.from_numpy(found.target).long(), tuple(str(name) for name in found.target_names)
