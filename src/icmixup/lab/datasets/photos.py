"""Photos of different sizes as bytes: in memory, in a file, or on a GPU.

N photos, each (height, width, 3) bytes with its aspect ratio kept, lie one after another in one flat array.
A batch of them is a batch of windows: rectangles that are copied out of the photos.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

CHANNELS = 3
RESIDENT_BYTES = 256 << 20  # of a mapped file, after which the pages are given back to the system
DEVICE_SHARE = 0.3  # of a GPU's free memory that the photos may take


class Store:
    """All photos of a dataset: pixels (P, 3) uint8, sizes (N, 2), height and width, and offsets (N,), the
    first pixel of each photo."""

    def __init__(self, pixels: Tensor, sizes: Tensor, mapping: mmap.mmap | None = None) -> None:
        self.pixels, self.sizes, self.mapping = pixels, sizes, mapping
        self.offsets = photo_offsets(sizes)
        self.touched = 0  # bytes read from the mapping since its pages were given back
        self.copies: dict[torch.device, Tensor | None] = {}
        self.lock = threading.RLock()  # several runs on one GPU share the photos

    def photo(self, row: int) -> Tensor:
        """(height, width, 3) bytes of one photo, without a copy."""
        height, width = self.sizes[row].tolist()
        start = int(self.offsets[row])
        return self.pixels[start : start + height * width].view(height, width, CHANNELS)

    def release(self, read: int) -> None:
        """Count bytes read; from time to time, remove the mapping's pages from this process's memory.

        The system keeps them in its file cache while it has memory to spare.
        """
        if self.mapping is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        with self.lock:
            self.touched += read
            if self.touched > RESIDENT_BYTES:
                self.mapping.madvise(mmap.MADV_DONTNEED)
                self.touched = 0

    def on(self, device: torch.device) -> Tensor | None:
        """All pixels on a GPU, copied once, or None if they would take too much of its free memory."""
        with self.lock:
            if device not in self.copies:
                free, _ = torch.cuda.mem_get_info(device)
                fits = self.pixels.numel() <= DEVICE_SHARE * free
                self.copies[device] = self._copy(device) if fits else None
            return self.copies[device]

    def _copy(self, device: torch.device) -> Tensor:
        copied = torch.empty_like(self.pixels, device=device)
        step = RESIDENT_BYTES // (2 * CHANNELS)
        for source, target in zip(torch.split(self.pixels, step), torch.split(copied, step), strict=True):
            target.copy_(source)
            self.release(source.numel())
        # Runs on other streams read the copy, so it must be complete.
        torch.cuda.synchronize(device)
        return copied


def photo_offsets(sizes: Tensor) -> Tensor:
    """(N,) first pixel of each photo, from (N, 2) sizes."""
    lengths = sizes.prod(dim=1)
    return lengths.cumsum(0) - lengths


def photo_bytes(sizes: Tensor) -> int:
    """Bytes of all photos together."""
    return int(sizes.prod(dim=1).sum()) * CHANNELS


def map_store(path: Path, sizes: Tensor) -> Store:
    """The photos of a file, which is read page by page when they are used."""
    with path.open("rb") as file:
        # A private mapping: torch expects memory that it may write to, and never writes.
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    pixels = np.frombuffer(mapping, dtype=np.uint8).reshape(-1, CHANNELS)
    return Store(torch.from_numpy(pixels), sizes, mapping)


@dataclass(frozen=True, eq=False)
class Photos:
    """Some photos of a store, and the side of the square images that a network sees of them.

    It has the shape, dtype and device of the (N, 3, side, side) tensor that `square` returns.
    """

    store: Store
    rows: Tensor  # (N,) int64, on the CPU
    image_size: int
    interpolation: str = "bicubic"  # by which the files were resized
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    dtype = torch.uint8

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: Tensor | slice) -> Photos:
        return replace(self, rows=self.rows[rows.cpu() if isinstance(rows, Tensor) else rows])

    @property
    def shape(self) -> torch.Size:
        return torch.Size([len(self), CHANNELS, self.image_size, self.image_size])

    def dim(self) -> int:
        return len(self.shape)

    @property
    def sizes(self) -> Tensor:
        """(N, 2) height and width."""
        return self.store.sizes[self.rows]

    @property
    def short_side(self) -> int:
        """Pixels of the short side of every photo."""
        return int(self.sizes.min())

    def to(self, device: torch.device | str) -> Photos:
        """The same photos, whose windows are on another device."""
        return replace(self, device=torch.device(device))

    def square(self) -> Tensor:
        """(N, 3, side, side) uint8 on the device: the centre of each photo, as a network is tested on it."""
        side = self.image_size
        corner = ((self.sizes - side) / 2).round().long()
        boxes = torch.cat([corner, torch.full_like(corner, side)], dim=1)
        return self.windows(boxes).permute(0, 3, 1, 2).contiguous()

    def windows(self, boxes: Tensor) -> Tensor:
        """Copy a rectangle out of each photo.

        Args:
            boxes: (N, 4) int64 on the CPU: top, left, height and width, within the photo.

        Returns:
            (N, H, W, 3) uint8 on the device, H and W the largest height and width. Pixels beyond a smaller
            box are arbitrary.
        """
        pixels = self.pixels_on_gpu()
        return self._copy_windows(boxes) if pixels is None else self._gather_windows(pixels, boxes)

    def pixels_on_gpu(self) -> Tensor | None:
        """(P, 3) uint8 of the store on the device; None for a CPU, or if they do not fit."""
        return self.store.on(self.device) if self.device.type == "cuda" else None

    def place(self, boxes: Tensor) -> Tensor:
        """(N, 6) int64 on the CPU: the four numbers of each box, the photo's width and its first pixel."""
        return torch.cat([boxes, self.sizes[:, 1:], self.store.offsets[self.rows][:, None]], dim=1)

    def whole(self) -> Iterator[Tensor]:
        """(height, width, 3) uint8 of each photo on the CPU, not copied."""
        zeros = torch.zeros_like(self.sizes)
        return self.crops(torch.cat([zeros, self.sizes], dim=1))

    def crops(self, boxes: Tensor) -> Iterator[Tensor]:
        """(height, width, 3) uint8 of each box on the CPU, not copied; boxes as in `windows`."""
        for row, (top, left, height, width) in zip(self.rows.tolist(), boxes.tolist(), strict=True):
            yield self.store.photo(row)[top : top + height, left : left + width]
            self.store.release(height * width * CHANNELS)

    def _copy_windows(self, boxes: Tensor) -> Tensor:
        height, width = boxes[:, 2:].amax(dim=0).tolist()
        cuda = self.device.type == "cuda"
        copied = torch.zeros(len(self), height, width, CHANNELS, dtype=torch.uint8, pin_memory=cuda)
        for window, crop in zip(copied, self.crops(boxes), strict=True):
            window[: crop.shape[0], : crop.shape[1]] = crop
        return copied.to(self.device, non_blocking=True)

    def _gather_windows(self, pixels: Tensor, boxes: Tensor) -> Tensor:
        height, width = boxes[:, 2:].amax(dim=0).tolist()
        numbers = self.place(boxes).to(self.device, non_blocking=True)[:, :, None, None]
        top, left, h, w, stride, offset = numbers.unbind(1)
        y = torch.arange(height, device=self.device)[:, None]
        x = torch.arange(width, device=self.device)
        index = offset + (top + torch.minimum(y, h - 1)) * stride + left + torch.minimum(x, w - 1)
        return pixels[index]
