"""Arrays and torch Datasets of the user become a dataset, or an error that names the numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import IterableDataset, Subset, TensorDataset

from icmixup.lab.datasets import Examples, validation_dataset
from icmixup.lab.datasets.arrays import make_dataset

LABELS = np.arange(12) % 3
PIXELS = np.random.default_rng(0).integers(0, 256, (12, 3, 6, 5), dtype=np.uint8)

FOUR_CHANNELS = np.concatenate([PIXELS, PIXELS[:, :1] // 2], axis=1)


class Items:
    """A torch Dataset with a random transform, which draws from all three global generators."""

    def __init__(self, inputs: Any, noise: float = 1.0) -> None:
        self.inputs, self.noise = inputs, noise

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        drawn = torch.rand(()) + np.random.rand() + random.random()
        return torch.as_tensor(self.inputs[row]).float() + self.noise * drawn, row % 3


class Pictures(Items):
    def __getitem__(self, row: int) -> tuple[Any, int]:
        return Image.fromarray(self.inputs[row].transpose(1, 2, 0)), row % 3


@pytest.mark.parametrize(
    ("given", "shape"),
    [
        (PIXELS, (12, 3, 6, 5)),
        (torch.from_numpy(PIXELS), (12, 3, 6, 5)),
        (PIXELS.transpose(0, 2, 3, 1), (12, 3, 6, 5)),
        (PIXELS[:, 0], (12, 1, 6, 5)),
        (torch.from_numpy(PIXELS[:, 0]), (12, 1, 6, 5)),
        (PIXELS[:, :1].transpose(0, 2, 3, 1), (12, 1, 6, 5)),
        (FOUR_CHANNELS, (12, 4, 6, 5)),
        (FOUR_CHANNELS.transpose(0, 2, 3, 1), (12, 4, 6, 5)),
    ],
)
def test_bytes_become_images_with_channels_first(given: Any, shape: tuple[int, ...]) -> None:
    data = make_dataset("own", (given, LABELS), (given, LABELS))
    assert data.train.images.dtype == torch.uint8
    assert data.train.images.shape == shape
    expected = torch.from_numpy(FOUR_CHANNELS[:, : shape[1]])
    torch.testing.assert_close(data.train.images, expected)
    items = [(image, row % 3) for row, image in enumerate(given)]
    torch.testing.assert_close(make_dataset("own", items, items).train.square(), expected.view(shape))
    assert data.mean == pytest.approx((expected.double() / 255).mean(dim=(0, 2, 3)).tolist())


@pytest.mark.parametrize("shape", [(12, 4), (12, 2, 7), (12, 3, 6, 5), (12, 2, 3, 4, 5)])
def test_other_numbers_are_not_changed(shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).normal(5, 9, shape)
    data = make_dataset("own", (values, LABELS), (values, LABELS))
    torch.testing.assert_close(data.train.images, torch.from_numpy(values).float())
    assert (data.mean, data.std) == ((), ())


def test_pictures_of_a_torch_dataset_are_bytes() -> None:
    data = make_dataset("own", Pictures(PIXELS), Pictures(PIXELS))
    assert isinstance(data.train.images, Examples)
    torch.testing.assert_close(data.train.square(), torch.from_numpy(PIXELS))


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGBA", "CMYK"])
def test_pictures_of_any_mode_are_read_as_colours(mode: str) -> None:
    """The bytes of a palette are numbers of colours, not colours."""
    pictures = [Image.fromarray(image.transpose(1, 2, 0)).convert(mode) for image in PIXELS]
    items = [(picture, row % 3) for row, picture in enumerate(pictures)]
    found = make_dataset("own", items, items).train.square()
    kept = {"1": "L", "L": "L", "RGBA": "RGBA"}.get(mode, "RGB")
    expected = np.stack([np.array(picture.convert(kept)).reshape(6, 5, -1) for picture in pictures])
    np.testing.assert_array_equal(found, expected.transpose(0, 3, 1, 2))


def test_a_tensor_dataset_is_read_as_arrays() -> None:
    data = make_dataset(
        "own", TensorDataset(torch.rand(12, 4), torch.from_numpy(LABELS)), (np.ones((12, 4)), LABELS)
    )
    assert isinstance(data.train.images, Tensor)


def test_random_transforms_depend_on_seed_and_row_only() -> None:
    examples = make_dataset("own", Items(np.zeros((12, 2))), Items(np.zeros((12, 2)))).train.images
    assert isinstance(examples, Examples)
    first, again, other = examples.read(1), examples.read(1), examples.read(2)
    torch.testing.assert_close(first, again)
    assert (first != other).all()
    assert len(first[:, 0].unique()) == 12
    order = torch.tensor([7, 2, 11])
    torch.testing.assert_close(examples[order].read(1), first[order])


def test_reading_leaves_the_global_generators_as_they_were() -> None:
    examples = make_dataset("own", Items(np.zeros((12, 2))), Items(np.zeros((12, 2)))).train.images
    assert isinstance(examples, Examples)
    states = []
    for read in (False, True):
        torch.manual_seed(3), np.random.seed(3), random.seed(3)
        if read:
            examples.read(1)
        states.append((torch.rand(()).item(), np.random.rand(), random.random()))
    assert states[0] == states[1]


def double(inputs: Tensor) -> Tensor:
    return 2 * inputs.float()


@pytest.mark.parametrize(
    "other",
    [
        {"train": Items(np.ones((12, 2)))},
        {"train": Items(np.zeros((12, 2)), noise=0.5)},
        {"test": Items(np.ones((12, 2)))},
        {"transform": double},
        {"class_names": ["a", "b", "c"]},
    ],
)
def test_the_fingerprint_changes_with_what_is_read(other: dict[str, Any]) -> None:
    given: dict[str, Any] = {"train": Items(np.zeros((12, 2))), "test": Items(np.zeros((12, 2)))}
    first, again = (make_dataset("own", **given).fingerprint for _ in range(2))
    assert first == again
    assert make_dataset("own", **(given | other)).fingerprint != first


class Stream(IterableDataset[tuple[Tensor, int]]):
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        yield torch.zeros(4), 0

    def __len__(self) -> int:
        return 1


ROWS = np.ones((12, 4))
BAD: list[tuple[Any, Any, str]] = [
    (
        (ROWS, LABELS),
        (ROWS, LABELS + 1),
        "test has 4 examples of labels that train lacks: 3 .train has 0, 1, 2",
    ),
    ((ROWS, 2 * LABELS), (ROWS, LABELS * 0), "0 to 4 without gaps, but train has no example of 1, 3"),
    ((ROWS, LABELS - 1), (ROWS, LABELS), "0 or more, got -1"),
    ((ROWS, LABELS[:5]), (ROWS, LABELS), "train has 12 inputs and 5 labels"),
    ((ROWS, LABELS / 2), (ROWS, LABELS), "labels of train must be .N,. whole numbers, got .12,. float64"),
    ((ROWS, LABELS), (ROWS[:, :3], LABELS), "train are .4,. torch.float32, those of test .3,. torch.float32"),
    ((ROWS * np.nan, LABELS), (ROWS, LABELS), "12 of 12 inputs of train are not finite, the first is row 0"),
    ((np.array(["a"] * 12)[:, None], LABELS), (ROWS, LABELS), "encode text"),
    ((ROWS, LABELS * 0), (ROWS, LABELS * 0), "1 class"),
    (([], []), (ROWS, LABELS), "numbers"),
    (iter([]), (ROWS, LABELS), "__len__ and __getitem__, got list_iterator"),
    ([1, 2, 3], (ROWS, LABELS), "must be .input, label., got int for item 0"),
    (Stream(), (ROWS, LABELS), "got Stream, which can only be iterated over; list"),
]


@pytest.mark.parametrize(("train", "test", "message"), BAD)
def test_bad_data_is_an_error_that_names_the_numbers(train: Any, test: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_dataset("own", train, test)


def test_data_frames_with_columns_in_another_order_are_refused() -> None:
    pandas = pytest.importorskip("pandas")
    train = pandas.DataFrame({"width": np.arange(12.0), "height": np.ones(12)})
    data = make_dataset("own", (train, LABELS), (train, LABELS))
    torch.testing.assert_close(data.train.images, torch.tensor(train.to_numpy()).float())
    with pytest.raises(ValueError, match="column 0 is 'width' in train and 'height' in test"):
        make_dataset("own", (train, LABELS), (train[["height", "width"]], LABELS))
    with pytest.raises(ValueError, match="column 1 is 'height' in train and None in test"):
        make_dataset("own", (train, LABELS), (train[["width"]], LABELS))


class OwnGenerator(Items):
    generator = torch.Generator()

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return torch.rand(2, generator=self.generator), row % 3


def test_rows_of_pandas_in_another_order_than_their_labels_are_refused() -> None:
    pandas = pytest.importorskip("pandas")
    rows, labels = pandas.DataFrame({"a": LABELS, "b": -LABELS}), pandas.Series(LABELS)
    with pytest.raises(ValueError, match="inputs and labels of test have the same index in another order"):
        make_dataset("data", (rows, labels), (rows[::-1], labels))
    for other in (labels[::-1], LABELS, labels[::-1].reset_index(drop=True).set_axis(range(12, 24))):
        assert len(make_dataset("data", (rows, labels), (rows[::-1], other)).test) == 12


class Named(Items):
    """As torchvision's ImageFolder, which numbers the classes that it finds."""

    def __init__(self, names: str, target_transform: object = None) -> None:
        super().__init__(PIXELS, noise=0.0)
        self.class_to_idx = {name: number for number, name in enumerate(names)}
        self.target_transform = target_transform


def test_a_test_set_that_numbers_its_classes_otherwise_is_refused() -> None:
    message = r"'b' is label 1 in train and is label 0 in test \(their class_to_idx\)"
    for test in (Named("bc"), Subset(Named("bc"), range(12))):
        with pytest.raises(ValueError, match=message):
            make_dataset("data", Named("abc"), test)
    with pytest.raises(ValueError, match="'d' does not exist in train and is label 2 in test"):
        make_dataset("data", Named("abc"), Named("abd"))
    for test in (Named("abc"), Named("bc", target_transform=int), Items(PIXELS, noise=0.0)):
        assert len(make_dataset("data", Named("abc"), test).test) == 12


class Drawn(Items):
    """A random item for every row, as datasets that balance their classes have them."""

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return super().__getitem__(random.randrange(len(self)))


@pytest.mark.parametrize("part", ["train", "test"])
def test_items_whose_labels_change_are_refused(part: str) -> None:
    data = {"train": Items(PIXELS), "test": Items(PIXELS)} | {part: Drawn(PIXELS)}
    with pytest.raises(ValueError, match=rf"of {part} had label \d and then \d: items must always"):
        make_dataset("data", data["train"], data["test"])


def test_test_examples_that_change_are_refused() -> None:
    """Each method would be tested on other inputs."""
    steady, random = Items(np.zeros((12, 2))), OwnGenerator(np.zeros((12, 2)))
    make_dataset("own", random, steady)
    with pytest.raises(ValueError, match="examples of test are not the same when they are read twice"):
        make_dataset("own", steady, random)


def test_items_of_another_shape_are_named() -> None:
    ragged = Items([np.zeros(2)] * 11 + [np.zeros(3)])
    data = make_dataset("own", ragged, (np.zeros((12, 2)), LABELS))
    with pytest.raises(ValueError, match=r"item 11 of the dataset is \(3,\).* the first item is \(2,\)"):
        data.train.square()


def test_the_validation_part_has_every_class_and_no_test_example() -> None:
    inputs = np.arange(12.0)[:, None] + [[0.0, 0.0]]
    data = make_dataset("own", (inputs, LABELS), (inputs + 100, LABELS))
    part = validation_dataset(data)
    trained, validated = (set(split.square()[:, 0].tolist()) for split in (part.train, part.test))
    assert trained | validated == set(range(12))
    assert not trained & validated
    assert set(part.train.labels.tolist()) == set(part.test.labels.tolist()) == {0, 1, 2}
    assert part.fingerprint == validation_dataset(data).fingerprint != data.fingerprint


def test_validation_examples_are_read_as_test_examples_are() -> None:
    rows = np.arange(12.0)[:, None] + [[0.0, 0.0]]

    def validated(inputs: Any, **transforms: Any) -> set[float]:
        part = validation_dataset(make_dataset("own", (inputs, LABELS), (rows, LABELS), **transforms))
        assert (part.train.square()[:, 0] >= 1000).all()
        return {value // 100 for value in part.test.square()[:, 0].tolist()}

    augment, plain = (lambda row: row[:2] + 1000), (lambda row: row + 500)
    assert validated(rows, transform=augment, test_transform=plain) == {5}
    assert validated(rows, transform=augment) == {10}
    longer = np.concatenate([rows, rows], axis=1)  # with the transform of the test they would be another form
    assert validated(longer, transform=augment, test_transform=plain) == {10}


def test_a_validation_part_that_leaves_a_class_empty_is_an_error_that_names_it() -> None:
    labels = np.array([0] * 6 + [1] * 5 + [2])
    data = make_dataset("own", (ROWS, labels), (ROWS, LABELS), class_names=["ant", "bee", "cat"])
    with pytest.raises(ValueError, match=r"1 of 3 classes empty.*single training image: 'cat' .* has 6"):
        validation_dataset(data)
