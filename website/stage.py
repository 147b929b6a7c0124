"""Puts the pages of the site into one folder: of `docs`, of the root, and generated ones."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from website.reference.markdown import code_with_bars
from website.reference.options import OF_SERVER, anchor_of, server_flags
from website.reference.pages import write_pages

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# the files of the log are read in the repository; the site has their index only
LOG = DOCS / "log"
# pages of the repository's root, and where the site has them
FROM_ROOT = {
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security.md",
    "README.md": "index.md",  # only links to it: the site has its own first page
}
_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
_LABELLED_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
# a heading, a link, or an option in code, which may have a value
_OPTION = re.compile(r"^#.*$|\[[^\]]*\]\([^)]*\)|`(--[a-z][a-z0-9-]*)(?: [^`\n]*)?`", re.MULTILINE)


def stage(folder: Path) -> None:
    """Make `folder` anew with all that the site's generator reads. Links lead to its pages."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(DOCS, folder, ignore=shutil.ignore_patterns(LOG.name))
    for place in sorted(folder.rglob("*.md")):
        source = DOCS / place.relative_to(folder)
        place.write_text(with_links(source, place.relative_to(folder)), encoding="utf-8")
    for name, target in FROM_ROOT.items():
        if name == "README.md":
            continue
        place = folder / target
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(with_links(ROOT / name, Path(target)), encoding="utf-8")
    write_pages(folder)


def with_links(source: Path, place: Path) -> str:
    """The text of a page whose links are those that it needs at `place` in the site.

    A link to a file of the log becomes the name of that file in the repository. The first time
    that the page names an option of the server, this leads to what the option does.
    """
    parts = re.split(r"(^```.*?^```)", source.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)

    def name_log(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(source.parent / match[2].partition("#")[0]))
        if not target.is_relative_to(LOG):
            return match[0]
        path = f"`{target.relative_to(ROOT)}`"
        return path if match[1] == path else f"{match[1]} ({path})"

    def lead(match: re.Match[str]) -> str:
        return site_link(match.group(), source, place)

    linked = set(server_flags()) if is_about_scripts(place) else set[str]()
    options = os.path.relpath(OF_SERVER, place.parent)

    def explain(match: re.Match[str]) -> str:
        flag = match[1]
        if flag not in server_flags() or flag in linked:
            return match[0]
        linked.add(flag)
        return f"[{match[0]}]({options}#{anchor_of(flag)})"

    return "".join(
        part
        if part.startswith("```")
        else code_with_bars(
            _OPTION.sub(explain, _LINK.sub(lead, _LABELLED_LINK.sub(name_log, part)))
        )
        for part in parts
    )


def is_about_scripts(place: Path) -> bool:
    """Whether a page's options are mostly those of benchmarks and of `make`."""
    return place.parts[0] in ("project", "benchmarks.md")


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
