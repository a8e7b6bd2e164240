"""Random numbers that depend on the image and the position alone, not on the batch or the device.

The n-th number of an image is a hash of (corruption, image, stream, n), computed with integers on the device
of the images. So an image is corrupted in the same way in a batch of any size, in any order, on any device.

B images.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

LOW_32 = 0xFFFFFFFF
# Odd and below 2^31, so that products of 32-bit numbers fit into int64.
MULTIPLIERS = (0x7FEB352D, 0x45D9F3B5, 0x2C1B3C6D)
BITS = 23  # of a uniform number: with half a step added it is exact in float32, and neither 0 nor 1


@dataclass(frozen=True, eq=False)
class Draws:
    """The random numbers of B images."""

    keys: Tensor  # (B,) int64, 32 bits of each image

    def uniform(self, stream: int, *shape: int) -> Tensor:
        """(B, *shape) float32 in (0, 1); different streams are independent."""
        counters = torch.arange(math.prod(shape), device=self.keys.device)
        counters = mix_bits(counters + mix_bits(torch.tensor(stream + 1)).item())
        bits = mix_bits(self.keys[:, None] ^ counters[None]) >> (32 - BITS)
        return ((bits.float() + 0.5) * 2.0**-BITS).view(-1, *shape)

    def normal(self, stream: int, *shape: int) -> Tensor:
        """(B, *shape) float32, standard normal."""
        return math.sqrt(2) * torch.erfinv(2 * self.uniform(stream, *shape) - 1)


def draws_of(name: str, rows: Tensor) -> Draws:
    """The random numbers of a corruption for images with these (B,) numbers."""
    return Draws(mix_bits(mix_bits(rows.long()) ^ zlib.crc32(name.encode())))


def mix_bits(numbers: Tensor) -> Tensor:
    """A hash of integers of which the low 32 bits count: every input bit affects every output bit."""
    numbers = numbers & LOW_32
    for multiplier in MULTIPLIERS:
        numbers = ((numbers ^ (numbers >> 16)) * multiplier) & LOW_32
    return numbers ^ (numbers >> 15)
