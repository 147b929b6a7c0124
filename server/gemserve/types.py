"""The types that pass between API and engine, as frozen data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from gemserve.errors import RequestError, shown
from gemserve.filter_plan import FilterPlan, FilterReason, KeysRead, QueriesRead, SummaryArrays
from gemserve.scores import AnswerAttention, FilterScores, ReturnScores

TokenArray = npt.NDArray[np.int64]
FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]
Switch = Literal["auto", "on", "off"]
# "context_free": rules in Lark's notation or in llama.cpp's (GBNF)
GrammarKind = Literal["json_schema", "regex", "context_free"]
FilterMethod = str  # a name in the table of `filtering.methods`
Keep = int | float | Literal["auto"]
WindowSize = int | Literal["auto", "off"]
Lexical = Literal["auto", "off"]
FilterReader = Literal["self", "reader"]
VectorKind = Literal["keys", "queries"]  # of windows, which are one group; of a question alone
Heads = tuple[tuple[int, int], ...]  # (layer, head) pairs
MIN_KEEP = 16
MAX_KEEP = 1 << 30
MIN_WINDOW = 256
MAX_WINDOW = 1 << 20
BESIDE_WINDOW = 256  # most tokens that are read with a window: an anchor, and what is asked
MAX_HEADS = 32  # that a request may name
AUTO_MIN_KEEP = 128
AUTO_MAX_SHARE = 1 / 8
MAX_QUESTION_TOKENS = 64  # most tokens of a question that a filter watches
# A question this many tokens before the prompt's end stands in front of its document. It cannot
# attend to what follows it, so the filter pass reads it once more after the prompt.
FAR_FROM_END = 256
SHORT_TURN = 96  # a chat's last turn of so few tokens is no document, however short others are
MOST_ENCLOSING = 4  # lines around a passage
_READ_AT_ONCE = 1 << 16  # tokens
ADAPTER_NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"  # a regular expression
LIBRARY_NAME = ADAPTER_NAME
CANDIDATES = 16  # windows of libraries that are read for a question, if it does not say
MOST_CANDIDATES = 256


class Priority(IntEnum):
    """Why tokens are protected. Up to `FRAME` they are always read, outside of the budget.

    The others come out of the budget, and the lowest first if it cannot hold them all.
    """

    BOS = 0
    QUESTION = 1
    SYSTEM = 2
    TOOLS = 3  # short results of the calls that the model is to go on from
    FRAME = 4  # what the chat template puts around messages, tools and calls among it
    BEFORE = 5  # the paragraphs before the question, which may be part of it
    HEAD = 6  # the beginning of a document or a long question, which often says what to do
    TAIL = 7  # the end of a document
    END = 8  # the end of a long request, which may be what it asks if no question was found


def _no_tokens() -> npt.NDArray[np.uint32]:
    return np.zeros(0, dtype=np.uint32)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnclosingLines:
    """The lines that say where in a text a passage stands: `class …` and `def …`, or headings.

    A stretch is consecutive lines that the same line encloses. `starts`: the token that each begins
    with, ascending. `line_starts`, `line_stops`: first token of the line that encloses it, and the
    token behind its last; both 0 if there is none. All [stretches].
    """

    starts: npt.NDArray[np.uint32] = field(default_factory=_no_tokens)
    line_starts: npt.NDArray[np.uint32] = field(default_factory=_no_tokens)
    line_stops: npt.NDArray[np.uint32] = field(default_factory=_no_tokens)

    def around(self, token: int) -> tuple[tuple[int, int], ...]:
        """The half-open ranges of the lines that enclose this token's line, the nearest first.

        At most `MOST_ENCLOSING`.
        """
        found: list[tuple[int, int]] = []
        while len(found) < MOST_ENCLOSING:
            # a number of another type would have all of the array converted
            stretch = int(self.starts.searchsorted(np.uint32(token), side="right")) - 1
            if stretch < 0 or not self.line_starts[stretch] < self.line_stops[stretch] <= token:
                break
            token = int(self.line_starts[stretch])
            found.append((token, int(self.line_stops[stretch])))
        return tuple(found)


NO_ENCLOSING = EnclosingLines()


@dataclass(frozen=True, slots=True, kw_only=True)
class TextBreaks:
    """Token positions that begin a paragraph, a sentence or list item, and a line; ascending.

    `with_line_end`: the tokens that are the line end in front of a line together with its
    indentation, as tokenizers like GPT-2's have them. Such a line begins with the next token.
    `enclosing`: which lines enclose others.
    """

    paragraphs: tuple[int, ...] = ()
    sentences: tuple[int, ...] = ()
    lines: tuple[int, ...] = ()
    with_line_end: npt.NDArray[np.uint32] = field(default_factory=_no_tokens, compare=False)
    enclosing: EnclosingLines = field(default=NO_ENCLOSING, compare=False)

    def is_with_line_end(self, token: int) -> bool:
        at = int(self.with_line_end.searchsorted(np.uint32(max(0, token))))
        return at < len(self.with_line_end) and int(self.with_line_end[at]) == token


NO_BREAKS = TextBreaks()


@dataclass(frozen=True, slots=True, kw_only=True)
class Separators:
    """Token ids of a blank line, and of a line's end; both empty: passages are not separated."""

    blank_line: tuple[int, ...] = ()
    line_end: tuple[int, ...] = ()


NO_SEPARATORS = Separators()


@dataclass(frozen=True, slots=True)
class ProtectedRange:
    """Token positions start..stop−1 of a prompt that a filter should keep."""

    start: int
    stop: int
    priority: Priority

    @property
    def is_always_read(self) -> bool:
        """Is it outside of the budget?"""
        return self.priority <= Priority.FRAME


ChatRole = Literal["system", "developer", "user", "assistant", "tool", "template"]


@dataclass(frozen=True, slots=True)
class MessagePlace:
    """Where a message of a chat is: token positions start..stop−1.

    `index`: its number in the chat, from 0.
    """

    index: int
    role: ChatRole
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Excerpt:
    """A window of a library's file in a prompt, at token positions start..stop−1.

    `text`: the window's, which begins at the file's `first_line` (from 1) and `first_character`,
    and is part of what `heading` says. `pages`: the first character of each page of the file, if it
    has pages. `rank`: its place among what the search found, from 0. `characters`: where each token
    begins in `text`: [tokens].
    """

    library: str
    file: str
    file_id: str
    kind: str
    heading: str
    first_line: int
    first_character: int
    pages: tuple[int, ...]
    text: str
    rank: int = 0
    start: int = 0
    stop: int = 0
    characters: TokenArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Protect:
    """What a request says about instructions and documents in its chat.

    `messages`: the indexes of messages that are read whole. `documents`: those of messages that are
    documents. `marks`: pairs of texts; what stands between the two of a pair is read whole, as are
    the marks.
    """

    messages: tuple[int, ...] = ()
    documents: tuple[int, ...] = ()
    marks: tuple[tuple[str, str], ...] = ()


NO_PROTECT = Protect()


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterOptions:
    """What a request says about its filter. None: the server's default. See `FilterParams`."""

    method: FilterMethod | None = None
    keep: Keep | None = None
    fallback: bool | None = None
    layer: int | None = None
    heads: Heads | None = None
    window: WindowSize | None = None
    lexical: Lexical | None = None
    reader: FilterReader | None = None
    pooling: Literal["mean", "max"] | None = None
    return_selection: bool = False
    return_scores: ReturnScores = False
    return_attention: bool = False
    protect: Protect = NO_PROTECT


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterParams:
    """How a prompt is filtered.

    `keep`: the budget for documents, which does not include what is always read. A count of tokens
    ≥ 16, or a fraction in (0, 1) of the documents, rounded up. "auto": as many as the attention
    calls for, at most an eighth of the documents or 128 tokens, and no more than the model answers
    best from, if that was measured. `fallback`: if attention is
    diffuse, keep what fits, all of the prompt if possible. `layer`: the 0-based layer whose queries
    and keys choose; None: the server's. `heads`: the 0-based (layer, head) pairs that score tokens,
    of layers up to that one; None: those of the calibration. `window`: the most tokens of a window
    in which documents are read. "auto": the calibration's. "off": the prompt is read as one
    sequence. `lexical`: "auto": passages rank by the question's words, too. `reader`: which model
    looks at the prompt: the one that answers, or the server's reader. `may_read_whole`: the request
    leaves it to the server whether the prompt is filtered; see `FilterPlan`. `awaits_calibration`:
    the method needs a calibration that is not there yet, so the prompt is read whole.
    """

    method: FilterMethod
    keep: Keep
    fallback: bool = False
    layer: int | None = None
    heads: Heads | None = None
    window: WindowSize = "auto"
    lexical: Lexical = "off"
    reader: FilterReader = "self"
    may_read_whole: bool = False
    awaits_calibration: bool = False
    pooling: Literal["mean", "max"] = "mean"
    return_selection: bool = False
    return_scores: ReturnScores = False
    return_attention: bool = False

    @property
    def is_adaptive(self) -> bool:
        """Does the number of tokens kept depend on the attention?"""
        return self.keep == "auto" or self.fallback

    def kept_count(self, num_tokens: int) -> int:
        """Number of tokens to keep of documents of `num_tokens`. With "auto", the most."""
        return kept_count(self.keep, num_tokens)


def kept_count(keep: Keep, num_tokens: int) -> int:
    """Number of tokens that `keep` means for documents of `num_tokens`. With "auto", the most."""
    if keep == "auto":
        return max(AUTO_MIN_KEEP, math.ceil(AUTO_MAX_SHARE * num_tokens))
    if isinstance(keep, float):
        # the epsilon removes rounding errors such as 0.07 * 100 = 7.000000000000001
        return max(MIN_KEEP, math.ceil(keep * num_tokens - 1e-9))
    return keep


def parse_keep(value: object) -> Keep:
    """Validate a `keep`: int ≥ 16, integral float ≥ 16, fraction in (0, 1), or "auto"."""
    if value == "auto":
        return "auto"
    limits = f'must be a fraction in (0, 1), a count from {MIN_KEEP} to {MAX_KEEP}, or "auto"'
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"filter.keep={shown(value)}: {limits}", param="filter.keep")
    if isinstance(value, float) and 0 < value < 1:
        return value
    if not MIN_KEEP <= value <= MAX_KEEP or value != int(value):
        raise RequestError(f"filter.keep={shown(value)}: {limits}", param="filter.keep")
    return int(value)


def parse_window(value: Any) -> WindowSize:
    """Validate a `window`: a count of tokens, "auto" or "off"."""
    if value == "auto" or value == "off":
        return value
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and MIN_WINDOW <= value <= MAX_WINDOW and value == int(value):
        return int(value)
    raise RequestError(
        f"filter.window={shown(value)}: must be a count of tokens from {MIN_WINDOW} to "
        f'{MAX_WINDOW}, "auto" or "off"',
        param="filter.window",
    )


def parse_heads(value: object) -> Heads:
    """Validate a request's `heads`: 1 to `MAX_HEADS` pairs of numbers from 0, each pair once.

    The planner knows which layers and heads there are. Raises `RequestError`.
    """
    if isinstance(value, (list, tuple)) and len(value) > MAX_HEADS:
        raise RequestError(
            f"filter.heads: has {len(value)} pairs, the limit is {MAX_HEADS}", param="filter.heads"
        )
    if not isinstance(value, (list, tuple)) or not value or not all(map(_is_pair, value)):
        raise RequestError(
            f"filter.heads={shown(value)}: must be a list of 1 to {MAX_HEADS} pairs "
            "[layer, head] of whole numbers from 0",
            param="filter.heads",
        )
    heads = tuple((int(layer), int(head)) for layer, head in value)
    for at, pair in enumerate(heads):
        if pair in heads[:at]:
            raise RequestError(
                f"filter.heads: {list(pair)} is there more than once; the limit is once",
                param="filter.heads",
            )
    return heads


def _is_pair(value: object) -> bool:
    """Is it a [layer, head] pair of whole numbers from 0? 2.0 is one, as everywhere in JSON."""
    return (
        isinstance(value, (list, tuple))
        and len(value) == 2
        and not any(isinstance(n, bool) for n in value)
        and all(isinstance(n, int) or (isinstance(n, float) and n.is_integer()) for n in value)
        and all(n >= 0 for n in value)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn, and when to stop.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off. Penalties follow OpenAI
    (presence, frequency: subtracted, over generated tokens) and Hugging Face (repetition: divides
    positive logits, multiplies negative ones, over prompt and generated tokens; 1 is off).
    `logprobs`: None, or how many alternatives to report beside each drawn token.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must be. `text`: a JSON schema, as JSON, or what another `kind` says.

    `calls`: the schema of a call of a function, which the answer may be instead; `is_parallel`: or
    of several ones. `is_strict`: keywords that no answer can be held to are errors, not ignored.
    `compiled`: its compiled form, if there is one; a request that has it compiles nothing.
    """

    text: str
    is_strict: bool = True
    calls: str | None = None
    is_parallel: bool = True
    kind: GrammarKind = "json_schema"
    compiled: Any = field(default=None, compare=False, repr=False)


ANY_OBJECT = Grammar('{"type": "object"}')


class LoadedAdapter(Protocol):
    """An adapter as one request uses it: this version stays until the request ends.

    `num_positions`: positions that it takes before the prompt's first token.
    """

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def num_positions(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    """Describes an adapter by name. `is_loaded` says whether it is in memory now.

    `version`, `num_bytes` and `num_positions` are those of the last time that it was loaded.
    """

    name: str
    path: str
    kind: str
    version: str
    num_bytes: int
    num_positions: int
    is_loaded: bool


@dataclass(frozen=True, slots=True)
class AdapterName:
    """Which adapter a request uses, for who needs its tensors elsewhere or not at all."""

    name: str
    version: str
    num_positions: int


@dataclass(slots=True, eq=False)
class CacheEntry:
    """Something that the document cache holds. Its thread sets `is_dropped` once; any may read."""

    is_dropped: bool = False


@dataclass(frozen=True, slots=True)
class HeldPart:
    """A part of a prompt that the document cache holds: the shares `start` to `stop` of it."""

    entry: CacheEntry
    start: float
    stop: float


@dataclass(slots=True, eq=False)
class ReadingNotes:
    """What is noted about one request for whoever relays it.

    `is_queued`: the engine has it. `held`: the engine's thread appends to it whenever the document
    cache has stored a part of the prompt, or has found it there.
    """

    is_queued: bool = False
    held: list[HeldPart] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WrittenText:
    """What a prompt's tokens were made of. `starts`, `stops`: the half-open range of characters of
    each token, ascending: [tokens].
    """

    text: str
    starts: TokenArray
    stops: TokenArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StandsFor:
    """The tokens of another model's prompt that those of a reader's prompt stand for.

    Half-open ranges, one for each token of the reader's prompt: [tokens]. Empty: for none.
    """

    starts: TokenArray
    stops: TokenArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to be answered. `prompt_ids` are used unaltered.

    If the prompt's tokens are scored (`prompt_logprobs`), it is read whole, whatever its filter.
    `breaks`: a filter should keep or drop the text between two of these as a whole. `question`:
    half-open token ranges of the question, ascending, not overlapping, at most
    `MAX_QUESTION_TOKENS` tokens in all. If no question was found it is empty, and the filter
    watches the prompt's last rows. `num_called`: how many of its tokens, the last ones, say what
    calls are about whose results follow. `anchor`: tokens that a window of a document is read
    behind, such as the beginning of the model's chat template; by default the prompt's first token.
    `words`: for each word of the question the tokens that it begins in. `separators`: what is put
    between kept passages that were not neighbours. `messages`: where those of a chat are, for the
    report; None: it is no chat. `excerpts`: what of it are windows of a library, in order, and
    `searched` how these were found.

    `plan`: how it will be filtered. `FilterPlanner.planned` makes it, where requests are built: for
    some methods that takes milliseconds for each choice.

    `documents`: ids of the stored documents that the prompt contains. An id is never used for
    another document, and never again once the engine was told to forget it. `pin`: what the
    document cache keeps of the prompt stays until then, if pinned documents have room for it.

    `written`: what the prompt's tokens were made of, if that is known. `reading`: what the server's
    reader does first, which then chooses; `stands_for`: in such a request, what its tokens stand
    for, if the reader has other tokens.

    `notes`: where the engine notes which parts of the prompt the document cache holds, if anywhere.
    """

    request_id: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    filter: FilterParams
    priority: int = 0  # lower values are admitted first
    selects_only: bool = False  # the request ends when the filter has chosen
    summarizes_only: bool = False  # it ends when its windows are read
    vectors_only: VectorKind | None = None  # it ends when it is read, with these of its tokens
    lent_groups: tuple[int, ...] = ()  # of windows: others read those that are not cached
    prompt_logprobs: int | None = None  # alternatives to report beside each prompt token, if any
    protected: tuple[ProtectedRange, ...] = ()
    breaks: TextBreaks = NO_BREAKS
    question: tuple[tuple[int, int], ...] = ()
    num_called: int = 0
    anchor: tuple[int, ...] = ()
    words: tuple[TokenArray, ...] = field(default=(), compare=False)
    separators: Separators = NO_SEPARATORS
    messages: tuple[MessagePlace, ...] | None = None
    excerpts: tuple[Excerpt, ...] = field(default=(), compare=False)
    searched: SearchReport | None = None
    grammar: Grammar | None = None
    shows_markers: bool = False  # of calls and thinking, also those that are control tokens
    adapter: LoadedAdapter | None = None
    tenant: bytes = b""  # whose prompts it may share computed keys and values with
    plan: FilterPlan | None = None
    written: WrittenText | None = field(default=None, repr=False, compare=False)
    reading: Request | None = field(default=None, repr=False, compare=False)
    stands_for: StandsFor | None = field(default=None, repr=False, compare=False)
    documents: tuple[str, ...] = ()
    pin: bool = False
    notes: ReadingNotes | None = field(default=None, repr=False, compare=False)
    _array: tuple[Sequence[int], TokenArray] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        # here, because whoever makes a request is in no hurry: 128K tokens take 3 to 8 ms
        if self._array is None or self._array[0] is not self.prompt_ids:
            # in parts, because reading a list holds the interpreter lock
            ids = self.prompt_ids
            array = np.empty(len(ids), dtype=np.int64)
            for start in range(0, len(ids), _READ_AT_ONCE):
                array[start : start + _READ_AT_ONCE] = ids[start : start + _READ_AT_ONCE]
            object.__setattr__(self, "_array", (self.prompt_ids, array))

    @property
    def tokens(self) -> TokenArray:
        """`prompt_ids` as an array, which nobody may change."""
        assert self._array is not None
        return self._array[1]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageReport:
    """What was kept of one message of a chat: `kept_tokens` of `tokens`.

    `protected_tokens`: how many of them are always read. `index`: the message's number in the chat,
    from 0. None, with the role "template": what the chat template writes beside the messages, which
    has the tools and the calls.
    """

    index: int | None
    role: ChatRole
    tokens: int
    kept_tokens: int
    protected_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """Where a kept passage comes from that a library has: its file, and the place in it.

    `lines`: the first and the last, from 1, of a plain text. `pages`: likewise, of a file that has
    pages. `characters`: the half-open range in the file's text. `heading`: what it is part of.
    """

    library: str
    file: str
    heading: str | None
    lines: tuple[int, int] | None
    pages: tuple[int, int] | None
    characters: tuple[int, int]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchReport:
    """What was searched for a question: all windows of these libraries, with so many tokens.

    `candidates`: how many windows were found, of which `read` were read: fewer if the time was over
    (`filter.max_seconds`). `ms`: of the search.
    """

    libraries: tuple[str, ...]
    windows: int
    tokens: int
    candidates: int
    read: int
    ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterReport:
    """What the filter did; the `filter` object of every response.

    `kept_tokens`: those of the prompt that the answer is generated from; `added_tokens` stand
    between their passages. `protected_tokens`: of the prompt, how many are always read, outside of
    the budget. `messages`: what was kept of each message; None if the prompt is no chat.
    `coverage`: see `filtering.selector.Choice`. None if the method does not measure it. `window`:
    the most tokens of a window. `windows`: how many the documents were cut into, of which the
    document cache had `cached_windows`. All three are None if the prompt was read as one sequence,
    or whole. `reader`: which model looked, where the server has two; None: nobody did, or there is
    one. `searched`, `sources`: of a question to libraries, what was searched, and where each kept
    passage comes from, the best first. `found`: False if coverage says that nothing there answers;
    None if nothing says so.
    """

    method: FilterMethod
    applied: bool
    reason: FilterReason | None
    layer: int | None
    prompt_tokens: int
    kept_tokens: int
    cached_tokens: int
    filter_ms: float
    selection: tuple[tuple[int, int], ...] | None
    protected_tokens: int = 0
    added_tokens: int = 0
    messages: tuple[MessageReport, ...] | None = None
    coverage: float | None = None
    window: int | None = None
    windows: int | None = None
    cached_windows: int | None = None
    reader: FilterReader | None = None
    searched: SearchReport | None = None
    sources: tuple[SourceReport, ...] | None = None
    found: bool | None = None
    scores: FilterScores | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Filtered:
    """The filter has decided. This comes before every token. Times are `time.monotonic()`.

    `ids`: what an answer would be generated from, if the request wants only a selection.
    """

    report: FilterReport
    started_s: float
    filtered_s: float
    ids: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability under the model itself, before temperature and penalties.

    `top`: the likeliest tokens and their log-probabilities, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """New text that no stop string can take back, and how many tokens were drawn for it."""

    text: str
    token_ids: tuple[int, ...]
    drawn_s: float
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log-probabilities of a prompt's tokens but the first; it comes before any `TextDelta`."""

    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowsRead:
    """A group of windows is read: what the choice needs of each.

    `num_cached`: how many of them the document cache had, which have `cached_tokens` tokens.
    """

    summaries: tuple[SummaryArrays, ...]
    num_cached: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The last event of a request. `error` is set exactly if the reason is `error`.

    `stop`: the stop string that ended the answer, if one did. `peak_kv_bytes` includes the filter
    pass. `decode_kv_bytes` is what is held while decoding. `proposed_tokens`, `accepted_tokens`: of
    prompt-lookup decoding. `attention`: if the request asks for it.
    `windows_read`, `vectors`: if it wants no more.
    """

    reason: FinishReason
    completion_tokens: int
    peak_kv_bytes: int = 0
    decode_kv_bytes: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    error: str | None = None
    stop: str | None = None
    attention: AnswerAttention | None = None
    windows_read: WindowsRead | None = None
    vectors: KeysRead | QueriesRead | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LentGroups:
    """The groups of windows that an engine awaits from others, by their numbers.

    `seconds`: how long it would take to read them itself; None: it has not read anything yet.
    """

    numbers: tuple[int, ...] = ()
    seconds: float | None = None


Event = Filtered | PromptScored | TextDelta | Finished
