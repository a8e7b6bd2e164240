"""The command that trains and compares runs again."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence

from icmixup.lab.training.recipe import RECIPES, Fingerprints, Recipe, Task

# Set by the dataset or the method, or filled in from files; min_steps is 0 where --epochs is given.
NOT_FLAGS = {entry.name for kind in (Task, Fingerprints) for entry in dataclasses.fields(kind)} | {
    "min_steps"
}
LINEAR = "linear"  # the model of a comparison on features from a file, which is not a flag


def repeat_command(
    recipe: Recipe, methods: Sequence[str], seeds: Sequence[int], baseline: str, adaptive: bool = False
) -> str:
    """`icmixup compare` with the flags in which the recipe differs from the nearest named recipe.

    Args:
        adaptive: seeds are those that --seeds auto may use.
    """
    name = min(RECIPES, key=lambda known: len(changed_fields(recipe, RECIPES[known])))
    words = ["icmixup", "compare", recipe.dataset, "--methods", *methods]
    words += ["--seeds", "auto", "--max-seeds"] if adaptive else ["--seeds"]
    words.append(str(len(seeds)))
    words += ["--seed", str(min(seeds))] if min(seeds) else []
    words += ["--baseline", baseline, "--recipe", name]
    words += [] if recipe.model in (RECIPES[name].model, LINEAR) else ["--model", recipe.model]
    changed = changed_fields(recipe, RECIPES[name])
    if "epochs" not in changed and RECIPES[name].min_steps:
        changed = ["epochs", *changed]
    for field in changed:
        words += as_flag(field, getattr(recipe, field))
    return shlex.join(words)


def changed_fields(recipe: Recipe, base: Recipe) -> list[str]:
    """Names of the fields, other than NOT_FLAGS, in which two recipes differ."""
    names = [entry.name for entry in dataclasses.fields(recipe) if entry.name not in NOT_FLAGS]
    return [name for name in names if getattr(recipe, name) != getattr(base, name)]


def as_flag(name: str, value: object) -> list[str]:
    """A field of a recipe as words of a command line."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    values = value if isinstance(value, tuple) else (value,)
    return [f"--{flag}", *map(str, values)]
