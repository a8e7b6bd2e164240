"""Ours beside the paper's: rows of results in the cells of a table, and what there is to say of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev

from icmixup.lab.datasets.cifar import NO_TWINS
from icmixup.lab.paper.results import Result, experiment
from icmixup.lab.paper.spec import PaperTable
from icmixup.lab.training.recipe import Recipe

STAND_INS = {"cifair10": NO_TWINS}
"""Datasets that may be tested on another's images, under that one's name."""
MARK = "†"
DEVIATION = 2.0  # standard deviations from which on a difference is spoken of

Index = Mapping[tuple[object, ...], Sequence[Result]]


@dataclass(frozen=True)
class Ours:
    """What our runs give for one cell."""

    variant: str
    by_seed: Mapping[int, float] = field(default_factory=dict)  # mean accuracy of a seed's results
    dataset: str | None = None  # what was tested on, where it is not the cell's own
    results: tuple[Result, ...] = ()

    @property
    def n(self) -> int:
        return len(self.by_seed)

    @property
    def mean(self) -> float | None:
        return fmean(self.by_seed.values()) if self.by_seed else None

    @property
    def std(self) -> float | None:
        """Sample standard deviation over seeds."""
        return stdev(self.by_seed.values()) if self.n > 1 else None


@dataclass(frozen=True)
class Entry:
    """One place of a table: the paper's number, and ours for each variant."""

    row: str
    column: str
    paper: float | None
    ours: tuple[Ours, ...]
    gain: bool = False  # a difference of two rows, in points

    def difference(self, ours: Ours) -> float | None:
        """Ours less the paper's."""
        return None if ours.mean is None or self.paper is None else ours.mean - self.paper


@dataclass(frozen=True)
class FilledTable:
    """A table with our numbers in it."""

    table: PaperTable
    entries: tuple[Entry, ...]
    gains: tuple[Entry, ...]
    notes: tuple[str, ...]

    @property
    def trainable(self) -> list[Ours]:
        return [ours for entry in self.entries for ours in entry.ours]

    @property
    def filled(self) -> int:
        """Cells that have a run of ours, of len(trainable)."""
        return sum(ours.n > 0 for ours in self.trainable)

    def entry(self, row: str, column: str) -> Entry:
        return next(e for e in (*self.entries, *self.gains) if (e.row, e.column) == (row, column))


def index_results(results: Iterable[Result]) -> Index:
    """Results by what they ask."""
    index: dict[tuple[object, ...], list[Result]] = {}
    for result in results:
        index.setdefault(experiment(result.recipe), []).append(result)
    return index


def find_ours(recipe: Recipe, variant: str, index: Index) -> Ours:
    """Our results for a cell; those of a stand-in where there are none on the cell's own test set."""
    if found := index.get(experiment(recipe)):
        return gather(variant, found)
    stand_in = STAND_INS.get(recipe.dataset)
    if stand_in and (found := index.get(experiment(replace(recipe, dataset=stand_in)))):
        return replace(gather(variant, found), dataset=stand_in)
    return Ours(variant)


def gather(variant: str, results: Sequence[Result]) -> Ours:
    """Each seed counts once, however many results it has."""
    seeds = sorted({result.recipe.seed for result in results})
    by_seed = {seed: fmean(r.accuracy for r in results if r.recipe.seed == seed) for seed in seeds}
    return Ours(variant, by_seed, results=tuple(results))


def fill_table(table: PaperTable, index: Index) -> FilledTable:
    """Our numbers beside the paper's, differences computed, and what deviates in words."""
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
    return replace(filled, notes=tuple(say_notes(filled)))


def fill_cell(table: PaperTable, row: str, column: str, index: Index) -> tuple[Ours, ...]:
    recipes = {variant: table.recipe(row, column, variant) for variant in table.variants}
    return tuple(
        find_ours(recipe, variant, index) for variant, recipe in recipes.items() if recipe is not None
    )


def gain_entry(filled: FilledTable, first: str, second: str, column: str) -> Entry:
    """First row less second: of the paper's own cells, and of ours, paired by seed."""
    one, other = filled.entry(first, column), filled.entry(second, column)
    paper = None if one.paper is None or other.paper is None else one.paper - other.paper
    ours = tuple(paired(a, b) for a, b in zip(one.ours, other.ours, strict=True))
    return Entry(gain_label(first, second), column, paper, ours, gain=True)


def gain_label(first: str, second: str) -> str:
    return f"{first} less {second}"


def paired(one: Ours, other: Ours) -> Ours:
    if one.dataset != other.dataset:
        return Ours(one.variant)
    common = [seed for seed in one.by_seed if seed in other.by_seed]
    gaps = {seed: one.by_seed[seed] - other.by_seed[seed] for seed in common}
    return Ours(one.variant, gaps, one.dataset if gaps else None)


def say_notes(filled: FilledTable) -> Iterator[str]:
    """What is said under a table, in this order."""
    parts: tuple[Callable[[FilledTable], Iterator[str]], ...] = (
        say_deviations,
        say_single_runs,
        say_stand_ins,
        say_disagreements,
        say_printed_gains,
    )
    for part in parts:
        yield from part(filled)
    yield from filled.table.notes
    yield from say_missing(filled)


def place(entry: Entry, ours: Ours, filled: FilledTable) -> str:
    variant = f", {ours.variant}" if len(filled.table.variants) > 1 else ""
    return f"{entry.row}, {entry.column}{variant}"


def cells_of(filled: FilledTable) -> Iterator[tuple[Entry, Ours]]:
    return ((entry, ours) for entry in filled.entries for ours in entry.ours if ours.n)


def say_deviations(filled: FilledTable) -> Iterator[str]:
    """Cells of the paper's own test set that lie further off than chance would have it."""
    for entry, ours in cells_of(filled):
        gap = entry.difference(ours)
        if gap is None or ours.std is None or ours.dataset or abs(gap) <= DEVIATION * ours.std:
            continue
        side = "above" if gap > 0 else "below"
        yield (
            f"Deviates: {place(entry, ours, filled)}: ours, {ours.mean:.2f} ± {ours.std:.2f} "
            f"({ours.n} runs), is {abs(gap):.2f} {side} the paper's {entry.paper:.2f}, "
            "more than two of our standard deviations."
        )


def say_single_runs(filled: FilledTable) -> Iterator[str]:
    single = sum(ours.n == 1 and entry.paper is not None for entry, ours in cells_of(filled))
    if single:
        what = "1 cell has" if single == 1 else f"{single} cells have"
        yield f"{what} one run, so no standard deviation, and the difference to the paper may be chance."


def say_stand_ins(filled: FilledTable) -> Iterator[str]:
    if any(ours.dataset for _, ours in cells_of(filled)):
        yield (
            f"{MARK} tested on {NO_TWINS}, CIFAR-10's test set without the images that ciFAIR lists: "
            "that is not ciFAIR-10, whose replacement images were not at hand, so no deviation is judged."
        )


def say_disagreements(filled: FilledTable) -> Iterator[str]:
    """Seeds with several different results: all of them."""
    for entry, ours in cells_of(filled):
        for seed in ours.by_seed:
            found = [result for result in ours.results if result.recipe.seed == seed]
            if len({result.accuracy for result in found}) > 1:
                values = " and ".join(describe_result(result) for result in found)
                where = place(entry, ours, filled)
                yield f"{where}, seed {seed}, has different results, {values}; the mean takes their average."


def describe_result(result: Result) -> str:
    made = [str(result.numbers[name]) for name in ("device", "commit", "date") if result.numbers[name]]
    return f"{result.accuracy:.2f} ({', '.join(made)}{', ' if made else ''}line {result.line})"


def say_printed_gains(filled: FilledTable) -> Iterator[str]:
    """Gains that the paper prints beside cells of which they are not the difference."""
    for first, second in filled.table.gains:
        for column in filled.table.columns:
            printed = filled.table.paper_gains(first, column)
            paper = filled.entry(gain_label(first, second), column).paper
            if printed is not None and paper is not None and round(printed - paper, 2) != 0:
                yield (
                    f"The paper prints a gain of {printed:+.2f} for {first} over {second} on {column}; "
                    f"its own cells give {paper:+.2f}, which is what stands here."
                )


def say_missing(filled: FilledTable) -> Iterator[str]:
    missing = len(filled.trainable) - filled.filled
    if missing:
        yield (
            f"Missing: {missing} of {len(filled.trainable)} cells; "
            f"icmixup paper {filled.table.name} --run-missing trains them."
        )
