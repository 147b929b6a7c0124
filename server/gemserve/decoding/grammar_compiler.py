"""Compiles grammars with llguidance. One that takes too long to compile is refused.

The library limits most of what a grammar can demand, but not the intersection of many patterns, the
product of several `multipleOf`, the repetition of repetitions, or the depth of rules. So a separate
process first compiles a grammar and draws a few tokens. That process runs this module as a program.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from dataclasses import astuple, dataclass, replace
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from gemserve.contract.sampling import Grammar, GrammarKind
from gemserve.errors import SchemasBusy

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from llguidance._lib import JsonCompileOptions

MAX_GRAMMAR_BYTES = 64 << 10
_CPU_S = 2
_WALL_S = 30.0  # a trial that has not used up its processor time by then lacks a processor
_MEMORY_BYTES = 1 << 30
_STACK_BYTES = 1 << 20
_SHOWN_CHARS = 300
_TRIED_TOKENS = 32
# The reader of replies finds the same forms of calls: see api/replies/call_forms.py.
_CALL_OR_ANSWER = r"""
start: call | {tagged} | answer
tagged: "<tool_call>" /\n?/ call /\n?/ "</tool_call>" /\n?/
call: %json {call}
answer: %json {answer}
"""
_TRIALS = threading.BoundedSemaphore(4)  # each may take a processor


class InvalidGrammar(ValueError):
    """This grammar cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer as JSON, the number of its tokens, and the tokens that end an answer."""

    tokenizer: str
    size: int
    end_ids: tuple[int, ...]

    def tables(self) -> LLTokenizer:
        """The library's tables; 0.7 s for 128,000 tokens. Raises `ValueError`."""
        from llguidance import LLTokenizer

        return LLTokenizer(self.tokenizer, n_vocab=self.size, eos_token=list(self.end_ids) or None)

    def to_json(self) -> bytes:
        """What trials of grammars read."""
        return json.dumps(astuple(self), ensure_ascii=False).encode()


def check_size(*texts: str) -> None:
    """Raise `InvalidGrammar` if a grammar's texts are too large together."""
    size = sum(len(text.encode()) for text in texts)
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidGrammar(f"has {size} bytes, the limit is {MAX_GRAMMAR_BYTES}")


def check(grammar: Grammar, vocabulary: bytes) -> None:
    """Prove that compiling a grammar ends soon. Raises `InvalidGrammar`, `SchemasBusy`.

    `vocabulary`: its JSON, which may be many megabytes, and holds up all threads while it is made.
    Takes 0.1 s for an ordinary one, at most `_CPU_S` seconds, and the time of the tables.
    """
    command = [sys.executable, "-P", "-m", __name__]
    # with a thread per processor, numpy alone reserves more than the limit on memory
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    try:
        with _TRIALS:
            given = astuple(replace(grammar, compiled=None))
            trial = subprocess.run(
                command,
                input=json.dumps(given).encode() + b"\n" + vocabulary,
                capture_output=True,
                timeout=_WALL_S,
                env=environment,
            )
    except subprocess.TimeoutExpired as error:
        raise SchemasBusy(f"the machine was too busy to compile it within {_WALL_S:g} s") from error
    if trial.returncode < 0:  # ended by a limit
        raise InvalidGrammar(f"takes more than {_CPU_S} s or too much memory to compile")
    if trial.returncode > 0:
        raise RuntimeError(f"no grammar can be tried: {trial.stderr.decode()}")
    if trial.stdout:
        raise InvalidGrammar(trial.stdout.decode())


def compile_grammar(grammar: Grammar, tables: LLTokenizer) -> LLMatcher:
    """A matcher at the grammar's start. Raises `InvalidGrammar`."""
    from llguidance import LLMatcher

    compiled = LLMatcher(tables, library_grammar(grammar), log_level=0, limits=limits(grammar.kind))
    if not compiled.is_error():
        compiled.compute_bitmask()  # some errors only show at the first step
    if compiled.is_error():
        message = reason(compiled.get_error())
        raise InvalidGrammar("nothing matches it" if "NoExt" in message else message)
    return compiled


def library_grammar(grammar: Grammar) -> str:
    """The grammar in llguidance's format. Raises `InvalidGrammar`."""
    from llguidance import LLMatcher

    try:
        if grammar.kind == "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        if grammar.kind == "context_free":
            return LLMatcher.grammar_from_lark(_in_lark(grammar.text))
    except ValueError as error:
        raise InvalidGrammar(reason(str(error))) from error
    options: JsonCompileOptions = {
        # with flexible whitespace even a bounded schema has answers of any length
        "whitespace_flexible": False,
        "item_separator": ", ?",
        "key_separator": ": ?",
        "lenient": not grammar.is_strict,
        "coerce_one_of": not grammar.is_strict,
    }
    try:
        if grammar.calls is None:
            return LLMatcher.grammar_from_json_schema(grammar.text, overrides=options)
        # the library has options for such a grammar only within its schemas
        answer, call = (
            json.dumps({**json.loads(text), "x-guidance": options})
            for text in (grammar.text, grammar.calls)
        )
    except ValueError as error:
        raise InvalidGrammar(reason(str(error))) from error
    tagged = "tagged+" if grammar.is_parallel else "tagged"
    text = _CALL_OR_ANSWER.format(tagged=tagged, call=call, answer=answer)
    return LLMatcher.grammar_from_lark(text)


def _in_lark(text: str) -> str:
    """The grammar in Lark's notation, in which it may be already. Raises `ValueError`."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    except Exception as error:  # the library has no class of its own for most of its complaints
        message = f"neither Lark's notation (start: …) nor llama.cpp's (root ::= …): {error}"
        raise ValueError(message) from error


def limits(kind: GrammarKind) -> LLParserLimits:
    """Limits of a grammar while it is compiled, and at each token.

    Rules that fit a text in many ways take longer for every token of an answer, with the square of
    the items in a row. Large schemas have as many items, but fit a text in one way.
    """
    from llguidance import LLParserLimits

    has_rules = kind == "context_free"
    return LLParserLimits(
        max_items_in_row=500 if has_rules else 20_000,
        step_max_items=20_000 if has_rules else 50_000,
        max_lexer_states=30_000,
        verbose_errors=False,
    )


def reason(message: str) -> str:
    """The library's message on one line."""
    line = " ".join(message.replace("<non-verbose/>", "").split())
    if line.startswith("regex parse error"):
        line = f"pattern: {line}"
    return line[:_SHOWN_CHARS]


def _main() -> None:
    """Read a line with a grammar, and a vocabulary; write what is wrong with it, or nothing."""
    import resource

    grammar = json.loads(sys.stdin.buffer.readline())
    tokenizer, size, end_ids = json.load(sys.stdin.buffer)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    tables = Vocabulary(tokenizer, size, tuple(end_ids)).tables()
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime) + _CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    # The library follows rules by recursion, and a stack that is full ends the process. The
    # server's threads have much larger ones.
    threading.stack_size(_STACK_BYTES)
    tried = threading.Thread(target=_try, args=(Grammar(*grammar), tables, end_ids))
    tried.start()
    tried.join()


def _try(grammar: Grammar, tables: LLTokenizer, end_ids: list[int]) -> None:
    try:
        _walk(compile_grammar(grammar, tables), end_ids)
    except InvalidGrammar as error:
        sys.stdout.write(str(error))


def _walk(matcher: LLMatcher, end_ids: list[int]) -> None:
    """Draw some tokens that are allowed: some schemas reach a limit only then."""
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
