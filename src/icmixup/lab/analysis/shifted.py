"""Trained runs on shifted data: corrupted test images, and images of other classes.

The results of a run are stored in its folder (`stored_evaluation`) after each corruption, so an interrupted
evaluation continues where it stopped. Runs that share their data see the same corrupted images, which are
computed once for all of them.

N test images, C classes.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from icmixup.calibration import negative_log_likelihood
from icmixup.lab.analysis.corruptions import check_corruptions, check_strengths, corrupt
from icmixup.lab.analysis.other_images import OtherImages, confidence, list_others, read_blocks, separation
from icmixup.lab.analysis.runs import check_trained_on_images, expand_comparisons, line_names, load_model
from icmixup.lab.analysis.stored_evaluation import (
    Stored,
    add_entry,
    entry_of,
    new_evaluation,
    read_evaluation,
    write_evaluation,
)
from icmixup.lab.augment import normalise
from icmixup.lab.comparison.statistics import row_balanced_accuracy
from icmixup.lab.datasets import Dataset
from icmixup.lab.training.data import LoadData, data_recipe, remember_data
from icmixup.lab.training.evaluate import (
    Metrics,
    calibration_error,
    check_evaluable,
    evaluate,
    inference,
    unscaled_metrics,
)
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.identity import autocast_dtype
from icmixup.lab.training.inputs import inputs_of
from icmixup.lab.training.recipe import Recipe
from icmixup.lab.training.run_folder import Run
from icmixup.lab.training.trained import find_run, load_run_data

BLOCK_PIXELS = {"cpu": 1 << 20, "cuda": 1 << 24}  # of the images that are corrupted at a time
BLOCK_IMAGES = 1000

OnProgress = Callable[[str, int, int], None]  # what is evaluated, images done, images in all


class Evaluated(NamedTuple):
    """A run, the name of its line in a table, and its evaluation.json."""

    run: Run
    line: str
    stored: Stored


class Plan(NamedTuple):
    """What to evaluate."""

    corruptions: tuple[str, ...]
    strengths: tuple[int, ...]
    others: tuple[OtherImages, ...]

    def missing_corruptions(self, stored: Stored) -> list[tuple[str, int]]:
        """Corruptions and strengths that an evaluation does not have."""
        wanted = [(name, strength) for name in self.corruptions for strength in self.strengths]
        return [pair for pair in wanted if entry_of(stored, *pair) is None]

    def missing_others(self, stored: Stored) -> list[OtherImages]:
        """Folders that an evaluation does not have, or that have other files now."""
        known = {name: entry.get("fingerprint") for name, entry in stored["ood"].items()}
        return [other for other in self.others if known.get(other.name) != other.fingerprint]

    def needs_clean(self, stored: Stored) -> bool:
        """Whether the test images have to be classified as they are."""
        return not stored["clean"] or bool(self.missing_others(stored))

    def count_images(self, stored: Stored) -> int:
        """Images that the network of an evaluation has to classify."""
        others = sum(len(other.files) for other in self.missing_others(stored))
        return others + int(stored["images"]) * (
            len(self.missing_corruptions(stored)) + self.needs_clean(stored)
        )


@dataclass(frozen=True, eq=False)
class Session:
    """A run while it is evaluated; `stored` is filled."""

    run: Run
    data: Dataset
    stored: Stored
    model: nn.Module
    dtype: torch.dtype | None  # of autocast

    def scores(self, images: Tensor) -> Tensor:
        """(B, C) float32 scores of (B, channels, H, W) bytes, on their device."""
        with inference(self.model, images.device, self.dtype):
            found: Tensor = self.model(normalise(images, self.data.mean, self.data.std))
        return found.float()


class Progress:
    """Counts the images that were classified, and reports them."""

    def __init__(self, report: OnProgress | None) -> None:
        self.report, self.done, self.total = report, 0, 0

    def advance(self, what: str, images: int) -> None:
        self.done += images
        if self.report is not None:
            self.report(what, self.done, self.total)


def make_plan(corruptions: Sequence[str], strengths: Sequence[int], ood: Sequence[Path] = ()) -> Plan:
    """A plan of known corruptions and folders with images; anything else raises a ValueError.

    Args:
        corruptions, strengths: every combination is evaluated.
        ood: folders of images of other classes.
    """
    if not corruptions or not strengths:
        raise ValueError("pass at least one corruption and one strength")
    check_corruptions(corruptions)
    check_strengths(strengths)
    return Plan(tuple(dict.fromkeys(corruptions)), tuple(sorted(set(strengths))), list_others(ood))


def evaluate_runs(
    runs: Sequence[Run],
    plan: Plan,
    *,
    data_dir: Path,
    device: torch.device,
    fresh: bool = False,
    on_progress: OnProgress | None = None,
) -> list[Evaluated]:
    """Evaluate finished runs on shifted data; what their evaluation.json already has is reused.

    Args:
        runs: tested on one dataset, see `find_runs`.
        data_dir: folder of datasets.
        fresh: evaluate again what was evaluated before.
    """
    load = remember_data(Execution(out=Path(), data_dir=data_dir))
    groups = group_by_data(runs)
    check_same_test_images(groups, load)
    progress, found = Progress(on_progress), dict[Path, Stored]()
    for group in groups:
        found |= evaluate_group(group, load_run_data(group[0], load), plan, device, fresh, progress)
    lines = line_names([run.recipe for run in runs])
    return [Evaluated(run, line, found[run.folder]) for run, line in zip(runs, lines, strict=True)]


def find_runs(folders: Sequence[Path]) -> list[Run]:
    """The finished runs in these folders. An unfinished one is an error if it is named, and left out of a
    folder of runs."""
    if not folders:
        raise ValueError("no runs to evaluate; pass folders of finished runs, or a folder that contains them")
    found: dict[Path, Run] = {}
    for folder in expand_comparisons(folders):
        inside = sorted(path.parent for path in folder.glob("*/recipe.json"))
        is_run = (folder / "recipe.json").exists() or not inside
        for run in [find_run(folder)] if is_run else finished_runs(folder, inside):
            found.setdefault(run.folder.resolve(), run)
    check_trained_on_images(list(found.values()), "only images can be corrupted")
    check_no_repetition(list(found.values()))
    return list(found.values())


def check_no_repetition(runs: Sequence[Run]) -> None:
    """Raise an error if a recipe was trained twice, on two devices for example, since means over seeds would
    count it twice."""
    first: dict[Recipe, Run] = {}
    for run in runs:
        if (other := first.setdefault(run.recipe, run)) is not run:
            raise ValueError(
                f"{other.folder} and {run.folder} are runs of the same recipe and seed, on other images, "
                "or of other versions of icmixup, devices or precisions; pass the folders of the runs to use"
            )


def finished_runs(folder: Path, inside: Sequence[Path]) -> list[Run]:
    """The finished runs of a folder; the others are reported."""
    found = []
    for path in inside:
        try:
            found.append(find_run(path))
        except ValueError as error:
            warnings.warn(f"left out: {error}", stacklevel=2)
    if not found:
        raise ValueError(f"none of the {len(inside)} runs in {folder} is finished")
    return found


def group_by_data(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs that share images, size and normalisation."""
    groups: dict[Recipe, list[Run]] = {}
    for run in runs:
        groups.setdefault(data_recipe(run.recipe), []).append(run)
    return list(groups.values())


def check_same_test_images(groups: Sequence[Sequence[Run]], load: LoadData) -> None:
    """Raise an error that names two runs which were tested on different images."""
    seen: dict[str, str] = {}
    for group in groups:
        run, *others = group
        data = load_run_data(run, load)
        for other in others:
            load_run_data(other, load)  # raises an error if it was trained on other images
        if data.is_features:
            raise ValueError(f"{run.folder} was trained on features, and only images can be corrupted")
        source = data.test.file_names or data.name
        about = f"{run.folder} on {data.name} ({len(data.test)} images of {data.num_classes} classes)"
        seen.setdefault(json.dumps([data.class_names, source, data.test.labels.tolist()]), about)
    part = next((run for group in groups for run in group if run.recipe.fold is not None), None)
    if len(seen) > 1 and part is not None:
        name = f"*-fold{part.recipe.fold}of{part.recipe.folds}.*.s{part.recipe.seed}.*"
        raise ValueError(
            f"the runs were tested on {len(seen)} different sets of images, since every fold and seed of "
            "--folds has its own; evaluate the runs of one fold and seed at a time, such as "
            f"{part.folder.parent / name}"
        )
    if len(seen) > 1:
        raise ValueError(
            f"the runs were tested on {len(seen)} different sets of images: {'; '.join(seen.values())}; "
            "evaluate the runs of one dataset at a time"
        )


def evaluate_group(
    runs: Sequence[Run], data: Dataset, plan: Plan, device: torch.device, fresh: bool, progress: Progress
) -> dict[Path, Stored]:
    """Evaluate runs that share their data; the evaluation of each folder."""
    results: dict[Path, Stored] = {}
    sessions: list[Session] = []
    for run in runs:
        stored = (None if fresh else read_evaluation(run, data)) or new_evaluation(run, data)
        results[run.folder] = stored
        if images := plan.count_images(stored):
            progress.total += images
            model = load_model(run, data, device)
            sessions.append(Session(run, data, stored, model, autocast_dtype(run.recipe, device)))
    evaluate_clean(sessions, plan, device, progress)
    for name in plan.corruptions:
        evaluate_corruption(sessions, name, plan.strengths, device, progress)
    return results


def evaluate_clean(sessions: Sequence[Session], plan: Plan, device: torch.device, progress: Progress) -> None:
    """Metrics of the clean test images, and how well confidence separates them from other images."""
    wanted = [session for session in sessions if plan.needs_clean(session.stored)]
    if not wanted:
        return
    data = wanted[0].data
    blocks = (images for images, _ in test_blocks(data, device))
    known = compute_scores(wanted, blocks, "clean images", progress)
    for session, scores in zip(wanted, known, strict=True):
        session.stored["clean"] = for_json(evaluate(scores, data.test.labels, data.class_counts))
        write_evaluation(session.run, session.stored)
    for other in plan.others:
        lacking = [
            (session, confidence(scores))
            for session, scores in zip(wanted, known, strict=True)
            if other in plan.missing_others(session.stored)
        ]
        evaluate_other(other, lacking, device, progress)


def evaluate_other(
    other: OtherImages, lacking: Sequence[tuple[Session, Tensor]], device: torch.device, progress: Progress
) -> None:
    """How well runs separate other images from test images, of which the confidences are given."""
    if not lacking:
        return
    sessions = [session for session, _ in lacking]
    inputs = inputs_of(sessions[0].data)
    images = read_blocks(other, inputs, block_size(inputs.image_size, device))
    blocks = (block.to(device) for block in images)
    scores = compute_scores(sessions, blocks, other.name, progress)
    for (session, known), found in zip(lacking, scores, strict=True):
        session.stored["ood"][other.name] = {
            **separation(known, confidence(found)),
            "images": len(found),
            "skipped": len(other.files) - len(found),
            "fingerprint": other.fingerprint,
        }
        write_evaluation(session.run, session.stored)


def evaluate_corruption(
    sessions: Sequence[Session],
    name: str,
    strengths: Sequence[int],
    device: torch.device,
    progress: Progress,
) -> None:
    """Metrics under one corruption, for the runs and strengths that have none yet."""
    changed: dict[Path, Session] = {}
    for strength in strengths:
        wanted = [session for session in sessions if entry_of(session.stored, name, strength) is None]
        if not wanted:
            continue
        data = wanted[0].data
        blocks = (corrupt(images, name, strength, rows) for images, rows in test_blocks(data, device))
        what = f"{name.replace('_', ' ')}, strength {strength}"
        for session, scores in zip(wanted, compute_scores(wanted, blocks, what, progress), strict=True):
            temperature = float(session.stored["clean"]["fitted_temperature"])
            metrics = shifted_metrics(scores, data.test.labels, data.class_counts, temperature)
            add_entry(session.stored, name, strength, metrics)
            changed[session.run.folder] = session
    for session in changed.values():
        write_evaluation(session.run, session.stored)


def test_blocks(data: Dataset, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """The test images in blocks of bytes on the device, with their numbers."""
    start = 0
    for images in data.test.blocks(block_size(data.test.images.shape[-1], device)):
        yield images.to(device), torch.arange(start, start + len(images), device=device)
        start += len(images)


def block_size(side: int, device: torch.device) -> int:
    """Images per block; affects speed and memory only."""
    pixels = BLOCK_PIXELS.get(device.type, BLOCK_PIXELS["cpu"])
    return max(1, min(BLOCK_IMAGES, pixels // side**2))


def compute_scores(
    sessions: Sequence[Session], blocks: Iterable[Tensor], what: str, progress: Progress
) -> list[Tensor]:
    """(N, C) scores on the CPU of the images of all blocks, for each run."""
    parts: list[list[Tensor]] = [[] for _ in sessions]
    for images in blocks:
        for part, session in zip(parts, sessions, strict=True):
            part.append(session.scores(images))
            progress.advance(what, len(images))
    return [torch.cat(part).cpu() for part in parts]


def shifted_metrics(scores: Tensor, labels: Tensor, class_counts: Tensor, temperature: float) -> Metrics:
    """The metrics of `training.evaluate` on shifted images, without those of single classes.

    Scaled metrics are those of scores / T with the temperature of the clean images, because labels of shifted
    images to fit it on are not available in practice.

    Args:
        scores: (N, C)
        labels: (N,)
        class_counts: (C,) training images of each class.
    """
    check_evaluable(scores, labels, class_counts)
    scaled = scores / temperature
    metrics = for_json(
        {
            **unscaled_metrics(scores, labels, class_counts),
            "nll_scaled": negative_log_likelihood(scaled, labels),
            "calibration_error_scaled": calibration_error(scaled, labels),
        }
    )
    return {name: value for name, value in metrics.items() if name != "class_accuracies"}


def for_json(metrics: Metrics) -> Metrics:
    """Add the balanced accuracy, and replace values that are not finite by None, since JSON has none."""
    metrics = metrics | {"balanced_accuracy": row_balanced_accuracy(metrics)}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in metrics.items()
    }
