"""--tune N: the values of each method that matter most, chosen on a part of the training images.

Every method gets the same number of trials. A trial consists of ordinary runs, in the folder `trials` beside
the others: each trains on three quarters of the training images and is validated on the rest, never on the
test set. Where a quarter has few images, each of them is held out in turn, four runs a trial: the best of ten
trials on a hundred images is mostly the luckiest. The first trial of each method has the recipe's own values,
so the choice is never worse than those on the validation images.

Trials are compared by their negative log-likelihood, after temperature scaling and averaged over classes. By
accuracies, which jump with each image, the best of fifteen trials on 567 photos was worse on the test photos
than the recipe's own values (docs/findings.md).

Trials are suggested by Optuna, with a seeded sampler, in rounds of a fixed size: a second command suggests
the same ones, and finds their runs finished.

Searched are the learning rate, the weight decay, alpha of methods that mix, and the strength of logit
adjustment of methods that adjust: with a fixed strength the strongest baseline on long tails would be the
only method whose own setting is not tuned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import optuna
import torch
from optuna.distributions import BaseDistribution, FloatDistribution

from icmixup.calibration import mean_class_nll
from icmixup.lab.datasets import VALIDATION_PARTS, Dataset, validation_dataset
from icmixup.lab.sweep import delete_runs, find_finished, run_recipes
from icmixup.lab.sweep.progress import Display
from icmixup.lab.training.evaluate import balanced_accuracy, class_accuracies
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.loop import check_sizes
from icmixup.lab.training.output import rows_as_csv
from icmixup.lab.training.predictions import read_predictions
from icmixup.lab.training.recipe import Recipe, derive_seed
from icmixup.lab.training.run_folder import TRIALS_FOLDER, Row, write_atomically

TUNING_FILE = "tuning.csv"
# Values are searched between the recipe's value divided and multiplied by these factors.
SPANS = {"lr": 10.0, "weight_decay": 10.0, "alpha": 8.0, "adjust_tau": 3.0}
ROUND = 5  # trials of each method that are suggested before the results of the next ones are known
DIGITS = 3  # of suggested values
ENOUGH_IMAGES = 1000  # in one part, for trials to be validated on that part alone
Values = Mapping[str, float]  # fields of a recipe and their tuned values
Rows = Mapping[Recipe, Row]


@dataclass(frozen=True)
class Trial:
    """One set of values, and its results on the validation images."""

    method: str
    number: int  # from 0, which has the recipe's own values
    recipe: Recipe
    suggested: optuna.Trial = field(repr=False, compare=False)
    loss: float | None = None  # mean_class_nll of the validation images; None without a result
    balanced_accuracy: float | None = None  # averaged over classes, percent
    accuracy: float | None = None  # over images, percent
    rows: tuple[Row, ...] = field(default=(), repr=False)  # one for each part that was held out
    reason: str = ""  # why there is no result

    @property
    def values(self) -> dict[str, float]:
        """What is searched, with the values of this trial."""
        return tuned_values(self.recipe)


class Tuning(NamedTuple):
    """All trials, and the recipe fields that are replaced for each method."""

    trials: tuple[Trial, ...]
    best: dict[str, Values]
    number: int  # of trials per method
    parts: tuple[Dataset, ...]  # each holds out other training images

    def trials_of(self, method: str) -> list[Trial]:
        """In the order in which they were suggested."""
        return [trial for trial in self.trials if trial.method == method]

    def chosen(self, method: str) -> Trial:
        """The first trial that has the chosen values, which may be the recipe's own."""
        trials, values = self.trials_of(method), self.best[method]
        return next(trial for trial in trials if trial.values == values) if values else trials[0]


class Batch(NamedTuple):
    """Runs that are trained together: the trials of a round, with one part held out."""

    trials: Sequence[Trial]
    finished: Collection[Recipe]
    later: int  # number of runs that come after these
    part: str  # " part 2" if there are several parts

    def title_of(self, number: int) -> Callable[[Recipe], str]:
        """The display name of a run, given the number of trials per method."""
        numbers = {trial.recipe: trial.number + 1 for trial in reversed(self.trials)}
        return lambda recipe: f"{recipe.method} trial {numbers[recipe]} of {number}{self.part}"


ShowTrials = Callable[[Batch], AbstractContextManager[Display | None]]


def tune_methods(
    recipe: Recipe,
    methods: Sequence[str],
    number: int,
    *,
    execution: Execution,
    parts: int | None = None,
    show: ShowTrials | None = None,
    on_round: Callable[[Tuning], object] | None = None,
    fresh: bool = False,
) -> Tuning:
    """Run all trials of all methods, or find them finished.

    Args:
        recipe: everything but the method; all trials have its seed.
        number: trials per method, at least 1.
        execution: with its dataset, of which the test set is not used.
        parts: how many parts of the training images are held out, one after the other, from 1 to 4; by
            default as held_out_parts says.
        show: its display shows the progress of a batch.
        on_round: called after each round with the trials so far.
        fresh: delete existing trials first.
    """
    check_trials(number, parts)
    tuner = Tuner(recipe, methods, number, execution, parts)
    while asked := tuner.ask():
        if fresh:
            for each in tuner.executions:
                delete_runs([trial.recipe for trial in asked], each)
        tuner.tell(asked, *tuner.run(asked, show))
        if on_round is not None:
            on_round(tuner.tuning())
    return tuner.tuning()


def count_unfinished(
    recipe: Recipe, methods: Sequence[str], number: int, execution: Execution, parts: int | None = None
) -> tuple[int, dict[str, Values] | None]:
    """How many runs of trials are still to be trained, and the tuned values if none is."""
    check_trials(number, parts)
    tuner = Tuner(recipe, methods, number, execution, parts)
    while asked := tuner.ask():
        recipes = [trial.recipe for trial in asked]
        rows = [find_finished(recipes, each) for each in tuner.executions]
        missing = sum(len(asked) - len(found) for found in rows)
        if missing:
            return missing + tuner.left(), None
        tuner.tell(asked, rows, {})
    return 0, tuner.tuning().best


def held_out_parts(data: Dataset, parts: int | None = None) -> dict[int, Dataset]:
    """Datasets that each hold out another part of the training images, by the number of that part.

    Of classes of two or three images some parts have none; a part that is too small to test on is left out.

    Args:
        parts: how many are held out, from 1 to 4; by default all of them if each has few images.
    """
    few = len(data.train) < ENOUGH_IMAGES * VALIDATION_PARTS
    wanted = (VALIDATION_PARTS if few else 1) if parts is None else parts
    found = {number: validation_dataset(data, number) for number in range(wanted)}
    return {number: part for number, part in found.items() if number == 0 or len(part.test) > 1}


def check_trials(number: int | None, parts: int | None = None) -> None:
    """Raise a ValueError for settings of tuning that cannot be used; None is none."""
    if number is None:
        if parts is not None:
            raise ValueError(f"--tune-parts {parts} is a setting of --tune; add --tune 10, or leave it out")
        return
    if parts is not None and not 1 <= parts <= VALIDATION_PARTS:
        raise ValueError(f"--tune-parts must be from 1 to {VALIDATION_PARTS}, got {parts}")
    if number < 1:
        raise ValueError(
            f"tune must be at least 1 trial per method, got {number}; leave it out to train without tuning"
        )


def run_trials(
    recipes: Sequence[Recipe], execution: Execution, display: Display | None
) -> tuple[dict[Recipe, Row], dict[Recipe, str]]:
    """The rows of trials, and why others have none."""
    lost: dict[Recipe, str] = {}

    def fail(failed: Recipe, reason: str) -> None:
        lost[failed] = reason
        if display is not None:
            display.fail(failed, reason)

    rows = run_recipes(
        recipes,
        execution,
        on_row=None if display is None else display.finish,
        on_progress=None if display is None else display.update,
        on_failure=fail,
    )
    by_key = {row["key"]: row for row in rows}
    return {recipe: by_key[recipe.key] for recipe in recipes if recipe.key in by_key}, lost


class Tuner:
    """The searches of all methods, which advance together, round by round."""

    def __init__(
        self,
        recipe: Recipe,
        methods: Sequence[str],
        number: int,
        execution: Execution,
        parts: int | None = None,
    ) -> None:
        data = execution.loaded
        self.number = number
        held_out = held_out_parts(data, parts)
        self.parts = tuple(held_out.values())
        for part in self.parts:
            check_part(recipe, part, len(data.train))
        trials = replace(execution, out=execution.out / TRIALS_FOLDER)
        self.executions = [
            replace(trials, dataset=part, validation=number) for number, part in held_out.items()
        ]
        self.searches = [Search(replace(recipe, method=method)) for method in methods]
        self.trials: list[Trial] = []

    def ask(self) -> list[Trial]:
        """The trials of the next round, of each method in turn; none at the end."""
        size = min(ROUND, self.number - len(self.trials) // len(self.searches))
        asked = [search.ask(size) for search in self.searches]
        return [trial for trials in zip(*asked, strict=True) for trial in trials]

    def run(self, asked: Sequence[Trial], show: ShowTrials | None) -> tuple[list[Rows], dict[Recipe, str]]:
        """The rows of a round with each part held out, and why trials have none: those are not continued."""
        found: list[Rows] = []
        lost: dict[Recipe, str] = {}
        for number, execution in enumerate(self.executions):
            trials = [trial for trial in asked if trial.recipe not in lost]
            recipes = [trial.recipe for trial in trials]
            later = (len(self.executions) - number - 1) * len(trials) + self.left()
            part = f" part {number + 1}" if len(self.executions) > 1 else ""
            batch = Batch(trials, find_finished(recipes, execution), later, part)
            with nullcontext() if show is None else show(batch) as display:
                rows, without = run_trials(recipes, execution, display)
            found.append(rows)
            lost |= without
        return found, lost

    def tell(self, asked: Sequence[Trial], rows: Sequence[Rows], lost: Mapping[Recipe, str]) -> None:
        def result(trial: Trial) -> Trial:
            if any(trial.recipe not in found for found in rows):
                return replace(trial, reason=lost.get(trial.recipe, ""))
            return add_result(trial, [found[trial.recipe] for found in rows], self.executions[0].out)

        told = [result(trial) for trial in asked]
        for search in self.searches:
            search.tell([trial for trial in told if trial.method == search.recipe.method])
        self.trials += told

    def left(self) -> int:
        """Runs of trials that have not been asked for."""
        return len(self.parts) * sum(self.number - search.asked for search in self.searches)

    def tuning(self) -> Tuning:
        best = {search.recipe.method: pick_best(search.trials) for search in self.searches}
        return Tuning(tuple(self.trials), best, self.number, self.parts)


def check_part(recipe: Recipe, part: Dataset, images: int) -> None:
    """Raise a ValueError if the training part is smaller than a batch."""
    try:
        check_sizes(recipe, part)
    except ValueError as error:
        raise ValueError(
            f"tuning trains on {len(part.train)} of {images} training images, and validates on "
            f"{len(part.test)}: {error}"
        ) from error


class Search:
    """An Optuna study of one method: factors of the recipe's values, on a logarithmic scale."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.asked = recipe, 0
        self.trials: list[Trial] = []
        self.space: dict[str, BaseDistribution] = {
            name: FloatDistribution(1 / SPANS[name], SPANS[name], log=True) for name in tuned_values(recipe)
        }
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        seed = derive_seed(recipe.seed, 0, "tuning") % 2**32
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=ROUND)
        self.study = optuna.create_study(direction="minimize", sampler=sampler)
        self.study.enqueue_trial(dict.fromkeys(self.space, 1.0))

    def ask(self, size: int) -> list[Trial]:
        suggested = [self.study.ask(self.space) for _ in range(size)]
        trials = [
            Trial(self.recipe.method, self.asked + k, scale_values(self.recipe, trial.params), trial)
            for k, trial in enumerate(suggested)
        ]
        self.asked += size
        return trials

    def tell(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            # A trial that diverged is the worst: the search should avoid its neighbourhood.
            self.study.tell(trial.suggested, math.inf if trial.loss is None else trial.loss)
        self.trials += trials


def tuned_values(recipe: Recipe) -> dict[str, float]:
    """The values that are searched: those that the method uses, except a 0, which stays 0."""
    method = recipe.whole_method
    own = {name: getattr(method, name) for name in ("alpha", "adjust_tau") if method.uses(name)}
    values = {"lr": recipe.lr, "weight_decay": recipe.weight_decay, **own}
    return {name: value for name, value in values.items() if value}


def scale_values(recipe: Recipe, factors: Values) -> Recipe:
    """The recipe with its values multiplied; unchanged where a factor is 1."""
    now = tuned_values(recipe)
    changed = {name: round_digits(now[name] * factor) for name, factor in factors.items() if factor != 1}
    return replace(recipe, **changed)  # type: ignore[arg-type]


def round_digits(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def add_result(trial: Trial, rows: Sequence[Row], folder: Path) -> Trial:
    """The trial with its rows, one for each part; its results count every validation image once.

    Every class counts the same: the validation images of a long tail are a long tail, too.
    """
    found = [read_predictions(folder / row["folder"]).tensors() for row in rows]
    scores, labels = (torch.cat(part) for part in zip(*found, strict=True))
    return replace(
        trial,
        loss=mean_class_nll(scores, labels),
        balanced_accuracy=balanced_accuracy(class_accuracies(scores, labels)),
        accuracy=100 * (scores.argmax(dim=1) == labels).double().mean().item(),
        rows=tuple(rows),
    )


def pick_best(trials: Sequence[Trial]) -> Values:
    """The recipe fields of the best trial, the first of several; those of the recipe if none has a result."""
    scored = [trial for trial in trials if trial.loss is not None]
    if not scored:
        return {}
    best = min(scored, key=lambda trial: (trial.loss, trial.number))
    return {} if best.number == 0 else best.values


def write_tuning(tuning: Tuning, folder: Path) -> Path:
    """Write tuning.csv: one line per trial."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        trial_columns(trial) | {"chosen": trial is tuning.chosen(method)}
        for method in tuning.best
        for trial in tuning.trials_of(method)
    ]
    write_atomically(folder / TUNING_FILE, rows_as_csv(rows, TRIAL_COLUMNS).encode())
    return folder / TUNING_FILE


TRIAL_COLUMNS = (
    *("method", "trial", "lr", "weight_decay", "alpha", "adjust_tau"),
    *("mean_class_nll", "balanced_accuracy", "accuracy", "chosen", "status"),
    *("train_images", "minutes", "device", "torch", "commit", "date", "folder"),
)


def trial_columns(trial: Trial) -> dict[str, object]:
    row = trial.rows[0] if trial.rows else {}
    return {
        "trial": trial.number,
        **trial.values,
        "status": "finished" if trial.rows else f"no result: {trial.reason}",
        **{name: row[name] for name in TRIAL_COLUMNS if name in row and name not in trial.values},
        "mean_class_nll": "" if trial.loss is None else round(trial.loss, 6),
        "balanced_accuracy": "" if trial.balanced_accuracy is None else round(trial.balanced_accuracy, 4),
        "accuracy": "" if trial.accuracy is None else round(trial.accuracy, 4),
        "minutes": round(sum(row["minutes"] for row in trial.rows), 4) if trial.rows else "",
        "method": trial.method,
        "folder": " ".join(f"{TRIALS_FOLDER}/{row['folder']}" for row in trial.rows),
    }
