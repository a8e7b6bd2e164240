"""Layers of a network in forms that are faster on a GPU, with the same parameters, names and results.

    FusedNorm        BatchNorm, the shortcut of a block and the activation in one pass over the maps
    DepthwiseConv    depthwise convolution limited by memory bandwidth, unlike cuDNN's
    FusedConv        convolution whose weight gradient is computed beside the rest of the backward pass
    StemConv         first convolution with stride 2, on blocks of pixels, which have enough channels for
                     tensor cores
    FusedPool        max pooling in the stem of a ResNet
    NormPool         the same in one with the BatchNorm and ReLU before it
    GlobalPool       mean over all pixels

`fuse_layers` changes the classes of modules in place. Outside of training, on a CPU, and for anything that it
does not know, a network computes what it did before. Results differ by rounding only, less than those of two
algorithms of cuDNN.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from icmixup.lab.models.overlap import convolve, copy_all
from icmixup.lab.models.small import TENSOR_CORE_CHANNELS, Conv, Norm, Residual

if TYPE_CHECKING:  # Triton is imported where a GPU needs it
    from icmixup.lab.models.norm_triton import Statistics

Sides = tuple[int, int, int, int]

SWITCH = "ICMIXUP_FUSED_LAYERS"  # 0 leaves networks as they are
OLDEST_TORCH = "2.11"  # whose Triton the kernels were tested with on a GPU
FORK = "fork"  # attribute of the output of a block: its second name, for the shortcut of the next block
ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.Identity: "none",
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.SiLU: "silu",
}
APPLY: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda maps: maps,
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
}


def can_fuse(device: torch.device) -> bool:
    """Whether the device runs our kernels: an NVIDIA GPU with bfloat16, and a Triton they were tested with.

    That is the one of torch 2.11. With Triton 3.2, of torch 2.6, the weight gradient of a first convolution
    is wrong in the interpreter.
    """
    return (
        device.type == "cuda"
        and torch.version.cuda is not None
        and torch.__version__ >= OLDEST_TORCH
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and find_spec("triton") is not None
        and os.environ.get(SWITCH) != "0"
    )


def fuse_layers(model: nn.Module) -> nn.Module:
    """Give the layers of a network their faster forms, in place, and return it."""
    for module in list(model.modules()):
        fuse_norm(module)
        fuse_conv(module)
        fuse_pool(module)
    for module in list(model.modules()):
        for norm, activation in pairs_of(module):
            absorb(module, norm, activation)
        fuse_block(module)
        fuse_stem(module)
    if any(isinstance(module, FusedConv) for module in model.modules()):
        model.register_forward_pre_hook(cast_weights)
        model.register_forward_hook(drop_casts)
    return model


def runs_kernels(maps: Tensor) -> bool:
    """Whether our kernels run on these maps; they count in 32 bits, so torch takes larger ones."""
    return maps.is_cuda and maps.numel() < 2**31


class FusedNorm(nn.BatchNorm2d):
    """act(norm(maps) + shortcut), in training by the kernels of `norm_triton`."""

    activation: str
    counters: Tensor

    def forward(self, maps: Tensor, shortcut: Tensor | None = None) -> Tensor:
        # One value per channel has no variance; torch's own layer says so.
        if self.training and runs_kernels(maps) and maps.numel() > self.num_features:
            return self.run_kernels(maps, shortcut)
        return self.run_torch(maps, shortcut)

    def run_torch(self, maps: Tensor, shortcut: Tensor | None) -> Tensor:
        out = super().forward(maps)
        return APPLY[self.activation](out if shortcut is None else out + shortcut)

    def run_kernels(self, maps: Tensor, shortcut: Tensor | None) -> Tensor:
        from icmixup.lab.models.norm_triton import norm_act

        out, fork = norm_act(maps, self.weight, self.bias, self.statistics(), self.activation, shortcut)
        if fork is not None:
            setattr(out, FORK, fork)
        return out

    def statistics(self) -> Statistics:
        """What the kernels update."""
        from icmixup.lab.models.norm_triton import Statistics

        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.momentum is not None
        return Statistics(
            self.running_mean,
            self.running_var,
            self.num_batches_tracked,
            self.counters,
            self.momentum,
            self.eps,
        )


class NormPool(FusedNorm):
    """BatchNorm, ReLU and max pooling in the stem of a ResNet."""

    def run_torch(self, maps: Tensor, shortcut: Tensor | None) -> Tensor:
        return F.max_pool2d(super().run_torch(maps, shortcut), 3, 2, 1)

    def run_kernels(self, maps: Tensor, shortcut: Tensor | None) -> Tensor:
        from icmixup.lab.models.pool_triton import norm_pool

        return norm_pool(maps, self.weight, self.bias, self.statistics())


def fuse_norm(module: nn.Module) -> None:
    """Make a FusedNorm of a BatchNorm of torch, of ours, or of timm, which has an activation."""
    activation = activation_of_norm(module)
    if activation is None or not isinstance(module, nn.BatchNorm2d):
        return
    if module.affine and module.track_running_stats and module.momentum is not None:
        module.__class__ = FusedNorm
        assert isinstance(module, FusedNorm)
        module.activation = activation
        zeros = torch.zeros(module.num_features, dtype=torch.int32, device=module.weight.device)
        module.register_buffer("counters", zeros, persistent=False)


def activation_of_norm(module: nn.Module) -> str | None:
    """The activation that a BatchNorm applies itself; None if it is not a layer that we know."""
    if type(module) in (nn.BatchNorm2d, Norm):
        return "none"
    if is_timm(module, "layers", "BatchNormAct2d") and type(module.drop) is nn.Identity:
        return ACTIVATIONS.get(type(module.act))  # type: ignore[arg-type]
    return None


def is_timm(module: nn.Module, package: str, *names: str) -> bool:
    """Whether a module is of one of these classes of a package of timm, and not of a subclass."""
    kind = type(module)
    return kind.__name__ in names and f"{kind.__module__}.".startswith(f"timm.{package}.")


def pairs_of(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Names of a BatchNorm and of the activation that directly follows it."""
    # A subclass may call its modules in another order, or use what is between them.
    if type(module).forward is nn.Sequential.forward:
        yield from pairwise(module._modules)
    elif is_timm(module, "models.resnet", "ResNet"):
        yield "bn1", "act1"
    elif is_timm(module, "models.resnet", "BasicBlock", "Bottleneck"):
        # The last activation follows the shortcut (fuse_block), and the one before it may follow a DropBlock.
        last = 3 if hasattr(module, "bn3") else 2
        yield from ((f"bn{n}", f"act{n}") for n in range(1, last - 1))
        if type(module.drop_block) is nn.Identity:
            yield f"bn{last - 1}", f"act{last - 1}"


def absorb(module: nn.Module, norm_name: str, activation_name: str) -> None:
    """Let a FusedNorm apply the activation after it, whose module becomes the identity."""
    norm, activation = getattr(module, norm_name, None), getattr(module, activation_name, None)
    if isinstance(norm, FusedNorm) and norm.activation == "none" and activation is not norm:
        name = ACTIVATIONS.get(type(activation))  # type: ignore[arg-type]
        if name not in (None, "none"):
            norm.activation = name
            setattr(module, activation_name, nn.Identity())


def fuse_stem(module: nn.Module) -> None:
    """Let the norm in the stem of a ResNet of timm pool its maps."""
    if is_timm(module, "models.resnet", "ResNet") and type(module.maxpool) is FusedPool:
        norm = module.bn1
        if type(norm) is FusedNorm and norm.activation == "relu":
            norm.__class__ = NormPool
            module.maxpool = nn.Identity()


class FusedResidual(Residual):
    """The shortcut and the activation of a block, in the last norm of its branch."""

    branch: nn.Sequential

    def forward(self, maps: Tensor) -> Tensor:
        *layers, norm = self.branch
        shortcut = self.shortcut(getattr(maps, FORK, maps))
        for layer in layers:
            maps = layer(maps)
        out: Tensor = norm(maps, shortcut)
        return out


class FusedBlock(nn.Module):
    """A block of timm's ResNets without attention or drop path; the last norm adds the shortcut."""

    def forward(self, maps: Tensor) -> Tensor:
        shortcut = getattr(maps, FORK, maps)
        if self.downsample is not None:
            shortcut = self.downsample(shortcut)  # type: ignore[operator]
        depth = 3 if hasattr(self, "bn3") else 2
        for n in range(1, depth):
            maps = self.get_submodule(f"bn{n}")(self.get_submodule(f"conv{n}")(maps))
            if n == depth - 1:
                maps = self.drop_block(maps)  # type: ignore[operator]
            maps = self.get_submodule(f"act{n}")(maps)
            if n == depth - 1:
                maps = self.aa(maps)  # type: ignore[operator]
        out: Tensor = self.get_submodule(f"bn{depth}")(self.get_submodule(f"conv{depth}")(maps), shortcut)
        return out


def fuse_block(module: nn.Module) -> None:
    """Let the last norm of a block add its shortcut and apply the ReLU after it."""
    if type(module) is Residual and isinstance(module.branch, nn.Sequential):
        last = module.branch[-1]
        if isinstance(last, FusedNorm) and last.activation == "none":
            last.activation = "relu"
            module.__class__ = FusedResidual
    elif (
        is_timm(module, "models.resnet", "BasicBlock", "Bottleneck")
        and module.se is None
        and module.drop_path is None
    ):
        last, activation = (module.bn3, module.act3) if hasattr(module, "bn3") else (module.bn2, module.act2)
        if isinstance(last, FusedNorm) and last.activation == "none" and type(activation) is nn.ReLU:
            last.activation = "relu"
            module.__class__ = FusedBlock


class FusedConv(nn.Conv2d):
    """Convolution by `overlap.convolve`."""

    cast: Tensor | None = None  # the weight in 16 bits, during a forward pass

    def forward(self, maps: Tensor) -> Tensor:
        if not (self.training and runs_kernels(maps)):
            return super().forward(maps)
        assert not isinstance(self.padding, str)
        return convolve(to_autocast(maps), self.weight, self.stride, self.padding, self.cast)


def cast_weights(model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Before a forward pass in training: convert the weights of all convolutions at once."""
    dtype = autocast_dtype(inputs[0])
    convs = [module for module in model.modules() if isinstance(module, FusedConv)]
    if model.training and runs_kernels(inputs[0]) and convs[0].weight.dtype != dtype:
        weights = [conv.weight.detach() for conv in convs]
        casts = [torch.empty_like(weight, dtype=dtype) for weight in weights]
        copy_all(casts, weights)
        for conv, cast in zip(convs, casts, strict=True):
            conv.cast = cast


def drop_casts(model: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    """After a forward pass: the next step changes the weights."""
    for module in model.modules():
        if isinstance(module, FusedConv):
            module.cast = None


class StemConv(nn.Conv2d):
    """First convolution of a network, with stride 2, by `stem_triton`; `same` pads as TensorFlow does."""

    same: bool

    def forward(self, maps: Tensor) -> Tensor:
        sides = padding_of(self, maps)
        if self.training and self.suits(maps):
            out = convolve_stem(maps, self.weight, sides, autocast_dtype(maps))
            return out if self.bias is None else out + self.bias.to(out.dtype)[:, None, None]
        return super().forward(F.pad(maps, sides) if self.same else maps)

    def suits(self, maps: Tensor) -> bool:
        """Whether the kernels run: blocks have more elements than images, and images need no gradient."""
        short = autocast_dtype(maps).itemsize == 2
        return runs_kernels(maps) and maps.numel() < 2**30 and short and not maps.requires_grad


def convolve_stem(maps: Tensor, weight: Tensor, sides: Sides, dtype: torch.dtype) -> Tensor:
    """Convolution with stride 2, as one with stride 1 on blocks of 2 x 2 pixels.

    Filters and image are padded with zeros at the left and top, so that filters start with a block, and then
    to whole blocks.
    """
    from icmixup.lab.models.stem_triton import convolve_blocks, make_blocks

    left, right, top, bottom = sides
    height, width = maps.shape[2] + top + bottom, maps.shape[3] + left + right
    side_y, side_x = weight.shape[2:]
    blocks_y, blocks_x = (side_y + top % 2 + 1) // 2, (side_x + left % 2 + 1) // 2
    weight = F.pad(
        weight, pad_front(left % 2, 2 * blocks_x - side_x) + pad_front(top % 2, 2 * blocks_y - side_y)
    )
    # As many blocks as windows, and those that the last window adds.
    high, wide = (height - side_y) // 2 + blocks_y, (width - side_x) // 2 + blocks_x
    unused = -4 * maps.shape[1] % TENSOR_CORE_CHANNELS
    weight = F.pad(merge_blocks(weight), (0, 0, 0, 0, 0, unused))
    blocks = make_blocks(maps, top + top % 2, left + left % 2, high, wide, weight.shape[1], dtype)
    return convolve_blocks(blocks, weight)


def pad_front(front: int, total: int) -> tuple[int, int]:
    return front, total - front


def merge_blocks(maps: Tensor) -> Tensor:
    """(B, C, H, W) to (B, 4 C, H / 2, W / 2), channels-last: the pixels of a block one after another."""
    batch, channels, height, width = maps.shape
    pixels = maps.permute(0, 2, 3, 1).reshape(batch, height // 2, 2, width // 2, 2, channels)
    blocks = pixels.transpose(2, 3).reshape(batch, height // 2, width // 2, 4 * channels)
    return blocks.permute(0, 3, 1, 2)


class DepthwiseConv(nn.Conv2d):
    """Depthwise convolution by the kernels of `depthwise_triton`; `same` as for StemConv."""

    same: bool

    def forward(self, maps: Tensor) -> Tensor:
        if self.training and runs_kernels(maps):
            from icmixup.lab.models.depthwise_triton import depthwise_conv

            return depthwise_conv(to_autocast(maps), self.weight, self.stride[0], padding_of(self, maps))
        return super().forward(F.pad(maps, padding_of(self, maps)) if self.same else maps)


class FusedPool(nn.MaxPool2d):
    """Max pooling of 3 x 3 pixels with stride 2, by the kernels of `pool_triton`."""

    def forward(self, maps: Tensor) -> Tensor:
        if self.training and runs_kernels(maps):
            from icmixup.lab.models.pool_triton import max_pool

            return max_pool(maps)
        out: Tensor = super().forward(maps)
        return out


class GlobalPool(nn.AdaptiveAvgPool2d):
    """The mean over all pixels, by `pool_triton.global_mean`."""

    def forward(self, maps: Tensor) -> Tensor:
        if self.training and runs_kernels(maps):
            from icmixup.lab.models.pool_triton import global_mean

            return global_mean(maps)
        return super().forward(maps)


def fuse_pool(module: nn.Module) -> None:
    if type(module) is nn.AdaptiveAvgPool2d and module.output_size in (1, (1, 1)):
        module.__class__ = GlobalPool
    if type(module) is nn.MaxPool2d and not module.ceil_mode and not module.return_indices:
        sizes = (module.kernel_size, module.stride, module.padding, module.dilation)
        if sizes == (3, 2, 1, 1):
            module.__class__ = FusedPool


def to_autocast(maps: Tensor) -> Tensor:
    """As autocast does for torch's own convolutions."""
    return maps.to(autocast_dtype(maps))


def autocast_dtype(maps: Tensor) -> torch.dtype:
    """The dtype in which torch's own convolutions would compute."""
    kind = maps.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else maps.dtype


def padding_of(conv: StemConv | DepthwiseConv, maps: Tensor) -> Sides:
    """Zeros at the left, right, top and bottom; with `same`, ceil(size / stride) pixels result."""
    if not conv.same:
        assert not isinstance(conv.padding, str)
        top, left = conv.padding
        return left, left, top, top
    sides: list[int] = []
    for size, kernel, stride in zip(
        maps.shape[:1:-1], conv.kernel_size[::-1], conv.stride[::-1], strict=True
    ):
        total = max((ceil(size / stride) - 1) * stride + kernel - size, 0)
        sides += [total // 2, total - total // 2]
    left, right, top, bottom = sides
    return left, right, top, bottom


def fuse_conv(module: nn.Module) -> None:
    """Make a StemConv, a DepthwiseConv or a FusedConv of a convolution of torch, of ours, or of timm."""
    same = is_timm(module, "layers", "Conv2dSame")
    if not isinstance(module, nn.Conv2d) or not (same or type(module) in (nn.Conv2d, Conv)):
        return
    plain = (
        set(module.dilation) == {1} and module.padding_mode == "zeros" and isinstance(module.padding, tuple)
    )
    if plain and module.groups == 1 and module.in_channels <= 4 and module.stride == (2, 2):
        module.__class__ = StemConv
        module.same = same  # type: ignore[assignment]
    elif plain and is_depthwise(module):
        module.__class__ = DepthwiseConv
        module.same = same  # type: ignore[assignment]
    elif plain and not same and is_whole(module):
        module.__class__ = FusedConv


def is_whole(conv: nn.Conv2d) -> bool:
    """Whether `overlap.convolve` computes a convolution: one group, and a weight that is a leaf.

    First layers have too few channels for tensor cores; our own `Conv` pads them already.
    """
    leaf = "weight" in conv._parameters  # not computed from others by a hook
    return leaf and conv.groups == 1 and conv.bias is None and conv.in_channels >= TENSOR_CORE_CHANNELS


def is_depthwise(conv: nn.Conv2d) -> bool:
    """Whether our kernels support a convolution: a filter of 3, 5 or 7 pixels per channel, stride 1 or 2."""
    square = conv.kernel_size in ((3, 3), (5, 5), (7, 7)) and conv.stride in ((1, 1), (2, 2))
    return square and conv.bias is None and conv.groups == conv.in_channels == conv.out_channels > 1
