"""The pages for people name no file, folder or section that is not there: such names rot."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from website.reference.pages import PAGES as MADE_FROM_CODE

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
# what a path may be relative to
BASES = (
    ROOT,
    ROOT / "server/gemserve",
    ROOT / "server",
    ROOT / "kernels/gemserve_kernels",
    ROOT / "tests/kernels",
)
MADE_FOLDERS = ("bench", "build", "dist")  # by make, which names them in pages
FOLDERS = {
    entry.name
    for base in BASES[:3]
    for entry in base.iterdir()
    if entry.is_dir() and not entry.name.startswith(".") and entry.name not in MADE_FOLDERS
}
SCRIPTS = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}


def prose(page: Path) -> str:
    """The page without its examples."""
    return re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


def is_there(path: str) -> bool:
    """Whether it is a file, a folder, or a module: `engine/core` is `engine/core.py`."""
    return any((base / path).exists() or (base / f"{path}.py").exists() for base in BASES)


def wrong_paths(text: str) -> list[str]:
    """The paths in backticks that do not exist."""
    names = re.findall(r"`(\w[\w.-]*(?:/[\w.-]+)*/?)`", text)
    paths = [n for n in names if "/" in n and n.split("/")[0] in FOLDERS and not is_there(n)]
    return paths + [n for n in names if "/" not in n and n.endswith(".py") and n not in SCRIPTS]


def anchors(page: Path) -> set[str]:
    """The sections of a page, as links name them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def is_made_from_code(target: Path) -> bool:
    """Whether the site has it as a page that is not kept. `make docs` checks anchors in it."""
    made = {(ROOT / "docs" / name).resolve() for name in MADE_FROM_CODE}
    return target.resolve() in made


def wrong_links(page: Path) -> list[str]:
    """The relative links of a page that lead nowhere."""
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        if "://" in link or is_made_from_code(target):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_and_links_lead_somewhere(page: Path) -> None:
    assert wrong_paths(prose(page)) == []
    assert wrong_links(page) == []


def test_a_wrong_path_is_noticed() -> None:
    """Otherwise the test above could pass because it finds no paths at all."""
    text = (
        "`engine/core`, `engine/cores`, `tests/unit/`, `docs/none.md`, `v1/x`, `gone.py`, `gpu.py`"
    )
    assert wrong_paths(text) == ["engine/cores", "docs/none.md", "gone.py"]
    assert sum(len(re.findall(r"`[\w.-]+/", prose(page))) for page in PAGES) > 100
