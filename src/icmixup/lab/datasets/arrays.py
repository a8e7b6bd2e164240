"""The user's own training and test data as a `Dataset`: arrays, tensors, or torch Datasets.

uint8 images     (N, H, W), (N, channels, H, W) or (N, H, W, channels): normalised by the statistics of the
                 training images
other numbers    (N, ...), for example (N, D) rows of a table: float32, and not changed
torch Dataset    items (input, label), read again in every epoch
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Subset, TensorDataset

from icmixup.lab.datasets.examples import (
    Examples,
    Indexable,
    is_channels_last,
    read_item,
    seeded_generators,
)
from icmixup.lab.datasets.subsets import Dataset, Split, measure_statistics

Array = Tensor | npt.NDArray[np.generic]
Data = tuple[Array, Array] | Indexable
Transform = Callable[[Tensor], object]
READ_TWICE = 8  # test examples, to see whether they change
READ_AGAIN = 32  # items, to see whether their labels change
NAMED = 10  # labels that an error message lists


def make_dataset(
    name: str,
    train: Data,
    test: Data,
    *,
    class_names: Sequence[str] | None = None,
    transform: Transform | None = None,
    test_transform: Transform | None = None,
) -> Dataset:
    """Training and test data with checked labels.

    Args:
        name: used in the names of folders.
        train, test: (inputs, labels), or a torch Dataset with items (input, label).
        class_names: of labels 0, 1, ...; the numbers by default.
        transform, test_transform: applied to every input whenever it is read; may be random in training.
    """
    check_columns(train, test)
    check_numbering(class_numbers(train), class_numbers(test))
    splits = [
        read_split("train", train, transform, class_names),
        read_split("test", test, test_transform, class_names),
    ]
    check_alike(*splits)
    num_classes = check_labels(splits[0].labels, splits[1].labels, class_names)
    names = tuple(class_names or (str(label) for label in range(num_classes)))
    mean, std = statistics_of(splits[0])
    return Dataset(name, splits[0], splits[1], names, mean, std, split_by="given")


def read_split(part: str, data: Data, transform: Transform | None, names: Sequence[str] | None) -> Split:
    """One part as a split; `part` is its name in error messages."""
    if type(data) is TensorDataset and len(data.tensors) == 2:
        data = (data.tensors[0], data.tensors[1])
    if isinstance(data, tuple):
        inputs, labels = read_arrays(part, data)
        if transform is None:
            return Split(inputs, labels)
        data = TensorDataset(inputs, labels)
    return read_examples(part, data, transform)


def read_arrays(part: str, data: tuple[Array, Array]) -> tuple[Tensor, Tensor]:
    if len(data) != 2:
        raise ValueError(f"{part} must be (inputs, labels) or a torch Dataset, got {len(data)} values")
    check_index(part, *(getattr(values, "index", None) for values in data))
    inputs, labels = as_inputs(part, data[0]), as_labels(part, data[1])
    if len(inputs) != len(labels):
        raise ValueError(f"{part} has {len(inputs)} inputs and {len(labels)} labels")
    if inputs.is_floating_point():
        bad = (~inputs.isfinite()).flatten(1).any(dim=1).nonzero().flatten()
        if len(bad):
            raise ValueError(
                f"{len(bad)} of {len(inputs)} inputs of {part} are not finite, the first is row {int(bad[0])}"
            )
    return inputs, labels


def check_index(part: str, inputs: object, labels: object) -> None:
    """Raise an error for rows of pandas in another order than their labels: they are paired by position."""
    if isinstance(inputs, Iterable) and isinstance(labels, Iterable):  # that of a list is a function
        rows, others = list(inputs), list(labels)
        if rows != others and set(rows) == set(others):
            raise ValueError(
                f"inputs and labels of {part} have the same index in another order, and rows are paired by "
                "position: use labels.loc[inputs.index], or NumPy arrays if their positions agree"
            )


def as_inputs(part: str, values: Array) -> Tensor:
    """Images as (N, channels, H, W) uint8, other numbers as float32."""
    array = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)
    if array.dtype == object or array.dtype.kind not in "uifb" or array.ndim < 2:
        raise ValueError(
            f"inputs of {part} must be (N, ...) numbers, got {array.shape} {array.dtype}; encode text and "
            "categories as numbers first"
        )
    tensor = torch.from_numpy(np.array(array))
    if array.dtype != np.uint8 or array.ndim not in (3, 4):
        return tensor.float()
    if array.ndim == 3:
        return tensor[:, None]
    return tensor.permute(0, 3, 1, 2).contiguous() if is_channels_last(array.shape[1:]) else tensor


def as_labels(part: str, values: object) -> Tensor:
    array = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)
    if array.ndim != 1 or array.dtype.kind not in "ui":
        raise ValueError(
            f"labels of {part} must be (N,) whole numbers, got {array.shape} {array.dtype}; number the "
            "classes from 0, for example with sklearn.preprocessing.LabelEncoder"
        )
    if len(array) == 0:
        raise ValueError(f"{part} is empty")
    return torch.from_numpy(array.astype(np.int64))


def read_examples(part: str, source: Indexable, transform: Transform | None) -> Split:
    """A torch Dataset as a split; every item is read once for its label."""
    iterable = isinstance(source, IterableDataset)
    if iterable or not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
        raise ValueError(
            f"{part} must be (inputs, labels) or a torch Dataset with __len__ and __getitem__, got "
            f"{type(source).__name__}{', which can only be iterated over' if iterable else ''}; list(...) of "
            "what it yields is one, if it fits into memory"
        )
    if len(source) == 0:
        raise ValueError(f"{part} is empty")
    with seeded_generators() as reseed:
        reseed(0)
        first, _ = read_item(source, 0, transform)
        labels = [int_label(part, row, read_item(source, row)[1]) for row in range(len(source))]
        reseed(1)
        check_fixed_labels(part, source, labels)
    tensor = as_labels(part, np.array(labels))
    rows = torch.arange(len(source))
    examples = Examples(source, rows, tuple(first.shape), first.dtype, transform)
    if part == "test":
        check_repeatable(examples[:READ_TWICE])
    return Split(examples, tensor)


def check_fixed_labels(part: str, source: Indexable, labels: Sequence[int]) -> None:
    """Raise an error if items have other labels when they are read again, as those of a dataset that draws
    a random item: inputs are read in every epoch, labels only once."""
    for row, label in enumerate(labels[:READ_AGAIN]):
        again = int_label(part, row, read_item(source, row)[1])
        if again != label:
            raise ValueError(
                f"item {row} of {part} had label {label} and then {again}: items must always have the same "
                "label; to draw classes more often, use sampler='class-balanced' or 'square-root'"
            )


def check_repeatable(test: Examples) -> None:
    """Raise an error if test examples change from one time to the next: methods would be tested on others.

    Transforms that draw from the global generators do not, because these are seeded for every example.
    """
    first, again = test.read(0), test.read(0)
    if not torch.equal(first.nan_to_num(), again.nan_to_num()):
        raise ValueError(
            "examples of test are not the same when they are read twice: their transform draws from a "
            "generator of its own, or depends on what was read before; a test set must not be random"
        )


def int_label(part: str, row: int, label: object) -> int:
    number = label.item() if isinstance(label, Tensor | np.generic) and label.ndim == 0 else label
    if not isinstance(number, int) or isinstance(number, bool):
        raise ValueError(f"the label of item {row} of {part} must be a whole number, got {label!r}")
    return number


def check_columns(train: Data, test: Data) -> None:
    """Raise an error for data frames whose columns differ: as arrays, they would be taken for the same."""
    tables = [getattr(data[0], "columns", None) for data in (train, test) if isinstance(data, tuple) and data]
    columns = [list(names) for names in tables if names is not None]
    if len(columns) == 2 and columns[0] != columns[1]:
        pairs = enumerate(zip_longest(*columns))
        place, (first, second) = next((k, pair) for k, pair in pairs if pair[0] != pair[1])
        raise ValueError(
            f"train and test have other columns, or another order of them: column {place} is {first!r} in "
            f"train and {second!r} in test; use test[train.columns]"
        )


def class_numbers(data: object) -> Mapping[str, int]:
    """The label of each class, as torchvision's datasets know it; empty for other data, and for labels that a
    target_transform changes."""
    while isinstance(data, Subset):
        data = data.dataset
    found = getattr(data, "class_to_idx", None)
    if not isinstance(found, Mapping) or getattr(data, "target_transform", None) is not None:
        return {}
    return found


def check_numbering(train: Mapping[str, int], test: Mapping[str, int]) -> None:
    """Raise an error if a class has another number in test, as in an ImageFolder that lacks a class."""
    other = next((name for name, number in test.items() if train and train.get(name) != number), None)
    if other is not None:
        in_train = f"is label {train[other]}" if other in train else "does not exist"
        raise ValueError(
            f"train and test number their classes in different ways: {other!r} {in_train} in train and is "
            f"label {test[other]} in test (their class_to_idx); give test the labels of train, for example "
            "with a target_transform"
        )


def check_alike(train: Split, test: Split) -> None:
    (train_shape, train_type), (test_shape, test_type) = (
        (tuple(split.images.shape[1:]), split.images.dtype) for split in (train, test)
    )
    if (train_shape, train_type) != (test_shape, test_type):
        raise ValueError(
            f"inputs of train are {train_shape} {train_type}, those of test {test_shape} {test_type}; both "
            "must have one shape and type: apply the same resizing to both"
        )


def check_labels(train: Tensor, test: Tensor, class_names: Sequence[str] | None) -> int:
    """The number of classes; a ValueError if a label is negative, has no training example or no name."""
    if int(torch.cat([train, test]).min()) < 0:
        raise ValueError(f"labels must be 0 or more, got {int(torch.cat([train, test]).min())}")
    seen, tested = set(train.tolist()), set(test.tolist())
    count = max(seen) + 1 if class_names is None else len(class_names)
    if unseen := sorted(tested - seen):
        images = int(torch.isin(test, torch.tensor(unseen)).sum())
        raise ValueError(
            f"test has {images} examples of labels that train lacks: {name_some(unseen)} (train has "
            f"{name_some(sorted(seen))}); remove them, or add training examples"
        )
    if empty := sorted(set(range(count)) - seen):
        raise ValueError(
            f"labels must be 0 to {count - 1} without gaps, but train has no example of {name_some(empty)}"
        )
    if class_names is not None and len(set(class_names)) < count:
        twice = next(name for name in class_names if list(class_names).count(name) > 1)
        raise ValueError(f"class_names has {twice!r} more than once; every class needs a name of its own")
    if max(seen) >= count:
        raise ValueError(f"the highest label is {max(seen)}, but there are {count} class_names")
    if count < 2:
        raise ValueError("train has 1 class; a comparison needs at least 2")
    return count


def name_some(labels: Sequence[int]) -> str:
    more = f", ... ({len(labels)} labels)" if len(labels) > NAMED else ""
    return ", ".join(map(str, labels[:NAMED])) + more


def statistics_of(train: Split) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std of images; empty for other inputs, which are not normalised."""
    if train.images.dtype != torch.uint8:
        return (), ()
    return measure_statistics(train.images)
