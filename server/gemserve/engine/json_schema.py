"""A JSON schema as a grammar for llguidance, refused where compiling it could hold up the server.

The library limits most of what a schema can ask for, but not the intersection of many patterns. So
a schema is first tried in a process of its own, which is this module run as a program.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MAX_SCHEMA_BYTES = 64 << 10
_CPU_S = 2
_WALL_S = 30.0  # on a machine so busy that two seconds of processor time take longer
_MEMORY_BYTES = 1 << 30
_SHOWN_CHARS = 300
_TRIALS = threading.BoundedSemaphore(4)  # at once: each may take a processor


class InvalidGrammar(ValueError):
    """No answer can be held to this grammar; the message says why."""


def check(schema: str) -> None:
    """Prove that compiling a schema's JSON text ends soon. Raises `InvalidGrammar`.

    Takes 0.1 s for an ordinary schema, `_CPU_S` seconds at most.
    """
    size = len(schema.encode())
    if size > MAX_SCHEMA_BYTES:
        raise InvalidGrammar(f"has {size} bytes, the limit is {MAX_SCHEMA_BYTES}")
    command = [sys.executable, "-P", "-m", __name__]
    try:
        with _TRIALS:
            trial = subprocess.run(
                command, input=schema.encode(), capture_output=True, timeout=_WALL_S
            )
    except subprocess.TimeoutExpired as error:
        raise InvalidGrammar("takes too long to compile") from error
    if trial.returncode < 0:  # ended by a limit
        raise InvalidGrammar(f"takes more than {_CPU_S} s or too much memory to compile")
    if trial.returncode > 0:
        raise RuntimeError(f"no schema can be tried: {trial.stderr.decode()}")
    if trial.stdout:
        raise InvalidGrammar(trial.stdout.decode())


def to_grammar(schema: str) -> str:
    """llguidance's own form of a schema's JSON text. Raises `InvalidGrammar`."""
    from llguidance import LLMatcher

    try:
        return LLMatcher.grammar_from_json_schema(
            schema,
            overrides={
                # bounded, or a bounded schema would have answers of any length
                "whitespace_flexible": False,
                "item_separator": ", ?",
                "key_separator": ": ?",
                "lenient": False,
                "coerce_one_of": False,
            },
        )
    except ValueError as error:
        raise InvalidGrammar(reason(str(error))) from error


def limits() -> LLParserLimits:
    """What a grammar may take while it is compiled, and for each token."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_items_in_row=20_000, max_lexer_states=30_000, verbose_errors=False)


def reason(message: str) -> str:
    """The library's message on one line."""
    return " ".join(message.replace("<non-verbose/>", "").split())[:_SHOWN_CHARS]


def _main() -> None:
    """Read a schema; write what is wrong with it, or nothing."""
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    from llguidance import LLMatcher

    try:
        wrong = LLMatcher.validate_grammar(to_grammar(sys.stdin.read()), limits=limits())
    except InvalidGrammar as error:
        wrong = str(error)
    if not wrong.startswith("WARNING"):
        sys.stdout.write(reason(wrong))


if __name__ == "__main__":
    _main()
