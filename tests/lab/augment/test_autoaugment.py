"""AutoAugment and Cutout, compared with their definitions image by image."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from icmixup.lab.augment import augment
from icmixup.lab.augment.autoaugment import POLICY, draw_cutout, draw_policy, relative_strength
from icmixup.lab.augment.colour import apply_erased
from icmixup.lab.augment.trivial import KERNELS, DrawnOperations, apply_operations

NONE = {"padding": 0, "padding_mode": "zeros", "flip": False, "rotation": 0.0}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_images(count: int, channels: int = 3, side: int = 32) -> Tensor:
    return torch.randint(1, 256, (count, channels, side, side), generator=seeded(1)).to(torch.uint8)


def by_pillow(name: str, magnitude: int, image: Image.Image) -> Image.Image:
    """An operation with the magnitudes of the paper's appendix, on ten levels."""
    part, affine = magnitude / 9, Image.Transform.AFFINE
    shift = int(150 / 331 * image.width * part)
    return {
        "shear-y": lambda: image.transform(image.size, affine, (1, 0, 0, 0.3 * part, 1, 0)),
        "translate-x": lambda: image.transform(image.size, affine, (1, 0, shift, 0, 1, 0)),
        "translate-y": lambda: image.transform(image.size, affine, (1, 0, 0, 0, 1, shift)),
        "rotate": lambda: image.rotate(30 * part),
        "brightness": lambda: ImageEnhance.Brightness(image).enhance(1 + 0.9 * part),
        "color": lambda: ImageEnhance.Color(image).enhance(1 + 0.9 * part),
        "contrast": lambda: ImageEnhance.Contrast(image).enhance(1 + 0.9 * part),
        "sharpness": lambda: ImageEnhance.Sharpness(image).enhance(1 + 0.9 * part),
        "posterize": lambda: ImageOps.posterize(image, 8 - round(4 * part)),
        "solarize": lambda: ImageOps.solarize(image, 255 * (1 - part)),
        "autocontrast": lambda: ImageOps.autocontrast(image),
        "equalize": lambda: ImageOps.equalize(image),
        "invert": lambda: ImageOps.invert(image),
    }[name]()


STEPS = sorted({(name, magnitude) for sub in POLICY for name, _, magnitude in sub})


@pytest.mark.parametrize("side", [32, 48])
@pytest.mark.parametrize(("name", "magnitude"), STEPS)
def test_every_step_of_the_policy_is_pillows(name: str, magnitude: int, side: int) -> None:
    images = random_images(4, side=side)
    operation = torch.full((4,), list(KERNELS).index(name))
    strength = torch.full((4,), relative_strength(name, magnitude, side, side))
    ours = apply_operations(images, DrawnOperations(operation, strength)).int()
    for image, found in zip(images, ours, strict=True):
        pixels = np.array(by_pillow(name, magnitude, Image.fromarray(image.permute(1, 2, 0).numpy())))
        wanted = torch.from_numpy(pixels).permute(2, 0, 1).int()
        off = (found - wanted).abs()
        # A rounding error of 1; and where a source pixel lies between two, either may be the nearest.
        assert (off <= 1).float().mean() > 0.995


def test_sub_policies_are_uniform_and_steps_have_their_own_probability_and_sign() -> None:
    count, identity = 50_000, list(KERNELS).index("identity")
    steps = draw_policy(count, 32, 32, seeded())
    share = [sum(sub[k][1] for sub in POLICY) / len(POLICY) for k in range(2)]
    for step, wanted in zip(steps, share, strict=True):
        assert float((step.operation != identity).float().mean()) == pytest.approx(wanted, abs=0.01)
        turned = step.strength[step.operation == list(KERNELS).index("translate-y")]
        assert abs(float(turned.sign().mean())) < 0.05
    invert = float((steps[0].operation == list(KERNELS).index("invert")).float().mean())
    assert invert == pytest.approx(0.1 / 25, abs=0.0015)
    # The second step belongs to the same sub-policy: sharpness 3 follows sharpness 1.
    sharp = list(KERNELS).index("sharpness")
    weak = (steps[0].operation == sharp) & (steps[0].strength.abs() < 0.2)
    after = steps[1].operation[weak]
    assert set(after.tolist()) == {sharp, identity}
    assert float((after == sharp).float().mean()) == pytest.approx(0.9, abs=0.03)


def test_augment_applies_both_steps_in_turn_and_in_blocks() -> None:
    images = random_images(40, 1, 8)
    first, second = draw_policy(40, 8, 8, skip_geometry(40))
    wanted = apply_operations(apply_operations(images, first), second)
    assert torch.equal(augment(images, **NONE, autoaugment=True, generator=seeded(5)), wanted)


def skip_geometry(count: int) -> torch.Generator:
    """The generator after the draws of crop, flip and rotation."""
    from icmixup.lab.augment.geometry import draw_geometry

    generator = seeded(5)
    draw_geometry(count, padding=0, flip=False, rotation=0.0, generator=generator)
    return generator


def test_cutout_blanks_a_square_around_every_pixel_alike_and_cuts_it_off_at_the_border() -> None:
    images = random_images(3000, 1, 10)
    erased = draw_cutout(3000, 1, 10, 10, 4, seeded())
    black = apply_erased(images, erased)[:, 0] == 0
    for mask, (top, left, height, width) in zip(black[:200], erased.box[:200].tolist(), strict=True):
        wanted = torch.zeros(10, 10, dtype=torch.bool)
        wanted[top : top + height, left : left + width] = True
        assert torch.equal(mask, wanted)
        assert 2 <= height <= 4
        assert 2 <= width <= 4
    # The centre is uniform over 10 x 10 pixels; a pixel far from the border is within 4 of 10 rows.
    assert float(black[:, 5, 5].float().mean()) == pytest.approx(0.16, abs=0.03)
    assert float(black[:, 0, 0].float().mean()) == pytest.approx(0.3**2, abs=0.025)
    assert torch.equal(augment(images[:5], **NONE, cutout=0, generator=seeded()), images[:5])
    assert bool((augment(images[:5], **NONE, cutout=4, generator=seeded()) == 0).any())


def test_two_policies_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        augment(random_images(2), **NONE, trivial=True, autoaugment=True, generator=seeded())
