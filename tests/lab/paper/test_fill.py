"""The paper's tables: published numbers, the recipe of every cell, and how results fill and show them."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console

from icmixup.lab.datasets.subsets import draw_subset, subset_counts
from icmixup.lab.paper.fill import STAND_INS, FilledTable, fill_table, index_results, stand_in_recipe
from icmixup.lab.paper.published import TABLES
from icmixup.lab.paper.render import (
    print_table,
    results_page,
    table_as_json,
    table_as_latex,
    table_as_markdown,
)
from icmixup.lab.paper.results import METRICS, PROVENANCE, Result, Results
from icmixup.lab.training.recipe import STRONG, Recipe

CELLS = [(table, cell) for table in TABLES.values() for cell in table.cells()]
PAPER_NAMES = [
    *("table1-left", "table1-right", "figure-regmixup", "table2-left", "table2-middle", "table2-right"),
    *("figure-confidence", "figure-difference", "baselines"),
]
# Rows of the paper's tables, typed a second time, independently of published.py.
PRINTED = {
    ("table1-left", "both axes"): "76.20 & 77.90 & 77.08",
    ("table1-left", "class axis"): "74.90 & 76.75 & 76.17",
    ("table1-left", "pair axis"): "75.38 & 77.62 & 76.09",
    ("table1-right", "No Mixup"): "76.52 & 66.31 & 46.78 & 26.55",
    ("table1-right", "Mixup"): "77.33 & 68.39 & 49.68 & 28.21",
    ("table1-right", "IC-Mixup (c)"): "76.75 & 68.95 & 48.58 & 30.38",
    ("table1-right", "IC-Mixup (p)"): "77.62 & 69.23 & 50.72 & 28.29",
    ("table1-right", "IC-Mixup"): "77.90 & 68.89 & 50.48 & 30.19",
    ("baselines", "IC-Mixup"): "77.90 & 30.19",
    ("baselines", "IC-Mixup (c)"): "76.75 & 30.38",
    ("table2-left", "No Mixup"): "41.96 & 45.58",
    ("table2-left", "Mixup"): "43.83 & 47.63",
    ("table2-left", "IC-Mixup"): "43.11 & 49.03",
    ("table2-left", "RegMixup"): "47.55 & 53.17",
    ("table2-left", "IC-RegMixup"): "47.67 & 55.54",
    ("table2-middle", "Bietti et al. 2019"): "51.03",
    ("table2-middle", "Oyallon et al. 2017"): "54.21",
    ("table2-middle", "Kayhan and van Gemert 2020"): "55.00",
    ("table2-middle", "Ulicny et al. 2019"): "56.50",
    ("table2-middle", "Kobayashi 2021"): "57.50",
    ("table2-middle", "Brigato et al. 2021"): "58.22",
    ("table2-middle", "+ IC-RegMixup"): "61.84",
    ("table2-right", "ERM"): "58.54 & 37.44 & 88.63 & 71.87",
    ("table2-right", "Mixup"): "62.68 & 39.21 & 89.63 & 72.82",
    ("table2-right", "IC-Mixup"): "64.30 & 43.31 & 89.89 & 76.81",
    ("table2-right", "Remix"): "61.36 & 38.04 & 89.57 & 72.65",
    ("table2-right", "IC-Remix"): "64.56 & 46.01 & 90.26 & 79.28",
}


def test_all_tables_and_figures_of_the_paper_come_first_and_then_the_ablations() -> None:
    assert list(TABLES)[: len(PAPER_NAMES)] == PAPER_NAMES
    ablations = ["lam", "duplicates", "negatives", "joint"]
    ablations += ["temperature", "remix", "centred", "last-batch", "share", "long-tail"]
    assert list(TABLES)[len(PAPER_NAMES) :] == ablations
    assert all(table.in_paper == (name in PAPER_NAMES) for name, table in TABLES.items())


@pytest.mark.parametrize(("name", "row"), PRINTED)
def test_published_numbers_match_the_paper(name: str, row: str) -> None:
    table = TABLES[name]
    stored = [table.paper_says(row, column) for column in table.columns]
    assert stored == [float(number) for number in PRINTED[name, row].split("&")]


def test_no_number_is_listed_that_the_paper_does_not_print() -> None:
    rows = {(name, row) for name, table in TABLES.items() for row in table.published}
    figure = {("figure-regmixup", "RegMixup"), ("figure-regmixup", "IC-RegMixup")}
    shares = {("share", row) for row in ("No Mixup", "Mixup", "IC-Mixup")}
    assert rows == set(PRINTED) | figure | shares
    table = TABLES["figure-regmixup"]
    printed = {(r, c): table.paper_says(r, c) for r in table.rows for c in table.columns}
    assert {cell: value for cell, value in printed.items() if value is not None} == {
        ("RegMixup", "CIFAR-100 100 %"): 77.99,
        ("IC-RegMixup", "CIFAR-100 100 %"): 78.83,
        ("RegMixup", "CIFAR-100 10 %"): 29.84,
        ("IC-RegMixup", "CIFAR-100 10 %"): 36.91,
    }


def test_the_table_of_shares_quotes_the_paper_at_25_percent_only() -> None:
    assert TABLES["share"].published == {
        "No Mixup": (46.78, None, None),
        "Mixup": (49.68, None, None),
        "IC-Mixup": (50.48, None, None),
    }
    assert TABLES["share"].runs == 1


def test_every_row_of_numbers_has_a_number_per_column_and_belongs_to_a_row_of_its_table() -> None:
    for table in TABLES.values():
        for numbers in (table.published, table.printed_gains):
            assert set(numbers) <= set(table.rows)
            assert {len(row) for row in numbers.values()} <= {len(table.columns)}
        assert {row for pair in table.gains for row in pair} <= set(table.rows)


TENTH = Recipe(fraction=0.1)
TAIL = Recipe(imbalance=0.01)
CELL_RECIPES = {
    ("table1-left", "pair axis", "batch 512"): Recipe(method="ic-mixup-p", batch_size=512),
    ("table1-right", "No Mixup", "25 %"): Recipe(method="erm", fraction=0.25),
    ("figure-regmixup", "RegMixup", "CIFAR-10 10 %"): replace(TENTH, dataset="cifar10", method="regmixup"),
    ("table2-left", "Mixup", "ciFAIR-100"): Recipe(dataset="cifair100", per_class=50, method="mixup"),
    ("figure-confidence", "IC-Mixup", "accuracy"): Recipe(),
    ("baselines", "all original classes", "100 %"): Recipe(method="ic-mixup-classes"),
    ("lam", "batch", "IC-Mixup, CIFAR-100 10 %"): TENTH,
    ("lam", "elem", "IC-Mixup, CIFAR-100 10 %"): replace(TENTH, mode="elem"),
    ("duplicates", "ignore", "IC-Mixup, LT-CIFAR100 0.01"): replace(TAIL, duplicates="ignore"),
    ("share", "IC-Mixup", "25 %"): Recipe(fraction=0.25),
    ("share", "No Mixup", "15 %"): Recipe(method="erm", fraction=0.15),
    ("joint", "one forward pass", "RegMixup, CIFAR-100 10 %"): replace(TENTH, method="regmixup", joint=True),
    ("long-tail", "erm", "LT-CIFAR100, strong, resnet18"): replace(STRONG, imbalance=0.01, method="erm"),
    ("long-tail", "balanced", "LT-CIFAR100, paper, resnet34"): replace(TAIL, method="balanced"),
    ("long-tail", "mixup", "LT-CIFAR10, paper, resnet34"): replace(TAIL, dataset="cifar10", method="mixup"),
}


@pytest.mark.parametrize(("name", "row", "column"), CELL_RECIPES)
def test_row_and_column_define_the_recipe_of_a_cell(name: str, row: str, column: str) -> None:
    assert TABLES[name].recipe(row, column) == CELL_RECIPES[name, row, column]


def test_the_long_tailed_table_has_both_networks() -> None:
    ours = [
        TABLES["table2-right"].recipe("IC-Remix", "LT-CIFAR10 0.01", name)
        for name in ("resnet34", "resnet32")
    ]
    expected = replace(TAIL, dataset="cifar10", method="ic-remix")
    assert ours == [expected, replace(expected, model="resnet32")]


def test_the_tuned_recipe_matches_the_deic_benchmark() -> None:
    tuned = TABLES["table2-middle"].recipe("+ IC-RegMixup", "ciFAIR-10")
    data = {"dataset": "cifair10", "per_class": 50, "split": 0, "padding_mode": "reflect", "rotation": 0.0}
    steps = {"epochs": 500, "batch_size": 10, "lr": 4.55e-3, "weight_decay": 5.29e-3, "schedule": "cosine"}
    assert tuned == replace(Recipe(model="wrn16-8", method="ic-regmixup"), **data, **steps)
    assert (tuned.padding, tuned.flip, tuned.nesterov) == (4, True, False)
    assert TABLES["table2-middle"].recipe("Kobayashi 2021", "ciFAIR-10") is None
    assert TABLES["table2-middle"].runs == 10


def made_result(recipe: Recipe, accuracy: float, line: int = 2, **numbers: object) -> Result:
    empty: dict[str, Any] = dict.fromkeys((*METRICS, *PROVENANCE))
    return Result(recipe, {**empty, "accuracy": accuracy, "device": "H200", **numbers}, line)


def fill(name: str, *runs: tuple[str, str, str, list[float]]) -> FilledTable:
    """A table with synthetic accuracies, by seed, in some of its cells."""
    results = []
    for row, column, variant, accuracies in runs:
        recipe = TABLES[name].recipe(row, column, variant)
        assert recipe is not None
        results += [made_result(replace(recipe, seed=seed), value) for seed, value in enumerate(accuracies)]
    return fill_table(TABLES[name], index_results(results))


def test_differences_and_gains_are_computed_from_cells() -> None:
    filled = fill(
        "table1-right",
        ("Mixup", "10 %", "ours", [28.0, 29.0, 30.0]),
        ("IC-Mixup", "10 %", "ours", [31.0, 33.0, 32.0, 99.0]),
    )
    mixup = filled.entry("Mixup", "10 %")
    assert (mixup.ours[0].mean, mixup.ours[0].std, mixup.ours[0].n) == (29.0, 1.0, 3)
    assert mixup.difference(mixup.ours[0]) == pytest.approx(29.0 - 28.21)
    gain = filled.entry("IC-Mixup minus Mixup", "10 %")
    assert gain.paper == pytest.approx(30.19 - 28.21)
    assert gain.ours[0].mean == pytest.approx(3.0)  # of the three seeds that both have
    assert gain.ours[0].n == 3
    assert (filled.cells_with_runs, filled.complete_cells) == (2, 2)


def test_a_deviation_is_noted_above_two_standard_deviations_only() -> None:
    far = fill("table1-right", ("IC-Mixup", "10 %", "ours", [32.2, 32.4, 32.6]))
    assert (
        "IC-Mixup, 10 %: our mean 32.40 ± 0.20 (3 runs) is 2.21 points above the paper's 30.19"
        in far.notes[0]
    )
    near = fill("table1-right", ("IC-Mixup", "10 %", "ours", [30.0, 30.2, 30.5]))
    assert not any(note.startswith("Deviation") for note in near.notes)
    single = fill("table1-right", ("IC-Mixup", "10 %", "ours", [60.0]))
    assert not any(note.startswith("Deviation") for note in single.notes)
    assert single.notes[0].startswith("1 cell has a single run")


def test_printed_gains_are_noted_only_if_they_do_not_match_the_papers_cells() -> None:
    notes = " ".join(fill("table2-right").notes)
    for printed, column, difference in (
        ("+5.97", "CIFAR100 0.01", "+7.97"),
        ("+0.67", "CIFAR10 0.1", "+0.69"),
    ):
        assert (
            f"prints a gain of {printed} for IC-Remix over Remix on LT-{column}; "
            f"the difference of its cells, shown here, is {difference}."
        ) in notes
    assert notes.count("prints a gain") == 2
    assert "prints a gain" not in " ".join(fill("figure-regmixup").notes)


def test_different_results_of_one_seed_are_all_shown_and_averaged() -> None:
    recipe = TABLES["table1-right"].recipe("Mixup", "10 %")
    assert recipe is not None
    rows = [
        made_result(recipe, 30.0, 2),
        made_result(recipe, 32.0, 9),
        made_result(replace(recipe, seed=1), 33.0),
    ]
    filled = fill_table(TABLES["table1-right"], index_results(rows))
    ours = filled.entry("Mixup", "10 %").ours[0]
    assert (ours.n, ours.mean) == (2, 32.0)
    assert any("30.00 (H200, line 2) and 32.00 (H200, line 9)" in note for note in filled.notes)


def test_results_on_a_stand_in_test_set_are_marked_and_not_called_cifair() -> None:
    table = TABLES["table2-left"]
    recipe = table.recipe("Mixup", "ciFAIR-10")
    assert recipe is not None
    rows = [made_result(replace(recipe, dataset="cifar10-notwins", seed=s), 60.0 + s) for s in range(3)]
    filled = fill_table(table, index_results(rows))
    assert filled.entry("Mixup", "ciFAIR-10").ours[0].stand_in == "cifar10-notwins"
    assert "| Mixup | ciFAIR-10 | 47.63 | 61.00 ± 1.00 (3)† | +13.37 |" in table_as_markdown(filled)
    assert any("† tested on cifar10-notwins" in note for note in filled.notes)
    assert not any(note.startswith("Deviation") for note in filled.notes)
    own = fill_table(table, index_results([*rows, made_result(recipe, 50.0)]))
    assert own.entry("Mixup", "ciFAIR-10").ours[0].mean == 50.0  # ciFAIR-10 itself takes precedence


def test_a_tenth_of_cifar_100_fills_the_cells_of_cifair_100_and_is_not_called_that() -> None:
    table = TABLES["table2-left"]
    rows = [made_result(replace(TENTH, method="mixup", seed=seed), 30.0 + seed) for seed in range(3)]
    notwins = Recipe(dataset="cifar10-notwins", per_class=50, method="mixup")
    filled = fill_table(table, index_results([*rows, made_result(notwins, 60.0)]))
    assert filled.entry("Mixup", "ciFAIR-100").ours[0].stand_in == "cifar100"
    assert "| Mixup | ciFAIR-100 | 43.83 | 31.00 ± 1.00 (3)† | -12.83 |" in table_as_markdown(filled)
    explained = [note for note in filled.notes if note.startswith("†")]
    assert [note.partition(":")[0] for note in explained] == [
        "† tested on cifar100",
        "† tested on cifar10-notwins",
    ]
    assert all("deviations from the paper are not assessed" in note for note in explained)
    assert not any(note.startswith("Deviation") for note in filled.notes)
    alone = fill_table(table, index_results(rows))
    assert not any("cifar10-notwins" in note for note in alone.notes)


def test_a_tenth_of_cifar_100_is_drawn_as_fifty_images_per_class_are() -> None:
    recipe = TABLES["table2-left"].recipe("Mixup", "ciFAIR-100")
    assert recipe is not None
    stand_in = stand_in_recipe(recipe)
    assert stand_in == replace(TENTH, method="mixup")
    order = torch.randperm(50_000, generator=torch.Generator().manual_seed(1))
    labels = order % 100  # 500 images of each class, as in CIFAR-100, in a made-up order
    drawn = [
        draw_subset(
            labels,
            subset_counts(torch.bincount(labels), per_class=one.per_class, fraction=one.fraction),
            one.data_seed,
        )
        for one in (recipe.data, stand_in.data)
    ]
    assert len(drawn[0]) == 5000
    assert torch.equal(*drawn)


def test_only_a_stand_in_with_as_many_training_images_is_used() -> None:
    on_cifair = [cell.recipe for _, cell in CELLS if cell.recipe.dataset in STAND_INS]
    assert {recipe.dataset for recipe in on_cifair} == {"cifair10", "cifair100"}
    assert all(stand_in_recipe(recipe) for recipe in on_cifair)
    assert stand_in_recipe(Recipe(dataset="cifair100", per_class=20)) is None
    assert stand_in_recipe(Recipe(dataset="cifair100")) is None
    assert stand_in_recipe(Recipe()) is None


def some_results() -> list[Result]:
    generator = random.Random(0)
    return [
        made_result(replace(cell.recipe, seed=seed), generator.uniform(20, 90))
        for _, cell in CELLS[::3]
        for seed in range(generator.choice([1, 3]))
    ]


@pytest.mark.parametrize("name", TABLES)
def test_every_output_format_shows_every_cell(name: str) -> None:
    filled = fill_table(TABLES[name], index_results(some_results()))
    cells = len(filled.entries) + len(filled.gains)
    variants = len(TABLES[name].variants)
    lines = [line for line in table_as_markdown(filled).splitlines() if line.startswith("| ")]
    assert len(lines) == 2 + cells
    assert {line.count(" | ") for line in lines[2:]} == {2 + 2 * variants}
    latex = table_as_latex(filled)
    body = [line for line in latex.splitlines() if line.endswith(r"\\")]
    assert len({line.count(" & ") for line in body[1:]}) == 1
    assert len(body) == 2 + cells // len(TABLES[name].columns)
    assert not re.search(r"(?<!\\)[%&_](?=\S)", "\n".join(body).replace(r"\_", ""))
    stored = json.loads(json.dumps(table_as_json(filled), allow_nan=False))
    assert [(e["row"], e["paper"]) for e in stored["entries"]] == [(e.row, e.paper) for e in filled.entries]
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_table(filled, console)
    printed = console.export_text()
    console.file.close()
    assert all(f"{e.paper:.2f}" in printed for e in filled.entries if e.paper is not None)
    assert all(f"{o.mean:.2f}" in printed for e in filled.entries for o in e.ours if o.mean is not None)


def test_the_results_page_has_every_table_and_depends_on_the_rows_alone() -> None:
    rows = tuple(some_results())
    page = results_page(Results(rows))
    assert all(f"### {table.title}\n" in page for table in TABLES.values())
    assert page == results_page(Results(tuple(some_results())))
    assert page != results_page(Results(rows[:-1]))


def test_the_results_page_counts_the_time_of_concurrent_runs_once() -> None:
    rows = [made_result(Recipe(seed=seed), 50.0, minutes=90.0, at_once=3) for seed in range(3)]
    alone = made_result(Recipe(seed=3), 50.0, minutes=30.0)
    assert "4 runs, 2.0 hours of H200." in results_page(Results((*rows, alone)))


def test_the_results_page_begins_with_the_number_of_cells_that_have_runs() -> None:
    table = TABLES["table2-left"]
    recipe = table.recipe("Mixup", "ciFAIR-100")
    other = table.recipe("IC-Mixup", "ciFAIR-100")
    assert recipe is not None
    assert other is not None
    rows = [made_result(replace(recipe, seed=seed), 40.0) for seed in range(3)]
    page = results_page(Results((*rows, made_result(other, 41.0))))
    cells = sum(table.in_paper for table, _ in CELLS)
    first, overview = page.removeprefix("# Results\n\n").split("\n\n")[:2]
    assert first.startswith(
        f"**2 of {cells} cells of the paper's tables and figures have runs**, 1 of them with as many seeds"
    )
    assert [line.split(" | ")[0].removeprefix("| ") for line in overview.splitlines()[2:]] == PAPER_NAMES
    assert f"| table2-left | 2 of 10 | 4 | {table.title} |" in overview


def test_the_results_page_counts_cells_tested_on_a_stand_in() -> None:
    recipe = TABLES["table2-left"].recipe("Mixup", "ciFAIR-10")
    assert recipe is not None
    page = results_page(Results((made_result(replace(recipe, dataset="cifar10-notwins"), 60.0),)))
    assert "1 used a stand-in test set (†)." in page
    assert "| table2-left | 1 of 10 † | 1 |" in page
