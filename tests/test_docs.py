"""The README and the docs say what is: their code runs, and their tables and trees are those of the code."""

from __future__ import annotations

import ast
import csv
import dataclasses
import importlib
import re
import subprocess
import tomllib
from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch

from icmixup import METHODS, Method
from icmixup.lab.cells import METHOD_ROWS
from icmixup.lab.paper import TABLES
from icmixup.lab.standings import MEASURES, Standing, paired_difference, rank_methods

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
README = ROOT / "README.md"
PAPER, CARDS, FINDINGS = (ROOT / "docs" / f"{name}.md" for name in ("paper", "methods", "findings"))


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, *languages: str) -> list[tuple[int, str]]:
    """The line number and text of each fenced block in one of the languages ("" for a bare fence)."""
    found: list[tuple[int, str]] = []
    opened, language, lines = 0, "", []
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        if not line.startswith("```"):
            lines.append(line)
        elif opened:
            found += [(opened, "\n".join(lines))] if language in languages else []
            opened = 0
        else:
            opened, language, lines = number, line[3:].strip(), []
    assert not opened, f"{page_name(page)}:{opened} opens a block that is never closed"
    return found


def rows(text: str) -> list[list[str]]:
    """The cells of every table row, header rows included."""
    lines = [
        line for line in text.splitlines() if line.startswith("|") and not re.fullmatch(r"[|\-: ]+", line)
    ]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def section(page: Path, title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page.read_text(), re.M | re.S)
    assert found, f"{page_name(page)} has no section {title!r}"
    return found[1]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=page_name)
def test_code_of_a_page_runs_from_top_to_bottom(page: Path) -> None:
    namespace: dict[str, object] = {"__name__": "docs"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for line, source in blocks(page, "python"):
            # Blank lines in front, so that a traceback names the page's own line.
            exec(compile("\n" * line + source, str(page), "exec"), namespace)


def test_the_line_that_replaces_a_criterion_runs() -> None:
    added = [
        line[1:].strip() for _, text in blocks(README, "diff") for line in text.splitlines() if line[0] == "+"
    ]
    assert added
    for line in added:
        namespace: dict[str, object] = {"icm": importlib.import_module("icmixup")}
        exec(line, namespace)
        criterion = namespace["criterion"]
        assert isinstance(criterion, torch.nn.Module)
        targets = torch.tensor([[0.8, 0.2], [0.5, 0.5]])
        assert criterion(torch.tensor([[3.0, 1.0], [0.0, 1.0]]), targets).shape == ()


def test_readme_tree_is_the_real_tree() -> None:
    tree = next(text for _, text in blocks(README, "") if text.startswith("src/icmixup/"))
    folder, told = "", []
    for line in filter(None, tree.splitlines()):
        name, *words = line.split()
        assert words, f"{name} stands in the tree without a word about it"
        folder = folder if line.startswith(" ") else name
        told += [folder + name] if line.startswith(" ") else []
    paths = (ROOT / "src" / "icmixup").rglob("*")
    files = {path.relative_to(ROOT).as_posix() for path in paths if path.is_file() and path.suffix != ".pyc"}
    assert sorted(set(told) - files) == [], "told in the tree, but not there"
    assert sorted(files - set(told)) == [], "there, but not told in the tree"
    assert len(set(told)) == len(told), "told twice"


def test_tree_lines_up_and_fits() -> None:
    tree = next(text for _, text in blocks(README, "") if text.startswith("src/icmixup/"))
    starts = {re.match(r"\s*\S+\s+", line).end() for line in filter(None, tree.splitlines())}  # type: ignore[union-attr]
    assert len(starts) == 1
    assert max(map(len, tree.splitlines())) <= 110


def equations() -> list[list[str]]:
    return [row for row in rows(section(PAPER, "Equations")) if row[0] != "Eq."]


def test_every_equation_of_the_paper_has_a_row() -> None:
    assert [row[0] for row in equations()] == [*map(str, range(1, 11)), *(f"A.{n}" for n in range(1, 13))]


@pytest.mark.parametrize("row", equations(), ids=lambda row: f"Eq. {row[0]}")
def test_functions_and_tests_named_for_an_equation_exist(row: list[str]) -> None:
    functions, tests = re.findall(r"`([\w.]+)`", row[2]), re.findall(r"`(\w+)`", row[3])
    assert functions, "no function is named"
    assert tests, "no test is named"
    assert all(map(is_callable, functions))
    assert set(tests) <= names_of_tests()


def test_every_function_and_test_named_on_the_paper_page_exists() -> None:
    spans = re.findall(r"`([\w.]+)`", PAPER.read_text())
    rooms = "|".join(path.stem for path in (ROOT / "src" / "icmixup").glob("*.py"))
    dotted = {span for span in spans if re.fullmatch(rf"(?:{rooms})\.\w+", span)} - {
        page.name for page in PAGES
    }
    assert dotted
    assert [span for span in dotted if not is_callable(span)] == []
    assert {span for span in spans if span.startswith("test_")} <= names_of_tests()


def is_callable(dotted: str) -> bool:
    room, name = dotted.rsplit(".", 1)
    return callable(getattr(importlib.import_module(f"icmixup.{room}"), name, None))


def names_of_tests() -> set[str]:
    trees = (ast.parse(path.read_text()) for path in (ROOT / "tests").glob("test_*.py"))
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_ten_decisions_each_say_what_we_do() -> None:
    text = section(PAPER, "Where paper and released code part ways")
    decisions = re.split(r"^\*\*(?=\d+\. )", text, flags=re.M)[1:]
    assert [int(decision.split(".")[0]) for decision in decisions] == list(range(1, 11))
    assert [decision[:2] for decision in decisions if "*We*" not in decision] == []


def cards() -> dict[str, str]:
    """Method name to the settings that its card prints."""
    named = [row for row in rows(CARDS.read_text()) if len(row) == 3 and row[1].startswith("`draw=")]
    assert len({row[0] for row in named}) == len(named), "a method has two cards"
    return {row[0].strip("`"): row[1].strip("`") for row in named}


def test_every_method_has_exactly_one_card() -> None:
    assert sorted(cards()) == sorted(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_settings_on_a_card_are_those_of_the_method(name: str) -> None:
    told = eval(f"dict({cards()[name]})")
    assert Method(**told) == METHODS[name]
    if METHODS[name].draw != "none":
        assert "alpha" in told, "alpha is a number that every reader asks for"


def test_every_card_has_a_formula_and_a_source() -> None:
    text = CARDS.read_text()
    for title in re.findall(r"^## (.+)$", text, re.M):
        card = section(CARDS, title)
        if "`draw=" in card:
            assert re.search(r"^    \S", card, re.M), f"{title} has no formula"
            assert re.search(r"^Source: ", card, re.M), f"{title} has no source"


def test_table_of_settings_is_the_dataclass() -> None:
    told = {row[0].strip("`"): row[1].strip("`") for row in rows(section(CARDS, "All settings"))[1:]}
    fields = dataclasses.fields(Method)
    assert list(told) == [field.name for field in fields]
    for field in fields:
        if field.default is dataclasses.MISSING:
            assert told[field.name] == ""
        else:
            assert ast.literal_eval(told[field.name]) == field.default


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_to_pages_and_headings_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?://)([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{link} is not there"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", target.read_text(), re.M)
            slugs = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert anchor in slugs, f"{link} names no heading"


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


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*.csv")), ids=page_name)
def test_every_row_says_where_it_was_made_and_from_which_commit(path: Path) -> None:
    with path.open() as text:
        for row in csv.DictReader(text):
            assert all(row[name] for name in ("device", "torch", "commit", "date"))
            assert re.fullmatch("[0-9a-f]{7,}", row["commit"]), "a tree that no commit holds"


def told(heading: str, page: Path = README) -> list[list[str]]:
    """The rows of the page's table whose second column is called so."""
    tables = [rows(block) for block in page.read_text().split("\n\n") if block.startswith("|")]
    return next(table[1:] for table in tables if table[0][1].startswith(heading))


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


def rival(one: Standing) -> str:
    return f"{one.mean:.1f} %" if one.difference is None else str(one.difference)


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


def flat(page: Path) -> str:
    """A page's text in one line, so that a sentence is found however it is broken."""
    return " ".join(page.read_text().split())


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


def commands() -> list[str]:
    """Every icmixup command of the pages, without its comment."""
    text = "\n".join(text for page in PAGES for _, text in blocks(page, "console", "bash"))
    return [line.split("#")[0].strip() for line in re.findall(r"^\$ (icmixup .*)$", text, re.M)]


def help_of(words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    from icmixup.lab.cli import main

    monkeypatch.setenv("COLUMNS", "200")
    try:
        code: object = main([*words, "--help"])
    except SystemExit as stop:
        code = stop.code
    assert not code, f"icmixup {' '.join(words)} --help ends with {code}"
    return capsys.readouterr().out


@pytest.mark.parametrize("command", commands())
def test_flags_of_a_printed_command_exist(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = command.split()[1:]
    first_flag = next((n for n, word in enumerate(words) if word.startswith("-")), len(words))
    told = help_of(words[:first_flag], capsys, monkeypatch)
    for flag in re.findall(r"--[a-z][\w-]*", command):
        assert re.search(rf"{flag}(?![\w-])", told), f"{flag} is not in the help of icmixup {words[0]}"


def test_flags_named_in_the_text_exist(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = help_of(["train"], capsys, monkeypatch)
    for flag in re.findall(r"`(--[a-z][\w-]*)", PAPER.read_text()):
        assert re.search(rf"{flag}(?![\w-])", told), f"{flag} is not in the help of icmixup train"


def test_version_is_the_same_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert re.search(rf"^version: {re.escape(version)}$", (ROOT / "CITATION.cff").read_text(), re.M)
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest
    assert newest[1] == version


# Folders of somebody's machine, addresses with a password in them, hosts that are not public. A test may have
# its own server on 127.0.0.1.
PRIVATE = re.compile(
    r"(?<![\w.$}~)])/(?:home|root|Users|work|mnt|opt)/\w"
    r"|https?://[^/\s:@\"']+:[^/\s@\"']+@"
    r"|https?://(?:(?!127\.)\d+\.\d+\.\d+\.\d+|[\w.-]*(?:artifactory|nexus|registry|proxy|internal)[\w.-]*)[:/]"
)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="only a checkout knows which files are tracked")
def test_no_tracked_file_names_a_private_machine_or_registry() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            found = PRIVATE.search((ROOT / name).read_text(errors="ignore"))
            assert not found, f"{name} names {found[0]}"
