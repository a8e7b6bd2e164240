"""The command that trains and compares runs again."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence

from icmixup.lab.datasets import is_named
from icmixup.lab.training.recipe import FLAG_GROUPS, LINEAR, PHOTO_RECIPES, RECIPES, Recipe

# Of `icmixup compare`; min_steps is 0 where --epochs is given.
FLAGS = ["folds", *(entry.name for kind in FLAG_GROUPS.values() for entry in dataclasses.fields(kind))]


def repeat_command(
    recipe: Recipe,
    methods: Sequence[str],
    seeds: Sequence[int],
    baseline: str,
    adaptive: bool = False,
    measure: str = "accuracy",
) -> str:
    """`icmixup compare` with the flags in which the recipe differs from the nearest named recipe.

    Args:
        adaptive: seeds are those that --seeds auto may use.
        measure: what methods are compared in.
    """
    name = min(RECIPES, key=lambda known: len(changed_fields(recipe, RECIPES[known])))
    data = f"./{recipe.dataset}" if recipe.dataset.startswith("-") else recipe.dataset  # not a flag
    words = ["icmixup", "compare", data, "--methods", *methods]
    words += ["--seeds", "auto", "--max-seeds"] if adaptive else ["--seeds"]
    words.append(str(len(seeds)))
    words += ["--seed", str(min(seeds))] if min(seeds) else []
    words += ["--baseline", baseline]
    words += [] if measure == "accuracy" else ["--measure", measure]
    words += ["--recipe", name]
    words += [] if recipe.model in (RECIPES[name].model, LINEAR) else ["--model", recipe.model]
    changed = changed_fields(recipe, RECIPES[name])
    if "epochs" not in changed and RECIPES[name].min_steps:
        changed = ["epochs", *changed]
    if name in PHOTO_RECIPES and "padding" not in changed and not is_named(recipe.dataset):
        changed.append("padding")  # otherwise photos would get the augmentation that is their default
    for field in changed:
        words += as_flag(field, getattr(recipe, field))
    return shlex.join(words)


def changed_fields(recipe: Recipe, base: Recipe) -> list[str]:
    """Names of the fields with a flag in which two recipes differ."""
    differ = [name for name in FLAGS if getattr(recipe, name) != getattr(base, name)]
    return [name for name in differ if name != "min_steps"]


def as_flag(name: str, value: object) -> list[str]:
    """A field of a recipe as words of a command line."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    values = value if isinstance(value, tuple) else (value,)
    return [f"--{flag}", *map(str, values)]
