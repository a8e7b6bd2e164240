"""The flags of every command, as dataclasses; those of a run are the fields of Recipe themselves."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro import conf

from icmixup.lab.training.recipe import RECIPES, Recipe

COMPARE_HELP = """Train several methods with several seeds on the same images, and say which one helps.

Differences are paired by seed and stand with 95 % intervals. Stopped at any moment, the same command goes on
from there. The table goes to standard output, everything else to standard error, and comparison.json,
comparison.csv and comparison.png into the --out folder.

  icmixup compare digits --per-class 100 --imbalance 0.01      a long tail, in minutes on a laptop
  icmixup compare path/to/images --budget 30m                  as many epochs as fit into half an hour
  icmixup compare cifar100 --fraction 0.1 --methods erm mixup ic-mixup --seeds 5
  icmixup compare cifar10 --recipe paper --baseline erm        the paper's recipe, differences to ERM"""

TRAIN_HELP = """One run, in a folder of its own under --out. Stopped at any moment, the same command goes on.

  icmixup train --dataset cifar100 --fraction 0.1 --model resnet34 --method ic-mixup --seed 1
  icmixup train --recipe strong --dataset cifar10 --method ic-mixup-cutmix
  torchrun --nproc-per-node 8 -m icmixup train --dataset path/to/images --batch-size 1024"""

DATA_HELP = """Datasets: list them, bring one here, or test what must be true of one.

  icmixup data list
  icmixup data get cifar100
  icmixup data check path/to/images"""


def data_folder() -> Path:
    return Path(os.environ.get("ICMIXUP_DATA", "data"))


@dataclass(frozen=True, kw_only=True)
class Common:
    """Where things are, and how to run."""

    recipe: Literal["paper", "strong", "quick"] | None = None
    """Starting point, whose numbers the other flags change: the paper's, a strong one of today, or one for a
    laptop and tiny images. If not given: paper to train; to compare, quick on digits or without a GPU, else
    strong."""
    out: Path = Path("runs")
    """Folder of all runs, and of comparison.json, .csv and .png."""
    data_dir: Path = field(default_factory=data_folder)
    """Where datasets are, or are downloaded to; ICMIXUP_DATA in the environment says it too."""
    device: str | None = None
    """cpu, cuda, cuda:1 or mps; if not given, a GPU if there is one."""
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where to send curves besides: tensorboard, wandb, or both."""
    fresh: conf.FlagCreatePairsOff[bool] = False
    """Start over: forget what earlier sittings did of these very runs."""
    debug: conf.FlagCreatePairsOff[bool] = False
    """Show a traceback with an error."""


@dataclass(frozen=True, kw_only=True)
class SharedRecipe(Recipe):
    """A recipe, but for what a comparison varies and what its first argument says."""

    dataset: conf.Suppress[str] = "digits"
    method: conf.Suppress[str] = "mixup"
    seed: int = 0
    """The first seed; a seed decides initial weights, the order of images, augmentation and mixing."""


@dataclass(frozen=True, kw_only=True)
class CompareFlags:
    """icmixup compare."""

    data: conf.Positional[str] = "digits"
    """digits, cifar10, cifar100, cifair10, cifair100, a folder of images, or hf:owner/name."""
    methods: tuple[str, ...] = ()
    """What to compare, with spaces or commas between; if not given, what suits even or uneven classes."""
    seeds: int = 3
    """How many seeds each method is trained with; an interval needs two, and narrows with more."""
    baseline: str | None = None
    """The method that differences are to; if not given, mixup, or the first where mixup is not compared."""
    budget: str | None = None
    """Time for all runs together, 90s, 5m or 1h30m: as many epochs as fit, in place of --epochs."""
    workers: int | None = None
    """How many runs at once, 3 on a large GPU, say; if not given, one a GPU, or what the cores allow."""
    engine: Literal["local", "ray"] = "local"
    """Where to train: on this machine, or on a Ray cluster."""
    address: str | None = None
    """Of the Ray cluster; auto for the one this machine is part of."""
    common: Annotated[Common, conf.arg(name="")] = field(default_factory=Common)
    shared: Annotated[SharedRecipe, conf.arg(name="")] = field(default_factory=SharedRecipe)

    def recipe(self) -> Recipe:
        """What all runs of the comparison share."""
        fields = {entry.name: getattr(self.shared, entry.name) for entry in dataclasses.fields(Recipe)}
        return Recipe(**{**fields, "dataset": self.data})


@dataclass(frozen=True, kw_only=True)
class TrainFlags:
    """icmixup train."""

    common: Annotated[Common, conf.arg(name="")] = field(default_factory=Common)
    run: Annotated[Recipe, conf.arg(name="")] = field(default_factory=Recipe)


@dataclass(frozen=True, kw_only=True)
class DataFlags:
    """icmixup data."""

    action: conf.Positional[Literal["list", "get", "check"]]
    """List all, get one, or check one."""
    name: conf.Positional[str | None] = None
    """digits, cifar10, cifar100, cifair10, cifair100, a folder of images, or hf:owner/name."""
    data_dir: Path = field(default_factory=data_folder)
    """Where datasets are, or are downloaded to; ICMIXUP_DATA in the environment says it too."""
    debug: conf.FlagCreatePairsOff[bool] = False
    """Show a traceback with an error."""


def asked_recipe(args: Sequence[str]) -> str | None:
    """The value of --recipe, read ahead of the others, since their defaults hang on it."""
    ahead = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    ahead.add_argument("--recipe", nargs="?")
    name: str | None = ahead.parse_known_args(args)[0].recipe
    return name if name in RECIPES else None  # tyro will say what is wrong with another


def parse_compare(args: Sequence[str]) -> tuple[CompareFlags, str]:
    """The flags, and the name of the recipe that they start from."""
    asked = asked_recipe(args)
    flags = parse_compare_from(args, asked or "quick")
    start = asked or default_start(flags)
    return (flags, start) if start == (asked or "quick") else (parse_compare_from(args, start), start)


def default_start(flags: CompareFlags) -> str:
    if flags.data == "digits" or flags.common.device == "cpu":
        return "quick"
    import torch

    return "strong" if torch.cuda.is_available() else "quick"


def parse_compare_from(args: Sequence[str], start: str) -> CompareFlags:
    shared = SharedRecipe(**dataclasses.asdict(RECIPES[start]))
    return tyro.cli(
        CompareFlags,
        prog="icmixup compare",
        description=COMPARE_HELP,
        args=args,
        default=CompareFlags(shared=shared),
        config=(conf.PositionalMetavarFromFieldName,),
    )


def parse_train(args: Sequence[str]) -> TrainFlags:
    start = RECIPES[asked_recipe(args) or "paper"]
    return tyro.cli(
        TrainFlags, prog="icmixup train", description=TRAIN_HELP, args=args, default=TrainFlags(run=start)
    )


def parse_data(args: Sequence[str]) -> DataFlags:
    return tyro.cli(
        DataFlags,
        prog="icmixup data",
        description=DATA_HELP,
        args=args,
        config=(conf.PositionalMetavarFromFieldName,),
    )
