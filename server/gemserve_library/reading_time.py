"""How many tokens will be read for a library, and how long that will take."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemserve.files.file_text import is_plain
from gemserve.files.plain_text import NotText, decode
from gemserve_library.library import Library

_SAMPLES = 8  # of the largest files, whose tokens for a byte stand for all
_SAMPLE_BYTES = 1 << 14


@dataclass(frozen=True, slots=True)
class Expected:
    """What is new or has changed. `others`: files of which nobody knows how much text they have.

    `speed`: tokens a second when the library was last added to; 0 if nobody knows.
    """

    files: int
    tokens: int
    others: int
    speed: int

    def line(self) -> str:
        """One line for people."""
        said = f"about {self.tokens:,} tokens to read in {self.files:,} texts"
        if self.others:
            said += f", and {self.others:,} packed files or files of other formats"
        if self.tokens and self.speed:
            said += f": {duration(self.tokens / self.speed)} at {self.speed:,} a second"
        return said


def duration(seconds: float) -> str:
    """In the unit that fits, as nobody waits by the second for an hour."""
    if seconds < 120:
        return f"about {max(seconds, 1):.0f} s"
    if seconds < 7200:
        return f"about {seconds / 60:.0f} min"
    return f"about {seconds / 3600:.1f} h"


def expect(files: Iterable[Path], library: Library, tokenizer: Any) -> Expected:
    """Looks at the sizes of all files and into a few of them. Raises `LibraryError`."""
    known = {file.path: (file.num_bytes, file.modified_ns) for file in library.files()}
    sizes: list[tuple[int, str]] = []
    others = 0
    for path in files:
        try:
            stat = path.stat()
        except OSError:
            continue
        if known.get(str(path)) == (stat.st_size, stat.st_mtime_ns):
            continue
        if is_plain(b"", path.name):
            sizes.append((stat.st_size, str(path)))
        else:
            others += 1
    rate = _tokens_of_a_byte([path for _, path in heapq.nlargest(_SAMPLES, sizes)], tokenizer)
    tokens = round(rate * sum(size for size, _ in sizes))
    return Expected(len(sizes), tokens, others, library.speed)


def _tokens_of_a_byte(paths: Iterable[str], tokenizer: Any) -> float:
    """0 if none of these files is a text."""
    num_bytes = num_tokens = 0
    for path in paths:
        try:
            with open(path, "rb") as file:
                content = file.read(_SAMPLE_BYTES)
            text = decode(content)
        except (OSError, NotText):
            continue
        num_bytes += len(content)
        num_tokens += len(tokenizer(text, add_special_tokens=False)["input_ids"])
    return num_tokens / num_bytes if num_bytes else 0.0
