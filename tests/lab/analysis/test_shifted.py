"""Runs on shifted data: real runs on digits, compared with other routes to the same numbers; reuse, resume
and bad input."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import roc_auc_score, roc_curve

from icmixup.lab.analysis.corruptions import STRENGTHS, corrupt
from icmixup.lab.analysis.other_images import confidence, list_others, separation
from icmixup.lab.analysis.robustness import (
    evaluations_as_csv,
    evaluations_as_json,
    pick_baseline_line,
    summarise,
)
from icmixup.lab.analysis.runs import load_model
from icmixup.lab.analysis.shifted import Evaluated, evaluate_runs, find_runs, make_plan, shifted_metrics
from icmixup.lab.datasets import DataSpec, load_dataset
from icmixup.lab.training.evaluate import evaluate, split_scores
from icmixup.lab.training.execution import Execution
from icmixup.lab.training.loop import train
from icmixup.lab.training.recipe import QUICK, Recipe
from icmixup.lab.training.run_folder import Run

CPU = torch.device("cpu")
TINY = dataclasses.replace(QUICK, dataset="digits", per_class=40, epochs=6, batch_size=50, eval_every=6)
FEW = make_plan(["impulse_noise", "contrast"], [1, 5])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """mixup with two seeds, ic-mixup with one, trained once and copied for each test."""
    root = tmp_path_factory.mktemp("trained")
    for method, seed in (("mixup", 0), ("mixup", 1), ("ic-mixup", 0)):
        train(dataclasses.replace(TINY, method=method, seed=seed), Execution(out=root, data_dir=root))
    return root


@pytest.fixture
def root(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "runs"))


@pytest.fixture
def others(tmp_path: Path) -> Path:
    """A folder of 30 images of noise, and a text file."""
    folder = tmp_path / "noise"
    (folder / "deep").mkdir(parents=True)
    generator = np.random.default_rng(0)
    for number in range(30):
        pixels = generator.integers(0, 256, (12, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / ("deep" if number % 2 else "") / f"{number}.png")
    (folder / "notes.txt").write_text("not an image")
    return folder


def run_of(root: Path, method: str, seed: int = 0) -> Run:
    return next(r for r in find_runs([root]) if (r.recipe.method, r.recipe.seed) == (method, seed))


def evaluate_few(root: Path, plan=FEW, **options) -> list[Evaluated]:
    return evaluate_runs(find_runs([root]), plan, data_dir=root, device=CPU, **options)


def test_a_trained_network_loses_accuracy_under_corruption(root: Path) -> None:
    plan = make_plan(["glass_blur", "fog", "contrast", "motion_blur"], [5])
    for entry in evaluate_few(root, plan):
        clean = entry.stored["clean"]["accuracy"]
        assert clean > 85
        for name in plan.corruptions:
            assert entry.stored["corruptions"][name][4]["accuracy"] < clean - 5
            assert entry.stored["corruptions"][name][0] == {}


def test_metrics_are_those_of_the_corrupted_test_set_classified_at_once(root: Path) -> None:
    run = run_of(root, "ic-mixup")
    data = load_dataset(DataSpec("digits", per_class=40), root)
    model = load_model(run, data, CPU)
    changed = dataclasses.replace(data.test, images=corrupt(data.test.images, "contrast", 5))
    scores = split_scores(model, changed, data.mean, data.std, autocast_dtype=None)
    stored = {entry.run.folder: entry.stored for entry in evaluate_few(root)}[run.folder]
    found = stored["corruptions"]["contrast"][4]
    expected = evaluate(scores, data.test.labels, data.class_counts)
    for name in ("accuracy", "nll", "calibration_error", "brier_score", "risk_coverage_area", "medium"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4), name
    per_class = [value for value in expected["class_accuracies"] if value is not None]
    assert found["balanced_accuracy"] == pytest.approx(np.mean(per_class), rel=1e-6)
    result = run.result()
    assert result is not None
    assert stored["clean"]["nll"] == pytest.approx(result["nll"], rel=1e-4)
    assert stored["clean"]["class_accuracies"] == pytest.approx(result["class_accuracies"])
    scaled = scores / stored["clean"]["fitted_temperature"]
    log_likelihood = scaled.log_softmax(dim=1)[torch.arange(len(scores)), data.test.labels].mean().item()
    assert found["nll_scaled"] == pytest.approx(-log_likelihood, rel=1e-4)


def test_the_file_has_the_documented_format(root: Path, others: Path) -> None:
    evaluate_few(root, make_plan(["fog"], [2], [others]))
    stored = json.loads((run_of(root, "mixup").folder / "evaluation.json").read_text())
    assert list(stored) == ["format", "identity", "images", "clean", "corruptions", "ood"]
    assert (stored["format"], stored["images"]) == (1, 599)
    assert [entry != {} for entry in stored["corruptions"]["fog"]] == [False, True, False, False, False]
    assert set(stored["ood"]) == {"noise"}
    assert {"auroc", "fpr95", "images", "skipped", "fingerprint"} == set(stored["ood"]["noise"])
    assert (stored["ood"]["noise"]["images"], stored["ood"]["noise"]["skipped"]) == (30, 0)


def test_what_was_evaluated_is_reused_and_extended(root: Path, others: Path) -> None:
    first = evaluate_few(root)
    counted: list[int] = []

    def progress(what: str, done: int, total: int) -> None:
        counted.append(total)

    again = evaluate_few(root, on_progress=progress)
    assert counted == []
    assert [entry.stored for entry in again] == [entry.stored for entry in first]
    wider = make_plan(["impulse_noise", "contrast", "fog"], [5], [others])
    evaluate_few(root, wider, on_progress=progress)
    assert counted[-1] == 3 * (599 + 599 + 30)  # fog, clean images to compare with, other images
    assert evaluate_few(root, wider)[0].stored["corruptions"]["contrast"][0] != {}  # strength 1 is kept
    counted.clear()
    evaluate_few(root, fresh=True, on_progress=progress)
    assert counted[-1] == 3 * 599 * 5


def test_other_weights_or_another_version_are_evaluated_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate_few(root)
    counted: list[int] = []
    run = run_of(root, "mixup", 0)
    other = run_of(root, "mixup", 1)
    path = run.folder / "evaluation.json"
    path.write_bytes((other.folder / "evaluation.json").read_bytes())  # a file of another run
    evaluate_few(root, on_progress=lambda what, done, total: counted.append(total))
    assert counted[-1] == 599 * 5
    monkeypatch.setattr("icmixup.lab.analysis.stored_evaluation.VERSION", 99)
    evaluate_few(root, on_progress=lambda what, done, total: counted.append(total))
    assert counted[-1] == 3 * 599 * 5


def test_changed_other_images_are_evaluated_again(root: Path, others: Path) -> None:
    plan = make_plan(["contrast"], [1], [others])
    before = evaluate_few(root, plan)[0].stored["ood"]["noise"]
    (others / "0.png").unlink()
    after = evaluate_few(root, make_plan(["contrast"], [1], [others]))[0].stored["ood"]["noise"]
    assert (before["images"], after["images"]) == (30, 29)


def test_an_interrupted_evaluation_keeps_finished_corruptions(root: Path) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if what.startswith("contrast, strength 5"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate_few(root, on_progress=interrupt)
    counted: list[int] = []
    evaluate_few(root, on_progress=lambda what, done, total: counted.append(total))
    assert counted[-1] == 3 * 599 * 2  # contrast alone, at both strengths


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 2}', '{"format": 1, "identity": 3}'])
def test_a_damaged_file_is_reported_and_replaced(root: Path, content: str) -> None:
    path = run_of(root, "ic-mixup").folder / "evaluation.json"
    path.write_text(content)
    with pytest.warns(UserWarning, match=r"evaluation\.json .*; the run is evaluated again"):
        evaluate_few(root, make_plan(["contrast"], [1]))
    assert json.loads(path.read_text())["corruptions"]["contrast"][0]["accuracy"] > 0


def test_separation_agrees_with_scikit_learn_with_and_without_ties() -> None:
    generator = torch.Generator().manual_seed(0)
    for digits in (1, 6):
        known = (torch.rand(500, generator=generator).double() * 0.8 + 0.2).round(decimals=digits)
        other = torch.rand(300, generator=generator).double().round(decimals=digits)
        found = separation(known, other)
        truth = np.r_[np.ones(500), np.zeros(300)]
        scores = np.r_[known.numpy(), other.numpy()]
        assert found["auroc"] == pytest.approx(100 * roc_auc_score(truth, scores))
        false, true, _ = roc_curve(truth, scores, drop_intermediate=False)
        assert found["fpr95"] == pytest.approx(100 * false[np.argmax(true >= 0.95)])


def test_separation_of_disjoint_and_of_equal_scores() -> None:
    high, low = torch.tensor([0.8, 0.9]), torch.tensor([0.1, 0.2, 0.3])
    assert separation(high, low) == {"auroc": 100.0, "fpr95": 0.0}
    assert separation(low, high) == {"auroc": 0.0, "fpr95": 100.0}
    assert separation(high[:1], high[:1]) == {"auroc": 50.0, "fpr95": 100.0}


def test_confidence_is_the_largest_probability() -> None:
    scores = torch.tensor([[0.0, 0.0], [800.0, 0.0]])
    assert confidence(scores).tolist() == [0.5, 1.0]


def test_other_images_are_found_by_content(others: Path, tmp_path: Path) -> None:
    (found,) = list_others([others])
    assert (found.name, len(found.files)) == ("noise", 30)
    moved = Path(shutil.copytree(others, tmp_path / "b" / "noise"))
    first, second = list_others([others, moved])
    assert first.fingerprint == second.fingerprint
    assert (first.name, second.name) == (str(others), str(moved))  # the last part alone would mean both


def test_unreadable_other_images_are_counted(root: Path, others: Path, tmp_path: Path) -> None:
    (others / "broken.png").write_bytes(b"not a png")
    runs = [run_of(root, "mixup")]
    with pytest.warns(UserWarning, match=r"left out: .*broken\.png cannot be read"):
        (entry,) = evaluate_runs(runs, make_plan(["contrast"], [1], [others]), data_dir=root, device=CPU)
    assert (entry.stored["ood"]["noise"]["images"], entry.stored["ood"]["noise"]["skipped"]) == (30, 1)
    lost = tmp_path / "lost"
    lost.mkdir()
    (lost / "a.png").write_bytes(b"")
    with (
        pytest.warns(UserWarning, match="left out"),
        pytest.raises(ValueError, match="none of the 1 image files of lost"),
    ):
        evaluate_runs(runs, make_plan(["contrast"], [1], [lost]), data_dir=root, device=CPU)


def test_a_broken_link_or_a_name_that_is_not_utf8_does_not_end_the_command(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "whole.png")
    (tmp_path / "broken.png").symlink_to(tmp_path / "nowhere.png")
    (tmp_path / os.fsdecode(b"caf\xe9.png")).write_bytes((tmp_path / "whole.png").read_bytes())
    (found,) = list_others([tmp_path])
    assert len(found.files) == 3


def test_bad_plans_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown corruption 'fogg'; did you mean fog\?"):
        make_plan(["fogg"], [1])
    for strength in (0, 6):
        with pytest.raises(ValueError, match=f"strengths are 1 .* to 5 .*, got {strength}"):
            make_plan(["fog"], [strength])
    with pytest.raises(ValueError, match="at least one corruption and one strength"):
        make_plan(["fog"], [])
    with pytest.raises(ValueError, match="contains no image files"):
        make_plan(["fog"], [1], [tmp_path])
    with pytest.raises(ValueError, match="does not exist"):
        make_plan(["fog"], [1], [tmp_path / "nowhere"])
    (tmp_path / "a.png").touch()
    with pytest.raises(ValueError, match=r"a\.png is a file; --ood takes folders"):
        make_plan(["fog"], [1], [tmp_path / "a.png"])


def test_folders_without_finished_runs_are_named(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no runs to evaluate"):
        find_runs([])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="is not the folder of a run"):
        find_runs([tmp_path / "empty"])
    run = run_of(root, "ic-mixup")
    (run.folder / "result.json").unlink()
    with pytest.raises(ValueError, match="is unfinished after 6 of 6 epochs"):
        find_runs([run.folder])
    with pytest.warns(UserWarning, match="left out: .*ic-mixup.* is unfinished"):
        assert [run.recipe.method for run in find_runs([root])] == ["mixup", "mixup"]


def test_two_runs_of_one_recipe_are_not_counted_as_two_seeds(root: Path) -> None:
    run = run_of(root, "mixup")
    shutil.copytree(run.folder, root / "again")
    with pytest.raises(ValueError, match=r"again and .* are runs of the same recipe and seed"):
        find_runs([root])


def test_a_run_without_weights_is_named(root: Path) -> None:
    run = run_of(root, "mixup")
    (run.folder / "checkpoint.pt").unlink()
    with pytest.raises(ValueError, match=r"has no weights: there is no checkpoint\.pt"):
        evaluate_runs([run], FEW, data_dir=root, device=CPU)


def test_runs_of_different_datasets_are_rejected_before_anything_is_evaluated(
    root: Path, tmp_path: Path
) -> None:
    photos = tmp_path / "photos"
    for label in ("cat", "dog"):
        (photos / label).mkdir(parents=True)
        for number in range(6):
            Image.new("RGB", (8, 8), (40 * number, 90, 200)).save(photos / label / f"{number}.png")
    recipe = dataclasses.replace(
        TINY, dataset=str(photos), per_class=None, epochs=1, batch_size=4, eval_every=1, method="erm"
    )
    train(recipe, Execution(out=root, data_dir=root))
    with pytest.raises(
        ValueError, match=r"tested on 2 different sets of images: .*\(599 images of 10 classes\)"
    ):
        evaluate_few(root)
    assert list(root.glob("*/evaluation.json")) == []


def test_runs_that_differ_in_their_training_images_share_a_table(root: Path) -> None:
    recipe = dataclasses.replace(TINY, method="mixup", per_class=20, epochs=1, eval_every=1)
    train(recipe, Execution(out=root, data_dir=root))
    found = evaluate_few(root, make_plan(["contrast"], [1]))
    assert [entry.line for entry in found if "per_class=20" in entry.line] == [
        "mixup per_class=20 epochs=1 eval_every=1"
    ]


def test_runs_on_features_are_rejected(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "features.npz"
    numbers, labels = np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32), np.arange(40) % 2
    np.savez(path, train_features=numbers, train_labels=labels, test_features=numbers, test_labels=labels)
    recipe = dataclasses.replace(
        TINY, dataset=str(path), per_class=None, epochs=1, batch_size=20, eval_every=1, method="erm"
    )
    folder = root / train(recipe, Execution(out=root, data_dir=root))["folder"]
    with pytest.raises(ValueError, match="was trained on features, and only images can be corrupted"):
        evaluate_runs(find_runs([folder]), FEW, data_dir=root, device=CPU)


def stored_of(accuracies: dict[str, list[float]], clean: float = 90.0) -> dict:
    entries = {name: [{"accuracy": a, "nll": 1.0} for a in values] for name, values in accuracies.items()}
    return {
        "clean": {"accuracy": clean, "nll": 0.5, "class_accuracies": [clean]},
        "corruptions": entries,
        "ood": {"x": {"auroc": clean, "fpr95": 10.0, "images": 7, "fingerprint": "f"}},
    }


def some_evaluations() -> list[Evaluated]:
    def entry(method: str, seed: int, fog: list[float], snow: list[float]) -> Evaluated:
        run = Run(Path(f"{method}.{seed}"), Recipe(method=method, seed=seed))
        return Evaluated(run, method, stored_of({"fog": fog, "snow": snow}, clean=90.0 + seed))

    return [
        entry("mixup", 0, [80, 70, 60, 50, 40], [60] * 5),
        entry("mixup", 1, [82, 72, 62, 52, 42], [60] * 5),
        entry("erm", 0, [70, 60, 50, 40, 30], [80] * 5),
        entry("erm", 1, [71, 61, 51, 41, 31], [80] * 5),
    ]


def test_summaries_are_means_over_seeds_corruptions_and_strengths() -> None:
    mixup, erm = sorted(
        summarise(some_evaluations(), make_plan(["fog", "snow"], STRENGTHS), "mixup"),
        key=lambda summary: summary.line,
        reverse=True,
    )
    assert mixup.corrupted["accuracy"] == pytest.approx((61 + 60) / 2)
    assert mixup.by_corruption == pytest.approx({"fog": 61, "snow": 60})
    assert erm.by_strength[5] == pytest.approx((30.5 + 80) / 2)
    assert erm.clean["accuracy"] == 90.5
    # By hand: fog (100 - 50.5) / (100 - 61), snow 20 / 40.
    assert erm.corruption_error == pytest.approx(100 * (49.5 / 39 + 0.5) / 2)
    assert mixup.corruption_error is None
    assert erm.difference is not None
    assert erm.difference.mean == pytest.approx((50.5 + 80) / 2 - 60.5)
    assert erm.difference.pairs == 2
    assert mixup.difference is None


def test_a_summary_uses_only_the_chosen_corruptions_and_strengths() -> None:
    (first, _) = summarise(some_evaluations(), make_plan(["fog"], [1]), None)
    assert (first.line, first.corrupted["accuracy"]) == ("mixup", 81)
    assert first.corruption_error is None


@pytest.mark.parametrize("missing", [1, 3], ids=["of the baseline", "of the method"])
def test_the_corruption_error_is_over_the_seeds_of_both(missing: int) -> None:
    entries = some_evaluations()
    del entries[missing]  # seed 1, in which fog is easier
    found = {s.line: s for s in summarise(entries, make_plan(["fog", "snow"], STRENGTHS), "mixup")}
    assert found["erm"].corruption_error == pytest.approx(100 * (50 / 40 + 0.5) / 2)


def test_lines_without_a_common_seed_have_no_corruption_error() -> None:
    _, mixup, erm, _ = some_evaluations()
    found = {s.line: s for s in summarise([mixup, erm], make_plan(["fog"], STRENGTHS), "mixup")}
    assert found["erm"].corruption_error is None


def test_a_baseline_without_errors_has_no_corruption_error() -> None:
    entries = some_evaluations()
    for entry in entries[:2]:
        entry.stored["corruptions"]["snow"] = [{"accuracy": 100.0, "nll": 1.0}] * 5
    found = {s.line: s for s in summarise(entries, make_plan(["fog", "snow"], STRENGTHS), "mixup")}
    assert found["erm"].corruption_error is None


def test_the_baseline_is_a_method_or_a_line() -> None:
    runs = [entry.run for entry in some_evaluations()]
    assert pick_baseline_line(runs, None) == "mixup"
    assert pick_baseline_line(runs, "erm") == "erm"
    assert pick_baseline_line(runs[2:], None) is None
    with pytest.raises(
        ValueError, match="baseline 'remix' is not among the methods of these runs: mixup, erm"
    ):
        pick_baseline_line(runs, "remix")
    alphas = [Run(Path(str(alpha)), Recipe(method="mixup", alpha=alpha)) for alpha in (0.5, 0.7)]
    with pytest.raises(ValueError, match=r"means 2 of the lines .*: mixup alpha=0\.5, mixup alpha=0\.7"):
        pick_baseline_line(alphas, "mixup")
    assert pick_baseline_line(alphas, "mixup alpha=0.7") == "mixup alpha=0.7"


def test_files_have_every_number() -> None:
    entries = some_evaluations()
    summaries = summarise(entries, make_plan(["fog", "snow"], STRENGTHS), "mixup")
    text = json.dumps(evaluations_as_json(entries, summaries, "mixup"), allow_nan=False)
    stored = json.loads(text)
    assert stored["runs"][0]["evaluation"]["corruptions"]["fog"][2]["accuracy"] == 60
    assert stored["methods"]["erm"]["difference"]["pairs"] == 2
    lines = evaluations_as_csv(entries).splitlines()
    assert lines[0].startswith("line,run,dataset,model,method,seed,images,strength,accuracy,nll")
    assert len(lines) == 1 + 4 * (1 + 10 + 1)


def test_scaled_metrics_under_shift_use_the_given_temperature() -> None:
    generator = torch.Generator().manual_seed(0)
    scores, labels = torch.randn(50, 3, generator=generator), torch.arange(50) % 3
    counts = torch.tensor([5, 5, 5])
    doubled = shifted_metrics(scores, labels, counts, 2.0)
    assert doubled["nll_scaled"] == pytest.approx(shifted_metrics(scores / 2, labels, counts, 1.0)["nll"])
