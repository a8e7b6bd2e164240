"""Corruptions: shapes, ranges, seeds and strengths of all of them; closed forms and Pillow where there are
any."""

from __future__ import annotations

import importlib
import io
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits, load_sample_images
from torch import Tensor

from icmixup.lab.analysis.corruptions import CORRUPTIONS, STRENGTHS, corrupt, length_factor
from icmixup.lab.analysis.corruptions.blur import disk
from icmixup.lab.analysis.corruptions.digital import elastic_transform, pixel_matrix
from icmixup.lab.analysis.corruptions.draws import draws_of
from icmixup.lab.analysis.corruptions.filters import (
    filter_matrix,
    gaussian_weights,
    mirror,
    motion_blur,
    zoom,
)
from icmixup.lab.analysis.corruptions.noise import poisson_table
from icmixup.lab.analysis.corruptions.weather import clouds

# Their published parameters change in kind from one strength to the next, not only in amount.
NOT_MONOTONE = {"glass_blur", "snow", "frost", "elastic_transform"}
RANDOM = {
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "glass_blur",
    "motion_blur",
    "snow",
    "frost",
    "fog",
} | {"elastic_transform"}


def photos(size: int, count: int = 4) -> Tensor:
    """(count, 3, size, size): parts of scikit-learn's two photos."""
    parts = []
    for number in range(count):
        photo = Image.fromarray(load_sample_images().images[number % 2])
        left = 60 * number
        part = photo.crop((left, 100, left + 300, 400)).resize((size, size), Image.Resampling.LANCZOS)
        parts.append(torch.from_numpy(np.array(part)).permute(2, 0, 1))
    return torch.stack(parts)


def digits(count: int = 8) -> Tensor:
    """(count, 1, 8, 8)"""
    return torch.tensor(load_digits().images[:count] * 255 / 16).round().byte()[:, None]


@pytest.fixture(scope="module")
def small() -> Tensor:
    return photos(32)


@pytest.fixture(scope="module")
def large() -> Tensor:
    return photos(128, count=2)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_images_keep_their_shape_and_are_changed_at_every_strength(
    name: str, small: Tensor, large: Tensor
) -> None:
    for images in (small, large, digits(), small[:1, :, :30, :25], small[:, :1]):
        for strength in STRENGTHS:
            changed = corrupt(images, name, strength)
            assert changed.shape == images.shape
            assert changed.dtype == torch.uint8
            assert not torch.equal(changed, images)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corrupted_image_depends_on_its_number_and_not_on_the_batch(name: str, small: Tensor) -> None:
    rows = torch.tensor([11, 5, 8, 2])
    together = corrupt(small, name, 3, rows)
    reordered = corrupt(small.flip(0), name, 3, rows.flip(0)).flip(0)
    alone = torch.cat([corrupt(small[k : k + 1], name, 3, rows[k : k + 1]) for k in range(4)])
    for other in (reordered, alone, corrupt(small, name, 3, rows)):
        # Sums in another order may move a value across the border between two bytes.
        difference = (together.int() - other.int()).abs()
        assert difference.max() <= 1
        assert (difference > 0).float().mean() < 0.01


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_equal_images_with_other_numbers_differ_exactly_if_the_corruption_is_random(
    name: str, small: Tensor
) -> None:
    first, second = corrupt(small[:1].repeat(2, 1, 1, 1), name, 4)
    assert torch.equal(first, second) == (name not in RANDOM)


@pytest.mark.parametrize("size", [32, 128])
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_higher_strengths_are_further_from_the_image(name: str, size: int) -> None:
    images = photos(size, count=4)
    distances = [
        (corrupt(images, name, strength).float() - images.float()).square().mean().item()
        for strength in STRENGTHS
    ]
    if name not in NOT_MONOTONE:
        # Pixelation to 28 and to 27 of 32 pixels is about the same.
        assert all(low < 1.03 * high for low, high in itertools.pairwise(distances)), distances
    if name != "elastic_transform":
        assert distances[-1] > 1.1 * distances[0]


def test_the_table_has_fifteen_corruptions_with_five_strengths_for_both_sizes() -> None:
    assert len(CORRUPTIONS) == 15
    assert all(len(c.small) == len(c.large) == len(STRENGTHS) for c in CORRUPTIONS.values())


# Numbers of the scripts that made CIFAR-10-C and ImageNet-C (github.com/hendrycks/robustness), for
# strengths 1 to 5. Zoom goes up to a factor in steps, elastic lengths are shares of 32 and of 224 pixels.
PUBLISHED = {
    "gaussian_noise": ("0.04 0.06 0.08 0.09 0.10", "0.08 0.12 0.18 0.26 0.38"),
    "shot_noise": ("500 250 100 75 50", "60 25 12 5 3"),
    "impulse_noise": ("0.01 0.02 0.03 0.05 0.07", "0.03 0.06 0.09 0.17 0.27"),
    "defocus_blur": ("0.3 0.4  0.4 0.5  0.5 0.6  1 0.2  1.5 0.1", "3 0.1  4 0.5  6 0.5  8 0.5  10 0.5"),
    "glass_blur": (
        "0.05 1 1  0.25 1 1  0.4 1 1  0.25 1 2  0.4 1 2",
        "0.7 1 2  0.9 2 1  1 2 3  1.1 3 2  1.5 4 2",
    ),
    "motion_blur": ("6 1  6 1.5  6 2  8 2  9 2.5", "10 3  15 5  15 8  15 12  20 15"),
    "zoom_blur": (
        "1.05 0.01  1.10 0.01  1.15 0.01  1.20 0.01  1.25 0.01",
        "1.10 0.01  1.15 0.01  1.20 0.02  1.24 0.02  1.30 0.03",
    ),
    "snow": (
        "0.1 0.2 1 0.6 8 3 0.95  0.1 0.2 1 0.5 10 4 0.9  0.15 0.3 1.75 0.55 10 4 0.9 "
        "0.25 0.3 2.25 0.6 12 6 0.85  0.3 0.3 1.25 0.65 14 12 0.8",
        "0.1 0.3 3 0.5 10 4 0.8  0.2 0.3 2 0.5 12 4 0.7  0.55 0.3 4 0.9 12 8 0.7 "
        "0.55 0.3 4.5 0.85 12 8 0.65  0.55 0.3 2.5 0.85 12 12 0.55",
    ),
    "frost": ("1 0.2  1 0.3  0.9 0.4  0.85 0.4  0.75 0.45", "1 0.4  0.8 0.6  0.7 0.7  0.65 0.7  0.6 0.75"),
    "fog": ("0.2 3  0.5 3  0.75 2.5  1 2  1.5 1.75", "1.5 2  2 2  2.5 1.7  2.5 1.5  3 1.4"),
    "brightness": ("0.05 0.1 0.15 0.2 0.3", "0.1 0.2 0.3 0.4 0.5"),
    "contrast": ("0.75 0.5 0.4 0.3 0.15", "0.4 0.3 0.2 0.1 0.05"),
    "elastic_transform": (
        "0 0 0.08  0.05 0.2 0.07  0.08 0.06 0.06  0.1 0.04 0.05  0.1 0.03 0.03",
        # 244 for 224 is theirs.
        "488 170.8 24.4  488 19.52 48.8  12.2 2.44 4.88  17.08 2.44 4.88  29.28 2.44 4.88",
    ),
    "pixelate": ("0.95 0.9 0.85 0.75 0.65", "0.6 0.5 0.4 0.3 0.25"),
    "jpeg_compression": ("80 65 58 50 40", "25 18 15 10 7"),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_the_parameters_are_those_of_the_published_datasets(name: str) -> None:
    corruption, sizes = CORRUPTIONS[name], (1, 224 if name == "elastic_transform" else 1)
    for parameters, text, side in zip(
        (corruption.small, corruption.large), PUBLISHED[name], sizes, strict=True
    ):
        found = [value * side for group in parameters for value in group]
        assert found == pytest.approx([float(word) for word in text.split()], abs=1e-9)


def test_lengths_grow_with_the_side_and_do_not_shrink_below_32_pixels() -> None:
    assert [length_factor(side) for side in (8, 32, 64, 112, 224, 448)] == [1, 1, 2, 0.5, 1, 2]


def test_random_numbers_are_uniform_and_independent_between_pixels_images_and_streams() -> None:
    draws = draws_of("test", torch.arange(64))
    numbers = draws.uniform(0, 3, 32, 32).double()
    flat = numbers.flatten(1) - 0.5
    error = 5 / math.sqrt(numbers.numel())  # five standard errors of a correlation
    assert numbers.min() > 0
    assert numbers.max() < 1
    assert abs(flat.mean().item()) < error
    counts = torch.histc(numbers.float(), 256, 0, 1)
    assert 0.7 < ((counts - counts.mean()) ** 2 / counts.mean()).sum().item() / 255 < 1.3
    for lag in (1, 2, 31, 32, 33, 1024):
        assert abs(12 * (flat[:, lag:] * flat[:, :-lag]).mean().item()) < 2 * error
    for lag in (1, 2, 16, 32):
        assert abs(12 * (flat[lag:] * flat[:-lag]).mean().item()) < 2 * error
    other = draws.uniform(1, 3, 32, 32).double().flatten(1) - 0.5
    assert abs(12 * (flat * other).mean().item()) < 2 * error
    assert not torch.equal(numbers, draws_of("another", torch.arange(64)).uniform(0, 3, 32, 32))


@pytest.mark.parametrize("strength", STRENGTHS)
def test_gaussian_noise_has_the_published_deviation(strength: int) -> None:
    grey = torch.full((40, 3, 32, 32), 128, dtype=torch.uint8)
    noise = corrupt(grey, "gaussian_noise", strength).double() - 128
    assert noise.std().item() == pytest.approx(255 * (0.04, 0.06, 0.08, 0.09, 0.10)[strength - 1], rel=0.01)
    assert abs(noise.mean().item()) < 0.3


@pytest.mark.parametrize("photons", [3, 60, 500])
def test_shot_noise_is_poisson_distributed(photons: int) -> None:
    from scipy.stats import poisson

    table = poisson_table(photons)
    levels = np.arange(256)[:, None] * photons / 255
    np.testing.assert_allclose(table, poisson.cdf(np.arange(table.shape[1]), levels), atol=1e-6)
    assert table[:, -1].min() > 1 - 1e-6


def test_shot_noise_has_the_mean_and_variance_of_counted_photons() -> None:
    grey = torch.full((60, 3, 32, 32), 102, dtype=torch.uint8)  # 0.4
    noisy = corrupt(grey, "shot_noise", 5).double() / 255
    assert noisy.mean().item() == pytest.approx(0.4, rel=0.005)
    assert noisy.var().item() == pytest.approx(0.4 / 50, rel=0.03)
    black = corrupt(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "shot_noise", 5)
    assert black.max() == 0


@pytest.mark.parametrize("strength", STRENGTHS)
def test_impulse_noise_makes_the_published_share_black_or_white(strength: int) -> None:
    grey = torch.full((60, 3, 32, 32), 100, dtype=torch.uint8)
    noisy = corrupt(grey, "impulse_noise", strength)
    share = (0.01, 0.02, 0.03, 0.05, 0.07)[strength - 1]
    for value in (0, 255):
        assert (noisy == value).double().mean().item() == pytest.approx(share / 2, rel=0.1)
    assert ((noisy == 0) | (noisy == 100) | (noisy == 255)).all()


@pytest.mark.parametrize("name", ["defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "pixelate"])
def test_blur_leaves_an_image_of_one_colour_as_it_is(name: str) -> None:
    plain = torch.tensor([30, 120, 220], dtype=torch.uint8)[None, :, None, None].repeat(2, 1, 40, 40)
    for strength in STRENGTHS:
        assert (corrupt(plain, name, strength).int() - plain.int()).abs().max() <= 1


def test_a_filter_matrix_is_a_convolution_with_mirrored_ends() -> None:
    from scipy.ndimage import gaussian_filter1d

    line = torch.rand(9, generator=torch.Generator().manual_seed(0))
    for sigma in (0.6, 2.0, 7.0):  # the last one reaches over the whole line more than once
        weights = gaussian_weights(sigma, int(4 * sigma + 0.5))
        expected = gaussian_filter1d(line.double().numpy(), sigma, mode="reflect", truncate=4.0)
        np.testing.assert_allclose(filter_matrix(9, weights) @ line, expected, atol=1e-6)
    assert mirror(torch.arange(-4, 7), 3).tolist() == [2, 2, 1, 0, 0, 1, 2, 2, 1, 0, 0]


def test_the_disk_of_defocus_blur_covers_its_area() -> None:
    kernel = disk(10.0, 0.5, taps=2)
    assert kernel.sum().item() == pytest.approx(1)
    assert 1 / kernel.max().item() == pytest.approx(math.pi * 10**2, rel=0.02)
    torch.testing.assert_close(kernel, kernel.T)


def test_motion_blur_spreads_a_point_along_the_line_with_gaussian_weights() -> None:
    point = torch.zeros(2, 1, 21, 21)
    point[:, :, 10, 10] = 1
    flat, steep = motion_blur(point, torch.tensor([0.0, math.pi / 2]), 4, 2.0)
    weights = torch.exp(-0.5 * (torch.arange(9) / 2.0) ** 2)
    weights = (weights / weights.sum()).flip(0)
    torch.testing.assert_close(flat[0, 10, 2:11], weights, atol=2e-4, rtol=0)
    torch.testing.assert_close(steep[0, 2:11, 10], weights, atol=2e-4, rtol=0)
    assert flat.sum().item() == pytest.approx(1, abs=1e-5)


def test_zoom_keeps_the_centre_and_enlarges_a_ramp() -> None:
    ramp = torch.arange(9.0)[None, None, None].repeat(1, 1, 9, 1)
    torch.testing.assert_close(zoom(ramp, 2.0)[0, 0, 0], 2 + torch.arange(9) / 2)


def test_brightness_adds_to_the_largest_channel_and_keeps_hue_and_saturation() -> None:
    import colorsys

    images = photos(32, count=1)
    brighter = corrupt(images, "brightness", 4)
    for before, after in zip(images[0].flatten(1).T[::50], brighter[0].flatten(1).T[::50], strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*(before / 255).tolist())
        expected = colorsys.hsv_to_rgb(hue, saturation, min(1.0, value + 0.2))
        assert (after / 255).tolist() == pytest.approx(expected, abs=0.5 / 255 + 1e-6)
    grey = torch.tensor([[[[0, 100, 250]]]], dtype=torch.uint8)
    assert corrupt(grey, "brightness", 4).tolist() == [[[[51, 151, 255]]]]
    black = corrupt(torch.zeros(1, 3, 2, 2, dtype=torch.uint8), "brightness", 4)
    assert (black == 51).all()


def test_contrast_scales_deviations_from_the_mean_of_each_channel(small: Tensor) -> None:
    changed = corrupt(small, "contrast", 2).double()
    mean = small.double().mean(dim=(2, 3), keepdim=True)
    torch.testing.assert_close(changed, mean + (small.double() - mean) / 2, atol=0.51, rtol=0)


def test_pixelate_shows_the_mean_of_each_block() -> None:
    images = photos(128, count=1)
    blocks = images.double().unfold(2, 2, 2).unfold(3, 2, 2).mean(dim=(4, 5))
    expected = blocks.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    torch.testing.assert_close(corrupt(images, "pixelate", 2).double(), expected, atol=0.51, rtol=0)


def test_pixelate_is_a_box_filter_of_pillow_at_any_share(small: Tensor) -> None:
    for strength, share in zip(STRENGTHS, (0.95, 0.9, 0.85, 0.75, 0.65), strict=True):
        image = Image.fromarray(small[0].permute(1, 2, 0).numpy())
        fewer = int(32 * share)
        shrunk = image.resize((fewer, fewer), Image.Resampling.BOX)
        expected = np.array(shrunk.resize((32, 32), Image.Resampling.BOX)).astype(int)
        found = corrupt(small[:1], "pixelate", strength)[0].permute(1, 2, 0).numpy().astype(int)
        assert np.abs(found - expected).max() <= 2  # Pillow rounds after each step
    torch.testing.assert_close(pixel_matrix(10, 0.33).sum(dim=1), torch.ones(10))


@pytest.mark.parametrize("strength", STRENGTHS)
def test_jpeg_compression_agrees_with_pillow(strength: int) -> None:
    images = photos(120, count=1)  # 15 blocks, an odd number of 16 x 16 blocks
    for part in (images, images[:, :1]):
        array = part[0].permute(1, 2, 0).numpy()
        file = io.BytesIO()
        Image.fromarray(array.squeeze()).save(file, "JPEG", quality=(25, 18, 15, 10, 7)[strength - 1])
        expected = np.array(Image.open(file)).reshape(array.shape).astype(int)
        found = corrupt(part, "jpeg_compression", strength)[0].permute(1, 2, 0).numpy().astype(int)
        lost = np.abs(expected - array).mean()
        assert np.abs(found - expected).mean() < 0.1 * lost


def test_fog_dims_the_image_and_adds_clouds_from_0_to_1() -> None:
    images = torch.full((6, 3, 32, 32), 255, dtype=torch.uint8)
    images[3:, :, :16] = 0  # the same numbers, and so the same clouds, as the first three
    white, half = corrupt(images, "fog", 2, torch.arange(3).repeat(2)).int().split(3)
    assert white.min() >= 170  # 255 / (1 + density)
    assert (white - half)[:, :, 16:].abs().max() == 0
    assert ((white - half)[:, :, :16] - 170).abs().max() <= 1
    assert torch.equal(white[:, 0], white[:, 1])


def test_clouds_are_periodic_and_rougher_with_less_decay() -> None:
    roughness = []
    for decay in (3.0, 1.5):
        maps = clouds(256, decay)
        assert maps.amin(dim=(1, 2)).tolist() == [0] * 16
        assert maps.amax(dim=(1, 2)).tolist() == [1] * 16
        steps = maps.diff(dim=1).abs().mean()
        across = (maps[:, 0] - maps[:, -1]).abs().mean()
        assert across < 3 * steps
        roughness.append(steps)
    assert roughness[1] > 2 * roughness[0]


def test_elastic_displacements_are_a_constant_share_of_the_side() -> None:
    """Displacements of a ramp, whose pixels are their own positions, at two sizes."""
    spreads = []
    for side in (32, 64):
        ramp = torch.arange(side)[None, None, None].repeat(60, 1, side, 1).float() / 255
        moved = elastic_transform(ramp, draws_of("test", torch.arange(60)), side / 32, 0.1, 0.04, 0.0)
        inside = slice(side // 4, -side // 4)
        spreads.append((255 * (moved - ramp))[..., inside, inside].std().item() / side)
    assert spreads[0] == pytest.approx(spreads[1], rel=0.1)
    assert spreads[0] == pytest.approx(0.0144, rel=0.15)  # 3.2 / sqrt(3) / (2 sqrt(pi) 1.28) pixels of 32


BAD = [
    ({"name": "fogg"}, "unknown corruption 'fogg'; did you mean fog?"),
    ({"name": "rain"}, "unknown corruption 'rain'; .*gaussian_noise, shot_noise"),
    ({"strength": 0}, "strengths are 1 .* to 5 .*, got 0"),
    ({"strength": 6}, "strengths are 1 .* to 5 .*, got 6"),
    ({"images": torch.zeros(2, 4, 8, 8, dtype=torch.uint8)}, r"got \(2, 4, 8, 8\) uint8"),
    ({"images": torch.zeros(2, 3, 8, 8)}, r"got \(2, 3, 8, 8\) float32"),
    ({"images": torch.zeros(3, 8, 8, dtype=torch.uint8)}, r"got \(3, 8, 8\) uint8"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input_is_named(change: dict[str, object], message: str, small: Tensor) -> None:
    with pytest.raises(ValueError, match=message):
        corrupt(**{"images": small, "name": "fog", "strength": 1, **change})  # type: ignore[arg-type]


def test_an_empty_batch_stays_empty() -> None:
    nothing = torch.zeros(0, 3, 8, 8, dtype=torch.uint8)
    assert corrupt(nothing, "fog", 1).shape == nothing.shape


def test_the_picture_of_the_docs_shows_every_corruption_and_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[3]
    monkeypatch.syspath_prepend(str(root / "tools"))
    tool = importlib.import_module("draw_corruptions")
    sheet = np.asarray(tool.draw_sheet(photos(16, count=1)[0], tile=16))[tool.HEADER :, tool.NAMES :]
    tiles = sheet.reshape(15, 18, 6, 18, 3).swapaxes(1, 2)[:, :, :16, :16]
    assert all(len({tile.tobytes() for tile in row}) >= 5 for row in tiles)
    assert (root / "docs" / "corruptions.jpg").stat().st_size < 250_000
