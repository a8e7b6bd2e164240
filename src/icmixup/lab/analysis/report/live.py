"""The page of a comparison in progress, rewritten after every run that ends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from icmixup.lab.analysis.report.data import Progress
from icmixup.lab.analysis.report.make import REPORT_FILE, Summaries, read_summaries, report_comparison
from icmixup.lab.analysis.report.study import summarised_answers
from icmixup.lab.comparison.compare import Comparison, Failure, Tuned, summarise
from icmixup.lab.comparison.statistics import take_look
from icmixup.lab.sweep.progress import Display
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.recipe import Recipe
from icmixup.lab.training.run_folder import Row


@dataclass
class LiveReport:
    """Writes the report of the runs so far. A failure to write it is only reported: training goes on."""

    folder: Path  # of the comparison
    recipe: Recipe
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    baseline: str
    execution: Execution
    overview: Mapping[str, object]
    tuned: Tuned | None = None
    full_epochs: int | None = None
    measure: str = "accuracy"
    rows: dict[str, Row] = field(default_factory=dict)  # by run folder
    failures: list[Failure] = field(default_factory=list)
    summaries: Summaries = field(default_factory=dict)
    note: Callable[[str], None] = print
    """Called with a message if a page cannot be written."""
    on_first_page: Callable[[Path], None] | None = None
    """Called once, when there is a page."""
    broken: bool = False

    @property
    def path(self) -> Path:
        return self.folder / REPORT_FILE

    def add(self, row: Row) -> None:
        self.rows[row["folder"]] = row

    def add_failure(self, recipe: Recipe, reason: str) -> None:
        self.failures.append(Failure(recipe.method, recipe.seed, reason))

    def write(self, display: Display) -> None:
        """Rewrite the page, with the time that is left."""
        if self.rows:
            done = len(self.rows) + len(self.failures)
            progress = Progress(done, self.total(display), display.left())
            self.attempt(self.comparison_so_far, progress)

    def total(self, display: Display) -> int:
        """All runs of the comparison that are known: those of this round and of earlier ones."""
        return len({row["key"] for row in self.rows.values()} | set(display.recipes))

    def comparison_so_far(self) -> Comparison:
        rows = list(self.rows.values())
        seeds = [seed for seed in self.seeds if any(row["seed"] == seed for row in rows)]
        keys = {(row["method"], row["seed"]): self.execution.out / row["folder"] for row in rows}
        read_summaries(keys.values(), self.summaries)
        answers, seeds_only = summarised_answers({key: self.summaries[keys[key]] for key in keys}, list(keys))
        return summarise(
            self.recipe,
            self.methods,
            seeds,
            self.baseline,
            rows,
            self.failures,
            self.overview,
            looks=[take_look(rows, self.methods, seeds, answers, measure=self.measure)],
            seeds_only=seeds_only,
            full_epochs=self.full_epochs,
            tuned=self.tuned,
        )

    def finish(self, comparison: Comparison) -> Path | None:
        """The final page, with the scores between two classes; None if it could not be written."""
        return self.attempt(lambda: comparison, None) if comparison.rows else None

    def attempt(self, compare: Callable[[], Comparison], progress: Progress | None) -> Path | None:
        try:
            page = report_comparison(
                compare(), self.folder, self.execution, progress=progress, cache=self.summaries
            )
            if self.on_first_page is not None:
                self.on_first_page(page)
                self.on_first_page = None
            return page
        except Exception as error:  # a page is not worth the hours of training that it is about
            if not self.broken or progress is None:
                self.note(f"icmixup: {self.path} could not be written: {error}")
            self.broken = True
            return None


class ReportingDisplay(Display):
    """A display that also rewrites a report after each run of this session."""

    live: LiveReport | None = None

    def expect(self, recipes: Sequence[Recipe], finished: Collection[Recipe] = ()) -> None:
        super().expect(recipes, finished)
        if self.live is not None:
            self.live.methods = tuple(dict.fromkeys(recipe.method for recipe in recipes))

    def finish(self, row: Row) -> None:
        super().finish(row)
        if self.live is not None:
            # Folds of cross-validation say nothing alone: their page is written at the end.
            if row.get("fold") is not None:
                return
            self.live.add(row)
            if self.work[row["key"]]:  # finished in this session
                self.live.write(self)

    def fail(self, recipe: Recipe, reason: str) -> None:
        super().fail(recipe, reason)
        if self.live is not None:
            self.live.add_failure(recipe, reason)
            self.live.write(self)
