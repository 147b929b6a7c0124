"""Which tokens a grammar allows next. No torch."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gemserve.contract.sampling import ANY_OBJECT, Grammar
from gemserve.decoding.grammar_compiler import (
    InvalidGrammar,
    Vocabulary,
    check,
    check_size,
    compile_grammar,
    reason,
)

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_NUM_CACHED = 320  # of two requests with 128 strict tools each, and of some others


class GrammarFailed(RuntimeError):
    """A matcher has reached a limit, or got a token that its grammar does not allow."""


class TrialNeeded(Exception):
    """A grammar is not known yet: it must be tried and compiled first, which may take seconds."""

    def __init__(self, grammar: Grammar) -> None:
        super().__init__("this grammar has not been tried")
        self.grammar = grammar


class Matcher:
    """One request's place in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def is_complete(self) -> bool:
        """Whether the grammar allows nothing but the end."""
        return self._matcher.is_stopped()

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens may be drawn next [at least vocab], including those that end an answer."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        return np.unpackbits(bits, bitorder="little").view(np.bool_)

    def advance(self, token: int) -> None:
        """Advance by a drawn token."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarFailed(reason(self._matcher.get_error()))


class Grammars:
    """Compiles grammars for one tokenizer, whose tables are built when first needed.

    The worker and the threads that build requests may use it at once.
    """

    def __init__(self, tokenizer: Any, *, vocab_size: int, end_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = tuple(sorted(end_ids))
        self._tables: tuple[bytes, LLTokenizer] | None = None
        self._lock = threading.Lock()
        # of a refused grammar the reason: a raised error holds the frames that it went through
        self._known: OrderedDict[Grammar, LLMatcher | str] = OrderedDict()

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher at the grammar's start, independent of all others.

        Slow for a grammar that is not compiled and was not seen lately. Raises `InvalidGrammar`,
        `SchemasBusy`.
        """
        if grammar.compiled is not None:
            return Matcher(grammar.compiled.deep_copy())
        found = self._find(grammar)
        if found is None:
            found = self._compile_or_refuse(grammar)
        return Matcher(_usable(found).deep_copy())

    def known(self, grammar: Grammar) -> Grammar:
        """The grammar in its compiled form. Never slow. Raises `InvalidGrammar`, `TrialNeeded`."""
        found = self._find(grammar)
        if found is None and grammar == ANY_OBJECT:
            found = self._compile_or_refuse(grammar)
        if found is None:
            raise TrialNeeded(grammar)
        return replace(grammar, compiled=_usable(found))

    def try_out(self, grammar: Grammar) -> None:
        """Make a grammar known. Takes seconds at worst.

        Raises `SchemasBusy`, and `InvalidGrammar` for one that is too large to be kept.
        """
        if self._find(grammar) is None:
            self._compile_or_refuse(grammar)

    def _find(self, grammar: Grammar) -> LLMatcher | str | None:
        """What is known of a grammar. Raises `InvalidGrammar` for one that is too large."""
        check_size(grammar.text, grammar.calls or "")
        with self._lock:
            if grammar in self._known:
                self._known.move_to_end(grammar)
            return self._known.get(grammar)

    def _compile_or_refuse(self, grammar: Grammar) -> LLMatcher | str:
        """A refusal is a result, and is remembered: a bad grammar may take the longest."""
        result: LLMatcher | str
        try:
            result = self._compile(grammar)
        except InvalidGrammar as error:
            result = str(error)
        with self._lock:
            self._known[grammar] = result
            while len(self._known) > _NUM_CACHED:
                self._known.popitem(last=False)
        return result

    def _compile(self, grammar: Grammar) -> LLMatcher:
        vocabulary, tables = self._vocabulary_tables()
        if grammar != ANY_OBJECT:
            check(grammar, vocabulary)
        return compile_grammar(grammar, tables)

    def _vocabulary_tables(self) -> tuple[bytes, LLTokenizer]:
        """The vocabulary's JSON and the library's tables of it."""
        with self._lock:
            if self._tables is None:
                vocabulary = Vocabulary(
                    self._tokenizer.backend_tokenizer.to_str(),
                    max(self._vocab_size, len(self._tokenizer)),
                    self._end_ids,
                )
                try:
                    self._tables = vocabulary.to_json(), vocabulary.tables()
                except ValueError as error:
                    raise InvalidGrammar(
                        f"this model's tokenizer cannot be held to one: {reason(str(error))}"
                    ) from error
            return self._tables


def _usable(result: LLMatcher | str) -> LLMatcher:
    if isinstance(result, str):
        raise InvalidGrammar(result)
    return result
