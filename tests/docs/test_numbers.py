"""Every figure on the pages is made from its rows, and every row says where it was made."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from statistics import fmean, stdev

import pytest
from pages import FINDINGS, PAPER, README, ROOT, page_name, rows, section

from icmixup import METHODS
from icmixup.lab.comparison.statistics import MEASURES, Standing, paired_difference, rank_methods
from icmixup.lab.paper.published import TABLES
from icmixup.lab.paper.spec import METHOD_ROWS


def standings(file: str, baseline: str) -> list[Standing]:
    """What the rows of a comparison in results/ come to."""
    with (ROOT / "results" / file).open() as text:
        runs = [
            {**run, **{name: float(run[name]) if run[name] else None for name in ("accuracy", *MEASURES)}}
            for run in csv.DictReader(text)
        ]
    for run in runs:
        run["seed"] = int(run["seed"])
    methods, seeds = (list(dict.fromkeys(run[name] for run in runs)) for name in ("method", "seed"))
    return list(rank_methods(runs, methods, seeds, baseline))


def told(heading: str, page: Path = README) -> list[list[str]]:
    """The rows of the page's table whose second column is called so."""
    tables = [rows(block) for block in page.read_text().split("\n\n") if block.startswith("|")]
    return next(table[1:] for table in tables if table[0][1].startswith(heading))


def flat(page: Path) -> str:
    """A page's text in one line, so that a sentence is found however it is broken."""
    return " ".join(page.read_text().split())


def rival(one: Standing) -> str:
    return f"{one.mean:.1f} %" if one.difference is None else str(one.difference)


def accuracies(measure: str = "accuracy", **fields: str) -> list[float]:
    """A measure of the rows of results/runs.csv with these fields, in the order of their seeds."""
    with (ROOT / "results" / "runs.csv").open(newline="") as file:
        found = [row for row in csv.DictReader(file) if fields.items() <= row.items()]
    return [float(row[measure]) for row in sorted(found, key=lambda row: int(row["seed"]))]


def spread(found: list[float]) -> str:
    return f"{fmean(found):.1f} ± {stdev(found):.1f}"


def published(table: str, column: str) -> dict[str, str]:
    """The paper's numbers of a column, by our names of its methods."""
    found = TABLES[table]
    numbers = {
        METHOD_ROWS[row]["method"]: found.paper_says(row, column) for row in found.rows if row in METHOD_ROWS
    }
    return {method: f"{number:.2f}" for method, number in numbers.items() if number is not None}


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*.csv")), ids=page_name)
def test_every_row_says_where_it_was_made_and_from_which_commit(path: Path) -> None:
    with path.open() as text:
        for row in csv.DictReader(text):
            assert all(row[name] for name in ("device", "torch", "commit", "date"))
            assert re.fullmatch("[0-9a-f]{7,}", row["commit"]), "a tree that no commit holds"


def test_the_readme_s_demo_is_made_from_its_rows() -> None:
    def line(one: Standing) -> list[str]:
        few, raw, scaled = (
            f"{one.average(name):.1f}" for name in ("few", "calibration_error", "calibration_error_scaled")
        )
        return [one.method, f"{one.mean:.1f} ± {one.std:.1f}", few, f"{raw} → {scaled}"]

    assert told("accuracy, %") == [line(one) for one in standings("demo.csv", "mixup")]


def test_long_tails_among_the_findings_are_made_from_their_rows() -> None:
    digits, cifar = (standings(f"{name}_lt.csv", "balanced-mixup") for name in ("digits", "cifar10"))
    on_cifar = {one.method: rival(one) for one in cifar}
    assert told("digits, 0.01", FINDINGS) == [
        [one.method, rival(one), on_cifar.get(one.method, "")] for one in digits
    ]
    head = next(row for row in rows(FINDINGS.read_text()) if row[1].startswith("digits, 0.01"))
    for cell, found in zip(head[1:], (digits, cifar), strict=True):
        assert f" {len(found[0].accuracies)} seeds " in cell


def test_the_centred_form_among_the_findings_is_made_from_its_rows() -> None:
    digits, cifar = (
        {one.method: one for one in standings(f"{name}_lt_centred.csv", "ic-mixup")}
        for name in ("digits", "cifar10")
    )
    assert told("digits, seeds", FINDINGS) == [
        [name, rival(digits[name]), rival(cifar[name])] for name in digits
    ]
    assert [len(found["ic-mixup"].accuracies) for found in (digits, cifar)] == [10, 8]
    text = flat(FINDINGS)
    (best, *_) = standings("cifar10_lt_centred.csv", "balanced-mixup")
    assert best.method == "ic-mixup-centred"
    assert f"ahead of it by {best.difference} on CIFAR-10" in text
    against = {
        (one.method, baseline): one.difference
        for baseline in ("ic-mixup-cutmix", "balanced-mixup-cutmix")
        for one in standings("cifar10_lt_cutmix_centred.csv", baseline)
    }
    plain, ours = "ic-mixup-cutmix", "ic-mixup-cutmix-centred"
    assert f"`{ours}` has {against[ours, plain]} on `{plain}`" in text
    assert f"which itself has {against[plain, 'balanced-mixup-cutmix']} on" in text


def test_few_digits_among_the_findings_are_made_from_their_rows() -> None:
    against_mixup = {one.method: one.difference for one in standings("digits_10.csv", "mixup")}
    assert f"`ic-mixup` has {against_mixup['ic-mixup']}" in flat(FINDINGS)


def test_cutmix_among_the_findings_is_made_from_its_rows() -> None:
    text = flat(FINDINGS)
    found = {one.method: one for one in standings("cifar10_lt_cutmix.csv", "balanced-mixup-cutmix")}
    assert {len(one.accuracies) for one in found.values()} == {8}
    for method in ("ic-mixup-cutmix", "mixup-cutmix"):
        assert f"`{method}` has {found[method].difference}" in text
    ours, theirs = (f"{found[f'{name}-mixup-cutmix'].average('few'):.1f}" for name in ("ic", "balanced"))
    assert f"({ours} % against {theirs})" in text


def test_the_last_batch_among_the_findings_is_made_from_its_rows() -> None:
    with (ROOT / "results" / "last_batch.csv").open(newline="") as file:
        found = {
            (row["method"], row["drop_last"], row["seed"]): float(row["accuracy"])
            for row in csv.DictReader(file)
        }
    text = flat(FINDINGS)
    for method, joined in (("erm", "has {} points"), ("ic-mixup", "{} (six seeds")):
        dropped, kept = ([found[method, drop, str(seed)] for seed in range(6)] for drop in ("True", "False"))
        assert f"`{method}` {joined.format(paired_difference(dropped, kept))}" in text


def test_parts_and_seeds_among_the_findings_are_made_from_their_rows() -> None:
    with (ROOT / "results" / "parts.csv").open(newline="") as file:
        found = list(csv.DictReader(file))

    def measured(of_part: dict[str, str], varied: str, held: str) -> list[float]:
        wanted = of_part | {held: "0"}
        runs = [row for row in found if wanted.items() <= row.items()]
        assert sorted(row[varied] for row in runs) == ["0", "1", "2", "3", "4", "5"]
        return [float(row["accuracy"]) for row in runs]

    table = told("mean, %", FINDINGS)
    parts = ({"fraction": "0.1", "imbalance": "1.0"}, {"fraction": "1.0", "imbalance": "0.01"})
    for line, of_part in zip(table, parts, strict=True):
        over_parts, over_seeds = (
            measured(of_part, *names) for names in (("data_seed", "seed"), ("seed", "data_seed"))
        )
        spreads = [f"{stdev(runs):.2f}" for runs in (over_parts, over_seeds)]
        assert line[1:] == [f"{fmean(over_parts + over_seeds[1:]):.1f}", *spreads]


def test_the_readme_s_little_data_is_made_from_its_rows() -> None:
    paper = published("table1-right", "10 %") | published("figure-regmixup", "CIFAR-100 10 %")
    found = {name: accuracies(method=name, fraction="0.1", mode="") for name in METHODS}
    table = told("the paper, %")
    assert {row[0] for row in table} == set(paper)
    for method, theirs, ours, gain in table:
        assert [theirs, ours] == [paper[method], spread(found[method])]
        if gain:
            rival = gain.split(":")[0]
            assert gain == f"{rival}: {paired_difference(found[method], found[rival])}"
    each = accuracies(method="ic-mixup", fraction="0.1", mode="elem")
    text = flat(README)
    assert (
        f"has {each[0]:.2f} on seed 0, where it has {found['ic-mixup'][0]:.2f} with one for the batch" in text
    )
    assert max(found["ic-mixup"]) - min(found["ic-mixup"]) > found["ic-mixup"][0] - each[0]


def test_the_readme_s_strong_recipe_is_made_from_its_rows() -> None:
    networks = ("resnet18", "resnet32")

    def measured(method: str, model: str, measure: str = "accuracy") -> list[float]:
        return accuracies(measure, method=method, model=model, schedule="cosine")

    def line(method: str) -> list[str]:
        cells = [method]
        for model in networks:
            rival = measured("balanced-mixup-cutmix", model)
            gap = (
                ""
                if method == "balanced-mixup-cutmix"
                else str(paired_difference(measured(method, model), rival))
            )
            cells += [spread(measured(method, model)), gap]
        few, raw, scaled = (
            [f"{fmean(measured(method, model, name)):.1f}" for model in networks]
            for name in ("few", "calibration_error", "calibration_error_scaled")
        )
        return [*cells, ", ".join(few), ", ".join(map(" → ".join, zip(raw, scaled, strict=True)))]

    table = told("accuracy, ResNet-18")
    assert table == [line(row[0]) for row in table]
    assert all(len(measured(row[0], model)) == 3 for row in table for model in networks)


def test_the_readme_s_tails_of_the_paper_are_made_from_their_rows() -> None:
    found = {
        name: (published("table2-right", f"LT-{name} 0.01"), dataset)
        for name, dataset in (("CIFAR100", "cifar100"), ("CIFAR10", "cifar10"))
    }

    def line(method: str) -> list[str]:
        cells = [method]
        for paper, dataset in found.values():
            (ours,) = accuracies(
                method=method, dataset=dataset, imbalance="0.01", model="resnet32", schedule="step"
            )
            cells += [paper.get(method, ""), f"{ours:.1f}"]
        return cells

    table = told("LT-CIFAR100 0.01")
    assert table == [line(row[0]) for row in table]
    assert {row[0] for row in table} >= set(found["CIFAR10"][0])


def test_the_centred_form_on_larger_networks_is_made_from_its_rows() -> None:
    text, forms = flat(FINDINGS), ("ic-mixup-centred", "ic-mixup")
    centred, plain = (accuracies(method=name, fraction="0.1", mode="") for name in forms)
    assert f"it has {paired_difference(centred, plain)} on `ic-mixup`, three seeds" in text
    for model, name in (("resnet18", "ResNet-18"), ("resnet32", "ResNet-32")):
        ours, theirs = (
            accuracies(method=f"ic-mixup-cutmix{form}", model=model, schedule="cosine")[0]
            for form in ("-centred", "")
        )
        assert re.search(rf"{ours:.1f} where (`ic-mixup-cutmix`|it) has {theirs:.1f} \({name}\)", text)


def test_the_readme_s_full_cifar_is_made_from_its_rows() -> None:
    ours, theirs = (
        accuracies(method=name, fraction="1.0", imbalance="1.0") for name in ("ic-mixup", "mixup")
    )
    told_ours = " and ".join(f"{accuracy:.1f}" for accuracy in ours)
    assert f"{told_ours} of `ic-mixup` (two seeds) and {theirs[0]:.1f} of `mixup` (one)" in flat(README)


def test_what_the_paper_page_says_of_mixed_images_is_made_from_its_rows() -> None:
    with (ROOT / "results" / "analysis.csv").open(newline="") as file:
        found = {(row["model"], row["method"], row["lam"]): row for row in csv.DictReader(file)}
    text = flat(PAPER)
    steep, flatter = (
        f"{float(found['resnet34', method, '1.0']['difference_mean']):.1f}"
        for method in ("ic-mixup", "mixup")
    )
    assert f"to {steep} at lam 1 where Mixup has {flatter}" in text
    ours, theirs = (
        [f"{float(found['small-cnn', method, '0.5'][name]):.0f}" for name in ("squared_norm", "centred_norm")]
        for method in ("ic-mixup", "mixup")
    )
    assert f"{ours[0]} at lam 0.5, and {ours[1]} when each image's mean is taken off" in text
    assert f"of Mixup's, {theirs[0]} and {theirs[1]}, it is nothing" in text


def test_the_readme_s_speed_is_made_from_its_rows() -> None:
    text = section(README, "Speed and memory")
    with (ROOT / "results" / "bench.csv").open(newline="") as file:
        steps = {
            (row["form"], row["method"]): row for row in csv.DictReader(file) if row["model"] == "resnet34"
        }
    compiled, plain = (
        f"{int(steps[form, 'ic-mixup']['images_per_second']):,}" for form in ("compiled", "plain")
    )
    ratio = float(steps["compiled", "ic-mixup"]["ms_per_step"]) / float(
        steps["compiled", "mixup"]["ms_per_step"]
    )
    for figure in (f"{compiled} images a second", f"{plain} in a plain loop", f"takes {ratio:.3f} of one of"):
        assert figure in " ".join(text.split())
    with (ROOT / "results" / "bench_loss.csv").open(newline="") as file:
        losses = {(row["form"], row["batch"], row["classes"]): row for row in csv.DictReader(file)}
    for pairs, *cells in (row for row in rows(text) if row[0].endswith(" pairs")):
        batch = pairs.split()[0].replace(",", "")
        for form, cell in zip(("plain", "authors", "compiled", "fused"), cells, strict=True):
            row = losses.get((form, batch, "1000"))
            wanted = f"{float(row['ms']):.1f} ms, {float(row['peak_mb']) / 1000:.2f} GB" if row else ""
            assert cell == wanted, (form, pairs)
