"""Runs functions of a client's program in the client's environment, so that it is imported once.

A line of standard input names the function and describes the server, in JSON. The reply is a
line, too: the traceback, or an empty text. The environment has neither pytest nor gemserve.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
from types import SimpleNamespace


def main(path: str) -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a client prints must not stand among the replies
    module = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if module is None:
                spec = importlib.util.spec_from_file_location("client_program", path)
                module = importlib.util.module_from_spec(spec)
                sys.modules["client_program"] = module  # typed classes are looked up there
                spec.loader.exec_module(module)
            getattr(module, asked["function"])(SimpleNamespace(**asked["server"]))
            error = ""
        except BaseException as raised:
            error = described(raised, path)
        print(json.dumps(error), file=replies, flush=True)


def described(error: BaseException | None, path: str) -> str:
    """The error and its causes, with the lines of the program and the last one of the client."""
    lines = []
    while error is not None and len(lines) < 8:
        frames = traceback.extract_tb(error.__traceback__)
        told = [frame for frame in frames if frame.filename == path] + frames[-1:]
        lines += traceback.format_list(told) + traceback.format_exception_only(error)
        error = error.__cause__ or error.__context__
    return "".join(lines)


main(sys.argv[1])
