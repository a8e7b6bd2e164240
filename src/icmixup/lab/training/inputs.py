"""What a trained network expects as input: inputs.json in a run's folder.

With it, a run can be used on new images without the dataset it was trained on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

from icmixup.lab.datasets import Dataset, Examples, Photos, is_named
from icmixup.lab.images.decode import FORMATS, describe_error, read_center, to_square
from icmixup.lab.training.run_folder import write_atomically

INPUTS_FILE = "inputs.json"


class InputFormat(NamedTuple):
    """Size and normalisation of images, and the names of classes in the order of the scores."""

    class_names: tuple[str, ...]
    mean: tuple[float, ...]  # of each channel, of pixels in [0, 1]
    std: tuple[float, ...]
    image_size: int  # side of the square images in pixels
    channels: int  # 3, or 1 for grey
    # Photos are resized to this short side, then cropped. Other images are cropped to a square, then resized.
    short_side: int | None = None
    interpolation: str = "bicubic"

    def read(self, path: Path | str) -> Tensor:
        """(channels, image_size, image_size) uint8 of a file; a ValueError names one that cannot be read."""
        try:
            with Image.open(path, formats=FORMATS) as image:
                return self.prepare(image)
        except Exception as error:
            raise ValueError(
                f"{path} cannot be read as an image: {describe_error(error, str(path))}"
            ) from error

    def prepare(self, image: Image.Image) -> Tensor:
        """(channels, image_size, image_size) uint8: the image as in training."""
        if self.short_side is None:
            pixels = to_square(image, self.image_size, self.interpolation)
        else:
            pixels = read_center(image, self.short_side, self.image_size, self.interpolation)
        square = torch.from_numpy(pixels)
        if self.channels == 1:  # ITU-R 601 luma, as Pillow converts to grey
            weights = torch.tensor([0.299, 0.587, 0.114])
            square = (square.float() * weights[:, None, None]).sum(dim=0, keepdim=True).round().byte()
        return square


def inputs_of(data: Dataset) -> InputFormat:
    """What a network trained on this dataset expects."""
    images = data.train.images
    channels, _, side = images.shape[1:]
    resized: tuple[int | None, str] = (None, "bicubic")  # as small image files are read
    if isinstance(images, Photos):
        resized = images.short_side, images.interpolation
    elif is_named(data.name) and data.original_size:  # tensors that datasets.resize_source has resized
        resized = None, "bilinear"
    return InputFormat(data.class_names, data.mean, data.std, side, channels, *resized)


def write_inputs(folder: Path, data: Dataset) -> None:
    if takes_image_files(data):
        write_atomically(folder / INPUTS_FILE, json.dumps(inputs_of(data)._asdict(), indent=1).encode())


def takes_image_files(data: Dataset) -> bool:
    """Whether files can be read as the test images were: squares in grey or RGB, not transformed by the user.
    A head without its network, and a network for other inputs, cannot be used on files."""
    images = data.test.images
    if images.dtype != torch.uint8 or (isinstance(images, Examples) and images.transform is not None):
        return False
    return images.dim() == 4 and images.shape[1] in (1, 3) and images.shape[2] == images.shape[3]


def read_inputs(folder: Path) -> InputFormat:
    """The inputs of the run in a folder; a ValueError if it was trained before they were stored."""
    path = folder / INPUTS_FILE
    if not path.exists():
        raise ValueError(
            f"{folder} has no {INPUTS_FILE}, and cannot be used on image files: its inputs were not square "
            "uint8 images in grey or RGB, or test_transform prepared them, or it is of an earlier icmixup"
        )
    stored = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(path.read_text()).items()}
    return InputFormat(**stored)  # type: ignore[arg-type]
