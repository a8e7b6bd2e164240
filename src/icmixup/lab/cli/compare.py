"""icmixup compare: train several methods with several seeds, and report which one helps."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from tyro import conf

from icmixup.lab.cli.loading import count_images_of_a_run, load_and_settle
from icmixup.lab.cli.shared import (
    Concurrency,
    Flag,
    RecipeFlags,
    Where,
    join_groups,
    make_execution,
    plain_path,
)
from icmixup.lab.cli.terminal import is_first_rank, print_note, stderr_console
from icmixup.lab.cli.tuning import check_tune, describe_tuning, run_tuning
from icmixup.lab.training.recipe import Recipe
from icmixup.lab.wording import count

if TYPE_CHECKING:
    from icmixup.lab.analysis.report.live import LiveReport
    from icmixup.lab.comparison.compare import Comparison, Tuned
    from icmixup.lab.comparison.overview import Overview
    from icmixup.lab.datasets import Dataset
    from icmixup.lab.sweep.budget import Filler
    from icmixup.lab.training.execution import Execution

MAX_SEEDS = 10  # by default, with --seeds auto
SUMMARY = "Train several methods with several seeds on the same images, and report which one helps."
HELP = f"""{SUMMARY}

Differences are paired by seed and reported with 95 % confidence intervals. After an interruption, the same
command resumes. The table is printed on standard output, everything else on standard error. Every comparison
has its own folder in --out, with comparison.json, comparison.csv, comparison.png, per_class.csv, a confusion
matrix for each method and confused_pairs.csv; runs are shared between comparisons. report.html shows all of
it in a browser, and is rewritten after every run: --open opens it while the runs train.

  icmixup compare digits --per-class 100 --imbalance 0.01      a long tail, in minutes on a laptop
  icmixup compare path/to/images --budget 30m                  what fits into half an hour
  icmixup compare cifar100 --fraction 0.1 --methods erm mixup ic-mixup --seeds 5
  icmixup compare cifar10 --recipe paper --baseline erm        the paper's recipe, differences to ERM
  icmixup compare digits --seeds auto --max-seeds 8            as many seeds as it takes to find the best
  icmixup compare path/to/few/images --folds 5                 cross-validation instead of a test set
  icmixup compare path/to/images --tune 10                     tune each method first, on training images
  icmixup compare path/to/photos --model resnet50.a1_in1k --weights pretrained        fine-tune
  icmixup compare path/to/photos --model resnet50.a1_in1k --weights pretrained --train head
  icmixup compare features.npz                                 a linear head on features, in seconds"""


@dataclass(frozen=True, kw_only=True)
class Page:
    """The HTML report."""

    report: bool = True
    """Write report.html into the comparison's folder, and rewrite it after every run."""
    open: Flag = False
    """Open report.html in a browser after the first run."""


@dataclass(frozen=True, kw_only=True)
class CompareFlags(RecipeFlags):
    """Train several methods with several seeds on the same images, and report which one helps."""

    dataset: Annotated[conf.Positional[str], conf.arg(metavar="[DATA]")] = "digits"
    """digits, cifar10, cifar100, cifair10, cifair100, a folder of images, hf:owner/name, or features.npz."""
    methods: tuple[str, ...] | None = None
    """Methods to compare, rows of the table of methods separated by spaces or commas; by default a selection
    for balanced or for long-tailed classes."""
    seeds: int | Literal["auto"] = 3
    """Number of seeds per method; an interval needs at least two and narrows with more. auto adds seeds
    until the best method is found, and drops methods that are clearly behind."""
    max_seeds: int | None = None
    """Largest number of seeds per method with --seeds auto, by default 10."""
    intervals: Literal["both", "seeds"] = "both"
    """What confidence intervals cover: new seeds and new test images, or new seeds only."""
    measure: Literal["accuracy", "balanced-accuracy"] = "accuracy"
    """What methods are compared in: the accuracy over all test images, or its average over classes. They
    differ if test classes differ in size, as in a fifth of your own long-tailed photos."""
    baseline: str | None = None
    """Baseline method; by default mixup, or the first method if mixup is not compared."""
    budget: str | None = None
    """Time for the whole command, for example 90s, 5m or 1h30m; unlimited by default. If the runs do not fit,
    seeds are dropped first, then methods from the end of --methods, then epochs; a time in which nothing can
    be learned is refused. With --seeds auto it also ends the adding of seeds."""
    folds: int | None = None
    """Cross-validation, for data too small for a test set: all images of DATA, training and test, in this
    many folds, each of which is tested by networks trained on the others. Takes as many times longer."""
    tune: int | None = None
    """Trials per method to choose its learning rate, weight decay, alpha, and strength of logit adjustment on
    held-out training images, before it is trained with all seeds on all of them."""
    tune_parts: int | None = None
    """Quarters of the training images that each trial is validated on in turn, from 1 to 4, one run for each.
    By default all 4 if a quarter has fewer than 1,000 images, otherwise 1."""
    seed: int = 0
    """First seed; a seed determines initial weights, order of images, augmentation and mixing."""
    out: Path = Path("runs")
    """Folder of all runs and comparisons."""
    name: str | None = None
    """Name of the comparison's folder in --out; by default made from data, model and recipe."""
    where: Where = field(default_factory=Where)
    concurrency: Concurrency = field(default_factory=Concurrency)
    page: Page = field(default_factory=Page)

    def shared_recipe(self) -> Recipe:
        """What all runs of the comparison share."""
        data = plain_path(self.dataset)
        task = {"dataset": data, "model": self.model, "method": "mixup", "seed": self.seed}
        return join_groups(self, **task, folds=self.folds)

    def most_seeds(self) -> int:
        return MAX_SEEDS if self.max_seeds is None else self.max_seeds

    def seed_range(self) -> range:
        """The seeds of the comparison; with --seeds auto those that it may use."""
        return range(self.seed, self.seed + (self.most_seeds() if self.seeds == "auto" else self.seeds))

    def execution(self) -> Execution:
        return make_execution(self.out, self.where, self.concurrency)

    def named_methods(self) -> tuple[str, ...]:
        return tuple(name for text in self.methods or () for name in text.replace(",", " ").split())


class ComparisonPlan(NamedTuple):
    """What is compared, once the data is known."""

    recipe: Recipe
    methods: tuple[str, ...]
    seeds: range
    baseline: str
    execution: Execution  # with its dataset
    concurrent: int
    data: Dataset  # one fold of it, with --folds
    full_epochs: int  # of the recipe, before --budget cut them
    budget: str = ""  # what --budget dropped, in words
    seconds: float | None = None  # left of --budget
    filler: Filler | None = None  # decides within --budget how many of the methods and seeds are trained

    @property
    def fit(self) -> tuple[tuple[str, ...], range]:
        """Methods and seeds as planned; with --budget possibly fewer than those asked for."""
        if self.filler is None:
            return self.methods, self.seeds
        return self.filler.plan.methods, self.seeds[: self.filler.plan.seeds]


def run_compare(flags: CompareFlags, recipe_name: str, given: Collection[str]) -> int:
    """Train, compare, print the table, write the files.

    Args:
        given: fields whose flags were given, as opposed to those with the recipe's values.
    """
    started = time.monotonic()
    named = check_compare(flags)
    from icmixup.lab.comparison.compare import (
        comparison_folder,
        comparison_name,
        comparison_recipes,
    )
    from icmixup.lab.sweep import delete_runs, describe_reuse, find_finished
    from icmixup.lab.sweep.budget import parse_budget
    from icmixup.lab.sweep.progress import duration

    plan = make_plan(flags, named, recipe_name, given, started)
    recipe, methods, seeds, baseline, execution, _, data, *_ = plan
    trials, tuned = trials_left(flags, plan)
    recipes = comparison_recipes(recipe, methods, seeds, tuned)
    named_seeds = seeds if (mode := seeds_mode(flags)) is None else (mode, *seeds)
    name = comparison_name(
        recipe,
        recipe_name,
        methods,
        named_seeds,
        baseline,
        data.fingerprint,
        flags.tune,
        tuning_parts(flags, plan),
        flags.measure,
    )
    folder = comparison_folder(flags.out, name if flags.name is None else flags.name)
    if flags.where.fresh and flags.tune is None:
        delete_runs(recipes, execution)
    planned = comparison_recipes(recipe, *plan.fit, tuned)
    finished = {} if trials else find_finished(planned, execution)  # values are not known before tuning
    overview = make_overview(plan, recipe_name, trials + len(planned) - len(finished), flags)
    print_overview(overview, folder, describe_reuse(recipes, execution))
    if flags.tune is not None:
        tuned = tune(flags, plan, folder)
    live = make_live_report(flags, plan, folder, overview, tuned)
    comparison = train_and_compare(flags, plan, tuned, live)
    if not is_first_rank():
        return 0
    comparison = dataclasses.replace(comparison, overview=final_overview(overview, plan).as_json())
    code = report(comparison, folder, flags.out, data.class_counts.tolist(), live)
    if flags.budget is not None:
        took = duration(time.monotonic() - started)
        print_note(f"took {took} of the {duration(parse_budget(flags.budget))} of --budget")
    return code


def seeds_mode(flags: CompareFlags) -> str | None:
    """What decides on the number of seeds, if it is not given: part of the name of a comparison."""
    if flags.seeds == "auto":
        return "auto"
    return None if flags.budget is None else f"budget {flags.budget}"


def make_plan(
    flags: CompareFlags, named: tuple[str, ...], recipe_name: str, given: Collection[str], started: float
) -> ComparisonPlan:
    """Load the data, and choose what depends on it.

    Args:
        given: fields whose flags were given.
        started: when the command began, by time.monotonic.
    """
    from icmixup.lab.comparison.compare import pick_baseline
    from icmixup.lab.comparison.folds import first_fold
    from icmixup.lab.sweep.local import count_workers

    seeds = flags.seed_range()
    recipe, execution = load_and_settle(
        flags.shared_recipe(), recipe_name, given, named, flags.execution(), partial(fewest_images, flags)
    )
    if recipe.train == "head":
        # Runs of seconds on small matrices: more processes or threads would cost more than they gain.
        workers = 1 if execution.workers is None else execution.workers
        execution = dataclasses.replace(execution, workers=workers, threads=1)
    data = first_fold(recipe, execution.loaded)
    methods = choose_methods(named, recipe, data)
    runs = len(methods) * len(seeds) * (recipe.folds or 1)
    concurrent = count_workers(runs, execution.device, execution.workers)
    baseline = pick_baseline(methods, flags.baseline)
    plan = ComparisonPlan(recipe, methods, seeds, baseline, execution, concurrent, data, recipe.epochs)
    return plan if flags.budget is None else fit_plan(plan, flags, recipe_name, started)


def fewest_images(flags: CompareFlags, recipe: Recipe, whole: Dataset) -> int:
    """The training images of the smallest run: of a trial with --tune, otherwise of the first fold."""
    if flags.tune is None:
        return count_images_of_a_run(recipe, whole)
    from icmixup.lab.comparison.tuning import held_out_parts

    return min(len(part.train) for part in held_out_parts(whole, flags.tune_parts).values())


def choose_methods(named: tuple[str, ...], recipe: Recipe, data: Dataset) -> tuple[str, ...]:
    """The named methods, if the recipe and its network can have them; by default those that they can."""
    from icmixup.lab.comparison.compare import default_methods
    from icmixup.lab.training.classifier import check_linear_classifier

    if named:
        for method in named:
            check_linear_classifier(dataclasses.replace(recipe, method=method), data)
        return named
    found = []
    for method in default_methods(data.class_counts, features=data.is_features):
        with suppress(ValueError):
            check_linear_classifier(dataclasses.replace(recipe, method=method), data)
            found.append(method)
    return tuple(found)


def trials_left(flags: CompareFlags, plan: ComparisonPlan) -> tuple[int, Tuned | None]:
    """Runs of trials that are not finished, and the tuned values if all are."""
    if flags.tune is None:
        return 0, None
    if flags.where.fresh:
        return flags.tune * len(plan.methods) * tuning_parts(flags, plan), None
    from icmixup.lab.comparison.tuning import count_unfinished

    return count_unfinished(plan.recipe, plan.methods, flags.tune, plan.execution, flags.tune_parts)


def tuning_parts(flags: CompareFlags, plan: ComparisonPlan) -> int:
    """How many parts of the training images are held out in turn; 1 without --tune."""
    if flags.tune is None:
        return 1
    from icmixup.lab.comparison.tuning import held_out_parts

    return len(held_out_parts(plan.execution.loaded, flags.tune_parts))


def tune(flags: CompareFlags, plan: ComparisonPlan, folder: Path) -> Tuned:
    """The tuned values of each method; with --fresh, runs with these values are deleted."""
    from icmixup.lab.comparison.compare import comparison_recipes
    from icmixup.lab.sweep import delete_runs

    assert flags.tune is not None
    recipe, methods, seeds, fresh = plan.recipe, plan.methods, plan.seeds, flags.where.fresh
    tuned = run_tuning(
        recipe,
        methods,
        flags.tune,
        folder,
        plan.execution,
        parts=flags.tune_parts,
        seeds=len(seeds),
        fresh=fresh,
    )
    if fresh:
        delete_runs(comparison_recipes(recipe, methods, seeds, tuned), plan.execution)
    return tuned


def make_overview(plan: ComparisonPlan, recipe_name: str, runs: int, flags: CompareFlags) -> Overview:
    """What is compared, with the time that the remaining runs will take."""
    from icmixup.lab.comparison.overview import describe_comparison
    from icmixup.lab.sweep.budget import count_runs
    from icmixup.lab.training.ranks import pick_device

    local = plan.execution.engine == "local"
    where = pick_device(plan.execution.device).type if local else "Ray"
    several = f", {plan.concurrent} runs concurrently" if local and plan.concurrent > 1 else ""
    timed = dataclasses.replace(plan.execution, concurrent=plan.concurrent)
    whole = plan.execution.loaded
    if plan.filler is not None:
        total = count_runs(plan.filler.plan.fit, plan.recipe)
        seconds: float | None = plan.filler.planned_end(total - runs) if runs else 0.0
    elif plan.seconds is not None:
        seconds = plan.seconds
    else:
        seconds = estimate_time(plan.recipe, plan.methods, runs, timed)
    return describe_comparison(
        plan.recipe,
        plan.data,
        *plan.fit,
        recipe_name=recipe_name,
        where=where + several,
        seconds=seconds,
        adaptive=flags.seeds == "auto",
        budget=plan.budget,
        tuning="" if flags.tune is None else describe_tuning(flags.tune, flags.tune_parts, plan.execution),
        tune_parts=flags.tune_parts,
        measure=flags.measure,
        tested=None if plan.recipe.folds is None else len(whole.train) + len(whole.test),
    )


def final_overview(overview: Overview, plan: ComparisonPlan) -> Overview:
    """The overview with the methods and seeds that --budget left in the end."""
    from icmixup.lab.sweep.budget import describe_fit

    if plan.filler is None:
        return overview
    methods, seeds = plan.fit
    dropped = describe_fit(plan.filler.question.asked, plan.filler.fit)
    return dataclasses.replace(overview, methods=methods, seeds=tuple(seeds), budget=dropped)


def make_live_report(
    flags: CompareFlags, plan: ComparisonPlan, folder: Path, overview: Overview, tuned: Tuned | None
) -> LiveReport | None:
    """What rewrites report.html after each run; None with --no-report and on ranks that do not report."""
    if not flags.page.report or not is_first_rank():
        return None
    from icmixup.lab.analysis.report.live import LiveReport
    from icmixup.lab.cli.report import open_in_browser

    return LiveReport(
        folder,
        plan.recipe,
        plan.fit[0],
        tuple(plan.seeds),
        plan.baseline,
        plan.execution,
        overview.as_json(),
        tuned=tuned,
        full_epochs=plan.full_epochs,
        measure=flags.measure,
        note=print_note,
        on_first_page=open_in_browser if flags.page.open else None,
    )


def train_and_compare(
    flags: CompareFlags, plan: ComparisonPlan, tuned: Tuned | None, live: LiveReport | None = None
) -> Comparison:
    """Train with a fixed number of seeds, or with as many as it takes."""
    from icmixup.lab.analysis.report.live import ReportingDisplay
    from icmixup.lab.comparison.adaptive import compare_adaptively
    from icmixup.lab.comparison.compare import compare, comparison_recipes
    from icmixup.lab.sweep import find_finished
    from icmixup.lab.sweep.cost import work

    recipe, methods, seeds, baseline, execution, *_ = plan

    def show(recipes: Sequence[Recipe]) -> ReportingDisplay:
        finished = find_finished(recipes, execution)
        display = ReportingDisplay(recipes, stderr_console(), work=work, finished=finished)
        display.live = live
        return display

    full_epochs, intervals, measure = plan.full_epochs, flags.intervals, flags.measure
    if flags.seeds != "auto":
        with show(comparison_recipes(recipe, *plan.fit, tuned)) as display:
            return compare(
                *(recipe, methods, seeds, baseline),
                execution=execution,
                display=display,
                intervals=intervals,
                measure=measure,
                full_epochs=full_epochs,
                tuned=tuned,
                filler=plan.filler,
            )
    comparison = compare_adaptively(
        *(recipe, methods, seeds, baseline),
        execution=execution,
        show=show,
        intervals=intervals,
        measure=measure,
        seconds=plan.seconds,
        full_epochs=full_epochs,
        tuned=tuned,
    )
    print_note(f"stopped after {count(len(comparison.seeds), 'seed')}: {comparison.stop}")
    return comparison


def estimate_time(recipe: Recipe, methods: Sequence[str], runs: int, execution: Execution) -> float | None:
    """Seconds for the remaining runs, None where a trial on this machine cannot tell."""
    from icmixup.lab.comparison.folds import first_fold, fold_recipes
    from icmixup.lab.sweep.cost import slowest
    from icmixup.lab.sweep.speed import estimate_seconds
    from icmixup.lab.training.loop import check_sizes
    from icmixup.lab.training.ranks import world_size

    if not runs:
        return 0.0
    # A trial would take as long as compiling, and under torchrun all ranks would have to stop together.
    if recipe.compile or execution.engine == "ray" or world_size() > 1:
        return None
    check_sizes(recipe, first_fold(recipe, execution.loaded))
    return estimate_seconds(fold_recipes(recipe)[0], slowest(methods), runs, execution)


def print_overview(overview: Overview, folder: Path, notes: Sequence[str]) -> None:
    """Print what is compared, where the result will be, and what could make it less useful."""
    for what, value in (*overview.lines(), ("folder", str(folder))):
        print_note(f"{what + ':':<14}{value}")
    for warning in overview.warnings:
        print_note(f"warning: {warning}")
    for note in notes:
        print_note(note)


def fit_plan(plan: ComparisonPlan, flags: CompareFlags, recipe_name: str, started: float) -> ComparisonPlan:
    """The plan with the seeds, methods and epochs that fit into --budget, and a note of what was dropped."""
    from icmixup.lab.comparison.folds import fold_recipes
    from icmixup.lab.sweep.budget import (
        FEWEST_SEEDS,
        Question,
        describe_fit,
        find_plan,
        fit_budget,
        make_filler,
        parse_budget,
    )
    from icmixup.lab.training.recipe import change_epochs, fewest_epochs

    assert flags.budget is not None
    auto = flags.seeds == "auto"
    question = Question(
        recipe=fold_recipes(plan.recipe)[0],
        methods=plan.methods,
        seeds=FEWEST_SEEDS if auto else len(plan.seeds),  # further ones are added while there is time
        baseline=plan.baseline,
        floor=fewest_epochs(plan.recipe, recipe_name, len(plan.data.train)),
    )
    execution = dataclasses.replace(plan.execution, concurrent=plan.concurrent)
    seconds, elapsed = parse_budget(flags.budget), time.monotonic() - started
    if flags.where.fresh or find_plan(question, seconds, execution) is None:
        print_note(f"measuring the speed of training, for a budget of {flags.budget}")
    else:
        print_note("resuming with what was chosen for this budget before; --fresh measures and trains again")
    fitted, left = fit_budget(question, seconds, execution, remeasure=flags.where.fresh, elapsed=elapsed)
    dropped = describe_fit(question.asked, fitted.fit)
    if dropped:
        print_note(f"warning: to fit into {flags.budget}, only {dropped}")
    if auto:
        plan = plan._replace(methods=fitted.methods, seconds=left)
    else:
        plan = plan._replace(filler=make_filler(question, fitted, seconds, execution, seconds - left))
    return plan._replace(
        recipe=change_epochs(plan.recipe, fitted.epochs),
        execution=dataclasses.replace(plan.execution, workers=fitted.workers),
        concurrent=fitted.workers,
        budget=dropped,
    )


def check_compare(flags: CompareFlags) -> tuple[str, ...]:
    """The named methods, after validating all flags; loads no data."""
    from icmixup.lab.comparison.compare import check_methods, comparison_folder, pick_baseline
    from icmixup.lab.sweep import check_execution
    from icmixup.lab.sweep.budget import parse_budget
    from icmixup.lab.training.ranks import world_size

    check_seeds(flags)
    if flags.folds is not None and world_size() > 1:
        raise ValueError("--folds is not available under torchrun; use a test set")
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
    check_tune(flags.tune, flags.tune_parts, flags.budget, flags.folds, world_size())
    check_execution(flags.execution())
    if flags.name is not None:
        comparison_folder(flags.out, flags.name)
    if flags.methods is None:
        return ()
    named = check_methods(flags.named_methods())
    pick_baseline(named, flags.baseline)
    return named


def check_seeds(flags: CompareFlags) -> None:
    """Raise a ValueError for a number of seeds that cannot be used."""
    from icmixup.lab.comparison.correction import error_at_looks
    from icmixup.lab.training.ranks import world_size

    if flags.seeds != "auto":
        if flags.seeds < 1:
            raise ValueError(f"--seeds must be at least 1, got {flags.seeds}")
        if flags.max_seeds is not None:
            raise ValueError(f"--max-seeds {flags.max_seeds} needs --seeds auto, got --seeds {flags.seeds}")
        return
    error_at_looks(flags.most_seeds())
    if world_size() > 1:
        raise ValueError("--seeds auto is not available under torchrun; use a number of seeds")


def report(
    comparison: Comparison,
    folder: Path,
    runs: Path,
    class_counts: Sequence[int],
    live: LiveReport | None = None,
) -> int:
    """Write the files of a comparison and print its table."""
    from icmixup.lab.comparison.classes import write_class_files
    from icmixup.lab.comparison.compare import (
        changes_verdict,
        remove_outdated,
        replaces_other_runs,
        write_comparison,
    )
    from icmixup.lab.comparison.figure import plot_comparison, write_png
    from icmixup.lab.comparison.table import print_comparison, stdout_console

    replaces = replaces_other_runs(comparison, folder)
    outdates = replaces or changes_verdict(comparison, folder)
    paths = [*write_comparison(comparison, folder)]
    paths += [folder / "tuning.csv"] if comparison.tuned else []
    if comparison.rows:
        paths.append(write_png(plot_comparison(comparison), folder / "comparison.png"))
        paths += write_class_files(folder, runs, comparison.rows, comparison.methods, class_counts)
    print_comparison(comparison, stdout_console())
    if live is not None and (page := live.finish(comparison)) is not None:
        paths.append(page)
    if outdates:
        remove_outdated(folder, paths)
    if replaces:
        print_note(f"{folder} had a comparison of other runs, which is replaced; the runs are kept")
    print_note(f"written to {folder}: " + ", ".join(path.name for path in paths))
    if not comparison.rows:
        raise ValueError(comparison.verdict)
    for failure in comparison.failures:
        print_note(f"icmixup: {failure.method} seed {failure.seed} has no result: {failure.reason}")
    return 1 if comparison.failures else 0
