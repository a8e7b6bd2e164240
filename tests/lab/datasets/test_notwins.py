"""cifar10-notwins: CIFAR-10 tested without the images that ciFAIR lists as twins."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from icmixup.lab.datasets import load_dataset
from icmixup.lab.datasets.cifar import LAYOUTS

HEADER = "TestID,TrainID,Distance,Judgment\r\n"


def write_cifar10(folder: Path, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """50 made images a file, labels 0 to 9 in turn; the test images and labels."""
    layout = LAYOUTS["cifar10"][0]
    random = np.random.default_rng(seed)
    (folder / layout.archive.folder).mkdir(parents=True)
    labels = np.tile(np.arange(10, dtype=np.uint8), 5)
    for file in (*layout.train, layout.test):
        images = random.integers(0, 256, (50, 3072), dtype=np.uint8)
        records = np.concatenate([labels[:, None], images], axis=1)
        (folder / layout.archive.folder / file).write_bytes(records.tobytes())
    return images, labels


def write_lists(folder: Path, across: list[tuple[int, int]], within: list[tuple[int, int]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, pairs in (("duplicates_cifar10.csv", across), ("duplicates_cifar10_test.csv", within)):
        rows = "".join(f"{test},{train},0.1,1\r\n" for test, train in pairs)
        (folder / name).write_text(HEADER + rows, newline="")


def test_listed_test_images_are_gone_and_all_else_is_cifar10(tmp_path: Path) -> None:
    images, labels = write_cifar10(tmp_path)
    # 3 has a twin in the train set, 14 and 24 are twins of each other, 13 of both kinds.
    write_lists(tmp_path / "cifair", [(3, 103), (13, 13)], [(14, 24), (13, 23)])
    dataset = load_dataset("cifar10-notwins", data_dir=tmp_path, download=False)
    whole = load_dataset("cifar10", data_dir=tmp_path, download=False)
    kept = [row for row in range(50) if row not in (3, 13, 14, 23, 24)]
    assert np.array_equal(dataset.test.images.numpy().reshape(-1, 3072), images[kept])
    assert np.array_equal(dataset.test.labels.numpy(), labels[kept])
    assert torch.equal(dataset.train.images, whole.train.images)
    assert (dataset.name, dataset.mean, dataset.std) == ("cifar10-notwins", whole.mean, whole.std)


def test_lists_may_lie_beside_the_data_too(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    write_lists(tmp_path, [(3, 103)], [(14, 24)])
    assert len(load_dataset("cifar10-notwins", data_dir=tmp_path, download=False).test) == 47


def test_the_same_part_is_drawn_as_for_cifar10(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    write_lists(tmp_path, [(3, 103)], [(14, 24)])
    parts = [
        load_dataset(name, data_dir=tmp_path, per_class=7, seed=5, download=False)
        for name in ("cifar10", "cifar10-notwins")
    ]
    assert torch.equal(parts[0].train.images, parts[1].train.images)


def test_a_missing_list_says_what_to_put_where(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    with pytest.raises(ValueError, match=r"duplicates_cifar10\.csv.*cifair: put it there from https://"):
        load_dataset("cifar10-notwins", data_dir=tmp_path, download=False)


@pytest.mark.parametrize("pair", [(3, 104), (3, 5000), (-1, 9)])
def test_lists_that_do_not_fit_the_order_of_the_images_are_refused(
    pair: tuple[int, int], tmp_path: Path
) -> None:
    """Twins share their class, so a pair of different classes betrays another order."""
    write_cifar10(tmp_path)
    write_lists(tmp_path, [pair], [(14, 24)])
    with pytest.raises(ValueError, match="whose order is not the publisher's"):
        load_dataset("cifar10-notwins", data_dir=tmp_path, download=False)


@pytest.mark.parametrize("content", ["", HEADER, "a,b\n1,2\n", HEADER + "x,1,0.1,1\n", HEADER + "1\n"])
def test_a_file_that_is_no_list_is_named(content: str, tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    write_lists(tmp_path, [(3, 103)], [])
    (tmp_path / "duplicates_cifar10_test.csv").write_text(content)
    with pytest.raises(ValueError, match=r"duplicates_cifar10_test\.csv is not a list"):
        load_dataset("cifar10-notwins", data_dir=tmp_path, download=False)


def test_a_misspelt_name_is_offered_this_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cifar10-notwins"):
        load_dataset("cifar10-notwin", data_dir=tmp_path, download=False)
