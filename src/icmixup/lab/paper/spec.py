"""Specification of a table: a base recipe, and the recipe fields that its rows and columns change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from icmixup.lab.training.recipe import Recipe

RecipeChanges = Mapping[str, Any]
Numbers = Mapping[str, tuple[float | None, ...]]
DEFAULT_VARIANT = "ours"


class Cell(NamedTuple):
    """A cell that a run can fill: its position in the table, and its recipe."""

    row: str
    column: str
    variant: str
    recipe: Recipe


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """A table or figure: rows and columns as changes to a base recipe, and the published numbers."""

    name: str
    title: str
    rows: Mapping[str, RecipeChanges | None]  # None: a number quoted from other work, which is not trained
    columns: Mapping[str, RecipeChanges]
    base: Recipe = Recipe()  # noqa: RUF009  frozen; the defaults are the paper's recipe
    variants: Mapping[str, RecipeChanges] = field(default_factory=lambda: {DEFAULT_VARIANT: {}})
    published: Numbers = field(default_factory=dict)  # by row, in the order of the columns
    gains: tuple[tuple[str, str], ...] = ()  # pairs of rows whose difference the table is about
    printed_gains: Numbers = field(default_factory=dict)  # gains as printed in the paper, by their first row
    notes: tuple[str, ...] = ()
    runs: int = 3  # for each cell; the paper: "All experiments are run three times"
    in_paper: bool = True

    def recipe(self, row: str, column: str, variant: str = DEFAULT_VARIANT) -> Recipe | None:
        """The recipe of a cell with seed 0; None for a row that is not trained."""
        changes = self.rows[row]
        if changes is None:
            return None
        return replace(self.base, **{**changes, **self.columns[column], **self.variants[variant]})

    def cells(self) -> Iterator[Cell]:
        """Every cell that a run can fill, row by row."""
        for row in self.rows:
            for column in self.columns:
                for variant in self.variants:
                    if (recipe := self.recipe(row, column, variant)) is not None:
                        yield Cell(row, column, variant, recipe)

    def paper_says(self, row: str, column: str) -> float | None:
        """The published number, verbatim, or None."""
        return published_number(self.published, row, tuple(self.columns), column)

    def printed_gain(self, row: str, column: str) -> float | None:
        """The gain that the paper prints for a row, or None."""
        return published_number(self.printed_gains, row, tuple(self.columns), column)


def published_number(numbers: Numbers, row: str, columns: tuple[str, ...], column: str) -> float | None:
    return numbers[row][columns.index(column)] if row in numbers else None


METHOD_ROWS: Mapping[str, RecipeChanges] = {
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
"""Methods by the names that the paper uses in its tables."""


def method_rows(*names: str) -> dict[str, RecipeChanges]:
    """Rows of METHOD_ROWS, by the paper's names."""
    return {name: METHOD_ROWS[name] for name in names}


SIZES: Mapping[str, RecipeChanges] = {f"{p} %": {"fraction": p / 100} for p in (100, 50, 25, 10)}
TABLE1_RIGHT: Numbers = {
    "No Mixup": (76.52, 66.31, 46.78, 26.55),
    "Mixup": (77.33, 68.39, 49.68, 28.21),
    "IC-Mixup (c)": (76.75, 68.95, 48.58, 30.38),
    "IC-Mixup (p)": (77.62, 69.23, 50.72, 28.29),
    "IC-Mixup": (77.90, 68.89, 50.48, 30.19),
}
"""The numbers of Table 1, right, by row and in the order of SIZES; further tables quote some of them."""
