"""The training images of each epoch: shuffled, augmented, at fixed addresses for captured steps.

Small images are augmented once per epoch, all at once: `Feed`. Photos are augmented batch by batch, just
before the step that uses them: `PhotoFeed`. Examples of a torch Dataset are read batch by batch as well:
`ExampleFeed`. What is drawn depends on the seed and the epoch only.
"""

from __future__ import annotations

import math
from collections import deque

import torch
from torch import Tensor

from icmixup.contrast.fused import HAS_TRITON
from icmixup.lab.augment import (
    Augmentations,
    Drawn,
    apply_augmentation,
    augment,
    draw_augmentation,
    resize_each,
    resize_windows,
)
from icmixup.lab.datasets import Examples, Photos, Split
from icmixup.lab.training.ranks import rank, world_size
from icmixup.lab.training.recipe import Recipe, derive_seed, images_per_epoch, learning_rate
from icmixup.lab.training.step import Epoch

STEPS_AHEAD = 2  # that the host may prepare before a GPU has done them: each holds a batch of photos


def make_feed(recipe: Recipe, train: Split) -> Feed:
    """The feed that suits the images."""
    if isinstance(train.images, Examples):
        return ExampleFeed(recipe, train)
    return PhotoFeed(recipe, train) if isinstance(train.images, Photos) else Feed(recipe, train)


def augmentations(recipe: Recipe) -> Augmentations:
    """The settings of a recipe."""
    return Augmentations(**{name: getattr(recipe, name) for name in Augmentations._fields})


def sampling_weights(sampler: str, labels: Tensor, device: torch.device) -> Tensor | None:
    """(N,) chances of the images; None if each is drawn once.

    Class c is drawn with a chance in proportion to n_c^q, with q = 0 for "class-balanced" and 1/2 for
    "square-root" (Kang et al., 2020), so each of its images with n_c^(q - 1).
    """
    if sampler == "uniform":
        return None
    power = {"class-balanced": -1.0, "square-root": -0.5}[sampler]
    sizes = torch.bincount(labels).double()
    return (sizes[labels] ** power).to(device)


def crop_photos(photos: Photos, boxes: Tensor) -> Tensor:
    """(B, 3, side, side) uint8 on the device: the boxes of the photos, resized."""
    if photos.device.type == "cpu":
        return resize_each(photos.crops(boxes), photos.image_size)
    pixels = photos.pixels_on_gpu()
    if pixels is None or not HAS_TRITON:
        return resize_windows(photos.windows(boxes), boxes, photos.image_size)
    from icmixup.lab.augment.crop_triton import crop_resized  # here, because it imports Triton

    return crop_resized(pixels, photos.place(boxes).to(photos.device, non_blocking=True), photos.image_size)


class Feed:
    """Images of a tensor, or features: an epoch of them in one buffer."""

    def __init__(self, recipe: Recipe, train: Split) -> None:
        self.recipe, self.train = recipe, train
        self.device = train.images.device
        self.settings = augmentations(recipe)
        self.count = images_per_epoch(recipe, len(train))
        self.generator = self.make_generator()
        self.weights = sampling_weights(recipe.sampler, train.labels, self.generator.device)
        shape = (self.buffer_size(), *train.images.shape[1:])
        self.epoch = Epoch(
            torch.empty(shape, dtype=train.images.dtype, device=self.device),
            torch.empty_like(train.labels[: self.count]),
            torch.empty(math.ceil(self.count / recipe.batch_size), device=self.device),
            recipe.batch_size,
        )

    def make_generator(self) -> torch.Generator:
        return torch.Generator(self.device)

    def buffer_size(self) -> int:
        """Images that the buffer holds at a time."""
        return self.count

    def fill(self, number: int) -> None:
        """Shuffle and augment the images of epoch `number`, and set the learning rate of every step."""
        self.generator.manual_seed(derive_seed(self.recipe.seed, number, "order"))
        rows = self.draw_rows()
        self.epoch.labels.copy_(self.train.labels[rows.to(self.device)])
        self.fill_images(rows)
        steps = len(self.epoch.lrs)
        lrs = [learning_rate(self.recipe, number + k / steps) for k in range(steps)]
        self.epoch.lrs.copy_(torch.tensor(lrs))

    def draw_rows(self) -> Tensor:
        """(count,) rows of the training set: each image once, or by class with replacement."""
        if self.weights is None:
            rows = torch.randperm(len(self.train), generator=self.generator, device=self.generator.device)
            return rows[: self.count]
        return torch.multinomial(self.weights, self.count, replacement=True, generator=self.generator)

    def fill_images(self, rows: Tensor) -> None:
        images = self.train.images
        assert isinstance(images, Tensor)
        images = images[rows]
        if images.dtype == torch.uint8:  # features and other floats are not augmented
            images = augment(images, generator=self.generator, **self.settings._asdict())
        self.epoch.images.copy_(images)

    def prepare(self, step: int) -> None:
        """Make the images of a step available; here they are."""

    def batch(self, step: int) -> tuple[Tensor, Tensor, Tensor, bool]:
        """Images and labels of this rank, learning rate, and whether the batch is complete."""
        self.prepare(step)
        images, labels, lr, whole = self.epoch.batch(step)
        own = slice(rank(), None, world_size())
        return images[own], labels[own], lr, whole


class PhotoFeed(Feed):
    """Photos: the numbers of an epoch are drawn at once, and its images are made batch by batch."""

    def __init__(self, recipe: Recipe, train: Split) -> None:
        super().__init__(recipe, train)
        assert isinstance(train.images, Photos)
        self.photos = train.images
        self.drawn: Drawn | None = None
        self.marks: deque[torch.cuda.Event] = deque()  # of the last steps

    def make_generator(self) -> torch.Generator:
        return torch.Generator()  # on the CPU, which has to know the boxes

    def buffer_size(self) -> int:
        return min(self.recipe.batch_size, self.count)

    def fill_images(self, rows: Tensor) -> None:
        images = self.train.images
        assert isinstance(images, Photos)
        self.photos = images[rows]
        self.drawn = draw_augmentation(self.photos.shape, self.settings, self.generator, self.photos.sizes)

    def prepare(self, step: int) -> None:
        """Crop and augment the photos of a step; of several ranks, each makes its own images."""
        self.limit_lead()
        size = self.recipe.batch_size
        own = slice(step * size + rank(), (step + 1) * size, world_size())
        photos, drawn = self.photos[own], self.drawn_rows(own)
        squares = photos.square() if drawn.boxes is None else crop_photos(photos, drawn.boxes)
        augmented = apply_augmentation(squares, drawn, self.settings)
        self.epoch.images[rank() : rank() + len(photos) * world_size() : world_size()] = augmented

    def drawn_rows(self, rows: slice) -> Drawn:
        assert self.drawn is not None, "fill comes before prepare"
        return self.drawn.rows(rows)

    def limit_lead(self) -> None:
        """Wait until the GPU has done all but the last steps: batches in preparation take memory."""
        if self.device.type != "cuda":
            return
        self.marks.append(torch.cuda.current_stream(self.device).record_event())
        if len(self.marks) > STEPS_AHEAD:
            self.marks.popleft().synchronize()


class ExampleFeed(Feed):
    """Examples of a torch Dataset: read batch by batch, with the random transforms of the epoch."""

    def __init__(self, recipe: Recipe, train: Split) -> None:
        super().__init__(recipe, train)
        assert isinstance(train.images, Examples)
        self.examples, self.seed = train.images, 0

    def make_generator(self) -> torch.Generator:
        return torch.Generator()  # on the CPU, which reads the examples

    def buffer_size(self) -> int:
        return min(self.recipe.batch_size, self.count)

    def fill(self, number: int) -> None:
        self.seed = derive_seed(self.recipe.seed, number, "examples")
        super().fill(number)

    def fill_images(self, rows: Tensor) -> None:
        images = self.train.images
        assert isinstance(images, Examples)
        self.examples = images[rows]

    def prepare(self, step: int) -> None:
        """Read the examples of a step; of several ranks, each reads its own."""
        size = self.recipe.batch_size
        own = self.examples[slice(step * size + rank(), (step + 1) * size, world_size())]
        self.epoch.images[rank() : rank() + len(own) * world_size() : world_size()] = own.read(self.seed)
