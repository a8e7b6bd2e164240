"""What the commands share: flags of where to run, and recipes put together from groups of flags.

Nothing here imports torch, so that --help and a mistyped flag are answered at once.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from tyro import conf

from icmixup.lab.training.execution import Execution
from icmixup.lab.training.recipe import (
    FLAG_GROUPS,
    RECIPES,
    Augmentation,
    Mixing,
    Numerics,
    Optimisation,
    Recipe,
    Subset,
    Transfer,
)

Flag = conf.FlagCreatePairsOff[bool]
RecipeName = Literal["paper", "strong", "long-tail", "quick", "finetune", "head"]
Fields = TypeVar("Fields")


def data_folder() -> Path:
    return Path(os.environ.get("ICMIXUP_DATA", "data"))


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where data is, and what computes."""

    data_dir: Path = field(default_factory=data_folder)
    """Folder of datasets, also for downloads; the environment variable ICMIXUP_DATA sets the default."""
    device: str | None = None
    """cpu, cuda or cuda:1; a GPU if there is one by default."""
    debug: Flag = False
    """Show a traceback with an error."""


@dataclass(frozen=True, kw_only=True)
class Where(Machine):
    """Where to run, and what to keep."""

    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Also send curves to tensorboard, wandb, or both."""
    fresh: Flag = False
    """Delete existing results of these runs and start over."""
    reuse: Flag = False
    """Also use runs of another version of icmixup, kind of device or precision, if images, network and recipe
    agree."""


@dataclass(frozen=True, kw_only=True)
class Concurrency:
    """How many runs at the same time, and on which machines."""

    workers: int | None = None
    """Concurrent runs, for example 3 on a large GPU; by default one per GPU, or what cores and memory allow.
    With --engine ray, how many share a GPU, or the cores of a node without one."""
    engine: Literal["local", "ray"] = "local"
    """Train on this machine, or on a Ray cluster."""
    address: str | None = None
    """Address of a Ray cluster; auto for the one this machine belongs to. By default one is started here."""


@dataclass(frozen=True, kw_only=True)
class RecipeFlags:
    """What compare and train share: a recipe by its name, and its fields, in the groups of --help."""

    recipe: RecipeName | None = None
    """Starting point that other flags modify: the paper's recipe; a strong recipe of today; long-tail, for
    long tails of small images; quick, for a laptop and tiny images; finetune, for pretrained weights; or
    head, for a linear head on features. By default finetune with --weights, head with --train head, quick for
    digits or without a GPU, otherwise strong. The defaults in this help are those of quick; with --recipe
    NAME --help they are those of NAME."""
    model: str = "resnet34"
    """resnet18, resnet34, resnet50, resnet32, resnet32x4, wrn16-8, small-cnn, any timm model, or
    local-dir:FOLDER."""
    data: Subset = field(default_factory=Subset)
    pretrained: Transfer = field(default_factory=Transfer)
    optimisation: Optimisation = field(default_factory=Optimisation)
    augmentation: Augmentation = field(default_factory=Augmentation)
    mixing: Mixing = field(default_factory=Mixing)
    numerics: Numerics = field(default_factory=Numerics)


def groups_of(recipe: Recipe) -> dict[str, Any]:
    """The groups of a recipe, as defaults of the flags."""
    return {name: take_fields(kind, recipe) for name, kind in FLAG_GROUPS.items()}


def take_fields(kind: type[Fields], source: object) -> Fields:
    """An instance of a dataclass with the values that `source` has under the same names."""
    names = [entry.name for entry in dataclasses.fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: getattr(source, name) for name in names})


def join_groups(groups: object, **task: Any) -> Recipe:
    """The recipe of a task with the values of all groups."""
    values = {
        entry.name: getattr(getattr(groups, name), entry.name)
        for name, kind in FLAG_GROUPS.items()
        for entry in dataclasses.fields(kind)
    }
    values["random_resized_crop"] = values["random_resized_crop"] or None  # 0 switches it off
    return Recipe(**task, **values)


@functools.cache
def join_lines_of_help(flags: type) -> None:
    """Give tyro the docstrings of fields as paragraphs: --help would also break lines where the source does.

    Args:
        flags: a dataclass, whose fields may be groups of flags, which are dataclasses too.
    """
    for kind in flags.__mro__[:-1]:
        try:
            source = ast.parse(inspect.getsource(kind)).body[0]
        except OSError:  # installed without sources: help is there all the same, with the docstrings' lines
            continue
        assert isinstance(source, ast.ClassDef)
        for entry, text in itertools.pairwise(source.body):
            if isinstance(entry, ast.AnnAssign) and isinstance(text, ast.Expr):
                name, words = ast.unparse(entry.target), ast.literal_eval(text.value).split()
                flags.__dataclass_fields__[name].metadata = {"help": " ".join(words)}  # type: ignore[attr-defined]
    for field_ in dataclasses.fields(flags):
        if isinstance(field_.default_factory, type) and dataclasses.is_dataclass(field_.default_factory):
            join_lines_of_help(field_.default_factory)


def plain_path(dataset: str) -> str:
    """The name of a dataset; photos/ and ./photos, as shells complete them, are the folder photos."""
    from icmixup.lab.datasets import is_named

    path = Path(dataset)
    plain = str(path) if dataset.strip() and (path.is_dir() or path.suffix == ".npz") else dataset
    return dataset if is_named(plain) else plain  # ./digits is a folder, and digits is not


def make_execution(out: Path, where: Where, concurrency: Concurrency | None = None) -> Execution:
    if where.fresh and where.reuse:
        raise ValueError("--fresh trains again what --reuse would take from another version; use one of them")
    concurrency = Concurrency(workers=1) if concurrency is None else concurrency
    return Execution(
        out=out,
        data_dir=where.data_dir,
        device=where.device,
        trackers=where.trackers,
        reuse=where.reuse,
        **dataclasses.asdict(concurrency),
    )


def requested_recipe(args: Sequence[str]) -> str | None:
    """The value of --recipe, parsed ahead of the other flags, since their defaults depend on it."""
    ahead = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    ahead.add_argument("--recipe", nargs="?")
    name: str | None = ahead.parse_known_args(args)[0].recipe
    return name if name in RECIPES else None  # tyro rejects any other value


def given_flags(args: Sequence[str]) -> frozenset[str]:
    """Names of the fields whose flags are on the command line, whatever their values are."""
    words = (word.partition("=")[0].removeprefix("--") for word in args if word.startswith("--"))
    return frozenset(word.replace("-", "_").removeprefix("no_") for word in words)


def default_recipe(dataset: str, device: str | None) -> str:
    """The named recipe that suits the data and the machine."""
    if dataset == "digits" or device == "cpu":
        return "quick"
    import torch

    return "strong" if torch.cuda.is_available() else "quick"
