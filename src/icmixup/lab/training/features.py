"""--train head: the features of a frozen network, computed once for all methods, seeds and subsets.

features/KEY.npz in the folder of all runs holds the features of every image seen so far, by the hash of its
pixels. KEY is a hash of the model, its weights and the normalisation.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from icmixup.lab.datasets import Dataset, Split
from icmixup.lab.datasets.features import standardise
from icmixup.lab.models import build_model, replace_classifier
from icmixup.lab.training.evaluate import split_scores
from icmixup.lab.training.recipe import Recipe
from icmixup.lab.training.run_folder import write_atomically
from icmixup.methods import find_method

DIGEST_BYTES = 16
BLOCK = 256  # images that are hashed at a time
Known = dict[bytes, npt.NDArray[np.float32]]  # hash of an image to its (D,) features


def feature_dataset(recipe: Recipe, images: Dataset, folder: Path, device: torch.device) -> Dataset:
    """The dataset with features in place of its images, standardised.

    Images are not augmented: each has one vector of features.

    Args:
        folder: of stored features.
    """
    path = folder / f"{features_key(recipe, images)}.npz"
    known = read_known(path)
    splits = {"train": images.train, "test": images.test}
    if images.held_out is not None:
        splits["held_out"] = images.held_out
    digests = {name: digest_images(split) for name, split in splits.items()}
    if any(digest not in known for part in digests.values() for digest in part):
        model = build_extractor(recipe, images).to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        for name, split in splits.items():
            known |= compute_missing(model, split, digests[name], known, images)
        folder.mkdir(parents=True, exist_ok=True)
        write_known(path, known)
    features = {
        name: Split(look_up(known, digests[name]), split.labels.cpu()) for name, split in splits.items()
    }
    held = features.get("held_out")
    return standardise(replace(images, train=features["train"], test=features["test"], held_out=held))


def features_key(recipe: Recipe, images: Dataset) -> str:
    size = images.train.images.shape[-1]
    described = [recipe.model, recipe.weights, recipe.weights_digest, images.mean, images.std, size]
    if recipe.weights is None:  # random weights depend on the seed
        described.append(recipe.seed)
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:10]


def build_extractor(recipe: Recipe, images: Dataset) -> nn.Module:
    """The recipe's network up to the input of its classifier: images to (B, D) features."""
    _, channels, _, size = images.train.images.shape
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


def compute_missing(
    model: nn.Module, split: Split, digests: list[bytes], known: Known, images: Dataset
) -> Known:
    """The features of images that are not known yet, each computed once."""
    first = {digest: row for row, digest in reversed(list(enumerate(digests))) if digest not in known}
    if not first:
        return {}
    rows = torch.tensor(sorted(first.values()), device=split.labels.device)
    features = split_scores(model, split[rows], images.mean, images.std, autocast_dtype=None)
    if features.dim() != 2:
        raise ValueError(
            f"features must be one vector per image, got {tuple(features.shape)}; use another --model"
        )
    return {digests[row]: values for row, values in zip(rows.tolist(), features.numpy(), strict=True)}


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
            "trained on features; leave them out, or use --train all"
        )


def mixes_features(method: str) -> bool:
    """Whether a method can mix vectors of features."""
    return find_method(method).draw in ("none", "mixup", "remix")
