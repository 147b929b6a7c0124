"""Jupyter notebooks: the cells' texts and outputs, without pictures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from gemserve.files.formats import Refused
from gemserve.files.plain_text import NotText, decode

_PICTURE = re.compile(r"data:[\w.+/-]+;base64,[A-Za-z0-9+/=]*")
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_TEXTS = ("text/markdown", "text/plain")  # of an output, the first that there is


def read(content: bytes) -> str:
    try:
        notebook = json.loads(decode(content))
    except NotText as error:
        raise Refused(str(error)) from None
    except json.JSONDecodeError as error:
        raise Refused(f"is no notebook: its JSON is damaged ({error})") from None
    cells = _field(notebook, "cells", list)
    if not cells:  # as Jupyter wrote them before 2015
        cells = [cell for sheet in _field(notebook, "worksheets", list) for cell in _cells(sheet)]
    language = _field(
        _field(_field(notebook, "metadata", dict), "kernelspec", dict), "language", str
    )
    texts = [text for cell in cells for text in _texts(cell, language) if text.strip()]
    return _PICTURE.sub("", "\n\n".join(texts))


def _cells(sheet: Any) -> list[Any]:
    cells: list[Any] = _field(sheet, "cells", list)
    return cells


def _texts(cell: Any, language: str) -> Iterator[str]:
    source = _joined(cell, "source") or _joined(cell, "input")
    if _field(cell, "cell_type", str) != "code":
        yield source
        return
    if source.strip():
        yield f"```{language}\n{source.rstrip()}\n```"
    for output in _field(cell, "outputs", list):
        text = _COLOURS.sub("", _output(output)).rstrip()
        if text:
            yield f"Output:\n{text}"


def _output(output: Any) -> str:
    if _field(output, "output_type", str) == "error":
        return f"{_field(output, 'ename', str)}: {_field(output, 'evalue', str)}"
    data = _field(output, "data", dict)
    return next((_joined(data, kind) for kind in _TEXTS if kind in data), _joined(output, "text"))


def _joined(of: Any, name: str) -> str:
    """A text, which may be a list of its lines."""
    lines = _field(of, name, list)
    return "".join(each for each in lines if isinstance(each, str)) or _field(of, name, str)


def _field(of: Any, name: str, kind: type) -> Any:
    """What JSON has under this name; an empty value of that kind if it has something else."""
    value = of.get(name) if isinstance(of, dict) else None
    return value if isinstance(value, kind) else kind()
