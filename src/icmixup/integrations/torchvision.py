"""torchvision: a batch transform like v2.MixUp, and a collate function for a DataLoader.

>>> mix = MixBatch(method="ic-mixup", num_classes=10)                            # after the loader
>>> loader = DataLoader(dataset, 128, shuffle=True, collate_fn=Collate(mix))     # or in its workers
>>> criterion = mix.criterion()                                                  # trains and validates
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import default_collate

from icmixup import Method, Mixer
from icmixup.integrations._versions import require

require("torchvision")

from torchvision import tv_tensors  # noqa: E402
from torchvision.transforms import v2  # noqa: E402

__all__ = ["Collate", "MixBatch"]

LabelsGetter = Callable[[Any], Any]


class MixBatch(v2.Transform):
    """Mix a batch of images and labels by any method that icmixup.Mixer takes.

    Takes what v2.MixUp takes, for example images and labels, or a dict with the key "labels", and returns the
    same structure with mixed images and (B, C) targets. Partners are drawn at random, while v2.MixUp pairs
    neighbours of the batch. A box of CutMix spans the last two dimensions of the images. In a DataLoader's
    workers random numbers are seeded by the loader.

    Args:
        method: a Method, or a name of METHODS.
        num_classes: C.
        class_counts: (C,) training images of each class; required if the method depends on class sizes.
        labels_getter: from the arguments of a call to its (B,) labels or (B, C) shares, a tensor of the batch
            itself and not a copy. By default the second item of a tuple, or the item "labels" or "label" of a
            dict.
    """

    def __init__(
        self,
        *,
        method: Method | str = "ic-mixup",
        num_classes: int,
        class_counts: Tensor | None = None,
        labels_getter: Literal["default"] | LabelsGetter = "default",
    ) -> None:
        super().__init__()
        self.mixer = Mixer(method, num_classes, class_counts)
        self.labels_getter = find_labels if labels_getter == "default" else labels_getter

    def criterion(self) -> nn.Module:
        """The method's loss of scores and mixed targets; of integer labels, cross-entropy."""
        return self.mixer.criterion()

    def forward(self, *inputs: Any) -> Any:
        batch = inputs if len(inputs) > 1 else inputs[0]
        labels = self.labels_getter(batch)
        leaves, structure = tree_flatten(batch)
        place, images = find_images(leaves, labels)
        check_among(leaves, labels)
        # As everywhere in torchvision the last two dimensions are those of the image, also of grey images
        # without channels and of videos (T, C, H, W).
        self.mixer.size = tuple(images.shape[-2:])
        mixed, targets = self.mixer(images.as_subclass(Tensor), labels)
        if isinstance(images, tv_tensors.TVTensor):
            mixed = tv_tensors.wrap(mixed, like=images)
        changed = [
            mixed if n == place else targets if leaf is labels else leaf for n, leaf in enumerate(leaves)
        ]
        return tree_unflatten(changed, structure)


class Collate:
    """Collate samples, then mix the batch: DataLoader(..., collate_fn=Collate(MixBatch(...))).

    Args:
        mix: from a batch to a mixed batch.
        collate: from a list of samples to a batch; torch's default_collate if not given.
    """

    def __init__(
        self, mix: Callable[[Any], Any], collate: Callable[[list[Any]], Any] = default_collate
    ) -> None:
        self.mix, self.collate = mix, collate

    def __call__(self, samples: list[Any]) -> Any:
        return self.mix(self.collate(samples))


def find_labels(batch: Any) -> Any:
    """The second item of a tuple, or the item "labels" or "label" of a dict."""
    if isinstance(batch, Sequence) and len(batch) > 1 and isinstance(batch[1], Tensor):
        return batch[1]
    names = [name for name in ("labels", "label") if isinstance(batch, Mapping) and name in batch]
    if not names:
        raise ValueError(
            f"no labels found in a batch of type {type(batch).__name__}; pass images and labels, a dict with "
            'the key "labels", or a labels_getter'
        )
    return batch[names[0]]


def check_among(leaves: list[Any], labels: Tensor) -> None:
    """Refuse labels that are not in the batch: its images would be mixed, and its labels would not."""
    if not any(leaf is labels for leaf in leaves):
        raise ValueError(
            f"labels_getter returned a tensor of shape {tuple(labels.shape)} that is not in the batch, so "
            "mixed targets cannot take its place; return the tensor of the batch itself, and convert or "
            "reshape labels before MixBatch"
        )


def find_images(leaves: list[Any], labels: Any) -> tuple[int, Tensor]:
    """Position and value of the one batch of images among the leaves of a batch."""
    if not isinstance(labels, Tensor) or labels.dim() == 0:
        given = f"of shape {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(
            f"labels must be a tensor of a whole batch, got {given}; collate the samples first, and call "
            "MixBatch behind the DataLoader or in Collate"
        )
    refused = (tv_tensors.BoundingBoxes, tv_tensors.Mask)
    if bad := [type(leaf).__name__ for leaf in leaves if isinstance(leaf, refused)]:
        raise ValueError(f"MixBatch mixes images and class labels, but the batch contains {', '.join(bad)}")
    found = [
        (n, leaf)
        for n, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf is not labels and leaf.dim() >= 3 and leaf.is_floating_point()
    ]
    if len(found) != 1 or len(found[0][1]) != len(labels):
        shapes = [f"{leaf.dtype} {tuple(leaf.shape)}" for leaf in leaves if isinstance(leaf, Tensor)]
        raise ValueError(
            f"expected one batch of {len(labels)} floating-point images beside the labels, got tensors "
            f"{', '.join(shapes)}; v2.ToDtype(torch.float32, scale=True) converts images"
        )
    return found[0]
