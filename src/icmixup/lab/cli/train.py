"""icmixup train: one run."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from pathlib import Path

from icmixup.lab.cli.pretrained import prepare_data, resolve_recipe
from icmixup.lab.cli.shared import RecipeGroups, RecipeName, Where, groups_of, join_groups, make_execution
from icmixup.lab.cli.terminal import is_first_rank, stderr_console
from icmixup.lab.training.recipe import Recipe, Task

SUMMARY = "Train one run; with no flags, the paper's on CIFAR-100."
HELP = """Train one run, in its own folder under --out. After an interruption, the same command resumes.

  icmixup train --dataset cifar100 --fraction 0.1 --model resnet34 --method ic-mixup --seed 1
  icmixup train --recipe strong --dataset cifar10 --method ic-mixup-cutmix
  torchrun --nproc-per-node 8 -m icmixup train --dataset path/to/images --batch-size 1024"""


@dataclass(frozen=True, kw_only=True)
class TrainFlags(RecipeGroups, Task):
    """Train one run; with no flags, the paper's on CIFAR-100."""

    recipe: RecipeName | None = None
    """Starting point that other flags modify: the paper's recipe (default), a strong recipe of today, a quick
    one for a laptop and tiny images, finetune (default with --weights), or head (default with --train
    head)."""
    out: Path = Path("runs")
    """Folder of all runs."""
    where: Where = field(default_factory=Where)

    def run_recipe(self) -> Recipe:
        return join_groups(self, dataset=self.dataset, model=self.model, method=self.method, seed=self.seed)


def train_defaults(recipe: Recipe) -> TrainFlags:
    """The flags with the values of a recipe as defaults."""
    task = {entry.name: getattr(recipe, entry.name) for entry in dataclasses.fields(Task)}
    return TrainFlags(**task, **groups_of(recipe))


def run_train(flags: TrainFlags, recipe_name: str) -> int:
    """Train, and print one line."""
    recipe = resolve_recipe(flags.run_recipe(), recipe_name)
    from icmixup.lab.cli.data import load_data, settle_image_size
    from icmixup.lab.comparison.compare import delete_runs
    from icmixup.lab.sweep import find_finished
    from icmixup.lab.sweep.progress import Display
    from icmixup.lab.training.loop import train
    from icmixup.lab.training.ranks import pick_device, world_size

    if world_size() > 1 and flags.where.fresh:
        raise ValueError("--fresh is not available under torchrun; use another --out folder")
    pick_device(flags.where.device)
    recipe = settle_image_size(recipe, flags.where.data_dir, flags.where.device)
    data = load_data(recipe, flags.where.data_dir)
    execution = make_execution(flags.out, flags.where)
    recipe, data = prepare_data(recipe, data, execution)
    execution = dataclasses.replace(execution, dataset=data)
    if flags.where.fresh:
        delete_runs(flags.out, [recipe])
    with Display([recipe], stderr_console(), finished=find_finished([recipe], flags.out)) as display:
        row = train(recipe, execution, functools.partial(display.update, recipe))
        display.finish(row)
    if is_first_rank():
        epochs = f"epoch {recipe.epochs}/{recipe.epochs}"
        print(f"{flags.out / recipe.name}  {epochs}  loss {row['loss']:.3f}  accuracy {row['accuracy']:.1f}")
    return 0
