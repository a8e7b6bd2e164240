"""Preprocessing: how the photos of a pretrained network were prepared when it was trained and tested."""

from __future__ import annotations

from dataclasses import dataclass

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """Size, crop, normalisation and interpolation, as timm stores them in `pretrained_cfg`.

    To test, the short side of a photo is resized to `resize_size`, and its centre of `image_size` x
    `image_size` pixels is used.
    """

    image_size: int = 224
    """Side of the square images that the network takes, in pixels."""
    crop_pct: float = 0.875
    """Share of the resized short side that the centre crop keeps."""
    mean: tuple[float, ...] = IMAGENET_MEAN
    """Of each channel, for pixels in [0, 1]."""
    std: tuple[float, ...] = IMAGENET_STD
    """Of each channel, for pixels in [0, 1]."""
    interpolation: str = "bicubic"
    """bilinear, bicubic, nearest or lanczos."""

    def __post_init__(self) -> None:
        if self.image_size < 1:
            raise ValueError(f"image_size must be a number of pixels, 1 or more, got {self.image_size}")
        if not 0 < self.crop_pct <= 1:
            raise ValueError(f"crop_pct must be above 0 and at most 1, got {self.crop_pct}")
        if len(self.mean) != len(self.std):
            raise ValueError(f"mean and std must have one value per channel, got {self.mean} and {self.std}")

    @property
    def resize_size(self) -> int:
        """Pixels of the short side before the centre crop, rounded down as timm does."""
        return int(self.image_size / self.crop_pct)
