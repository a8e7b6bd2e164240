"""The training images of each epoch: shuffled, augmented, at fixed addresses for captured steps.

Small images are augmented once per epoch, all at once: `Feed`. Photos are augmented batch by batch, on a GPU
while earlier steps run: `PhotoFeed`. Examples of a torch Dataset are read batch by batch as well:
`ExampleFeed`. What is drawn depends on the seed and the epoch only.
"""

from __future__ import annotations

import functools
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
    mirror,
    resize_each,
    resize_windows,
)
from icmixup.lab.datasets import Examples, Photos, Split
from icmixup.lab.training.ranks import rank, world_size
from icmixup.lab.training.recipe import Recipe, derive_seed, images_per_epoch, learning_rate
from icmixup.lab.training.step import Epoch

STEPS_AHEAD = 2  # that the host may prepare before a GPU begins them: each holds a batch of photos


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


def crop_photos(photos: Photos, boxes: Tensor, flipped: Tensor | None = None) -> Tensor:
    """(B, 3, side, side) uint8 on the device: the boxes of the photos, resized, some of them mirrored."""
    if photos.device.type == "cpu":
        return mirror(resize_each(photos.crops(boxes), photos.image_size), flipped)
    pixels = photos.pixels_on_gpu()
    if pixels is None or not HAS_TRITON:
        return mirror(resize_windows(photos.windows(boxes), boxes, photos.image_size), flipped)
    from icmixup.lab.augment.crop_triton import crop_resized  # here, because it imports Triton

    places = photos.place(boxes).to(photos.device, non_blocking=True)
    flags = None if flipped is None else flipped.to(photos.device, non_blocking=True)
    return crop_resized(pixels, places, photos.image_size, flags)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, through pinned memory: otherwise the host waits for all queued steps."""
    pinned = tensor.pin_memory() if device.type == "cuda" and not tensor.is_cuda else tensor
    return pinned.to(device, non_blocking=True)


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream on which this thread makes batches while steps run on its own one; None for a CPU."""
    return stream_beside(torch.cuda.current_stream(device)) if device.type == "cuda" else None


@functools.cache
def stream_beside(main: torch.cuda.Stream) -> torch.cuda.Stream:
    """One for each stream, since every stream with a matrix product keeps a workspace.

    torch hands out 32 streams of each priority in turn. Those of high priority are never the stream of a
    capture, which would record what is run on it.
    """
    return torch.cuda.Stream(main.device, priority=-1)  # type: ignore[no-untyped-call]


class Feed:
    """Images of a tensor, or features: an epoch of them in one buffer."""

    by_batch = False  # whether the buffer holds one batch at a time, made from what the CPU draws

    def __init__(self, recipe: Recipe, train: Split) -> None:
        self.recipe, self.train = recipe, train
        self.device = train.images.device
        self.settings = augmentations(recipe)
        self.count = images_per_epoch(recipe, len(train))
        self.generator = torch.Generator("cpu" if self.by_batch else self.device)
        self.weights = sampling_weights(recipe.sampler, train.labels, self.generator.device)
        size = min(recipe.batch_size, self.count) if self.by_batch else self.count
        shape = (size, *train.images.shape[1:])
        self.epoch = Epoch(
            torch.empty(shape, dtype=train.images.dtype, device=self.device),
            torch.empty_like(train.labels[: self.count]),
            torch.empty(math.ceil(self.count / recipe.batch_size), device=self.device),
            recipe.batch_size,
        )

    def fill(self, number: int) -> None:
        """Shuffle and augment the images of epoch `number`, and set the learning rate of every step."""
        self.generator.manual_seed(derive_seed(self.recipe.seed, number, "order"))
        rows = self.draw_rows()
        self.epoch.labels.copy_(self.train.labels[send(rows, self.device)])
        self.fill_images(rows)
        steps = len(self.epoch.lrs)
        lrs = [learning_rate(self.recipe, number + k / steps) for k in range(steps)]
        self.epoch.lrs.copy_(send(torch.tensor(lrs), self.device))

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

    def start_first(self) -> None:
        """Start to make the images of the first step while a GPU is busy; here there is nothing to do."""

    def prepare(self, step: int) -> None:
        """Make the images of a step available; here they are."""

    def batch(self, step: int) -> tuple[Tensor, Tensor, Tensor, bool]:
        """Images and labels of this rank, learning rate, and whether the batch is complete."""
        self.prepare(step)
        images, labels, lr, whole = self.epoch.batch(step)
        own = slice(rank(), None, world_size())
        return images[own], labels[own], lr, whole

    def own_rows(self, step: int) -> slice:
        """This rank's rows of a step, among all of the epoch."""
        size = self.recipe.batch_size
        return slice(step * size + rank(), (step + 1) * size, world_size())

    def put(self, own: Tensor) -> None:
        """Put this rank's images of a step into the buffer."""
        self.epoch.images[rank() : rank() + len(own) * world_size() : world_size()] = own


class PhotoFeed(Feed):
    """Photos: the numbers of an epoch are drawn at once, and its images are made batch by batch."""

    by_batch = True  # the CPU has to know the boxes

    def __init__(self, recipe: Recipe, train: Split) -> None:
        super().__init__(recipe, train)
        assert isinstance(train.images, Photos)
        self.photos = train.images
        self.drawn: Drawn | None = None
        self.first: Tensor | None = None  # the batch of the first step, if it is made already
        # The last batches, and when the GPU has copied them into the buffer.
        self.queued: deque[tuple[torch.cuda.Event, Tensor]] = deque()
        if (side := side_stream(self.device)) is not None:  # memory of an earlier feed may still be read
            side.wait_stream(torch.cuda.current_stream(self.device))

    def fill_images(self, rows: Tensor) -> None:
        images = self.train.images
        assert isinstance(images, Photos)
        self.photos = images[rows]
        self.drawn = draw_augmentation(self.photos.shape, self.settings, self.generator, self.photos.sizes)
        self.first = None

    def start_first(self) -> None:
        if self.device.type == "cuda":
            self.first = self.make_batch(0)

    def prepare(self, step: int) -> None:
        """Put the photos of a step into the buffer; of several ranks, each makes its own images."""
        first, self.first = self.first, None
        batch = first if step == 0 and first is not None else self.make_batch(step)
        if (side := side_stream(self.device)) is not None:
            torch.cuda.current_stream(self.device).wait_stream(side)
        self.put(batch)
        self.limit_lead(batch)

    def make_batch(self, step: int) -> Tensor:
        """(B, 3, side, side) uint8: crop and augment this rank's photos of a step, on the side stream.

        The side stream never waits for steps: of what they write it reads nothing.
        """
        own = self.own_rows(step)
        assert self.drawn is not None, "fill comes before prepare"
        photos, drawn = self.photos[own], self.drawn.rows(own)
        with torch.cuda.stream(side_stream(self.device)):
            if drawn.boxes is None:
                squares = photos.square()
            elif self.settings.rotation or drawn.geometry is None:
                squares = crop_photos(photos, drawn.boxes)
            else:  # then a flip is all of the geometry
                squares = crop_photos(photos, drawn.boxes, drawn.geometry.flipped)
                drawn = drawn._replace(geometry=None)
            return apply_augmentation(squares, drawn, self.settings)

    def limit_lead(self, batch: Tensor) -> None:
        """Wait until the GPU has copied all but the last batches.

        They take memory, and the side stream would reuse it at once if they were not kept here.
        """
        if self.device.type != "cuda":
            return
        self.queued.append((torch.cuda.current_stream(self.device).record_event(), batch))
        if len(self.queued) > STEPS_AHEAD:
            copied, _ = self.queued[0]
            copied.synchronize()
            self.queued.popleft()


class ExampleFeed(Feed):
    """Examples of a torch Dataset: read batch by batch, with the random transforms of the epoch."""

    by_batch = True  # the CPU reads the examples

    def __init__(self, recipe: Recipe, train: Split) -> None:
        super().__init__(recipe, train)
        assert isinstance(train.images, Examples)
        self.examples, self.seed = train.images, 0

    def fill(self, number: int) -> None:
        self.seed = derive_seed(self.recipe.seed, number, "examples")
        super().fill(number)

    def fill_images(self, rows: Tensor) -> None:
        images = self.train.images
        assert isinstance(images, Examples)
        self.examples = images[rows]

    def prepare(self, step: int) -> None:
        """Read the examples of a step; of several ranks, each reads its own."""
        self.put(self.examples[self.own_rows(step)].read(self.seed))
