"""--tune of icmixup compare: what is left to train, the display of trials, and their file."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from icmixup.lab.cli.terminal import is_first_rank, print_note, stderr_console
from icmixup.lab.wording import count

if TYPE_CHECKING:
    from icmixup.lab.comparison.compare import Tuned
    from icmixup.lab.comparison.tuning import Batch, Trial, Tuning
    from icmixup.lab.sweep.progress import Display
    from icmixup.lab.training.execution import Execution
    from icmixup.lab.training.recipe import Recipe


def check_tune(
    number: int | None, parts: int | None, budget: str | None, folds: int | None, ranks: int
) -> None:
    """Raise a ValueError for a number of trials, or other flags, that cannot be used; loads no data."""
    if number is not None or parts is not None:
        from icmixup.lab.comparison.tuning import check_trials

        check_trials(number, parts)
    if number is None:
        return
    if budget is not None:
        raise ValueError(
            f"--tune {number} and --budget {budget} cannot be combined; use --epochs to shorten all runs"
        )
    if folds is not None:
        raise ValueError(
            f"--tune {number} and --folds {folds} cannot be combined: every fold needs trials of its own; "
            "tune on a training and a test set, then pass the values with --folds"
        )
    if ranks > 1:
        raise ValueError("--tune is not available under torchrun; start icmixup without it")


def describe_tuning(number: int, parts: int | None, execution: Execution) -> str:
    """One line for the overview; a ValueError if there can be no validation part."""
    from icmixup.lab.comparison.tuning import held_out_parts

    held_out = held_out_parts(execution.loaded, parts).values()
    train, test = span([len(part.train) for part in held_out]), span([len(part.test) for part in held_out])
    trials = f"{count(number, 'trial')} per method, "
    if len(held_out) == 1:
        return f"{trials}on {train} training images and {test} for validation"
    return (
        f"{trials}each trained on {len(held_out)} times {train} training images, the other {test} for "
        "validation"
    )


def span(numbers: Sequence[int]) -> str:
    """40, or 37 to 40."""
    fewest, most = min(numbers), max(numbers)
    return f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"


def run_tuning(
    recipe: Recipe,
    methods: Sequence[str],
    number: int,
    folder: Path,
    execution: Execution,
    *,
    parts: int | None,
    seeds: int,
    fresh: bool,
) -> Tuned:
    """Run the trials with a display, write tuning.csv after every round, and report the chosen values.

    Args:
        folder: of the comparison.
        parts: how many parts of the training images are held out in turn.
        seeds: per method, which are trained afterwards.
    """
    from icmixup.lab.comparison.tuning import tune_methods, write_tuning
    from icmixup.lab.sweep.cost import work
    from icmixup.lab.sweep.progress import Display

    final = seeds * sum(work(dataclasses.replace(recipe, method=method)) for method in methods)

    def show(batch: Batch) -> Display:
        recipes = [trial.recipe for trial in batch.trials]
        each = sum(work(one) for one in recipes) / max(1, len(recipes))
        return Display(
            recipes,
            stderr_console(),
            work=work,
            finished=batch.finished,
            title=batch.title_of(number),
            later=batch.later * each + final,
        )

    def write(tuning: Tuning) -> None:
        if is_first_rank():
            write_tuning(tuning, folder)

    tuning = tune_methods(
        recipe, methods, number, execution=execution, parts=parts, show=show, on_round=write, fresh=fresh
    )
    for line in describe_choices(tuning):
        print_note(line)
    return tuning.best


def describe_choices(tuning: Tuning) -> list[str]:
    """The chosen values of each method, and what they have on the validation images."""
    lines = []
    for method in tuning.best:
        first, best = tuning.trials_of(method)[0], tuning.chosen(method)
        written = ", ".join(f"{name} {value:.3g}" for name, value in best.values.items())
        default = "" if best is first else f" (the recipe's own values: {describe_result(first)})"
        lines.append(f"tuned {method}: {written}; validation {describe_result(best)}{default}")
    return lines


def describe_result(trial: Trial) -> str:
    """What a trial has on the validation images, averaged over classes."""
    if trial.loss is None:
        return "no result"
    return f"loss {trial.loss:.3f}, balanced accuracy {trial.balanced_accuracy:.1f} %"
