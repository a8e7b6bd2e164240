"""Augmentation compared with Pillow and loops, image by image."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from icmixup.lab import augment as package
from icmixup.lab.augment import augment, normalise
from icmixup.lab.augment.geometry import Geometry, apply_geometry, draw_geometry
from icmixup.lab.augment.trivial import OPERATIONS, STEPS, DrawnOperations, apply_operations, draw_operations

NO_AUGMENTATION = {"padding": 0, "padding_mode": "zeros", "flip": False, "rotation": 0.0}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_images(count: int, channels: int = 3, height: int = 32, width: int = 32) -> Tensor:
    return torch.randint(1, 256, (count, channels, height, width), generator=seeded(1)).to(torch.uint8)


def to_pillow(image: Tensor) -> Image.Image:
    return Image.fromarray(image.squeeze(0).numpy() if len(image) == 1 else image.permute(1, 2, 0).numpy())


def from_pillow(image: Image.Image) -> Tensor:
    pixels = torch.from_numpy(np.array(image))
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)


def augment_one_by_one(images: Tensor, geometry: Geometry, padding: int, mode: str) -> Tensor:
    """Crop, flip and rotate each image in turn, with torch's padding, slices and Pillow's rotation."""
    height, width = images.shape[2:]
    pad_mode = "constant" if mode == "zeros" else mode
    padded = F.pad(images.float(), [padding] * 4, mode=pad_mode).to(torch.uint8)
    out = []
    for image, top, left, flipped, angle in zip(padded, *(part.tolist() for part in geometry), strict=True):
        crop = image[:, top : top + height, left : left + width]
        crop = crop.flip(2) if flipped else crop
        out.append(from_pillow(to_pillow(crop).rotate(angle, Image.Resampling.NEAREST)))
    return torch.stack(out)


@pytest.mark.parametrize("mode", ["zeros", "reflect"])
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 8, 8), (3, 9, 14)])
@pytest.mark.parametrize("rotation", [0.0, 15.0, 180.0])
def test_one_gather_equals_crop_then_flip_then_pillows_rotation(
    mode: str, shape: tuple[int, int, int], rotation: float
) -> None:
    images = random_images(64, *shape)
    geometry = draw_geometry(64, padding=4, flip=True, rotation=rotation, generator=seeded())
    assert torch.equal(
        apply_geometry(images, geometry, 4, mode), augment_one_by_one(images, geometry, 4, mode)
    )


def test_augment_applies_the_drawn_geometry() -> None:
    images = random_images(20)
    settings = {"padding": 4, "flip": True, "rotation": 15.0}
    geometry = draw_geometry(20, **settings, generator=seeded(3))
    expected = augment_one_by_one(images, geometry, 4, "reflect")
    assert torch.equal(augment(images, **settings, padding_mode="reflect", generator=seeded(3)), expected)


def test_without_augmentation_images_are_copied_and_the_argument_is_never_changed() -> None:
    images = random_images(10)
    before = images.clone()
    same = augment(images, **NO_AUGMENTATION, generator=seeded())
    assert torch.equal(same, images)
    assert same.data_ptr() != images.data_ptr()
    augment(
        images, padding=4, padding_mode="zeros", flip=True, rotation=90.0, trivial=True, generator=seeded()
    )
    assert torch.equal(images, before)


def test_about_half_of_the_images_are_flipped_and_the_others_unchanged() -> None:
    images = random_images(400, 1, 8, 8)
    out = augment(images, **NO_AUGMENTATION | {"flip": True}, generator=seeded())
    kept = (out == images).flatten(1).all(dim=1)
    mirrored = (out == images.flip(3)).flatten(1).all(dim=1)
    assert bool((kept ^ mirrored).all())
    assert 160 < int(kept.sum()) < 240  # 200 +- 4 standard deviations of 10


def test_every_crop_is_equally_likely() -> None:
    count = 25 * 400
    geometry = draw_geometry(count, padding=2, flip=False, rotation=0.0, generator=seeded())
    counts = torch.bincount(geometry.top * 5 + geometry.left, minlength=25)
    chi_squared = float(((counts - 400) ** 2 / 400).sum())
    assert int(counts.min()) > 0
    assert chi_squared < 52.6  # 24 degrees of freedom, p = 1/1,500


def test_angles_are_uniform() -> None:
    angle = (
        draw_geometry(20_000, padding=0, flip=False, rotation=15.0, generator=seeded()).angle.sort().values
    )
    even = torch.linspace(-15, 15, 20_000, dtype=torch.float64)
    assert float((angle - even).abs().max()) < 30 * 1.95 / 20_000**0.5  # Kolmogorov-Smirnov, p = 1/1,000
    assert float(angle.abs().max()) <= 15


@pytest.mark.parametrize("other", [{"flip": True}, {"rotation": 30.0}])
def test_one_setting_does_not_change_the_draws_of_another(other: dict[str, float]) -> None:
    base = {"padding": 4, "flip": False, "rotation": 0.0}
    first = draw_geometry(50, **base, generator=seeded())
    second = draw_geometry(50, **(base | other), generator=seeded())
    assert torch.equal(first.top, second.top)
    assert torch.equal(first.left, second.left)


def test_each_image_is_augmented_independently_of_the_others_and_of_the_block_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = random_images(30, 3, 8, 8)
    settings = {"padding": 2, "padding_mode": "zeros", "flip": True, "rotation": 20.0, "trivial": True}
    whole = augment(images, **settings, generator=seeded())
    monkeypatch.setitem(package.BLOCK_PIXELS, "cpu", 7 * 64)  # seven images per block, fewer in the last
    assert torch.equal(augment(images, **settings, generator=seeded()), whole)
    changed = images.clone()
    changed[11] = 0
    again = augment(changed, **settings, generator=seeded())
    others = torch.arange(30) != 11
    assert torch.equal(again[others], whole[others])


def test_the_result_depends_on_the_generator_only() -> None:
    images = random_images(16)
    settings = {"padding": 4, "padding_mode": "zeros", "flip": True, "rotation": 15.0, "trivial": True}
    torch.manual_seed(0)
    first = augment(images, **settings, generator=seeded(5))
    torch.manual_seed(1)
    assert torch.equal(augment(images, **settings, generator=seeded(5)), first)
    assert not torch.equal(augment(images, **settings, generator=seeded(6)), first)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"padding_mode": "edge"}, ["edge", "zeros or reflect"]),
        ({"padding": -1}, ["-1", "at least 0"]),
        ({"padding": 8, "padding_mode": "reflect"}, ["8", "at most 7"]),
        ({"rotation": 200.0}, ["200", "0 to 180"]),
    ],
)
def test_settings_out_of_range_are_refused_with_their_value_and_the_range(
    wrong: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        augment(random_images(2, 1, 8, 8), **(NO_AUGMENTATION | wrong), generator=seeded())
    assert all(word in str(caught.value) for word in words)


def test_float_images_are_refused() -> None:
    with pytest.raises(ValueError, match="float32"):
        augment(torch.zeros(2, 3, 8, 8), **NO_AUGMENTATION, generator=seeded())


def test_normalised_images_have_zero_mean_and_unit_variance() -> None:
    images = random_images(50)
    pixels = images.double() / 255
    mean, std = pixels.mean(dim=(0, 2, 3)), pixels.std(dim=(0, 2, 3), correction=0)
    out = normalise(images, mean, std)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.mean(dim=(0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(out.std(dim=(0, 2, 3), correction=0), torch.ones(3), atol=1e-5, rtol=0)


def apply_pillow(name: str, image: Image.Image, strength: float) -> Image.Image:
    """The same operation, computed by Pillow."""
    affine = Image.Transform.AFFINE
    shift = int(strength * min(32, image.width))
    operations = {
        "identity": lambda: image,
        "shear-x": lambda: image.transform(image.size, affine, (1, 0.99 * strength, 0, 0, 1, 0)),
        "shear-y": lambda: image.transform(image.size, affine, (1, 0, 0, 0.99 * strength, 1, 0)),
        "translate-x": lambda: image.transform(image.size, affine, (1, 0, shift, 0, 1, 0)),
        "translate-y": lambda: image.transform(image.size, affine, (1, 0, 0, 0, 1, shift)),
        "rotate": lambda: image.rotate(135 * strength),
        "brightness": lambda: ImageEnhance.Brightness(image).enhance(1 + 0.99 * strength),
        "color": lambda: ImageEnhance.Color(image).enhance(1 + 0.99 * strength),
        "contrast": lambda: ImageEnhance.Contrast(image).enhance(1 + 0.99 * strength),
        "sharpness": lambda: ImageEnhance.Sharpness(image).enhance(1 + 0.99 * strength),
        "posterize": lambda: ImageOps.posterize(image, 8 - round(6 * abs(strength))),
        "solarize": lambda: ImageOps.solarize(image, 255 * (1 - abs(strength))),
        "autocontrast": lambda: ImageOps.autocontrast(image),
        "equalize": lambda: ImageOps.equalize(image),
    }
    return operations[name]()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_equals_pillows_up_to_rounding(name: str, channels: int) -> None:
    steps = torch.arange(-(STEPS - 1), STEPS)
    # A smooth ramp, so that contrast and equalisation change the image.
    ramp = torch.arange(32)[:, None] * 3 + torch.arange(32)
    images = (ramp + random_images(len(steps), channels) // 4 + 30).clamp(max=220).to(torch.uint8)
    strength = steps / (STEPS - 1)
    operation = torch.full((len(steps),), list(OPERATIONS).index(name))
    ours = apply_operations(images, DrawnOperations(operation, strength)).int()
    theirs = [
        from_pillow(apply_pillow(name, to_pillow(image), float(amount)))
        for image, amount in zip(images, strength, strict=True)
    ]
    difference = (ours - torch.stack(theirs).int()).abs()
    assert int(difference.max()) <= 1
    assert float((difference > 0).float().mean()) < 0.02
    if name != "identity" and not (name == "color" and channels == 1):
        assert not torch.equal(ours, images.int())


def test_strength_zero_does_not_change_the_image() -> None:
    graded = [n for n, name in enumerate(OPERATIONS) if name not in ("solarize", "autocontrast", "equalize")]
    images = random_images(len(graded))
    assert torch.equal(
        apply_operations(images, DrawnOperations(torch.tensor(graded), torch.zeros(len(graded)))), images
    )


def test_constant_images_are_unchanged_by_every_operation_of_strength_zero() -> None:
    images = torch.full((len(OPERATIONS), 3, 8, 8), 77, dtype=torch.uint8)
    out = apply_operations(
        images, DrawnOperations(torch.arange(len(OPERATIONS)), torch.zeros(len(OPERATIONS)))
    )
    assert torch.equal(out, images)


def test_operations_and_strengths_are_drawn_uniformly() -> None:
    drawn = draw_operations(14 * 31 * 20, seeded())
    operations = torch.bincount(drawn.operation, minlength=14)
    steps = torch.bincount((drawn.strength.abs() * 30).round().long(), minlength=31)
    assert float(((operations - 620) ** 2 / 620).sum()) < 36  # 13 degrees of freedom, p = 1/1,500
    assert float(((steps - 280) ** 2 / 280).sum()) < 61  # 30 degrees of freedom, p = 1/1,500
    assert 0.45 < float((drawn.strength > 0).float().mean()) < 0.52  # strength 0 has no sign
