"""Predictions are stored without pickles, keep what the scores say, and name a damaged file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from icmixup.lab.datasets import Dataset, load_dataset
from icmixup.lab.training.evaluate import evaluate, split_scores
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.loop import train
from icmixup.lab.training.predictions import (
    PREDICTIONS_FILE,
    Predictions,
    make_predictions,
    read_predictions,
    write_predictions,
)
from icmixup.lab.training.recipe import QUICK
from icmixup.lab.training.step import make_learner

TINY = replace(QUICK, dataset="digits", per_class=12, epochs=2, method="erm")
NAMES = ("cat", "dög", "a b")


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load_dataset(TINY.data, Path("unused"))


def made(scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return scale * torch.randn(50, 3, generator=generator), torch.arange(50) % 3


def test_predictions_come_back_as_they_were_written(tmp_path: Path) -> None:
    scores, labels = made()
    files = tuple(f"cat/image {k}.png" for k in range(50))
    written = make_predictions(scores, labels, files, NAMES)
    write_predictions(tmp_path, written)
    found = read_predictions(tmp_path)
    np.testing.assert_array_equal(found.scores, written.scores)
    np.testing.assert_array_equal(found.labels, labels.numpy())
    assert (found.scores.dtype, found.labels.dtype) == (np.float16, np.int64)
    assert (found.file_names, found.class_names) == (files, NAMES)


def test_numpy_reads_the_file_without_pickle(tmp_path: Path) -> None:
    write_predictions(tmp_path, make_predictions(*made(), (), NAMES))
    with np.load(tmp_path / PREDICTIONS_FILE, allow_pickle=False) as stored:
        assert {name: stored[name].dtype.kind for name in stored.files} == {
            "scores": "f",
            "labels": "i",
            "file_names": "U",
            "class_names": "U",
        }
        assert set(stored["file_names"].tolist()) == {""}


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_float16_keeps_the_ranking_of_the_first_and_finite_probabilities(scale: float) -> None:
    scores, labels = made(scale)
    scores[0] = scale * torch.tensor([1000.0001, 1000.0, -1000.0])  # a near tie far from 0
    scores = scores.double()
    stored = make_predictions(scores, labels, (), NAMES)
    assert np.isfinite(stored.scores).all()
    np.testing.assert_array_equal(stored.scores.argmax(axis=1), scores.argmax(dim=1).numpy())
    probabilities = torch.from_numpy(stored.scores).double().softmax(dim=1)
    torch.testing.assert_close(probabilities, scores.softmax(dim=1), atol=1e-3, rtol=0)


def test_a_run_writes_the_scores_of_its_model_on_every_test_image(digits: Dataset, tmp_path: Path) -> None:
    row = train(TINY, Execution(out=tmp_path, data_dir=tmp_path, device="cpu", dataset=digits))
    folder = tmp_path / row["folder"]
    found = read_predictions(folder)
    learner = make_learner(TINY, digits)
    learner.load(torch.load(folder / "checkpoint.pt", weights_only=True))
    scores = split_scores(learner.model, digits.test, digits.mean, digits.std, autocast_dtype=None)
    np.testing.assert_array_equal(found.scores, make_predictions(scores, digits.test.labels, (), "0").scores)
    np.testing.assert_array_equal(found.labels, digits.test.labels.numpy())
    assert found.class_names == digits.class_names
    assert row["accuracy"] == pytest.approx(100 * found.correct.mean())


def test_every_metric_of_a_row_can_be_computed_again_from_its_predictions(
    digits: Dataset, tmp_path: Path
) -> None:
    row = train(TINY, Execution(out=tmp_path, data_dir=tmp_path, device="cpu", dataset=digits))
    again = evaluate(*read_predictions(tmp_path / row["folder"]).tensors(), digits.class_counts)
    assert {name: row[name] for name in again} == again


def damaged_files() -> dict[str, Predictions | bytes]:
    good = make_predictions(*made(), (), NAMES)
    return {
        "nothing": b"",
        "no archive": b"not an archive at all",
        "class names of another list": good._replace(class_names=("cat", "dog")),
        "labels beyond the classes": good._replace(labels=good.labels + 1),
        "fewer labels than scores": good._replace(labels=good.labels[1:]),
    }


@pytest.mark.parametrize("kind", damaged_files())
def test_a_damaged_file_is_named(kind: str, tmp_path: Path) -> None:
    content = damaged_files()[kind]
    if isinstance(content, bytes):
        (tmp_path / PREDICTIONS_FILE).write_bytes(content)
    else:
        write_predictions(tmp_path, content)
    with pytest.raises(ValueError, match=rf"{PREDICTIONS_FILE} is damaged \(.*evaluate its checkpoint"):
        read_predictions(tmp_path)


def test_a_file_cut_short_anywhere_is_named(tmp_path: Path) -> None:
    path = write_predictions(tmp_path, make_predictions(*made(), (), NAMES))
    content = path.read_bytes()
    for length in range(0, len(content), 97):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match="is damaged"):
            read_predictions(tmp_path)


def test_a_pickle_in_the_file_is_not_executed(tmp_path: Path) -> None:
    trap = np.array([{"a": 1}], dtype=object)
    np.savez(tmp_path / PREDICTIONS_FILE, scores=trap, labels=trap, file_names=trap, class_names=trap)
    with pytest.raises(ValueError, match="is damaged"):
        read_predictions(tmp_path)


def test_a_folder_without_predictions_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"predictions.npz does not exist"):
        read_predictions(tmp_path)
