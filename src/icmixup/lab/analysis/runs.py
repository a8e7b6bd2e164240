"""Finished runs that are analysed: their folders, the names of their lines, and their networks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from icmixup.lab.datasets import Dataset
from icmixup.lab.models import build_model
from icmixup.lab.training.recipe import Recipe
from icmixup.lab.training.run_folder import FEATURES_FOLDER, TRIALS_FOLDER, Row, Run
from icmixup.lab.training.step import to_device
from icmixup.lab.training.stored import FOLDS_FILE, read_run_names
from icmixup.lab.training.trained import load_run_weights

NOT_RUNS = (TRIALS_FOLDER, FEATURES_FOLDER)


def expand_comparisons(folders: Sequence[Path]) -> list[Path]:
    """Run folders: those given, and the runs of comparisons and of folds; what else runs/* matches is left
    out: plain files, trials of --tune and features of --train head."""
    found: list[Path] = []
    for folder in folders:
        listed = [folder / name for name in ("comparison.json", FOLDS_FILE) if (folder / name).exists()]
        if listed:
            found += [folder.parent / name for name in read_run_names(listed[0])]
        elif not folder.is_file() and folder.name not in NOT_RUNS:
            found.append(folder)
    if not found:
        what = "a file" if folders[0].is_file() else f"the folder of {folders[0].name}"
        raise ValueError(f"{folders[0]} is {what}; pass folders of finished runs or of comparisons")
    return list(dict.fromkeys(found))


def check_trained_on_images(runs: Sequence[Run], why: str) -> None:
    """Raise an error for runs that trained a head on features; `why` says what images are needed for."""
    if heads := [run.folder for run in runs if run.recipe.train == "head"]:
        raise ValueError(
            f"{heads[0]} trained a head on features, and {why}; train on images, with --train all"
        )


def line_names(recipes: Sequence[Recipe]) -> list[str]:
    """The method of each run and the other fields in which runs differ, but for seed and fold."""
    all_fields = [recipe.fields() for recipe in recipes]
    differ = [
        name
        for name in all_fields[0]
        if name not in ("method", "seed", "fold")
        and any(fields[name] != all_fields[0][name] for fields in all_fields)
    ]

    def line(fields: Row) -> str:
        settings = (f"{name}={fields[name]}" for name in differ if fields[name] is not None)
        return " ".join([fields["method"], *settings])

    return [line(fields) for fields in all_fields]


def describe_run(run: Run, line: str) -> Row:
    """The first columns of a table of runs."""
    recipe = run.recipe
    return {
        "line": line,
        "run": run.folder.name,
        "dataset": recipe.dataset,
        "model": recipe.model,
        "method": recipe.method,
        "seed": recipe.seed,
    }


def load_model(run: Run, data: Dataset, device: torch.device) -> nn.Module:
    """The network with the weights that the run was tested with: averaged weights if the recipe sets ema."""
    recipe, channels = run.recipe, data.test.images.shape[1]
    model = to_device(
        build_model(
            recipe.model,
            data.num_classes,
            channels=channels,
            seed=recipe.seed,
            image_size=data.test.images.shape[-1],
            cosine=recipe.cosine,
        ),
        device,
    )
    try:
        return load_run_weights(run, model)
    except (RuntimeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"the weights in {run.folder} do not fit {recipe.model} with the {data.num_classes} classes of "
            f"{recipe.dataset}; check that the dataset has not changed since the run"
        ) from error
