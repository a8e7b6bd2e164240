"""Batches of photos: drawn from seed and epoch, each photo once per epoch, and resumable."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from icmixup.lab.augment import resize_each
from icmixup.lab.datasets import Dataset, DataSpec, Photos, Split, load_dataset
from icmixup.lab.training import feed as feed_module
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.feed import Feed, PhotoFeed, make_feed
from icmixup.lab.training.loop import RunProgress, train
from icmixup.lab.training.recipe import Recipe
from icmixup.lab.training.run_folder import runs_of

RECIPE = Recipe(
    dataset="photos",
    model="small-cnn",
    method="ic-mixup",
    image_size=72,
    epochs=3,
    batch_size=5,
    lr=0.01,
    random_resized_crop=0.2,
    rotation=5.0,
    trivial=True,
    colour_jitter=0.4,
    erasing=0.5,
    eval_every=100,
)
PLAIN = dataclasses.replace(RECIPE, flip=False, rotation=0.0, trivial=False, colour_jitter=0.0, erasing=0.0)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    root, draw = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for part, number in (("train", 6), ("test", 2)):
        for label in range(2):
            (root / part / f"class{label}").mkdir(parents=True)
            for n in range(number):
                pixels = draw.integers(0, 120 + 130 * label, (90 + 7 * n, 120, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / part / f"class{label}" / f"{n}.png")
    return load_dataset(DataSpec(str(root), image_size=72), root)


def epoch_images(feed: Feed, number: int) -> list[Tensor]:
    feed.fill(number)
    return [feed.batch(step)[0].clone() for step in range(len(feed.epoch.lrs))]


def test_photos_are_fed_batch_by_batch_and_small_images_as_an_epoch(data: Dataset) -> None:
    feed = make_feed(RECIPE, data.train)
    assert isinstance(feed, PhotoFeed)
    assert feed.epoch.images.shape == (5, 3, 72, 72)
    assert [len(images) for images in epoch_images(feed, 0)] == [5, 5, 2]
    digits = load_dataset(DataSpec("digits", per_class=3), Path("none")).train
    assert not isinstance(make_feed(RECIPE, digits), PhotoFeed)


@pytest.mark.parametrize(
    ("sampler", "shares"), [("class-balanced", [0.5, 0.5]), ("square-root", [0.75, 0.25])]
)
def test_a_sampler_draws_classes_by_a_power_of_their_size(sampler: str, shares: list[float]) -> None:
    labels = torch.tensor([0] * 1800 + [1] * 200)  # sizes 9 to 1, roots 3 to 1
    images = Split(torch.arange(2000.0)[:, None], labels)
    feed = make_feed(dataclasses.replace(PLAIN, sampler=sampler), images)
    feed.fill(0)
    found = torch.bincount(feed.epoch.labels) / 2000
    assert found.tolist() == pytest.approx(shares, abs=0.045)  # 4 standard deviations
    rows = feed.epoch.images[:, 0].long()
    assert torch.equal(labels[rows], feed.epoch.labels)
    counts = torch.bincount(rows[rows >= 1800] - 1800, minlength=200)
    assert counts.min() < counts.max()  # with replacement
    first = feed.epoch.labels.clone()
    feed.fill(1)
    assert not torch.equal(feed.epoch.labels, first)
    feed.fill(0)
    assert torch.equal(feed.epoch.labels, first)


def test_a_sampler_with_an_empty_class_is_an_error_that_names_it(tmp_path: Path) -> None:
    data = load_dataset(DataSpec("digits", per_class=4), tmp_path)
    kept = (data.train.labels != 3).nonzero().squeeze(1)
    data = dataclasses.replace(data, train=data.train[kept])
    recipe = dataclasses.replace(PLAIN, dataset="digits", sampler="class-balanced", random_resized_crop=None)
    with pytest.raises(ValueError, match=r"sampler='class-balanced' .* has no training image of '3'"):
        train(recipe, Execution(out=tmp_path, data_dir=tmp_path, dataset=data, device="cpu"))


def test_images_depend_on_seed_and_epoch_only(data: Dataset) -> None:
    first, again = make_feed(RECIPE, data.train), make_feed(RECIPE, data.train)
    epoch_images(again, 0)
    for one, two in zip(epoch_images(first, 1), epoch_images(again, 1), strict=True):
        assert torch.equal(one, two)
    other = make_feed(dataclasses.replace(RECIPE, seed=1), data.train)
    assert not torch.equal(epoch_images(other, 1)[0], epoch_images(first, 1)[0])
    assert not torch.equal(epoch_images(first, 2)[0], epoch_images(again, 1)[0])


def test_a_batch_is_the_crops_of_its_photos_and_an_epoch_has_each_photo_once(data: Dataset) -> None:
    feed = make_feed(PLAIN, data.train)
    assert isinstance(feed, PhotoFeed)
    batches = epoch_images(feed, 0)
    photos, drawn = feed.photos, feed.drawn
    assert drawn is not None
    assert drawn.boxes is not None
    assert isinstance(data.train.images, Photos)
    assert sorted(photos.rows.tolist()) == sorted(data.train.images.rows.tolist())
    for row, (top, left, h, w), image in zip(
        photos.rows.tolist(), drawn.boxes.tolist(), torch.cat(batches), strict=True
    ):
        crop = photos.store.photo(row)[top : top + h, left : left + w]
        assert torch.equal(resize_each([crop], 72)[0], image)
    labels = dict(zip(data.train.images.rows.tolist(), data.train.labels.tolist(), strict=True))
    assert feed.epoch.labels.tolist() == [labels[row] for row in photos.rows.tolist()]


def test_without_a_random_resized_crop_the_centre_is_padded_and_cropped(data: Dataset) -> None:
    recipe = dataclasses.replace(PLAIN, random_resized_crop=None, padding=0)
    feed = make_feed(recipe, data.train)
    assert isinstance(feed, PhotoFeed)
    assert torch.equal(torch.cat(epoch_images(feed, 0)), feed.photos.square())
    moved = make_feed(dataclasses.replace(recipe, padding=4), data.train)
    assert not torch.equal(epoch_images(moved, 0)[0], epoch_images(feed, 0)[0])


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_the_images_of_one_process(
    ranks: int, data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = epoch_images(make_feed(RECIPE, data.train), 0)
    monkeypatch.setattr(feed_module, "world_size", lambda: ranks)
    for number in range(ranks):
        monkeypatch.setattr(feed_module, "rank", lambda number=number: number)
        feed = make_feed(RECIPE, data.train)
        feed.fill(0)
        for step in range(2):
            images, labels, _, _ = feed.batch(step)
            assert torch.equal(images, whole[step][number::ranks])
            assert torch.equal(labels, feed.epoch.labels[5 * step : 5 * step + 5][number::ranks])


def weights_of(root: Path, recipe: Recipe) -> dict[str, Tensor]:
    state, _ = next(runs_of(root, recipe)).load(torch.device("cpu"))
    assert state is not None
    return state["model"]  # type: ignore[no-any-return]


def test_a_resumed_run_on_photos_has_the_weights_of_an_uninterrupted_one(
    data: Dataset, tmp_path: Path
) -> None:
    def stop(progress: RunProgress) -> None:
        if progress.epoch >= 2:
            raise KeyboardInterrupt

    execution = Execution(
        out=tmp_path / "whole", data_dir=tmp_path, dataset=data, device="cpu", checkpoint_seconds=0
    )
    row = train(RECIPE, execution)
    resumed = dataclasses.replace(execution, out=tmp_path / "resumed")
    with pytest.raises(KeyboardInterrupt):
        train(RECIPE, resumed, stop)
    assert train(RECIPE, resumed)["loss"] == row["loss"]
    one, two = weights_of(tmp_path / "whole", RECIPE), weights_of(tmp_path / "resumed", RECIPE)
    assert all(torch.equal(one[name], two[name]) for name in one)
