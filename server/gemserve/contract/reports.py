"""What a filter did with a prompt, for the reply."""

from __future__ import annotations

from dataclasses import dataclass

from gemserve.contract.filter_options import FilterMethod, FilterReader
from gemserve.contract.filter_plan import FilterReason
from gemserve.contract.prompt_parts import ChatRole
from gemserve.contract.scores import FilterScores


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageReport:
    """What was kept of one message of a chat."""

    # The message's number in the chat, from 0. None, with the role "template": what the chat
    # template writes beside the messages, which has the tools and the calls.
    index: int | None
    role: ChatRole
    tokens: int
    kept_tokens: int
    protected_tokens: int  # how many of the kept ones are always read


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """Where a kept passage comes from that a library has: its file, and the place in it."""

    library: str
    file: str
    heading: str | None  # what the passage is part of
    lines: tuple[int, int] | None  # of a plain text: the first and the last, from 1
    pages: tuple[int, int] | None  # likewise, of a file that has pages
    characters: tuple[int, int]  # the half-open range in the file's text
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchReport:
    """What was searched for a question: all windows of these libraries."""

    libraries: tuple[str, ...]
    windows: int
    tokens: int  # of all windows
    candidates: int  # windows that were found
    read: int  # of the candidates: fewer if the time was over (`filter.max_seconds`)
    ms: float  # of the search


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterReport:
    """What the filter did; the `filter` object of every response."""

    method: FilterMethod
    applied: bool
    reason: FilterReason | None
    layer: int | None
    prompt_tokens: int
    kept_tokens: int  # of the prompt, from which the answer is generated
    cached_tokens: int  # of the prompt: those that the document cache had
    filter_ms: float
    selection: tuple[tuple[int, int], ...] | None
    protected_tokens: int = 0  # of the prompt: always read, outside of the budget
    added_tokens: int = 0  # between kept passages
    messages: tuple[MessageReport, ...] | None = None  # None: the prompt is no chat
    # The part of a chat in which it differs first from the most similar earlier one of its key:
    # None if it begins with all of that, or if there is none.
    first_difference: str | None = None
    # see `filtering.selector.Choice`; None: the method does not measure it
    coverage: float | None = None
    coverage_bound: float | None = None  # below it a choice is not trusted
    # The most tokens of a window; how many windows the documents were cut into; how many of them
    # the document cache had. None: the prompt was read as one sequence, or whole.
    window: int | None = None
    windows: int | None = None
    cached_windows: int | None = None
    # which model looked, where the server has two; None: nobody did, or there is one
    reader: FilterReader | None = None
    # of a question to libraries: what was searched, and where each kept passage comes from, the
    # best first
    searched: SearchReport | None = None
    sources: tuple[SourceReport, ...] | None = None
    # False: coverage says that nothing there answers; None: nothing says so
    found: bool | None = None
    scores: FilterScores | None = None
