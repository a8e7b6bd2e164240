"""Test images as data URIs, small enough that a page of them can be mailed."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable

import torch
from PIL import Image
from torch import Tensor

from icmixup.lab.datasets import Split

TINY = 40  # pixels: images up to this side are kept as they are, as PNG
THUMBNAIL, LARGE = 80, 160  # sides of other images in pixels
MOST_BYTES = 900_000  # of all thumbnails together


def thumbnails(split: Split, rows: Iterable[int]) -> dict[int, str]:
    """Data URIs of test images by their row, as many as fit into MOST_BYTES."""
    found: dict[int, str] = {}
    total = 0
    for row in dict.fromkeys(rows):
        found[row] = encode(picture(split, row), THUMBNAIL)
        total += len(found[row])
        if total > MOST_BYTES:
            del found[row]
            break
    return found


def picture(split: Split, row: int) -> Tensor:
    """(channels, H, W) uint8: an image as the network is tested on it."""
    return split[torch.tensor([row])].square()[0].cpu()


def encode(image: Tensor, side: int) -> str:
    """A data URI of a (channels, H, W) uint8 image: PNG if it is tiny, otherwise JPEG with this side."""
    pixels = image.permute(1, 2, 0).numpy()
    shown = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    if max(shown.size) <= TINY:
        return as_uri(shown, "png")
    if max(shown.size) > side:
        shown = shown.resize((side, side), Image.Resampling.LANCZOS)
    return as_uri(shown, "jpeg")


def as_uri(image: Image.Image, form: str) -> str:
    buffer = io.BytesIO()
    if form == "png":
        image.save(buffer, "PNG", optimize=True)
    else:
        image.save(buffer, "JPEG", quality=82, optimize=True)
    return f"data:image/{form};base64,{base64.b64encode(buffer.getvalue()).decode()}"
