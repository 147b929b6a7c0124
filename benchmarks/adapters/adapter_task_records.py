"""The task `records`: a function's signature and first docstring line as a fixed JSON record."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence

from benchmarks.adapters.adapter_task_cases import Case, Function

_ORDER = "Write this Python function as a JSON record.\n\n"


def record_of(node: ast.FunctionDef, summary: str) -> dict[str, object]:
    """The label, by parsing: arguments without and with a default, `*` and `**`, and the summary.

    `self` and `cls` are no arguments of a caller.
    """
    arguments = node.args
    plain = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    num_required = len(plain) - len(arguments.defaults)
    required, optional = plain[:num_required], plain[num_required:]
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        (required if default is None else optional).append(argument.arg)
    return {
        "name": node.name,
        "required": [name for name in required if name not in ("self", "cls")],
        "optional": optional,
        "extra": arguments.vararg is not None or arguments.kwarg is not None,
        "about": summary.rstrip("."),
    }


def record_cases(functions: Sequence[Function]) -> list[Case]:
    """A case for each function. The group is its file, because a file's functions are alike.

    Labels that are balanced: how many of the record's lists are filled.
    """
    cases = []
    for function in functions:
        record = record_of(function.node, function.summary)
        user = f'{_ORDER}{function.signature}\n    """{function.summary}"""'
        kinds = "".join(str(int(bool(record[name]))) for name in ("required", "optional", "extra"))
        cases.append(Case(user, json.dumps(record), group=function.file, label=kinds))
    return cases
