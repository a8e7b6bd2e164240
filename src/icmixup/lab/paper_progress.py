"""One display over all runs of a table: how many are done, how they fare, and how long it will take."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from icmixup.lab.paper_runs import work
from icmixup.lab.paper_tables import Index
from icmixup.lab.progress import duration
from icmixup.lab.recipe import Recipe
from icmixup.lab.train import Beat

Row = Mapping[str, Any]


class Display:
    """A line for each run that ends; in a terminal a bar over all of them as well.

    Args:
        rests: runs that earlier sittings finished, which take no time.
        seconds_each: of a unit of work, from earlier results; None where there are none.
    """

    def __init__(
        self, recipes: Sequence[Recipe], rests: Sequence[Recipe], seconds_each: float | None, console: Console
    ) -> None:
        self.recipes = {recipe.key: recipe for recipe in recipes}
        self.work = {recipe.key: 0.0 if recipe in rests else work(recipe) for recipe in recipes}
        self.done: dict[str, float] = dict.fromkeys(self.work, 0.0)  # share of each run
        self.before: dict[str, float] = {}  # share that an earlier sitting did
        self.ended: set[str] = set()
        self.guess, self.console = seconds_each, console
        self.began = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.fields[detail]}"))
        self.progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.bar = self.progress.add_task("", total=max(sum(self.work.values()), 1e-9), detail="")

    def __enter__(self) -> Self:
        self.progress.start()
        self.show("starting")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def beat(self, recipe: Recipe, beat: Beat) -> None:
        self.before.setdefault(recipe.key, max(0.0, beat.epoch - 1) / beat.epochs)
        self.done[recipe.key] = min(1.0, beat.epoch / beat.epochs)
        self.show(f"{title(recipe)} at epoch {beat.epoch:.0f} of {beat.epochs}")

    def finish(self, row: Row) -> None:
        took = duration(60 * row["minutes"]) if self.work[row["key"]] else "done before"
        self.end(self.recipes[row["key"]], f"accuracy {row['accuracy']:.2f} %, {took}")

    def fail(self, recipe: Recipe, reason: str) -> None:
        self.end(recipe, f"no result: {reason}")

    def end(self, recipe: Recipe, text: str) -> None:
        self.ended.add(recipe.key)
        self.done[recipe.key] = 1.0
        count = f"[{len(self.ended):>{len(str(len(self.recipes)))}}/{len(self.recipes)}]"
        line = f"{count} {title(recipe)}: {text}; {self.left()}"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        self.show("")

    def show(self, detail: str) -> None:
        text = f"{self.left()}; {detail}" if detail else self.left()
        runs = f"{len(self.ended)} of {len(self.recipes)} runs"
        self.progress.update(self.bar, description=runs, completed=self.worked(), detail=text)

    def worked(self) -> float:
        return sum(self.work[key] * share for key, share in self.done.items())

    def left(self) -> str:
        """An estimate of the time left: from this sitting, else from earlier results."""
        rest = sum(self.work.values()) - self.worked()
        if rest <= 0:
            return "nothing left"
        here = self.worked() - sum(self.work[key] * share for key, share in self.before.items())
        each = (time.monotonic() - self.began) / here if here > 0 else self.guess
        return "time left not known yet" if each is None else f"about {duration(each * rest)} left"


def title(recipe: Recipe) -> str:
    """A run's name without its key."""
    return recipe.name.rpartition(".")[0]


def past_speed(index: Index, device: str) -> float | None:
    """Seconds for a unit of work, of the results that were made on this device."""
    rows = [
        (60 * row.numbers["minutes"], work(row.recipe))
        for rows in index.values()
        for row in rows
        if row.numbers["device"] == device and row.numbers["minutes"]
    ]
    return sum(seconds for seconds, _ in rows) / sum(units for _, units in rows) if rows else None
