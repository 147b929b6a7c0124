"""The chats of adapter tasks, and what they are made of: Python's docstrings and signatures."""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_SKIPPED = {
    *("test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "__pycache__"),
    *("encodings", "pydoc_data", "distutils"),  # large, with little prose, or no longer there
}
_MIN_CHARS, _MAX_CHARS = 60, 320


@dataclass(frozen=True, slots=True)
class Case:
    """One chat. Cases of one `group` are never in two splits; `label` is balanced in each."""

    user: str
    answer: str
    group: str
    label: str = ""
    system: str | None = None

    @property
    def messages(self) -> list[dict[str, str]]:
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [
            *before,
            {"role": "user", "content": self.user},
            {"role": "assistant", "content": self.answer},
        ]


@dataclass(frozen=True, slots=True)
class Paragraph:
    """`module`: the top-level name in the library. `owner`: the file and object it documents."""

    text: str
    module: str
    owner: str


@dataclass(frozen=True, slots=True)
class Function:
    """A function's signature as it is written on one line, and its docstring's first line."""

    node: ast.FunctionDef
    signature: str
    summary: str
    file: str


def stdlib_root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


@lru_cache(maxsize=1)
def _trees() -> tuple[tuple[str, ast.Module], ...]:
    """Each source file of the library, parsed, in the order of their paths."""
    root = stdlib_root()
    trees = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if _SKIPPED & set(name.parts):
            continue
        try:
            trees.append((str(name), ast.parse(path.read_text(encoding="utf-8"))))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
    return tuple(trees)


@lru_cache(maxsize=1)
def stdlib_paragraphs() -> tuple[Paragraph, ...]:
    """Paragraphs of prose of all docstrings. A text that two modules have is left out."""
    found: dict[str, Paragraph] = {}
    shared: set[str] = set()
    for name, tree in _trees():
        module = Path(name).parts[0].removesuffix(".py").removeprefix("_py")
        for owner, docstring in _docstrings(tree):
            for text in _prose(docstring):
                before = found.get(text)
                if before is not None and before.module != module:
                    shared.add(text)
                elif before is None:
                    found[text] = Paragraph(text, module, f"{name}:{owner}")
    return tuple(paragraph for text, paragraph in found.items() if text not in shared)


def _docstrings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The docstrings of a file, each with the name of the top-level object that it belongs to."""
    docstring = ast.get_docstring(tree)
    if docstring:
        yield "", docstring
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for top in tree.body:
        if not isinstance(top, kinds):
            continue
        for node in ast.walk(top):
            if isinstance(node, kinds) and (docstring := ast.get_docstring(node)):
                yield top.name, docstring


def _prose(docstring: str) -> Iterator[str]:
    """Paragraphs that begin like sentences and have no code; long ones end after a sentence."""
    for paragraph in re.split(r"\n\s*\n", docstring):
        text = " ".join(paragraph.split())
        if len(text) > _MAX_CHARS:
            text = text[: text.rfind(". ", 0, _MAX_CHARS) + 1]
        is_prose = re.match(r"[A-Z]", text) and ">>>" not in text and text.endswith(".")
        if is_prose and len(text) >= _MIN_CHARS:
            yield text


@lru_cache(maxsize=1)
def stdlib_functions() -> tuple[Function, ...]:
    """Functions with a few arguments and a short first line; each summary occurs once."""
    found: dict[str, Function] = {}
    for name, tree in _trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef):
                continue
            summary = (ast.get_docstring(node) or "").split("\n")[0].strip()
            signature = f"def {node.name}({ast.unparse(node.args)}):"
            if re.fullmatch(r"[A-Z][^\"\\]{14,58}\.", summary) and len(signature) <= 110:
                found.setdefault(summary, Function(node, signature, summary, name))
    return tuple(found.values())
