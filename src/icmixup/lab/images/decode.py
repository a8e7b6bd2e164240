"""Image files of any format and colour mode, decoded to RGB bytes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
# Images in formats that are not read: they are reported, so that no part of a dataset is missing unnoticed.
OTHER_SUFFIXES = frozenset(
    {".avif", ".heic", ".heif", ".jp2", ".jxl", ".pgm", ".pnm", ".ppm", ".psd", ".svg", ".tga"}
    | {".arw", ".cr2", ".cr3", ".dng", ".nef", ".orf", ".raf", ".rw2"}  # raw files of cameras
)
# Pillow reads many more formats, whose decoders are rarely used and rarely tested.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
INTERPOLATIONS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "nearest": Image.Resampling.NEAREST,
    "lanczos": Image.Resampling.LANCZOS,
}
LONGEST = 3  # times the short side: of a longer photo, the centre is kept
ORIENTATION, TURNED = 0x0112, (5, 6, 7, 8)  # the EXIF tag, and its values that exchange height and width
REDUCING_GAP = 2  # a JPEG is decoded at a half, quarter or eighth of its size if that is twice what is needed


class ImageFile(NamedTuple):
    """A labelled image file that has not been read yet; `path` is None for a row of a table.

    With a path it can be sent to another process, so `open` must be a function that can be pickled.
    """

    name: str
    open: Callable[[], IO[bytes]]
    label: int
    path: Path | None = None


def open_path(path: Path) -> IO[bytes]:
    """Open a file to read its bytes."""
    return path.open("rb")


class Shape(NamedTuple):
    """Size of a photo in pixels."""

    height: int
    width: int

    def resized(self, short_side: int) -> Shape:
        """With the given short side and the same aspect ratio, up to LONGEST : 1."""
        short, long = sorted(self)
        # Rounded down, as torchvision and timm do.
        longer = min(int(short_side * long / short), LONGEST * short_side)
        return Shape(longer, short_side) if self.height > self.width else Shape(short_side, longer)


@contextmanager
def ignore_large_images() -> Iterator[None]:
    """No warning about images above 89 megapixels; above 179, Pillow raises an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        yield


def read_shape(file: ImageFile) -> Shape | str:
    """Size of an image as it is displayed, from its header; or why it cannot be read."""
    try:
        with file.open() as stream, Image.open(stream, formats=FORMATS) as image:
            return displayed_shape(image)
    except Exception as error:
        return describe_error(error, file.name)


def displayed_shape(image: Image.Image) -> Shape:
    """Size of an image after its EXIF rotation."""
    turned = image.getexif().get(ORIENTATION) in TURNED
    return Shape(image.width, image.height) if turned else Shape(image.height, image.width)


def describe_error(error: Exception, name: str) -> str:
    """The reason why a file cannot be read; a broken file can raise nearly anything."""
    text, suffix = str(error), Path(name).suffix
    # Pillow names the stream that it was given, which is not the name of a file.
    if "cannot identify" not in text:
        return text or type(error).__name__
    if suffix.lower() in OTHER_SUFFIXES:
        return f"{suffix} files are not read; convert it to PNG or JPEG"
    return "not an image in a known format"


def decode_square(file: ImageFile, size: int) -> npt.NDArray[np.uint8] | str:
    """(3, size, size) uint8 of an image, or why it cannot be read."""
    try:
        with file.open() as stream, Image.open(stream, formats=FORMATS) as image:
            return to_square(image, size)
    except Exception as error:
        return describe_error(error, file.name)


def to_square(image: Image.Image, size: int, interpolation: str = "bicubic") -> npt.NDArray[np.uint8]:
    """(3, size, size) uint8: rotated according to EXIF, converted to RGB, centre-cropped and resized.

    Transparent pixels become white, 16-bit grey keeps its upper 8 bits, and of an animation the first frame
    is read.
    """
    rgb = to_rgb(upright(image))
    if rgb.size != (size, size):
        rgb = ImageOps.fit(rgb, (size, size), INTERPOLATIONS[interpolation])
    return channels_first(np.asarray(rgb))


def decode_photo(
    file: ImageFile, short_side: int, interpolation: str, shape: Shape
) -> npt.NDArray[np.uint8] | str:
    """(height, width, 3) of a photo with the given short side, or why it cannot be read.

    Args:
        shape: of the result, as `read_shape(file).resized(short_side)` predicts it.
    """
    try:
        with file.open() as stream, Image.open(stream, formats=FORMATS) as image:
            if displayed_shape(image).resized(short_side) != shape:
                return "changed while the photos were read"
            image.draft(image.mode, (REDUCING_GAP * shape.width, REDUCING_GAP * shape.height))
            return np.asarray(to_shape(image, shape, INTERPOLATIONS[interpolation]))
    except Exception as error:
        return describe_error(error, file.name)


def to_shape(image: Image.Image, shape: Shape, filter: Image.Resampling) -> Image.Image:
    """The image resized to a shape; what has another aspect ratio is cropped to its centre."""
    rgb = to_rgb(upright(image))
    size = (shape.width, shape.height)
    if max(rgb.size) > LONGEST * min(rgb.size):
        return ImageOps.fit(rgb, size, filter)
    return rgb if rgb.size == size else rgb.resize(size, filter)


def channels_first(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """(3, height, width) of (height, width, 3), copied."""
    return pixels.transpose(2, 0, 1).copy()


def read_center(image: Image.Image, short_side: int, size: int, interpolation: str) -> npt.NDArray[np.uint8]:
    """(3, size, size) uint8: the centre of a photo as `Photos.square` returns it."""
    shape = displayed_shape(image).resized(short_side)
    image.draft(image.mode, (REDUCING_GAP * shape.width, REDUCING_GAP * shape.height))
    pixels = np.asarray(to_shape(image, shape, INTERPOLATIONS[interpolation]))
    top, left = (round((side - size) / 2) for side in shape)
    return channels_first(pixels[top : top + size, left : left + size])


def upright(image: Image.Image) -> Image.Image:
    """The image as it is displayed, rotated or mirrored according to EXIF; itself if that is nothing."""
    # Most photos are upright, and ImageOps.exif_transpose copies them all while it holds Python's lock.
    return image if image.getexif().get(ORIENTATION, 1) == 1 else ImageOps.exif_transpose(image)


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image of any Pillow mode to RGB; one that is in that mode is not copied."""
    # A PNG in mode I has 16 bits, in early versions of Pillow.
    if image.mode == "F" or (image.mode == "I" and image.format != "PNG"):
        kind = "floating-point" if image.mode == "F" else "32-bit"
        raise ValueError(f"{kind} pixels have no known range: save the image with 8 bits per channel")
    if image.mode.startswith("I"):  # convert("RGB") would clip 16-bit values at 255
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image if image.mode == "RGB" else image.convert("RGB")
