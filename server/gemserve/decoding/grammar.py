"""Answers held to a grammar: which tokens may come next. Needs no torch."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gemserve.decoding.json_schema import (
    InvalidGrammar,
    Vocabulary,
    check,
    compile_schema,
    reason,
)
from gemserve.types import ANY_OBJECT, Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_NUM_CACHED = 64


class GrammarFailed(RuntimeError):
    """A matcher has run into a limit, or was given a token its grammar does not allow."""


class Matcher:
    """One request's place in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def is_complete(self) -> bool:
        """Is nothing but the end allowed any more?"""
        return self._matcher.is_stopped()

    def allowed(self) -> NDArray[np.bool_]:
        """What may be drawn next [at least vocab], the tokens that end an answer among it."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        return np.unpackbits(bits, bitorder="little").view(np.bool_)

    def advance(self, token: int) -> None:
        """Go on by a drawn token."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarFailed(reason(self._matcher.get_error()))


class Grammars:
    """Compiles grammars for one tokenizer, whose tables are built once, when first needed.

    Used by the worker and by the threads that build requests.
    """

    def __init__(self, tokenizer: Any, *, vocab_size: int, end_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = tuple(sorted(end_ids))
        self._tables: tuple[Vocabulary, LLTokenizer] | None = None
        self._lock = threading.Lock()
        self._tried = lru_cache(maxsize=_NUM_CACHED)(self._try)

    def matcher(self, grammar: Grammar) -> Matcher:
        """At the grammar's start, sharing nothing that changes with any other matcher.

        Raises `InvalidGrammar`. Slow for a grammar not seen lately.
        """
        tried = self._tried(grammar)
        if isinstance(tried, InvalidGrammar):
            raise tried.with_traceback(None)
        return Matcher(tried.deep_copy())

    def _try(self, grammar: Grammar) -> LLMatcher | InvalidGrammar:
        """What is refused is remembered too: it may be what took longest."""
        try:
            return self._compile(grammar)
        except InvalidGrammar as error:
            return error

    def _compile(self, grammar: Grammar) -> LLMatcher:
        vocabulary, tables = self._known()
        if grammar != ANY_OBJECT:
            check(grammar.schema, vocabulary)
        return compile_schema(grammar.schema, tables)

    def _known(self) -> tuple[Vocabulary, LLTokenizer]:
        with self._lock:
            if self._tables is None:
                vocabulary = Vocabulary(
                    self._tokenizer.backend_tokenizer.to_str(),
                    max(self._vocab_size, len(self._tokenizer)),
                    self._end_ids,
                )
                try:
                    self._tables = vocabulary, vocabulary.tables()
                except ValueError as error:
                    raise InvalidGrammar(
                        f"this model's tokenizer cannot be held to one: {reason(str(error))}"
                    ) from error
            return self._tables
