"""Augmentation and normalisation of batches of images on their device.

Augmentation has two steps. `draw_augmentation` draws all random numbers of N images; `apply_augmentation`
changes a batch of them. So an epoch can be drawn at once, and its images can be changed batch by batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from icmixup.lab.augment.autoaugment import draw_cutout, draw_policy
from icmixup.lab.augment.colour import Erased, Jitter, apply_erased, apply_jitter, draw_erased, draw_jitter
from icmixup.lab.augment.crop import draw_boxes, resize_each, resize_windows
from icmixup.lab.augment.geometry import Geometry, apply_geometry, draw_geometry
from icmixup.lab.augment.trivial import DrawnOperations, apply_operations, draw_operations

__all__ = [
    "Augmentations",
    "Drawn",
    "apply_augmentation",
    "augment",
    "draw_augmentation",
    "mirror",
    "normalise",
    "normaliser",
    "resize_each",
    "resize_windows",
]

PADDING_MODES = ("zeros", "reflect")
# Pixels of one channel per block: their coordinates should fit the cache of a CPU, or a few 100 MB of a GPU.
BLOCK_PIXELS = {"cpu": 1 << 18, "cuda": 1 << 23}


class Augmentations(NamedTuple):
    """How images are changed, in this order."""

    random_resized_crop: float | None = None
    """Least share of the area that a random rectangle of aspect ratio 3/4 to 4/3 keeps; it is resized to the
    side of the images. None for a crop after padding instead."""
    padding: int = 0
    """Pixels added on each side before a uniformly random H x W crop."""
    padding_mode: str = "zeros"
    """"zeros" or "reflect" (the edge pixel is not repeated)."""
    flip: bool = False
    """Mirror left and right with probability 1/2."""
    rotation: float = 0.0
    """Degrees; the angle is uniform within +- rotation, about the centre. Pixels are the nearest ones, and
    black outside the image."""
    trivial: bool = False
    """Apply one random operation of random strength to each image (`icmixup.lab.augment.trivial`)."""
    colour_jitter: float = 0.0
    """Multiply brightness, contrast and saturation by factors within 1 +- colour_jitter."""
    erasing: float = 0.0
    """Probability that a random rectangle gets a random colour."""
    autoaugment: bool = False
    """Apply AutoAugment's policy for CIFAR, where `trivial` would be applied."""
    cutout: int = 0
    """Side of a black square around a random pixel; 0 for none."""


class Drawn(NamedTuple):
    """What was drawn for N images; parts that the settings do not use are None."""

    boxes: Tensor | None  # (N, 4) top, left, height, width of random resized crops
    geometry: Geometry | None
    operations: DrawnOperations | None
    jitter: Jitter | None
    erased: Erased | None
    second: DrawnOperations | None = None  # AutoAugment applies two operations in turn
    cutout: Erased | None = None

    def rows(self, rows: slice) -> Drawn:
        """What was drawn for some of the images."""

        def take(part: Any) -> Any:
            if part is None or isinstance(part, Tensor):
                return None if part is None else part[rows]
            return type(part)(*map(take, part))

        return Drawn(*map(take, self))


def draw_augmentation(
    shape: torch.Size, settings: Augmentations, generator: torch.Generator, sizes: Tensor | None = None
) -> Drawn:
    """Draw how each image is changed, on the generator's device.

    Args:
        shape: (N, channels, H, W) of the augmented images.
        sizes: (N, 2) height and width of photos, on the CPU; by default H and W.
    """
    count, channels, height, width = shape
    crop = settings.random_resized_crop
    # The order of the draws must not change: recorded runs depend on it.
    geometry = draw_geometry(
        count,
        padding=settings.padding if crop is None else 0,
        flip=settings.flip,
        rotation=settings.rotation,
        generator=generator,
    )
    operations = draw_operations(count, generator) if settings.trivial else None
    boxes = None
    if crop is not None:
        sizes = torch.tensor([[height, width]]).expand(count, 2) if sizes is None else sizes
        boxes = draw_boxes(sizes.to(generator.device), crop, generator)
    jitter = draw_jitter(count, settings.colour_jitter, generator) if settings.colour_jitter else None
    erasing = settings.erasing
    erased = draw_erased(count, channels, height, width, erasing, generator) if erasing else None
    second = cutout = None
    if settings.autoaugment:
        operations, second = draw_policy(count, height, width, generator)
    if settings.cutout:
        cutout = draw_cutout(count, channels, height, width, settings.cutout, generator)
    return Drawn(boxes, geometry, operations, jitter, erased, second, cutout)


def augment(images: Tensor, *, generator: torch.Generator, **settings: float | str | None) -> Tensor:
    """Change each image at random; the settings are those of `Augmentations`.

    Args:
        images: (N, channels, H, W) uint8.
        generator: on any device; the same state gives the same images.

    Returns:
        (N, channels, H, W) uint8, new memory.
    """
    chosen = Augmentations(**settings)  # type: ignore[arg-type]
    check_settings(images, chosen)
    drawn = draw_augmentation(images.shape, chosen, generator)
    if drawn.boxes is not None:
        images = _resized_crops(images, drawn.boxes.cpu())
    return apply_augmentation(images, drawn, chosen)


def _resized_crops(images: Tensor, boxes: Tensor) -> Tensor:
    height, width = images.shape[2:]
    if height != width:
        raise ValueError(f"random_resized_crop makes square images, got {height} x {width}")
    cropped = torch.empty_like(images)
    step = max(1, BLOCK_PIXELS.get(images.device.type, 1 << 23) // height**2)
    for start in range(0, len(images), step):
        rows = slice(start, start + step)
        top, left = boxes[rows, :2].to(images.device)[:, :, None].unbind(1)
        y = (top + torch.arange(height, device=images.device)).clamp(max=height - 1)
        x = (left + torch.arange(width, device=images.device)).clamp(max=width - 1)
        number = torch.arange(len(y), device=images.device)[:, None, None]
        windows = images[rows].permute(0, 2, 3, 1)[number, y[:, :, None], x[:, None, :]]
        cropped[rows] = resize_windows(windows, boxes[rows], height)
    return cropped


def check_settings(images: Tensor, settings: Augmentations) -> None:
    """Raise an error for images or settings that `augment` does not support."""
    if images.dtype != torch.uint8 or images.ndim != 4:
        raise ValueError(
            f"images must be (N, channels, H, W) uint8, got {tuple(images.shape)} {images.dtype}"
        )
    padding, padding_mode = settings.padding, settings.padding_mode
    if padding_mode not in PADDING_MODES:
        raise ValueError(f"padding_mode must be {' or '.join(PADDING_MODES)}, got {padding_mode!r}")
    side = min(images.shape[2:])
    if padding < 0:
        raise ValueError(f"padding must be at least 0, got {padding}")
    if padding_mode == "reflect" and padding >= side:
        raise ValueError(
            f"padding must be at most {side - 1} to reflect images of {side} pixels, got {padding}"
        )
    if settings.trivial and settings.autoaugment:
        raise ValueError("trivial and autoaugment are two policies that exclude each other, got both")
    if not settings.cutout >= 0:
        raise ValueError(f"cutout must be a side of at least 0 pixels, got {settings.cutout}")
    if not 0 <= settings.rotation <= 180:
        raise ValueError(f"rotation must be from 0 to 180 degrees, got {settings.rotation}")


def apply_augmentation(images: Tensor, drawn: Drawn, settings: Augmentations) -> Tensor:
    """Change images as drawn, apart from the random resized crop: (N, channels, H, W) uint8 in and out."""
    if all(part is None for part in drawn[1:]):
        return images
    augmented = torch.empty_like(images, memory_format=torch.contiguous_format)
    step = max(1, BLOCK_PIXELS.get(images.device.type, 1 << 23) // (images.shape[2] * images.shape[3]))
    for start in range(0, len(images), step):
        rows = slice(start, start + step)
        augmented[rows] = _augment_block(images[rows], drawn.rows(rows), settings)
    return augmented


def _augment_block(images: Tensor, drawn: Drawn, settings: Augmentations) -> Tensor:
    def moved(parts: tuple[Tensor, ...]) -> list[Tensor]:
        return [part.to(images.device, non_blocking=True) for part in parts]

    padding = settings.padding if drawn.boxes is None else 0
    if drawn.geometry is None:
        block = images
    elif padding or settings.rotation:
        block = apply_geometry(images, Geometry(*moved(drawn.geometry)), padding, settings.padding_mode)
    else:  # the same without coordinates of every pixel
        block = mirror(images, drawn.geometry.flipped)
    if drawn.operations is not None:
        block = apply_operations(block, drawn.operations)
    if drawn.second is not None:
        block = apply_operations(block, drawn.second)
    if drawn.jitter is not None:
        block = apply_jitter(block, Jitter(*moved(drawn.jitter)))
    if drawn.erased is not None:
        block = apply_erased(block, Erased(*moved(drawn.erased)))
    if drawn.cutout is not None:
        block = apply_erased(block, Erased(*moved(drawn.cutout)))
    return block


def mirror(images: Tensor, flipped: Tensor | None) -> Tensor:
    """Swap left and right of the images of (N,) flags on any device; of none if there are none."""
    if flipped is None:
        return images
    flags = flipped.to(images.device, non_blocking=True)
    return torch.where(flags[:, None, None, None], images.flip(3), images)


def normalise(images: Tensor, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor) -> Tensor:
    """Normalise (N, channels, H, W) uint8 images to float32.

    Args:
        mean, std: (channels,) of pixels in [0, 1].
    """
    shift, scale = normaliser(*(torch.as_tensor(part, device=images.device) for part in (mean, std)))
    return torch.addcmul(shift, images, scale)


def normaliser(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """(1, channels, 1, 1) shift and scale of bytes: (x / 255 - mean) / std = shift + scale x."""
    mean, std = (part.float().view(1, -1, 1, 1) for part in (mean, std))
    return -mean / std, 1 / (255 * std)
