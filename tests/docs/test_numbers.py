"""Every number on the pages is computed from rows in results/, and every row names its commit and device."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from statistics import fmean, stdev

import pytest
from pages import FINDINGS, LOG, PAPER, README, ROOT, SPEED, page_name, rows
from scipy.stats import spearmanr

from icmixup import METHODS
from icmixup.lab.comparison.statistics import MEASURES, Standing, paired_difference, rank_methods
from icmixup.lab.paper.fill import FilledTable, fill_table, index_results
from icmixup.lab.paper.published import PAPER as PAPER_TABLES
from icmixup.lab.paper.published import TABLES
from icmixup.lab.paper.results import read_rows
from icmixup.lab.paper.spec import METHOD_ROWS
from icmixup.lab.training.recipe import HEAD


def standings(file: str, baseline: str) -> list[Standing]:
    """The ranking of methods that follows from the rows of a comparison in results/."""
    with (ROOT / "results" / file).open() as text:
        runs = [
            {**run, **{name: float(run[name]) if run.get(name) else None for name in ("accuracy", *MEASURES)}}
            for run in csv.DictReader(text)
        ]
    for run in runs:
        run["seed"], run["class_accuracies"] = int(run["seed"]), None
    methods, seeds = (list(dict.fromkeys(run[name] for run in runs)) for name in ("method", "seed"))
    return list(rank_methods(runs, methods, seeds, baseline))


def table_under(heading: str, page: Path = FINDINGS) -> list[list[str]]:
    """The rows of the page's table whose second column starts with this heading."""
    tables = [rows(block) for block in page.read_text().split("\n\n") if block.startswith("|")]
    return next(table[1:] for table in tables if table[0][1].startswith(heading))


def flat(page: Path) -> str:
    """A page's text on one line, so that line breaks do not matter."""
    return " ".join(page.read_text().split())


def mean_or_difference(one: Standing) -> str:
    """The mean of the baseline, and the difference to it of every other method."""
    return f"{one.mean:.1f} %" if one.difference is None else str(one.difference)


def accuracies(measure: str = "accuracy", rows_of: str = "runs.csv", **fields: str) -> list[float]:
    """A measure of the rows of a file in results/ with these fields, ordered by seed."""
    with (ROOT / "results" / rows_of).open(newline="") as file:
        found = [row for row in csv.DictReader(file) if fields.items() <= row.items()]
    return [float(row[measure]) for row in sorted(found, key=lambda row: int(row["seed"]))]


def spread(found: list[float]) -> str:
    if len(found) == 1:
        return f"{found[0]:.1f}"
    return f"{fmean(found):.1f} ± {stdev(found):.1f}"


def published(table: str, column: str) -> dict[str, str]:
    """The paper's numbers in a column, by method name."""
    found = TABLES[table]
    numbers = {
        METHOD_ROWS[row]["method"]: found.paper_says(row, column) for row in found.rows if row in METHOD_ROWS
    }
    return {method: f"{number:.2f}" for method, number in numbers.items() if number is not None}


# Simulations of statistics.csv train nothing: tools/simulate_statistics.py gives the same rows anywhere.
TRAINED = sorted(path for path in (ROOT / "results").glob("*.csv") if path.name != "statistics.csv")


@pytest.mark.parametrize("path", TRAINED, ids=page_name)
def test_every_row_names_its_device_versions_commit_and_date(path: Path) -> None:
    with path.open() as text:
        for row in csv.DictReader(text):
            assert all(row[name] for name in ("device", "torch", "commit", "date"))
            assert re.fullmatch("[0-9a-f]{7,}", row["commit"]), "not a commit hash"


def test_the_demo_is_computed_from_its_rows() -> None:
    def line(one: Standing) -> list[str]:
        few, raw, scaled = (
            f"{one.average(name):.1f}" for name in ("few", "calibration_error", "calibration_error_scaled")
        )
        return [one.method, f"{one.mean:.1f} ± {one.std:.1f}", few, f"{raw} → {scaled}"]

    assert table_under("accuracy, %") == [line(one) for one in standings("demo.csv", "mixup")]


def test_long_tails_are_computed_from_their_rows() -> None:
    digits, cifar = (standings(f"{name}_lt.csv", "balanced-mixup") for name in ("digits", "cifar10"))
    on_cifar = {one.method: mean_or_difference(one) for one in cifar}
    assert table_under("digits, 0.01") == [
        [one.method, mean_or_difference(one), on_cifar.get(one.method, "")] for one in digits
    ]
    head = next(row for row in rows(FINDINGS.read_text()) if row[1].startswith("digits, 0.01"))
    for cell, found in zip(head[1:], (digits, cifar), strict=True):
        assert f" {len(found[0].accuracies)} seeds " in cell


def test_the_centred_form_is_computed_from_its_rows() -> None:
    digits, cifar = (
        {one.method: one for one in standings(f"{name}_lt_centred.csv", "ic-mixup")}
        for name in ("digits", "cifar10")
    )
    assert table_under("digits, seeds") == [
        [name, mean_or_difference(digits[name]), mean_or_difference(cifar[name])] for name in digits
    ]
    assert [len(found["ic-mixup"].accuracies) for found in (digits, cifar)] == [10, 8]
    text = flat(FINDINGS)
    (best, *_) = standings("cifar10_lt_centred.csv", "balanced-mixup")
    assert best.method == "ic-mixup-centred"
    assert f"is better by {best.difference} on CIFAR-10" in text
    against = {
        (one.method, baseline): one.difference
        for baseline in ("ic-mixup-cutmix", "balanced-mixup-cutmix")
        for one in standings("cifar10_lt_cutmix_centred.csv", baseline)
    }
    plain, ours = "ic-mixup-cutmix", "ic-mixup-cutmix-centred"
    assert f"`{ours}` is {against[ours, plain]} relative to `{plain}`" in text
    assert f"which itself is {against[plain, 'balanced-mixup-cutmix']} relative to" in text


def test_few_digits_are_computed_from_their_rows() -> None:
    against_mixup = {one.method: one.difference for one in standings("digits_10.csv", "mixup")}
    assert f"`ic-mixup` is {against_mixup['ic-mixup']} relative to `mixup`" in flat(FINDINGS)


def tuned_values(row: dict[str, str]) -> str:
    """The values of a trial as the tables show them."""
    values = (row[name] for name in ("lr", "weight_decay", "alpha", "adjust_tau"))
    return ", ".join(f"{float(value):.3g}" if value else "-" for value in values)


def test_tuning_is_computed_from_its_rows() -> None:
    untuned, tuned = (
        {one.method: one for one in standings(f"digits_{name}.csv", "mixup")} for name in ("untuned", "tuned")
    )
    trials = csv_rows("digits_trials.csv")
    chosen = {trial["method"]: tuned_values(trial) for trial in trials if trial["chosen"] == "True"}

    def line(method: str) -> list[str]:
        before, after = untuned[method], tuned[method]
        gain = paired_difference(after.accuracies, before.accuracies)
        return [
            f"`{method}`",
            *(f"{one.mean:.1f} ± {one.std:.1f}" for one in (before, after)),
            str(gain),
            chosen[method],
        ]

    assert table_under("untuned, 10 seeds") == [line(method) for method in tuned]
    assert {len(one.accuracies) for one in (*untuned.values(), *tuned.values())} == {10}
    assert len(trials) == 10 * len(untuned)
    text = flat(FINDINGS)

    def gap(first: str, second: str) -> str:
        return str(paired_difference(tuned[first].accuracies, tuned[second].accuracies))

    ours = "ic-regmixup-adjusted"
    assert (
        f"`{ours}` is {gap(ours, 'regmixup-adjusted')} relative to `regmixup-adjusted` and "
        f"{gap(ours, 'erm-adjusted')} relative to `erm-adjusted`; `balanced-ic-regmixup` is "
        f"{gap('balanced-ic-regmixup', 'balanced-regmixup')} relative to `balanced-regmixup`"
    ) in text
    found = {(trial["method"], trial["lr"]): f"{float(trial['balanced_accuracy']):.1f} %" for trial in trials}
    low, own = found["erm", "0.00774"], found["erm", "0.05"]
    assert f"a balanced accuracy of {low} on held-out images, against {own} with the recipe's 0.05" in text


def one_recipe_label(method: str) -> str:
    """The line of the tables with one recipe where a method stands; after training, tau is a chosen one."""
    plain = method.removesuffix("-adjusted")
    return f"`{plain}`" if plain == method else f"`{plain}`, then adjusted, tau chosen"


@pytest.mark.parametrize(("data", "heading"), [("birds", "LT birds 0.1"), ("cifar100", "LT-CIFAR100 0.01")])
def test_tuned_heads_are_computed_from_their_rows(data: str, heading: str) -> None:
    chosen = {row["method"]: row for row in csv_rows(f"{data}_head_trials.csv") if row["chosen"] == "True"}
    seeds = {"birds": "four", "cifar100": "three"}[data]
    untuned = {row[0]: row[1] for row in table_under(f"accuracy over {seeds} seeds")}

    def line(one: Standing) -> list[str]:
        return [
            f"`{one.method}`",
            untuned[one_recipe_label(one.method)],
            f"{one.mean:.1f} ± {one.std:.1f}",
            "" if one.difference is None else str(one.difference),
            tuned_values(chosen[one.method]),
        ]

    found = standings(f"{data}_head_tuned.csv", "balanced")
    assert table_under(f"{heading}, the recipe's values") == [line(one) for one in found]


def test_soft_targets_then_adjusted_are_compared_with_infinite_class_by_their_rows() -> None:
    found = {one.method: one.difference for one in standings("cifar100_head_tuned.csv", "regmixup-adjusted")}
    ours = found["ic-regmixup-adjusted"]
    assert f"the same with Infinite Class, is {ours} relative to it" in flat(FINDINGS)


def test_learning_rates_of_heads_are_computed_from_their_rows() -> None:
    found: dict[str, dict[str, list[float]]] = {}
    for name in ("long_tail_cifar100", "long_tail_cifar100_lr"):
        for row in csv_rows(f"{name}.csv"):
            given = name == "long_tail_cifar100" and (row["method"], row["after_tau"]) == ("erm", "1.0")
            if not given:  # a line of its own
                by_lr = found.setdefault(long_tail_label(row), {})
                by_lr.setdefault(row["lr"], []).append(float(row["accuracy"]))
    printed = table_under("lr 0.0001")
    assert {row[0] for row in printed} == {label for label, by_lr in found.items() if len(by_lr) > 1}
    for label, *cells in printed:
        assert cells == [spread(found[label][lr]) for lr in ("0.0001", "0.0003", "0.001")]
        assert {len(runs) for runs in found[label].values()} == {3}


def test_what_accuracy_chose_is_computed_from_its_rows() -> None:
    birds = {one.method: one for one in standings("birds_head_tuned_by_accuracy.csv", "balanced")}
    regmixup, mixup = (f"{birds[name].mean:.1f} %" for name in ("balanced-regmixup", "ic-mixup"))
    text = flat(FINDINGS)
    assert f"`balanced-regmixup` has {regmixup} then and `ic-mixup` {mixup}" in text
    by_loss, by_accuracy = (
        fmean(accuracies(rows_of=name, method="erm", after="tau-norm", dataset="digits"))
        for name in ("tau_norm_by_loss.csv", "long_tail_digits.csv")
    )
    assert f"was {by_accuracy - by_loss:.1f} points worse than accuracy" in text


def test_loss_and_accuracy_on_held_out_images_are_compared_by_their_rows() -> None:
    found: dict[tuple[str, str], dict[str, list[dict[str, str]]]] = {}
    for row in csv_rows("validation_loss.csv"):
        found.setdefault((row["dataset"], row["data_seed"]), {}).setdefault(row["method"], []).append(row)
    printed = table_under("methods, trials of each")
    assert len(printed) == len(found)
    for line, (data, by_method) in zip(printed, found.items(), strict=True):
        cells = []
        for trials in by_method.values():
            tested, accuracy = (
                [float(row[name]) for row in trials]
                for name in ("test_balanced_accuracy", "balanced_accuracy")
            )
            loss = [-float(row["mean_class_nll"]) for row in trials]
            chosen = [tested[values.index(max(values))] for values in (accuracy, loss)]
            ranks = [spearmanr(values, tested).statistic for values in (accuracy, loss)]
            cells.append((tested[0], *chosen, max(tested), *ranks))
        means = [fmean(column) for column in zip(*cells, strict=True)]
        name = f"LT birds 0.1, draw {data[1]}" if data[0] == "birds" else "LT digits 0.05"
        numbers = [*(f"{mean:.1f}" for mean in means[:4]), *(f"{mean:.2f}" for mean in means[4:])]
        assert line == [name, f"{len(by_method)}, {len(trials)}", *numbers]
        gaps = [
            fmean(float(row[name]) for row in by_method["erm"])
            for name in ("adjusted_by_loss", "adjusted_by_accuracy")
        ]
        assert 0.15 < gaps[0] - gaps[1] < 0.55  # "0.2 to 0.5 points better"


def test_the_readme_s_baselines_for_long_tails_are_those_of_the_findings() -> None:
    birds, cifar = (
        {row[0]: row[1] for row in table_under(f"accuracy over {word} seeds")} for word in ("four", "three")
    )
    tuned = [
        {
            one_recipe_label(row[0].strip("`")): row[2].split()[0]
            for row in table_under(f"{data}, the recipe's values")
        }
        for data in ("LT birds 0.1", "LT-CIFAR100 0.01")
    ]
    printed = table_under("LT birds 0.1, %", README)
    assert len(printed) == 8
    for name, *cells in printed:
        assert cells == [birds[name], cifar[name], *(found.get(name, "") for found in tuned)]


def test_cutmix_is_computed_from_its_rows() -> None:
    text = flat(FINDINGS)
    found = {one.method: one for one in standings("cifar10_lt_cutmix.csv", "balanced-mixup-cutmix")}
    assert {len(one.accuracies) for one in found.values()} == {8}
    for method in ("ic-mixup-cutmix", "mixup-cutmix"):
        assert f"`{method}` {found[method].difference}" in text
    ours, theirs = (f"{found[f'{name}-mixup-cutmix'].average('few'):.1f}" for name in ("ic", "balanced"))
    assert f"({ours} % against {theirs})" in text


def test_regmixup_forms_on_cifar_are_computed_from_their_rows() -> None:
    def line(one: Standing) -> list[str]:
        gap = "" if one.difference is None else str(one.difference)
        sizes = [f"{one.average(group):.1f}" for group in ("many", "few")]
        return [one.method, spread([a for a in one.accuracies if a is not None]), *sizes, gap]

    found = standings("cifar10_lt_regmixup.csv", "balanced")
    assert {len(one.accuracies) for one in found} == {8}
    assert table_under("CIFAR-10, RegMixup forms") == [line(one) for one in found]
    soft = standings("cifar10_lt_regmixup.csv", "balanced-regmixup")
    best = next(one for one in soft if one.method == "balanced-ic-regmixup")
    assert f"not clearly better than `balanced-regmixup`: {best.difference}." in flat(FINDINGS)


def test_the_last_batch_is_computed_from_its_rows() -> None:
    with (ROOT / "results" / "last_batch.csv").open(newline="") as file:
        found = {
            (row["method"], row["drop_last"], row["seed"]): float(row["accuracy"])
            for row in csv.DictReader(file)
        }
    text = flat(FINDINGS)
    for method, joined in (("erm", "by {} points and"), ("ic-mixup", "by {} points (six seeds")):
        dropped, kept = ([found[method, drop, str(seed)] for seed in range(6)] for drop in ("True", "False"))
        assert f"`{method}` {joined.format(paired_difference(dropped, kept))}" in text


def test_subsets_and_seeds_are_computed_from_their_rows() -> None:
    with (ROOT / "results" / "parts.csv").open(newline="") as file:
        found = list(csv.DictReader(file))

    def measured(of_subset: dict[str, str], varied: str, held: str) -> list[float]:
        expected = of_subset | {held: "0"}
        runs = [row for row in found if expected.items() <= row.items()]
        assert sorted(row[varied] for row in runs) == ["0", "1", "2", "3", "4", "5"]
        return [float(row["accuracy"]) for row in runs]

    table = table_under("mean, %")
    subsets = ({"fraction": "0.1", "imbalance": "1.0"}, {"fraction": "1.0", "imbalance": "0.01"})
    for line, of_subset in zip(table, subsets, strict=True):
        over_subsets, over_seeds = (
            measured(of_subset, *names) for names in (("data_seed", "seed"), ("seed", "data_seed"))
        )
        spreads = [f"{stdev(runs):.2f}" for runs in (over_subsets, over_seeds)]
        assert line[1:] == [f"{fmean(over_subsets + over_seeds[1:]):.1f}", *spreads]


def test_little_data_is_computed_from_its_rows() -> None:
    paper = published("table1-right", "10 %") | published("figure-regmixup", "CIFAR-100 10 %")
    found = {name: accuracies(method=name, dataset="cifar100", fraction="0.1", mode="") for name in METHODS}
    table = table_under("the paper, %")
    assert {row[0] for row in table} == set(paper)
    for method, theirs, ours, gain in table:
        assert [theirs, ours] == [paper[method], spread(found[method])]
        if gain:
            other = gain.split(":")[0]
            assert gain == f"{other}: {paired_difference(found[method], found[other])}"
    each = accuracies(method="ic-mixup", fraction="0.1", mode="elem")
    assert (
        f"reaches {each[0]:.2f} on seed 0, compared with {found['ic-mixup'][0]:.2f} for one lam per batch"
        in flat(FINDINGS)
    )
    assert max(found["ic-mixup"]) - min(found["ic-mixup"]) > found["ic-mixup"][0] - each[0]


def test_strong_recipe_is_computed_from_its_rows() -> None:
    networks = ("resnet18", "resnet32")

    def measured(method: str, model: str, measure: str = "accuracy") -> list[float]:
        return accuracies(measure, method=method, model=model, schedule="cosine", trivial="false")

    def line(method: str) -> list[str]:
        cells = [method]
        for model in networks:
            baseline = measured("balanced-mixup-cutmix", model)
            gap = (
                ""
                if method == "balanced-mixup-cutmix"
                else str(paired_difference(measured(method, model), baseline))
            )
            cells += [spread(measured(method, model)), gap]
        few, raw, scaled = (
            [f"{fmean(measured(method, model, name)):.1f}" for model in networks]
            for name in ("few", "calibration_error", "calibration_error_scaled")
        )
        return [*cells, ", ".join(few), ", ".join(map(" → ".join, zip(raw, scaled, strict=True)))]

    table = table_under("accuracy, ResNet-18")
    assert table == [line(row[0]) for row in table]
    assert all(len(measured(row[0], model)) == 3 for row in table for model in networks)


def test_tails_of_the_paper_are_computed_from_their_rows() -> None:
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

    table = table_under("LT-CIFAR100 0.01")
    assert table == [line(row[0]) for row in table]
    assert {row[0] for row in table} >= set(found["CIFAR10"][0])


def test_the_centred_form_on_larger_networks_is_computed_from_its_rows() -> None:
    text, forms = flat(FINDINGS), ("ic-mixup-centred", "ic-mixup")
    centred, plain = (accuracies(method=name, fraction="0.1", mode="") for name in forms)
    assert f"it is {paired_difference(centred, plain)} relative to `ic-mixup`, three seeds" in text
    for model, name in (("resnet18", "ResNet-18"), ("resnet32", "ResNet-32")):
        ours, theirs = (
            accuracies(method=f"ic-mixup-cutmix{form}", model=model, schedule="cosine")[0]
            for form in ("-centred", "")
        )
        assert f"{ours:.1f} compared with {theirs:.1f} ({name})" in text


def test_full_cifar_is_computed_from_its_rows() -> None:
    ours, theirs = (
        accuracies(method=name, dataset="cifar100", fraction="1.0", imbalance="1.0")
        for name in ("ic-mixup", "mixup")
    )
    both = " and ".join(f"{accuracy:.1f}" for accuracy in ours)
    assert f"{both} with `ic-mixup` (two seeds) and {theirs[0]:.1f} with `mixup` (one)" in flat(FINDINGS)


def test_mixed_images_on_the_paper_page_is_computed_from_its_rows() -> None:
    with (ROOT / "results" / "analysis.csv").open(newline="") as file:
        found = {(row["model"], row["method"], row["lam"]): row for row in csv.DictReader(file)}
    text = flat(PAPER)
    steep, flatter = (
        f"{float(found['resnet34', method, '1.0']['difference_mean']):.1f}"
        for method in ("ic-mixup", "mixup")
    )
    assert f"to {steep} at lam 1 compared with {flatter} for Mixup" in text
    ours, theirs = (
        [f"{float(found['small-cnn', method, '0.5'][name]):.0f}" for name in ("squared_norm", "centred_norm")]
        for method in ("ic-mixup", "mixup")
    )
    assert f"{ours[0]} at lam 0.5, and {ours[1]} after subtracting each image's mean" in text
    assert f"For Mixup the two are {theirs[0]} and {theirs[1]}" in text


def test_speed_is_computed_from_its_rows() -> None:
    text = SPEED.read_text()
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
    for figure in (
        f"{compiled} images a second",
        f"{plain} in a plain loop",
        f"takes {ratio:.3f} times as long as one of",
    ):
        assert figure in " ".join(text.split())
    with (ROOT / "results" / "bench_loss.csv").open(newline="") as file:
        losses = {(row["form"], row["batch"], row["classes"]): row for row in csv.DictReader(file)}
    for pairs, *cells in (row for row in rows(text) if row[0].endswith(" pairs")):
        batch = pairs.split()[0].replace(",", "")
        for form, cell in zip(("plain", "authors", "compiled", "fused"), cells, strict=True):
            row = losses.get((form, batch, "1000"))
            expected = f"{float(row['ms']):.1f} ms, {float(row['peak_mb']) / 1000:.2f} GB" if row else ""
            assert cell == expected, (form, pairs)


BESIDE_TIMM = {"EfficientNet-Lite0": "tf_efficientnet_lite0", "ResNet-50": "resnet50.a1_in1k"}
# Column of ours, its form, and the commits of the rows: all rows of a network are of one go.
BESIDE_TIMM_TABLES = {
    "ours": ("ours, fused", {"tf_efficientnet_lite0": "de417c2", "resnet50.a1_in1k": "71841f5"}),
    "ours, torch's layers": ("ours, graph", dict.fromkeys(BESIDE_TIMM.values(), "24dc08b")),
}


def finetuning_speed(part: str, form: str, model: str, **fields: str) -> float:
    """Images a second of the fastest row."""
    wanted = {"part": part, "form": form, "model": model, **fields}
    rows = csv_rows("finetune.csv")
    return max(float(row["images_per_second"]) for row in rows if wanted.items() <= row.items())


@pytest.mark.parametrize("column", BESIDE_TIMM_TABLES)
def test_fine_tuning_beside_timm_is_computed_from_its_rows(column: str) -> None:
    form, commits = BESIDE_TIMM_TABLES[column]
    rows = [row for row in csv_rows("finetune.csv") if (row["part"], row["form"]) == ("speed", "train.py")]
    measured = {(row["model"], row["photo_side"]) for row in rows if row["commit"] == commits[row["model"]]}
    printed = table_under(column, SPEED if form == "ours, fused" else LOG)
    places = [label.removesuffix(" pixels").split(", ") for label, *_ in printed]
    assert {(BESIDE_TIMM[name], side) for name, side in places} == measured
    for (name, side), (_, *cells) in zip(places, printed, strict=True):
        model, commit = BESIDE_TIMM[name], commits[BESIDE_TIMM[name]]
        ours = finetuning_speed("speed", form, model, commit=commit)
        theirs = finetuning_speed("speed", "train.py", model, commit=commit, photo_side=side)
        assert cells == [f"{ours:,.0f}", f"{theirs:,.0f}", f"{ours / theirs:.2f}"]


def test_training_beside_the_network_alone_and_the_fastest_train_py_is_computed_from_rows() -> None:
    ours = [finetuning_speed("speed", "ours, fused", model) for model in BESIDE_TIMM.values()]
    alone = kernel_speed("resnet50.a1_in1k", "fused")
    sides = {"photo_side": "256"}
    theirs = [finetuning_speed("speed", "train.py", model, **sides) for model in BESIDE_TIMM.values()]
    text = flat(SPEED)
    assert f"Training ResNet-50 has {100 * ours[1] / alone:.0f} % of the speed" in text
    assert f"step alone ({alone:,.0f} images/s)" in text
    assert f"{theirs[0]:,.0f} and {theirs[1]:,.0f} with photos of 256 pixels" in text
    assert f"{ours[0] / theirs[0]:.2f} and {ours[1] / theirs[1]:.2f} times as high" in text
    rows = csv_rows("finetune.csv")
    crops = max(float(row["images_per_second"]) for row in rows if row["form"] == "augmentation")
    assert f"{crops:,.0f} images a second" in text


def kernel_speed(model: str, form: str) -> float:
    """Images a second of the newest rows."""
    rows = csv_rows("kernels.csv")
    found = [float(row["images_per_second"]) for row in rows if (row["model"], row["form"]) == (model, form)]
    return found[-1]


def test_speeds_of_fused_layers_are_computed_from_their_rows() -> None:
    printed = table_under("torch's layers", SPEED)
    assert {row[0] for row in printed} == {*KERNELS}
    for label, *cells in printed:
        model, captured = KERNELS[label]
        speeds = [kernel_speed(model, form) for form in (captured, "compiled", "fused")]
        assert cells == [f"{speed:,.0f}" for speed in speeds]


def test_the_time_of_twelve_runs_is_computed_from_its_rows() -> None:
    rows = [row for row in csv_rows("finetune.csv") if (row["commit"], row["part"]) == ("24dc08b", "wall")]
    ours, theirs = (next(row for row in rows if row["form"] == form) for form in ("compare", "train.py"))
    ours_s, theirs_s, runs = float(ours["seconds"]), float(theirs["seconds"]), int(ours["runs"])
    text = flat(LOG)
    assert runs == 12
    assert f"took {ours_s:.1f} s from its start to its end" in text
    assert f"One such run of `train.py` took {theirs_s:.1f} s" in text
    assert f"take {runs * theirs_s:.0f} s: {runs * theirs_s / ours_s:.1f} times as long" in text


def test_the_time_of_twelve_runs_of_resnet50_is_computed_from_its_rows() -> None:
    rows = [
        row for row in csv_rows("finetune.csv") if (row["part"], row["model"]) == ("wall", "resnet50.a1_in1k")
    ]
    (ours, theirs), (short, their_short) = (
        [
            next(float(row["seconds"]) for row in rows if (row["form"], row["epochs"]) == (form, epochs))
            for form in ("compare", "train.py")
        ]
        for epochs in ("30", "10")
    )
    text = flat(SPEED)
    assert f"`compare` took {ours:.1f} s and one run of `train.py` {theirs:.1f} s" in text
    assert f"would take {12 * theirs:.0f} s: **{12 * theirs / ours:.1f} times as long**" in text
    assert f"With ten epochs it was {12 * their_short / short:.1f}" in text
    assert f"({short:.1f} s as the first command on a new machine, and {their_short:.1f} s on another" in text


KERNELS = {
    "ResNet-34, 32 pixels": ("resnet34", "graph"),
    "ResNet-32, 32 pixels": ("resnet32", "graph"),
    "EfficientNet-Lite0, 224 pixels": ("tf_efficientnet_lite0", "graph, 3 algorithms"),
    "ResNet-50, 224 pixels": ("resnet50.a1_in1k", "graph"),
}


def test_parts_of_a_step_are_computed_from_their_rows() -> None:
    found = csv_rows("kernels.csv")
    printed = table_under("images/s, captured", LOG)
    assert [row[0] for row in printed] == list(KERNELS)
    for label, *cells in printed:
        model, form = KERNELS[label]
        groups = [row for row in found if (row["model"], row["form"], row["kind"]) == (model, form, "group")]
        compiled = next(row for row in found if (row["model"], row["form"]) == (model, "compiled"))
        times = {row["name"]: float(row["us_per_step"]) / 1000 for row in groups}
        step = 128 * 1000 / float(groups[0]["images_per_second"])
        convolutions = sum(time for name, time in times.items() if name.startswith("convolution"))
        assert cells == [
            *(f"{float(row['images_per_second']):,.0f}" for row in (groups[0], compiled)),
            f"{times['batch norm']:.1f} of {step:.1f}",
            f"{convolutions:.1f}",
        ]


LONG_TAIL_SETTINGS = {
    "TrivialAugment": {"trivial": True, "cutout": 0},
    "TrivialAugment, Cutout": {"trivial": True, "cutout": 16},
    "AutoAugment": {"autoaugment": True, "cutout": 0},
    "AutoAugment, Cutout": {"autoaugment": True, "cutout": 16},
    "AutoAugment, weight decay 2e-4": {"weight_decay": 0.0002, "batch_size": 128},
    "AutoAugment, ProCo's weight decay 2e-4, batch 256, lr 0.3 and warm-up": {"batch_size": 256},
}


def test_the_search_of_the_long_tail_recipe_is_computed_from_its_rows() -> None:
    candidates = csv_rows("long_tail_recipe.csv")
    methods = ("balanced-mixup-cutmix", "balanced-ic-regmixup")
    printed = table_under("balanced-mixup-cutmix, %", LOG)
    assert [row[0] for row in printed] == list(LONG_TAIL_SETTINGS)
    for label, *cells in printed:
        chosen = LONG_TAIL_SETTINGS[label].items()
        own = [
            next(
                float(row["accuracy"])
                for row in candidates
                if row["method"] == method and chosen <= json.loads(row["settings"]).items()
            )
            for method in methods
        ]
        assert cells == [f"{value:.1f}" for value in (*own, fmean(own))]
    for method, first, second, few in table_under("seed 0, %", LOG):
        if method not in {row["method"] for row in csv_rows("long_tail.csv")}:
            continue
        found = accuracies(rows_of="long_tail.csv", method=method, commit="bfcdec9")
        assert [first, second] == [f"{value:.1f}" for value in found] + [""] * (2 - len(found))
        rare = accuracies("few", "long_tail.csv", method=method, commit="bfcdec9")
        assert few == ", ".join(f"{value:.1f}" for value in rare)


LONG_TAILS = ROOT / "docs" / "longtails.md"
# Network, batch size, whether the classifier is one of cosines, epochs.
LONG_TAIL_TESTED = (
    ("resnet32", "128", "false", "200"),
    ("resnet32", "256", "false", "200"),
    ("resnet32", "256", "true", "200"),
    ("resnet18", "128", "false", "200"),
    ("resnet32x4", "128", "false", "200"),
)
RESNET18 = LONG_TAIL_TESTED[3]
LONGER = tuple((model, "128", "false", "400") for model in ("resnet18", "resnet32x4"))
PROCO_PASSES = ("resnet32", "256", "false", "600")


def long_tail_accuracies(
    method: str, tested: tuple[str, str, str, str] = LONG_TAIL_TESTED[0], measure: str = "accuracy"
) -> list[float]:
    fields = dict(zip(("model", "batch_size", "cosine_classifier", "epochs"), tested, strict=True))
    return accuracies(measure, "long_tail.csv", method=method, **fields)


def test_the_tests_of_the_long_tail_recipe_are_computed_from_their_rows() -> None:
    rows = csv_rows("long_tail.csv")
    printed = [[row[0].strip("`"), *row[1:]] for row in table_under("ResNet-32", LONG_TAILS)]
    assert {row[0] for row in printed} == {row["method"] for row in rows}
    assert {(row["model"], row["batch_size"], row["cosine_classifier"], row["epochs"]) for row in rows} == {
        *LONG_TAIL_TESTED,
        *LONGER,
        PROCO_PASSES,
    }
    for method, *cells in printed:
        for cell, tested in zip(cells, LONG_TAIL_TESTED, strict=True):
            found = long_tail_accuracies(method, tested)
            assert cell == (f"{spread(found)} ({len(found)})" if found else "")


def test_differences_with_the_long_tail_recipe_are_computed_from_their_rows() -> None:
    text = flat(LONG_TAILS)
    own, balanced, soft = map(long_tail_accuracies, ("balanced-ic-regmixup", "balanced", "balanced-regmixup"))
    assert f"`balanced-ic-regmixup` is {paired_difference(own, balanced)} relative to `balanced`" in text
    assert f"{paired_difference(own, soft)} relative to `balanced-regmixup`" in text
    gain = f"{fmean(own) - fmean(balanced):.1f} points above `balanced`"
    assert f"`balanced-ic-regmixup` is {gain} with one recipe" in flat(README)
    few, many, few_balanced, many_balanced = (
        fmean(long_tail_accuracies(method, measure=group))
        for method in ("ic-regmixup-adjusted", "balanced")
        for group in ("few", "many")
    )
    assert f"{few:.1f} % on classes under 20 images and {many:.1f} % on those over 100" in text
    assert f"`balanced` has {few_balanced:.1f} and {many_balanced:.1f}" in text


def test_gains_of_cutmix_with_resnet18_are_computed_from_their_rows() -> None:
    methods = ("ic-mixup-cutmix", "balanced", "balanced-regmixup")
    own, balanced, clean = (long_tail_accuracies(method, RESNET18) for method in methods)
    text, gain = flat(LONG_TAILS), fmean(own) - fmean(balanced)
    assert (
        f"`ic-mixup-cutmix`, which needs no class sizes, is {paired_difference(own, balanced)} relative"
        in text
    )
    assert f"{paired_difference(own, clean)} relative to `balanced-regmixup`" in text
    assert f"With ResNet-18 `ic-mixup-cutmix` is {gain:.1f} points above logit adjustment" in flat(FINDINGS)


# Settings of the candidates for larger networks, in the order of the table.
LARGER = (
    {"method": "ic-mixup-cutmix"},
    {"method": "balanced-mixup-cutmix"},
    {"weight_decay": 0.001},
    {"epochs": 400, "eval_every": 400},
    {"method": "balanced-ic-regmixup-cutmix"},
    {"sam": 0.1},
    {"sam": 0.3},
)


def test_the_search_for_larger_networks_is_computed_from_its_rows() -> None:
    rows = {row["settings"]: row for row in csv_rows("long_tail_larger.csv")}
    own = [rows[json.dumps(settings)] for settings in LARGER]
    assert len(own) == len(rows)
    printed = table_under("time", LONG_TAILS)
    assert [cells for _, _, *cells in printed] == [
        [f"{float(row[measure]):.1f}" for measure in ("accuracy", "few")] for row in own
    ]
    first, longer = (float(own[number]["accuracy"]) for number in (0, 3))
    assert f"are worth {longer - first:.1f} points on validation images" in flat(LOG)


def test_runs_with_400_epochs_are_computed_from_their_rows() -> None:
    printed = table_under("ResNet-18, 400 epochs", LONG_TAILS)
    for name, *cells in printed:
        found = [long_tail_accuracies(name.strip("`"), tested) for tested in LONGER]
        groups = [
            long_tail_accuracies(name.strip("`"), LONGER[0], group) for group in ("many", "medium", "few")
        ]
        first, second = (f"{spread(one)} ({len(one)})" if one else "" for one in found)
        assert cells == [first, *map(spread, groups), second]
    own, soft = (long_tail_accuracies(f"{name}-mixup-cutmix", LONGER[0]) for name in ("ic", "balanced"))
    gain = paired_difference(own, soft)
    for page in (LONG_TAILS, FINDINGS, LOG):
        assert str(gain) in flat(page)
    assert f"{fmean(own) - fmean(soft):.1f} points better from scratch in 400 epochs" in flat(README)
    wide = fmean(long_tail_accuracies("ic-mixup-cutmix", LONGER[1]))
    assert f"{fmean(own):.1f} % with ResNet-18 and {wide:.1f} % with `resnet32x4`" in flat(LONG_TAILS)
    assert f"`resnet32x4` has {wide:.1f} % on LT-CIFAR100 0.01 in 400 epochs" in flat(README)


def test_what_explains_the_lead_of_proco_is_computed_from_the_rows() -> None:
    ours, values = (fmean(long_tail_accuracies("balanced", tested)) for tested in LONG_TAIL_TESTED[:2])
    (longer,) = long_tail_accuracies("balanced", PROCO_PASSES)
    said = (
        f"the values of its recipe explain {values - ours:.1f} and the number of passes {longer - values:.1f}"
    )
    assert said in flat(LONG_TAILS)
    assert f"{52.8 - longer:.1f} are left for its contrastive loss" in flat(LONG_TAILS)


LENGTHS = {
    "birds 0.1, head": {"rows_of": "length.csv", "dataset": "birds"},
    "LT-CIFAR100 0.01, head": {"rows_of": "length.csv", "dataset": "cifar100"},
    "digits 0.01, small CNN": {"rows_of": "length.csv", "dataset": "digits"},
    "LT-CIFAR100 0.01, ResNet-18, both with CutMix": {"rows_of": "long_tail.csv", "model": "resnet18"},
}


def test_the_length_of_training_is_computed_from_its_rows() -> None:
    printed = table_under("epochs", FINDINGS)
    lengths = {(row["dataset"], row["epochs"]) for row in csv_rows("length.csv")}
    assert len(printed) == len([one for one in lengths if one[0] != "birdtrain"]) + 2
    for name, epochs, *cells in printed:
        suffix = "-cutmix" if "CutMix" in name else ""
        soft, own = (
            accuracies(method=f"{method}-mixup{suffix}", epochs=epochs, **LENGTHS[name])
            for method in ("balanced", "ic")
        )
        seeds = min(len(soft), len(own))
        soft, own = soft[:seeds], own[:seeds]
        assert cells == [f"{fmean(soft):.1f}", f"{fmean(own):.1f}", str(paired_difference(own, soft))]


def test_epochs_chosen_by_cross_validation_are_computed_from_their_rows() -> None:
    printed = table_under("epochs chosen", FINDINGS)
    for name, chosen, *cells in printed:

        def mean(epochs: str, dataset: str = "birdtrain", method: str = name.strip("`")) -> list[float]:
            return accuracies(rows_of="length.csv", dataset=dataset, method=method, epochs=epochs)

        assert chosen == max(("35", "140", "560"), key=lambda epochs: fmean(mean(epochs)))
        assert cells == [f"{fmean(mean(chosen)):.1f}", spread(mean(chosen, "birds"))]
    assert len(printed) == len(
        {row["method"] for row in csv_rows("length.csv") if row["dataset"] == "birdtrain"}
    )


def test_tuned_heads_of_three_lengths_are_computed_from_their_rows() -> None:
    lengths = ("35", "140", "560")
    chosen = {
        (row["method"], row["epochs"]): float(row["mean_class_nll"])
        for row in csv_rows("length_tuned_trials.csv")
        if row["chosen"] == "True"
    }
    found: dict[str, float] = {}
    for name, *cells, epochs in table_under("tuned, 35 epochs", FINDINGS):
        method = name.strip("`")
        own = [accuracies(rows_of="length_tuned.csv", method=method, epochs=one) for one in lengths]
        assert cells == [spread(one) for one in own]
        assert epochs == min(lengths, key=lambda one: chosen[method, one])
        found[method] = fmean(own[lengths.index(epochs)])
    assert {method for method, _ in chosen} == set(found)
    ours, soft = (
        sorted(value for name, value in found.items() if "mixup" in name and ("ic-" in name) == infinite)
        for infinite in (True, False)
    )
    text = flat(FINDINGS)
    assert f"Infinite Class has {ours[0]:.1f} to {ours[-1]:.1f} % and mixing with soft targets" in text
    assert f"{soft[0]:.1f} and {soft[-1]:.1f}: level" in text

    def change(methods: tuple[str, ...]) -> float:
        """The largest from the shortest to the longest, with the values of the recipe."""
        means = [
            [fmean(accuracies(rows_of="length.csv", dataset="birds", method=m, epochs=e)) for e in lengths]
            for m in methods
        ]
        return max((one[-1] - one[0] for one in means), key=abs)

    gain = change(("ic-mixup", "ic-regmixup", "balanced-ic-regmixup"))
    loss = change(("balanced-mixup", "balanced-regmixup"))
    assert f"Infinite Class gains up to {gain:.1f} points over this range of epochs" in text
    assert f"mixing with soft targets loses up to {-loss:.1f}" in text


def test_refinements_of_the_long_tail_recipe_are_computed_from_their_rows() -> None:
    rows = csv_rows("long_tail_refinement.csv")
    printed = table_under("validation, balanced-regmixup, %", LOG)
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        found.setdefault(row["settings"], {})[row["method"]] = f"{float(row['accuracy']):.1f}"
    assert len(printed) == len(found)
    cells = [[one["balanced-regmixup"], one["balanced-ic-regmixup"]] for one in found.values()]
    assert sorted(row[1:] for row in printed) == sorted(cells)


# The README's table: data, where to find the rows, and the names of the methods in its three columns.
PAPERS_RECIPE = {"schedule": "step", "mode": ""}
STRONG = {"imbalance": "0.01", "schedule": "cosine", "trivial": "false"}
MIXUP = ("mixup", "ic-mixup", "balanced-mixup")
CUTMIX = tuple(f"{name}-cutmix" for name in MIXUP)
REGMIXUP = ("regmixup", "ic-regmixup", "")
README_TABLE = {
    "LT-CIFAR100 0.01, ResNet-18, CutMix": ("cifar100", STRONG, CUTMIX),
    "LT-CIFAR100 0.01, ResNet-18, CutMix, AutoAugment, 400 epochs": (
        "cifar100",
        {"rows_of": "long_tail.csv", "epochs": "400"},
        CUTMIX,
    ),
    "LT-CIFAR100 0.01, ResNet-32, CutMix": ("cifar100", STRONG, CUTMIX),
    "LT-CIFAR10 0.01, ResNet-32": ("cifar10", PAPERS_RECIPE | {"imbalance": "0.01"}, MIXUP),
    "LT-CIFAR10 0.01, ResNet-34": ("cifar10", PAPERS_RECIPE | {"imbalance": "0.01"}, MIXUP),
    "CIFAR-100 10 %, ResNet-34": ("cifar100", PAPERS_RECIPE | {"fraction": "0.1"}, MIXUP),
    "CIFAR-100 10 %, ResNet-34, RegMixup": ("cifar100", PAPERS_RECIPE | {"fraction": "0.1"}, REGMIXUP),
    "CIFAR-100, ResNet-34": ("cifar100", PAPERS_RECIPE | {"fraction": "1.0", "imbalance": "1.0"}, MIXUP),
    "CIFAR-10, 50 per class, ResNet-34, RegMixup": ("cifar10-notwins", PAPERS_RECIPE, REGMIXUP),
    "LT-CIFAR100 0.01, EfficientNet, head": (
        "cifar100",
        {"rows_of": "long_tail_cifar100.csv", "after": "none"},
        MIXUP,
    ),
    "LT birds 0.1, EfficientNet, head": ("birds", {"rows_of": "birds_head.csv", "imbalance": "0.1"}, MIXUP),
    "LT birds 0.1, EfficientNet, fine-tuned": (
        "birds",
        {"rows_of": "birds_finetune.csv", "imbalance": "0.1"},
        MIXUP,
    ),
    "birds, EfficientNet, fine-tuned": (
        "birds",
        {"rows_of": "birds_finetune.csv", "imbalance": "1.0"},
        MIXUP,
    ),
}


def difference(one: list[float], other: list[float]) -> str:
    return str(paired_difference(one, other)) if len(one) > 1 else f"{one[0] - other[0]:+.1f}"


def readme_line(setting: str) -> list[str]:
    dataset, fields, names = README_TABLE[setting]
    if found := re.search(r"ResNet-\d+", setting):
        fields = fields | {"model": found[0].replace("-", "").lower()}
    mixup, infinite, adjusted = (accuracies(method=name, dataset=dataset, **fields) for name in names)
    seeds = min(len(found) for found in (mixup, infinite) if found)  # compared on the seeds that both have
    infinite = infinite[:seeds]
    beside = [
        [spread(other), difference(infinite, other)] if other else ["", ""] for other in (mixup, adjusted)
    ]
    return [setting, str(seeds), beside[0][0], spread(infinite), beside[0][1], *beside[1]]


def test_the_readme_s_table_is_computed_from_its_rows() -> None:
    assert table_under("seeds", README) == [readme_line(setting) for setting in README_TABLE]


def test_the_range_of_gains_in_the_readme_is_that_of_its_table() -> None:
    gains = sorted(
        float(row[4].split()[0]) for row in table_under("seeds", README) if row[0].startswith("LT") and row[4]
    )
    said = f"{gains[1]:.1f} to {gains[-1]:.1f} points better than Mixup, with one exception"
    assert said in flat(README)


def filled_tables() -> list[FilledTable]:
    index = index_results(read_rows(ROOT / "results" / "runs.csv").rows)
    return [fill_table(table, index) for table in PAPER_TABLES]


def gaps_to_the_paper(table: str, column: str) -> list[float]:
    """Sizes of the differences between our cells of a column and the published ones, sorted."""
    filled = next(filled for filled in filled_tables() if filled.table.name == table)
    gaps = [
        entry.difference(ours) for entry in filled.entries if entry.column == column for ours in entry.ours
    ]
    return sorted(abs(gap) for gap in gaps if gap is not None)


def test_the_readme_counts_the_reproduced_cells() -> None:
    cells = [ours for filled in filled_tables() for ours in filled.trainable]
    runs, three, stand_ins = (
        sum(map(has, cells))
        for has in (lambda c: c.n > 0, lambda c: c.n >= 3, lambda c: c.stand_in is not None)
    )
    text = flat(README)
    assert f"{runs} of {len(cells)} cells of the paper's tables and figures" in text
    assert f"{three} of them with the paper's three seeds. {stand_ins} cells use a stand-in" in text


@pytest.mark.parametrize("page", [README, FINDINGS], ids=page_name)
def test_the_largest_deviations_are_computed_from_their_rows(page: Path) -> None:
    above, below = gaps_to_the_paper("table1-right", "25 %"), gaps_to_the_paper("table2-left", "ciFAIR-10")
    for gaps, side in ((above, "above"), (below, "below")):
        assert re.search(rf"{gaps[0]:.1f} to {gaps[-1]:.1f} points {side} (it|the paper)", flat(page))


def test_the_note_of_the_share_table_is_computed_from_its_rows() -> None:
    quarter = gaps_to_the_paper("table1-right", "25 %")
    others = [gap for column in ("50 %", "100 %") for gap in gaps_to_the_paper("table1-right", column)]
    (note,) = TABLES["share"].notes
    assert f"at 25 % are {quarter[0]:.1f} to {quarter[-1]:.1f} points below ours" in note
    assert f"at 50 % and 100 % differ from ours by at most {max(others):.1f} points" in note


def test_shares_of_cifar_100_are_computed_from_their_rows() -> None:
    fields = {"method": "erm", "dataset": "cifar100", "model": "resnet34", "seed": "0"}
    shares = [accuracies(fraction=share, **fields)[0] for share in ("0.15", "0.2", "0.25")]
    low, middle, high = (f"{share:.1f} %" for share in shares)
    text, (note,) = flat(FINDINGS), TABLES["share"].notes
    assert f"`erm` has {low} with 15 % of the images, {middle} with 20 % and {high} with 25 %" in text
    steps = shares[1] - shares[0], shares[2] - shares[1]
    assert f"{steps[0]:.0f} points from 15 to 20 %, {steps[1]:.0f} from 20 to 25 %" in text
    assert f"gains {steps[0]:.0f} points from 15 to 20 % of the images and {steps[1]:.0f} from" in note
    assert f"Halfway between 15 and 25 % are {(shares[0] + shares[2]) / 2:.1f} %" in text
    (own,) = accuracies(method="ic-mixup-c", dataset="cifar100", fraction="1.0", imbalance="1.0")
    assert f"`ic-mixup-c`, has {own:.2f} % on all of CIFAR-100" in text


def test_the_deviation_on_a_tenth_of_cifar_100_is_computed_from_its_rows() -> None:
    gaps = gaps_to_the_paper("table2-left", "ciFAIR-100")
    below = f"{gaps[0]:.1f} to {gaps[-1]:.1f} points below the paper's numbers for ciFAIR-100"
    assert below in flat(FINDINGS)


def paper_and_ours(table: str, column: str, method: str, **fields: str) -> list[str]:
    found = accuracies(method=method, **fields)
    return [published(table, column).get(method, ""), f"{fmean(found):.2f}" if found else ""]


def test_subsets_of_cifar_100_are_computed_from_their_rows() -> None:
    table = table_under("25 %, the paper")
    assert len(table) == 5
    for method, *cells in table:
        quarter, half = (
            paper_and_ours("table1-right", column, method, dataset="cifar100", fraction=fraction)
            for column, fraction in (("25 %", "0.25"), ("50 %", "0.5"))
        )
        assert cells == [*quarter, *half]


@pytest.mark.parametrize(
    ("network", "imbalance"), [("ResNet-34", "0.01"), ("ResNet-32", "0.1"), ("ResNet-34", "0.1")]
)
def test_more_long_tails_are_computed_from_their_rows(network: str, imbalance: str) -> None:
    fields = {"imbalance": imbalance, "model": network.replace("-", "").lower()}
    table = table_under(f"{network}, LT-CIFAR100 {imbalance}")
    assert len(table) == 5
    for method, *cells in table:
        lines = [
            paper_and_ours("table2-right", f"LT-{data} {imbalance}", method, dataset=data.lower(), **fields)
            for data in ("CIFAR100", "CIFAR10")
        ]
        assert cells == [cell for line in lines for cell in line]


def test_where_resnet34_loses_on_a_long_tail_is_computed_from_its_rows() -> None:
    fields = {"dataset": "cifar10", "imbalance": "0.01", "model": "resnet34"}
    (few, few_mixup), (many, many_mixup) = (
        [accuracies(group, method=name, **fields)[0] for name in ("ic-mixup", "mixup")]
        for group in ("medium", "many")
    )
    text = flat(FINDINGS)
    assert f"({few:.1f} % instead of {few_mixup:.1f} %, `ic-mixup` and `mixup`)" in text
    assert f"the eight others ({many:.1f} and {many_mixup:.1f} %)" in text


def test_fifty_images_per_class_are_computed_from_their_rows() -> None:
    paper = published("table2-left", "ciFAIR-10")
    tuned = TABLES["table2-middle"]
    wide = {
        "erm": tuned.paper_says("Brigato et al. 2021", "ciFAIR-10"),
        "ic-regmixup": tuned.paper_says("+ IC-RegMixup", "ciFAIR-10"),
    }
    table = table_under("ciFAIR-10, the paper")
    assert [row[0] for row in table] == [*paper, *wide]
    for method, theirs, ours, network in table:
        model = {"ResNet-34": "resnet34", "WRN-16-8": "wrn16-8"}[network.split(",")[0]]
        found = accuracies(method=method, dataset="cifar10-notwins", model=model)
        number = paper[method] if model == "resnet34" else f"{wide[method]:.2f}"
        assert [theirs, ours] == [number, spread(found)]
    forms = ("ic-mixup", "mixup", "regmixup", "ic-regmixup")
    mixed = {name: accuracies(method=name, dataset="cifar10-notwins", model="resnet34") for name in forms}
    gap = paired_difference(mixed["ic-mixup"], mixed["mixup"])
    assert f"`ic-mixup` is {gap} relative to `mixup`" in flat(FINDINGS)
    worst = [f"{min(mixed[name]):.1f}" for name in ("regmixup", "ic-regmixup")]
    assert f"nearly failed to train, at {' and '.join(worst)} %" in flat(FINDINGS)
    erm, regmixup = (accuracies(method=name, dataset="cifar10-notwins", model="wrn16-8")[0] for name in wide)
    assert f"{regmixup - erm:.1f} points better than `erm`; the paper's gain is 3.6" in flat(FINDINGS)


LOGGED = {
    "CIFAR-100 25 %, ResNet-34": {"dataset": "cifar100", "fraction": "0.25", "model": "resnet34"},
    "CIFAR-100 50 %, ResNet-34": {"dataset": "cifar100", "fraction": "0.5", "model": "resnet34"},
    "LT-CIFAR100 0.01, ResNet-34": {"dataset": "cifar100", "imbalance": "0.01", "model": "resnet34"},
    "CIFAR-10, 50 per class, ResNet-34": {"dataset": "cifar10-notwins", "model": "resnet34"},
    "CIFAR-10, 50 per class, tuned WRN-16-8": {"dataset": "cifar10-notwins", "model": "wrn16-8"},
    "LT-CIFAR10 0.1, ResNet-32": {"dataset": "cifar10", "imbalance": "0.1", "model": "resnet32"},
}


def test_the_log_s_table_of_26_runs_is_computed_from_its_rows() -> None:
    found = 0
    for setting, *cells, others in table_under("erm", LOG):
        named = dict(zip(("erm", "mixup", "ic-mixup"), cells, strict=True))
        named |= dict(each.split() for each in others.split(", "))
        for method, printed in named.items():
            runs = accuracies(method=method, commit="8bfd306", **LOGGED[setting])
            assert [f"{accuracy:.2f}" for accuracy in runs] == ([printed] if printed else [])
            found += len(runs)
    assert found == len(accuracies(commit="8bfd306")) == 26


def long_tail_label(row: dict[str, str]) -> str:
    """The name on the page of a row of results/long_tail_*.csv."""
    method, after, tau = row["method"], row["after"], row["adjust_tau"]
    label = f"`{method}`" + (f", alpha {float(row['alpha']):g}" if row["alpha"] else "")
    label += f", tau {float(tau):g}" if tau else ""
    label += "" if row["sampler"] == "uniform" else f", {row['sampler']} sampling"
    label += {
        "crt": ", then cRT",
        "adjust": ", then adjusted, tau ",
        "tau-norm": ", then tau-normalised, tau ",
    }.get(after, "")
    return label + ("" if after in ("none", "crt") else "chosen")


@pytest.mark.parametrize(
    ("data", "word", "seeds"), [("digits", "five", 5), ("birds", "four", 4), ("cifar100", "three", 3)]
)
def test_the_table_of_baselines_is_the_rows(data: str, word: str, seeds: int) -> None:
    found: dict[str, list[dict[str, str]]] = {}
    with (ROOT / "results" / f"long_tail_{data}.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault(long_tail_label(row), []).append(row)
    # A tau of exactly 1 was given for every seed; it is also the chosen one where there is no other.
    adjusted = found["`erm`, then adjusted, tau chosen"]
    given = {row["seed"]: row for row in adjusted if row["after_tau"] == "1.0"}
    chosen = given | {row["seed"]: row for row in adjusted if row["after_tau"] != "1.0"}
    found["`erm`, then adjusted, tau 1"] = list(given.values())
    found["`erm`, then adjusted, tau chosen"] = list(chosen.values())
    means = {
        label: [fmean(float(row[name]) for row in runs) for name in ("accuracy", "few")]
        for label, runs in found.items()
    }
    printed = table_under(f"accuracy over {word} seeds")
    assert {row[0] for row in printed} == set(means)
    for label, accuracy, few, difference in printed:
        assert len({row["seed"] for row in found[label]}) == len(found[label]) == seeds
        assert [accuracy, few] == [f"{value:.1f}" for value in means[label]]
        gap = means[label][0] - means["`balanced`"][0]
        assert difference.split(" [")[0] == ("" if label == "`balanced`" else f"{gap:+.1f}")


FINETUNING = ROOT / "docs" / "finetuning.md"


def csv_rows(name: str) -> list[dict[str, str]]:
    with (ROOT / "results" / name).open(newline="") as file:
        return list(csv.DictReader(file))


def test_heads_on_features_of_birds_are_computed_from_their_rows() -> None:
    found = csv_rows("birds_head.csv")

    def runs(method: str, imbalance: str) -> list[float]:
        own = {
            int(row["seed"]): float(row["accuracy"])
            for row in found
            if (row["method"], row["imbalance"]) == (method, imbalance)
        }
        assert sorted(own) == list(range(5))
        return list(own.values())

    printed = table_under("even, %", FINETUNING)
    assert {row[0] for row in printed} == {row["method"] for row in found}
    for method, *cells, tail, longer in printed:
        assert cells == [spread(runs(method, imbalance)) for imbalance in ("1.0", "0.1", "30.0")]
        for cell, imbalance in ((tail, "0.1"), (longer, "30.0")):
            gap = fmean(runs(method, imbalance)) - fmean(runs("balanced", imbalance))
            assert cell.split(" [")[0] == ("" if method == "balanced" else f"{gap:+.1f}")


def test_fine_tuned_birds_are_computed_from_their_rows() -> None:
    def runs(method: str, imbalance: str, measure: str = "accuracy") -> list[float]:
        return accuracies(measure, "birds_finetune.csv", method=method, imbalance=imbalance)

    printed = table_under("fine-tuned, even", FINETUNING)
    assert {row[0] for row in printed} == {row["method"] for row in csv_rows("birds_finetune.csv")}
    for method, even, tail, few, *gaps in printed:
        on_even, on_tail = runs(method, "1.0"), runs(method, "0.1")
        assert (even, tail) == (spread(on_even) if on_even else "", spread(on_tail))
        assert few == f"{fmean(runs(method, '0.1', 'few')):.1f}"
        for cell, found, imbalance in zip(gaps, (on_even, on_tail), ("1.0", "0.1"), strict=True):
            gap = f"{fmean(found) - fmean(runs('mixup', imbalance)):+.1f}" if found else ""
            assert cell.split(" [")[0] == ("" if method == "mixup" else gap)


def test_the_search_of_the_recipe_head_is_computed_from_its_rows() -> None:
    found: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in csv_rows("head_recipe.csv"):
        found.setdefault((row["stage"], row["settings"]), []).append(row)
    printed = table_under("validation accuracy, %", FINETUNING)
    assert len(printed) == len(found)
    for (name, cell), ((stage, settings), runs) in zip(printed, found.items(), strict=True):
        values = " or ".join(f"{value:g}" for value in json.loads(settings).values())
        assert name.removesuffix(" (the recipe)") == f"{stage} {values}"
        assert name.endswith("(the recipe)") == (json.loads(settings).items() <= vars(HEAD).items())
        assert cell == f"{fmean(float(row['accuracy']) for row in runs):.2f}"
        for imbalance in ("1.0", "0.1"):
            part = {(row["method"], row["seed"]) for row in runs if row["imbalance"] == imbalance}
            assert len(part) == len(runs) / 2 == 18


def test_crops_of_photos_are_computed_from_their_rows() -> None:
    found: dict[str, list[str]] = {}
    for row in csv_rows("photo_crop.csv"):
        found.setdefault(row["random_resized_crop"], []).append(f"{float(row['accuracy']):.1f}")
    printed = table_under("validation accuracy, set 1, %", LOG)
    assert [cells for _, *cells in printed] == list(found.values())
    for (name, *_), crop in zip(printed, found, strict=True):
        assert (f"crops of at least {crop}," in name) if crop else name.startswith("padding of 1 pixel")
