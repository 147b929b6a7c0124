"""Filler text that needs no download: documentation that comes with Python and its packages.

Evaluation and the demo read the standard library; the built-in model was trained on third-party
packages only, so the filler it is measured in is filler it has never seen. Natural facts are
measured in the language reference, which nothing was tuned on.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`'\"(])")
_MIN_CHARS, _MAX_CHARS = 20, 400
_PROSE = re.compile(r"[A-Z\"][^=<>{}\[\]|\\]*[.!?]\"?")
_EMPHASIS = re.compile(r"(?<!\w)(\*{1,2})(?=\w)([^*]+)\1(?!\w)")
_BROKEN_WORD = re.compile(r"(?<=\w)-\n\s*(?=\w)")
_QUOTES = str.maketrans("“”‘’", "\"\"''")
# where a statement has further statements, in the order of its fields
_BLOCKS = ("body", "handlers", "cases", "orelse", "finalbody")


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
    sentences = tuple(docstring_sentences(files))
    if not sentences:
        raise FileNotFoundError(f"{root}: no Python sources to take filler text from")
    return sentences


@lru_cache(maxsize=1)
def topics_sentences() -> tuple[str, ...]:
    """Sentences of Python's language reference (`pydoc_data.topics`), topic by topic in its order.

    Code, grammar, headings and markup are left out; what the topics repeat stands there once.
    """
    from pydoc_data.topics import topics

    texts = (_BROKEN_WORD.sub("-", text.translate(_QUOTES)) for _, text in sorted(topics.items()))
    plain = (_EMPHASIS.sub(r"\2", sentence) for text in texts for sentence in _split(text))
    sentences = tuple(dict.fromkeys(s for s in plain if _PROSE.fullmatch(s)))
    known = set(stdlib_sentences())  # some docstrings quote the reference
    return tuple(sentence for sentence in sentences if sentence not in known)


def docstring_sentences(files: list[Path]) -> Iterator[str]:
    """Sentences of the documentation strings of Python files, each of them once."""
    known: set[str] = set()
    for path in files:
        for docstring in _docstrings(path):
            for sentence in _split(docstring):
                if sentence not in known:
                    known.add(sentence)
                    yield sentence


def _split(text: str) -> Iterator[str]:
    """The sentences of paragraphs that blank lines separate, but very short and very long ones."""
    for paragraph in re.split(r"\n\s*\n", text):
        for sentence in _SENTENCE_END.split(" ".join(paragraph.split())):
            if _MIN_CHARS <= len(sentence) <= _MAX_CHARS:
                yield sentence


def _docstrings(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return
    for node in _walk_statements(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring:
                yield docstring


def _walk_statements(tree: ast.Module) -> Iterator[ast.AST]:
    """As `ast.walk`, in its order, but without the expressions: they are most of a tree."""
    waiting: deque[ast.AST] = deque([tree])
    while waiting:
        node = waiting.popleft()
        yield node
        for field in _BLOCKS:
            waiting.extend(getattr(node, field, ()))
