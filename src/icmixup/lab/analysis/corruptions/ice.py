"""A texture of ice crystals, computed: Hendrycks and Dietterich (2019) overlay photographs of frost instead.

Crystals are star-shaped: each pixel belongs to the nearest of some random centres, and is bright on the rays
that leave that centre. Smooth noise bends the rays and leaves parts of the window free of ice.

S pixels on a side, K crystals.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from icmixup.lab.analysis.corruptions.draws import Draws, draws_of

RAYS = ((7, 0.4), (16, 0.35), (37, 0.25))  # half the number of rays of a crystal, and their weight
LAYERS = ((40, 1.0), (160, 0.8))  # crystals on the texture, and their weight


@functools.lru_cache(maxsize=4)
def ice(side: int) -> Tensor:
    """(S, S) float32 in [0, 1] on the CPU; the same at every size, apart from details."""
    draws = draws_of("ice", torch.zeros(1, dtype=torch.long))
    place = (torch.arange(side) + 0.5) / side
    bends = [0.03 * (smooth_noise(draws, axis, 16, side) - 0.5) for axis in range(2)]
    y, x = place[:, None] + bends[0], place + bends[1]
    crystals = sum(
        weight * rays(draws, 2 + 2 * number, count, y, x) for number, (count, weight) in enumerate(LAYERS)
    )
    haze = 0.6 * smooth_noise(draws, 10, 7, side) + 0.4 * smooth_noise(draws, 11, 20, side)
    covered = ((haze - 0.28) / 0.3).clamp(0, 1)
    grain = 0.4 + draws.uniform(12, side, side)[0] / 2
    return (0.2 + 0.25 * haze + covered * crystals * grain).clamp(0, 1)


def smooth_noise(draws: Draws, stream: int, cells: int, side: int) -> Tensor:
    """(S, S): random numbers on a grid of cells, interpolated."""
    coarse = draws.uniform(stream, 1, cells, cells)
    return F.interpolate(coarse, size=(side, side), mode="bicubic").clamp(0, 1)[0, 0]


def rays(draws: Draws, stream: int, crystals: int, y: Tensor, x: Tensor) -> Tensor:
    """(S, S) in [0, 1]: bright on the rays of K random stars.

    Args:
        y, x: (S, S) positions as shares of the side.
    """
    centres, turns = draws.uniform(stream, crystals, 2)[0], draws.uniform(stream + 1, crystals)[0]
    positions = torch.stack([y, x], dim=-1)
    distance, owner = torch.cdist(positions.flatten(0, 1), centres).min(dim=1)
    down, right = (positions - centres[owner].view_as(positions)).unbind(dim=-1)
    angle, turn = torch.atan2(down, right), 2 * math.pi * turns[owner].view_as(y)
    wobble = 1.5 * torch.sin(9 * math.sqrt(crystals) * distance.view_as(y) + 3 * turn)
    waves = [weight * (1 - torch.sin(n * (angle + turn) + wobble).abs()) ** 2 for n, weight in RAYS]
    return torch.stack(waves).sum(dim=0)
