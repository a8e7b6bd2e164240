"""The report in headless Chromium: it opens without errors, its controls work, and it is accessible."""

from __future__ import annotations

import base64
import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from report_runs import HOSTILE

from icmixup.lab.analysis.report import page as page_module
from icmixup.lab.analysis.report.data import Progress
from icmixup.lab.analysis.report.make import Options, report_comparison, report_runs
from icmixup.lab.cli import main
from icmixup.lab.comparison.compare import read_comparison
from icmixup.lab.training.execution import Execution

SECTIONS = ("result", "differences", "classes", "calibration", "mistakes", "training", "between")
A4_PAGES = re.compile(rb"/Type\s*/Page\b(?!s)")
# Chromium takes this long on two busy cores; on an idle machine a tenth of it.
OPENS_WITHIN = 2.0


@pytest.fixture(scope="module")
def report(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the trained runs, with an evaluation on shifted data."""
    runs = tmp_path_factory.mktemp("browser") / "runs"
    shutil.copytree(trained.parent, runs)
    for folder in runs.glob("*.s?.*"):
        table = {name: [{"accuracy": 50.0 - 5 * k} for k in range(5)] for name in ("fog", "snow")}
        stored = {"format": 1, "identity": {}, "corruptions": table}
        stored["clean"] = {"accuracy": 60.0, "fitted_temperature": 1.0}
        stored["ood"] = {"cats": {"auroc": 70.0, "fpr95": 40.0, "images": 10}}
        (folder / "evaluation.json").write_text(json.dumps(stored))
    return report_runs([runs / "comparison"], None, Options(Path("data"), "cpu"))[0]


@pytest.fixture
def open_page(browser: Any) -> Callable[..., Any]:
    """Opens a page on a screen of some size, in light or dark colours; fails if the console has errors."""

    def opened(path: Path, width: int = 1280, dark: bool = False) -> Any:
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme, still]})
        browser.get_log("browser")
        browser.get(path.as_uri())
        assert [entry["message"] for entry in browser.get_log("browser")] == []
        return browser

    return opened


def find(browser: Any, selector: str) -> Any:
    return browser.find_element("css selector", selector)


def texts(browser: Any, selector: str) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].map((node) => node.textContent)"
    return list(browser.execute_script(script, selector))


def choose(browser: Any, selector: str, text: str) -> None:
    from selenium.webdriver.support.ui import Select

    Select(find(browser, selector)).select_by_visible_text(text)


@pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])
def test_every_section_is_drawn_and_nothing_is_wider_than_the_screen(
    open_page: Callable[..., Any], report: Path, width: int
):
    browser = open_page(report, width)
    for section in (*SECTIONS, "shifted"):
        assert find(browser, f"#{section}").is_displayed()
        assert texts(browser, f"#{section} h2, #{section} h1")[0]
        assert texts(browser, f"#{section} .lead, #{section} .verdict")[0]
    for chart in (
        "forest",
        "sizes",
        "reliability",
        "risk",
        "loss",
        "accuracy",
        "along",
        "norms",
        "robustness",
    ):
        assert find(browser, f"#{chart} svg").size["height"] > 60, chart
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    boxes = browser.execute_script(
        "return [...document.querySelectorAll('svg text')].map((text) => [text.textContent, "
        "text.getBoundingClientRect().left, text.getBoundingClientRect().right, text.closest('.scroll')])"
    )
    assert [
        text for text, left, right, inside in boxes if not inside and (left < -1 or right > width + 1)
    ] == []


def test_long_names_of_classes_are_not_wider_than_a_phone(open_page: Callable[..., Any], tmp_path: Path):
    for shade, letter in ((0, "a"), (255, "b")):
        (tmp_path / "photos" / (letter * 80)).mkdir(parents=True)
        for number in range(5):
            image = Image.new("RGB", (8, 8), (shade, number, 0))
            image.save(tmp_path / "photos" / (letter * 80) / f"{number}.png")
    args = ["compare", str(tmp_path / "photos"), "--methods", "mixup", "--seeds", "1", "--epochs", "1"]
    assert main([*args, "--device", "cpu", "--out", str(tmp_path / "runs"), "--name", "c"]) == 0
    browser = open_page(tmp_path / "runs" / "c" / "report.html", 390)
    assert "a" * 80 in find(browser, "#along-key").text
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390


def test_thumbnails_are_images(open_page: Callable[..., Any], report: Path):
    browser = open_page(report)
    script = "return [...document.querySelectorAll('.tiles img')].map((image) => image.naturalWidth)"
    widths = browser.execute_script(script)
    assert len(widths) == 16
    assert set(widths) == {8}


def test_the_baseline_switch_changes_the_differences(
    open_page: Callable[..., Any], report: Path, trained: Path
):
    browser = open_page(report)
    stored = read_comparison(trained / "comparison.json")
    expected = {s.method: s.difference for s in stored.standings if s.difference is not None}

    def shown() -> dict[str, str]:
        label = find(browser, "#forest svg").get_attribute("aria-label")
        return dict(entry.split(" ", 1) for entry in label.split(": ", 1)[1].split("; "))

    def minus(text: str) -> str:
        return text.replace("-", "\u2212")

    assert {name: text.removesuffix(" *") for name, text in shown().items()} == {
        name: minus(str(difference)) for name, difference in expected.items()
    }
    before = shown()
    choose(browser, "#baseline", "ic-mixup")
    assert set(shown()) == {"erm", "mixup"}
    # The same difference, seen from the other side.
    turned = before["ic-mixup"].split(" ")[0]
    flip = {"+": "\u2212", "\u2212": "+"}
    assert shown()["mixup"].split(" ")[0] == flip[turned[0]] + turned[1:]
    choose(browser, "#measure", "NLL")
    assert "left is better" in find(browser, "#forest").text
    assert "cover new seeds, not new test images" in find(browser, "#forest-note").text


def test_headings_sort_and_the_search_filters(open_page: Callable[..., Any], report: Path):
    browser = open_page(report)
    names = lambda: texts(browser, "#class-table tbody th")  # noqa: E731
    assert names() == [str(digit) for digit in range(10)]
    buttons = browser.find_elements("css selector", "#class-table thead button")
    buttons[1].click()
    sizes = [int(text) for text in texts(browser, "#class-table tbody td:nth-child(2)")]
    assert sizes == sorted(sizes, reverse=True)
    assert find(browser, "#class-table thead th:nth-child(2)").get_attribute("aria-sort") == "descending"
    browser.switch_to.active_element.send_keys("\ue007")  # Enter, on the heading that still has the focus
    sizes = [int(text) for text in texts(browser, "#class-table tbody td:nth-child(2)")]
    assert sizes == sorted(sizes)
    find(browser, "#search").send_keys("7")
    assert names() == ["7"]
    assert find(browser, "#search-note").text == "1 of 10 classes"


def test_choosing_a_method_shows_its_mistakes(open_page: Callable[..., Any], report: Path):
    browser = open_page(report)
    before = find(browser, "#mistakes-left").text
    choose(browser, "#left", "erm")
    after = find(browser, "#mistakes-left").text
    assert after.startswith("erm")
    assert after != before


def pixels(browser: Any) -> list[int]:
    return list(
        browser.execute_script(
            "const canvas = document.getElementById('mixed');"
            "return [...canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data]"
        )
    )


def wait_until(condition: Callable[[], bool]) -> bool:
    """Whether the page does something within ten seconds: it draws pictures when they are loaded."""
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


def test_the_slider_mixes_the_images_and_moves_along_the_scores(open_page: Callable[..., Any], report: Path):
    browser = open_page(report)
    slider = find(browser, "#lam")
    assert wait_until(lambda: any(pixels(browser)))

    def move(keys: str) -> tuple[list[int], list[str]]:
        slider.send_keys(keys)
        return pixels(browser), texts(browser, "#along .sub")

    first, said_first = move("\ue010")  # End: lam = 1
    second, said_second = move("\ue011")  # Home: lam = 0
    assert find(browser, "#lam-value").text == "lam = 0.00"
    middle, _ = move("\ue014" * 10)  # ten steps to the right: lam = 0.5
    assert find(browser, "#lam-value").text == "lam = 0.50"
    assert slider.get_attribute("aria-valuetext").startswith("lam 0.50")
    assert first != second
    assert said_first != said_second
    assert all(abs((a + b) / 2 - c) <= 1.5 for a, b, c in zip(first, second, middle, strict=True))
    find(browser, ".pairs label:nth-of-type(2)").click()
    assert wait_until(lambda: pixels(browser) != middle)


def test_all_controls_are_reached_with_the_keyboard(open_page: Callable[..., Any], report: Path):
    browser = open_page(report)
    tab = {"type": "keyDown", "key": "Tab", "code": "Tab", "windowsVirtualKeyCode": 9}
    focused = "const one = document.activeElement; return one.id || one.name || one.className || one.tagName"
    reached = []
    for _ in range(60):
        browser.execute_cdp_cmd("Input.dispatchKeyEvent", tab)
        reached.append(browser.execute_script(focused))
    for wanted in ("skip", "baseline", "measure", "search", "left", "right", "pair", "lam", "scroll tall"):
        assert wanted in reached, f"{wanted} is not among {reached}"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_no_violation(open_page: Callable[..., Any], report: Path, axe_source: str, dark: bool):
    browser = open_page(report, dark=dark)
    browser.execute_script(axe_source)
    found = browser.execute_async_script(
        "const done = arguments[arguments.length - 1]; axe.run().then((found) => done(found.violations.map("
        "(one) => [one.id, one.nodes.map((node) => node.html + ' ' + node.failureSummary)])))"
    )
    assert found == []


def test_dark_colours_follow_the_system(open_page: Callable[..., Any], report: Path):
    script = "const style = getComputedStyle(document.body); return [style.backgroundColor, style.color]"

    def brightness(colour: str) -> int:
        return sum(map(int, re.findall(r"\d+", colour)[:3]))

    paper, ink = map(brightness, open_page(report).execute_script(script))
    assert paper > ink
    paper, ink = map(brightness, open_page(report, dark=True).execute_script(script))
    assert paper < ink


@pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])
def test_it_prints_on_two_pages(open_page: Callable[..., Any], large: Path, width: int):
    browser = open_page(large, width, dark=True)
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True, "printBackground": True})
    assert len(A4_PAGES.findall(base64.b64decode(printed["data"]))) == 2


def test_names_that_are_markup_are_shown_as_text(
    open_page: Callable[..., Any], hostile: Path, tmp_path: Path
):
    path, _ = report_runs([hostile], tmp_path / "report.html", Options(Path("data"), "cpu"))
    browser = open_page(path)
    assert sorted(texts(browser, "#class-table tbody th")) == sorted(HOSTILE)
    assert "<script>alert(1)</script>" in find(browser, "#mistakes").text
    assert browser.execute_script("return document.scripts.length") == 2
    assert browser.find_elements("css selector", "i, b, img") == []
    find(browser, "#search").send_keys("<script>alert(1)")
    assert texts(browser, "#class-table tbody th") == [HOSTILE[0]]


def test_a_large_comparison_opens_quickly(open_page: Callable[..., Any], large: Path):
    browser = open_page(large)
    timing = "const [page] = performance.getEntriesByType('navigation'); return page.loadEventEnd / 1000"
    assert 0 < browser.execute_script(timing) < OPENS_WITHIN
    assert len(texts(browser, "#class-table tbody tr")) == 100


def test_a_page_in_progress_loads_itself_again(
    open_page: Callable[..., Any], trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(page_module, "RELOAD_SECONDS", 1)
    comparison = read_comparison(trained / "comparison.json")
    execution = Execution(out=trained.parent, data_dir=Path("data"), device="cpu")

    def write(done: int) -> Path:
        progress = Progress(done, 9, "about 5:09 left")
        return report_comparison(comparison, tmp_path, execution, progress=progress)

    browser = open_page(write(6))
    assert "6 of 9 runs" in find(browser, "#progress").text
    assert "when all runs are finished" in find(browser, "#between").text
    write(7)
    assert wait_until(lambda: "7 of 9 runs" in "".join(texts(browser, "#progress")))
