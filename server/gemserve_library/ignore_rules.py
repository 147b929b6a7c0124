"""What a `.gitignore` leaves out, for folders that are in no repository (gitignore(5))."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gemserve.errors import LibraryError
from gemserve.files.plain_text import NotText, decode

FILE = ".gitignore"
MOST_BYTES, MOST_RULES = 1 << 20, 10_000
_ESCAPED = re.compile(r"\\(.)")


@dataclass(frozen=True, slots=True)
class _Rule:
    """`parts`: patterns of names, from the folder of the file; None stands for any folders."""

    parts: tuple[re.Pattern[str] | None, ...]
    is_negated: bool
    is_for_folders: bool


@dataclass(frozen=True, slots=True)
class IgnoreRules:
    """The rules of one `.gitignore`, whose last one that matches decides."""

    folder: Path
    rules: tuple[_Rule, ...]

    @staticmethod
    def of_folder(folder: Path) -> IgnoreRules | None:
        """None if the folder has none. Raises `LibraryError` if it is beyond a limit."""
        path = folder / FILE
        try:
            with path.open("rb") as file:
                content = file.read(MOST_BYTES + 1)
        except OSError:
            return None
        if len(content) > MOST_BYTES:
            raise LibraryError(f"{path}: has more than {MOST_BYTES:,} bytes, the limit")
        try:
            lines = decode(content).splitlines()
        except NotText as error:
            raise LibraryError(f"{path}: {error}") from None
        rules = tuple(filter(None, map(_rule, lines)))
        if len(rules) > MOST_RULES:
            raise LibraryError(f"{path}: has {len(rules):,} rules, the limit is {MOST_RULES:,}")
        return IgnoreRules(folder, rules)

    def decide(self, path: Path, *, is_folder: bool) -> bool | None:
        """Whether the path is left out; None if no rule is for it."""
        names = path.relative_to(self.folder).parts
        for rule in reversed(self.rules):
            if (is_folder or not rule.is_for_folders) and _matches(rule.parts, names):
                return not rule.is_negated
        return None


def is_ignored(all_rules: Sequence[IgnoreRules], path: Path, *, is_folder: bool) -> bool:
    """`all_rules`: of the folders around it, the outermost first; the innermost decides first."""
    decisions = (each.decide(path, is_folder=is_folder) for each in reversed(all_rules))
    return next((each for each in decisions if each is not None), False)


def _rule(line: str) -> _Rule | None:
    line = line if line.endswith("\\ ") else line.rstrip()
    if not line or line.startswith("#"):
        return None
    is_negated = line.startswith("!")
    pattern = line[is_negated:]
    is_for_folders = pattern.endswith("/")
    pattern = pattern.rstrip("/")
    if not pattern:
        return None
    if "/" not in pattern:
        pattern = f"**/{pattern}"
    parts: list[re.Pattern[str] | None] = []
    for name in pattern.removeprefix("/").split("/"):
        if name != "**":
            parts.append(_compiled(name))
        elif not parts or parts[-1] is not None:
            parts.append(None)
    if parts[-1] is None:  # "a/**": all that is in it
        parts.append(_compiled("*"))
    return _Rule(tuple(parts), is_negated, is_for_folders)


def _compiled(name: str) -> re.Pattern[str]:
    # `fnmatch` has no escapes, and its patterns do not take turns that multiply
    return re.compile(fnmatch.translate(_ESCAPED.sub(r"[\1]", name)))


def _matches(parts: Sequence[re.Pattern[str] | None], names: Sequence[str]) -> bool:
    """Whether all names match all parts; `ends`: how many names the parts so far can take."""
    ends = {0}
    for part in parts:
        if part is None:
            ends = set(range(min(ends), len(names) + 1))
        else:
            ends = {end + 1 for end in ends if end < len(names) and part.match(names[end])}
        if not ends:
            return False
    return len(names) in ends
