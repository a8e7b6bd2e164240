"""The documentation matches the code: code blocks run, and tables, trees, links and flags are real."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
from pages import (
    ARCHITECTURE,
    CARDS,
    FRAMEWORK_GUIDES,
    PAGES,
    PAPER,
    PYTHON,
    README,
    ROOT,
    blocks,
    page_name,
    rows,
    section,
)
from PIL import Image

from icmixup import AXES, METHODS, Method
from icmixup._checks import NEGATIVES


def pages_with_code() -> list[Path]:
    return [page for page in PAGES if blocks(page, *PYTHON) and page not in FRAMEWORK_GUIDES]


def write_files_of_the_lab_page(folder: Path) -> None:
    """A finished run, its export and a photo, under the names that docs/lab.md uses."""
    from icmixup.lab.cli import main

    assert main(["train", "digits", "--epochs", "1", "--device", "cpu", "--out", str(folder / "out")]) == 0
    run = next(path.parent for path in (folder / "out").rglob("predictions.npz"))
    (folder / "runs").mkdir()
    run.rename(folder / "runs" / "RUN")
    assert main(["export", str(folder / "runs" / "RUN"), "--to", str(folder / "model.safetensors")]) == 0
    Image.new("L", (20, 20)).save(folder / "photo.jpg")


@pytest.mark.parametrize("page", pages_with_code(), ids=page_name)
def test_code_of_a_page_runs_from_top_to_bottom(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if page.name == "lab.md":
        write_files_of_the_lab_page(tmp_path)
    namespace: dict[str, object] = {"__name__": "docs"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for line, source in blocks(page, *PYTHON):
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


def file_tree() -> str:
    return next(text for _, text in blocks(ARCHITECTURE, "") if text.startswith("src/icmixup/"))


def test_the_tree_in_the_architecture_page_is_the_real_tree() -> None:
    folder, listed = "", []
    for line in filter(None, file_tree().splitlines()):
        name, *words = line.split()
        assert words, f"{name} has no description in the tree"
        folder = folder if line.startswith(" ") else name
        listed += [folder + name] if line.startswith(" ") else []
    paths = (ROOT / "src" / "icmixup").rglob("*")
    files = {path.relative_to(ROOT).as_posix() for path in paths if path.is_file() and path.suffix != ".pyc"}
    assert sorted(set(listed) - files) == [], "listed in the tree, but missing"
    assert sorted(files - set(listed)) == [], "present, but not listed in the tree"
    assert len(set(listed)) == len(listed), "listed twice"


def test_tree_lines_up_and_fits() -> None:
    tree = file_tree()
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


def test_every_function_named_on_the_paper_page_exists() -> None:
    spans = re.findall(r"`([\w.]+)`", PAPER.read_text())
    modules = "|".join(map(re.escape, library_modules()))
    dotted = {span for span in spans if re.fullmatch(rf"(?:{modules})\.\w+", span)}
    dotted -= {page.name for page in PAGES} | set(library_modules())
    assert dotted
    assert [span for span in dotted if not is_callable(span)] == []


@pytest.mark.parametrize("page", ["paper", "mutants"])
def test_every_test_named_on_a_page_exists(page: str) -> None:
    named = set(re.findall(r"`(test_\w+)", (ROOT / "docs" / f"{page}.md").read_text()))
    assert named
    assert named - names_of_tests() == set()


def library_modules() -> list[str]:
    """Dotted names below icmixup, without the lab: pairs, contrast.plain, ..."""
    source = ROOT / "src" / "icmixup"
    paths = (path.relative_to(source).with_suffix("") for path in source.rglob("*.py"))
    return [".".join(path.parts).removesuffix(".__init__") for path in paths if path.parts[0] != "lab"]


def is_callable(dotted: str) -> bool:
    module, name = dotted.rsplit(".", 1)
    return callable(getattr(importlib.import_module(f"icmixup.{module}"), name, None))


@functools.cache  # parsing every test takes a second
def names_of_tests() -> set[str]:
    trees = (ast.parse(path.read_text()) for path in (ROOT / "tests").rglob("test_*.py"))
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_each_of_the_ten_decisions_states_what_we_do() -> None:
    text = section(PAPER, "Where the paper and the released code differ")
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
    printed = eval(f"dict({cards()[name]})")
    assert Method(**printed) == METHODS[name]
    if METHODS[name].draw != "none":
        assert "alpha" in printed, "every method that mixes prints its alpha"


def test_every_card_has_a_formula_and_a_source() -> None:
    text = CARDS.read_text()
    for title in re.findall(r"^## (.+)$", text, re.M):
        card = section(CARDS, title)
        if "`draw=" in card:
            assert re.search(r"^    \S", card, re.M), f"{title} has no formula"
            assert re.search(r"^Source: ", card, re.M), f"{title} has no source"


def test_table_of_settings_is_the_dataclass() -> None:
    printed = {row[0].strip("`"): row[1].strip("`") for row in rows(section(CARDS, "All settings"))[1:]}
    fields = dataclasses.fields(Method)
    assert list(printed) == [field.name for field in fields]
    for field in fields:
        if field.default is dataclasses.MISSING:
            assert printed[field.name] == ""
        else:
            assert ast.literal_eval(printed[field.name]) == field.default


def test_table_of_settings_names_every_value_that_is_a_word() -> None:
    printed = {row[0].strip("`"): " ".join(row[1:]) for row in rows(section(CARDS, "All settings"))[1:]}
    values = {name: get_args(kind) for name, kind in get_type_hints(Method).items() if get_args(kind)}
    values |= {"axes": AXES, "negatives": {name for names in NEGATIVES for name in names}}
    assert {"draw", "mode", "duplicates", "class_sizes"} < set(values)
    missing = [
        (name, word) for name, words in values.items() for word in words if f'"{word}"' not in printed[name]
    ]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_to_pages_and_headings_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for link in re.findall(r"\]\((?!https?://)([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{link} does not exist"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", target.read_text(), re.M)
            slugs = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert anchor in slugs, f"{link} is not a heading of that page"


def commands() -> list[str]:
    """Every icmixup command on the pages, continuation lines joined and comments removed."""
    text = "\n".join(text for page in PAGES for _, text in blocks(page, "console", "bash"))
    text = text.replace("\\\n", " ")
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
    text = help_of(words[:first_flag], capsys, monkeypatch)
    for flag in re.findall(r"--[a-z][\w-]*", command):
        assert re.search(rf"{flag}(?![\w-])", text), f"{flag} is not in the help of icmixup {words[0]}"


def test_flags_named_in_the_text_exist(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = help_of(["train"], capsys, monkeypatch)
    for flag in re.findall(r"`(--[a-z][\w-]*)", PAPER.read_text()):
        assert re.search(rf"{flag}(?![\w-])", text), f"{flag} is not in the help of icmixup train"


def test_version_is_the_same_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert re.search(rf"^version: {re.escape(version)}$", (ROOT / "CITATION.cff").read_text(), re.M)
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest
    assert newest[1] == version


# Home and work folders, URLs with a password, and hosts that are not public. Tests may use a server on
# 127.0.0.1.
PRIVATE = re.compile(
    r"(?<![\w.$}~)])/(?:home|root|Users|work|mnt|opt)/\w"
    r"|https?://[^/\s:@\"']+:[^/\s@\"']+@"
    r"|https?://(?:(?!127\.)\d+\.\d+\.\d+\.\d+|[\w.-]*(?:artifactory|nexus|registry|proxy|internal)[\w.-]*)[:/]"
)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a git checkout to list tracked files")
def test_the_command_that_a_bug_report_asks_for_prints_versions() -> None:
    form = (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text()
    (line,) = re.findall(r"Output of: python (.+)$", form, re.M)
    done = subprocess.run([sys.executable, *shlex.split(line)], capture_output=True, text=True, check=False)
    release = re.escape(torch.__version__.split("+")[0])
    assert re.fullmatch(rf"[\d.a-z]+ {release}\S*\n", done.stdout), done.stderr


def test_no_tracked_file_names_a_private_machine_or_registry() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            found = PRIVATE.search((ROOT / name).read_text(errors="ignore"))
            assert not found, f"{name} names {found[0]}"


WORDS = 1300


def test_the_readme_is_short_and_in_order() -> None:
    text = README.read_text()
    assert sum(word != "|" for word in text.split()) <= WORDS
    titles = re.findall(r"^## (.+)$", text, re.M)
    assert titles == [
        *("Four lines in your loop", "Install", "Does it help?", "Try it on your data"),
        *("Reproduction of the paper", "Read more", "Citation", "Licence"),
    ]
    assert all(command in section(README, "Install") for command in ("$ make demo", "$ make test"))


def test_the_picture_of_the_idea_shows_what_its_script_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    idea = importlib.import_module("draw_idea").compute_idea()
    # S~ from scores and targets is every mixed image under every interpolated classifier (Eq. 2).
    torch.testing.assert_close(idea.mixed_scores, idea.inputs @ idea.classifiers.T)
    diagonal = torch.arange(len(idea.inputs))
    assert torch.equal(idea.mixed_scores.argmax(dim=1), diagonal)
    assert torch.equal(idea.mixed_scores.argmax(dim=0), diagonal)
    assert (ROOT / "docs" / "idea.png").stat().st_size < 150_000
