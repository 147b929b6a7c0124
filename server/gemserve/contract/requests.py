"""The request that the API makes and the engine answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from gemserve.contract.adapters import LoadedAdapter
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.filter_plan import FilterPlan
from gemserve.contract.prompt_parts import (
    NO_BREAKS,
    NO_SEPARATORS,
    Excerpt,
    MessagePlace,
    PartDigests,
    ProtectedRange,
    Separators,
    StandsFor,
    TextBreaks,
    TokenArray,
    WrittenText,
)
from gemserve.contract.reading_notes import ReadingNotes
from gemserve.contract.reports import SearchReport
from gemserve.contract.sampling import Grammar, SamplingParams

_READ_AT_ONCE = 1 << 16  # tokens
VectorKind = Literal["keys", "queries"]  # of segments, which are one group; of a question alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to be answered."""

    request_id: str
    prompt_ids: Sequence[int]  # used unaltered
    sampling: SamplingParams
    filter: FilterParams
    priority: int = 0  # lower values are admitted first
    selects_only: bool = False  # the request ends when the filter has chosen
    summarizes_only: bool = False  # it ends when its segments are read
    vectors_only: VectorKind | None = None  # it ends when it is read, with these of its tokens
    lent_groups: tuple[int, ...] = ()  # of segments: others read those that are not cached
    # Alternatives to report beside each prompt token, if any. A prompt whose tokens are scored is
    # read whole, whatever its filter.
    prompt_logprobs: int | None = None
    protected: tuple[ProtectedRange, ...] = ()
    # a filter should keep or drop the text between two of these as a whole
    breaks: TextBreaks = NO_BREAKS
    # Half-open token ranges, ascending, not overlapping, at most `MAX_QUESTION_TOKENS` tokens in
    # all. Empty: no question was found, and the filter watches the prompt's last rows.
    question: tuple[tuple[int, int], ...] = ()
    # how many of its tokens, the last ones, say what calls are about whose results follow
    num_called: int = 0
    # Tokens that a segment of a document is read behind, such as the beginning of the model's chat
    # template; empty: the prompt's first token.
    anchor: tuple[int, ...] = ()
    # for each word of the question the tokens that it begins in
    words: tuple[TokenArray, ...] = field(default=(), compare=False)
    separators: Separators = NO_SEPARATORS  # between kept passages that were not neighbours
    messages: tuple[MessagePlace, ...] | None = None  # for the report; None: it is no chat
    # what of the prompt are segments of a library, in order, and how these were found
    excerpts: tuple[Excerpt, ...] = field(default=(), compare=False)
    searched: SearchReport | None = None
    grammar: Grammar | None = None
    shows_markers: bool = False  # of calls and thinking, also those that are control tokens
    goes_on: bool = False  # the answer's text goes on with that of the prompt
    adapter: LoadedAdapter | None = None
    begin_within_s: float = math.inf  # after so long in the engine it ends, if nothing is read
    tenant: bytes = b""  # whose prompts it may share computed keys and values with
    cache_salt: str = ""  # and of these only prompts with the same one
    # How it will be filtered. `FilterPlanner.planned` makes it, where requests are built: for some
    # methods that takes milliseconds for each choice.
    plan: FilterPlan | None = None
    # what the prompt's tokens were made of, if that is known
    written: WrittenText | None = field(default=None, repr=False, compare=False)
    # what the server's reader does first, which then chooses
    reading: Request | None = field(default=None, repr=False, compare=False)
    # in such a request: what its tokens stand for, if the reader has other tokens
    stands_for: StandsFor | None = field(default=None, repr=False, compare=False)
    # Ids of the stored documents that the prompt contains. An id is never used for another
    # document, and never again once the engine was told to forget it.
    documents: tuple[str, ...] = ()
    # what the document cache keeps of the prompt stays until these are forgotten, if pinned
    # documents have room for it
    pin: bool = False
    # of a chat: its parts, and the first that differs from earlier chats (`EarlierPrompts`)
    parts: PartDigests | None = field(default=None, repr=False, compare=False)
    first_difference: str | None = None
    # where the engine notes which parts of the prompt the document cache holds, if anywhere
    notes: ReadingNotes | None = field(default=None, repr=False, compare=False)
    _array: tuple[Sequence[int], TokenArray] | None = field(default=None, repr=False, compare=False)
    _distinct: TokenArray | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        # here, because whoever makes a request is in no hurry: 128K tokens take 3 to 8 ms
        if self._array is None or self._array[0] is not self.prompt_ids:
            # in parts, because reading a list holds the interpreter lock
            ids = self.prompt_ids
            array = np.empty(len(ids), dtype=np.int64)
            for start in range(0, len(ids), _READ_AT_ONCE):
                array[start : start + _READ_AT_ONCE] = ids[start : start + _READ_AT_ONCE]
            object.__setattr__(self, "_array", (self.prompt_ids, array))
            object.__setattr__(self, "_distinct", None)
        if self._distinct is None and self.sampling.repetition_penalty != 1:
            ordered = np.sort(self.tokens)
            distinct = ordered[np.diff(ordered, prepend=-1) > 0]
            object.__setattr__(self, "_distinct", distinct)

    def __repr__(self) -> str:
        # a traceback with it is logged, where no prompt should be
        return f"Request({self.request_id!r}, {len(self.prompt_ids)} tokens)"

    @property
    def tokens(self) -> TokenArray:
        """`prompt_ids` as an array, which nobody may change."""
        assert self._array is not None
        return self._array[1]

    @property
    def penalized_ids(self) -> TokenArray:
        """The prompt's tokens, ascending and each once; none without a repetition penalty.

        That one alone looks at the prompt. All choices of a request share the array.
        """
        if self._distinct is None or self.sampling.repetition_penalty == 1:
            return np.zeros(0, dtype=np.int64)
        return self._distinct

    @property
    def ends_when_read(self) -> bool:
        """Does it end behind its filter pass, without a choice?"""
        return self.summarizes_only or self.vectors_only is not None

    @property
    def repeated(self) -> tuple[int, ...]:
        """Tokens that a filter pass reads after the prompt: a question in front of its document."""
        return () if self.plan is None else self.plan.repeated

    @property
    def num_read(self) -> int:
        """Tokens of a pass over the whole prompt and a repeated question, if there is one."""
        return len(self.prompt_ids) + len(self.repeated)

    def read_ids(self, start: int, count: int) -> Sequence[int]:
        """Tokens start..start+count−1 of that pass."""
        ids = self.prompt_ids[start : start + count]
        if len(ids) == count:
            return ids
        behind = max(0, start - len(self.prompt_ids))
        return [*ids, *self.repeated[behind : behind + count - len(ids)]]

    @property
    def adapter_positions(self) -> int:
        """Positions of the context that the request's adapter takes."""
        return 0 if self.adapter is None else self.adapter.num_positions
