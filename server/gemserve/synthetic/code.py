"""Code that needs no download: functions of the standard library."""

from __future__ import annotations

import ast
import sysconfig
from functools import lru_cache
from pathlib import Path

_FILES = (
    *("textwrap", "shlex", "fnmatch", "posixpath", "bisect", "colorsys", "statistics", "calendar"),
    *("shutil", "tempfile", "string", "heapq", "gettext", "mimetypes", "fileinput", "glob"),
)
_LONGEST = 1500  # longest function, in characters


@lru_cache(maxsize=1)
def stdlib_functions() -> tuple[str, ...]:
    """The source of short functions of the standard library, in file order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    functions: list[str] = []
    for name in _FILES:
        source = (root / f"{name}.py").read_text(encoding="utf-8")
        for node in ast.parse(source).body:
            text = ast.get_source_segment(source, node)
            if isinstance(node, ast.FunctionDef) and text and len(text) <= _LONGEST:
                functions.append(text)
    return tuple(dict.fromkeys(functions))
