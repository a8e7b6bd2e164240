"""Check every internal link of a built site: the page or file exists, and so does the anchor.

python tools/check_site.py build/site
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """Links and anchors of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


def broken_links(site: Path) -> list[str]:
    """One line for each link that leads nowhere."""
    pages = {path.resolve(): Page(path.read_text()) for path in site.rglob("*.html")}
    found = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                found.append(f"{path.relative_to(site.resolve())}: {link} does not exist")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{path.relative_to(site.resolve())}: {link} has no such anchor")
    return sorted(set(found))


def main(folder: str) -> int:
    site = Path(folder)
    if not (site / "index.html").exists():
        print(f"{site} has no index.html; run make docs", file=sys.stderr)
        return 1
    broken = broken_links(site)
    print(*broken, sep="\n" if broken else "")
    print(f"{len(list(site.rglob('*.html')))} pages, {len(broken)} broken links")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
