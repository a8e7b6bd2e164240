"""Folders of finished runs, written from scores; and what the fixtures of these tests share."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from icmixup.lab.training.evaluate import Metrics, evaluate
from icmixup.lab.training.predictions import Predictions, write_predictions
from icmixup.lab.training.recipe import Recipe

METHODS = ("erm", "mixup", "ic-mixup")
TINY = ("--per-class", "20", "--imbalance", "0.1", "--epochs", "3", "--eval-every", "1", "--batch-size", "32")
HOSTILE = (
    "<script>alert(1)</script>",
    "</script><script>alert(2)</script>",
    "<!-- <script>",
    "line\u2028separator & \"quotes\" 'single'",
    "<img src=x onerror=alert(3)>",
)


def write_run(
    folder: Path, recipe: Recipe, predictions: Predictions | None = None, metrics: Metrics | None = None
) -> Path:
    """A finished run without a checkpoint; its metrics are those of its predictions by default."""
    folder = folder / f"run.{recipe.name.replace('/', '-')}"
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text(json.dumps(recipe.fields()))
    if predictions is not None:
        write_predictions(folder, predictions)
        counts = torch.arange(len(predictions.class_names)) + 1
        metrics = metrics or evaluate(*predictions.tensors(), counts)
    cost = {"loss": 1.0, "minutes": 1.5, "images_per_second": 1000, "memory_mb": 500, "at_once": 1}
    row = {**recipe.fields(), "key": recipe.key, **(metrics or {}), **cost, "device": "CPU"}
    (folder / "result.json").write_text(json.dumps(row | {"folder": folder.name}))
    lines = [{"epoch": epoch, "loss": 2 / epoch} for epoch in range(1, recipe.epochs + 1)]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
