"""Prompts from text, messages or token ids, with what a filter should keep of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from gemserve.contract.filter_options import NO_PROTECT, Protect
from gemserve.contract.prompt_parts import (
    NO_BREAKS,
    NO_SEPARATORS,
    SHORT_TURN,
    Excerpt,
    MessagePlace,
    Priority,
    ProtectedRange,
    Separators,
    TextBreaks,
    TokenArray,
    WrittenText,
)
from gemserve.contract.reports import SearchReport
from gemserve.errors import RequestError
from gemserve.prompting.answer_start import AnswerStart
from gemserve.prompting.chat_parts import RenderedChat
from gemserve.prompting.chat_protection import check_marks, marked_ranges, protect_chat
from gemserve.prompting.chat_template import NO_VARIABLES, render_chat
from gemserve.prompting.client_text import encode_chat
from gemserve.prompting.encoding import TokenLimit, encode, token_edges
from gemserve.prompting.excerpt_tokens import (
    NO_EXCERPTS,
    Excerpts,
    find_places,
    placed,
    with_parts,
)
from gemserve.prompting.protected import (
    last_paragraphs,
    plain_ranges,
    whole_sentences,
    with_question,
)
from gemserve.prompting.question import chat_question, ids_question, text_question
from gemserve.prompting.segment_anchor import segment_anchor
from gemserve.prompting.template_roles import fit_roles, source_places
from gemserve.prompting.text_breaks import find_breaks, text_of_ids
from gemserve.prompting.tools import Message, Tool, for_template
from gemserve.prompting.word_places import find_word_places
from gemserve.ranges import Ranges


@lru_cache(maxsize=16)
def separators(tokenizer: Any) -> Separators:
    """A blank line and a line's end as they follow a word in this tokenizer's texts."""
    return Separators(
        blank_line=_behind_a_word(tokenizer, "\n\n"), line_end=_behind_a_word(tokenizer, "\n")
    )


def _behind_a_word(tokenizer: Any, text: str) -> tuple[int, ...]:
    """The tokens of `text`; none if it is part of the word's token."""
    word: list[int] = encode(tokenizer, "a", add_special_tokens=False).ids
    both: list[int] = encode(tokenizer, f"a{text}", add_special_tokens=False).ids
    return tuple(both[len(word) :]) if both[: len(word)] == word else ()


_LAST_BLANKS = 4  # tokens of what ends a prompt that are kept however many there are
_ANSWER_TOKENS = 8  # at the end of a prompt without roles, where it may say "Answer:"


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids as the model sees them, and the ranges worth protecting.

    `text` is what was tokenized, and `encoding` its `tokenizers.Encoding` or `TokenOffsets`. Both
    are empty for a prompt of token ids. The others are those of
    `Request`.
    """

    ids: Sequence[int]
    protected: tuple[ProtectedRange, ...]
    text: str = ""
    encoding: Any = None
    breaks: TextBreaks = NO_BREAKS
    question: Ranges = ()
    messages: tuple[MessagePlace, ...] | None = None
    num_called: int = 0
    anchor: tuple[int, ...] = ()
    words: tuple[TokenArray, ...] = ()
    separators: Separators = NO_SEPARATORS
    excerpts: tuple[Excerpt, ...] = ()
    searched: SearchReport | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """What a `Request` takes over."""
        names = (
            "protected",
            "breaks",
            "question",
            "messages",
            "num_called",
            "anchor",
            "words",
            "separators",
            "excerpts",
            "searched",
        )
        return {
            "prompt_ids": self.ids,
            "written": self.written,
            **{name: getattr(self, name) for name in names},
        }

    @property
    def written(self) -> WrittenText | None:
        """None for a prompt of token ids."""
        if not self.text:
            return None
        starts, stops = token_edges(self.encoding)
        return WrittenText(text=self.text, starts=starts, stops=stops)

    @property
    def offsets(self) -> Sequence[tuple[int, int]]:
        """Each token's half-open range of characters in `text`. Slow for a long prompt."""
        offsets: Sequence[tuple[int, int]] = self.encoding.offsets
        return offsets


def ids_prompt(tokenizer: Any, ids: Sequence[int], protect: Protect = NO_PROTECT) -> Prompt:
    """A prompt of token ids, taken unaltered. Raises `RequestError` if `protect` is given."""
    _check_plain(protect)
    if protect.marks:
        field = "filter.protect.marks"
        raise RequestError(f"{field}: only with a text; token ids have no marks", param=field)
    has_bos = len(ids) > 0 and ids[0] == tokenizer.bos_token_id
    question = ids_question(tokenizer, ids)
    ranges = plain_ranges(len(ids), has_bos)
    text, starts = text_of_ids(tokenizer, ids[int(has_bos) :])
    if has_bos:  # it has no text in a plain prompt either
        starts = np.concatenate([np.zeros(1, dtype=np.int64), starts])
    breaks = find_breaks([(0, text)], starts)
    protected = with_question(tokenizer, ids, ranges, question, len(ids) - _ANSWER_TOKENS)
    return Prompt(
        ids,
        whole_sentences(protected, breaks, has_question=bool(question)),
        breaks=breaks,
        question=question,
        anchor=segment_anchor(tokenizer),
        words=find_word_places(text, starts, question),
        separators=separators(tokenizer),
    )


def text_prompt(
    tokenizer: Any,
    text: str,
    protect: Protect = NO_PROTECT,
    limit: TokenLimit | None = None,
    excerpts: Excerpts = NO_EXCERPTS,
) -> Prompt:
    """A plain prompt, with the special tokens the tokenizer adds (BOS).

    Raises `RequestError` if `protect` names what is not there. A long text is read no further than
    to the `limit`. `excerpts`: what `text` has of libraries.
    """
    _check_plain(protect)
    check_marks(text, protect)
    encoding = encode(tokenizer, text, add_special_tokens=True, limit=limit)
    encoding, parts = _with_excerpts(tokenizer, text, encoding, excerpts)
    ids = encoding.ids
    has_bos = len(ids) > 0 and ids[0] == tokenizer.bos_token_id
    # blanks are encoded again: a long encoding gives its offsets slowly, and only the end matters
    unpadded = text.rstrip()
    blanks = len(encode(tokenizer, text[len(unpadded) :], add_special_tokens=False))
    stop = max(int(has_bos), len(ids) - max(0, blanks - _LAST_BLANKS))
    ends = [encode(tokenizer, end, add_special_tokens=False) for end in last_paragraphs(unpadded)]
    last = [max(0, len(ids) - blanks - len(end)) for end in ends]
    question = text_question(tokenizer, text, encoding)
    ranges = plain_ranges(stop, has_bos, last)
    protected = with_question(tokenizer, ids, ranges, question, stop - _ANSWER_TOKENS)
    chat = RenderedChat((), (), text, encoding)
    marked = [chat.tokens(*at) for at in marked_ranges(text, protect, 0, len(text))]
    protected += tuple(ProtectedRange(*at, Priority.SYSTEM) for at in marked)
    starts = token_edges(encoding)[0]
    breaks = find_breaks([(0, text)], starts)
    return Prompt(
        ids,
        whole_sentences(protected, breaks, has_question=bool(question)),
        text,
        encoding,
        breaks,
        question,
        anchor=segment_anchor(tokenizer),
        words=find_word_places(text, starts, question),
        separators=separators(tokenizer),
        excerpts=parts,
    )


def chat_prompt(
    tokenizer: Any,
    messages: Sequence[Message],
    limit: TokenLimit | None = None,
    tools: Sequence[Tool] = (),
    *,
    variables: Mapping[str, Any] = NO_VARIABLES,
    protect: Protect = NO_PROTECT,
    short: int = SHORT_TURN,
    excerpts: Excerpts = NO_EXCERPTS,
    start: AnswerStart = "header",
) -> Prompt:
    """Messages and tools through the model's chat template, ready for the answer.

    The template may read further `variables`. `protect`, `short`: see `protect_chat`. `excerpts`:
    what the messages have of libraries. `start`: where the answer begins.

    Where a message, a tool or a call spells a control token, this is text.
    Raises `RequestError` if there is no template, if it refuses the messages, or if the rendered
    chat has more tokens than `limit` says.
    """
    has_tools = bool(tools) or any(message.get("tool_calls") for message in messages)
    taken, tools = for_template(tokenizer, messages, tools)
    messages = fit_roles(tokenizer, [message.message for message in taken], tools, variables)
    text = render_chat(
        tokenizer, messages, tools, add_generation_prompt=start == "header", variables=variables
    )
    encoding = encode(tokenizer, text, add_special_tokens=False, limit=limit)
    _check_length(encoding, limit)
    text, encoding, places = encode_chat(
        tokenizer, text, encoding, messages, tools, start=start, variables=variables
    )
    encoding, parts = _with_excerpts(tokenizer, text, encoding, excerpts)
    _check_length(encoding, limit)
    places = source_places(places, messages, text)
    chat = RenderedChat(taken, places, text, encoding, has_tools, start == "within")
    question, num_called = chat_question(chat)
    ranges, shown = protect_chat(chat, protect, short)
    answer_start = ranges[-1].start if shown else len(encoding) - _ANSWER_TOKENS
    protected = with_question(tokenizer, encoding.ids, ranges, question, answer_start)
    contents = [(low, text[low:high]) for _, low, high in places]
    starts = token_edges(encoding)[0]
    breaks = find_breaks(contents or [(0, text)], starts)
    return Prompt(
        encoding.ids,
        whole_sentences(protected, breaks, has_question=bool(question)),
        text,
        encoding,
        breaks,
        question,
        shown,
        num_called,
        segment_anchor(tokenizer),
        find_word_places(text, starts, question),
        separators(tokenizer),
        parts,
    )


def _with_excerpts(
    tokenizer: Any, text: str, encoding: Any, excerpts: Excerpts
) -> tuple[Any, tuple[Excerpt, ...]]:
    """The encoding in which each excerpt has tokens of its own, and where these are."""
    places = find_places(text, excerpts.text, excerpts.places)
    if not places:
        return encoding, ()
    encoding, tokens = with_parts(tokenizer, text, encoding, places)
    starts = token_edges(encoding)[0]
    return encoding, placed(excerpts.parts, tokens, starts, places)


def _check_plain(protect: Protect) -> None:
    """Raise `RequestError` if a prompt without messages is told about messages."""
    for name in ("messages", "documents"):
        if getattr(protect, name):
            field = f"filter.protect.{name}"
            raise RequestError(f"{field}: only with messages; a prompt has none", param=field)


def _check_length(encoding: Any, limit: TokenLimit | None) -> None:
    if limit is not None:
        limit.check(len(encoding), is_least=False)
