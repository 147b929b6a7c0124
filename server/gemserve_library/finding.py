"""Finds the files that are to be added: single ones, folders, patterns, and git repositories."""

from __future__ import annotations

import glob
import os
import re
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from stat import S_ISREG

from gemserve.errors import LibraryError
from gemserve_library.ignore_rules import IgnoreRules, is_ignored

_GIT_S = 60.0
# folders of which nobody asks: what tools have made from the files beside them
TOOLS_FOLDERS = frozenset(
    (
        *("__pycache__", "node_modules", "venv", "build", "dist", "target", "site-packages"),
        *("bower_components", "htmlcov", "__pypackages__", "_build", "CMakeFiles", "DerivedData"),
    )
)
# names of files whose content opens something else; a library would show it to whoever asks
SECRETS = (
    *(".env", ".env.*", "*.env", ".netrc", "_netrc", ".pgpass", ".htpasswd", ".npmrc", ".pypirc"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.ppk", "*.asc.key"),
    *("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "credentials"),
    *(".git-credentials", "client_secret*.json", "service-account*.json"),
    *("credentials.json", "credentials.csv", "credentials.yaml", "credentials.yml"),
    *("secrets.json", "secrets.toml", "secrets.yaml", "secrets.yml"),
)
_EXAMPLES = (".env.example", ".env.sample", ".env.template", ".env.dist")
_PRIVATE_KEY = re.compile(rb"^-----BEGIN [A-Z ]*PRIVATE KEY-----", re.MULTILINE)
_KEY_BYTES = 1 << 16  # private keys are no larger; a manual that shows one is
_KEY_WITHIN = 1024  # bytes in front of it


@dataclass(slots=True)
class LeftOut:
    """What was in the folders and is not read: paths, and how many a `.gitignore` names."""

    secrets: list[Path] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    ignored: int = 0

    def lines(self, most: int) -> list[str]:
        """What people are told: the count, and so many names."""
        said = []
        for what, paths in (
            ("files that may hold secrets", self.secrets),
            ("folders that tools have made", self.folders),
        ):
            if paths:
                more = f" and {len(paths) - most:,} more" if len(paths) > most else ""
                names = ", ".join(map(shown_path, paths[:most]))
                said.append(f"{len(paths):,} {what}: {names}{more}")
        if self.ignored:
            said.append(f"{self.ignored:,} files and folders that .gitignore names")
        return said

    def has(self, path: str) -> bool:
        """Whether a file is left out, or is in a folder that is."""
        return path in map(str, self.secrets) or path.startswith(
            tuple(f"{folder}/" for folder in self.folders)
        )


def shown_path(path: Path) -> str:
    return str(path).encode("utf-8", "backslashreplace").decode()


def absolute_path(path: str | Path) -> Path:
    """The path by which a library knows a file or folder: absolute, and without `..`."""
    shortened = Path(os.path.abspath(path))
    # behind a symbolic link `..` leads elsewhere
    is_same = os.path.realpath(shortened) == os.path.realpath(path)
    return shortened if is_same else Path(path).absolute()


def find_files(given: Sequence[str], left_out: LeftOut | None = None) -> Iterator[Path]:
    """All files that these paths and patterns name, absolute, each once.

    Of a folder in a git repository only files that git tracks, and else all but hidden ones, those
    that a `.gitignore` names, and what tools have made. Files that may hold secrets are left out
    unless they are named themselves. `left_out` is told of all this. Raises `LibraryError` if a
    path names nothing, before the first file.
    """
    left_out = left_out if left_out is not None else LeftOut()
    seen: set[Path] = set()
    named = {absolute_path(each) for each in given}
    written = {part for path in named for part in path.parts}
    for path in map(absolute_path, check_paths(given)):
        made = _made_folder(path, written)
        if made is not None:  # a pattern goes into all folders
            if made not in left_out.folders:
                left_out.folders.append(made)
            continue
        within = _within(path, left_out) if path.is_dir() else [path]
        for file in within:
            if file in seen:
                continue
            seen.add(file)
            if file not in named and is_secret(file):
                left_out.secrets.append(file)
            else:
                yield file


def _made_folder(path: Path, written: Collection[str]) -> Path | None:
    """The folder around a path that tools have made, unless somebody has written its name."""
    for folder in (*reversed(path.parents), path):
        if folder.name in TOOLS_FOLDERS and folder.name not in written:
            return folder if folder.is_dir() else None
    return None


def is_secret(path: Path) -> bool:
    """By its name, or because a private key begins in it."""
    name = path.name.lower()
    if any(fnmatchcase(name, each) for each in SECRETS) and name not in _EXAMPLES:
        return True
    try:
        if not 0 < path.stat().st_size <= _KEY_BYTES or not S_ISREG(path.stat().st_mode):
            return False
        with path.open("rb") as file:
            return _PRIVATE_KEY.search(file.read(_KEY_WITHIN)) is not None
    except OSError:
        return False


def check_paths(given: Sequence[str]) -> list[Path]:
    """The files and folders that are named, with patterns resolved. Looks into no folder.

    Raises `LibraryError` if a path or a pattern names nothing.
    """
    found: list[Path] = []
    for each in given:
        is_pattern = glob.has_magic(each) and not os.path.exists(each)
        paths = sorted(glob.glob(each, recursive=True)) if is_pattern else [each]
        if not paths or not all(map(os.path.exists, paths)):
            raise LibraryError(f"{each}: there is no such file or folder")
        found += map(Path, paths)
    return found


def _within(folder: Path, left_out: LeftOut) -> Iterator[Path]:
    tracked = _tracked(folder)
    if tracked is not None:
        yield from filter(_is_own_file, tracked)
        return
    rules: dict[Path, tuple[IgnoreRules, ...]] = {}
    for parent, folders, files in os.walk(folder):
        here = Path(parent)
        own = IgnoreRules.of_folder(here)
        rules[here] = rules.get(here.parent, ()) + (() if own is None else (own,))
        folders[:] = [each for each in sorted(folders) if _is_entered(here / each, rules, left_out)]
        for name in sorted(files):
            path = here / name
            if fnmatchcase(name, ".env*") and _is_own_file(path) and is_secret(path):
                left_out.secrets.append(path)
            elif name.startswith(".") or not _is_own_file(path):
                continue
            elif is_ignored(rules[here], path, is_folder=False):
                left_out.ignored += 1
            else:
                yield path


def _is_entered(path: Path, rules: Mapping[Path, Sequence[IgnoreRules]], left_out: LeftOut) -> bool:
    is_made = path.name in TOOLS_FOLDERS or (path / "pyvenv.cfg").exists()
    if is_made or path.name == ".venv":
        left_out.folders.append(path)
        return False
    if path.name.startswith("."):
        return False
    if is_ignored(rules[path.parent], path, is_folder=True):
        left_out.ignored += 1
        return False
    return True


def _is_own_file(path: Path) -> bool:
    """Also one that may not be looked at: it is left out by its name later."""
    try:
        return S_ISREG(path.lstat().st_mode)
    except PermissionError:
        return True
    except OSError:
        return False


def _tracked(folder: Path) -> list[Path] | None:
    """The files in a folder that git tracks; None: it is in no repository."""
    command = ["git", "-C", str(folder), "ls-files", "-z"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    names = [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
    # a folder that a repository ignores has no tracked files
    if done.returncode or not names:
        return None
    return [folder / name for name in sorted(names)]
