"""Progress of runs: bars in a terminal, plain lines elsewhere, all on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

if TYPE_CHECKING:
    from icmixup.lab.training.loop import RunProgress
    from icmixup.lab.training.recipe import Recipe

QUIET_SECONDS = 60.0  # longest time without a line where there is no terminal


def short_title(recipe: Recipe) -> str:
    fold = "" if recipe.fold is None else f" fold {recipe.fold}"
    return f"{recipe.method} seed {recipe.seed}{fold}"


class Display:
    """A line for each run that ends, and the estimated time left, for sequential and concurrent runs.

    In a terminal a bar for all runs and one for each run in progress; elsewhere at least a line per minute.

    Args:
        work: the cost of a run, in any unit.
        finished: runs that are already finished and take no time.
        seconds_each: seconds per unit of work, from earlier results; None if unknown.
        title: display name of a run.
        later: work of runs that come after these, for the estimate of the time left.
        quiet_seconds: time until the first line where there is no terminal; it doubles up to a minute.
    """

    def __init__(
        self,
        recipes: Sequence[Recipe],
        console: Console,
        *,
        work: Callable[[Recipe], float] = lambda _: 1.0,
        finished: Collection[Recipe] = (),
        seconds_each: float | None = None,
        title: Callable[[Recipe], str] = short_title,
        quiet_seconds: float | None = None,
        later: float = 0.0,
    ) -> None:
        self.later = later
        self.quiet = QUIET_SECONDS if quiet_seconds is None else quiet_seconds
        self.recipes: dict[str, Recipe] = {}
        self.work: dict[str, float] = {}
        self.work_of = work
        self.done: dict[str, float] = {}  # share of each run
        self.before: dict[str, float] = {}  # share done before a resume
        self.ended: set[str] = set()
        self.guess, self.console, self.title = seconds_each, console, title
        self.began = self.printed = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.fields[detail]}"))
        self.progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.overall = self.progress.add_task("", detail="")
        self.bars: dict[str, TaskID] = {}  # of runs in progress
        self.expect(recipes, finished)

    def __enter__(self) -> Self:
        self.progress.start()
        self.show()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def expect(self, recipes: Sequence[Recipe], finished: Collection[Recipe] = ()) -> None:
        """Show these runs, all that there are: others that have not begun are dropped, new ones added."""
        begun = self.ended | self.before.keys()
        kept = {key: recipe for key, recipe in self.recipes.items() if key in begun}
        expected = {recipe.key: recipe for recipe in recipes}
        for key in expected.keys() - self.recipes.keys():
            recipe = expected[key]
            self.work[key] = 0.0 if recipe in finished else self.work_of(recipe)
        self.recipes = expected | kept
        self.work = {key: self.work[key] for key in self.recipes}
        self.done = {key: self.done.get(key, 0.0) for key in self.recipes}
        total = max(sum(self.work.values()), 1e-9)
        self.progress.update(self.overall, total=total, visible=len(self.recipes) > 1)

    def update(self, recipe: Recipe, progress: RunProgress) -> None:
        """Show the progress of a run."""
        key = recipe.key
        self.before.setdefault(key, max(0.0, progress.epoch - 1) / progress.epochs)
        self.done[key] = min(1.0, progress.epoch / progress.epochs)
        if key not in self.bars:
            self.bars[key] = self.progress.add_task(self.title(recipe), total=progress.epochs, detail="")
        detail = f"epoch {progress.epoch:.0f} of {progress.epochs}, {describe_progress(progress)}"
        self.progress.update(self.bars[key], completed=progress.epoch, detail=detail)
        self.show()
        if not self.console.is_terminal and time.monotonic() - self.printed > self.quiet:
            self.print(f"{self.title(recipe)}: {detail}")
            self.quiet = min(2 * self.quiet, QUIET_SECONDS)

    def finish(self, row: dict[str, Any]) -> None:
        """Report a run with a row, from this session or an earlier one."""
        took = duration(60 * row["minutes"]) if self.work[row["key"]] else "finished before"
        self.end(
            self.recipes[row["key"]], f"accuracy {row['accuracy']:.1f} %, loss {row['loss']:.3f}, {took}"
        )

    def fail(self, recipe: Recipe, reason: str) -> None:
        self.end(recipe, f"no result: {reason}")

    def end(self, recipe: Recipe, text: str) -> None:
        self.ended.add(recipe.key)
        self.done[recipe.key] = 1.0
        if recipe.key in self.bars:
            self.progress.remove_task(self.bars.pop(recipe.key))
        count = f"[{len(self.ended):>{len(str(len(self.recipes)))}}/{len(self.recipes)}]"
        left = f"; {self.left()}" if self.seconds_left() else ""
        self.print(f"{count} {self.title(recipe)}: {text}{left}")
        self.show()

    def show(self) -> None:
        """Update the bar of all runs."""
        runs = f"{len(self.ended)} of {len(self.recipes)} runs"
        self.progress.update(self.overall, description=runs, completed=self.worked(), detail=self.left())

    def print(self, text: str) -> None:
        self.printed = time.monotonic()
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def worked(self) -> float:
        return sum(self.work[key] * share for key, share in self.done.items())

    def left(self) -> str:
        seconds = self.seconds_left()
        if seconds is None:
            return "time left unknown"
        return f"about {duration(seconds)} left" if seconds else "nothing left"

    def seconds_left(self) -> float | None:
        """An estimate from this session, otherwise from earlier results; None without either."""
        rest = sum(self.work.values()) - self.worked()
        if rest + self.later <= 0:
            return 0.0
        here = self.worked() - sum(self.work[key] * share for key, share in self.before.items())
        each = (time.monotonic() - self.began) / here if here > 0 else self.guess
        return None if each is None else each * (rest + self.later)


def describe_progress(progress: RunProgress) -> str:
    accuracy = "" if progress.accuracy is None else f"accuracy {progress.accuracy:.1f} %, "
    speed = f"{progress.images_per_second:,.0f} images/s"
    return f"loss {progress.loss:.3f}, {accuracy}{speed}, {duration(progress.seconds_left)} left"


def duration(seconds: float) -> str:
    """3.1 s, 47 s, 5:09, 1:23:45."""
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
