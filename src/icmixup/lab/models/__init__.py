"""Networks by name: ours for small images, and timm's, with pretrained weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from icmixup._install import install_hint
from icmixup.lab.datasets.preprocessing import Preprocessing
from icmixup.lab.models.own import OwnModel
from icmixup.lab.models.small import (
    CosineLinear,
    basic_block,
    bottleneck_block,
    build_post_activation,
    build_resnet32,
    build_wide_resnet,
    plain_block,
)
from icmixup.lab.models.timm import (
    LOCAL,
    adapt_state,
    build_timm,
    has_timm,
    head_names,
    is_timm_model,
    is_transformer,
    list_timm_models,
    models_that_fit,
    portable_name,
    pretrained_config,
    published_weights,
    timm,
    timm_preprocessing,
    weights_file,
)
from icmixup.lab.models.weights import (
    NAMED,
    LoadReport,
    WeightsDoNotFit,
    check_finite,
    copy_weights,
    digest_file,
    fits,
    match_weights,
    read_weights,
    shrink_head,
)
from icmixup.lab.wording import first_few

__all__ = [
    "MODELS",
    "PRETRAINED",
    "CosineLinear",
    "LoadReport",
    "WeightsDoNotFit",
    "build_linear",
    "build_model",
    "check_digest",
    "classifier_of",
    "is_own",
    "portable_name",
    "preprocessing_of",
    "replace_classifier",
    "seeded",
    "start_note",
    "uses_attention",
    "weights_digest",
]

PRETRAINED = "pretrained"  # as the value of weights: those that timm publishes

# Builds a network from its number of classes and of image channels.
Builder = Callable[[int, int], nn.Module]

SEED_LOCK = threading.Lock()  # all threads share the global generator

MODELS: dict[str, Builder] = {
    "resnet18": partial(build_post_activation, basic_block, 64, (64, 128, 256, 512), (2, 2, 2, 2)),
    "resnet34": partial(build_post_activation, basic_block, 64, (64, 128, 256, 512), (3, 4, 6, 3)),
    "resnet50": partial(build_post_activation, bottleneck_block, 64, (256, 512, 1024, 2048), (3, 4, 6, 3)),
    "resnet32": build_resnet32,
    "resnet32x4": partial(build_resnet32, widen=4),
    "wrn16-8": partial(build_wide_resnet, 8, 16),
    "small-cnn": partial(build_post_activation, plain_block, 32, (32, 64, 128), (1, 1, 1)),
}


def build_model(
    name: str,
    num_classes: int,
    *,
    channels: int = 3,
    seed: int,
    weights: str | None = None,
    image_size: int | None = None,
    keep_head: bool = False,
    cosine: bool = False,
) -> nn.Module:
    """Build a network on the CPU in float32; the same seed gives the same random weights.

    The global random state is not changed. `model.hidden` names the submodules whose input Manifold Mixup
    may mix. For our networks they are the stem, whose input is the image, and the second and third stage, as
    in the code of its authors. With weights, `model.load_report` says what was loaded.

    Args:
        name: a key of MODELS, a model name of timm, or local-dir:FOLDER. For a name that both have, use
            timm's tagged name ("resnet18.a1_in1k") to get timm's.
        num_classes: C, at least 2.
        channels: of the image, at least 1.
        seed: any integer.
        weights: a file, "pretrained" for timm's own, or None for random weights.
        image_size: side of the images, for timm's networks that are built for one size.
        keep_head: load the classifier of the weights as well, instead of a new one.
        cosine: classify by cosines, as LDAM does (`CosineLinear`).
    """
    if num_classes < 2:
        raise ValueError(f"num_classes must be at least 2, got {num_classes}")
    if channels < 1:
        raise ValueError(f"channels must be at least 1, got {channels}")
    build = find_builder(name, image_size)
    with seeded(seed):
        model = build(num_classes, channels)
        if cosine:
            replace_classifier(model, name, CosineLinear(classifier_of(model, name).in_features, num_classes))
    if weights is not None:
        load_weights(model, name, weights, channels, image_size, keep_head)
    return model


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Context in which modules are made on the CPU with weights from the seed; random state is restored."""
    # Only the CPU's generator: torch.manual_seed would also seed the GPUs, which are not forked here.
    with SEED_LOCK, torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        yield


def replace_classifier(model: nn.Module, name: str, classifier: nn.Module) -> None:
    """Put another module in the place of the linear classifier of a network that build_model made."""
    old = classifier_of(model, name)
    path = next(path for path, module in model.named_modules() if module is old)
    parent, _, last = path.rpartition(".")
    setattr(model.get_submodule(parent), last, classifier)


def build_linear(num_classes: int, width: int, *, cosine: bool = False, seed: int = 0) -> nn.Module:
    """A linear head on (B, width) features, with all weights 0.

    The problem is convex, so random weights would only have to be unlearned. With `cosine` it is a
    CosineLinear, whose weights need a direction: they are random, from the seed.
    """
    if cosine:
        with seeded(seed):
            return CosineLinear(width, num_classes)
    head = nn.Linear(width, num_classes, device="meta").to_empty(device="cpu")
    for weight in head.parameters():
        nn.init.zeros_(weight)
    return head


def load_weights(
    model: nn.Module, name: str, weights: str, channels: int, image_size: int | None, keep_head: bool
) -> None:
    """Load pretrained weights into a network that build_model made."""
    file = find_file(name, weights)
    ours = name in MODELS
    state = published_weights(name, channels, image_size) if file is None else read_weights(file)
    if file is not None and not ours:
        state = adapt_state(name, model, state, channels)
    head = () if keep_head else ("classifier",) if ours else head_names(name)
    report = match_weights(model, state, head)
    if not fits(report):
        raise WeightsDoNotFit(describe_misfit(name, weights, state, report, file))
    check_finite(state, report, weights)
    copy_weights(model, state, report)
    shrink_head(model, report)
    model.load_report = report  # type: ignore[assignment]


def find_file(name: str, weights: str) -> Path | None:
    """The file of the weights; None for those that timm publishes."""
    if weights != PRETRAINED:
        return Path(weights)
    if name in MODELS:
        hint = "" if not has_timm() else f"; timm's network of that name is {name}.TAG: {tagged_names(name)}"
        raise ValueError(f"{name} is our network for small images and has no pretrained weights{hint}")
    return weights_file(name) if name.startswith(LOCAL) else None


def tagged_names(name: str) -> str:
    return ", ".join(timm().list_pretrained(f"{name}.*")[:3]) or "none has weights"


def describe_misfit(
    name: str, weights: str, state: Mapping[str, Tensor], report: LoadReport, file: Path | None
) -> str:
    total = len(report.loaded) + len(report.missing)
    missing = f"for example {first_few(report.missing, NAMED)}"
    found = [] if file is None or not has_timm() else models_that_fit(dict(state), name, file)
    remedy = (
        f"they fit --model {' or '.join(map(unambiguous_name, found[:3]))}"
        if found
        else "pass the --model that they were saved from"
    )
    return (
        f"{weights} does not fit {name}: {len(report.loaded)} of {total} tensors below the head fit by "
        f"name and shape ({missing} do not), of {len(state)} in the file; {remedy}"
    )


def unambiguous_name(name: str) -> str:
    """The name under which --model finds timm's network, where one of ours has the same name."""
    return f"{name}.{pretrained_config(name)['tag']}" if name in MODELS else name


def classifier_of(model: nn.Module, name: str) -> nn.Linear:
    """The linear layer whose input are the features of a network."""
    names = ("classifier",) if name in MODELS else head_names(name)
    heads = [module for head in names if isinstance(module := model.get_submodule(head), nn.Linear)]
    if len(heads) != 1:
        raise ValueError(
            "--train head, --cosine-classifier, ldam, adjustment after training and retrain need a network "
            f"with one linear classifier, {name} has {len(heads)}; use another --model, or --train all with "
            "another method"
        )
    return heads[0]


def is_own(name: str) -> bool:
    """Whether a network is built by a function of the user."""
    return isinstance(MODELS.get(name), OwnModel)


def uses_attention(name: str) -> bool:
    """Whether a network is a transformer of timm's."""
    return name not in MODELS and is_timm_model(name) and is_transformer(name)


def preprocessing_of(name: str, weights: str | None) -> Preprocessing | None:
    """How images are prepared for pretrained weights; None without weights and for our own networks."""
    if weights is None or name in MODELS:
        return None
    find_builder(name, None)
    return timm_preprocessing(name, find_file(name, weights))


def weights_digest(name: str, weights: str | None) -> str | None:
    """Digits that change with the content of a weights file; None if there is no file."""
    file = None if weights is None else find_file(name, weights)
    if file is None:
        return None
    if not file.is_file():
        read_weights(file)  # raises
    return digest_file(file)


def check_digest(name: str, weights: str | None, digest: str | None) -> None:
    """Raise an error if a weights file has another content than the one with this digest."""
    if weights is None or digest is None:
        return
    found = weights_digest(name, weights)
    if found != digest:
        raise ValueError(
            f"{weights} has changed since this run was started (SHA-256 {found}..., was {digest}...); "
            "restore the file, or run `icmixup compare` or `icmixup train` again, which makes new runs"
        )


def start_note(name: str, weights: str | None) -> str:
    """A note for a timm name that seems to ask for weights when none are loaded, otherwise "" """
    asks = name not in MODELS and ("." in name or name.startswith(LOCAL)) and is_timm_model(name)
    if weights is not None or not asks:
        return ""
    return f"{name} starts from random weights; --weights pretrained loads the ones it is named for"


def find_builder(name: str, image_size: int | None = None) -> Builder:
    """The builder of a network of ours, else of timm's."""
    if name in MODELS:
        return MODELS[name]
    if is_timm_model(name):
        return partial(build_timm, name, image_size=image_size)
    similar = get_close_matches(name, list(dict.fromkeys([*MODELS, *list_timm_models()])), n=5, cutoff=0.5)
    hint = f" (did you mean {' or '.join(similar)}?)" if similar else ""
    remedy = (
        "a name of timm.list_models()"
        if has_timm()
        else f"install timm for its models: {install_hint('timm')}"
    )
    raise ValueError(f"no model {name!r}{hint}: use {', '.join(MODELS)}, or {remedy}")
