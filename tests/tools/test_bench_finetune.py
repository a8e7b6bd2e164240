"""bench/finetune.py: how it reads what train.py prints, and prepares photos for both sides."""

from __future__ import annotations

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


def test_webp_photos_become_jpegs_for_both_sides_and_links_multiply_the_training_photos(
    tmp_path: Path,
) -> None:
    from finetune import as_jpegs, link_copies, list_photos

    for part in ("train", "test"):
        for name in ("a", "b"):
            (tmp_path / "photos" / part / name).mkdir(parents=True)
            Image.new("RGB", (20, 30)).save(tmp_path / "photos" / part / name / "1.webp")
    jpegs = as_jpegs(tmp_path / "photos", tmp_path / "jpegs")
    assert [path.suffix for path in list_photos(jpegs)] == [".jpg"] * 4
    assert as_jpegs(jpegs, tmp_path / "unused") == jpegs
    links = link_copies(jpegs, tmp_path / "links", copies=3)
    assert len(list_photos(links / "train")) == 6
    assert len(list_photos(links / "test")) == 2
    for path in list_photos(links):
        with Image.open(path) as image:
            assert image.size == (20, 30)


@pytest.mark.parametrize("setting", ["fused", "16+fast", "16,fused"])
def test_an_unknown_setting_of_train_py_is_refused_with_those_that_exist(setting: str) -> None:
    from finetune import parse_setting

    assert parse_setting("16+fused+compile") == (16, ["--opt-kwargs", "fused=True", "--torchcompile"])
    with pytest.raises(SystemExit, match=r"fused, compile, reduce-overhead.*got"):
        parse_setting(setting)
