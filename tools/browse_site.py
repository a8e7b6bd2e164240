"""Open the built documentation in headless Chromium: pages have a title and no console error, search finds.

    make docs && python tools/browse_site.py build/site --screenshots build/screenshots

Needs Chromium and its driver (Debian: chromium, chromium-driver) and selenium.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

PAGES = {
    "index.html": "icmixup",
    "start.html": "Getting started",
    "guides/timm.html": "timm",
    "api.html": "API",
    "tutorial.html": "utorial",
}
WORD = "cached_backward"  # what the search must find
SECONDS = 20


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a web server for the folder: search needs one in some browsers."""
    handler = functools.partial(QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged."""


@contextmanager
def browser() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,1600"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def console_errors(driver: webdriver.Chrome) -> list[str]:
    entries = driver.get_log("browser")
    return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]


def visit(driver: webdriver.Chrome, address: str, screenshots: Path | None, name: str) -> list[str]:
    """What is wrong with a page."""
    driver.get(address)
    WebDriverWait(driver, SECONDS).until(
        lambda d: d.execute_script("return document.readyState") == "complete"
    )
    if screenshots is not None:
        driver.save_screenshot(str(screenshots / f"{name}.png"))
    return [f"{name}: {message}" for message in console_errors(driver)]


def browse(site: Path, screenshots: Path | None) -> list[str]:
    faults = []
    with served(site) as address, browser() as driver:
        for page, title in PAGES.items():
            name = page.removesuffix(".html").replace("/", "-")
            faults += visit(driver, f"{address}/{page}", screenshots, name)
            if title not in driver.title + driver.find_element(By.TAG_NAME, "h1").text:
                faults.append(f"{name}: the title is {driver.title!r}, without {title!r}")
        faults += visit(driver, f"{address}/search.html?q={WORD}", None, "search")
        found = (By.CSS_SELECTOR, "#search-results li a")
        WebDriverWait(driver, SECONDS).until(lambda d: d.find_elements(*found))
        if screenshots is not None:
            driver.save_screenshot(str(screenshots / "search.png"))
        faults += [f"search: {message}" for message in console_errors(driver)]
        print(f"{len(PAGES)} pages, search for {WORD}: {len(driver.find_elements(*found))} results")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description="Open the built documentation in headless Chromium.")
    parser.add_argument("site", type=Path)
    parser.add_argument("--screenshots", type=Path, help="folder for a picture of each page")
    args = parser.parse_args()
    if shutil.which("chromedriver") is None:
        print("chromedriver is missing: on Debian, apt install chromium chromium-driver", file=sys.stderr)
        return 2
    if not (args.site / "index.html").exists():
        print(f"{args.site} has no index.html: run make docs first", file=sys.stderr)
        return 2
    if args.screenshots is not None:
        args.screenshots.mkdir(parents=True, exist_ok=True)
    faults = browse(args.site, args.screenshots)
    print("\n".join(faults) or "no console error")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
