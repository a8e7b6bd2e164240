"""The kernel of RandomResizedCrop compared with torch's own resizing, photo by photo."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from triton_on_cpu import DEVICE, import_kernels, interpreter

from icmixup.lab.augment import mirror
from icmixup.lab.augment.crop import draw_boxes, resize_each, resize_windows
from icmixup.lab.datasets.photos import Photos, Store

crop_resized = import_kernels("icmixup.lab.augment.crop_triton").crop_resized


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    with interpreter():
        yield


def made_photos(sizes: Tensor, side: int) -> Photos:
    generator = torch.Generator().manual_seed(0)
    count = int(sizes.prod(dim=1).sum())
    pixels = torch.randint(256, (count, 3), generator=generator).to(torch.uint8)
    return Photos(Store(pixels, sizes), torch.arange(len(sizes)), side)


def crop(photos: Photos, boxes: Tensor) -> Tensor:
    pixels = photos.store.pixels.to(DEVICE)
    return crop_resized(pixels, photos.place(boxes).to(DEVICE), photos.image_size).cpu()


def largest_difference(one: Tensor, other: Tensor) -> int:
    return int((one.int() - other.int()).abs().max())


@pytest.mark.parametrize("side", [5, 17, 24])
def test_the_kernel_resizes_as_torch_does(side: int) -> None:
    sizes = torch.tensor([[40, 53], [53, 40], [30, 90], [24, 24], [3, 4], [1, 1]])
    photos = made_photos(sizes, side)
    boxes = draw_boxes(sizes, 0.2, torch.Generator().manual_seed(1))
    resized = crop(photos, boxes)
    assert resized.shape == (6, 3, side, side)
    assert resized.dtype == torch.uint8
    assert largest_difference(resized, resize_each(photos.crops(boxes), side)) <= 1
    assert largest_difference(resized, resize_windows(photos.windows(boxes), boxes, side)) <= 1


def test_a_box_of_the_size_of_the_result_is_copied() -> None:
    photos = made_photos(torch.tensor([[20, 31], [26, 18]]), 16)
    boxes = torch.tensor([[4, 15, 16, 16], [10, 2, 16, 16]])
    exact = torch.stack([part.permute(2, 0, 1) for part in photos.crops(boxes)])
    assert torch.equal(crop(photos, boxes), exact)


def test_photos_are_found_by_their_rows() -> None:
    photos = made_photos(torch.tensor([[20, 31], [26, 18], [16, 16]]), 16)
    some = photos[torch.tensor([2, 0])]
    boxes = torch.tensor([[0, 0, 16, 16], [4, 15, 16, 16]])
    exact = torch.stack([part.permute(2, 0, 1) for part in some.crops(boxes)])
    assert torch.equal(crop(some, boxes), exact)


def test_a_constant_photo_stays_constant_up_to_its_edges() -> None:
    sizes = torch.tensor([[50, 37]])
    photos = Photos(Store(torch.full((50 * 37, 3), 255, dtype=torch.uint8), sizes), torch.arange(1), 16)
    assert (crop(photos, torch.tensor([[0, 0, 50, 37]])) == 255).all()


def test_flipped_photos_are_mirrored() -> None:
    sizes = torch.tensor([[40, 53], [53, 40], [30, 90]])
    photos = made_photos(sizes, 17)
    boxes = draw_boxes(sizes, 0.2, torch.Generator().manual_seed(1))
    flipped = torch.tensor([True, False, True])
    places, pixels = photos.place(boxes).to(DEVICE), photos.store.pixels.to(DEVICE)
    mirrored = crop_resized(pixels, places, 17, flipped.to(DEVICE)).cpu()
    expected = mirror(crop(photos, boxes), flipped)
    assert largest_difference(mirrored, expected) <= 1  # the order of a sum may differ
    assert torch.equal(mirrored[1], expected[1])
    assert largest_difference(mirrored[0], crop(photos, boxes)[0]) > 1
