"""A JSON schema as a grammar for llguidance, refused where compiling it could hold up the server.

The library limits much of what a schema can ask for, but not the intersection of many patterns, nor
what remainders of several numbers multiply to. So a schema is first compiled, and a few tokens are
drawn, in a process of its own, which is this module run as a program.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from dataclasses import astuple, dataclass
from random import Random
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_SCHEMA_BYTES = 64 << 10
_CPU_S = 2
_WALL_S = 30.0  # on a machine so busy that two seconds of processor time take longer
_MEMORY_BYTES = 1 << 30
_SHOWN_CHARS = 300
_TRIED_TOKENS = 32
_TRIALS = threading.BoundedSemaphore(4)  # at once: each may take a processor


class InvalidGrammar(ValueError):
    """No answer can be held to this grammar; the message says why."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What masks are made for: a tokenizer as JSON, tokens in all, those that end an answer."""

    tokenizer: str
    size: int
    end_ids: tuple[int, ...]

    def tables(self) -> LLTokenizer:
        """As the library needs it; 0.7 s for 128,000 tokens. Raises `ValueError`."""
        from llguidance import LLTokenizer

        return LLTokenizer(self.tokenizer, n_vocab=self.size, eos_token=list(self.end_ids) or None)


def check(schema: str, vocabulary: Vocabulary) -> None:
    """Prove that compiling a schema's JSON text ends soon. Raises `InvalidGrammar`.

    Takes 0.1 s for an ordinary schema, `_CPU_S` seconds at most, and what the tables take.
    """
    size = len(schema.encode())
    if size > MAX_SCHEMA_BYTES:
        raise InvalidGrammar(f"has {size} bytes, the limit is {MAX_SCHEMA_BYTES}")
    command = [sys.executable, "-P", "-m", __name__]
    # or numpy alone reserves more than the limit on memory, where there are many processors
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    try:
        with _TRIALS:
            told = json.dumps([schema, *astuple(vocabulary)]).encode()
            trial = subprocess.run(
                command, input=told, capture_output=True, timeout=_WALL_S, env=environment
            )
    except subprocess.TimeoutExpired as error:
        raise InvalidGrammar("takes too long to compile") from error
    if trial.returncode < 0:  # ended by a limit
        raise InvalidGrammar(f"takes more than {_CPU_S} s or too much memory to compile")
    if trial.returncode > 0:
        raise RuntimeError(f"no schema can be tried: {trial.stderr.decode()}")
    if trial.stdout:
        raise InvalidGrammar(trial.stdout.decode())


def compile_schema(schema: str, tables: LLTokenizer) -> LLMatcher:
    """A matcher at the start of a schema's JSON text. Raises `InvalidGrammar`."""
    from llguidance import LLMatcher

    compiled = LLMatcher(tables, to_grammar(schema), log_level=0, limits=limits())
    if not compiled.is_error():
        compiled.compute_bitmask()  # finds what only a tokenizer's first step meets
    if compiled.is_error():
        message = reason(compiled.get_error())
        raise InvalidGrammar("nothing matches it" if "NoExt" in message else message)
    return compiled


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
    """Read a schema and a vocabulary; write what is wrong with it, or nothing."""
    import resource

    schema, tokenizer, size, end_ids = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    tables = Vocabulary(tokenizer, size, tuple(end_ids)).tables()
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime) + _CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    try:
        _walk(compile_schema(schema, tables), end_ids)
    except InvalidGrammar as error:
        sys.stdout.write(str(error))


def _walk(matcher: LLMatcher, end_ids: list[int]) -> None:
    """Draw what is allowed, for a while: some schemas meet their limits only then."""
    rng = Random(0)
    for _ in range(_TRIED_TOKENS):
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        choices = np.setdiff1d(allowed, end_ids)
        if matcher.is_error():
            raise InvalidGrammar(reason(matcher.get_error()))
        if not len(choices):
            return
        matcher.consume_token(int(rng.choice(choices)))


if __name__ == "__main__":
    _main()
