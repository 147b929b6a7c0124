"""Builds the site: `make docs`. Ends with 1 if a page, link, anchor or word is wrong."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from website.check_links import check_site
from website.stage import ROOT, stage

BUILD = ROOT / "build/website"
PAGES, SITE = BUILD / "pages", BUILD / "site"
CONFIG = ROOT / "mkdocs.yml"
# what codespell reads; words that it takes for mistakes and that are none are in this file
SPELLED = (
    *("docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"),
    *("server", "clients", "kernels", "benchmarks", "deploy", "recipes", "website"),
)
NOT_SPELLED = "*.svg,*.png,*.gif,*.json,*.lock,*.safetensors,*.gguf"
ACCEPTED_WORDS = ROOT / "website/accepted_words.txt"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m website.build", description=__doc__)
    parser.add_argument("--tools", type=Path, default=Path(sys.executable).parent)
    parser.add_argument("--no-spelling", action="store_true", help="leave out the spelling check")
    options = parser.parse_args()
    started_s = time.monotonic()
    stage(PAGES)
    problems = [f"mkdocs.yml: {name} is not in nav" for name in pages_left_out()]
    built = subprocess.run(
        [options.tools / "zensical", "build", "--strict", "--clean", "--config-file", CONFIG],
        cwd=ROOT,
        env={**os.environ, "NO_COLOR": "1"},
        check=False,
    )
    if built.returncode:
        return 1
    for path in SITE.rglob("*.html"):
        path.write_text(with_plain_corners(path.read_text("utf-8")), "utf-8")
    checked = check_site(SITE)
    problems += checked.wrong
    if not options.no_spelling:
        problems += misspelt(options.tools / "codespell")
    size = sum(path.stat().st_size for path in SITE.rglob("*") if path.is_file())
    print(
        f"{checked.num_pages} pages, {size / 1e6:.1f} MB, in {time.monotonic() - started_s:.0f} s; "
        f"{checked.num_links} links within the site, {checked.num_anchors} of them to anchors; "
        f"{checked.num_loaded} files loaded by pages, none from elsewhere; "
        f"{len(checked.external)} addresses elsewhere, not checked"
    )
    print(*problems, sep="\n", end="\n" if problems else "")
    print(f"the site is in {SITE.relative_to(ROOT)}; python -m http.server --directory serves it")
    return 1 if problems else 0


def with_plain_corners(page: str) -> str:
    """The page with empty headers of tables as plain cells, because they are headers of nothing.

    Markdown has no way to write that.
    """
    return re.sub(r"<th[^>]*></th>", "<td></td>", page)


def pages_left_out() -> list[str]:
    """Pages of the site that no entry of `nav` names."""
    named = set(names_in(yaml.safe_load(CONFIG.read_text("utf-8"))["nav"]))
    there = {str(path.relative_to(PAGES)) for path in PAGES.rglob("*.md")}
    return sorted(there - named)


def names_in(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for part in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from names_in(part)


def misspelt(codespell: Path) -> list[str]:
    """What codespell finds in pages, comments, docstrings and messages, one line each."""
    done = subprocess.run(
        [codespell, "--ignore-words", ACCEPTED_WORDS, "--skip", NOT_SPELLED, *SPELLED],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return (done.stdout + done.stderr).splitlines() if done.returncode else []


if __name__ == "__main__":
    sys.exit(main())
