"""TrivialAugmentWide (Mueller and Hutter, 2021): one random operation of random strength per image.

The operation is uniform over the fourteen of OPERATIONS, the strength over 31 steps from zero to full, and
the sign over both for operations with a sign. Full strength is that of torchvision's TrivialAugmentWide:

    shear-x shear-y            0.99 pixels per pixel, from the upper left corner
    translate-x translate-y    32 pixels, or the whole side of a smaller image
    rotate                     135 degrees, about the centre
    brightness color contrast sharpness    by a factor of 1 +- 0.99
    posterize                  8 bits per channel down to 2
    solarize                   pixels from 255 down to 0 are inverted
    identity autocontrast equalize         have no strength

Geometric operations take the nearest pixel, and black outside the image. Pixel values equal Pillow's to
within a rounding error of 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from icmixup.lab.augment.affine import affine_pixels, gather_pixels, rotation_matrix

STEPS = 31
SHEAR, SHIFT, TURN, FACTOR, FEWEST_BITS = 0.99, 32, 135.0, 0.99, 2


class DrawnOperations(NamedTuple):
    """Operation and strength for each image: both (N,)."""

    operation: Tensor  # int64, index in KERNELS
    strength: Tensor  # float32 in [-1, 1]; operations without a sign use its absolute value


def draw_operations(count: int, generator: torch.Generator) -> DrawnOperations:
    """Draw an operation and its strength for each of `count` images, on the generator's device."""
    device = generator.device
    operation = torch.randint(len(OPERATIONS), (count,), generator=generator, device=device)
    step = torch.randint(STEPS, (count,), generator=generator, device=device)
    sign = 2 * torch.randint(2, (count,), generator=generator, device=device) - 1
    return DrawnOperations(operation, sign * step / (STEPS - 1))


def apply_operations(images: Tensor, drawn: DrawnOperations) -> Tensor:
    """Apply its operation to each image: (N, channels, H, W) uint8 in and out, channels 1 or 3.

    With `drawn` on the CPU, images on a GPU are changed without waiting for the GPU.
    """
    result = torch.empty_like(images)
    sizes = torch.bincount(drawn.operation, minlength=len(KERNELS)).tolist()
    order = drawn.operation.argsort(stable=True).to(images.device, non_blocking=True)
    strength = drawn.strength.to(images.device, non_blocking=True)
    for rows, operate in zip(torch.split(order, sizes), KERNELS.values(), strict=True):
        if len(rows):
            result[rows] = operate(images[rows], strength[rows])
    return result


def _identity(images: Tensor, strength: Tensor) -> Tensor:
    return images


def _warp(images: Tensor, *matrix: Tensor) -> Tensor:
    return gather_pixels(images, *affine_pixels(torch.stack(matrix, dim=1), *images.shape[2:]))


def _shear_x(images: Tensor, strength: Tensor) -> Tensor:
    one, zero = torch.ones_like(strength), torch.zeros_like(strength)
    return _warp(images, one, SHEAR * strength, zero, zero, one, zero)


def _shear_y(images: Tensor, strength: Tensor) -> Tensor:
    one, zero = torch.ones_like(strength), torch.zeros_like(strength)
    return _warp(images, one, zero, zero, SHEAR * strength, one, zero)


def _translate_x(images: Tensor, strength: Tensor) -> Tensor:
    one, zero = torch.ones_like(strength), torch.zeros_like(strength)
    return _warp(images, one, zero, (strength * min(SHIFT, images.shape[3])).trunc(), zero, one, zero)


def _translate_y(images: Tensor, strength: Tensor) -> Tensor:
    one, zero = torch.ones_like(strength), torch.zeros_like(strength)
    return _warp(images, one, zero, zero, zero, one, (strength * min(SHIFT, images.shape[2])).trunc())


def _rotate(images: Tensor, strength: Tensor) -> Tensor:
    matrix = rotation_matrix(TURN * strength, *images.shape[2:])
    return gather_pixels(images, *affine_pixels(matrix, *images.shape[2:]))


def _blend(degenerate: Tensor, images: Tensor, strength: Tensor) -> Tensor:
    """Interpolate or extrapolate: factor 0 is the degenerate image, 1 the image; truncated as in Pillow."""
    factor = 1 + FACTOR * strength[:, None, None, None]
    return (
        torch.lerp(degenerate.float().expand_as(images), images.float(), factor).clamp(0, 255).to(torch.uint8)
    )


def grey_image(values: Tensor) -> Tensor:
    """(N, 1, H, W) luma by ITU-R 601 of float images."""
    if values.shape[1] == 1:
        return values
    red, green, blue = values.unbind(1)
    return (0.299 * red + 0.587 * green + 0.114 * blue)[:, None]


def _grey(images: Tensor) -> Tensor:
    """(N, 1, H, W) luma by ITU-R 601, in Pillow's integer arithmetic."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.int().unbind(1)
    return ((19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16)[:, None]


def _brightness(images: Tensor, strength: Tensor) -> Tensor:
    return _blend(torch.zeros_like(images), images, strength)


def _color(images: Tensor, strength: Tensor) -> Tensor:
    return _blend(_grey(images), images, strength)


def _contrast(images: Tensor, strength: Tensor) -> Tensor:
    mean = (_grey(images).float().mean(dim=(1, 2, 3), keepdim=True) + 0.5).floor()
    return _blend(mean, images, strength)


def _sharpness(images: Tensor, strength: Tensor) -> Tensor:
    values = images.float()
    smooth = values.clone()  # the border stays as it is
    centre = values[:, :, 1:-1, 1:-1]
    smooth[:, :, 1:-1, 1:-1] = ((F.avg_pool2d(values, 3, stride=1) * 9 + 4 * centre) / 13 + 0.5).floor()
    return _blend(smooth, images, strength)


def _posterize(images: Tensor, strength: Tensor) -> Tensor:
    dropped = ((8 - FEWEST_BITS) * strength.abs()).round().to(torch.uint8)[:, None, None, None]
    return (images >> dropped) << dropped


def _solarize(images: Tensor, strength: Tensor) -> Tensor:
    threshold = (255 * (1 - strength.abs()))[:, None, None, None]
    return torch.where(images >= threshold, 255 - images, images)


def _autocontrast(images: Tensor, strength: Tensor) -> Tensor:
    values = images.int()
    low, high = values.amin(dim=(2, 3), keepdim=True), values.amax(dim=(2, 3), keepdim=True)
    stretched = (values - low) * 255 // (high - low).clamp(min=1)
    return torch.where(high > low, stretched, values).to(torch.uint8)


def _equalize(images: Tensor, strength: Tensor) -> Tensor:
    values = images.flatten(2).long()  # (n, channels, pixels)
    counts = values.new_zeros(*values.shape[:2], 256).scatter_add_(2, values, torch.ones_like(values))
    top = values.amax(dim=2, keepdim=True)
    step = (values.shape[2] - counts.gather(2, top)) // 255
    below = counts.cumsum(dim=2) - counts
    table = ((below + step // 2) // step.clamp(min=1)).clamp(max=255)
    equal = torch.where(step > 0, table.gather(2, values), values)
    return equal.to(torch.uint8).view_as(images)


def _invert(images: Tensor, strength: Tensor) -> Tensor:
    return 255 - images


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "identity": _identity,
    "shear-x": _shear_x,
    "shear-y": _shear_y,
    "translate-x": _translate_x,
    "translate-y": _translate_y,
    "rotate": _rotate,
    "brightness": _brightness,
    "color": _color,
    "contrast": _contrast,
    "sharpness": _sharpness,
    "posterize": _posterize,
    "solarize": _solarize,
    "autocontrast": _autocontrast,
    "equalize": _equalize,
}
# With those that only AutoAugment has; the first ones are OPERATIONS, so their numbers are the same.
KERNELS = {**OPERATIONS, "invert": _invert}
