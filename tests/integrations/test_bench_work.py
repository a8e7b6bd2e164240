"""bench/finetune.py counts the work of timm's networks."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("timm")


@pytest.mark.parametrize(
    ("model", "published"),  # multiplications and additions forward, with 1,000 classes
    [("resnet50.a1_in1k", 4.11e9), ("tf_efficientnet_lite0", 0.407e9)],
)
def test_counted_operations_are_close_to_the_published_ones(
    model: str, published: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    from finetune import count_work

    assert count_work(model, 224, classes=1000).flops == pytest.approx(3 * 2 * published, rel=0.06)
