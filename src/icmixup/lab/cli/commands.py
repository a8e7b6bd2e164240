"""What each command does once its flags are read. Tables go to stdout, all else to stderr."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from icmixup.lab.sweep.budget import parse_budget, plan_epochs, work
from icmixup.lab.comparison.compare import (
    Comparison,
    check_methods,
    compare,
    default_methods,
    forget_runs,
    pick_baseline,
    plan_runs,
    write_comparison,
)
from icmixup.lab.datasets import DATASETS, Dataset
from icmixup.lab.sweep.ray import check_call, find_finished
from icmixup.lab.comparison.figure import plot_comparison, write_png
from icmixup.lab.cli.flags import Common, CompareFlags, DataFlags, TrainFlags
from icmixup.lab.datasets.inspect import check_dataset, describe_dataset, get_dataset, list_datasets
from icmixup.lab.sweep.progress import Display
from icmixup.lab.training.ranks import pick_device, rank, world_size
from icmixup.lab.training.recipe import Recipe
from icmixup.lab.comparison.table import print_comparison, stdout_console
from icmixup.lab.training.loop import load_recipe_data, train
from icmixup.lab.sweep.local import count_workers

SHORT_BATCH = 0.25  # of a batch: a last one below that is worth a word


def run_compare(flags: CompareFlags, start: str) -> int:
    """Train, compare, print the table, write the files."""
    common, console, recipe = flags.common, stderr_console(), flags.recipe()
    named = check_compare(flags)
    seeds = range(recipe.seed, recipe.seed + flags.seeds)
    device = pick_device(common.device)
    data = load_data(recipe, common.data_dir, console)
    methods = named or default_methods(data.class_counts)
    baseline = pick_baseline(methods, flags.baseline)
    number = len(methods) * len(seeds)
    at_once = count_workers(number, common.device, flags.workers)
    if flags.budget is not None:
        tell(console, f"measuring how long an epoch takes, for a budget of {flags.budget}")
        recipe = fit_budget(recipe, methods, flags, data, at_once)
    recipes = plan_runs(recipe, methods, seeds)
    if common.fresh:
        forget_runs(common.out, recipes)
    where = device.type if flags.engine == "local" else "Ray"
    several = f", {at_once} at once" if at_once > 1 and flags.engine == "local" else ""
    what = f"{count(len(methods), 'method')} x {count(len(seeds), 'seed')}{several}, in {common.out}"
    tell(console, f"recipe {start}: {describe(recipe, data)}, on {where}; {what}")
    with Display(recipes, console, work=work, rests=find_finished(recipes, common.out)) as display:
        comparison = compare(
            recipe,
            methods,
            seeds,
            baseline,
            root=common.out,
            data_dir=common.data_dir,
            dataset=data,
            display=display,
            workers=flags.workers,
            engine=flags.engine,
            address=flags.address,
            device=common.device,
            trackers=common.trackers,
        )
    return report(comparison, common, console) if rank() == 0 else 0


def describe(recipe: Recipe, data: Dataset) -> str:
    return f"{recipe.model}, {count(recipe.epochs, 'epoch')} of {count(len(data.train), 'image')}"


def fit_budget(
    recipe: Recipe, methods: Sequence[str], flags: CompareFlags, data: Dataset, at_once: int
) -> Recipe:
    """The recipe with as many epochs as --budget allows."""
    assert flags.budget is not None
    epochs = plan_epochs(
        recipe,
        methods,
        flags.seeds,
        parse_budget(flags.budget),
        root=flags.common.out,
        data_dir=flags.common.data_dir,
        dataset=data,
        device=pick_device(flags.common.device),
        at_once=at_once,
        again=flags.common.fresh,
    )
    return dataclasses.replace(recipe, epochs=epochs)


def check_compare(flags: CompareFlags) -> tuple[str, ...]:
    """The methods that were named, after all that can be wrong with flags was looked for; reads no data."""
    if flags.seeds < 1:
        raise ValueError(f"--seeds {flags.seeds} trains nothing; give 3, say")
    if world_size() > 1 and (flags.budget is not None or flags.common.fresh):
        raise ValueError(
            "--budget and --fresh are for one process; under torchrun, give --epochs or another --out"
        )
    if flags.budget is not None:
        parse_budget(flags.budget)
        if flags.engine == "ray":
            raise ValueError(
                "--budget measures this machine, not a cluster; with --engine ray, give --epochs"
            )
    check_call(flags.engine, flags.address, flags.workers, flags.common.device)
    named = tuple(name for text in flags.methods for name in text.replace(",", " ").split())
    if named:
        pick_baseline(check_methods(named), flags.baseline)
    return named


def report(comparison: Comparison, common: Common, console: Console) -> int:
    """Everything that is left behind by a comparison."""
    paths = [*write_comparison(comparison, common.out)]
    if comparison.rows:
        paths.append(write_png(plot_comparison(comparison), common.out / "comparison.png"))
    print_comparison(comparison, stdout_console())
    tell(console, "written: " + ", ".join(str(path) for path in paths))
    if not comparison.rows:
        raise ValueError(comparison.verdict)
    return 0


def run_train(flags: TrainFlags) -> int:
    """One run, one line."""
    common, console, recipe = flags.common, stderr_console(), flags.run
    if world_size() > 1 and common.fresh:
        raise ValueError("--fresh is for one process; under torchrun, give another --out")
    device = pick_device(common.device)
    data = load_data(recipe, common.data_dir, console)
    if common.fresh:
        forget_runs(common.out, [recipe])
    with Display([recipe], console, rests=find_finished([recipe], common.out)) as display:
        row = train(
            recipe,
            common.out,
            data_dir=common.data_dir,
            dataset=data,
            device=device,
            on_beat=functools.partial(display.beat, recipe),
            trackers=common.trackers,
        )
        display.finish(row)
    if rank() == 0:
        epochs = f"epoch {recipe.epochs}/{recipe.epochs}"
        print(f"{common.out / recipe.name}  {epochs}  loss {row['loss']:.3f}  accuracy {row['accuracy']:.1f}")
    return 0


def run_data(flags: DataFlags) -> int:
    """List, get or check datasets; 1 if a check failed."""
    if flags.action == "list":
        return show_listing(flags.data_dir)
    if flags.name is None:
        raise ValueError(f"icmixup data {flags.action} needs a name: {', '.join(DATASETS)}, or a folder")
    check_folder(flags.name)
    if flags.action == "get":
        dataset = get_dataset(flags.name, flags.data_dir, show_progress=True)
        show_rows(("", ""), describe_dataset(dataset))
        return 0
    checks = check_dataset(flags.name, flags.data_dir, show_progress=True)
    marks = {True: "yes", False: "NO", None: "no, as published"}
    show_rows(("claim", "found", "holds"), [(c.claim, c.found, marks[c.holds]) for c in checks])
    return 1 if any(check.holds is False for check in checks) else 0


def show_listing(data_dir: Path) -> int:
    rows = [
        (entry.name, f"{entry.train:,}", f"{entry.test:,}", str(entry.classes), entry.size, entry.where)
        for entry in list_datasets(data_dir)
    ]
    others = "images in subfolders, one a class; or train/ and test/ of those"
    rows += [
        ("a folder", "", "", "", "any", others),
        ("hf:owner/name", "", "", "", "any", "the Hugging Face hub: pip install icmixup[hub]"),
    ]
    return show_rows(("dataset", "train", "test", "classes", "image", "where"), rows)


def show_rows(headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> int:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_header=any(headings))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    stdout_console().print(table, highlight=False, markup=False)
    return 0


def load_data(recipe: Recipe, data_dir: Path, console: Console) -> Dataset:
    """The recipe's images; files that could not be read are counted aloud."""
    check_folder(recipe.dataset)
    data = load_recipe_data(recipe, data_dir, show_progress=console.is_terminal)
    if data.skipped:
        unread = (
            f"{count(len(data.skipped), 'file')} could not be read and stayed out, first {data.skipped[0]}"
        )
        tell(console, unread)
    if warning := say_last_batch(recipe, len(data.train)):
        tell(console, warning)
    return data


def say_last_batch(recipe: Recipe, images: int) -> str:
    """What to do about a last batch that is far too small for BatchNorm, or nothing."""
    batches, last = divmod(images, recipe.batch_size)
    if recipe.drop_last or not batches or not 0 < last < SHORT_BATCH * recipe.batch_size:
        return ""
    return (
        f"every epoch ends with a batch of {count(last, 'image')}, which can cost points of accuracy; "
        "--drop-last leaves it out"
    )


def check_folder(name: str) -> None:
    """Offer the nearest folder where a path leads nowhere; other names are the data room's to judge."""
    path = Path(name)
    if name.startswith("hf:") or path.is_dir() or os.sep not in name:
        return
    if path.exists():
        raise ValueError(
            f"{name!r} is a file; give the folder that holds a subfolder of images for each class"
        )
    beside = [entry.name for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []
    near = [str(path.parent / found) for found in get_close_matches(path.name, beside, n=3)]
    hint = (
        f"did you mean {' or '.join(near)}?"
        if near
        else f"give one of {', '.join(DATASETS)}, or another path"
    )
    raise ValueError(f"no folder {name!r}; {hint}")


def stderr_console() -> Console:
    return Console(stderr=True, quiet=rank() != 0)


def tell(console: Console, text: str) -> None:
    """One line, as it is."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
