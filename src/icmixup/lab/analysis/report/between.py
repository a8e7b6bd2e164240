"""Between two classes: scores of trained networks on mixtures of two test images.

For a few pairs of test images, x~ = lam x_a + (1 - lam) x_b at 21 values of lam; and the two curves of the
paper's last figure, over all ordered pairs of one image per class (analysis.scores).

C classes, P pairs, L values of lam.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from icmixup.lab.analysis.report.pictures import LARGE, encode, picture
from icmixup.lab.analysis.report.study import Key, Study, read_row
from icmixup.lab.analysis.report.summaries import Summary, images_digest
from icmixup.lab.analysis.runs import load_model
from icmixup.lab.analysis.scores import Point, choose_rows, compute_curve
from icmixup.lab.augment import normalise
from icmixup.lab.datasets import Dataset
from icmixup.lab.training.data import LoadData
from icmixup.lab.training.evaluate import inference
from icmixup.lab.training.identity import autocast_dtype
from icmixup.lab.training.run_folder import Run
from icmixup.lab.training.trained import load_run_data

STEPS = 20  # of lam, from 0 to 1
PAIRS = 6
# Classes of the paper's curves: their number of mixed images grows with the square. Photos take longer.
CURVE_CLASSES, CURVE_CLASSES_OF_PHOTOS = 10, 5
SMALL_SIDE = 64
OTHER_IMAGES = "the test images are not those of the stored predictions, in the same order"


class Along(NamedTuple):
    """One network along lam, for one pair: lists of L numbers."""

    first: list[float]  # probability of the class of image a, after temperature scaling
    second: list[float]  # probability of the class of image b
    top: list[int]  # class with the highest score


class MixedPair(NamedTuple):
    """Two test images and what each variant makes of their mixtures."""

    rows: tuple[int, int]
    labels: tuple[int, int]
    file_names: tuple[str, str]
    pictures: tuple[str, str]  # data URIs; "" without thumbnails
    along: dict[str, Along]  # by variant


class Between(NamedTuple):
    """The section of the report; without pairs, the reason says why."""

    reason: str = ""
    pairs: tuple[MixedPair, ...] = ()
    curves: Mapping[str, Sequence[Point]] = {}
    curve_images: int = 0  # mixed images behind each point of a curve


NOT_YET = Between("it is computed when all runs are finished")


def between_classes(
    study: Study,
    summaries: Mapping[Key, Summary],
    load: LoadData,
    device: torch.device,
    *,
    with_pictures: bool = True,
) -> Between:
    """Scores along lam of the first run of each variant; the reason if they cannot be computed."""
    runs = study.first_runs
    if any(run.recipe.train == "head" for run in runs.values()):
        return Between(
            "these runs trained a linear head on features, so there is no network that takes mixed images; "
            "train on images, with --train all"
        )
    if any(run.recipe.folds is not None for run in runs.values()):
        return Between("with --folds each test image has a network of its own")
    known = [summary for (name, _), summary in summaries.items() if name in runs]
    if not known:
        return Between("the runs have no predictions to choose pairs of test images from")
    pairs = choose_pairs(known)
    if not pairs:
        return Between("the test set has images of one class only, and a pair needs two")
    along: dict[str, list[Along]] = {}
    curves: dict[str, list[Point]] = {}
    try:
        for name, run in runs.items():
            network = Network(run, load, device)
            if network.images != known[0].images:
                return Between(OTHER_IMAGES)
            along[name], curves[name] = network.along(pairs), network.curve()
    except (ValueError, OSError, ModuleNotFoundError) as error:
        return Between(f"it needs the checkpoint and the test images of each method: {error}")
    data = network.data
    return Between(
        pairs=tuple(
            describe_pair(data, pair, {name: found[k] for name, found in along.items()}, with_pictures)
            for k, pair in enumerate(pairs)
        ),
        curves=curves,
        curve_images=next(iter(curves.values()))[0].images,
    )


class Network:
    """A trained network and its test images."""

    def __init__(self, run: Run, load: LoadData, device: torch.device) -> None:
        self.data = load_run_data(run, load)
        self.model: nn.Module = load_model(run, self.data, device)
        test = self.data.test
        self.images = images_digest(test.labels.cpu().numpy(), test.file_names)
        self.temperature = float((read_row(run) or {}).get("fitted_temperature") or 1.0)
        self.device, self.dtype = device, autocast_dtype(run.recipe, device)

    def inputs(self, rows: Tensor) -> Tensor:
        """(N, channels, H, W) normalised test images."""
        return normalise(self.data.test[rows].to(self.device).square(), self.data.mean, self.data.std)

    def along(self, pairs: Sequence[tuple[int, int]]) -> list[Along]:
        """The scores of each pair at every lam."""
        lams = torch.linspace(0, 1, STEPS + 1, device=self.device)[:, None, None, None]
        found = []
        for rows in pairs:
            a, b = self.inputs(torch.tensor(rows))
            with inference(self.model, self.device, self.dtype):
                scores: Tensor = self.model(torch.lerp(b[None], a[None], lams))  # Eq. 1, left
            first, second = self.data.test.labels[torch.tensor(rows)].tolist()
            found.append(describe_scores(scores.double().cpu(), first, second, self.temperature))
        return found

    def curve(self) -> list[Point]:
        """The paper's curves, over one test image of each of the first classes."""
        photos = self.data.test.images.shape[-1] > SMALL_SIDE
        rows = choose_rows(self.data.test, None)[: CURVE_CLASSES_OF_PHOTOS if photos else CURVE_CLASSES]
        labels = self.data.test.labels[rows].to(self.device)
        return compute_curve(self.model, self.inputs(rows), labels, self.dtype)


def describe_scores(scores: Tensor, first: int, second: int, temperature: float = 1.0) -> Along:
    """(L, C) scores along lam, from image b at lam 0 to image a at lam 1."""
    shares = (scores / temperature).softmax(dim=1)
    return Along(
        shares[:, first].tolist(),
        shares[:, second].tolist(),
        scores.argmax(dim=1).tolist(),
    )


def describe_pair(
    data: Dataset, rows: tuple[int, int], along: dict[str, Along], with_pictures: bool
) -> MixedPair:
    first, second = rows
    names = data.test.file_names or ("",) * len(data.test)
    labels = data.test.labels[[first, second]].tolist()
    uris = [encode(picture(data.test, row), LARGE) if with_pictures else "" for row in rows]
    return MixedPair(rows, (labels[0], labels[1]), (names[first], names[second]), (uris[0], uris[1]), along)


def choose_pairs(summaries: Sequence[Summary]) -> list[tuple[int, int]]:
    """Rows of test images, one of each of the two classes, for the pairs of classes that are confused most.

    The image of a class is the first that most runs get right, so that the ends of the slider are clear.
    """
    confusion = np.sum([summary.confusion for summary in summaries], axis=0)
    tested = np.flatnonzero(summaries[0].tested)
    both = confusion + confusion.T
    pairs = sorted(combinations(tested.tolist(), 2), key=lambda pair: -both[pair])
    rows = typical_rows(summaries)
    return [(rows[a], rows[b]) for a, b in spread_out(pairs)]


def spread_out(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The first pairs in this order, with each class in at most two of them where that is possible."""
    used: dict[int, int] = {}
    chosen: list[tuple[int, int]] = []
    for pair in pairs:
        if len(chosen) < PAIRS and max(used.get(label, 0) for label in pair) < 2:
            chosen.append(pair)
            used |= {label: used.get(label, 0) + 1 for label in pair}
    return chosen


def typical_rows(summaries: Sequence[Summary]) -> dict[int, int]:
    """By class, the first of the test images that most runs get right."""
    labels = summaries[0].labels
    same = [summary for summary in summaries if summary.images == summaries[0].images]
    right = np.sum([summary.correct for summary in same], axis=0)
    return {
        int(label): int(np.flatnonzero(labels == label)[right[labels == label].argmax()])
        for label in np.flatnonzero(summaries[0].tested)
    }
