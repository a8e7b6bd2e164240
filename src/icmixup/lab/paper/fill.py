"""Fill tables with our results: means over seeds, differences to the paper, and notes about them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from icmixup.lab.comparison.statistics import known_mean, spread
from icmixup.lab.datasets.cifar import NO_TWINS
from icmixup.lab.paper.results import Result, experiment
from icmixup.lab.paper.spec import PaperTable, RecipeChanges
from icmixup.lab.sweep.cost import count_images
from icmixup.lab.training.recipe import Recipe

STAND_INS: Mapping[str, RecipeChanges] = {
    "cifair10": {"dataset": NO_TWINS},
    # A tenth of CIFAR-100 is 50 images per class, and ciFAIR-100 has the same training images.
    "cifair100": {"dataset": "cifar100", "per_class": None, "fraction": 0.1},
}
"""Changes to a recipe whose dataset is missing; the results are marked and keep the name of their dataset."""
STAND_IN_TESTS = {
    NO_TWINS: "the test set of CIFAR-10 without the duplicates that ciFAIR lists. It is not ciFAIR-10, whose "
    "replacement images were not available, so deviations from the paper are not assessed.",
    "cifar100": "the test set of CIFAR-100, after training on 10 % of its training set, which is 50 images "
    "per class. It is not ciFAIR-100, whose replacement images were not available: ciFAIR lists 891 of the "
    "10,000 test images as duplicates of training images, about a tenth of which are among the 10 %. So "
    "deviations from the paper are not assessed.",
}
"""What each stand-in is tested on, and how that differs from the dataset that it replaces."""
STAND_IN_MARK = "†"
DEVIATION = 2.0  # standard deviations above which a difference to the paper is noted

Index = Mapping[tuple[object, ...], Sequence[Result]]


@dataclass(frozen=True)
class Ours:
    """Our results for one cell."""

    variant: str
    by_seed: Mapping[int, float] = field(default_factory=dict)  # mean accuracy of the results of each seed
    stand_in: str | None = None  # the dataset tested on, if it is not the cell's own
    results: tuple[Result, ...] = ()

    @property
    def n(self) -> int:
        return len(self.by_seed)

    @property
    def mean(self) -> float | None:
        return known_mean(list(self.by_seed.values()))

    @property
    def std(self) -> float | None:
        """Sample standard deviation over seeds."""
        return spread(self.by_seed.values())


@dataclass(frozen=True)
class Entry:
    """One cell of a filled table: the paper's number, and our results for each variant."""

    row: str
    column: str
    paper: float | None
    ours: tuple[Ours, ...]
    is_gain: bool = False  # a difference of two rows, in percentage points

    def difference(self, ours: Ours) -> float | None:
        """Our mean minus the paper's number."""
        return None if ours.mean is None or self.paper is None else ours.mean - self.paper


@dataclass(frozen=True)
class FilledTable:
    """A table with our results."""

    table: PaperTable
    entries: tuple[Entry, ...]
    gains: tuple[Entry, ...]
    notes: tuple[str, ...]

    @property
    def trainable(self) -> list[Ours]:
        """The cells that runs can fill, empty ones included."""
        return [ours for entry in self.entries for ours in entry.ours]

    @property
    def cells_with_runs(self) -> int:
        return sum(ours.n > 0 for ours in self.trainable)

    @property
    def complete_cells(self) -> int:
        """Cells with at least as many runs as the table averages over."""
        return sum(ours.n >= self.table.runs for ours in self.trainable)

    @property
    def stand_in_cells(self) -> int:
        """Cells whose results were measured on a stand-in dataset."""
        return sum(ours.stand_in is not None for ours in self.trainable)

    def entry(self, row: str, column: str) -> Entry:
        return next(e for e in (*self.entries, *self.gains) if (e.row, e.column) == (row, column))


def index_results(results: Iterable[Result]) -> Index:
    """Results by experiment."""
    index: dict[tuple[object, ...], list[Result]] = {}
    for result in results:
        index.setdefault(experiment(result.recipe), []).append(result)
    return index


def find_ours(recipe: Recipe, variant: str, index: Index) -> Ours:
    """Our results for a cell; those on a stand-in dataset if there are none on its own."""
    if found := index.get(experiment(recipe)):
        return results_by_seed(variant, found)
    stand_in = stand_in_recipe(recipe)
    if stand_in and (found := index.get(experiment(stand_in))):
        return replace(results_by_seed(variant, found), stand_in=stand_in.dataset)
    return Ours(variant)


def stand_in_recipe(recipe: Recipe) -> Recipe | None:
    """The recipe on the stand-in of its dataset; None without one that has as many training images."""
    if recipe.dataset not in STAND_INS:
        return None
    stand_in = replace(recipe, **STAND_INS[recipe.dataset])
    # A fixed share of CIFAR-100 replaces one number of images per class, and no other.
    return stand_in if count_images(stand_in) == count_images(recipe) else None


def results_by_seed(variant: str, results: Sequence[Result]) -> Ours:
    """Average results of the same seed, so that each seed counts once."""
    seeds = sorted({result.recipe.seed for result in results})
    by_seed = {seed: fmean(r.accuracy for r in results if r.recipe.seed == seed) for seed in seeds}
    return Ours(variant, by_seed, results=tuple(results))


def fill_table(table: PaperTable, index: Index) -> FilledTable:
    """The table with our results, the gains between its rows, and notes."""
    entries = tuple(
        Entry(row, column, table.paper_says(row, column), fill_cell(table, row, column, index))
        for row in table.rows
        for column in table.columns
    )
    filled = FilledTable(table, entries, (), ())
    gains = tuple(
        gain_entry(filled, first, second, column) for first, second in table.gains for column in table.columns
    )
    filled = replace(filled, gains=gains)
    return replace(filled, notes=tuple(table_notes(filled)))


def fill_cell(table: PaperTable, row: str, column: str, index: Index) -> tuple[Ours, ...]:
    recipes = {variant: table.recipe(row, column, variant) for variant in table.variants}
    return tuple(
        find_ours(recipe, variant, index) for variant, recipe in recipes.items() if recipe is not None
    )


def gain_entry(filled: FilledTable, first: str, second: str, column: str) -> Entry:
    """First row minus second: of the paper's cells, and of our runs paired by seed."""
    one, other = filled.entry(first, column), filled.entry(second, column)
    paper = None if one.paper is None or other.paper is None else one.paper - other.paper
    ours = tuple(paired_gain(a, b) for a, b in zip(one.ours, other.ours, strict=True))
    return Entry(gain_label(first, second), column, paper, ours, is_gain=True)


def gain_label(first: str, second: str) -> str:
    return f"{first} minus {second}"


def paired_gain(one: Ours, other: Ours) -> Ours:
    """Differences over the seeds that both have; none if they were tested on different datasets."""
    if one.stand_in != other.stand_in:
        return Ours(one.variant)
    common = [seed for seed in one.by_seed if seed in other.by_seed]
    gaps = {seed: one.by_seed[seed] - other.by_seed[seed] for seed in common}
    return Ours(one.variant, gaps, one.stand_in if gaps else None)


def table_notes(filled: FilledTable) -> Iterator[str]:
    """The notes under a table, in the order in which they are shown."""
    parts: tuple[Callable[[FilledTable], Iterator[str]], ...] = (
        deviation_notes,
        single_run_notes,
        stand_in_notes,
        disagreement_notes,
        printed_gain_notes,
    )
    for part in parts:
        yield from part(filled)
    yield from filled.table.notes
    yield from missing_cell_notes(filled)


def cell_label(entry: Entry, ours: Ours, filled: FilledTable) -> str:
    variant = f", {ours.variant}" if len(filled.table.variants) > 1 else ""
    return f"{entry.row}, {entry.column}{variant}"


def filled_cells(filled: FilledTable) -> Iterator[tuple[Entry, Ours]]:
    return ((entry, ours) for entry in filled.entries for ours in entry.ours if ours.n)


def deviation_notes(filled: FilledTable) -> Iterator[str]:
    """Cells, on the paper's own test set, that differ from the paper by more than DEVIATION."""
    for entry, ours in filled_cells(filled):
        gap = entry.difference(ours)
        if gap is None or ours.std is None or ours.stand_in or abs(gap) <= DEVIATION * ours.std:
            continue
        side = "above" if gap > 0 else "below"
        yield (
            f"Deviation: {cell_label(entry, ours, filled)}: our mean {ours.mean:.2f} ± {ours.std:.2f} "
            f"({ours.n} runs) is {abs(gap):.2f} points {side} the paper's {entry.paper:.2f}, more than two "
            "standard deviations of our runs."
        )


def single_run_notes(filled: FilledTable) -> Iterator[str]:
    single = sum(ours.n == 1 and entry.paper is not None for entry, ours in filled_cells(filled))
    if single:
        subject = "1 cell has" if single == 1 else f"{single} cells have"
        yield f"{subject} a single run: the variation over seeds is unknown, so no deviation is assessed."


def stand_in_notes(filled: FilledTable) -> Iterator[str]:
    """What each stand-in dataset of the table is."""
    used = dict.fromkeys(ours.stand_in for _, ours in filled_cells(filled) if ours.stand_in)
    for dataset in used:
        yield f"{STAND_IN_MARK} tested on {dataset}: {STAND_IN_TESTS[dataset]}"


def disagreement_notes(filled: FilledTable) -> Iterator[str]:
    """All results of the seeds that have several different ones."""
    for entry, ours in filled_cells(filled):
        for seed in ours.by_seed:
            found = [result for result in ours.results if result.recipe.seed == seed]
            if len({result.accuracy for result in found}) > 1:
                values = " and ".join(describe_result(result) for result in found)
                label = cell_label(entry, ours, filled)
                yield f"{label}, seed {seed}, has different results, {values}; the table uses their average."


def describe_result(result: Result) -> str:
    origin = [str(result.numbers[name]) for name in ("device", "commit", "date") if result.numbers[name]]
    return f"{result.accuracy:.2f} ({', '.join([*origin, f'line {result.line}'])})"


def printed_gain_notes(filled: FilledTable) -> Iterator[str]:
    """Gains printed in the paper that are not the difference of its cells."""
    for first, second in filled.table.gains:
        for column in filled.table.columns:
            printed = filled.table.printed_gain(first, column)
            paper = filled.entry(gain_label(first, second), column).paper
            if printed is not None and paper is not None and round(printed - paper, 2) != 0:
                yield (
                    f"The paper prints a gain of {printed:+.2f} for {first} over {second} on {column}; the "
                    f"difference of its cells, shown here, is {paper:+.2f}."
                )


def missing_cell_notes(filled: FilledTable) -> Iterator[str]:
    missing = len(filled.trainable) - filled.cells_with_runs
    if missing:
        yield (
            f"Missing: {missing} of {len(filled.trainable)} cells; "
            f"`icmixup paper {filled.table.name} --run-missing` trains them."
        )
