"""Filler text that needs no download: the documentation strings of installed Python packages.

Evaluation and the demo read the standard library; the built-in model was trained on third-party
packages only, so the filler it is measured in is filler it has never seen.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`'\"(])")
_MIN_CHARS, _MAX_CHARS = 20, 400


@lru_cache(maxsize=1)
def stdlib_sentences() -> tuple[str, ...]:
    """Sentences of the standard library's documentation strings, in file order.

    Falls back to nothing: an interpreter installed without its sources raises `FileNotFoundError`.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {
        "test",
        "tests",
        "site-packages",
        "dist-packages",
        "idlelib",
        "lib2to3",
        "__pycache__",
    }
    files = [p for p in sorted(root.rglob("*.py")) if not skipped & set(p.relative_to(root).parts)]
    sentences = tuple(_sentences(files))
    if not sentences:
        raise FileNotFoundError(f"{root}: no Python sources to take filler text from")
    return sentences


def package_sentences(names: tuple[str, ...]) -> tuple[str, ...]:
    """Sentences of the documentation strings of installed third-party packages, in file order."""
    root = Path(sysconfig.get_paths()["purelib"])
    files = [p for name in names for p in sorted((root / name).rglob("*.py"))]
    return tuple(_sentences(files))


def _sentences(files: list[Path]) -> Iterator[str]:
    seen: set[str] = set()
    for path in files:
        for docstring in _docstrings(path):
            for paragraph in re.split(r"\n\s*\n", docstring):
                text = " ".join(paragraph.split())
                for sentence in _SENTENCE_END.split(text):
                    if _MIN_CHARS <= len(sentence) <= _MAX_CHARS and sentence not in seen:
                        seen.add(sentence)
                        yield sentence


def _docstrings(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring:
                yield docstring
