"""icmixup compare: train several methods with several seeds, and report which one helps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro import conf

from icmixup.lab.cli.pretrained import prepare_data, recipe_for, resolve_recipe
from icmixup.lab.cli.shared import (
    Concurrency,
    RecipeGroups,
    RecipeName,
    Where,
    groups_of,
    join_groups,
    make_execution,
)
from icmixup.lab.cli.terminal import count, is_first_rank, print_note, stderr_console
from icmixup.lab.training.recipe import Recipe

if TYPE_CHECKING:
    from icmixup.lab.comparison.compare import Comparison
    from icmixup.lab.training.execution import Execution

SUMMARY = "Train several methods with several seeds on the same images, and report which one helps."
HELP = f"""{SUMMARY}

Differences are paired by seed and reported with 95 % confidence intervals. After an interruption, the same
command resumes. The table is printed on standard output, everything else on standard error; comparison.json,
comparison.csv and comparison.png are written to the --out folder.

  icmixup compare digits --per-class 100 --imbalance 0.01      a long tail, in minutes on a laptop
  icmixup compare path/to/images --budget 30m                  as many epochs as fit into half an hour
  icmixup compare cifar100 --fraction 0.1 --methods erm mixup ic-mixup --seeds 5
  icmixup compare cifar10 --recipe paper --baseline erm        the paper's recipe, differences to ERM
  icmixup compare path/to/photos --model resnet50.a1_in1k --weights pretrained        fine-tune
  icmixup compare path/to/photos --model resnet50.a1_in1k --weights pretrained --train head
  icmixup compare features.npz                                 a linear head on features, in seconds"""


@dataclass(frozen=True, kw_only=True)
class CompareFlags(RecipeGroups):
    """Train several methods with several seeds on the same images, and report which one helps."""

    dataset: conf.Positional[str] = "digits"
    """digits, cifar10, cifar100, cifair10, cifair100, a folder of images, hf:owner/name, or features.npz."""
    methods: tuple[str, ...] = ()
    """Methods to compare, separated by spaces or commas; by default a selection for balanced or for
    long-tailed classes."""
    seeds: int = 3
    """Number of seeds per method; an interval needs at least two and narrows with more."""
    baseline: str | None = None
    """Baseline method; by default mixup, or the first method if mixup is not compared."""
    budget: str | None = None
    """Time for all runs together, for example 90s, 5m or 1h30m: sets the number of epochs that fit."""
    recipe: RecipeName | None = None
    """Starting point that other flags modify: the paper's recipe, a strong recipe of today, a quick one for a
    laptop and tiny images, finetune for pretrained weights, or head for a linear head on features. By default
    finetune with --weights, head with --train head, quick for digits or without a GPU, otherwise strong."""
    model: str = "resnet34"
    """resnet18, resnet34, resnet50, resnet32, wrn16-8, small-cnn, any timm model, or local-dir:FOLDER."""
    seed: int = 0
    """First seed; a seed determines initial weights, order of images, augmentation and mixing."""
    out: Path = Path("runs")
    """Folder of all runs, and of comparison.json, .csv and .png."""
    where: Where = field(default_factory=Where)
    concurrency: Concurrency = field(default_factory=Concurrency)

    def shared_recipe(self) -> Recipe:
        """What all runs of the comparison share."""
        return join_groups(self, dataset=self.dataset, model=self.model, method="mixup", seed=self.seed)

    def execution(self) -> Execution:
        return make_execution(self.out, self.where, self.concurrency)

    def named_methods(self) -> tuple[str, ...]:
        return tuple(name for text in self.methods for name in text.replace(",", " ").split())


def compare_defaults(recipe: Recipe) -> CompareFlags:
    """The flags with the values of a recipe as defaults."""
    return CompareFlags(model=recipe.model, **groups_of(recipe))


def default_recipe(flags: CompareFlags) -> str:
    """The recipe that suits the weights, the data and the machine."""
    if (name := recipe_for(flags.dataset, flags.pretrained)) is not None:
        return name
    if flags.dataset == "digits" or flags.where.device == "cpu":
        return "quick"
    import torch

    return "strong" if torch.cuda.is_available() else "quick"


def run_compare(flags: CompareFlags, recipe_name: str) -> int:
    """Train, compare, print the table, write the files."""
    named = check_compare(flags)
    from icmixup.lab.cli.data import load_data, settle_image_size
    from icmixup.lab.comparison.compare import (
        compare,
        comparison_recipes,
        default_methods,
        delete_runs,
        pick_baseline,
    )
    from icmixup.lab.sweep import find_finished
    from icmixup.lab.sweep.budget import work
    from icmixup.lab.sweep.local import count_workers
    from icmixup.lab.sweep.progress import Display
    from icmixup.lab.training.features import check_feature_methods
    from icmixup.lab.training.ranks import pick_device

    recipe, execution = resolve_recipe(flags.shared_recipe(), recipe_name), flags.execution()
    recipe = settle_image_size(recipe, execution.data_dir, execution.device)
    if recipe.train == "head":
        check_feature_methods(named)
        # Runs of seconds on small matrices: more processes or threads would cost more than they gain.
        workers = 1 if execution.workers is None else execution.workers
        execution = dataclasses.replace(execution, workers=workers, threads=1)
    seeds = range(flags.seed, flags.seed + flags.seeds)
    device = pick_device(execution.device)
    data = load_data(recipe, execution.data_dir)
    recipe, data = prepare_data(recipe, data, execution)
    methods = named or default_methods(data.class_counts, features=data.is_features)
    concurrent = count_workers(len(methods) * len(seeds), execution.device, execution.workers)
    execution = dataclasses.replace(execution, dataset=data)
    if flags.budget is not None:
        recipe = fit_budget(recipe, methods, flags, dataclasses.replace(execution, concurrent=concurrent))
    recipes = comparison_recipes(recipe, methods, seeds)
    if flags.where.fresh:
        delete_runs(flags.out, recipes)
    where = device.type if execution.engine == "local" else "Ray"
    several = f", {concurrent} concurrently" if concurrent > 1 and execution.engine == "local" else ""
    print_note(
        f"recipe {recipe_name}: {recipe.model}, {count(recipe.epochs, 'epoch')} of "
        f"{count(len(data.train), 'image')}, on {where}; {count(len(methods), 'method')} x "
        f"{count(len(seeds), 'seed')}{several}, in {flags.out}"
    )
    console, finished = stderr_console(), find_finished(recipes, flags.out)
    with Display(recipes, console, work=work, finished=finished) as display:
        baseline = pick_baseline(methods, flags.baseline)
        comparison = compare(recipe, methods, seeds, baseline, execution=execution, display=display)
    return report(comparison, flags.out) if is_first_rank() else 0


def fit_budget(recipe: Recipe, methods: Sequence[str], flags: CompareFlags, execution: Execution) -> Recipe:
    """The recipe with as many epochs as --budget allows."""
    from icmixup.lab.sweep.budget import parse_budget, plan_epochs

    assert flags.budget is not None
    print_note(f"measuring the time of an epoch, for a budget of {flags.budget}")
    seconds = parse_budget(flags.budget)
    epochs = plan_epochs(recipe, methods, flags.seeds, seconds, execution, remeasure=flags.where.fresh)
    return dataclasses.replace(recipe, epochs=epochs, min_steps=0)


def check_compare(flags: CompareFlags) -> tuple[str, ...]:
    """The named methods, after validating all flags; loads no data."""
    from icmixup.lab.comparison.compare import check_methods, pick_baseline
    from icmixup.lab.sweep import check_execution
    from icmixup.lab.sweep.budget import parse_budget
    from icmixup.lab.training.ranks import world_size

    if flags.seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {flags.seeds}")
    if world_size() > 1 and (flags.budget is not None or flags.where.fresh):
        raise ValueError(
            "--budget and --fresh are not available under torchrun; use --epochs, or another --out folder"
        )
    if flags.budget is not None:
        parse_budget(flags.budget)
        if flags.concurrency.engine == "ray":
            raise ValueError(
                "--budget measures this machine, not a Ray cluster; with --engine ray use --epochs"
            )
    check_execution(flags.execution())
    named = flags.named_methods()
    if named:
        pick_baseline(check_methods(named), flags.baseline)
    return named


def report(comparison: Comparison, out: Path) -> int:
    """Write the files of a comparison and print its table."""
    from icmixup.lab.comparison.compare import write_comparison
    from icmixup.lab.comparison.figure import plot_comparison, write_png
    from icmixup.lab.comparison.table import print_comparison, stdout_console

    paths: list[Any] = [*write_comparison(comparison, out)]
    if comparison.rows:
        paths.append(write_png(plot_comparison(comparison), out / "comparison.png"))
    print_comparison(comparison, stdout_console())
    print_note("written: " + ", ".join(str(path) for path in paths))
    if not comparison.rows:
        raise ValueError(comparison.verdict)
    return 0
