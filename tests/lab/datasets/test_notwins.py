"""cifar10-notwins: CIFAR-10 without the test images that ciFAIR lists as duplicates."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from icmixup.lab.datasets import DataSpec, load_dataset
from icmixup.lab.datasets.cifar import LAYOUTS

HEADER = "TestID,TrainID,Distance,Judgment\r\n"


def write_cifar10(folder: Path, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Write 50 random images per file, labels 0 to 9 in turn; return the test images and labels."""
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


def test_listed_test_images_are_removed_and_everything_else_is_cifar10(tmp_path: Path) -> None:
    images, labels = write_cifar10(tmp_path)
    # 3 has a duplicate in the training set, 14 and 24 are duplicates, 13 has duplicates of both kinds.
    write_lists(tmp_path / "cifair", [(3, 103), (13, 13)], [(14, 24), (13, 23)])
    dataset = load_dataset(DataSpec("cifar10-notwins"), tmp_path, download=False)
    whole = load_dataset(DataSpec("cifar10"), tmp_path, download=False)
    kept = [row for row in range(50) if row not in (3, 13, 14, 23, 24)]
    assert np.array_equal(dataset.test.images.numpy().reshape(-1, 3072), images[kept])
    assert np.array_equal(dataset.test.labels.numpy(), labels[kept])
    assert torch.equal(dataset.train.images, whole.train.images)
    assert (dataset.name, dataset.mean, dataset.std) == ("cifar10-notwins", whole.mean, whole.std)


def test_lists_are_also_found_in_data_dir_itself(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    write_lists(tmp_path, [(3, 103)], [(14, 24)])
    assert len(load_dataset(DataSpec("cifar10-notwins"), tmp_path, download=False).test) == 47


def test_the_same_subset_is_drawn_as_for_cifar10(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    write_lists(tmp_path, [(3, 103)], [(14, 24)])
    first, second = (
        load_dataset(DataSpec(name, per_class=7, data_seed=5), tmp_path, download=False)
        for name in ("cifar10", "cifar10-notwins")
    )
    assert torch.equal(first.train.images, second.train.images)


def test_the_error_for_a_missing_list_names_its_url_and_folder(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    with pytest.raises(ValueError, match=r"duplicates_cifar10\.csv.*cifair: download it from https://"):
        load_dataset(DataSpec("cifar10-notwins"), tmp_path, download=False)


@pytest.mark.parametrize("pair", [(3, 104), (3, 5000), (-1, 9)])
def test_lists_that_do_not_match_the_order_of_the_images_are_refused(
    pair: tuple[int, int], tmp_path: Path
) -> None:
    """Duplicates have the same class, so a pair of different classes reveals another order."""
    write_cifar10(tmp_path)
    write_lists(tmp_path, [pair], [(14, 24)])
    with pytest.raises(ValueError, match="not in the publisher's order"):
        load_dataset(DataSpec("cifar10-notwins"), tmp_path, download=False)


@pytest.mark.parametrize("content", ["", HEADER, "a,b\n1,2\n", HEADER + "x,1,0.1,1\n", HEADER + "1\n"])
def test_the_error_names_a_file_that_is_not_a_list(content: str, tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    write_lists(tmp_path, [(3, 103)], [])
    (tmp_path / "duplicates_cifar10_test.csv").write_text(content)
    with pytest.raises(
        ValueError, match=r"duplicates_cifar10_test\.csv must be a CSV file with columns TestID and TrainID"
    ):
        load_dataset(DataSpec("cifar10-notwins"), tmp_path, download=False)


def test_a_similar_unknown_name_suggests_this_dataset(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cifar10-notwins"):
        load_dataset(DataSpec("cifar10-notwin"), tmp_path, download=False)
