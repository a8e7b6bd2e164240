"""--train head: the features of a frozen network, computed once for all methods, seeds and subsets.

features/KEY.npz in the folder of all runs holds the features of every image seen so far, by the hash of its
pixels. KEY is a hash of the model, its weights and the normalisation.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from icmixup.lab.datasets import Dataset, Split
from icmixup.lab.datasets.features import standardise
from icmixup.lab.models import build_model, check_digest, replace_classifier
from icmixup.lab.training.evaluate import split_scores
from icmixup.lab.training.recipe import Recipe
from icmixup.lab.training.run_folder import write_atomically
from icmixup.methods import find_method

DIGEST_BYTES = 16
BLOCK = 256  # images that are hashed at a time
PART = 256  # images whose features are computed at a time: a step of the progress bar
SAVE_SECONDS = 30.0  # between two times that features are stored
Known = dict[bytes, npt.NDArray[np.float32]]  # hash of an image to its (D,) features


class Part(NamedTuple):
    """Some images of a split."""

    split: Split
    rows: dict[bytes, int]  # from the hash of an image to its row


def feature_dataset(
    recipe: Recipe, images: Dataset, folder: Path, device: torch.device, *, show_progress: bool = False
) -> Dataset:
    """The dataset with features in place of its images, standardised.

    Images are not augmented: each has one vector of features. They are stored from time to time, so that an
    interrupted command continues where it was.

    Args:
        folder: of stored features.
        show_progress: show a progress bar on stderr; a line now and then if that is not a terminal.
    """
    path = folder / f"{features_key(recipe, images)}.npz"
    known = read_known(path)
    splits = {"train": images.train, "test": images.test}
    if images.held_out is not None:
        splits["held_out"] = images.held_out
    digests = {name: digest_images(split) for name, split in splits.items()}
    parts = missing_parts(splits, digests, known)
    if parts:
        model = build_extractor(recipe, images).to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        folder.mkdir(parents=True, exist_ok=True)
        compute = partial(compute_features, model, images)
        known = store_features(path, known, compute, parts, show_progress)
    features = {
        name: Split(look_up(known, digests[name]), split.labels.cpu(), split.file_names)
        for name, split in splits.items()
    }
    held = features.get("held_out")
    return standardise(replace(images, train=features["train"], test=features["test"], held_out=held))


def features_key(recipe: Recipe, images: Dataset) -> str:
    size = images.train.images.shape[-1]
    # A file of weights by its content: the same file may be passed by another path.
    weights = recipe.weights_digest or recipe.weights
    described = [recipe.model, weights, images.mean, images.std, size]
    if recipe.weights is None:  # random weights depend on the seed
        described.append(recipe.seed)
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:10]


def build_extractor(recipe: Recipe, images: Dataset) -> nn.Module:
    """The recipe's network up to the input of its classifier: images to (B, D) features."""
    _, channels, _, size = images.train.images.shape
    check_digest(recipe.model, recipe.weights, recipe.weights_digest)  # by which features are stored
    model = build_model(
        recipe.model, 2, channels=channels, seed=recipe.seed, weights=recipe.weights, image_size=size
    )
    replace_classifier(model, recipe.model, nn.Identity())
    return model


def digest_images(split: Split) -> list[bytes]:
    """A hash of the pixels of each image."""
    return [
        hashlib.blake2b(image.tobytes(), digest_size=DIGEST_BYTES).digest()
        for block in split.blocks(BLOCK)
        for image in block.cpu().numpy()
    ]


def missing_parts(splits: dict[str, Split], digests: dict[str, list[bytes]], known: Known) -> list[Part]:
    """The images whose features are not known, each once, PART of them at a time."""
    seen, parts = set(known), []
    for name, split in splits.items():
        first: dict[bytes, int] = {}
        for row, digest in enumerate(digests[name]):
            if digest not in seen:
                first[digest] = row
                seen.add(digest)
        found = list(first.items())
        parts += [Part(split, dict(found[start : start + PART])) for start in range(0, len(found), PART)]
    return parts


def store_features(
    path: Path, known: Known, compute: Callable[[Part], Known], parts: list[Part], show_progress: bool
) -> Known:
    """Compute the features of all parts; they are stored from time to time, and when interrupted."""
    saved, before = time.monotonic(), len(known)
    total = sum(len(part.rows) for part in parts)
    console = Console(stderr=True)
    has_bar = show_progress and console.is_terminal
    try:
        for part in track(parts, "computing features", console=console, disable=not has_bar):
            known = known | compute(part)
            if time.monotonic() - saved > SAVE_SECONDS:
                write_known(path, known)
                saved = time.monotonic()
                if show_progress and not has_bar:
                    print(f"features of {len(known) - before:,} of {total:,} images", file=sys.stderr)
    finally:
        if known:
            write_known(path, known)
    return known


def compute_features(model: nn.Module, images: Dataset, part: Part) -> Known:
    rows = torch.tensor(list(part.rows.values()), device=part.split.labels.device)
    features = split_scores(model, part.split[rows], images.mean, images.std, autocast_dtype=None)
    if features.dim() != 2:
        raise ValueError(
            f"features must be one vector per image, got {tuple(features.shape)}; use another --model"
        )
    return dict(zip(part.rows, features.numpy(), strict=True))


def look_up(known: Known, digests: list[bytes]) -> Tensor:
    """(N, D) features of N images."""
    return torch.from_numpy(np.stack([known[digest] for digest in digests]))


def read_known(path: Path) -> Known:
    """The stored features; none if there is no file, or if it is damaged."""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            digests, features = file["digests"], file["features"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return {}
    return {bytes(digest): values for digest, values in zip(digests, features, strict=True)}


def write_known(path: Path, known: Known) -> None:
    buffer = io.BytesIO()
    digests = np.frombuffer(b"".join(known), dtype=np.uint8).reshape(-1, DIGEST_BYTES)
    np.savez(buffer, digests=digests, features=np.stack(list(known.values())))
    write_atomically(path, buffer.getvalue())


def check_feature_methods(methods: tuple[str, ...]) -> None:
    """Raise an error for methods that need images."""
    wrong = [name for name in methods if not mixes_features(name)]
    if wrong:
        raise ValueError(
            f"{', '.join(wrong)}: methods that cut regions or mix hidden layers need images, but a head is "
            "trained on features; leave them out, or train on images, with --train all"
        )


def mixes_features(method: str) -> bool:
    """Whether a method can mix vectors of features."""
    return find_method(method).draw in ("none", "mixup", "remix")
