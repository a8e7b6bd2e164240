"""Files that only look like images: each is named and skipped, and none reaches an unusual decoder."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from icmixup.lab.cli import main
from icmixup.lab.datasets import load_dataset
from icmixup.lab.datasets.subsets import DataSpec

EPS = (
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 40\n%%EndComments\n(/etc/passwd) run\nshowpage\n%%EOF\n"
)


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, pixels: bytes) -> bytes:
    """A PNG of 8-bit grey whose header may claim any size."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = (png_chunk(b"IHDR", header), png_chunk(b"IDAT", zlib.compress(pixels)), png_chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def jpeg_bytes(tmp_path: Path) -> bytes:
    Image.fromarray(np.zeros((80, 80, 3), dtype=np.uint8)).save(tmp_path / "whole.jpg")
    return (tmp_path / "whole.jpg").read_bytes()


def saved_as(kind: str) -> Callable[[Path], bytes]:
    def content(tmp_path: Path) -> bytes:
        Image.new("RGB", (80, 80)).save(tmp_path / "other", format=kind)
        return (tmp_path / "other").read_bytes()

    return content


HOSTILE: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "postscript.png": (lambda _: EPS, "not an image in a known format"),
    "postscript.tif": (lambda _: EPS, "not an image in a known format"),
    "icons.png": (saved_as("ICO"), "not an image in a known format"),
    "pixmap.jpg": (saved_as("PPM"), "not an image in a known format"),
    "document.jpg": (saved_as("PDF"), "not an image in a known format"),
    "targa.png": (saved_as("TGA"), "not an image in a known format"),
    "page.png": (lambda _: b"<html><script>alert(1)</script></html>", "not an image in a known format"),
    "drawing.png": (lambda _: b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image in a known format"),
    "empty.png": (lambda _: b"", "not an image in a known format"),
    "zeros.jpg": (lambda _: bytes(1000), "not an image in a known format"),
    "bomb.png": (lambda _: png(50_000, 50_000, bytes(1000)), "decompression bomb"),
    "flat.png": (lambda _: png(0, 0, b""), ""),
    "short.png": (lambda _: png(80, 80, bytes(10)), ""),
    "cut.jpg": (lambda folder: jpeg_bytes(folder)[:400], ""),
}


def make_photos(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for label in ("a", "b"):
        (folder / label).mkdir(parents=True)
        for number in range(4):
            pixels = rng.integers(0, 256, (80, 80, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / label / f"{number}.png")


@pytest.fixture
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if Pillow reaches for a PostScript interpreter."""
    from PIL import EpsImagePlugin

    def reached(*args: object, **kwargs: object) -> None:
        raise AssertionError("PostScript was interpreted")

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", reached)
    monkeypatch.setattr(EpsImagePlugin, "has_ghostscript", reached)
    monkeypatch.setattr(EpsImagePlugin.EpsImageFile, "_open", reached)


@pytest.mark.parametrize("size", [32, 96], ids=["small", "photos"])
@pytest.mark.usefixtures("no_interpreter")
def test_a_file_that_is_no_image_is_named_and_skipped(size: int, tmp_path: Path) -> None:
    make_photos(tmp_path / "set")
    for name, (content, _) in HOSTILE.items():
        (tmp_path / "set" / "a" / name).write_bytes(content(tmp_path))
    data = load_dataset(DataSpec(str(tmp_path / "set"), image_size=size), tmp_path)
    assert len(data.train) + len(data.test) == 8
    reasons = dict(line.rpartition("/")[2].split(": ", 1) for line in data.skipped)
    assert reasons.keys() == HOSTILE.keys()
    for name, (_, sentence) in HOSTILE.items():
        assert sentence in reasons[name], name


def test_a_folder_without_a_readable_image_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for label in ("a", "b"):
        (tmp_path / "set" / label).mkdir(parents=True)
        for number in range(3):
            (tmp_path / "set" / label / f"{number}.png").write_bytes(EPS)
    assert main(["data", "check", str(tmp_path / "set")]) != 0
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    assert "not an image in a known format" in printed.out + printed.err


@pytest.mark.parametrize("size", [32, 96], ids=["small", "photos"])
def test_a_link_that_leads_nowhere_or_to_itself_is_named_and_skipped(size: int, tmp_path: Path) -> None:
    make_photos(tmp_path / "set")
    (tmp_path / "set" / "a" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    (tmp_path / "set" / "a" / "loop.png").symlink_to(tmp_path / "set" / "a" / "loop.png")
    data = load_dataset(DataSpec(str(tmp_path / "set"), image_size=size), tmp_path)
    assert len(data.train) + len(data.test) == 8
    assert [Path(line.split(": ")[0]).name for line in data.skipped] == ["gone.png", "loop.png"]
