"""Photos at full size: their pixels are Pillow's, whatever the file, and wherever they are kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from icmixup.lab.cli.loading import load_data, settle_image_size
from icmixup.lab.datasets import DataSpec, Photos, Preprocessing, choose_image_size, load_dataset
from icmixup.lab.datasets import cache as cache_module
from icmixup.lab.datasets.photos import Store, photo_bytes
from icmixup.lab.datasets.subsets import measure_statistics
from icmixup.lab.images.decode import LONGEST, ImageFile, Shape, decode_photo, read_shape
from icmixup.lab.training.recipe import Recipe

SIZES = [(160, 120), (120, 200), (130, 130), (400, 300), (300, 90), (97, 101)]  # width, height


def noise(size: tuple[int, int], seed: int = 0) -> Image.Image:
    """Smooth random colours, which resizing and JPEG keep."""
    small = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    return Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)


def save(path: Path, image: Image.Image, **options: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)


def make_photos(root: Path, per_class: int = 6, classes: str = "abc") -> list[Path]:
    """Photos of all SIZES in each class, and their paths in the order in which they are read."""
    for label, name in enumerate(classes):
        for number in range(per_class):
            size = SIZES[number % len(SIZES)]
            save(root / name / f"{number:03}.png", noise(size, seed=100 * label + number))
    return sorted(root.rglob("*.png"))


def as_file(path: Path) -> ImageFile:
    return ImageFile(str(path), lambda: path.open("rb"), 0, path)


def photos_of(split_images: torch.Tensor | Photos) -> Photos:
    assert isinstance(split_images, Photos)
    return split_images


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_test_images_are_those_of_timms_resize_and_centre_crop(interpolation: str, tmp_path: Path) -> None:
    make_photos(tmp_path / "set" / "train")
    paths = make_photos(tmp_path / "set" / "test")
    prepared = Preprocessing(image_size=72, crop_pct=0.9, interpolation=interpolation)
    data = load_dataset(DataSpec(str(tmp_path / "set")), tmp_path, preprocessing=prepared)
    assert (data.mean, data.std) == (prepared.mean, prepared.std)
    for path, image in zip(paths, data.test.square(), strict=True):
        photo = Image.open(path).convert("RGB")
        width, height = photo.size
        short = 80  # floor(72 / 0.9)
        size = (short * width // min(photo.size), short * height // min(photo.size))
        if max(size) > LONGEST * short:
            continue
        filter = Image.Resampling[interpolation.upper()]
        resized = np.asarray(photo.resize(size, filter))
        top, left = round((resized.shape[0] - 72) / 2), round((resized.shape[1] - 72) / 2)
        expected = resized[top : top + 72, left : left + 72]
        assert np.array_equal(image.permute(1, 2, 0).numpy(), expected)


def test_photos_keep_their_aspect_ratio_up_to_three_to_one(tmp_path: Path) -> None:
    sizes = [(160, 120), (120, 200), (1000, 2), (1, 1), (2000, 1500)]
    for number, size in enumerate(sizes):
        save(tmp_path / "a" / f"{number}.png", noise(size))
        save(tmp_path / "b" / f"{number}.png", noise(size))
    data = load_dataset(DataSpec(str(tmp_path), image_size=96), tmp_path)
    train, test = photos_of(data.train.images), photos_of(data.test.images)
    stored = {tuple(size) for size in [*train.sizes.tolist(), *test.sizes.tolist()]}
    short = int(96 / 0.875)
    assert stored == {
        (short, short * 160 // 120),
        (short * 200 // 120, short),
        (short, 3 * short),
        (short, short),
        (short, short * 2000 // 1500),
    }
    assert data.train.square().shape == (8, 3, 96, 96)


def odd_files() -> dict[str, tuple[Image.Image, dict[str, object]]]:
    """The same photo, dark above and bright below, in many formats and colour modes."""
    ramp = np.linspace(0, 255, 120).astype(np.uint8)[:, None].repeat(150, 1)
    grey = Image.fromarray(ramp)
    rgb = grey.convert("RGB")
    turned = Image.Exif()
    turned[0x0112] = 6
    return {
        "grey.png": (grey, {}),
        "deep.png": (Image.fromarray(ramp.astype(np.uint16) * 257), {}),
        "palette.png": (grey.convert("P"), {}),
        "alpha.png": (rgb.convert("RGBA"), {}),
        "cmyk.jpg": (rgb.convert("CMYK"), {"quality": 95}),
        "turned.jpg": (rgb.rotate(90, expand=True), {"exif": turned, "quality": 95}),
        "animated.gif": (rgb, {"save_all": True, "append_images": [Image.new("RGB", (150, 120), "red")]}),
        "animated.webp": (
            rgb,
            {"save_all": True, "append_images": [Image.new("RGB", (150, 120), "red")], "lossless": True},
        ),
        "large.jpg": (rgb.resize((3000, 2400), Image.Resampling.BICUBIC), {"quality": 90}),
    }


@pytest.mark.parametrize("kind", odd_files())
def test_every_format_and_colour_mode_becomes_the_same_photo(kind: str, tmp_path: Path) -> None:
    image, options = odd_files()[kind]
    save(tmp_path / kind, image, **options)
    file = as_file(tmp_path / kind)
    shape = read_shape(file)
    assert isinstance(shape, Shape)
    expected = Shape(100, 125)
    assert shape.resized(100) == expected
    photo = decode_photo(file, 100, "bicubic", expected)
    assert isinstance(photo, np.ndarray)
    assert photo.shape == (100, 125, 3)
    ramp = np.linspace(0, 255, 100)[:, None, None]
    assert np.abs(photo.astype(float) - ramp).max() < 12


def test_a_reduced_jpeg_is_close_to_the_whole_one(tmp_path: Path) -> None:
    save(tmp_path / "large.jpg", noise((1600, 1200)), quality=95)
    file = as_file(tmp_path / "large.jpg")
    reduced = decode_photo(file, 128, "bicubic", Shape(128, 170))
    whole = Image.open(tmp_path / "large.jpg").resize((170, 128), Image.Resampling.BICUBIC)
    assert np.abs(np.asarray(reduced, dtype=int) - np.asarray(whole, dtype=int)).max() <= 3


def test_only_known_formats_are_opened_whatever_the_suffix(tmp_path: Path) -> None:
    make_photos(tmp_path / "set")
    noise((120, 120)).save(tmp_path / "set" / "a" / "other.png", format="PPM")
    data = load_dataset(DataSpec(str(tmp_path / "set"), image_size=96), tmp_path)
    assert len(data.skipped) == 1
    assert "other.png: not an image in a known format" in data.skipped[0]


@pytest.mark.parametrize("in_memory", [True, False])
def test_unreadable_photos_are_named_and_skipped_also_from_the_cache(
    in_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not in_memory:
        monkeypatch.setattr(cache_module, "MEMORY_BYTES", 0)
    paths = make_photos(tmp_path / "set")
    whole = paths[0].read_bytes()
    (tmp_path / "set" / "a" / "cut.png").write_bytes(whole[: len(whole) // 2])  # its header is readable
    (tmp_path / "set" / "b" / "text.png").write_text("this is not a photo")
    (tmp_path / "set" / "c" / "empty.jpg").touch()
    for _ in range(2):
        data = load_dataset(DataSpec(str(tmp_path / "set"), image_size=96), tmp_path)
        assert [Path(line.split(": ")[0]).name for line in data.skipped] == [
            "cut.png",
            "text.png",
            "empty.jpg",
        ]
        assert len(data.train) + len(data.test) == 18
        assert data.train.square().shape[1:] == (3, 96, 96)


def test_photos_in_memory_and_in_the_cache_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_photos(tmp_path / "set")
    spec = DataSpec(str(tmp_path / "set"), image_size=96)
    memory = load_dataset(spec, tmp_path)
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(cache_module, "MEMORY_BYTES", 0)
    disk = load_dataset(spec, tmp_path)
    assert photos_of(disk.train.images).store.mapping is not None
    for one, two in ((memory.train, disk.train), (memory.test, disk.test)):
        assert torch.equal(one.square(), two.square())
        assert torch.equal(one.labels, two.labels)
    assert memory.mean == disk.mean


@pytest.fixture(scope="module")
def split_photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight photos of each class for training and two for testing, which no test changes."""
    root = tmp_path_factory.mktemp("split") / "set"
    make_photos(root / "train", per_class=8)
    make_photos(root / "test", per_class=2)
    return root


@pytest.mark.parametrize("prefix", ["", "hf:"])
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"imbalance": 0.25}, [8, 4, 2]),
        ({"imbalance": 4}, [8, 4, 2]),
        ({"fraction": 0.5}, [4, 4, 4]),
        ({"per_class": 3}, [3, 3, 3]),
        ({"per_class": 6, "fraction": 0.5, "imbalance": 1 / 3}, [3, 1, 1]),
    ],
)
def test_subsets_of_folders_and_hub_datasets_follow_the_rule_of_cifar(
    prefix: str, settings: dict[str, float], expected: list[int], split_photos: Path, tmp_path: Path
) -> None:
    if prefix:
        pytest.importorskip("datasets")
    spec = DataSpec(f"{prefix}{split_photos}", image_size=96, **settings)  # type: ignore[arg-type]
    data = load_dataset(spec, tmp_path / "data")
    assert data.class_counts.tolist() == expected
    assert len(data.train.images) == sum(expected)
    assert torch.bincount(data.test.labels).tolist() == [2, 2, 2]
    whole = load_dataset(DataSpec(spec.dataset, image_size=96), tmp_path / "data").train
    known = {
        image.numpy().tobytes(): label for image, label in zip(whole.square(), whole.labels, strict=True)
    }
    found = [known[image.numpy().tobytes()] for image in data.train.square()]
    assert found == data.train.labels.tolist()


def test_a_fifth_of_the_photos_is_held_out_and_none_is_in_both_parts(tmp_path: Path) -> None:
    make_photos(tmp_path / "set", per_class=10)
    data = load_dataset(DataSpec(str(tmp_path / "set"), image_size=96), tmp_path)
    train, test = photos_of(data.train.images), photos_of(data.test.images)
    assert (len(train), len(test)) == (24, 6)
    assert sorted([*train.rows.tolist(), *test.rows.tolist()]) == list(range(30))


@pytest.mark.parametrize(
    ("size", "on_gpu", "expected"),
    [
        ((40, 40), True, None),
        ((50, 40), True, 40),
        ((100, 100), False, 96),
        ((100, 100), True, 96),
        ((500, 360), False, 96),
        ((500, 360), True, 224),
        ((66, 80), True, 64),
    ],
)
def test_the_size_is_chosen_from_the_photos_and_the_device(
    size: tuple[int, int], on_gpu: bool, expected: int | None, tmp_path: Path
) -> None:
    for name in "ab":
        for number in range(2):
            save(tmp_path / name / f"{number}.png", noise(size))
    assert choose_image_size(str(tmp_path), tmp_path, on_gpu=on_gpu) == expected
    assert choose_image_size("digits", tmp_path, on_gpu=on_gpu) is None


def random_store(count: int, short: int = 20) -> Store:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(short, 2 * short, (count, 2), generator=generator)
    pixels = torch.randint(256, (photo_bytes(sizes) // 3, 3), generator=generator).to(torch.uint8)
    return Store(pixels, sizes)


def test_a_gather_of_windows_equals_slices_of_the_photos() -> None:
    store = random_store(9)
    photos = Photos(store, torch.tensor([4, 0, 8, 4]), 16)
    boxes = torch.tensor([[0, 0, 3, 5], [2, 1, 7, 2], [0, 4, 1, 1], [1, 1, 16, 16]])
    gathered, copied = photos._gather_windows(store.pixels, boxes), photos._copy_windows(boxes)
    assert gathered.shape == copied.shape == (4, 16, 16, 3)
    for number, (top, left, height, width) in enumerate(boxes.tolist()):
        row = int(photos.rows[number])
        start = int(store.sizes[:row].prod(dim=1).sum())
        h, w = store.sizes[row].tolist()
        photo = store.pixels[start : start + h * w].view(h, w, 3)
        expected = photo[top : top + height, left : left + width]
        assert torch.equal(gathered[number, :height, :width], expected)
        assert torch.equal(copied[number, :height, :width], expected)


def test_statistics_of_photos_are_those_of_their_centres() -> None:
    photos = Photos(random_store(30), torch.arange(30), 16)
    assert measure_statistics(photos) == measure_statistics(photos.square())


READ_AN_EPOCH = """
import sys
from pathlib import Path
import torch
from icmixup.lab.datasets import cache, photos, DataSpec, Preprocessing, load_dataset
from icmixup.lab.training.feed import make_feed
from icmixup.lab.training.recipe import Recipe

torch.set_num_threads(1)
cache.MEMORY_BYTES, photos.RESIDENT_BYTES = 0, int(sys.argv[2])
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
root = Path(sys.argv[1])
# With these constants no photo is read to measure them.
data = load_dataset(DataSpec(str(root / "set")), root, preprocessing=Preprocessing())
store = data.train.images.store
feed = make_feed(Recipe(dataset="x", batch_size=16, random_resized_crop=0.2, padding=0), data.train)
feed.fill(0)
feed.prepare(0)
before = peak()
for step in range(len(feed.epoch.lrs)):
    feed.prepare(step)
print(store.pixels.numel() // 1024, peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_an_epoch_of_photos_from_the_cache_needs_little_memory(tmp_path: Path) -> None:
    for name in "ab":
        for number in range(250):
            save(tmp_path / "set" / name / f"{number}.png", noise((8, 8), number))

    def measure(resident: int) -> tuple[int, int]:
        command = [sys.executable, "-c", READ_AN_EPOCH, str(tmp_path), str(resident)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        size, growth = done.stdout.split()
        return int(size), int(growth)

    size, growth = measure(4 << 20)
    assert size > 60_000  # kB of photos
    assert growth < 25_000
    assert measure(1 << 40)[1] > growth + 15_000  # without giving pages back, they add up


def test_a_run_on_photos_records_and_prints_the_size_it_chose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_photos(tmp_path / "set" / "train", per_class=2)
    make_photos(tmp_path / "set" / "test", per_class=1)
    (tmp_path / "set" / "train" / "a" / "broken.jpg").write_text("nothing")
    recipe = Recipe(dataset=str(tmp_path / "set"))
    settled = settle_image_size(recipe, tmp_path, "cpu")
    assert settled.image_size == 96
    assert "images of 96 x 96 pixels, chosen from the files and the device" in capsys.readouterr().err
    data = load_data(settled, tmp_path)
    assert data.train.images.shape == (6, 3, 96, 96)
    assert "1 file could not be read and will not be used, the first is" in capsys.readouterr().err
    assert settle_image_size(settled, tmp_path, "cpu") is settled
    assert settle_image_size(Recipe(dataset="digits"), tmp_path, "cpu").image_size is None


def test_the_fingerprint_of_photos_changes_with_pixels_beyond_the_centre(tmp_path: Path) -> None:
    paths = make_photos(tmp_path / "set")
    spec = DataSpec(str(tmp_path / "set"), image_size=72)
    first, again = (load_dataset(spec, tmp_path).fingerprint for _ in range(2))
    assert first == again
    with Image.open(paths[0]) as image:  # 160 x 120: its left edge is not in the centre
        image.paste((1, 2, 3), (0, 0, 4, 120))
        image.save(paths[0])
    assert load_dataset(spec, tmp_path).fingerprint != first


def test_splits_know_their_files_and_how_they_were_separated(tmp_path: Path) -> None:
    make_photos(tmp_path / "set" / "Training", per_class=2)
    make_photos(tmp_path / "set" / "Validation", per_class=1)
    data = load_dataset(DataSpec(str(tmp_path / "set"), image_size=72), tmp_path)
    assert data.train.file_names[:2] == ("Training/a/000.png", "Training/a/001.png")
    assert data.test.file_names == ("Validation/a/000.png", "Validation/b/000.png", "Validation/c/000.png")
    assert (data.split_by, data.original_size) == (
        "folders Training and Validation",
        "160 x 120 to 120 x 200",
    )
