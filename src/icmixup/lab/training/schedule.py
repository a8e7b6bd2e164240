"""What a recipe makes of an epoch: its learning rates, how many images it shows, and its seeds."""

from __future__ import annotations

import hashlib
import math

from icmixup.lab.training.recipe import Recipe


def learning_rate(recipe: Recipe, epoch: float) -> float:
    """The learning rate `epoch` epochs into training: a warm-up from 0, then steps or half a cosine."""
    if epoch < recipe.warmup_epochs:
        return recipe.lr * epoch / recipe.warmup_epochs
    if recipe.schedule == "step":
        return recipe.lr * recipe.lr_factor ** sum(epoch >= drop for drop in recipe.drops)
    done = (epoch - recipe.warmup_epochs) / (recipe.epochs - recipe.warmup_epochs)
    return recipe.lr * (1 + math.cos(math.pi * done)) / 2


def images_an_epoch(recipe: Recipe, number: int) -> int:
    """How many of so many images an epoch shows: all of them, or as many as fill whole batches."""
    return number - number % recipe.batch_size if recipe.drop_last else number


def mix_seed(seed: int, epoch: int, purpose: str) -> int:
    """A seed of its own for every epoch and purpose, the same wherever and whenever it is asked for."""
    return int.from_bytes(hashlib.sha256(f"{seed} {epoch} {purpose}".encode()).digest()[:7], "big")
