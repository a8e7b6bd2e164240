"""Subsets, the digits of scikit-learn, and unknown dataset names."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from icmixup.lab import datasets as datasets_module
from icmixup.lab.datasets import (
    DATASETS,
    DataSpec,
    Preprocessing,
    deic_rows,
    draw_ldam_subset,
    draw_subset,
    load_dataset,
    measure_statistics,
    subset_counts,
)

# Subsets


@pytest.mark.parametrize(
    ("classes", "size", "imbalance", "total"),
    [(10, 5000, 0.1, 20_431), (10, 5000, 0.01, 12_406), (100, 500, 0.1, 19_573), (100, 500, 0.01, 10_847)],
)
def test_long_tails_have_the_totals_of_the_paper_for_a_factor_and_its_inverse(
    classes: int, size: int, imbalance: float, total: int
) -> None:
    full = torch.full((classes,), size)
    counts = subset_counts(full, imbalance=imbalance)
    assert int(counts.sum()) == total
    assert (int(counts[0]), int(counts[-1])) == (size, size * imbalance)
    assert torch.equal(subset_counts(full, imbalance=1 / imbalance), counts)


def test_grey_images_are_normalised_with_one_constant_of_pretrained_weights() -> None:
    prepared = Preprocessing(image_size=8, mean=(0.4, 0.5, 0.6), std=(0.2, 0.2, 0.2))
    data = load_dataset(DataSpec("digits", per_class=2), Path("none"), preprocessing=prepared)
    assert data.train.images.shape[1] == len(data.mean) == len(data.std) == 1
    assert (data.mean[0], data.std[0]) == pytest.approx((0.5, 0.2))


@pytest.mark.parametrize("largest", [3, 30, 49, 98, 103, 107])
def test_the_imbalances_that_an_error_names_leave_one_image(largest: int) -> None:
    full = torch.full((5,), largest)
    with pytest.raises(ValueError, match="leaves no image of class '4'") as error:
        subset_counts(full, imbalance=2.0 * largest)
    named = re.search(r"use (\S+) or more \(or (\d+) at most\)", str(error.value))
    assert named is not None
    assert [int(subset_counts(full, imbalance=float(value))[-1]) for value in named.groups()] == [1, 1]


def test_a_size_that_is_a_whole_number_is_not_rounded_down_below_it() -> None:
    assert subset_counts(torch.full((2,), 100), imbalance=0.29).tolist() == [100, 29]


def test_per_class_comes_before_fraction_and_fraction_before_imbalance() -> None:
    full = torch.tensor([300, 200, 120])
    assert subset_counts(full, per_class=100, imbalance=0.01).tolist() == [100, 10, 1]
    assert subset_counts(full, per_class=100, fraction=0.5, imbalance=0.04).tolist() == [50, 10, 2]
    assert subset_counts(full, fraction=0.1).tolist() == [30, 20, 12]
    assert subset_counts(torch.tensor([3, 1]), fraction=0.1).tolist() == [1, 1]  # no class is lost
    assert subset_counts(full).tolist() == full.tolist()


def test_the_seed_determines_a_subset_which_contains_smaller_ones() -> None:
    labels = torch.randint(5, (1000,), generator=torch.Generator().manual_seed(0))
    counts = torch.tensor([10, 20, 30, 40, 50])
    rows = draw_subset(labels, counts, seed=1)
    assert torch.bincount(labels[rows]).tolist() == counts.tolist()
    assert rows.tolist() == sorted(set(rows.tolist()))
    assert torch.equal(draw_subset(labels, counts, seed=1), rows)
    assert not torch.equal(draw_subset(labels, counts, seed=2), rows)
    assert set(draw_subset(labels, counts // 2, seed=1).tolist()) < set(rows.tolist())


def test_the_images_of_ldam_are_those_of_its_code() -> None:
    labels = np.random.RandomState(7).randint(0, 4, 200)
    counts = [int(40 * 0.1 ** (c / 3)) for c in range(4)]
    np.random.seed(0)  # gen_imbalanced_data of imbalance_cifar.py, Cao et al. (2019)
    chosen = []
    for label, count in zip(np.unique(labels), counts, strict=True):
        rows = np.where(labels == label)[0]
        np.random.shuffle(rows)
        chosen += rows[:count].tolist()
    found = draw_ldam_subset(torch.from_numpy(labels), torch.tensor(counts), seed=0)
    assert found.tolist() == sorted(chosen)


def test_ldams_draw_is_an_option_of_a_long_tail() -> None:
    spec = DataSpec("digits", per_class=40, imbalance=0.1)
    ours = load_dataset(spec, Path("none"))
    theirs = load_dataset(replace(spec, tail_draw="ldam"), Path("none"))
    assert torch.equal(ours.class_counts, theirs.class_counts)
    assert ours.fingerprint != theirs.fingerprint


def test_held_out_images_are_of_every_class_that_can_spare_one_and_not_trained_on() -> None:
    spec = DataSpec("digits", per_class=100, imbalance=0.01)
    whole = load_dataset(spec, Path("none"))
    data = load_dataset(replace(spec, held_out=0.2), Path("none"))
    assert data.held_out is not None
    held = torch.bincount(data.held_out.labels, minlength=10)
    assert torch.equal(held + data.class_counts, whole.class_counts)
    assert held.tolist() == [20, 12, 7, 4, 2, 1, 1, 1, 0, 0]  # of 100, 59, 35, 21, 12, 7, 4, 2, 1, 1
    both = torch.cat([data.train.images, data.held_out.images])
    rows = {bytes(image.numpy().tobytes()) for image in both}
    assert rows == {bytes(image.numpy().tobytes()) for image in whole.train.images}
    assert torch.equal(data.test.images, whole.test.images)
    assert whole.held_out is None


def test_other_held_out_images_are_another_dataset() -> None:
    data = load_dataset(DataSpec("digits", per_class=20, held_out=0.2), Path("none"))
    assert data.held_out is not None
    negative = replace(data.held_out, images=255 - data.held_out.images)
    assert replace(data, held_out=negative).fingerprint != data.fingerprint


def test_nothing_to_hold_out_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"held_out=0.5 leaves no image .* no class has two training images"):
        load_dataset(DataSpec("digits", per_class=1, held_out=0.5), Path("none"))


def test_every_image_of_a_class_is_drawn_about_equally_often() -> None:
    labels = torch.tensor([0, 1] * 10)
    seen = sum(
        torch.bincount(draw_subset(labels, torch.tensor([5, 2]), seed), minlength=20) for seed in range(1000)
    )
    assert 430 < int(seen[::2].min()) <= int(seen[::2].max()) < 570  # 500 +- 4 deviations of 16
    assert 145 < int(seen[1::2].min()) <= int(seen[1::2].max()) < 255  # 200 +- 4 deviations of 13


def test_loading_does_not_change_the_global_random_state() -> None:
    before = torch.get_rng_state()
    load_dataset(DataSpec("digits", fraction=0.5, data_seed=3), Path("nowhere"))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fraction": 0.0}, ["0.0", "above 0 and up to 1"]),
        ({"fraction": 1.5}, ["1.5", "above 0 and up to 1"]),
        ({"fraction": float("nan")}, ["nan", "above 0"]),
        ({"imbalance": 0.0}, ["0.0", "above 0"]),
        ({"imbalance": -3.0}, ["-3.0", "above 0"]),
        ({"imbalance": float("inf")}, ["inf", "above 0"]),
        ({"imbalance": 0.001}, ["0.001", "'9'", "122 images"]),
        ({"per_class": 0}, ["0", "from 1 to 116"]),
        ({"per_class": 117}, ["117", "'8', has 116 training images"]),
        ({"split": 2}, ["2", "has 2 splits of 50"]),
        ({"image_size": 0}, ["0", "1 or more"]),
    ],
)
def test_settings_out_of_range_are_refused_with_their_value_and_the_range(
    settings: dict[str, float], words: list[str]
) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))) as caught:
        load_dataset(DataSpec("digits", **settings), Path("nowhere"))
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


def test_a_deic_split_is_fifty_images_per_class_in_file_order() -> None:
    labels = torch.randint(3, (900,), generator=torch.Generator().manual_seed(0))
    rows = deic_rows(labels, 2)
    assert torch.equal(rows, rows.sort().values)
    for label in range(3):
        own = [row for row, found in enumerate(labels.tolist()) if found == label]
        assert [row for row in rows.tolist() if labels[row] == label] == own[100:150]


def test_statistics_equal_those_of_numpy() -> None:
    images = torch.randint(256, (40, 3, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    mean, std = measure_statistics(images)
    pixels = images.numpy().astype(np.float64) / 255
    np.testing.assert_allclose(mean, pixels.mean(axis=(0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(std, pixels.std(axis=(0, 2, 3)), rtol=1e-12)
    assert min(measure_statistics(torch.zeros(4, 1, 8, 8, dtype=torch.uint8))[1]) > 0


def test_equal_specs_are_one_key_of_a_dictionary() -> None:
    first, second = (DataSpec("cifar10", fraction=0.1, split=1) for _ in range(2))
    assert {first: "loaded"}[second] == "loaded"
    assert DataSpec("cifar10", fraction=0.1) not in {first: "loaded"}


# Digits


def test_digits_are_those_of_scikit_learn_with_a_third_held_out() -> None:
    dataset = load_dataset(DataSpec("digits"), Path("nowhere"))
    assert dataset.train.images.shape[1:] == (1, 8, 8)
    assert dataset.train.images.dtype == torch.uint8
    assert int(dataset.class_counts.min()) >= 110
    assert 0.32 < len(dataset.test) / 1797 < 0.35
    ours = torch.cat([dataset.train.images, dataset.test.images]).flatten(1).numpy()
    labels = torch.cat([dataset.train.labels, dataset.test.labels]).numpy()
    theirs = load_digits()
    pair = lambda images, labels: sorted((tuple(i), int(k)) for i, k in zip(images, labels, strict=True))  # noqa: E731
    assert pair(np.rint(ours / 255 * 16).astype(int), labels) == pair(theirs.data.astype(int), theirs.target)


def test_held_out_digits_do_not_depend_on_the_seed() -> None:
    specs = [DataSpec("digits", fraction=0.5, data_seed=seed) for seed in (0, 1)]
    first, second = (load_dataset(spec, Path("nowhere")) for spec in specs)
    assert torch.equal(first.test.images, second.test.images)
    assert not torch.equal(first.train.images, second.train.images)
    assert first.mean == measure_statistics(first.train.images)[0]


def test_a_dataset_moves_to_a_device_with_all_its_tensors() -> None:
    moved = load_dataset(DataSpec("digits", per_class=5), Path("nowhere")).to("meta")
    assert {moved.train.images.device.type, moved.test.labels.device.type} == {"meta"}


def test_digits_at_another_size_keep_their_mean() -> None:
    own = load_dataset(DataSpec("digits"), Path("nowhere"))
    large = load_dataset(DataSpec("digits", image_size=16), Path("nowhere"))
    assert large.train.images.shape[1:] == (1, 16, 16)
    assert large.mean == pytest.approx(own.mean, abs=0.02)


def test_only_the_images_that_are_used_are_resized(monkeypatch: pytest.MonkeyPatch) -> None:
    resized: list[int] = []

    def counted(images: Tensor, size: int) -> Tensor:
        resized.append(len(images))
        return resize_images(images, size)

    resize_images = datasets_module._resize_images
    monkeypatch.setattr(datasets_module, "_resize_images", counted)
    few = load_dataset(DataSpec("digits", per_class=5, image_size=16), Path("nowhere"))
    assert sum(resized) == 50 + len(few.test)
    whole = load_dataset(DataSpec("digits", image_size=16), Path("nowhere"))
    assert {image.numpy().tobytes() for image in few.train.images} <= {
        image.numpy().tobytes() for image in whole.train.images
    }


# Names


@pytest.mark.parametrize(
    ("wrong", "similar"), [("cifar1000", "cifar100"), ("ciphar10", "cifar10"), ("digit", "digits")]
)
def test_an_unknown_name_suggests_a_similar_one_and_lists_all(
    wrong: str, similar: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"no dataset or folder '{wrong}'.*did you mean {similar}") as caught:
        load_dataset(DataSpec(wrong), tmp_path)
    assert all(name in str(caught.value) for name in DATASETS)
