"""What a table of runs is: a base recipe, and what its rows and columns change of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from icmixup.lab.training.recipe import Recipe

Changes = Mapping[str, Any]
Numbers = Mapping[str, tuple[float | None, ...]]
OURS = "ours"


class Cell(NamedTuple):
    """One number of ours to be had: where it stands, and how it is made."""

    row: str
    column: str
    variant: str
    recipe: Recipe


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """A table or figure: rows and columns as changes to a base recipe, and the paper's numbers."""

    name: str
    title: str
    rows: Mapping[str, Changes | None]  # None: another method's number, of which there is no run
    columns: Mapping[str, Changes]
    base: Recipe = Recipe()  # noqa: RUF009  frozen, and the paper's paragraph
    variants: Mapping[str, Changes] = field(default_factory=lambda: {OURS: {}})
    published: Numbers = field(default_factory=dict)  # by row, in the order of the columns
    gains: tuple[tuple[str, str], ...] = ()  # rows whose difference is the point of the table
    printed_gains: Numbers = field(default_factory=dict)  # what the paper prints for them, by their first row
    notes: tuple[str, ...] = ()
    runs: int = 3  # "All experiments are run three times"
    in_paper: bool = True

    def recipe(self, row: str, column: str, variant: str = OURS) -> Recipe | None:
        """What is trained for a cell, with seed 0."""
        changes = self.rows[row]
        if changes is None:
            return None
        return replace(self.base, **{**changes, **self.columns[column], **self.variants[variant]})

    def cells(self) -> Iterator[Cell]:
        """Every cell that a run of ours can fill, row by row."""
        for row in self.rows:
            for column in self.columns:
                for variant in self.variants:
                    if (recipe := self.recipe(row, column, variant)) is not None:
                        yield Cell(row, column, variant, recipe)

    def paper_says(self, row: str, column: str) -> float | None:
        """The published number, verbatim, or None."""
        return pick(self.published, row, tuple(self.columns), column)

    def paper_gains(self, row: str, column: str) -> float | None:
        """The gain that the paper prints under a row, or None."""
        return pick(self.printed_gains, row, tuple(self.columns), column)


def pick(numbers: Numbers, row: str, columns: tuple[str, ...], column: str) -> float | None:
    return numbers[row][columns.index(column)] if row in numbers else None


METHOD_ROWS: Mapping[str, Changes] = {
    "No Mixup": {"method": "erm"},
    "ERM": {"method": "erm"},
    "Mixup": {"method": "mixup"},
    "IC-Mixup (c)": {"method": "ic-mixup-c"},
    "IC-Mixup (p)": {"method": "ic-mixup-p"},
    "IC-Mixup": {"method": "ic-mixup"},
    "RegMixup": {"method": "regmixup"},
    "IC-RegMixup": {"method": "ic-regmixup"},
    "Remix": {"method": "remix"},
    "IC-Remix": {"method": "ic-remix"},
}
"""The paper's spelling of its methods."""


def methods(*names: str) -> dict[str, Changes]:
    return {name: METHOD_ROWS[name] for name in names}


def by_name(*names: str) -> dict[str, Changes]:
    return {name: {"method": name} for name in names}


SIZES: Mapping[str, Changes] = {f"{p} %": {"fraction": p / 100} for p in (100, 50, 25, 10)}
TENTH: Changes = {"dataset": "cifar100", "fraction": 0.1}
TAIL100: Changes = {"dataset": "cifar100", "imbalance": 0.01}
TAIL10: Changes = {"dataset": "cifar10", "imbalance": 0.01}
ABLATED: Mapping[str, Changes] = {
    "IC-Mixup, CIFAR-100 10 %": {"method": "ic-mixup", **TENTH},
    "IC-RegMixup, CIFAR-100 10 %": {"method": "ic-regmixup", **TENTH},
    "IC-Mixup, LT-CIFAR100 0.01": {"method": "ic-mixup", **TAIL100},
    "IC-Mixup, LT-CIFAR10 0.01": {"method": "ic-mixup", **TAIL10},
}
