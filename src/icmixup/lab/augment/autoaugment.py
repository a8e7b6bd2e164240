"""AutoAugment's policy for CIFAR (Cubuk et al., 2019), and Cutout (DeVries and Taylor, 2017).

Each image gets one of 25 sub-policies, uniformly. A sub-policy has two operations in turn, each with its own
probability and a magnitude from 0 to 9; operations with a sign get either one. Full magnitude is that of
torchvision's AutoAugment:

    shear-x shear-y            0.3 pixels per pixel
    translate-x translate-y    150 / 331 of the side
    rotate                     30 degrees
    brightness color contrast sharpness    by a factor of 1 +- 0.9
    posterize                  8 bits per channel down to 4
    solarize                   pixels from 255 down to 0 are inverted

The operations themselves are TrivialAugment's (`icmixup.lab.augment.trivial`), whose full strength is larger:
a magnitude is converted to a share of it. Pixels from outside the image are black, as in torchvision; the
authors' own code fills them with grey.
"""

from __future__ import annotations

import torch
from torch import Tensor

from icmixup.lab.augment.colour import Erased
from icmixup.lab.augment.trivial import (
    FACTOR,
    FEWEST_BITS,
    KERNELS,
    SHEAR,
    SHIFT,
    TURN,
    DrawnOperations,
)

MOST = 9  # magnitude
# Operation, probability and magnitude of both steps of each sub-policy.
SubPolicy = tuple[tuple[str, float, int], tuple[str, float, int]]
POLICY: tuple[SubPolicy, ...] = (
    (("invert", 0.1, 0), ("contrast", 0.2, 6)),
    (("rotate", 0.7, 2), ("translate-x", 0.3, 9)),
    (("sharpness", 0.8, 1), ("sharpness", 0.9, 3)),
    (("shear-y", 0.5, 8), ("translate-y", 0.7, 9)),
    (("autocontrast", 0.5, 0), ("equalize", 0.9, 0)),
    (("shear-y", 0.2, 7), ("posterize", 0.3, 7)),
    (("color", 0.4, 3), ("brightness", 0.6, 7)),
    (("sharpness", 0.3, 9), ("brightness", 0.7, 9)),
    (("equalize", 0.6, 0), ("equalize", 0.5, 0)),
    (("contrast", 0.6, 7), ("sharpness", 0.6, 5)),
    (("color", 0.7, 7), ("translate-x", 0.5, 8)),
    (("equalize", 0.3, 0), ("autocontrast", 0.4, 0)),
    (("translate-y", 0.4, 3), ("sharpness", 0.2, 6)),
    (("brightness", 0.9, 6), ("color", 0.2, 8)),
    (("solarize", 0.5, 2), ("invert", 0.0, 0)),
    (("equalize", 0.2, 0), ("autocontrast", 0.6, 0)),
    (("equalize", 0.2, 0), ("equalize", 0.6, 0)),
    (("color", 0.9, 9), ("equalize", 0.6, 0)),
    (("autocontrast", 0.8, 0), ("solarize", 0.2, 8)),
    (("brightness", 0.1, 3), ("color", 0.7, 0)),
    (("solarize", 0.4, 5), ("autocontrast", 0.9, 0)),
    (("translate-y", 0.9, 9), ("translate-y", 0.7, 9)),
    (("autocontrast", 0.9, 0), ("solarize", 0.8, 3)),
    (("equalize", 0.8, 0), ("invert", 0.1, 0)),
    (("translate-y", 0.7, 9), ("autocontrast", 0.9, 0)),
)


def relative_strength(name: str, magnitude: int, height: int, width: int) -> float:
    """A magnitude of AutoAugment as a share of TrivialAugment's full strength."""
    part = magnitude / MOST
    full = {
        **dict.fromkeys(("shear-x", "shear-y"), 0.3 / SHEAR),
        "translate-x": 150 / 331 * width / min(SHIFT, width),
        "translate-y": 150 / 331 * height / min(SHIFT, height),
        "rotate": 30 / TURN,
        **dict.fromkeys(("brightness", "color", "contrast", "sharpness"), 0.9 / FACTOR),
        "solarize": 1.0,
    }
    if name == "posterize":  # a whole number of bits
        return round(4 * part) / (8 - FEWEST_BITS)
    return part * full.get(name, 0.0)


def draw_policy(
    count: int, height: int, width: int, generator: torch.Generator
) -> tuple[DrawnOperations, DrawnOperations]:
    """Draw both operations of each of `count` images, on the generator's device; "identity" where the
    probability leaves an operation out."""
    device = generator.device
    policy = torch.randint(len(POLICY), (count,), generator=generator, device=device)
    draws = torch.rand(2, count, generator=generator, device=device)
    signs = 2 * torch.randint(2, (2, count), generator=generator, device=device) - 1
    first, second = (
        draw_step([sub[k] for sub in POLICY], policy, draws[k], signs[k], height, width) for k in range(2)
    )
    return first, second


def draw_step(
    steps: list[tuple[str, float, int]], policy: Tensor, draws: Tensor, signs: Tensor, height: int, width: int
) -> DrawnOperations:
    """One operation of each image from its (N,) sub-policy, uniform number and sign."""
    names, identity = list(KERNELS), list(KERNELS).index("identity")
    operation = torch.tensor([names.index(name) for name, _, _ in steps], device=policy.device)[policy]
    chance = torch.tensor([chance for _, chance, _ in steps], device=policy.device)[policy]
    strength = torch.tensor(
        [relative_strength(name, magnitude, height, width) for name, _, magnitude in steps],
        device=policy.device,
    )[policy]
    return DrawnOperations(torch.where(draws < chance, operation, identity), signs * strength)


def draw_cutout(
    count: int, channels: int, height: int, width: int, side: int, generator: torch.Generator
) -> Erased:
    """Black squares of `side` pixels around uniformly random pixels; what lies outside the image is cut off,
    as in the authors' code."""
    device = generator.device
    half = side // 2
    y = torch.randint(height, (count,), generator=generator, device=device)
    x = torch.randint(width, (count,), generator=generator, device=device)
    top, left = (y - half).clamp(min=0), (x - half).clamp(min=0)
    bottom, right = (y + half).clamp(max=height), (x + half).clamp(max=width)
    box = torch.stack([top, left, bottom - top, right - left], dim=1)
    return Erased(box, torch.zeros(count, channels, dtype=torch.uint8, device=device))
