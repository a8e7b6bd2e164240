"""icmixup compare | train | data: flags in, exit code out.

Flags are made from dataclasses by tyro. What takes long to import is imported where it is used, so that
--help answers at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from icmixup.lab.recipe import RECIPES, Recipe

try:
    import tyro
    from rich.console import Console
    from tyro import conf
except ModuleNotFoundError as missing:
    raise SystemExit(f"icmixup: the laboratory needs {missing.name}; pip install icmixup[lab]") from missing

if TYPE_CHECKING:
    from icmixup.lab.data import Dataset
    from icmixup.lab.progress import Watcher

HELP = """usage: icmixup {compare,train,data} ...  |  icmixup --version

Does Infinite Class Mixup help on your data? One command trains several methods with several seeds and says,
with intervals, which one helps.

  icmixup compare                      on scikit-learn's digits, which are installed already: two minutes
  icmixup compare path/to/images       on a folder of images, one subfolder a class
  icmixup train                        one run; with no flags, the paper's on CIFAR-100
  icmixup data list                    datasets, and where they are
  icmixup data get cifar100            bring one here
  icmixup data check cifar100          read one, and test what must be true of it

`icmixup compare --help` and `icmixup train --help` explain every flag."""

COMPARE_HELP = """Train several methods with several seeds on the same images, and say which one helps.

Differences are paired by seed and stand with 95 % intervals. Stopped at any moment, the same command goes on
from there. The table goes to standard output, everything else to standard error, and comparison.json,
comparison.csv and comparison.png into the --out folder.

  icmixup compare digits --per-class 100 --imbalance 0.01      a long tail, in minutes on a laptop
  icmixup compare path/to/images --budget 30m                  as many epochs as fit into half an hour
  icmixup compare cifar100 --fraction 0.1 --methods erm mixup ic-mixup --seeds 5
  icmixup compare cifar10 --recipe paper --baseline erm        the paper's recipe, differences to ERM"""

TRAIN_HELP = """One run, in a folder of its own under --out; stopped at any moment, the same command goes on from there.

  icmixup train --dataset cifar100 --fraction 0.1 --model resnet34 --method ic-mixup --seed 1
  icmixup train --recipe strong --dataset cifar10 --method ic-mixup-cutmix
  torchrun --nproc-per-node 8 -m icmixup train --dataset path/to/images --batch-size 1024"""

DATA_HELP = """Datasets: which there are, bring one here, or test what must be true of it.

  icmixup data list
  icmixup data get cifar100
  icmixup data check path/to/images"""


@dataclass(frozen=True, kw_only=True)
class Common:
    """Where things are and how to run."""

    recipe: Literal["paper", "strong", "quick"] | None = None
    """Starting point, whose numbers the flags below change: the paper's, a strong one of today, or one for a
    laptop and tiny images. If not given: paper to train; to compare, quick on digits or without a GPU, else
    strong."""
    out: Path = Path("runs")
    """Folder of all runs, and of comparison.json, .csv and .png."""
    data_dir: Path = field(default_factory=lambda: Path(os.environ.get("ICMIXUP_DATA", "data")))
    """Where datasets are, or are downloaded to; ICMIXUP_DATA in the environment says it too."""
    device: str | None = None
    """cpu, cuda, cuda:1 or mps; a GPU if there is one and nothing is given."""
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where to send curves besides: tensorboard, wandb, or both."""
    fresh: conf.FlagCreatePairsOff[bool] = False
    """Start over: forget what earlier sittings did of these very runs."""
    debug: conf.FlagCreatePairsOff[bool] = False
    """A traceback with every error."""


@dataclass(frozen=True, kw_only=True)
class SharedRecipe(Recipe):
    """A recipe but for what a comparison varies."""

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
    """What to compare, by spaces or commas; if not given, a set that suits even or uneven classes."""
    seeds: int = 3
    """How many seeds each method is trained with; intervals need two, and narrow with more."""
    baseline: str | None = None
    """Method that the differences are to; mixup, or the first if mixup is not compared."""
    budget: str | None = None
    """Time for all runs together, 90s, 5m or 1h30m: as many epochs as fit, in place of --epochs."""
    common: Annotated[Common, conf.arg(name="")] = field(default_factory=Common)
    shared: Annotated[SharedRecipe, conf.arg(name="")]


@dataclass(frozen=True, kw_only=True)
class TrainFlags:
    """icmixup train."""

    common: Annotated[Common, conf.arg(name="")] = field(default_factory=Common)
    run: Annotated[Recipe, conf.arg(name="")]


@dataclass(frozen=True, kw_only=True)
class DataFlags:
    """icmixup data."""

    action: conf.Positional[Literal["list", "get", "check"]]
    """List all, get one, or check one."""
    name: conf.Positional[str | None] = None
    """digits, cifar10, cifar100, cifair10, cifair100, a folder of images, or hf:owner/name."""
    data_dir: Path = field(default_factory=lambda: Path(os.environ.get("ICMIXUP_DATA", "data")))
    """Where datasets are, or are downloaded to; ICMIXUP_DATA in the environment says it too."""
    debug: conf.FlagCreatePairsOff[bool] = False
    """A traceback with every error."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 if it went well, 2 with one sentence if not, 130 if it was stopped."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        return run_command(args)
    except KeyboardInterrupt:
        return complain("stopped; the same command goes on from there", 130)
    except Exception as error:
        if "--debug" in args or (sentence := explain(error)) is None:
            raise
        return complain(sentence, 2)


def run_command(args: list[str]) -> int:
    commands = {"compare": run_compare, "train": run_train, "data": run_data}
    if not args or args[0] in ("-h", "--help"):
        print(HELP)
        return 0
    if args[0] == "--version":
        print(f"icmixup {version('icmixup')}")
        return 0
    if args[0] not in commands:
        near = get_close_matches(args[0], commands, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"no command {args[0]!r}; {hint}the commands are {', '.join(commands)}")
    return commands[args[0]](args[1:])


def complain(sentence: str, code: int) -> int:
    if is_first_rank():
        print(f"icmixup: {sentence}", file=sys.stderr)
    return code


def explain(error: Exception) -> str | None:
    """One sentence for what a user can mend; None for what is our mistake."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        where = f" (writing {error.filename})" if error.filename else ""
        return (
            f"the disk is full{where}; free some room and give the same command again, it goes on from there"
        )
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if isinstance(error, ValueError | OSError):
        return " ".join(str(error).split())
    if type(error).__name__ == "OutOfMemoryError":
        return "the GPU's memory is full; give a smaller --batch-size or --model"
    return None


def is_first_rank() -> bool:
    """Under torchrun all ranks work and the first one speaks."""
    return os.environ.get("RANK", "0") == "0"


def stderr_console() -> Console:
    return Console(stderr=True, quiet=not is_first_rank())


Flags = TypeVar("Flags", CompareFlags, TrainFlags)


def asked_recipe(args: Sequence[str]) -> str | None:
    """The value of --recipe, read ahead: the other flags' defaults hang on it."""
    ahead = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    ahead.add_argument("--recipe", nargs="?")
    name: str | None = ahead.parse_known_args(args)[0].recipe
    return name


def parse_compare(args: list[str]) -> tuple[CompareFlags, str]:
    """Flags, and the name of the recipe they start from."""
    name = asked_recipe(args)
    flags = parse_compare_from(args, name or "quick")
    if name is None and flags.data != "digits":
        import torch

        name = "strong" if torch.cuda.is_available() and flags.common.device != "cpu" else "quick"
        flags = parse_compare_from(args, name)
    return flags, name or "quick"


def parse_compare_from(args: list[str], name: str) -> CompareFlags:
    start = SharedRecipe(**dataclasses.asdict(RECIPES.get(name, RECIPES["quick"])))
    return tyro.cli(
        CompareFlags,
        prog="icmixup compare",
        description=COMPARE_HELP,
        args=args,
        default=CompareFlags(shared=start),
        config=(conf.PositionalMetavarFromFieldName,),
    )


def parse_train(args: list[str]) -> TrainFlags:
    start = RECIPES.get(asked_recipe(args) or "paper", RECIPES["paper"])
    return tyro.cli(
        TrainFlags, prog="icmixup train", description=TRAIN_HELP, args=args, default=TrainFlags(run=start)
    )


def run_compare(args: list[str]) -> int:
    flags, start = parse_compare(args)
    from icmixup.lab.compare import (
        check_methods,
        compare,
        default_methods,
        forget_runs,
        pick_baseline,
        plan_runs,
    )
    from icmixup.lab.progress import make_watcher
    from icmixup.lab.ranks import pick_device

    common, console = flags.common, stderr_console()
    check_sharing(flags)
    recipe = Recipe(**{**flags.shared.fields_as_given(), "dataset": flags.data})
    device = pick_device(common.device)
    named = check_methods(split_names(flags.methods)) if flags.methods else ()
    data = load_data(recipe, common.data_dir, console).to(device)
    methods = named or default_methods(data.class_counts)
    baseline = pick_baseline(methods, flags.baseline)
    ...
    return 0
