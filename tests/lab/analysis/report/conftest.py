"""Runs for the tests of the report: a real comparison of digits, and folders written from random scores."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from report_runs import HOSTILE, METHODS, TINY, write_run

from icmixup.lab.analysis.report.data import Parts
from icmixup.lab.analysis.report.page import write_page
from icmixup.lab.analysis.report.study import collect_runs, study_runs
from icmixup.lab.analysis.report.summaries import Summary, summarise_predictions
from icmixup.lab.cli import main
from icmixup.lab.training.evaluate import evaluate
from icmixup.lab.training.predictions import make_predictions
from icmixup.lab.training.recipe import QUICK


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a comparison of three methods with two seeds; its runs are beside it."""
    out = tmp_path_factory.mktemp("report") / "runs"
    args = ["compare", "digits", *TINY, "--methods", *METHODS, "--seeds", "2", "--device", "cpu"]
    assert main([*args, "--workers", "1", "--out", str(out), "--name", "comparison"]) == 0
    return out / "comparison"


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may damage."""
    shutil.copytree(trained.parent, tmp_path / "runs")
    return tmp_path / "runs" / "comparison"


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs whose classes, files and dataset have names that are markup."""
    root = tmp_path_factory.mktemp("hostile")
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % len(HOSTILE)
    for method in METHODS:
        scores = torch.randn(60, len(HOSTILE), generator=generator)
        recipe = dataclasses.replace(QUICK, dataset="photos/<b>birds<", method=method, epochs=4)
        names = [f"{HOSTILE[label]}/<i>{number}.png" for number, label in enumerate(labels.tolist())]
        write_run(root, recipe, make_predictions(scores, labels, names, HOSTILE))
    return root


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of 24 runs of 100 classes and 10,000 test images.

    Fitting temperatures takes a second for each run, so that all share the calibration of one.
    """
    root = tmp_path_factory.mktemp("large")
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(10_000) % 100
    names = [f"class {number:03}" for number in range(100)]
    files = [f"test/{names[label]}/{row:05}.jpg" for row, label in enumerate(labels.tolist())]
    methods = [*METHODS, "remix", "ic-remix", "regmixup", "ic-regmixup", "balanced-mixup"]
    scores = torch.randn(10_000, 100, generator=generator)
    scores[torch.arange(10_000), labels] += 2.5
    summary = summarise_predictions(make_predictions(scores, labels, files, names))
    metrics = evaluate(scores, labels, torch.arange(100) + 1)
    summaries: dict[Path, Summary] = {}
    for number, (seed, method) in enumerate(itertools.product(range(3), methods)):
        correct = torch.rand(10_000, generator=generator).numpy() < 0.5 + number % 8 / 50
        recipe = dataclasses.replace(QUICK, dataset="photos", method=method, seed=seed)
        folder = write_run(root, recipe, metrics=metrics | {"accuracy": 100 * float(correct.mean())})
        summaries[folder.resolve()] = summary._replace(correct=correct)
    study = study_runs(collect_runs([root]), summaries)
    found = {key: summaries[run.folder] for key, run in study.runs.items()}
    return write_page(root / "report.html", study, Parts(found, class_counts=range(1, 101)))


@pytest.fixture(scope="session")
def axe_source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The source of axe-core, from a cache folder or the npm registry."""
    cached = Path.home() / ".cache" / "icmixup" / "axe-core" / "axe.min.js"
    if not cached.exists():
        if shutil.which("npm") is None:
            pytest.skip("axe-core is not cached, and npm, which could fetch it, is not installed")
        folder = tmp_path_factory.mktemp("axe")
        packed = subprocess.run(
            ["npm", "pack", "axe-core@4", "--silent"], cwd=folder, capture_output=True, text=True, timeout=60
        )
        if packed.returncode != 0:
            pytest.skip(f"axe-core is not cached, and npm could not fetch it: {packed.stderr.strip()[-200:]}")
        with tarfile.open(next(folder.glob("*.tgz"))) as archive:
            member = archive.extractfile("package/axe.min.js")
            assert member is not None
            content = member.read()
        cached.parent.mkdir(parents=True, exist_ok=True)
        cached.write_bytes(content)
    return cached.read_text()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Headless Chromium."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("Chromium and its driver are not installed (Debian: chromium, chromium-driver)")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,900"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=Service(driver))
    yield found
    found.quit()
