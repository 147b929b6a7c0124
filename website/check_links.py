"""Checks the built site: links and anchors lead somewhere, and nothing comes from elsewhere."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LOADS = {"img": "src", "script": "src", "iframe": "src", "source": "src", "video": "src"}
_CSS_URL = re.compile(r"url\(\s*['\"]?([^)'\"]+)")


@dataclass(slots=True)
class Page(HTMLParser):
    """What a page has: its anchors, the addresses that it links to, and those that it loads."""

    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        HTMLParser.__init__(self)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids.update(given[name] for name in ("id", "name") if given.get(name))
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") not in ("canonical", "prev", "next", "alternate"):
            self.loaded.append(given.get("href", ""))
        elif address := given.get(_LOADS.get(tag, "")):
            self.loaded.append(address)


@dataclass(frozen=True, slots=True)
class Checked:
    """`wrong`: a sentence for each address that is not right."""

    num_pages: int
    num_links: int
    num_anchors: int
    num_loaded: int
    external: tuple[str, ...]
    wrong: tuple[str, ...]


def check_site(site: Path) -> Checked:
    pages = {path: read_page(path) for path in sorted(site.rglob("*.html"))}
    wrong: list[str] = []
    external: set[str] = set()
    num_links = num_anchors = num_loaded = 0
    for path, page in pages.items():
        shown = path.relative_to(site)
        for address in page.loaded:
            num_loaded += 1
            if is_elsewhere(address):
                wrong.append(f"{shown}: loads {address}")
            elif not target_of(address, path, site).exists():
                wrong.append(f"{shown}: {address}: no such file")
        for address in page.links:
            if is_elsewhere(address):
                external.add(address)
                continue
            num_links += 1
            target = target_of(address, path, site)
            anchor = unquote(urlsplit(address).fragment)
            if not target.exists():
                wrong.append(f"{shown}: {address}: no such page")
            elif anchor and not anchor.startswith("__") and target in pages:
                num_anchors += 1
                if anchor not in pages[target].ids:
                    wrong.append(f"{shown}: {address}: no such anchor")
    for style in sorted(site.rglob("*.css")):
        loaded = _CSS_URL.findall(style.read_text("utf-8"))
        wrong += [f"{style.relative_to(site)}: loads {a}" for a in loaded if is_elsewhere(a)]
    return Checked(
        len(pages), num_links, num_anchors, num_loaded, tuple(sorted(external)), tuple(wrong)
    )


def read_page(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text("utf-8"))
    return page


def is_elsewhere(address: str) -> bool:
    return bool(re.match(r"(?:[a-z]+:)?//|mailto:", address))


def target_of(address: str, page: Path, site: Path) -> Path:
    """The file that an address of this site leads to."""
    path = unquote(urlsplit(address).path)
    if not path:
        return page
    base = site if path.startswith("/") else page.parent
    target = Path(os.path.normpath(base / path.lstrip("/")))
    return target / "index.html" if target.is_dir() else target
