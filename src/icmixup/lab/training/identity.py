"""Identity of a run: what decides its numbers besides its recipe.

A recipe names a dataset and a network, and a name can come to mean something else: images are added to a
folder, the same relative path is used in another folder, a network is redefined. The identity says what the
names meant when the run was trained. Runs are reused only if recipe and identity agree.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch
from torch import nn

from icmixup.lab.augment import normalise
from icmixup.lab.datasets import Dataset
from icmixup.lab.models import MODELS, build_model
from icmixup.lab.models.own import OwnModel
from icmixup.lab.training.recipe import Recipe
from icmixup.methods import Method

DIGITS = 12  # of a fingerprint, in hexadecimal
# Their modules are identified by names and settings; a new version of icmixup is a new identity anyway.
LIBRARIES = ("torch.", "torchvision.", "timm.", "icmixup.")

LATER_SETTINGS = ("adjust_tau", "defer", "focal_gamma", "margin")


class Identity(NamedTuple):
    """What decides the numbers of a run besides its recipe."""

    data: str  # fingerprint of images, labels and class names, of training and test
    model: str  # fingerprint of the network's modules and the shapes of its weights
    method: str  # fingerprint of the settings of the method
    version: str  # of icmixup
    precision: str  # float32 or bfloat16
    device: str  # kind of device: cpu, cuda or mps

    @property
    def columns(self) -> dict[str, str]:
        """The identity as columns of a result row; `precision` and `device` there mean other things."""
        return {
            "fingerprint": self.data,
            "version": self.version,
            "dtype": self.precision,
            "device_kind": self.device,
        }


def identify(recipe: Recipe, data: Dataset, device: str) -> Identity:
    """The identity of a run of this recipe on these images.

    Args:
        device: kind of device, for example "cuda".
    """
    return Identity(
        data=data.fingerprint,
        model=network_fingerprint(recipe, data),
        method=digest(method_text(recipe.whole_method)),
        version=package_version(),
        precision=str(autocast_dtype(recipe, torch.device(device)) or torch.float32).removeprefix("torch."),
        device=device,
    )


def method_text(method: Method) -> str:
    """The settings of a method; later ones only where they are not the default, so that runs of earlier
    versions keep their identity."""
    settings = (
        f"{entry.name}={getattr(method, entry.name)!r}"
        for entry in dataclasses.fields(method)
        if entry.name not in LATER_SETTINGS or getattr(method, entry.name) != entry.default
    )
    return f"Method({', '.join(settings)})"


def autocast_dtype(recipe: Recipe, device: torch.device) -> torch.dtype | None:
    """bfloat16 where the recipe or the device selects it, otherwise None."""
    wanted = recipe.precision == "bfloat16" or (recipe.precision == "auto" and device.type == "cuda")
    return torch.bfloat16 if wanted else None


def run_key(recipe: Recipe, identity: Identity) -> str:
    """Ten hexadecimal digits of a run: its settings and its identity, not the path of its images."""
    text = json.dumps([settings_key(recipe), *identity])
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def settings_key(recipe: Recipe) -> str:
    """Key of a recipe without the name of its dataset, whose content is in the identity."""
    return dataclasses.replace(recipe, dataset="").key


def package_version() -> str:
    try:
        return version("icmixup")
    except PackageNotFoundError:
        return "unknown"


def network_fingerprint(recipe: Recipe, data: Dataset) -> str:
    """Fingerprint of the network that is trained: a linear head on features, or the recipe's model."""
    builder = MODELS.get(recipe.model)
    if isinstance(builder, OwnModel):
        return own_fingerprint(recipe.model, builder, data)
    if data.is_features:
        return digest(f"linear head of {recipe.model} on {data.train.images.shape[1]} features")
    _, channels, _, size = data.train.images.shape
    return model_fingerprint(recipe.model, builder, data.num_classes, channels, size)


def own_fingerprint(name: str, builder: OwnModel, data: Dataset) -> str:
    """Fingerprint of a user's network: its modules and code, initial weights, and scores of two examples.

    Code that modules call is not all in their classes, so the scores count as well: with four digits of
    float64, which does not depend on the number of threads.
    """
    if data.fingerprint not in builder.fingerprints:
        model = build_model(name, data.num_classes, channels=data.train.images.shape[1], seed=0)
        weights = hashlib.blake2b()
        for weight in model.state_dict().values():
            weights.update(weight.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        parts = (describe_modules(model), weights.hexdigest(), describe_scores(model, data))
        builder.fingerprints[data.fingerprint] = digest(*parts)
    return builder.fingerprints[data.fingerprint]


def describe_scores(model: nn.Module, data: Dataset) -> str:
    """Scores of two examples with four digits; nothing for a network that does not compute in float64."""
    try:
        scores = probe_scores(model.double(), data, torch.float64)
    except RuntimeError:
        return ""
    return " ".join(f"{score:.3e}" for score in scores.flatten().tolist())


def probe_scores(model: nn.Module, data: Dataset, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(2, C) scores of the first two training examples, in evaluation mode, on the CPU."""
    inputs = next(data.train.blocks(2)).cpu().clone()  # a network may change its inputs in place
    if inputs.dtype == torch.uint8:
        inputs = normalise(inputs, data.mean, data.std)
    with torch.inference_mode():
        scores: torch.Tensor = model.eval()(inputs.to(dtype))
    return scores


# The builder is an argument because a name can be given another one.
@functools.lru_cache(maxsize=16)
def model_fingerprint(name: str, builder: object, num_classes: int, channels: int, image_size: int) -> str:
    """Fingerprint of a network: its modules with their settings, its weights' shapes, and its own code."""
    return digest(
        describe_modules(build_model(name, num_classes, channels=channels, seed=0, image_size=image_size))
    )


def describe_modules(model: nn.Module) -> str:
    """Modules with their settings, the shapes of weights, and code that is not part of a library."""
    shapes = [(name, tuple(weight.shape)) for name, weight in model.state_dict().items()]
    kinds = sorted({type(module) for module in model.modules()}, key=lambda kind: kind.__qualname__)
    return "\0".join([str(model), repr(shapes), *(module_code(kind) for kind in kinds)])


def module_code(kind: type[nn.Module]) -> str:
    """Source of a module class that is not part of a library: its name does not say what it computes."""
    if kind.__module__.startswith(LIBRARIES):
        return ""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # defined in an interactive session
        code = kind.forward.__code__
        return repr((code.co_code, code.co_names, code.co_consts))


def digest(*texts: str) -> str:
    return hashlib.blake2b("\0".join(texts).encode()).hexdigest()[:DIGITS]


def describe_difference(then: Identity | None, now: Identity) -> str:
    """How an earlier run differs from the one that is wanted now, for a message."""
    if then is None:
        return "no fingerprint, from an earlier version of icmixup"
    reasons = []
    if then.data != now.data:
        reasons.append(f"other images or labels (fingerprint {then.data}, now {now.data})")
    if then.model != now.model:
        reasons.append("another network of the same name")
    if then.method != now.method:
        reasons.append("another method of the same name")
    if then.version != now.version:
        reasons.append(f"icmixup {then.version}, now {now.version}")
    if (then.device, then.precision) != (now.device, now.precision):
        reasons.append(f"{then.device} in {then.precision}, now {now.device} in {now.precision}")
    return "; ".join(reasons)


def is_same_experiment(then: Identity | None, now: Identity) -> bool:
    """Whether only version, device or precision differ, so that --reuse may take the run."""
    return then is not None and then[:3] == now[:3]
