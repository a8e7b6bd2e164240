"""Variance of a difference over seeds and test images, its p-value and its confidence interval."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from icmixup.lab.comparison.variance import (
    balanced_sample,
    crossed_sample,
    margin,
    p_value,
    seed_sample,
)


def mean_squares_by_loops(gaps: list[list[float]]) -> tuple[float, float, float]:
    """Mean squares of seeds, images and residuals of a two-way layout, from their definition."""
    seeds, images = len(gaps), len(gaps[0])
    mean = sum(map(sum, gaps)) / (seeds * images)
    rows = [sum(row) / images for row in gaps]
    columns = [sum(row[i] for row in gaps) / seeds for i in range(images)]
    residual = sum(
        (gaps[s][i] - rows[s] - columns[i] + mean) ** 2 for s in range(seeds) for i in range(images)
    )
    return (
        images * sum((row - mean) ** 2 for row in rows) / (seeds - 1),
        seeds * sum((column - mean) ** 2 for column in columns) / (images - 1),
        residual / ((seeds - 1) * (images - 1)),
    )


def test_the_components_follow_from_mean_squares_by_loops():
    rng = np.random.default_rng(0)
    image = rng.random(40)
    first, second = (rng.random((5, 40)) < (0.3 + 0.6 * image) for _ in range(2))
    found = crossed_sample(first, second)
    gaps = [
        [100.0 * (a - b) for a, b in zip(*rows, strict=True)]
        for rows in zip(first * 1.0, second * 1.0, strict=True)
    ]
    of_seeds, of_images, residual = mean_squares_by_loops(gaps)
    assert float(found.mean) == pytest.approx(np.mean(gaps))
    assert float(found.seed_variance) == pytest.approx(of_seeds / 200)
    assert float(found.image_variance) == pytest.approx(max(0.0, of_images - residual) / 200)
    assert float(found.residual) == pytest.approx(residual)
    assert (found.seeds, found.images) == (5, 40)


def test_the_seed_variance_is_that_of_a_paired_t_test():
    rng = np.random.default_rng(1)
    first, second = rng.random((4, 90)) < 0.8, rng.random((4, 90)) < 0.7
    gaps = 100 * (first.mean(axis=1) - second.mean(axis=1))
    assert float(crossed_sample(first, second).seed_variance) == pytest.approx(gaps.var(ddof=1) / 4)
    assert float(seed_sample(gaps).seed_variance) == pytest.approx(gaps.var(ddof=1) / 4)


def test_components_of_simulated_data_are_those_they_were_drawn_with():
    # A shared difficulty does not count, since both methods are tested on the same images.
    rng = np.random.default_rng(2)
    images = 4000
    level = rng.uniform(0.2, 0.8, images)
    share = rng.uniform(
        -0.1, 0.1, images
    )  # of the difference, by image: 10 * U(-1, 1) points for each method
    shift = rng.normal(0, 0.05, (60, 1))  # of the first method, by seed: 5 points
    first, second = rng.random((60, images)) < level + share + shift, rng.random((60, images)) < level - share
    found = crossed_sample(first, second)
    assert float(found.seed_variance) * 60 == pytest.approx(25 + 10**4 * 0.35 / images, rel=0.4)
    assert float(found.image_variance) * images == pytest.approx((200**2) * 0.01 / 3, rel=0.15)


def test_with_one_class_the_balanced_accuracy_is_the_accuracy():
    rng = np.random.default_rng(3)
    first, second = rng.random((7, 4, 60)) < 0.8, rng.random((7, 4, 60)) < 0.7  # seven comparisons at once
    found = balanced_sample(first, second, np.zeros(60, dtype=np.int64))
    for own, other in zip(found, crossed_sample(first, second), strict=True):
        np.testing.assert_allclose(own, other)


def test_the_balanced_difference_is_the_mean_over_classes():
    rng = np.random.default_rng(4)
    labels = np.repeat([5, 0, 2], [40, 9, 1])  # class 1 has no test image, class 2 has one
    first, second = rng.random((3, 50)) < 0.8, rng.random((3, 50)) < 0.7
    by_class = [
        (first[:, labels == label].mean(axis=1) - second[:, labels == label].mean(axis=1))
        for label in (0, 2, 5)
    ]
    by_seed = 100 * np.mean(by_class, axis=0)
    found = balanced_sample(first, second, labels)
    assert float(found.mean) == pytest.approx(by_seed.mean())
    assert float(found.seed_variance) == pytest.approx(by_seed.var(ddof=1) / 3)
    order = rng.permutation(50)
    shuffled = balanced_sample(first[:, order], second[:, order], labels[order])
    np.testing.assert_allclose(np.array(shuffled, dtype=float), np.array(found, dtype=float))


def test_intervals_of_the_balanced_accuracy_contain_the_true_difference():
    """Three seeds; classes of 60 test images to one; difficulties by image, and differences by class."""
    rng = np.random.default_rng(5)
    labels = np.repeat(np.arange(20), [max(1, int(60 * 0.02 ** (k / 19))) for k in range(20)])
    level, gap = rng.uniform(0.4, 0.7, 20)[labels], rng.normal(0, 0.1, 20)
    inside = 0
    for _ in range(400):
        both, own = rng.uniform(-0.25, 0.25, len(labels)), rng.uniform(-0.15, 0.15, len(labels))
        of_seed = rng.normal(0, 0.03, (3, 1))
        chances = (level + both + sign * (own + gap[labels] / 2) + of_seed * (sign > 0) for sign in (1, -1))
        first, second = (rng.random((3, len(labels))) < chance for chance in chances)
        found = balanced_sample(first, second, labels)
        parts = (float(found.seed_variance), float(found.image_variance), 2, 0.95, float(found.least))
        inside += abs(float(found.mean) - 100 * gap.mean()) <= margin(*parts)
    assert 100 * inside / 400 == 98.5  # as docs/statistics.md says


@pytest.mark.parametrize("freedom", [1, 2, 3, 9, 13.5])
def test_without_test_images_the_p_value_is_that_of_student(freedom: float):
    means = np.array([0.0, 0.3, 2.0, 12.0, 60.0])
    found = p_value(means, np.full(5, 4.0), np.zeros(5), freedom)
    np.testing.assert_allclose(found, 2 * stats.t.sf(means / 2, freedom), rtol=1e-6)
    assert margin(4.0, 0.0, freedom, 0.95) == pytest.approx(2 * stats.t.ppf(0.975, freedom))


def test_without_seed_variance_the_p_value_is_that_of_a_normal():
    means = np.array([0.0, 1.0, -3.0])
    found = p_value(means, np.zeros(3), np.full(3, 2.25), 2)
    np.testing.assert_allclose(found, 2 * stats.norm.sf(np.abs(means) / 1.5), rtol=1e-9)
    assert margin(0.0, 2.25, 2, 0.95) == pytest.approx(1.5 * stats.norm.ppf(0.975))


def test_the_p_value_is_the_tail_of_a_student_plus_a_normal():
    rng = np.random.default_rng(3)
    drawn = 0.7 * rng.standard_t(2, 10**6) + 1.2 * rng.standard_normal(10**6)
    for mean in (1.0, 3.0, 6.0):
        expected = float((np.abs(drawn) > mean).mean())
        found = float(p_value(np.array(mean), np.array(0.49), np.array(1.44), 2))
        assert found == pytest.approx(expected, abs=4 * math.sqrt(expected / 10**6))


@pytest.mark.parametrize(
    ("seed_variance", "image_variance"), [(1.0, 1.0), (0.01, 4.0), (9.0, 0.04), (1e-8, 1.0)]
)
def test_the_end_of_an_interval_has_the_p_value_of_its_level(seed_variance: float, image_variance: float):
    for freedom in (1, 2, 9):
        end = np.array(margin(seed_variance, image_variance, freedom, 0.95))
        p = p_value(end, np.array(seed_variance), np.array(image_variance), freedom)
        assert float(p) == pytest.approx(0.05, abs=1e-6)


def test_an_interval_for_seeds_and_images_is_wider_than_either_alone():
    both = margin(1.0, 1.0, 2, 0.95)
    assert both > margin(1.0, 0.0, 2, 0.95) > margin(0.0, 1.0, 2, 0.95)
    assert both < margin(1.0, 0.0, 2, 0.95) + margin(0.0, 1.0, 2, 0.95)


def test_equal_differences_for_all_seeds_are_not_taken_for_certainty():
    # Each seed is right about one image more, but about another one: the residual stands in for the seeds.
    first, second = np.eye(3, 50, dtype=bool), np.zeros((3, 50), dtype=bool)
    found = crossed_sample(first, second)
    assert float(found.seed_variance) == pytest.approx(float(found.residual) / 150)
    assert float(found.seed_variance) > 0


def test_methods_that_are_always_right_about_the_same_images_have_no_variance():
    right = np.random.default_rng(4).random((3, 50)) < 0.5
    found = crossed_sample(right, right)
    assert float(found.mean) == float(found.seed_variance) == float(found.image_variance) == 0
    assert float(p_value(found.mean, found.seed_variance, found.image_variance, 2)) == 1


def test_one_call_over_many_trials_equals_a_call_each():
    rng = np.random.default_rng(5)
    first, second = rng.random((7, 3, 60)) < 0.8, rng.random((7, 3, 60)) < 0.7
    together = crossed_sample(first, second)
    for trial in range(7):
        alone = crossed_sample(first[trial], second[trial])
        for name in ("mean", "seed_variance", "image_variance", "residual"):
            assert getattr(together, name)[trial] == pytest.approx(float(getattr(alone, name)))


def test_no_interval_is_narrower_than_that_of_the_test_images_alone():
    rng = np.random.default_rng(0)
    wrong = rng.random((200, 2, 3, 400)) < 0.2  # no effect of seeds or images: all is residual
    found = crossed_sample(~wrong[:, 0], ~wrong[:, 1])
    narrowest = stats.norm.ppf(0.975) * np.sqrt(found.least + found.image_variance)
    widths = [margin(s, i, 2, 0.95, least) for s, i, least in zip(*found[2:4], found.least, strict=True)]
    assert np.all(np.array(widths) >= narrowest - 1e-12)
    assert any(margin(s, i, 2, 0.95) < low for s, i, low in zip(*found[2:4], narrowest, strict=True))
    ends = p_value(np.array(widths), found.seed_variance, found.image_variance, 2, found.least)
    assert ends == pytest.approx(0.05, rel=1e-4)
