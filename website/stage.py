"""Puts the pages of the site into one folder: of `docs`, of the root, and generated ones."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from website.reference.markdown import code_with_bars
from website.reference.pages import write_pages

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# pages of the repository's root, and where the site has them
FROM_ROOT = {
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security.md",
    "README.md": "index.md",  # only links to it: the site has its own first page
}
_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")


def stage(folder: Path) -> None:
    """Make `folder` anew with all that the site's generator reads. Links lead to its pages."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(DOCS, folder)
    for source in sorted(DOCS.rglob("*.md")):
        place = folder / source.relative_to(DOCS)
        place.write_text(with_links(source, place.relative_to(folder)), encoding="utf-8")
    for name, target in FROM_ROOT.items():
        if name == "README.md":
            continue
        place = folder / target
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(with_links(ROOT / name, Path(target)), encoding="utf-8")
    write_pages(folder)


def with_links(source: Path, place: Path) -> str:
    """The text of a page whose links are those that it needs at `place` in the site."""
    parts = re.split(r"(^```.*?^```)", source.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)

    def lead(match: re.Match[str]) -> str:
        return site_link(match.group(), source, place)

    return "".join(
        part if part.startswith("```") else code_with_bars(_LINK.sub(lead, part)) for part in parts
    )


def site_link(link: str, source: Path, place: Path) -> str:
    """Raises `ValueError` for a link to a file that is not in the site."""
    path, hash_sign, anchor = link.partition("#")
    if "://" in link or link.startswith("mailto:") or not path:
        return link
    target = Path(os.path.normpath(source.parent / path))
    if target.is_relative_to(DOCS):
        wanted = target.relative_to(DOCS)
    elif (name := str(target.relative_to(ROOT))) in FROM_ROOT:
        wanted = Path(FROM_ROOT[name])
    else:
        raise ValueError(f"{source.relative_to(ROOT)}: {link}: leads to a file outside of the site")
    return os.path.relpath(wanted, place.parent) + hash_sign + anchor
