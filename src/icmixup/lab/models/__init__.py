"""Networks for small images, and any of timm's when timm is installed.

Every network of ours is a stem, stages of blocks (`layer1`, `layer2`, ...), a global average and a linear
classifier with bias, for images of any size.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TENSOR_CORE_CHANNELS = 8
DRAWING = threading.Lock()  # all threads have one global generator

# Makes one block from its channels in, channels out, and stride.
MakeBlock = Callable[[int, int, int], nn.Module]


def build_model(name: str, num_classes: int, *, channels: int = 3, seed: int) -> nn.Module:
    """A network with fresh weights, on the CPU in float32; the same seed gives the same weights.

    The global random state is left as it was. `model.hidden` names the submodules whose input Manifold Mixup
    may mix: that of the stem, which is the image, and of the second and third stage, as its authors do.

    Args:
        name: one of MODELS, or a timm name. Where both have it, ours is taken; timm's goes by its tagged name
            ("resnet18.a1_in1k"). No pretrained weights are loaded.
        num_classes: C, at least 2.
        channels: of the image, 1 or 3 mostly.
        seed: any integer.
    """
    if num_classes < 2 or channels < 1:
        raise ValueError(
            f"num_classes is {num_classes} and channels is {channels}; wanted at least 2 and at least 1"
        )
    build = MODELS[name] if name in MODELS else partial(build_timm, name)
    # The CPU's generator alone: torch.manual_seed would seed the GPUs' too, and they are not forked here.
    with DRAWING, torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return build(num_classes, channels)


class StagedNetwork(nn.Module):
    """Stem, stages, tail, global average, linear: (B, channels, H, W) images to (B, C) scores.

    Args:
        stem: channels of the image to `stem_width`.
        block: makes each block of each stage.
        widths: channels out of each stage; the first keeps the image's size, each other one halves it.
        depths: blocks in each stage.
        tail: between the last stage and the average.
    """

    def __init__(
        self,
        num_classes: int,
        stem: nn.Module,
        stem_width: int,
        block: MakeBlock,
        widths: tuple[int, ...],
        depths: tuple[int, ...],
        tail: nn.Module,
    ) -> None:
        super().__init__()
        self.stem = stem
        self.stages = tuple(f"layer{n}" for n in range(1, len(widths) + 1))
        inputs = (stem_width, *widths)
        for n, stage in enumerate(self.stages):
            self.add_module(
                stage, make_stage(block, inputs[n], widths[n], depths[n], stride=1 if n == 0 else 2)
            )
        self.tail = tail
        self.classifier = nn.Linear(widths[-1], num_classes)
        # The set {0, 1, 2} of Verma et al. (2019): the image, and what leaves the first and the second stage.
        self.hidden = ("stem", *self.stages[1:3])

    def forward(self, images: Tensor) -> Tensor:
        maps: Tensor = self.stem(images)
        for stage in self.stages:
            maps = self.get_submodule(stage)(maps)
        scores: Tensor = self.classifier(self.tail(maps).mean(dim=(2, 3)))
        return scores


class Norm(nn.BatchNorm2d):
    """BatchNorm without its counter of batches, which nothing reads and which costs a kernel a layer."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.num_batches_tracked = None


class Residual(nn.Module):
    """relu(branch(x) + shortcut(x)), He et al. (2015)."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch, self.shortcut = branch, shortcut

    def forward(self, maps: Tensor) -> Tensor:
        return F.relu(self.branch(maps) + self.shortcut(maps))


class PreActivated(nn.Module):
    """branch(a) + x with a = relu(norm(x)), or + project(a) where the shape changes (Wide ResNet, 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.activate = norm_relu(inputs)
        self.branch = nn.Sequential(
            conv(inputs, outputs, 3, stride), norm_relu(outputs), conv(outputs, outputs, 3)
        )
        self.project = None if inputs == outputs and stride == 1 else conv(inputs, outputs, 1, stride)

    def forward(self, maps: Tensor) -> Tensor:
        active = self.activate(maps)
        out: Tensor = self.branch(active) + (maps if self.project is None else self.project(active))
        return out


class PaddedShortcut(nn.Module):
    """Every stride-th pixel, channels of zeros on both sides: option A of He et al., without parameters."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride, self.padding = stride, (outputs - inputs) // 2

    def forward(self, maps: Tensor) -> Tensor:
        maps = maps[:, :, :: self.stride, :: self.stride]
        return F.pad(maps, (0, 0, 0, 0, self.padding, self.padding))


class Conv(nn.Conv2d):
    """A convolution; on a GPU an image's few channels get zeros beside them, as tensor cores want eight."""

    def forward(self, maps: Tensor) -> Tensor:
        missing = TENSOR_CORE_CHANNELS - self.in_channels
        if missing <= 0 or not maps.is_cuda:
            return F.conv2d(maps, self.weight, self.bias, self.stride, self.padding)
        zeros = (0, 0, 0, 0, 0, missing)
        weight = F.pad(self.weight, zeros)
        return F.conv2d(F.pad(maps, zeros), weight, self.bias, self.stride, self.padding)


def conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return Conv(inputs, outputs, size, stride, padding=size // 2, bias=False)


def norm_relu(width: int) -> nn.Sequential:
    return nn.Sequential(Norm(width), nn.ReLU(inplace=True))


def conv_norm_relu(inputs: int, outputs: int, size: int = 3, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(conv(inputs, outputs, size, stride), *norm_relu(outputs))


def projection(inputs: int, outputs: int, stride: int) -> nn.Module:
    """1x1 convolution and BatchNorm where the shape changes, else the identity: option B of He et al."""
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(conv(inputs, outputs, 1, stride), Norm(outputs))


def basic_branch(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        *conv_norm_relu(inputs, outputs, 3, stride), conv(outputs, outputs, 3), Norm(outputs)
    )


def basic(inputs: int, outputs: int, stride: int) -> Residual:
    return Residual(basic_branch(inputs, outputs, stride), projection(inputs, outputs, stride))


def basic_padded(inputs: int, outputs: int, stride: int) -> Residual:
    return Residual(basic_branch(inputs, outputs, stride), PaddedShortcut(inputs, outputs, stride))


def bottleneck(inputs: int, outputs: int, stride: int) -> Residual:
    width = outputs // 4
    branch = nn.Sequential(
        *conv_norm_relu(inputs, width, 1),
        *conv_norm_relu(width, width, 3, stride),
        conv(width, outputs, 1),
        Norm(outputs),
    )
    return Residual(branch, projection(inputs, outputs, stride))


def plain(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """No shortcut: a network of a few layers needs none."""
    return conv_norm_relu(inputs, outputs, 3, stride)


def make_stage(block: MakeBlock, inputs: int, outputs: int, depth: int, stride: int) -> nn.Sequential:
    rest = (block(outputs, outputs, 1) for _ in range(depth - 1))
    return nn.Sequential(block(inputs, outputs, stride), *rest)


def staged(
    block: MakeBlock,
    stem_width: int,
    widths: tuple[int, ...],
    depths: tuple[int, ...],
    num_classes: int,
    channels: int,
) -> StagedNetwork:
    """Post-activation networks: a 3x3 stem with BatchNorm, no pooling; weights as PyTorch draws them."""
    stem = conv_norm_relu(channels, stem_width)
    return StagedNetwork(num_classes, stem, stem_width, block, widths, depths, nn.Identity())


def resnet32(num_classes: int, channels: int) -> StagedNetwork:
    """He et al.'s for CIFAR, 0.46 M parameters, as the long-tail papers since LDAM (Cao et al., 2019) use it.

    Option A shortcuts (PaddedShortcut, no projection) and He-normal weights, both as in LDAM's code.
    """
    return he_normal(staged(basic_padded, 16, (16, 32, 64), (5, 5, 5), num_classes, channels))


def wide_resnet(widen: int, depth: int, num_classes: int, channels: int) -> StagedNetwork:
    """Wide ResNet of Zagoruyko and Komodakis (2016), pre-activation, no dropout, He-normal weights."""
    widths = (16 * widen, 32 * widen, 64 * widen)
    depths = ((depth - 4) // 6,) * 3
    stem, tail = conv(channels, 16, 3), norm_relu(widths[-1])
    return he_normal(StagedNetwork(num_classes, stem, 16, PreActivated, widths, depths, tail))


def he_normal(model: StagedNetwork) -> StagedNetwork:
    """The model with convolutions drawn anew, variance 2 / fan-in (He et al., 2015)."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
    return model


MODELS: dict[str, Callable[[int, int], nn.Module]] = {
    "resnet18": partial(staged, basic, 64, (64, 128, 256, 512), (2, 2, 2, 2)),
    "resnet34": partial(staged, basic, 64, (64, 128, 256, 512), (3, 4, 6, 3)),
    "resnet50": partial(staged, bottleneck, 64, (256, 512, 1024, 2048), (3, 4, 6, 3)),
    "resnet32": resnet32,
    "wrn16-8": partial(wide_resnet, 8, 16),
    "small-cnn": partial(staged, plain, 32, (32, 64, 128), (1, 1, 1)),
}


def build_timm(name: str, num_classes: int, channels: int) -> nn.Module:
    """timm's network of that name, with `hidden` read off the names timm gives to stages and blocks."""
    if find_spec("timm") is None:
        raise ValueError(
            f"no model {name!r} here{near(name, list(MODELS))}; ours are {', '.join(MODELS)}; "
            "for a name of timm's install it first: pip install icmixup[timm]"
        )
    timm = import_module("timm")
    if not timm.is_model(name):
        known = list(dict.fromkeys([*MODELS, *timm.list_models()]))
        raise ValueError(
            f"neither we nor timm have a model {name!r}{near(name, known)}; ours are {', '.join(MODELS)}, "
            "timm's are listed by timm.list_models()"
        )
    model: nn.Module = timm.create_model(name, num_classes=num_classes, in_chans=channels)
    model.hidden = stage_names(model)  # type: ignore[assignment]
    return model


def stage_names(model: nn.Module) -> tuple[str, ...]:
    """Submodules that lie on the main path of a timm network, where all of the features pass."""
    pattern = re.compile(r"layer\d+|(stages|layers|blocks)[._]\d+")
    return tuple(name for name, _ in model.named_modules() if pattern.fullmatch(name))


def near(name: str, known: list[str]) -> str:
    matches = get_close_matches(name, known, n=5, cutoff=0.5)
    return f"; near it: {', '.join(matches)}" if matches else ""
