"""icmixup train: one run."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro import conf

from icmixup.lab.cli.loading import load_and_settle
from icmixup.lab.cli.shared import (
    RecipeFlags,
    Where,
    join_groups,
    make_execution,
    plain_path,
)
from icmixup.lab.cli.terminal import is_first_rank, print_note, stderr_console
from icmixup.lab.training.recipe import Recipe
from icmixup.lab.wording import count

SUMMARY = "Train one run on a dataset or a folder of images."
HELP = """Train one run, in its own folder under --out. After an interruption, the same command resumes.

  icmixup train path/to/images --method ic-mixup
  icmixup train cifar100 --fraction 0.1 --model resnet34 --method ic-mixup --seed 1
  icmixup train cifar100 --recipe paper                        the paper's run
  torchrun --nproc-per-node 8 -m icmixup train path/to/images --batch-size 1024"""


FIRST_LINES = 5.0  # seconds between lines of progress at first, where there is no terminal


@dataclass(frozen=True, kw_only=True)
class TrainFlags(RecipeFlags):
    """Train one run on a dataset or a folder of images."""

    data_name: Annotated[conf.Positional[str | None], conf.arg(metavar="[DATA]")] = None
    """digits, cifar10, cifar100, cifair10, cifair100, a folder of images, hf:owner/name, or features.npz;
    digits by default."""
    dataset_flag: Annotated[str | None, conf.arg(name="dataset")] = None
    """The same as DATA."""
    method: str = "ic-mixup"
    """A row of the table of methods: erm, mixup, ic-mixup, ..."""
    seed: int = 0
    """Seed of initial weights, order of images, augmentation and mixing."""
    out: Path = Path("runs")
    """Folder of all runs."""
    where: Where = field(default_factory=Where)

    @property
    def dataset(self) -> str:
        if self.data_name is not None and self.dataset_flag not in (None, self.data_name):
            raise ValueError(
                f"DATA is {self.data_name!r} but --dataset is {self.dataset_flag!r}; pass only one of them"
            )
        given = self.dataset_flag if self.data_name is None else self.data_name
        return "digits" if given is None else given

    def run_recipe(self) -> Recipe:
        data = plain_path(self.dataset)
        return join_groups(self, dataset=data, model=self.model, method=self.method, seed=self.seed)


def run_train(flags: TrainFlags, recipe_name: str, given: Collection[str]) -> int:
    """Train, and print one line.

    Args:
        given: fields whose flags were given, as opposed to those with the recipe's values.
    """
    from icmixup.lab.comparison.overview import describe_average, describe_duplicates, find_unused
    from icmixup.lab.sweep import check_out, delete_runs, describe_reuse, find_finished
    from icmixup.lab.sweep.progress import Display
    from icmixup.lab.sweep.signals import run_and_end
    from icmixup.lab.training.classifier import check_linear_classifier
    from icmixup.lab.training.loop import train
    from icmixup.lab.training.ranks import pick_device, world_size

    if world_size() > 1 and flags.where.fresh:
        raise ValueError("--fresh is not available under torchrun; use another --out folder")
    check_out(flags.out)
    execution = make_execution(flags.out, flags.where)
    recipe, execution = load_and_settle(flags.run_recipe(), recipe_name, given, (flags.method,), execution)
    data, device = execution.loaded, pick_device(execution.device)
    check_linear_classifier(recipe, data)
    if flags.where.fresh:
        delete_runs([recipe], execution)
    for note in describe_reuse([recipe], execution):
        print_note(note)
    print_note(
        f"recipe {recipe_name}: {recipe.method} with {recipe.model}, {count(recipe.epochs, 'epoch')} of "
        f"{count(len(data.train), 'image')} of {recipe.dataset}, on {device.type}"
    )
    unused = find_unused(recipe, [recipe.method], recipe_name)
    for warning in (*describe_duplicates(data), describe_average(recipe, len(data.train)), *unused):
        if warning:
            print_note(f"warning: {warning}")
    finished = find_finished([recipe], execution)
    with Display([recipe], stderr_console(), finished=finished, quiet_seconds=FIRST_LINES) as display:
        report = functools.partial(display.update, recipe)
        row = run_and_end(functools.partial(train, recipe, execution, report))
        display.finish(row)
    if is_first_rank():
        epochs = f"epoch {recipe.epochs}/{recipe.epochs}"
        print(
            f"{flags.out / row['folder']}  {epochs}  loss {row['loss']:.3f}  accuracy {row['accuracy']:.1f}"
        )
    return 0
