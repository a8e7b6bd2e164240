"""Several runs at once on one GPU, each a thread of this process with a stream of its own.

At a batch of 128 a small network leaves most of a large GPU idle most of the time; a second and a third run
fill the gaps. Processes would take turns on it instead, and would each compile the model anew.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import NamedTuple

import torch

from icmixup.lab.datasets import Dataset
from icmixup.lab.training.ranks import pick_device
from icmixup.lab.training.recipe import Recipe
from icmixup.lab.training.loop import Beat, Stopped
from icmixup.lab.sweep.local import Outcome, Report, Site, carry_out, remember_data


class Told(NamedTuple):
    """What a thread has to say of a run; of None, that it has no more to do."""

    recipe: Recipe | None
    what: Beat | Outcome | BaseException | None


def run_in_threads(
    recipes: Sequence[Recipe], site: Site, number: int, report: Report, dataset: Dataset | None = None
) -> None:
    """So many runs at once; an error in one ends all, each at its next beat."""
    crew = Crew(recipes, replace(site, at_once=number), dataset)
    threads = [threading.Thread(target=crew.work, name=f"run {k}") for k in range(number)]
    try:
        for thread in threads:
            thread.start()
        crew.listen(number, report)
    finally:
        crew.stopped.set()
        for thread in threads:
            thread.join()


class Crew:
    """The recipes that wait for a thread, and what threads have to say."""

    def __init__(self, recipes: Sequence[Recipe], site: Site, dataset: Dataset | None) -> None:
        self.site = site
        self.waiting = deque(recipes)
        self.told: SimpleQueue[Told] = SimpleQueue()
        self.stopped = threading.Event()
        self.reading = threading.Lock()
        self.remembered = remember_data(site.data_dir) if dataset is None else lambda _: dataset

    def work(self) -> None:
        """What a thread does: one recipe after the other, on a stream of its own."""
        recipe = None
        try:
            with own_stream(pick_device(self.site.device)):
                while (recipe := self.next_recipe()) is not None:
                    beat = functools.partial(self.beat, recipe)
                    self.told.put(Told(recipe, carry_out(recipe, self.site, beat, self.read(recipe))))
        except BaseException as error:
            self.told.put(Told(recipe, error))
        else:
            self.told.put(Told(None, None))

    def next_recipe(self) -> Recipe | None:
        with contextlib.suppress(IndexError):
            return None if self.stopped.is_set() else self.waiting.popleft()
        return None

    def read(self, recipe: Recipe) -> Dataset:
        with self.reading:
            return self.remembered(recipe)

    def beat(self, recipe: Recipe, beat: Beat) -> None:
        if self.stopped.is_set():
            raise Stopped
        self.told.put(Told(recipe, beat))

    def listen(self, number: int, report: Report) -> None:
        """Pass on what threads say, in the thread that has the terminal, until all have no more to do."""
        while number:
            recipe, what = self.told.get()
            if isinstance(what, BaseException):
                raise what
            if recipe is None:
                number -= 1
            elif isinstance(what, Beat):
                report.beat(recipe, what)
            elif isinstance(what, Outcome):
                report.settle(recipe, what)


def own_stream(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A new stream for this thread, on a GPU."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
