"""Where libraries are: each in a folder of its own, which has its name."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from gemserve.contract.filter_options import LIBRARY_NAME
from gemserve.errors import LibraryError, shown
from gemserve_library.library import DATABASE

_NAME = re.compile(LIBRARY_NAME)
_LISTED = 20  # libraries in a message


def default_folder() -> Path:
    """The folder of all of a user's libraries."""
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "gemserve" / "libraries"


def add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--library-dir",
        type=Path,
        default=default_folder(),
        metavar="DIR",
        help="the folder of all libraries (default: %(default)s)",
    )


def folder_of(name: str, parent: Path) -> Path:
    """The folder of the library with this name. Raises `LibraryError` if it can be no name."""
    if not _NAME.fullmatch(name):
        raise LibraryError(
            f"library {shown(name)}: a name has 1 to 64 letters, digits, dots, dashes and "
            "underscores, and begins with a letter or a digit"
        )
    return parent / name


def existing_folder(name: str, parent: Path) -> Path:
    """The folder of a library that is there. Raises `LibraryError`, which names those that are."""
    folder = folder_of(name, parent)
    if holds_library(folder):
        return folder
    others = names_in(parent)
    if not others:
        raise LibraryError(
            f"library {name}: there are no libraries in {parent}; gemserve library add {name} "
            "PATH… makes one"
        )
    listed = ", ".join(others[:_LISTED]) + (", …" if len(others) > _LISTED else "")
    raise LibraryError(f"library {name}: {parent} has none of this name; it has: {listed}")


def holds_library(folder: Path) -> bool:
    """Also if it is damaged, so that it can be seen and removed."""
    return os.path.lexists(folder / DATABASE)


def names_in(parent: Path) -> list[str]:
    """The names of all libraries in a folder."""
    if not parent.is_dir():
        return []
    found = (path.name for path in parent.iterdir() if holds_library(path))
    return sorted(name for name in found if _NAME.fullmatch(name))
