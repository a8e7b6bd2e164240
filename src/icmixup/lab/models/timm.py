"""Networks of timm: built by name, with pretrained weights, and with the preprocessing of those weights.

A name is one of timm.list_models(), with or without a tag, or local-dir:FOLDER for a folder in timm's format
(config.json and model.safetensors).
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from icmixup.integrations._versions import release
from icmixup.lab.datasets.preprocessing import Preprocessing
from icmixup.lab.models.weights import State, fits, match_weights

LOCAL = "local-dir:"
LOCAL_SINCE = (1, 0, 16)  # the version of timm
WEIGHT_FILES = ("model.safetensors", "pytorch_model.safetensors", "pytorch_model.bin")
SIMILAR_MODELS = 30  # that are tried to find the model of a weights file


def has_timm() -> bool:
    return find_spec("timm") is not None


@cache
def timm() -> Any:
    """The timm package; a ValueError with its reason if it is installed but does not work."""
    try:
        return import_module("timm")
    except (ImportError, RuntimeError) as error:  # torchvision for another torch: an operator does not exist
        raise ValueError(
            f"timm is installed but cannot be imported ({error}); install the torchvision that belongs to "
            f"torch {torch.__version__}: https://pytorch.org/get-started/locally"
        ) from error


def is_timm_model(name: str) -> bool:
    """Whether timm is installed and has a model of this name, or a folder in its format is named."""
    if not has_timm():
        return False
    return name.startswith(LOCAL) or bool(timm().is_model(name))


def list_timm_models() -> list[str]:
    """Names of all models of timm, none if it is not installed."""
    return list(timm().list_models()) if has_timm() else []


def build_timm(name: str, num_classes: int, channels: int, image_size: int | None = None) -> nn.Module:
    """Build timm's network of that name, with `hidden` set to its stages or blocks.

    Args:
        image_size: side of the images, for networks that are built for one size, such as transformers; their
            own size by default.
    """
    model = create(name, num_classes=num_classes, in_chans=channels, **size_argument(name, image_size))
    model.hidden = stage_names(model)  # type: ignore[assignment]
    return model


def create(name: str, **arguments: object) -> nn.Module:
    """timm.create_model, with an error message for a name that does not work."""
    if name.startswith(LOCAL) and not (Path(name.removeprefix(LOCAL)) / "config.json").is_file():
        raise ValueError(
            f"{name.removeprefix(LOCAL)!r} has no config.json: {LOCAL} needs a folder in timm's format, with "
            "config.json and model.safetensors"
        )
    if name.startswith(LOCAL) and release(timm().__version__) < LOCAL_SINCE:
        needed = ".".join(map(str, LOCAL_SINCE))
        raise ValueError(
            f"{LOCAL} needs timm {needed} or later, found {timm().__version__}: pip install --upgrade timm"
        )
    model: nn.Module = timm().create_model(name, **arguments)
    return model


def portable_name(name: str) -> str:
    """A name that means the same network on another machine: for local-dir:FOLDER, timm's architecture.

    A folder whose config.json changes the architecture has no such name, and keeps its own.
    """
    path = Path(name.removeprefix(LOCAL)) / "config.json"
    if not name.startswith(LOCAL) or not path.is_file():
        return name
    content = json.loads(path.read_text(encoding="utf-8"))
    return name if content.get("model_args") else str(content["architecture"])


def create_skeleton(name: str, **settings: Any) -> nn.Module:
    """A network to look at, without memory for its weights, but for transformers of early timm versions."""
    try:
        with torch.device("meta"):
            return create(name, **settings)
    except (NotImplementedError, RuntimeError):
        with torch.random.fork_rng(devices=[]):  # its weights are drawn, and not used
            return create(name, **settings)


@cache
def pretrained_config(name: str) -> dict[str, Any]:
    """timm's settings of a model's pretrained weights: input size, mean, std, name of the classifier, ..."""
    return dict(create_skeleton(name).pretrained_cfg)  # type: ignore[arg-type]


def stage_names(model: nn.Module) -> tuple[str, ...]:
    """Submodules on the main path of a timm network, which all features pass through."""
    pattern = re.compile(r"layer\d+|(stages|layers|blocks)[._]\d+")
    return tuple(name for name, _ in model.named_modules() if pattern.fullmatch(name))


def head_names(name: str) -> tuple[str, ...]:
    """Submodules that classify; distilled transformers have two."""
    classifier = pretrained_config(name).get("classifier") or ()
    return (classifier,) if isinstance(classifier, str) else tuple(classifier)


def is_transformer(name: str) -> bool:
    """Whether a model has attention between patches."""
    modules = create_skeleton(name).modules()
    return any(type(module).__name__.endswith("Attention") for module in modules)


def timm_preprocessing(name: str, file: Path | None = None) -> Preprocessing:
    """How photos are prepared for a model's pretrained weights.

    Args:
        file: weights; a config.json of timm's format beside it comes before the model's own settings.
    """
    config = pretrained_config(name)
    if file is not None and (file.parent / "config.json").is_file():
        config = config | read_config(file.parent / "config.json")
    found = import_module("timm.data").resolve_data_config({}, pretrained_cfg=config)
    return Preprocessing(
        image_size=int(found["input_size"][-1]),
        crop_pct=float(found["crop_pct"]),
        mean=tuple(found["mean"]),
        std=tuple(found["std"]),
        interpolation=str(found["interpolation"]),
    )


def read_config(path: Path) -> dict[str, Any]:
    """The settings in a config.json of timm's format, none if it has another format.

    In its older form they are beside "architecture", not in an entry of their own.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, Mapping):
        return {}
    found = content.get("pretrained_cfg", content if "architecture" in content else None)
    return dict(found) if isinstance(found, Mapping) else {}


def size_argument(name: str, image_size: int | None) -> dict[str, int]:
    """The argument with which a network is built for another image size than its own, if it needs one."""
    config = pretrained_config(name)
    if image_size is None or image_size == config["input_size"][-1] or not config.get("fixed_input_size"):
        return {}
    if not takes_size(name, image_size):
        sizes = ", ".join(map(str, sizes_near(name, image_size))) or str(config["input_size"][-1])
        raise ValueError(f"{name} cannot take images of {image_size} pixels; use --image-size {sizes}")
    return {"img_size": image_size}


def takes_size(name: str, image_size: int) -> bool:
    """Whether a network can be built for and called with images of that size, by trying."""
    if image_size == pretrained_config(name)["input_size"][-1]:
        return True
    try:
        with torch.inference_mode():
            model = create_skeleton(name, img_size=image_size).eval()
            if any(image_size % side for side in patch_size(model)):  # the rest would be cut off
                return False
            with next(model.parameters()).device:
                model(torch.zeros(1, 3, image_size, image_size))
    except (AssertionError, RuntimeError, TypeError, ValueError):
        return False
    return True


def patch_size(model: nn.Module) -> tuple[int, ...]:
    size = getattr(getattr(model, "patch_embed", None), "patch_size", 1)
    return (size,) if isinstance(size, int) else tuple(size)


def sizes_near(name: str, image_size: int) -> list[int]:
    """The three sizes nearest to the given one that a network can take, and its own."""
    own = pretrained_config(name)["input_size"][-1]
    steps = sorted({step * near for step in (14, 16, 32) for near in range(1, 2 + 2 * image_size // step)})
    nearest = sorted(steps, key=lambda size: abs(size - image_size))[:16]
    return sorted({*[size for size in nearest if takes_size(name, size)][:3], own})


def weights_file(name: str) -> Path:
    """The weights file of a folder in timm's format."""
    folder = Path(name.removeprefix(LOCAL))
    for candidate in WEIGHT_FILES:
        if (folder / candidate).is_file():
            return folder / candidate
    raise ValueError(f"{folder} has no weights; add one of {', '.join(WEIGHT_FILES)}")


def published_weights(name: str, channels: int, image_size: int | None) -> State:
    """The weights that timm publishes for a model, from its cache or downloaded."""
    if not pretrained_config(name).get("url") and not pretrained_config(name).get("hf_hub_id"):
        raise ValueError(f"timm has no pretrained weights for {name}; pass --weights FILE, or {others(name)}")
    try:
        model = create(name, pretrained=True, in_chans=channels, **size_argument(name, image_size))
    except Exception as error:  # many libraries are between us and the network, each with errors of its own
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"the pretrained weights of {name} are not in timm's cache and could not be downloaded "
            f"({type(error).__name__}: {reason}); download the file elsewhere and pass --weights FILE"
        ) from error
    return model.state_dict()


def others(name: str) -> str:
    tagged = timm().list_pretrained(f"{name.partition('.')[0]}*")[:3]
    return f"another model such as {', '.join(tagged)}" if tagged else "another model"


def adapt_state(name: str, model: nn.Module, state: State, channels: int) -> State:
    """Weights of a file under timm's names, for the network's image size and channels, as far as timm can."""
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if convert is not None:
        # An error means a file of another family: what does not fit is reported by name and shape.
        with contextlib.suppress(KeyError, RuntimeError, TypeError, AttributeError):
            state = dict(convert(dict(state), model))
    convs = pretrained_config(name).get("first_conv") or ()
    for conv in (convs,) if isinstance(convs, str) else convs:
        weight = f"{conv}.weight"
        if weight in state and state[weight].ndim == 4 and state[weight].shape[1] == 3 != channels:
            state[weight] = import_module("timm.models").adapt_input_conv(channels, state[weight])
    return state


def models_that_fit(state: State, name: str, file: Path) -> list[str]:
    """Models of timm whose tensors are those of a file, among models with a similar name."""
    found = []
    for candidate in similar_models(name, file):
        model = create_skeleton(candidate)
        if fits(match_weights(model, adapt_state(candidate, model, state, 3), head_names(candidate))):
            found.append(candidate)
    return found


def similar_models(name: str, file: Path) -> Iterator[str]:
    """Names of models that a file may be for, by its config.json, its name, its folder and the given one."""
    names = list_timm_models()
    config = file.parent / "config.json"
    content = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else None
    stated = content.get("architecture") if isinstance(content, Mapping) else None
    words = [file.stem, file.parent.name, name.partition(".")[0]]
    alike = [
        match for word in words for match in get_close_matches(word, names, n=SIMILAR_MODELS // 3, cutoff=0.5)
    ]
    yield from dict.fromkeys(found for found in (stated, *alike) if found in names)
