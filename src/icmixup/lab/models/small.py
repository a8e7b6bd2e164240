"""Networks for small images.

Each one is a stem, stages of blocks (`layer1`, `layer2`, ...), global average pooling and a linear classifier
with bias. The images may have any size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TENSOR_CORE_CHANNELS = 8
COSINE_SCALE = 30.0  # s of LDAM

# Builds a block from its input channels, output channels and stride.
MakeBlock = Callable[[int, int, int], nn.Module]


class StagedNetwork(nn.Module):
    """Stem, stages, tail, global average pooling, linear: (B, channels, H, W) images to (B, C) scores.

    Args:
        stem: maps the channels of the image to `stem_width` channels.
        block: builds each block of each stage.
        widths: output channels of each stage. The first stage keeps the image size, the others halve it.
        depths: number of blocks in each stage.
        tail: applied between the last stage and the pooling.
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
        # The set {0, 1, 2} of Verma et al. (2019): the image, and the output of the first and second stage.
        self.hidden = ("stem", *self.stages[1:3])

    def forward(self, images: Tensor) -> Tensor:
        maps: Tensor = self.stem(images)
        for stage in self.stages:
            maps = self.get_submodule(stage)(maps)
        scores: Tensor = self.classifier(self.tail(maps).mean(dim=(2, 3)))
        return scores


class Norm(nn.BatchNorm2d):
    """BatchNorm without its batch counter, which is never read and costs one kernel per layer."""

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
    """branch(a) + x with a = relu(norm(x)); project(a) replaces x if the shape changes (Wide ResNet)."""

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
    """Subsample by stride and pad the channels with zeros on both sides: option A of He et al. (2015)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride, self.padding = stride, (outputs - inputs) // 2

    def forward(self, maps: Tensor) -> Tensor:
        maps = maps[:, :, :: self.stride, :: self.stride]
        return F.pad(maps, (0, 0, 0, 0, self.padding, self.padding))


class Conv(nn.Conv2d):
    """Convolution that pads inputs of few channels with zeros on a GPU: tensor cores need eight."""

    def forward(self, maps: Tensor) -> Tensor:
        missing = TENSOR_CORE_CHANNELS - self.in_channels
        if missing <= 0 or not maps.is_cuda:
            return F.conv2d(maps, self.weight, self.bias, self.stride, self.padding)
        zeros = (0, 0, 0, 0, 0, missing)
        weight = F.pad(self.weight, zeros)
        return F.conv2d(F.pad(maps, zeros), weight, self.bias, self.stride, self.padding)


class CosineLinear(nn.Linear):
    """Classifier of LDAM (Cao et al., 2019): COSINE_SCALE times the cosine of features and class weights."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__(width, num_classes, bias=False)
        # Directions of every class equally likely; the length has no effect on the scores.
        nn.init.normal_(self.weight)
        with torch.no_grad():
            self.weight.copy_(F.normalize(self.weight, dim=1))

    def forward(self, features: Tensor) -> Tensor:
        return COSINE_SCALE * F.linear(F.normalize(features, dim=1), F.normalize(self.weight, dim=1))


def conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return Conv(inputs, outputs, size, stride, padding=size // 2, bias=False)


def norm_relu(width: int) -> nn.Sequential:
    return nn.Sequential(Norm(width), nn.ReLU(inplace=True))


def conv_norm_relu(inputs: int, outputs: int, size: int = 3, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(conv(inputs, outputs, size, stride), *norm_relu(outputs))


def projection(inputs: int, outputs: int, stride: int) -> nn.Module:
    """1x1 convolution and BatchNorm if the shape changes, else the identity: option B of He et al. (2015)."""
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(conv(inputs, outputs, 1, stride), Norm(outputs))


def basic_branch(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        *conv_norm_relu(inputs, outputs, 3, stride), conv(outputs, outputs, 3), Norm(outputs)
    )


def basic_block(inputs: int, outputs: int, stride: int) -> Residual:
    return Residual(basic_branch(inputs, outputs, stride), projection(inputs, outputs, stride))


def padded_block(inputs: int, outputs: int, stride: int) -> Residual:
    return Residual(basic_branch(inputs, outputs, stride), PaddedShortcut(inputs, outputs, stride))


def bottleneck_block(inputs: int, outputs: int, stride: int) -> Residual:
    width = outputs // 4
    branch = nn.Sequential(
        *conv_norm_relu(inputs, width, 1),
        *conv_norm_relu(width, width, 3, stride),
        conv(width, outputs, 1),
        Norm(outputs),
    )
    return Residual(branch, projection(inputs, outputs, stride))


def plain_block(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """Convolution, BatchNorm and ReLU without a shortcut, for networks of a few layers."""
    return conv_norm_relu(inputs, outputs, 3, stride)


def make_stage(block: MakeBlock, inputs: int, outputs: int, depth: int, stride: int) -> nn.Sequential:
    rest = (block(outputs, outputs, 1) for _ in range(depth - 1))
    return nn.Sequential(block(inputs, outputs, stride), *rest)


def build_post_activation(
    block: MakeBlock,
    stem_width: int,
    widths: tuple[int, ...],
    depths: tuple[int, ...],
    num_classes: int,
    channels: int,
) -> StagedNetwork:
    """Network of post-activation blocks: a 3x3 stem with BatchNorm, no pooling, PyTorch's default weights."""
    stem = conv_norm_relu(channels, stem_width)
    return StagedNetwork(num_classes, stem, stem_width, block, widths, depths, nn.Identity())


def build_resnet32(num_classes: int, channels: int, widen: int = 1) -> StagedNetwork:
    """ResNet-32 of He et al. (2015) for CIFAR, 0.46 M parameters, as in the long-tail papers since LDAM.

    Option A shortcuts (PaddedShortcut, no projection) and He-normal weights, both as in the code of LDAM
    (Cao et al., 2019). With widen=4 every layer has four times the channels, 7.4 M parameters.
    """
    widths = (16 * widen, 32 * widen, 64 * widen)
    return init_he_normal(
        build_post_activation(padded_block, widths[0], widths, (5, 5, 5), num_classes, channels)
    )


def build_wide_resnet(widen: int, depth: int, num_classes: int, channels: int) -> StagedNetwork:
    """Wide ResNet of Zagoruyko and Komodakis (2016): pre-activation, no dropout, He-normal weights."""
    widths = (16 * widen, 32 * widen, 64 * widen)
    depths = ((depth - 4) // 6,) * 3
    stem, tail = conv(channels, 16, 3), norm_relu(widths[-1])
    return init_he_normal(StagedNetwork(num_classes, stem, 16, PreActivated, widths, depths, tail))


def init_he_normal(model: StagedNetwork) -> StagedNetwork:
    """Initialise the convolutions with variance 2 / fan-in (He et al., 2015), and return the model."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
    return model
