"""The page of the Python API: signatures and docstrings of what programs import."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from itertools import groupby
from types import ModuleType
from typing import Any

from website.reference.markdown import NOTE, code, prose, table

INTRODUCTION = """\
# Python

What programs import, with the signatures and docstrings of this release.
[Use from Python](../architecture.md#use-from-python-without-a-server) is an introduction to
`gemserve.llm`, and [clients](../clients.md#gemserve_client) to `gemserve_client`.
"""
# module, and the names of it that programs use; none: all public ones that it defines
MODULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("gemserve.llm", ()),
    ("gemserve.contract.filter_options", ("FilterOptions", "Protect")),
    ("gemserve.contract.sampling", ("SamplingParams",)),
    ("gemserve.contract.events", ("TextDelta", "Finished")),
    ("gemserve.contract.reports", ("FilterReport",)),
    ("gemserve.config", ("ModelConfig", "EngineConfig", "ServerConfig")),
    ("gemserve_client", ()),
)


def write_page() -> str:
    lines = [NOTE, "", INTRODUCTION]
    for module_name, names in MODULES:
        module = importlib.import_module(module_name)
        lines += [f"## {module_name}", "", *docstring(module.__doc__), ""]
        for name in names or public_names(module):
            lines += describe(name, getattr(module, name))
    return "\n".join(lines)


def public_names(module: ModuleType) -> list[str]:
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return list(listed)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and getattr(value, "__module__", None) == module.__name__
        and (inspect.isclass(value) or inspect.isfunction(value))
    ]


def describe(name: str, value: Any) -> Iterator[str]:
    yield from (f"### {name}", "")
    if not inspect.isclass(value):
        yield from (*signature(name, value), *docstring(value.__doc__), "")
        return
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    if not fields and "__init__" in vars(value):
        yield from signature(name, value)
    has_own_docstring = value.__doc__ and not value.__doc__.startswith(f"{name}(")
    if has_own_docstring:
        yield from (*docstring(value.__doc__), "")
    if fields:
        yield from table(("field", "type", "default"), map(field_row, fields))
        yield ""
    elif annotations := vars(value).get("__annotations__"):
        rows = [(code(key), code(type_name(kind))) for key, kind in annotations.items()]
        yield from (*table(("field", "type"), rows), "")
    for method_name, method in list(vars(value).items()):
        plain = inspect.unwrap(getattr(method, "__func__", method))
        if method_name.startswith("_") or not inspect.isfunction(plain) or not plain.__doc__:
            continue
        yield from (f"#### {name}.{method_name}", "")
        yield from (*signature(method_name, plain), *docstring(plain.__doc__), "")


def field_row(field: dataclasses.Field[Any]) -> tuple[str, str, str]:
    default = ""
    if field.default is not dataclasses.MISSING:
        default = code(repr(field.default))
    elif field.default_factory is not dataclasses.MISSING:
        default = code(f"{getattr(field.default_factory, '__name__', 'made')}()")
    return code(field.name), code(type_name(field.type)), default


def type_name(kind: Any) -> str:
    text = kind if isinstance(kind, str) else inspect.formatannotation(kind)
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", text)


def signature(name: str, value: Any) -> list[str]:
    try:
        found = inspect.signature(value)
    except ValueError:
        return []
    parameters = [shortened(p) for p in found.parameters.values() if p.name != "self"]
    text = f"{name}{found.replace(parameters=parameters)}"
    text = re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", text.replace("'", ""))
    text = re.sub(r"<([\w. ]+) object at 0x[0-9a-f]+>", r"\1()", text)
    if len(text) > 88:
        head, _, rest = text.partition("(")
        inner, _, result = rest.rpartition(")")
        text = (
            f"{head}(\n" + "".join(f"    {part},\n" for part in split_commas(inner)) + f"){result}"
        )
    return ["```python", text, "```", ""]


def shortened(parameter: inspect.Parameter) -> inspect.Parameter:
    """A default that is an object of all defaults is shown without its fields."""
    kind = type(parameter.default)
    if not dataclasses.is_dataclass(kind) or parameter.default != kind():
        return parameter
    return parameter.replace(default=AsWritten(f"{kind.__name__}()"))


class AsWritten(str):
    """A text that is shown without quotes."""

    def __repr__(self) -> str:
        return str(self)


def split_commas(text: str) -> list[str]:
    """The parts between commas that are outside of brackets."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    return [*parts, text[start:].strip()]


def docstring(text: str | None) -> list[str]:
    """A docstring as Markdown: examples become blocks of code, and the rest is text."""
    lines: list[str] = []
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(text or ""))
    for is_code, group in groupby(paragraphs, key=lambda p: p.startswith((">>>", "    "))):
        if is_code:
            examples = [shown for part in group for shown in [*map(example, part.split("\n")), ""]]
            lines += ["```python", *examples[:-1], "```", ""]
        else:
            lines += [line for part in group for line in [*map(prose, part.split("\n")), ""]]
    return lines[:-1]


def example(line: str) -> str:
    """A line of an example as a program has it: what it prints becomes a comment."""
    if line.startswith((">>> ", "... ")):
        return line[4:]
    return line[4:] if line.startswith("    ") else f"# {line}"
