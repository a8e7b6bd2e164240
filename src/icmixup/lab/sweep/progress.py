"""What is seen of runs under way: bars in a terminal, plain lines elsewhere. All of it on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

if TYPE_CHECKING:
    from icmixup.lab.training.recipe import Recipe
    from icmixup.lab.training.loop import Beat

QUIET_SECONDS = 60.0  # longest silence of runs that are not watched in a terminal


def short_title(recipe: Recipe) -> str:
    return f"{recipe.method} seed {recipe.seed}"


class Display:
    """A line for each run that ends, and how long the others will take, be they one or several at once.

    In a terminal a bar over all runs and one for each under way; elsewhere a sign of life a minute.

    Args:
        work: what a run takes, in any unit.
        rests: runs that earlier sittings finished, which take no time.
        seconds_each: of a unit of work, from earlier results; None where there are none.
        title: what a run is called.
    """

    def __init__(
        self,
        recipes: Sequence[Recipe],
        console: Console,
        *,
        work: Callable[[Recipe], float] = lambda _: 1.0,
        rests: Collection[Recipe] = (),
        seconds_each: float | None = None,
        title: Callable[[Recipe], str] = short_title,
    ) -> None:
        self.recipes = {recipe.key: recipe for recipe in recipes}
        self.work = {recipe.key: 0.0 if recipe in rests else work(recipe) for recipe in recipes}
        self.done = dict.fromkeys(self.work, 0.0)  # share of each run
        self.before: dict[str, float] = {}  # share that an earlier sitting did
        self.ended: set[str] = set()
        self.guess, self.console, self.title = seconds_each, console, title
        self.began = self.spoke = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.fields[detail]}"))
        self.progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        total = max(sum(self.work.values()), 1e-9)
        self.overall = self.progress.add_task("", total=total, detail="", visible=len(recipes) > 1)
        self.bars: dict[str, TaskID] = {}  # of runs under way

    def __enter__(self) -> Self:
        self.progress.start()
        self.show()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def beat(self, recipe: Recipe, beat: Beat) -> None:
        """A sign of life of a run."""
        key = recipe.key
        self.before.setdefault(key, max(0.0, beat.epoch - 1) / beat.epochs)
        self.done[key] = min(1.0, beat.epoch / beat.epochs)
        if key not in self.bars:
            self.bars[key] = self.progress.add_task(self.title(recipe), total=beat.epochs, detail="")
        detail = f"epoch {beat.epoch:.0f} of {beat.epochs}, {describe(beat)}"
        self.progress.update(self.bars[key], completed=beat.epoch, detail=detail)
        self.show()
        if not self.console.is_terminal and time.monotonic() - self.spoke > QUIET_SECONDS:
            self.say(f"{self.title(recipe)}: {detail}")

    def finish(self, row: dict[str, Any]) -> None:
        """A run that ended with a row, now or before."""
        took = duration(60 * row["minutes"]) if self.work[row["key"]] else "done before"
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
        self.say(f"{count} {self.title(recipe)}: {text}{left}")
        self.show()

    def show(self) -> None:
        """Move the bar over all runs."""
        runs = f"{len(self.ended)} of {len(self.recipes)} runs"
        self.progress.update(self.overall, description=runs, completed=self.worked(), detail=self.left())

    def say(self, text: str) -> None:
        self.spoke = time.monotonic()
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def worked(self) -> float:
        return sum(self.work[key] * share for key, share in self.done.items())

    def left(self) -> str:
        seconds = self.seconds_left()
        if seconds is None:
            return "time left not known yet"
        return f"about {duration(seconds)} left" if seconds else "nothing left"

    def seconds_left(self) -> float | None:
        """An estimate from this sitting, else from earlier results; None where there is neither."""
        rest = sum(self.work.values()) - self.worked()
        if rest <= 0:
            return 0.0
        here = self.worked() - sum(self.work[key] * share for key, share in self.before.items())
        each = (time.monotonic() - self.began) / here if here > 0 else self.guess
        return None if each is None else each * rest


def describe(beat: Beat) -> str:
    accuracy = "" if beat.accuracy is None else f"accuracy {beat.accuracy:.1f} %, "
    speed = f"{beat.images_per_second:,.0f} images/s"
    return f"loss {beat.loss:.3f}, {accuracy}{speed}, {duration(beat.seconds_left)} left"


def duration(seconds: float) -> str:
    """3.1 s, 47 s, 5:09, 1:23:45."""
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
