"""RandomResizedCrop, colour jitter and erasing compared with torch, Pillow and loops, image by image."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageEnhance
from torch import Tensor

from icmixup.lab.augment import Augmentations, apply_augmentation, augment, draw_augmentation
from icmixup.lab.augment.colour import Jitter, apply_erased, apply_jitter, draw_erased, draw_jitter
from icmixup.lab.augment.crop import RATIO, draw_boxes, filter_weights, resize_each, resize_windows


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(256, shape, generator=seeded(1)).to(torch.uint8)


@pytest.mark.parametrize("smallest", [0.08, 0.2, 1.0])
@pytest.mark.parametrize("size", [(256, 341), (341, 256), (40, 40), (256, 768)])
def test_boxes_lie_in_the_photo_and_have_the_areas_and_ratios_asked_for(
    smallest: float, size: tuple[int, int]
) -> None:
    height, width = size
    boxes = draw_boxes(torch.tensor([size]).expand(4000, 2), smallest, seeded())
    top, left, h, w = boxes.unbind(1)
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, 2:] >= 1).all()
    assert (top + h <= height).all()
    assert (left + w <= width).all()
    centred = (top == (height - h) // 2) & (left == (width - w) // 2)
    area = (h * w) / (height * width)
    ratio = w / h
    slack = 3 / min(size)  # sides are rounded
    drawn = ~centred
    assert (area[drawn] >= smallest - slack).all()
    assert (ratio >= RATIO[0] - 2 * slack).all()
    assert (ratio <= RATIO[1] + 2 * slack).all()


def torchvisions_box(height: int, width: int, smallest: float, rng: np.random.Generator) -> tuple[int, int]:
    """Height and width of torchvision's RandomResizedCrop, as a loop."""
    for _ in range(10):
        area = height * width * rng.uniform(smallest, 1)
        ratio = math.exp(rng.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return h, w
    if width / height < RATIO[0]:
        return round(width / RATIO[0]), width
    if width / height > RATIO[1]:
        return height, round(height * RATIO[1])
    return height, width


@pytest.mark.parametrize("size", [(256, 341), (100, 300), (64, 64)])
def test_boxes_have_the_distribution_of_torchvisions(size: tuple[int, int]) -> None:
    count, rng = 4000, np.random.default_rng(0)
    ours = draw_boxes(torch.tensor([size]).expand(count, 2), 0.2, seeded())[:, 2:].double()
    theirs = torch.tensor([torchvisions_box(*size, 0.2, rng) for _ in range(count)]).double()
    error = (ours.var(dim=0) + theirs.var(dim=0)).div(count).sqrt()
    assert ((ours.mean(dim=0) - theirs.mean(dim=0)).abs() < 5 * error).all()
    assert torch.allclose(ours.std(dim=0), theirs.std(dim=0), rtol=0.1)


@pytest.mark.parametrize("side", [16, 56])
def test_two_matrix_products_are_torchs_and_pillows_antialiased_resizing(side: int) -> None:
    boxes = torch.tensor([[0, 0, 40, 33], [0, 0, 16, 48], [0, 0, 7, 9], [0, 0, 48, 48], [0, 0, 1, 1]])
    windows = random_bytes(len(boxes), 48, 48, 3)
    resized = resize_windows(windows, boxes, side)
    crops = [window[:h, :w] for window, (_, _, h, w) in zip(windows, boxes.tolist(), strict=True)]
    assert (resized.int() - resize_each(crops, side).int()).abs().max() <= 1
    for image, crop in zip(resized, crops, strict=True):
        exact = F.interpolate(
            crop.permute(2, 0, 1)[None].float(), size=(side, side), mode="bilinear", antialias=True
        )
        assert (image - exact[0]).abs().max() <= 0.501
        pillow = Image.fromarray(crop.numpy()).resize((side, side), Image.Resampling.BILINEAR)
        assert np.abs(image.permute(1, 2, 0).int().numpy() - np.asarray(pillow, dtype=int)).max() <= 1


def test_pixels_beyond_a_box_do_not_matter() -> None:
    boxes = torch.tensor([[0, 0, 9, 5]])
    one, two = random_bytes(1, 12, 12, 3), random_bytes(1, 12, 12, 3)
    two = 255 - two
    two[:, :9, :5] = one[:, :9, :5]
    assert torch.equal(resize_windows(one, boxes, 8), resize_windows(two, boxes, 8))
    torch.testing.assert_close(filter_weights(torch.tensor([9, 3]), 12, 8).sum(dim=2), torch.ones(2, 8))


def test_a_random_resized_crop_of_square_images_is_the_crop_of_each() -> None:
    images = random_bytes(20, 3, 32, 32)
    settings = Augmentations(random_resized_crop=0.3)
    augmented = augment(images, generator=seeded(), **settings._asdict())
    boxes = draw_augmentation(images.shape, settings, seeded()).boxes
    assert boxes is not None
    crops = [
        image[:, t : t + h, x : x + w].permute(1, 2, 0)
        for image, (t, x, h, w) in zip(images, boxes.tolist(), strict=True)
    ]
    assert (augmented.int() - resize_each(crops, 32).int()).abs().max() <= 1
    assert not torch.equal(augmented, images)


def test_jitter_is_pillows_brightness_then_contrast_then_colour() -> None:
    images = random_bytes(12, 3, 17, 23)
    jitter = draw_jitter(12, 0.4, seeded())
    assert all(((part >= 0.6) & (part <= 1.4)).all() for part in jitter)
    changed = apply_jitter(images, jitter)
    for image, result, *factors in zip(images, changed, *jitter, strict=True):
        pillow = Image.fromarray(image.permute(1, 2, 0).numpy())
        enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
        for enhancer, factor in zip(enhancers, factors, strict=True):
            pillow = enhancer(pillow).enhance(float(factor))
        expected = torch.from_numpy(np.array(pillow)).permute(2, 0, 1).int()
        assert (result.int() - expected).abs().max() <= 3  # Pillow rounds down after each of the three


def test_no_jitter_changes_nothing() -> None:
    images = random_bytes(4, 3, 8, 8)
    assert torch.equal(apply_jitter(images, Jitter(*torch.ones(3, 4))), images)
    assert torch.equal(apply_jitter(images[:, :1], Jitter(*torch.ones(3, 4))), images[:, :1])


def test_erasing_fills_one_rectangle_of_the_images_it_selects() -> None:
    images = random_bytes(2000, 3, 24, 20)
    erased = draw_erased(2000, 3, 24, 20, 0.4, seeded())
    changed = apply_erased(images, erased)
    share = 0
    for image, result, (top, left, h, w), colour in zip(
        images[:100], changed[:100], erased.box[:100].tolist(), erased.colour[:100], strict=True
    ):
        expected = image.clone()
        expected[:, top : top + h, left : left + w] = colour[:, None, None]
        assert torch.equal(result, expected)
        assert top + h <= 24
        assert left + w <= 20
    share = (erased.box[:, 2] > 0).float().mean()
    assert abs(share - 0.4) < 0.05
    area = (erased.box[:, 2] * erased.box[:, 3])[erased.box[:, 2] > 0] / (24 * 20)
    assert area.max() < 0.4
    assert 0.1 < area.float().mean() < 0.2


def test_new_settings_at_their_defaults_do_not_change_what_is_drawn() -> None:
    images = random_bytes(30, 3, 16, 16)
    old = {"padding": 2, "padding_mode": "zeros", "flip": True, "rotation": 10.0, "trivial": True}
    settings = Augmentations(**old)  # type: ignore[arg-type]
    drawn = draw_augmentation(images.shape, settings, seeded())
    more = draw_augmentation(images.shape, settings._replace(colour_jitter=0.4, erasing=0.5), seeded())
    assert all(torch.equal(a, b) for a, b in zip(drawn.geometry, more.geometry, strict=True))
    assert drawn.operations is not None
    assert more.operations is not None
    assert all(torch.equal(a, b) for a, b in zip(drawn.operations, more.operations, strict=True))
    assert torch.equal(
        augment(images, generator=seeded(), **old), apply_augmentation(images, drawn, settings)
    )


def test_batches_of_an_epoch_are_the_epoch_augmented_at_once() -> None:
    images = random_bytes(50, 3, 16, 16)
    settings = Augmentations(flip=True, rotation=10.0, trivial=True, colour_jitter=0.3, erasing=0.5)
    drawn = draw_augmentation(images.shape, settings, seeded())
    whole = apply_augmentation(images, drawn, settings)
    batches = [
        apply_augmentation(images[k : k + 16], drawn.rows(slice(k, k + 16)), settings)
        for k in (0, 16, 32, 48)
    ]
    assert torch.equal(torch.cat(batches), whole)


def test_a_flip_alone_takes_a_shorter_way_to_the_same_images() -> None:
    images = random_bytes(40, 3, 9, 9)
    short = augment(images, generator=seeded(), flip=True)
    long = augment(images, generator=seeded(), flip=True, rotation=1e-9)
    assert torch.equal(short, long)
    assert not torch.equal(short, images)


def test_a_crop_of_images_that_are_not_square_is_refused() -> None:
    with pytest.raises(ValueError, match="makes square images, got 8 x 9"):
        augment(random_bytes(2, 3, 8, 9), generator=seeded(), random_resized_crop=0.5)
