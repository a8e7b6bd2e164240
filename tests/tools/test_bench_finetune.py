"""bench/finetune.py: how it reads what train.py prints, and prepares photos for both programs."""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path

import pytest
from PIL import Image

LINE = (
    "Train: {} [{:>4d}/100 ( 14%)]  Loss: 8.28 (8.28)  Time: 0.030s, 4266.67/s  (0.040s, 3200.00/s)  "
    "LR: 2.000e-04  Data: 0.019 (0.010)"
)


@pytest.fixture(scope="module", autouse=True)
def _bench() -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))


def test_a_line_of_train_py_is_read_and_other_lines_are_not() -> None:
    from finetune import parse_update

    update = parse_update(LINE.format(2, 45), now=7.0)
    assert update == (7.0, 2, 45, 100, 0.040, 3200.0, 0.010)
    assert parse_update("Test: [   0/3]  Time: 0.496 (0.496)  Loss:   3.703 ( 3.703)", now=7.0) is None


def test_the_speed_of_train_py_leaves_out_the_first_epoch_and_batches_that_were_prefetched() -> None:
    from finetune import parse_update, training_speed

    def lines(step: float, late: float) -> list:
        """A slow epoch 0, then one whose updates take `step` seconds, and `late` seconds after the 20th."""
        updates = [parse_update(LINE.format(0, n), now=float(n)) for n in range(0, 100, 10)]
        for n in range(0, 100, 10):
            updates.append(
                parse_update(LINE.format(1, n), now=1000 + (n * step if n <= 20 else 0.1 + n * late))
            )
        return updates

    # Ten loader processes have 20 batches ready, so updates 20 to 90 count.
    assert training_speed(lines(0.02, 0.02), 100, workers=10) == pytest.approx(70 * 100 / (0.1 + 70 * 0.02))
    # Slower than what train.py prints over whole epochs: that counts.
    assert training_speed(lines(0.02, 1.0), 100, workers=10) == 3200.0
    with pytest.raises(ValueError, match="printed no updates"):
        training_speed([], 100, workers=10)


def write_photos(folder: Path, size: tuple[int, int] = (20, 30)) -> Path:
    """One photo in each of two classes, for training and for testing."""
    for part in ("train", "test"):
        for name in ("a", "b"):
            (folder / part / name).mkdir(parents=True)
            Image.new("RGB", size).save(folder / part / name / "1.webp")
    return folder


def sizes(folder: Path) -> set[tuple[int, int]]:
    from finetune import list_photos

    found = set()
    for path in list_photos(folder):
        with Image.open(path) as image:
            found.add(image.size)
    return found


def test_webp_photos_become_jpegs_for_both_programs_and_links_multiply_the_training_photos(
    tmp_path: Path,
) -> None:
    from finetune import as_jpegs, link_copies, list_photos

    jpegs = as_jpegs(write_photos(tmp_path / "photos"), tmp_path / "jpegs")
    assert [path.suffix for path in list_photos(jpegs)] == [".jpg"] * 4
    assert as_jpegs(jpegs, tmp_path / "unused") == jpegs
    links = link_copies(jpegs, tmp_path / "links", copies=3)
    assert len(list_photos(links / "train")) == 6
    assert len(list_photos(links / "test")) == 2
    assert sizes(links) == {(20, 30)}


def test_photos_are_resized_to_a_short_side_with_their_aspect_ratio(tmp_path: Path) -> None:
    from finetune import as_jpegs, median_side

    photos = write_photos(tmp_path / "photos", (300, 200))
    jpegs = as_jpegs(photos, tmp_path / "jpegs")
    large = as_jpegs(jpegs, tmp_path / "large", side=401)  # JPEGs are resized as well
    assert sizes(large) == {(602, 401)}
    assert sizes(as_jpegs(photos, tmp_path / "small", side=50)) == {(75, 50)}
    assert (median_side(jpegs), median_side(large)) == (200, 401)


def test_resizing_ends_at_the_limit(tmp_path: Path) -> None:
    from finetune import as_jpegs

    with pytest.raises(TimeoutError):
        as_jpegs(write_photos(tmp_path / "photos"), tmp_path / "jpegs", side=3000, limit=0.0)


def make_row(form: str, speed: float, side: int, settings: str = "") -> dict[str, object]:
    known = {"part": "speed", "model": "m", "settings": settings}
    return {**known, "form": form, "images_per_second": speed, "photo_side": side}


def test_speeds_are_compared_for_each_size_of_photos_and_never_compiled_with_not_compiled(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from finetune import best_setting, print_speed

    rows = [
        make_row("ours, graph", 100.0, 256),
        make_row("ours, compiled", 160.0, 256),
        make_row("train.py", 80.0, 256, "16+fused"),
        make_row("train.py", 70.0, 256, "12+fused"),
        make_row("train.py", 200.0, 256, "16+fused+compile"),
        make_row("train.py", 10.0, 1200, "16+fused"),
        make_row("train.py", 20.0, 1200, "12+fused"),
    ]
    print_speed(rows, "m")
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("m, photos of 256 pixels: 0.80 times train.py (ours, compiled 160 images/s")
    assert second.startswith("m, photos of 1200 pixels: 5.00 times train.py (ours, graph 100 images/s")
    settings = [str(row["settings"]) for row in rows[2:5]]
    assert best_setting(rows, "m", settings, photo_side=256) == "16+fused"
    assert best_setting(rows, "m", settings, photo_side=1200) == "12+fused"


def test_what_is_compiled_comes_last_and_only_for_the_first_size_of_photos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import finetune
    import torch

    calls: list[str] = []

    def record(name: str) -> None:
        """Replace a measurement by a note of its name, its size of photos and its texts."""

        def note(bench: object, *given: object) -> None:
            sides = [str(one.side) for one in given if isinstance(one, finetune.PhotoFolder)]
            calls.append(" ".join([name, *sides, *(one for one in given if isinstance(one, str))]))

        monkeypatch.setattr(finetune, f"measure_{name}", note)

    for name in ("decoder", "decoding", "augmentation", "ours", "timm", "network", "compare", "timm_run"):
        record(name)
    monkeypatch.setattr(finetune, "load_copies", lambda bench, photos: "data")
    monkeypatch.setattr(finetune, "print_summary", lambda bench: None)
    args = argparse.Namespace(
        parts=finetune.PARTS,
        forms=finetune.FORMS,
        models=["m"],
        timm_settings=["2+compile", "2"],
        workers=[1],
        wall_sides=[9],
    )
    sides = [finetune.PhotoFolder(side, side or 5, tmp_path, tmp_path) for side in (0, 9)]
    gc.freeze()  # each measurement ends with a collection, of all that other tests have imported too
    try:
        finetune.measure_all(finetune.Bench(args, torch.device("cpu"), tmp_path, []), sides)
    finally:
        gc.unfreeze()
    assert [call.replace(" data", "") for call in calls] == [
        *("decoder 0", "decoding 0", "decoder 9", "decoding 9", "augmentation 0"),
        *("ours 0 m fused", "ours 0 m graph", "timm 0 m 2", "network 0 m fused", "network 0 m graph"),
        "timm 9 m 2",
        *("compare 9 m", "timm_run 9 m"),
        *("ours 0 m compiled", "timm 0 m 2+compile", "network 0 m compiled"),
    ]


def test_wall_is_measured_for_the_last_size_of_photos_unless_others_are_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from finetune import check_sides

    def checked(photo_sides: list[int], wall_sides: list[int] | None) -> list[int]:
        args = argparse.Namespace(photo_sides=photo_sides, wall_sides=wall_sides)
        check_sides(argparse.ArgumentParser(), args)
        return args.wall_sides

    assert checked([0, 1200], None) == [1200]
    assert checked([0, 1200], [0]) == [0]
    for photo_sides, wall_sides, message in (
        ([0, 1200], [600], "--wall-sides must be among --photo-sides [0, 1200], got 600"),
        ([-1], None, "--photo-sides must be pixels, or 0 for photos as they are, got -1"),
    ):
        with pytest.raises(SystemExit):
            checked(photo_sides, wall_sides)
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("setting", ["fused", "16+fast", "16,fused"])
def test_an_unknown_setting_of_train_py_is_refused_with_those_that_exist(setting: str) -> None:
    from finetune import parse_setting

    assert parse_setting("16+fused+compile") == (16, ["--opt-kwargs", "fused=True", "--torchcompile"])
    with pytest.raises(SystemExit, match=r"fused, compile, reduce-overhead.*got"):
        parse_setting(setting)
