"""Examples of a torch Dataset, read again whenever they are used, so that its random transforms stay random.

Transforms draw from the global generators of torch, NumPy and Python. They are seeded for every example, and
restored afterwards: what is read depends on a seed and the example's row only, not on batches or processes.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from icmixup.lab.images.decode import to_rgb

BLOCK = 256  # examples that are in memory at a time where all of them are read
GLOBAL_GENERATORS = threading.RLock()  # all threads share them


class Indexable(Protocol):
    """A map-style torch Dataset: items are (input, label)."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> object: ...


@dataclass(frozen=True, eq=False)
class Examples:
    """Some rows of a torch Dataset. shape, dtype and device are those of the tensor that `square` returns."""

    source: Indexable
    rows: Tensor  # (N,) int64, on the CPU
    item_shape: tuple[int, ...]
    dtype: torch.dtype
    transform: Callable[[Tensor], object] | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: Tensor | slice) -> Examples:
        return replace(self, rows=self.rows[rows.cpu() if isinstance(rows, Tensor) else rows])

    @property
    def shape(self) -> torch.Size:
        return torch.Size([len(self), *self.item_shape])

    def dim(self) -> int:
        return len(self.shape)

    def to(self, device: torch.device | str) -> Examples:
        """The same examples, which are moved to a device after they are read."""
        return replace(self, device=torch.device(device))

    def square(self) -> Tensor:
        """(N, ...) as they are with a fixed seed: for tests, and to identify them."""
        return self.read(seed=0)

    def read(self, seed: int) -> Tensor:
        """(N, ...) on the device: the examples with the random transforms of a seed."""
        with seeded_generators() as reseed:
            items = [self.read_row(row, reseed, seed) for row in self.rows.tolist()]
        stacked = torch.stack(items) if items else torch.empty(self.shape, dtype=self.dtype)
        return stacked.to(self.device)

    def read_row(self, row: int, reseed: Callable[[int], None], seed: int) -> Tensor:
        reseed(mix_seed(seed, row))
        item, _ = read_item(self.source, row, self.transform)
        if tuple(item.shape) != self.item_shape or item.dtype != self.dtype:
            raise ValueError(
                f"item {row} of the dataset is {tuple(item.shape)} {item.dtype}, but the first item is "
                f"{self.item_shape} {self.dtype}; all must have one shape: resize or crop in a transform"
            )
        return item

    def blocks(self) -> Iterator[Tensor]:
        """The examples of `square`, a few at a time."""
        for start in range(0, len(self), BLOCK):
            yield self[start : start + BLOCK].square()


def mix_seed(seed: int, row: int) -> int:
    """A seed of 32 bits for each example, as many as NumPy takes."""
    return (seed * 2_654_435_761 + row * 40_503 + (row << 16)) % 2**32


@contextmanager
def seeded_generators() -> Iterator[Callable[[int], None]]:
    """A function that seeds the global generators of torch, NumPy and Python; they are restored at the
    end."""
    with GLOBAL_GENERATORS, torch.random.fork_rng(devices=[]):
        python, numpy = random.getstate(), np.random.get_state()
        try:
            yield seed_generators
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def seed_generators(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def read_item(
    source: Indexable, row: int, transform: Callable[[Tensor], object] | None = None
) -> tuple[Tensor, object]:
    """Input and label of one item; a ValueError if it is anything else."""
    item = source[row]
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise ValueError(
            f"items of a dataset must be (input, label), got {type(item).__name__} for item {row}; wrap the "
            "dataset in one that returns such pairs"
        )
    found = as_input(item[0], row)
    # A copy, since transforms may work in place, and the item may be a view of the user's data.
    return (found if transform is None else as_input(transform(found.clone()), row)), item[1]


def as_input(value: object, row: int) -> Tensor:
    """One input as a tensor: images as (channels, H, W) uint8, everything else as float32."""
    if isinstance(value, Image.Image):
        return picture(value)
    if isinstance(value, Tensor):
        return as_bytes_or_floats(value)
    array = np.asarray(value)
    if array.dtype == object or array.dtype.kind not in "uifb":
        raise ValueError(
            f"input {row} is {type(value).__name__}; inputs must be images, arrays or tensors of numbers"
        )
    return as_bytes_or_floats(torch.from_numpy(np.array(array)))


def picture(image: Image.Image) -> Tensor:
    """(channels, H, W) of an image of PIL: grey, RGB and RGBA as they are, palettes and others as RGB."""
    if image.mode == "1":
        image = image.convert("L")
    elif image.mode not in ("L", "RGB", "RGBA", "F") and not image.mode.startswith("I"):
        image = to_rgb(image)  # the bytes of a palette are numbers of colours
    array = np.array(image)
    array = array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if tensor.dtype == torch.uint8 else tensor.float()


def as_bytes_or_floats(value: Tensor) -> Tensor:
    """Images, (H, W), (channels, H, W) or (H, W, channels) bytes, stay bytes, which are normalised later;
    other numbers become float32."""
    if value.dtype != torch.uint8 or value.dim() not in (2, 3):
        return value.float()
    if value.dim() == 2:
        return value[None]
    return value.permute(2, 0, 1).contiguous() if is_channels_last(value.shape) else value


def is_channels_last(shape: Sequence[int]) -> bool:
    """Whether images of three dimensions are (H, W, channels) rather than (channels, H, W): only the last
    dimension can be the channels of a grey, RGB or RGBA image."""
    first, last = shape[0], shape[-1]
    return (last in (1, 3) and first not in (1, 3)) or (last == 4 and first not in (1, 3, 4))
