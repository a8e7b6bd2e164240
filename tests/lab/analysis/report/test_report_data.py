"""The data of the report: its numbers are those of the terminal and the files, and no name becomes markup."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import re
import shlex
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from report_runs import HOSTILE, METHODS, TINY, write_run
from rich.console import Console

from icmixup.lab.analysis.report import live, make
from icmixup.lab.analysis.report.command import repeat_command
from icmixup.lab.analysis.report.make import Options, report_runs
from icmixup.lab.analysis.report.page import script_json
from icmixup.lab.analysis.report.study import Study, collect_runs
from icmixup.lab.analysis.report.summaries import count_bins, summarise_predictions
from icmixup.lab.analysis.scores import analyse_runs
from icmixup.lab.cli import main, parse
from icmixup.lab.cli.report import open_in_browser
from icmixup.lab.comparison.compare import read_comparison, summarise
from icmixup.lab.comparison.statistics import decide, difference_between
from icmixup.lab.comparison.table import print_comparison
from icmixup.lab.training.evaluate import calibration_error
from icmixup.lab.training.predictions import make_predictions, read_predictions
from icmixup.lab.training.recipe import FINETUNE, QUICK, Recipe

LIMIT, LIMIT_WITH_THUMBNAILS = 1_000_000, 2_000_000


class Page(HTMLParser):
    """What a browser would see of a page: its elements, its text, its data, and the rows of its table."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.stored = "", ""
        self.rows: list[list[str]] = []
        self.inside: list[str] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.data: dict[str, Any] = json.loads(self.stored)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.inside.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in self.inside:
            while self.inside.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if "script" in self.inside:
            self.stored += data if not self.stored else ""
            return
        self.text += data
        if self.inside and {"td", "th"} & set(self.inside):
            self.rows[-1][-1] += data


def make_page(*paths: Path, out: Path, **options: Any) -> tuple[Page, Study]:
    found, study = report_runs(paths, out, Options(Path("data"), "cpu", **options))
    return Page(found), study


@pytest.fixture(scope="module")
def page(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Page:
    return make_page(trained, out=tmp_path_factory.mktemp("page") / "report.html")[0]


def by_name(page: Page, key: str) -> dict[str, Any]:
    return dict(zip((one["name"] for one in page.data["variants"]), page.data[key], strict=True))


def test_the_table_of_the_page_is_that_of_the_terminal(page: Page, trained: Path):
    comparison = read_comparison(trained / "comparison.json")
    console = Console(width=300, record=True, file=io.StringIO())
    print_comparison(comparison, console)
    printed = console.export_text()
    lines = {line.split()[0]: line.split() for line in printed.splitlines() if line.split()}
    assert [row[0] for row in page.rows[1:]] == [standing.method for standing in comparison.standings]
    for name, *cells in page.rows[1:]:
        assert " ".join(cells).split() == lines[name][1:]
    for clause in comparison.verdict.split("; "):
        assert clause.replace(" %", "\u00a0%")[1:] in page.text
    assert comparison.footnote in page.text
    clear = [s.difference is not None and s.difference.clear for s in comparison.standings]
    marks = [
        attributes["class"] for tag, attributes in page.elements if tag == "tr" and "class" in attributes
    ]
    assert [mark in ("above", "below") for mark in marks] == clear
    assert "".join(marks).replace("above", "").replace("below", "") == ""


def test_differences_to_every_baseline_are_those_of_the_statistics(page: Page, trained: Path):
    comparison = read_comparison(trained / "comparison.json")
    names = [one["name"] for one in page.data["variants"]]
    decision = decide(comparison.looks)
    for i, one in enumerate(names):
        for j in range(i + 1, len(names)):
            expected = difference_between(comparison.looks[-1], decision, one, names[j])
            found = page.data["differences"]["accuracy"][i][j - i - 1]
            assert expected is not None
            assert found[:3] == pytest.approx([expected.mean, expected.low, expected.high], abs=1e-5)
            assert found[3] == expected.clear


def test_the_page_is_of_the_measure_that_methods_were_compared_in(copied: Path):
    args = ["compare", "digits", *TINY, "--methods", *METHODS, "--seeds", "2", "--device", "cpu"]
    measure = ["--measure", "balanced-accuracy"]
    assert main([*args, *measure, "--workers", "1", "--out", str(copied.parent), "--name", "balanced"]) == 0
    folder = copied.parent / "balanced"
    comparison, page = read_comparison(folder / "comparison.json"), Page(folder / "report.html")
    assert page.data["measures"][0]["key"] == "balanced_accuracy"
    one, other = (variant["name"] for variant in page.data["variants"][:2])
    assert one == comparison.standings[0].method
    expected = difference_between(comparison.looks[-1], decide(comparison.looks), one, other)
    assert expected is not None
    found = page.data["differences"]["balanced_accuracy"][0][0]
    assert found[:3] == pytest.approx([expected.mean, expected.low, expected.high], abs=1e-5)
    assert "balanced accuracy" in page.rows[0][1]
    assert "--measure balanced-accuracy" in page.text
    shutil.copytree(folder, folder.with_name("another"))
    shutil.rmtree(
        copied.parent / comparison.rows[-1]["folder"]
    )  # without it, its runs are runs like any other
    for folders, key in (
        ([folder], "balanced_accuracy"),
        ([folder, folder.with_name("another")], "balanced_accuracy"),
        ([folder, copied], "accuracy"),
    ):
        found, study = report_runs(folders, folder / "several.html", Options(Path("data"), "cpu"))
        assert Page(found).data["measures"][0]["key"] == key
        assert [" balanced accuracy, " in verdict for verdict in study.verdicts] == [key != "accuracy"]


def test_a_page_of_an_earlier_verdict_does_not_stay_beside_the_present_one(copied: Path):
    args = ["compare", "digits", *TINY, "--methods", *METHODS, "--seeds", "2", "--device", "cpu"]
    again = [*args, "--workers", "1", "--out", str(copied.parent), "--name", copied.name, "--no-report"]
    assert main(again) == 0
    assert (copied / "report.html").exists()  # the verdict is the same
    assert main([*again, "--baseline", "erm"]) == 0
    assert not (copied / "report.html").exists()
    assert (copied / "comparison.png").exists()


def test_other_baselines_agree_with_a_comparison_that_has_them(page: Page, trained: Path):
    stored = read_comparison(trained / "comparison.json")
    other = summarise(stored.recipe, stored.methods, stored.seeds, "erm", stored.rows, looks=stored.looks)
    names = [one["name"] for one in page.data["variants"]]
    base = names.index("erm")
    for standing in other.standings:
        if standing.difference is None:
            continue
        place = names.index(standing.method)
        low, high = sorted((place, base))
        sign = 1 if place < base else -1
        mean = page.data["differences"]["accuracy"][low][high - low - 1][0]
        assert sign * mean == pytest.approx(standing.difference.mean, abs=1e-5)


def test_accuracies_by_class_are_those_of_per_class_csv(page: Page, trained: Path):
    with (trained / "per_class.csv").open() as file:
        rows = list(csv.DictReader(file))
    classes = page.data["classes"]
    accuracy = dict(zip((one["name"] for one in page.data["variants"]), classes["accuracy"], strict=True))
    for row in rows:
        label = classes["names"].index(row["class"])
        assert accuracy[row["method"]][label] == pytest.approx(float(row["accuracy"]), abs=0.006)
        assert classes["train"][label] == int(row["train_images"])
        assert classes["test"][label] == int(row["test_images"])


def test_confusions_are_those_of_confused_pairs_csv(page: Page, trained: Path):
    with (trained / "confused_pairs.csv").open() as file:
        rows = list(csv.DictReader(file))
    for method, pairs in by_name(page, "confusions").items():
        own = [list(row.values())[1:] for row in rows if row["method"] == method]
        assert len(own) > 8
        own = own[:8]
        assert [[a, b, float(c), float(d)] for a, b, c, d in pairs] == [
            [a, b, float(c), float(d)] for a, b, c, d in own
        ]


def test_a_temperature_divides_the_scores_between_two_classes():
    from icmixup.lab.analysis.report.between import describe_scores

    scores = torch.tensor([[2.0, 0.0, 1.0], [0.0, 4.0, 0.0]], dtype=torch.float64)
    along = describe_scores(scores, 0, 1, temperature=2.0)
    for step, row in enumerate([[1.0, 0.0, 0.5], [0.0, 2.0, 0.0]]):
        total = sum(math.exp(score) for score in row)
        assert along[0][step] == pytest.approx(math.exp(row[0]) / total)
        assert along[1][step] == pytest.approx(math.exp(row[1]) / total)
    assert along[2] == [0, 1]


def test_bins_add_up_to_the_calibration_error():
    generator = torch.Generator().manual_seed(0)
    scores, labels = (
        3 * torch.randn(500, 7, generator=generator),
        torch.randint(7, (500,), generator=generator),
    )
    scores[:20] = 200 * torch.eye(7)[labels[:20]]  # a confidence of exactly 1
    bins = count_bins(scores, labels)
    error = 100 * np.abs(bins.confidence - bins.correct).sum() / bins.images.sum()
    assert error == pytest.approx(calibration_error(scores, labels))


def test_the_risk_of_answering_everything_is_the_error_rate(page: Page):
    for name, risk in zip((v["name"] for v in page.data["variants"]), page.data["risk"]["risk"], strict=True):
        accuracies = dict(
            zip((v["name"] for v in page.data["variants"]), page.data["values"]["accuracy"], strict=True)
        )[name]
        assert risk[-1] == pytest.approx(100 - sum(accuracies) / len(accuracies), abs=0.01)


def test_mistakes_are_wrong_and_sorted_by_confidence(page: Page, trained: Path):
    stored = read_comparison(trained / "comparison.json")
    for method, found in by_name(page, "mistakes").items():
        row = next(row for row in stored.rows if (row["method"], row["seed"]) == (method, 0))
        predictions = read_predictions(trained.parent / row["folder"])
        for one in found:
            assert one["label"] == predictions.labels[one["image"]] != one["predicted"]
            assert one["predicted"] == predictions.scores[one["image"]].argmax()
        confidences = [one["confidence"] for one in found]
        assert confidences == sorted(confidences, reverse=True)
        assert {str(one["image"]) for one in found} <= set(page.data["thumbnails"])


def test_ends_of_the_slider_are_the_predictions_of_the_two_images(page: Page, trained: Path):
    stored = read_comparison(trained / "comparison.json")
    names = [one["name"] for one in page.data["variants"]]
    between = page.data["between"]
    assert between["reason"] == ""
    assert len(between["pairs"]) >= 3
    for pair in between["pairs"]:
        assert pair["classes"][0] != pair["classes"][1]
        assert all(uri.startswith("data:image/png;base64,") for uri in pair["pictures"])
        for along in pair["along"]:
            sums = [a + b for a, b in zip(along["first"], along["second"], strict=True)]
            assert len(sums) == len(between["lams"]) == 21
            assert max(sums) <= 1.0002
    from icmixup.lab.analysis.report.between import choose_pairs

    folders = {(row["method"], row["seed"]): trained.parent / row["folder"] for row in stored.rows}
    chosen = choose_pairs([summarise_predictions(read_predictions(folder)) for folder in folders.values()])
    for (first, second), pair in zip(chosen, between["pairs"], strict=True):
        for name, along in zip(names, pair["along"], strict=True):
            predictions = read_predictions(folders[name, 0])
            said = predictions.scores.argmax(axis=1)
            assert along["top"][-1] == predictions.class_names[said[first]]
            assert along["top"][0] == predictions.class_names[said[second]]


def test_curves_are_those_of_icmixup_analyse(page: Page, trained: Path):
    rows = analyse_runs([trained], data_dir=Path("data"), device=torch.device("cpu"))
    names = [one["name"] for one in page.data["variants"]]
    for name, curve in zip(names, page.data["between"]["curves"], strict=True):
        own = [row for row in rows if row["method"] == name and row["seed"] == 0]
        expected = [
            [row[k] for k in ("lam", "squared_norm", "difference_mean", "difference_std")] for row in own
        ]
        torch.testing.assert_close(torch.tensor(curve), torch.tensor(expected), rtol=1e-3, atol=1e-3)


def test_names_of_classes_and_files_are_text_in_the_page(hostile: Path, tmp_path: Path):
    found, _ = make_page(hostile, out=tmp_path / "report.html")
    assert [tag for tag, _ in found.elements].count("script") == 2
    assert {"img", "b", "i"} & {tag for tag, _ in found.elements} == set()
    assert found.data["classes"]["names"] == list(HOSTILE)
    files = {one["file_name"] for each in found.data["mistakes"] for one in each}
    assert any("<script>alert(1)</script>/<i>" in name for name in files)
    assert "\u2028" not in found.source
    assert "photos/<b>birds<" in shlex.split(re.search(r"icmixup compare.*", found.text)[0])  # type: ignore[index]


@pytest.mark.parametrize("text", ["</script>", "<!--", "\u2028", "\u2029", "&amp;", "]]>"])
def test_json_in_a_script_has_no_character_that_could_end_it(text: str):
    written = script_json({text: [text]})
    assert not set("<>&\u2028\u2029") & set(written)
    assert json.loads(written) == {text: [text]}


def test_the_page_loads_nothing(page: Page):
    for tag, attributes in page.elements:
        for name in ("src", "href", "srcset", "action"):
            target = attributes.get(name) or "#"
            assert target.startswith(("#", "data:")), (tag, target)
    assert "default-src 'none'" in page.source
    assert "@import" not in page.source
    assert set(re.findall(r"https?://[^\s\"'<]+", page.source)) <= {"http://www.w3.org/2000/svg"}


def test_a_large_comparison_stays_below_the_limit(large: Path):
    found = Page(large)
    assert [len(seeds) for seeds in found.data["values"]["accuracy"]] == [3] * 8
    assert len(found.data["classes"]["names"]) == 100
    assert large.stat().st_size < LIMIT


def test_thumbnails_stay_below_their_limit_even_for_photos():
    from icmixup.lab.analysis.report.pictures import MOST_BYTES, thumbnails
    from icmixup.lab.datasets import Split

    noise = torch.randint(256, (300, 3, 96, 96), dtype=torch.uint8)  # photos are smaller than noise
    found = thumbnails(Split(noise, torch.zeros(300, dtype=torch.int64)), range(300))
    assert 0 < sum(map(len, found.values())) <= MOST_BYTES < LIMIT_WITH_THUMBNAILS - LIMIT
    assert list(found) == list(range(len(found)))


def test_without_thumbnails_there_is_no_image_and_the_page_says_so(trained: Path, tmp_path: Path):
    found, _ = make_page(trained, out=tmp_path / "report.html", thumbnails=False)
    assert "data:image" not in found.source
    assert "--no-thumbnails" in found.data["thumbnails_reason"]
    assert found.data["between"]["pairs"][0]["pictures"] == ["", ""]


def test_missing_predictions_are_made_from_the_checkpoint(copied: Path, page: Page, tmp_path: Path):
    for path in copied.parent.glob("*/predictions.npz"):
        path.unlink()
    found, _ = make_page(copied, out=tmp_path / "report.html")
    assert found.data["confusions"] == page.data["confusions"]
    assert found.data["predictions_reason"] == ""


def test_without_predictions_and_checkpoint_the_page_says_why_parts_are_empty(copied: Path, tmp_path: Path):
    for path in (*copied.parent.glob("*/predictions.npz"), *copied.parent.glob("*/checkpoint*.pt")):
        path.unlink()
    found, _ = make_page(copied, out=tmp_path / "report.html")
    assert found.data["predictions_reason"].startswith("The runs have no predictions")
    assert found.data["calibration"] == [None] * 3
    assert "has no weights" in found.text
    assert "no predictions" in found.data["between"]["reason"]
    assert len(found.data["values"]["accuracy"]) == 3


def test_without_checkpoints_the_section_between_classes_says_what_it_needs(copied: Path, tmp_path: Path):
    for path in copied.parent.glob("*/checkpoint*.pt"):
        path.unlink()
    found, _ = make_page(copied, out=tmp_path / "report.html")
    assert "needs the checkpoint" in found.data["between"]["reason"]
    assert found.data["confusions"][0]


def test_runs_of_two_comparisons_are_named_by_what_differs(copied: Path, tmp_path: Path):
    args = ["compare", "digits", *TINY, "--epochs", "1", "--methods", "mixup", "ic-mixup", "--seeds", "1"]
    args += ["--device", "cpu", "--workers", "1"]
    assert main([*args, "--out", str(copied.parent), "--name", "short"]) == 0
    found, study = make_page(copied, copied.parent / "short", out=tmp_path / "report.html")
    names = {one["name"] for one in found.data["variants"]}
    assert names == {f"{method} epochs=3" for method in METHODS} | {"mixup epochs=1", "ic-mixup epochs=1"}
    assert len(study.verdicts) == len(set(re.findall(r"epochs=\d", " ".join(study.verdicts)))) == 2
    assert found.text.count("icmixup compare digits") == 2
    assert found.data["shifted"] is None
    assert "failed" not in found.text  # the second comparison has one seed only


def test_class_sizes_are_not_shown_for_runs_with_other_training_images(copied: Path, tmp_path: Path):
    args = ["train", "digits", *TINY, "--method", "mixup", "--device", "cpu", "--out", str(copied.parent)]
    assert main([*args, "--imbalance", "1"]) == 0
    found, _ = make_page(copied.parent, out=tmp_path / "report.html")
    assert found.data["classes"]["train"] is None
    assert "digits-20each, digits-20each-lt0.1" in found.text


def test_folds_are_shown_as_one_run_of_each_seed(tmp_path: Path):
    args = ["compare", "digits", *TINY, "--epochs", "1", "--methods", "erm", "mixup", "--seeds", "1"]
    args += ["--folds", "2", "--device", "cpu", "--workers", "1", "--out", str(tmp_path), "--name", "folds"]
    assert main(args) == 0
    written = Page(tmp_path / "folds" / "report.html")
    again, study = make_page(tmp_path / "folds", out=tmp_path / "report.html")
    assert sorted(study.runs) == [("erm", 0), ("mixup", 0)]
    assert again.data == written.data
    assert sum(written.data["classes"]["test"]) == 1797
    assert written.data["learning"][0]["loss"]
    assert "--folds" in written.data["between"]["reason"]


def test_runs_of_single_folds_count_only_in_their_pooled_row(tmp_path: Path):
    args = ["compare", "digits", *TINY, "--epochs", "1", "--methods", "erm", "mixup", "--seeds", "2"]
    args += ["--folds", "2", "--device", "cpu", "--workers", "1", "--out", str(tmp_path), "--name", "folds"]
    assert main(args) == 0
    comparison = read_comparison(tmp_path / "folds" / "comparison.json")
    accuracies = {(row["method"], row["seed"]): row["accuracy"] for row in comparison.rows}
    for paths in ((tmp_path,), tuple(sorted(tmp_path.iterdir()))):
        _, study = make_page(*paths, out=tmp_path / "all" / "report.html")
        assert {key: row["accuracy"] for key, row in study.rows.items()} == accuracies
        assert not study.notes
        assert "one of 2 folds" in study.footnote
    with pytest.raises(ValueError, match="is one of 2 folds, which count together"):
        collect_runs(sorted(tmp_path.glob("*-fold1of2.*")))


def test_class_sizes_of_folds_are_those_that_a_fold_trains_on(tmp_path: Path):
    args = ["compare", "digits", *TINY, "--epochs", "1", "--methods", "erm", "--seeds", "1", "--folds", "2"]
    assert main([*args, "--device", "cpu", "--out", str(tmp_path / "runs"), "--name", "folds"]) == 0
    with_sizes = Page(tmp_path / "runs" / "folds" / "report.html")
    shutil.rmtree(tmp_path / "runs" / "folds")  # it has the sizes; without it they are those of the images
    found, _ = make_page(tmp_path / "runs", out=tmp_path / "report.html")
    assert found.data["classes"]["train"] == with_sizes.data["classes"]["train"]
    assert sum(found.data["classes"]["train"]) < 10 * 20


def test_runs_on_images_that_have_changed_since_are_left_out(tmp_path: Path):
    generator = np.random.default_rng(0)
    for number in range(24):
        (tmp_path / "photos" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(256, size=(12, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / "ab"[number % 2] / f"{number}.png")
    args = [str(tmp_path / "photos"), "--epochs", "1", "--batch-size", "8", "--device", "cpu"]
    args += ["--out", str(tmp_path / "runs")]
    for method in ("erm", "mixup"):
        assert main(["train", *args, "--method", method]) == 0
    before = {folder.name for folder in (tmp_path / "runs").iterdir()}
    next((tmp_path / "photos").glob("*/*")).unlink()
    assert main(["train", *args, "--method", "mixup"]) == 0
    (newer,) = {folder.name for folder in (tmp_path / "runs").iterdir()} - before
    _, study = make_page(tmp_path / "runs", out=tmp_path / "report.html")
    assert [run.folder.name for run in study.runs.values()] == [newer]
    assert len(study.notes) == 2
    assert all(f"images were others than those of the newer {newer}" in note for note in study.notes)


def test_trials_of_tuning_are_not_runs_of_a_report(tmp_path: Path):
    run = write_other(tmp_path, ("a", "b"), method="erm")
    write_other(tmp_path / "trials", ("a", "b"), method="erm", lr=0.3)
    collected = collect_runs(sorted(tmp_path.iterdir()))
    assert [one.folder for one in collected.runs] == [run]
    assert not collected.notes


def test_an_overview_of_an_earlier_version_keeps_its_warnings(copied: Path, tmp_path: Path):
    path = copied / "comparison.json"
    stored = json.loads(path.read_text())
    for name in ("folds", "budget", "tuning", "class_counts"):
        del stored["overview"][name]
    path.write_text(json.dumps(stored))
    found, _ = make_page(copied, out=tmp_path / "report.html")
    assert "599 test images can hardly show" in found.text
    assert "a third of each class held out" in found.text


def test_unfinished_runs_are_named_and_left_out(copied: Path, tmp_path: Path):
    left = next(copied.parent.glob("*.erm.s1.*"))
    (left / "result.json").unlink()
    found, study = make_page(copied.parent, out=tmp_path / "report.html")
    assert len(study.runs) == 5
    assert f"{left.name} is unfinished after 3 of 3 epochs" in found.text


MISTAKES = [
    ([], "no runs to report on"),
    (["nowhere"], "nowhere does not exist"),
    (["empty"], "empty is not the folder of a run and contains no runs"),
    (["file.txt"], "file.txt is a file and contains no runs"),
]


@pytest.mark.parametrize(("names", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_paths_without_runs_are_described(
    names: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").touch()
    with pytest.raises(ValueError, match=message) as error:
        collect_runs([Path(name) for name in names])
    assert "pass folders of finished runs" in str(error.value)


def write_other(root: Path, classes: tuple[str, ...], **fields: Any) -> Path:
    labels = torch.arange(40) % len(classes)
    recipe = dataclasses.replace(QUICK, **fields)
    return write_run(root, recipe, make_predictions(torch.randn(40, len(classes)), labels, (), classes))


def test_runs_of_different_datasets_are_listed(tmp_path: Path):
    for dataset in ("photos", "digits"):
        write_other(tmp_path, ("a", "b"), dataset=dataset, method="erm")
    with pytest.raises(ValueError, match="of 2 datasets") as error:
        collect_runs([tmp_path])
    assert "photos: 1 run such as" in str(error.value)
    assert "make a report for each" in str(error.value)


def test_runs_of_different_class_lists_are_listed(tmp_path: Path):
    write_other(tmp_path, ("cat", "dog"), dataset="photos", method="erm")
    write_other(tmp_path, ("cat", "dog", "owl"), dataset="photos", method="mixup")
    with pytest.raises(ValueError, match="different classes") as error:
        report_runs([tmp_path], tmp_path / "report.html", Options(Path("data"), "cpu"))
    assert "owl" in str(error.value)


def test_runs_tested_on_different_images_are_paired_by_seed_alone(tmp_path: Path):
    for seed in range(2):
        for number, method in enumerate(("erm", "mixup")):
            labels = torch.arange(40 + number) % 2
            recipe = dataclasses.replace(QUICK, dataset="photos", method=method, seed=seed)
            scores = torch.randn(len(labels), 2)
            write_run(tmp_path, recipe, make_predictions(scores, labels, (), ("cat", "dog")))
    _, study = report_runs([tmp_path], tmp_path / "report.html", Options(Path("data"), "cpu"))
    assert not any(sample.images for sample in study.looks[-1].samples.values())
    assert "not new test images" in study.footnote
    assert "learning rate" not in study.footnote  # of any runs, which may differ in it


def test_evaluations_of_shifted_data_are_averaged_over_corruptions_and_runs(copied: Path, tmp_path: Path):
    for number, folder in enumerate(sorted(copied.parent.glob("*.mixup.s?.*"))):
        table = {name: [{"accuracy": 50.0 - 5 * k + number} for k in range(5)] for name in ("fog", "snow")}
        table["snow"] = [{"accuracy": one["accuracy"] + 2} for one in table["snow"]]
        stored = {"format": 1, "identity": {}, "corruptions": table}
        stored["clean"] = {"accuracy": 60.0, "fitted_temperature": 1.0}
        stored["ood"] = {"cats": {"auroc": 70.0 + number, "fpr95": 40.0, "images": 10}}
        (folder / "evaluation.json").write_text(json.dumps(stored))
    found, _ = make_page(copied, out=tmp_path / "report.html")
    shifted = found.data["shifted"]
    names = [one["name"] for one in found.data["variants"]]
    assert shifted["corruptions"] == ["fog", "snow"]
    assert shifted["accuracy"][names.index("mixup")] == [60.0, 51.5, 46.5, 41.5, 36.5, 31.5]
    assert shifted["accuracy"][names.index("erm")] is None
    assert shifted["outside"]["cats"][names.index("mixup")]["auroc"] == 70.5


def test_runs_evaluated_on_other_images_of_one_name_are_not_compared(copied: Path, tmp_path: Path):
    runs = [next(copied.parent.glob(f"*.{method}.s0.*")) for method in ("erm", "mixup")]
    for fingerprints, shown in ((("a", "b"), []), (("a", "a"), ["photos"])):
        for folder, fingerprint in zip(runs, fingerprints, strict=True):
            other = {"auroc": 60.0, "fpr95": 90.0, "images": 9, "skipped": 0, "fingerprint": fingerprint}
            empty = {"format": 1, "identity": {}, "clean": {}, "corruptions": {}}
            (folder / "evaluation.json").write_text(json.dumps(empty | {"ood": {"photos": other}}))
        found, _ = make_page(copied, out=tmp_path / "report.html")
        assert list(found.data["shifted"]["outside"]) == shown
        notes = " ".join(found.data["shifted"]["notes"])
        assert ("different images in the folder photos" in notes) == (not shown)


def test_an_evaluation_of_other_weights_is_not_shown(copied: Path, tmp_path: Path):
    folder = next(copied.parent.glob("*.mixup.s0.*"))
    stored = {
        "format": 1,
        "identity": {"checkpoint": "0123456789ab"},
        "clean": {},
        "corruptions": {},
        "ood": {},
    }
    (folder / "evaluation.json").write_text(json.dumps(stored))
    found, _ = make_page(copied, out=tmp_path / "report.html")
    assert "weights that the run no longer has" in found.data["shifted"]["notes"][0]
    assert set(found.data["shifted"]["accuracy"]) == {None}


def test_a_damaged_evaluation_is_named(copied: Path, tmp_path: Path):
    folder = next(copied.parent.glob("*.mixup.s0.*"))
    (folder / "evaluation.json").write_text("{")
    found, _ = make_page(copied, out=tmp_path / "report.html")
    assert "evaluation.json is damaged" in found.data["shifted"]["notes"][0]


RECIPES: list[Recipe] = [
    dataclasses.replace(QUICK, dataset="digits"),
    dataclasses.replace(QUICK, dataset="my photos", per_class=20, imbalance=0.01, epochs=7, flip=True),
    dataclasses.replace(FINETUNE, dataset="x", min_steps=0, weights="a.safetensors", clip_norm=None, seed=3),
    Recipe(dataset="cifar10", lr_drops=(10, 20), negatives=("pairs", "classes"), nesterov=True, ema=0.99),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.dataset)
def test_the_command_to_repeat_has_the_same_recipe(recipe: Recipe):
    words = shlex.split(repeat_command(recipe, ["erm", "mixup"], range(3, 5), "mixup"))
    assert words[:2] == ["icmixup", "compare"]
    name = words[words.index("--recipe") + 1]
    flags = parse(words[1:], name)
    assert dataclasses.replace(flags.shared_recipe(), method=recipe.method, seed=recipe.seed) == recipe
    assert flags.named_methods() == ("erm", "mixup")
    assert list(flags.seed_range()) == [3, 4]


def test_the_command_to_repeat_does_not_take_a_folder_for_a_flag():
    recipe = dataclasses.replace(QUICK, dataset="-photos")
    assert "compare ./-photos --methods" in repeat_command(recipe, ["erm"], range(1), "erm")


def test_the_page_is_rewritten_after_every_run_and_opened_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    states: list[tuple[int, int] | None] = []
    opened: list[str] = []
    write = make.write_page

    def record(path: Path, study: Any, parts: Any) -> Path:
        states.append(parts.progress and (parts.progress.done, parts.progress.total))
        return write(path, study, parts)

    monkeypatch.setattr(make, "write_page", record)
    monkeypatch.setattr("webbrowser.open", lambda uri: opened.append(uri) or True)
    monkeypatch.setenv("DISPLAY", ":0")
    args = ["compare", "digits", *TINY, "--epochs", "1", "--methods", "erm", "mixup", "--seeds", "2"]
    args += ["--device", "cpu", "--workers", "1", "--out", str(tmp_path), "--name", "one", "--open"]
    assert main(args) == 0
    assert states == [(1, 4), (2, 4), (3, 4), (4, 4), None]
    assert opened == [(tmp_path / "one" / "report.html").as_uri()]
    found = Page(tmp_path / "one" / "report.html")
    assert found.data["reload"] == 0
    assert found.data["between"]["reason"] == ""
    states.clear()
    assert main(args[:-1]) == 0  # all runs are finished: one page
    assert states == [None]
    shutil.rmtree(tmp_path / "one")
    assert main([*args[:-1], "--no-report"]) == 0
    assert not (tmp_path / "one" / "report.html").exists()


def test_without_a_screen_nothing_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("webbrowser.open", lambda uri: pytest.fail(f"{uri} was opened"))
    open_in_browser(tmp_path / "report.html")
    assert f"open {tmp_path / 'report.html'}" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_does_not_stop_the_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "one" / "report.html").mkdir(parents=True)
    args = ["compare", "digits", *TINY, "--epochs", "1", "--methods", "erm", "mixup", "--seeds", "1"]
    args += ["--device", "cpu", "--workers", "1", "--out", str(tmp_path), "--name", "one"]
    assert main(args) == 0
    printed = capsys.readouterr()
    assert "Verdict" in printed.out
    assert "report.html could not be written" in printed.err
    assert len(list(tmp_path.glob("*/result.json"))) == 2


def test_the_page_of_runs_in_progress_says_how_far_they_are(trained: Path, tmp_path: Path):
    comparison = read_comparison(trained / "comparison.json")
    shutil.copytree(trained.parent, tmp_path / "runs")
    from icmixup.lab.analysis.report.data import Progress
    from icmixup.lab.training.execution import Execution

    execution = Execution(out=tmp_path / "runs", data_dir=Path("data"), device="cpu")
    folder = tmp_path / "runs" / "comparison"
    path = make.report_comparison(comparison, folder, execution, progress=Progress(6, 9, "about 5:09 left"))
    found = Page(path)
    assert "6 of 9 runs, about 5:09 left" in " ".join(found.text.split())
    assert "So far: " in found.text
    assert found.data["reload"] > 0
    assert path.name == live.REPORT_FILE


def test_runs_that_are_still_to_be_trained_have_not_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pages: list[Page] = []
    write = live.LiveReport.write

    def keep(report: live.LiveReport, display: Any) -> None:
        write(report, display)
        pages.append(Page(report.path))

    monkeypatch.setattr(live.LiveReport, "write", keep)
    args = ["compare", "digits", *TINY, "--epochs", "1", "--methods", "erm", "mixup", "--seeds", "2"]
    assert main([*args, "--device", "cpu", "--workers", "1", "--out", str(tmp_path)]) == 0
    assert len(pages) == 4
    assert not any("failed" in page.text for page in pages)


@pytest.mark.parametrize("flag", ["--to", "--out"])
def test_report_prints_its_file_and_refuses_a_folder(
    flag: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    page = tmp_path / "page.html"
    assert main(["report", str(trained), flag, str(page), "--device", "cpu"]) == 0
    assert capsys.readouterr().out.strip() == str(page)
    assert main(["report", str(trained), flag, str(tmp_path)]) == 2
    assert "--to must be a file" in capsys.readouterr().err


def test_the_page_in_the_documentation_is_small_and_loads_nothing():
    docs = Path(__file__).parents[4] / "docs"
    path = docs / "_extra" / "demo-report.html"
    assert path.stat().st_size < LIMIT
    test_the_page_loads_nothing(Page(path))
    assert "demo-report.html" in (docs / "report.md").read_text()
    for picture in docs.glob("report-*.png"):
        assert picture.stat().st_size < 200_000
        assert picture.name in (docs.parent / "README.md").read_text()


def test_runs_record_their_peak_memory(trained: Path):
    rows = [json.loads(path.read_text()) for path in trained.parent.glob("*/result.json")]
    assert all(50 < row["memory_mb"] < 50_000 for row in rows)
