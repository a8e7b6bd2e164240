"""What is seen of runs under way: bars in a terminal, one plain line a run elsewhere. All of it on stderr."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

if TYPE_CHECKING:
    from icmixup.lab.recipe import Recipe
    from icmixup.lab.train import Beat

QUIET_SECONDS = 60.0  # longest silence of a run that is not watched in a terminal


class Watcher:
    """Is told of runs, one after the other, and says nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def start(self, recipe: Recipe) -> None:
        pass

    def beat(self, beat: Beat) -> None:
        pass

    def finish(self, row: dict[str, Any]) -> None:
        pass

    def diverge(self, recipe: Recipe, reason: str) -> None:
        pass


class LineWatcher(Watcher):
    """One line a run, and a sign of life a minute; for logs."""

    def __init__(self, runs: int, console: Console) -> None:
        self.runs, self.console = runs, console
        self.ended = 0
        self.resting = 0  # runs that were finished before and took no time
        self.title = ""
        self.started = self.spoke = time.monotonic()
        self.beaten = False

    def start(self, recipe: Recipe) -> None:
        self.title = f"{recipe.method} seed {recipe.seed}"
        self.started = self.spoke = time.monotonic()
        self.beaten = False

    def beat(self, beat: Beat) -> None:
        self.beaten = True
        if time.monotonic() - self.spoke > QUIET_SECONDS:
            self.spoke = time.monotonic()
            self.say(f"{self.title}: epoch {beat.epoch:.1f} of {beat.epochs}, {describe(beat)}")

    def finish(self, row: dict[str, Any]) -> None:
        self.end()
        when = duration(time.monotonic() - self.started) if self.beaten else "done before"
        accuracy = "" if row.get("accuracy") is None else f"accuracy {row['accuracy']:.1f} %, "
        loss = "" if row.get("loss") is None else f"loss {row['loss']:.3f}, "
        self.say(f"{self.counted()} {self.title}: {accuracy}{loss}{when}")

    def diverge(self, recipe: Recipe, reason: str) -> None:
        self.end()
        self.say(f"{self.counted()} {self.title}: diverged; {reason}")

    def end(self) -> None:
        self.ended += 1
        self.resting += not self.beaten

    def counted(self) -> str:
        return f"[{self.ended:>{len(str(self.runs))}}/{self.runs}]"

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class BarWatcher(LineWatcher):
    """Two bars, over all runs and over the current one, below a line for each run that ended."""

    def __init__(self, runs: int, console: Console) -> None:
        super().__init__(runs, console)
        columns = (TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.fields[detail]}"))
        self.progress = Progress(*columns, console=console, transient=True)
        self.overall: TaskID = self.progress.add_task("", total=runs, detail="", visible=runs > 1)
        self.current: TaskID = self.progress.add_task("", total=1, detail="")
        self.began = time.monotonic()

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.progress.stop()

    def start(self, recipe: Recipe) -> None:
        super().start(recipe)
        self.show(0.0)
        self.progress.update(self.current, description=self.title, completed=0, total=1, detail="starting")

    def beat(self, beat: Beat) -> None:
        self.beaten = True
        detail = f"epoch {beat.epoch:.0f} of {beat.epochs}, {describe(beat)}"
        self.progress.update(self.current, completed=beat.epoch, total=beat.epochs, detail=detail)
        self.show(min(1.0, beat.epoch / beat.epochs))

    def end(self) -> None:
        super().end()
        self.show(0.0)

    def show(self, part: float) -> None:
        """Move the upper bar: so many runs ended, and `part` of the current one."""
        worked = self.ended - self.resting + part
        left = self.runs - self.ended - part
        guess = f", {duration((time.monotonic() - self.began) * left / worked)} left" if worked > 0 else ""
        self.progress.update(
            self.overall,
            description=f"run {min(self.ended + 1, self.runs)} of {self.runs}",
            completed=self.ended + part,
            detail=f"{self.ended} done{guess}",
        )


def make_watcher(runs: int, console: Console) -> Watcher:
    """Bars where someone looks at them, lines where they are kept."""
    return BarWatcher(runs, console) if console.is_terminal else LineWatcher(runs, console)


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
