"""The page of errors: classes of `errors.py` with their status, and every code with its message."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import gemserve
from gemserve import errors
from gemserve.api.error_replies import error_response
from gemserve.errors import GemserveError
from website.reference.markdown import NOTE, code, prose, table

INTRODUCTION = """\
# Errors

An error's reply is `{"error": {"message", "type", "param", "code"}}`. `param` is the field at
fault, and `message` says what is wrong, with which value, and what would be right.
[The HTTP interface](../http.md) says what stands in the place of this object in Anthropic's and
Ollama's protocols. [When something is wrong](../guides/when-something-is-wrong.md) goes from what
one sees to what to do.
"""
PACKAGE = Path(gemserve.__file__).parent


def write_page() -> str:
    return "\n".join(
        [
            NOTE,
            "",
            INTRODUCTION,
            "## Codes",
            "",
            "A `…` stands for a value. Where a code has several messages, each has a line.",
            "",
            *table(("code", "message", "where it is raised"), told_once(codes())),
            "",
            "## Classes",
            "",
            "The exceptions of `gemserve.errors`, which programs in Python catch. The status is "
            "that of an HTTP reply; commands end with status 2.",
            "",
            *table(("class", "kind of", "status", "default code", "what it says"), classes()),
            "",
        ]
    )


def told_once(rows: Iterable[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """The rows in order; one without a message only if its code has no other."""
    unique = sorted(set(rows))
    told = {name for name, message, _ in unique if message}
    return [row for row in unique if row[1] or row[0] not in told]


def classes() -> Iterator[tuple[str, str, str, str, str]]:
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if not issubclass(kind, GemserveError):
            continue
        base = kind.__bases__[0].__name__
        own_code = getattr(kind, "code", "")
        shown = code(own_code) if isinstance(own_code, str) and own_code else ""
        text, status = told_in_tree(name)
        doc = inspect.cleandoc(kind.__doc__) if kind.__doc__ and "__doc__" in vars(kind) else text
        yield code(name), code(base), status or status_of(kind), shown, prose(doc)


def told_in_tree(name: str) -> tuple[str, str]:
    """What the tree in the module's docstring says of a class, and the status, if it has one."""
    line = re.search(rf"── {name}\b(.*)$", errors.__doc__ or "", flags=re.MULTILINE)
    text = line.group(1).strip() if line else ""
    status = re.search(r"\((\d{3})\)$", text)
    return text.removesuffix(status.group(0)).strip() if status else text, (
        status.group(1) if status else ""
    )


def status_of(kind: type[GemserveError]) -> str:
    """The status of a reply to such an error, if it can come while a request is answered."""
    if issubclass(kind, (errors.ConfigError, errors.ModelError, errors.RankFailed)):
        return ""
    error = kind.__new__(kind)  # its message does not matter
    if isinstance(error, errors.ContextExceeded):
        errors.ContextExceeded.__init__(error, context=2, prompt=3, param="messages", place="")
    for name, value in (("param", None), ("code", "any"), ("retry_after_s", 1)):
        if not hasattr(error, name):
            setattr(error, name, value)
    return str(error_response(error).status_code)


def codes() -> Iterator[tuple[str, str, str]]:
    """Code, message and module, from every call and class in the sources that names a code."""
    for path in sorted(PACKAGE.rglob("*.py")):
        place = code(str(path.relative_to(PACKAGE)))
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call):
                named = {k.arg: k.value for k in node.keywords}
                found = named.get("code")
                if isinstance(found, ast.Constant) and isinstance(found.value, str):
                    yield code(found.value), message_of([*node.args, *named.values()]), place
            elif isinstance(node, ast.ClassDef):
                yield from (
                    (code(found), message_of(init_messages(node)), place)
                    for found in class_codes(node)
                )


def class_codes(node: ast.ClassDef) -> Iterator[str]:
    """The `code = "…"` in a class's body."""
    for line in node.body:
        if not isinstance(line, ast.Assign) or not isinstance(line.value, ast.Constant):
            continue
        if [ast.unparse(target) for target in line.targets] == ["code"]:
            yield str(line.value.value)


def init_messages(node: ast.ClassDef) -> list[ast.expr]:
    """What a class passes to the `__init__` of its base, and the texts that it makes for that."""
    calls = [
        call
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("__init__")
    ]
    texts = [line.value for line in ast.walk(node) if isinstance(line, ast.Assign)]
    return [argument for call in calls for argument in call.args] + texts


def message_of(arguments: list[ast.expr]) -> str:
    """The first text of several words among the arguments of a call."""
    for argument in arguments:
        for part in ast.walk(argument):
            if isinstance(part, ast.JoinedStr):
                pieces = [p.value if isinstance(p, ast.Constant) else "…" for p in part.values]
                text = "".join(map(str, pieces))
            elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                text = part.value
            else:
                continue
            if " " in text:
                return prose(text)
    return ""
