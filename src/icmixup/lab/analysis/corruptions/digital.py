"""Contrast, elastic deformation, pixelation and JPEG compression.

All take (B, C, H, W) images in [0, 1].
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from icmixup.lab.analysis.corruptions.draws import Draws
from icmixup.lab.analysis.corruptions.filters import apply_to_lines, gaussian_blur, sample

BLOCK = 8  # side of a block of JPEG
# Quantisation tables of the JPEG standard (ITU-T T.81, Annex K) at quality 50.
LUMINANCE = """
16 11 10 16  24  40  51  61
12 12 14 19  26  58  60  55
14 13 16 24  40  57  69  56
14 17 22 29  51  87  80  62
18 22 37 56  68 109 103  77
24 35 55 64  81 104 113  92
49 64 78 87 103 121 120 101
72 92 95 98 112 100 103  99"""
CHROMINANCE = """
17 18 24 47 99 99 99 99
18 21 26 66 99 99 99 99
24 26 56 99 99 99 99 99
47 66 99 99 99 99 99 99
99 99 99 99 99 99 99 99
99 99 99 99 99 99 99 99
99 99 99 99 99 99 99 99
99 99 99 99 99 99 99 99"""
TO_YCC = ((0.299, 0.587, 0.114), (-0.168736, -0.331264, 0.5), (0.5, -0.418688, -0.081312))


def contrast(images: Tensor, draws: Draws, length: float, kept: float) -> Tensor:
    """Move each pixel towards the mean of its channel."""
    mean = images.mean(dim=(2, 3), keepdim=True)
    return mean + kept * (images - mean)


def elastic_transform(
    images: Tensor, draws: Draws, length: float, strength: float, sigma: float, shift: float
) -> Tensor:
    """Move three points by up to `shift` (an affine map), and every pixel by a smooth random field.

    Args:
        strength, sigma, shift: shares of the side of the image. The field is uniform noise in [-1, 1],
            smoothed with a Gaussian of `sigma` and multiplied by `strength`, at the reference size.
    """
    height, width = images.shape[-2:]
    side = min(height, width)
    y, x = torch.meshgrid(
        torch.arange(height, device=images.device), torch.arange(width, device=images.device), indexing="ij"
    )
    y, x = y.expand(len(images), -1, -1).float(), x.expand(len(images), -1, -1).float()
    if strength > 0:
        # With more pixels smoothing averages more numbers, so the field needs a larger factor to keep up.
        field = gaussian_blur(2 * draws.uniform(0, 2, height, width) - 1, sigma * side, truncate=3.0)
        y, x = (part + strength * side * length * field[:, axis] for axis, part in enumerate((y, x)))
    affine = random_affine(draws, shift * side, height, width)
    ones = torch.ones_like(y)
    y, x = torch.einsum("bij,bjhw->bihw", affine, torch.stack([y, x, ones], dim=1)).unbind(dim=1)
    return sample(images, y, x)


def random_affine(draws: Draws, shift: float, height: int, width: int) -> Tensor:
    """(B, 2, 3): the affine map that undoes a random shift of three points around the centre."""
    reach = max(1, min(height, width) // 3)
    corners = torch.tensor([[1, 1], [1, -1], [-1, -1]])
    points = (torch.tensor([height // 2, width // 2]) + reach * corners).double()
    # In float64 on the CPU, since not every device has it.
    moved = points + shift * (2 * draws.uniform(1, 3, 2).cpu().double() - 1)
    # moved @ A = points, with a column of ones for the translation
    homogeneous = torch.cat([moved, torch.ones_like(moved[..., :1])], dim=-1)
    solved: Tensor = torch.linalg.solve(homogeneous, points.expand(len(moved), -1, -1))
    return solved.mT.float().to(draws.keys.device)


def pixelate(images: Tensor, draws: Draws, length: float, share: float) -> Tensor:
    """Shrink to a share of the side by averaging, and enlarge again by repeating pixels."""
    return apply_to_lines(images, *(pixel_matrix(size, share) for size in images.shape[-2:]))


def pixel_matrix(size: int, share: float) -> Tensor:
    """(size, size) float32: a line of pixels to fewer, larger ones.

    Each is the mean of the pixels whose centres it covers, as in Pillow's box filter.
    """
    fewer = max(1, int(size * share))
    centres = torch.arange(size, dtype=torch.float64) + 0.5
    distance = centres * fewer / size - 0.5 - torch.arange(fewer, dtype=torch.float64)[:, None]
    covered = ((distance > -0.5) & (distance <= 0.5)).double()
    means = covered / covered.sum(dim=1, keepdim=True)
    return means[(centres * fewer / size).long()].float()


def jpeg_compression(images: Tensor, draws: Draws, length: float, quality: float) -> Tensor:
    """What JPEG keeps at a quality from 1 to 100: quantised cosine transforms of blocks of 8 x 8 pixels.

    Colours are stored as brightness and two chroma channels at half the resolution (4:2:0). The lossless
    part of JPEG changes nothing and is left out.
    """
    images = (255 * images).round()
    if images.shape[1] == 1:
        return quantise_blocks(images - 128, LUMINANCE, quality).add(128) / 255
    to_ycc = torch.tensor(TO_YCC, device=images.device)
    ycc = torch.einsum("ij,bjhw->bihw", to_ycc, images).round()
    height, width = images.shape[-2:]
    padded = F.pad(ycc, (0, width % 2, 0, height % 2), mode="replicate")
    chroma = quantise_blocks(F.avg_pool2d(padded[:, 1:], 2).round(), CHROMINANCE, quality)
    chroma = F.interpolate(chroma, scale_factor=2, mode="bilinear")[..., :height, :width]
    brightness = quantise_blocks(ycc[:, :1] - 128, LUMINANCE, quality) + 128
    decoded = torch.cat([brightness, chroma], dim=1)
    return torch.einsum("ij,bjhw->bihw", torch.linalg.inv(to_ycc), decoded) / 255


def quantise_blocks(planes: Tensor, table: str, quality: float) -> Tensor:
    """Round the cosine transform of each 8 x 8 block of (B, C, H, W) to multiples of a table."""
    height, width = planes.shape[-2:]
    down, right = -height % BLOCK, -width % BLOCK
    padded = F.pad(planes, (0, right, 0, down), mode="replicate")
    blocks = padded.unfold(2, BLOCK, BLOCK).unfold(3, BLOCK, BLOCK)  # (B, C, H / 8, W / 8, 8, 8)
    transform, steps = cosine_matrix().to(planes), quantisation(table, quality).to(planes)
    rounded = (apply_to_lines(blocks, transform, transform) / steps).round() * steps
    restored = apply_to_lines(rounded, transform.T, transform.T).round().clamp(-128, 127)
    return restored.transpose(3, 4).reshape(padded.shape)[..., :height, :width]


def cosine_matrix() -> Tensor:
    """(8, 8) orthonormal discrete cosine transform (DCT-II)."""
    frequency, position = torch.arange(BLOCK).double()[:, None], torch.arange(BLOCK).double()
    matrix = torch.cos(math.pi * (2 * position + 1) * frequency / (2 * BLOCK)) * math.sqrt(2 / BLOCK)
    matrix[0] /= math.sqrt(2)
    return matrix.float()


def quantisation(table: str, quality: float) -> Tensor:
    """(8, 8) steps at a quality, scaled as the IJG's library does."""
    base = torch.tensor([float(number) for number in table.split()]).view(BLOCK, BLOCK)
    percent = 5000 / quality if quality < 50 else 200 - 2 * quality
    return ((base * int(percent) + 50) / 100).floor().clamp(1, 255)
