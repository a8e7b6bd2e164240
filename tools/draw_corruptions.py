"""Draw docs/corruptions.jpg: a photo under the 15 corruptions at five strengths.

    python tools/draw_corruptions.py [docs/corruptions.jpg] [--image photo.jpg] [--size 224] [--tile 100]

The photo is flower.jpg of scikit-learn, by Flickr user vultilion (CC BY 2.0). Needs the lab extra; nothing is
downloaded.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from sklearn.datasets import load_sample_image
from torch import Tensor

from icmixup.lab.analysis.corruptions import CORRUPTIONS, STRENGTHS, corrupt
from icmixup.lab.images.decode import to_square

OUT = Path(__file__).parents[1] / "docs" / "corruptions.jpg"
NAMES = 116  # pixels for the names on the left
HEADER, GAP = 22, 2
QUALITY = 60  # of the picture itself


def read_photo(path: Path | None, size: int) -> Tensor:
    """(3, size, size) uint8: the centre of a photo, or of scikit-learn's flower."""
    image = Image.fromarray(load_sample_image("flower.jpg")) if path is None else Image.open(path)
    return torch.from_numpy(to_square(image, size))


def draw_sheet(photo: Tensor, tile: int) -> Image.Image:
    """One row per corruption: the photo itself, then strengths 1 to 5."""
    columns = len(STRENGTHS) + 1
    size = (NAMES + columns * (tile + GAP), HEADER + len(CORRUPTIONS) * (tile + GAP))
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    for column in range(columns):
        label = "original" if column == 0 else f"strength {column}"
        draw.text((NAMES + column * (tile + GAP) + 4, 5), label, fill="black")
    for row, name in enumerate(CORRUPTIONS):
        top = HEADER + row * (tile + GAP)
        draw.text((4, top + tile // 2 - 6), name, fill="black")
        shown = [photo[None], *(corrupt(photo[None], name, strength) for strength in STRENGTHS)]
        for column, images in enumerate(shown):
            sheet.paste(as_tile(images[0], tile), (NAMES + column * (tile + GAP), top))
    return sheet


def as_tile(image: Tensor, side: int) -> Image.Image:
    """A (3, H, W) image at the size of a tile; enlarged pixels stay square."""
    pixels = Image.fromarray(np.ascontiguousarray(image.permute(1, 2, 0).numpy()))
    enlarge = side >= image.shape[-1]
    return pixels.resize((side, side), Image.Resampling.NEAREST if enlarge else Image.Resampling.LANCZOS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, nargs="?", default=OUT)
    parser.add_argument("--image", type=Path, help="a photo; scikit-learn's flower by default")
    parser.add_argument("--size", type=int, default=224, help="pixels of the photo that is corrupted")
    parser.add_argument("--tile", type=int, default=100, help="pixels of each image in the picture")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sheet = draw_sheet(read_photo(args.image, args.size), args.tile)
    sheet.save(args.out, quality=QUALITY, optimize=True)
    print(f"{args.out}: {args.out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
