"""From text or messages to token ids, with the spans a filter should keep."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gemserve.errors import PromptTooLong, RequestError
from gemserve.filtering.spans import message_spans, plain_spans, question_spans
from gemserve.prompting.code_blocks import find_code_blocks
from gemserve.prompting.control_tokens import spell_out
from gemserve.prompting.question import Ranges, chat_question, ids_question, protect, text_question
from gemserve.prompting.question_words import BLANK_LINE
from gemserve.prompting.tools import Message, Tool, for_template
from gemserve.types import Priority, Span

_END_CHARS = 2048  # more than the tokens protected at a prompt's end take up
_LAST_BLANKS = 4  # tokens of what ends a prompt that are kept however many there are
_SHORTEST_QUESTION = 12  # characters
_MOST_PARAGRAPHS = 8  # that may belong to a question
_MARK = re.compile("\ue000(\\d+)\ue001")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids as the model sees them, and the spans worth protecting.

    `text` is what was tokenized and `encoding` its `tokenizers.Encoding`, or `Spelled`; both are
    empty for a prompt of ids. `question`: see `types.Request`.
    """

    ids: Sequence[int]
    protected: tuple[Span, ...]
    text: str = ""
    encoding: Any = None
    code_blocks: tuple[tuple[int, ...], ...] = ()
    question: Ranges = ()

    @property
    def offsets(self) -> Sequence[tuple[int, int]]:
        """Each token's half-open range of characters in `text`. Slow for a long prompt."""
        offsets: Sequence[tuple[int, int]] = self.encoding.offsets
        return offsets


def ids_prompt(tokenizer: Any, ids: Sequence[int]) -> Prompt:
    """A prompt of token ids, taken unaltered."""
    has_bos = len(ids) > 0 and ids[0] == tokenizer.bos_token_id
    question = ids_question(tokenizer, ids)
    return Prompt(
        ids, protect(tokenizer, ids, plain_spans(len(ids), has_bos), question), question=question
    )


def text_prompt(tokenizer: Any, text: str) -> Prompt:
    """A plain prompt, with the special tokens the tokenizer adds (BOS)."""
    encoding = encode(tokenizer, text, add_special_tokens=True)
    ids = encoding.ids
    has_bos = len(ids) > 0 and ids[0] == tokenizer.bos_token_id
    # counted apart: offsets of a long prompt are slow to read, and only its end matters
    said = text.rstrip()
    blanks = len(encode(tokenizer, text[len(said) :], add_special_tokens=False))
    stop = max(int(has_bos), len(ids) - max(0, blanks - _LAST_BLANKS))
    ends = [encode(tokenizer, end, add_special_tokens=False) for end in _last_paragraphs(said)]
    starts = [max(0, len(ids) - blanks - len(end)) for end in ends]
    question = text_question(tokenizer, text, encoding)
    spans = protect(tokenizer, ids, plain_spans(stop, has_bos, starts), question)
    return Prompt(ids, spans, text, encoding, find_code_blocks([(0, text)], encoding), question)


def chat_prompt(
    tokenizer: Any,
    messages: Sequence[Message],
    max_tokens: int | None = None,
    tools: Sequence[Tool] = (),
    *,
    field: str = "messages",
) -> Prompt:
    """Messages and tools through the model's chat template, ready for the answer.

    What a message spells like a control token is text, if `find_messages` finds it.
    Raises `RequestError` if there is no template, if it refuses the messages, or if they come to
    more than `max_tokens` tokens, its own text included; that error names `field`.
    """
    messages, tools = for_template(tokenizer, messages, tools)
    text = render_chat(tokenizer, messages, tools)
    encoding = encode(tokenizer, text, add_special_tokens=False)
    _check_length(encoding, max_tokens, field)
    places = find_messages(tokenizer, text, messages, tools)
    encoding = spell_out(tokenizer, text, encoding, places)
    _check_length(encoding, max_tokens, field)
    question = chat_question(places, messages, text, encoding)
    spans = chat_spans(places, messages, text, encoding)
    spans = protect(tokenizer, encoding.ids, spans, question)
    said = [(low, text[low:high]) for _, low, high in places]
    code_blocks = find_code_blocks(said, encoding)
    return Prompt(encoding.ids, spans, text, encoding, code_blocks, question)


def _check_length(encoding: Any, max_tokens: int | None, field: str) -> None:
    if max_tokens is not None and len(encoding) > max_tokens:
        raise PromptTooLong(tokens=len(encoding), limit=max_tokens, param=field)


def chat_spans(
    places: Sequence[tuple[int, int, int]],
    messages: Sequence[Message],
    text: str,
    encoding: Any,
) -> tuple[Span, ...]:
    """Protected token spans of a rendered chat: what frames and asks, not what else was said.

    Template scaffolding, system messages, tool messages (of long ones the ends), and the last user
    turn (its ends, if it is the document itself). `places`: see `find_messages`; with none, as for
    a plain prompt.
    """
    num_tokens = len(encoding)
    if not places:
        return plain_spans(num_tokens, has_bos=True)
    last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    spans: list[Span] = [Span(0, 1, Priority.BOS)]
    starts = [low for low, _ in encoding.offsets]
    ends = [high for _, high in encoding.offsets]
    cursor = 0
    for index, low, high in places:
        spans.append(Span(cursor, bisect_right(ends, low), Priority.FRAME))
        cursor = bisect_left(starts, high)
        said = text[low:high]  # of which only what is not blank is protected
        start = bisect_right(ends, low + len(said) - len(said.lstrip()))
        stop = max(start, bisect_left(starts, low + len(said.rstrip())))
        role = messages[index]["role"]
        if role in ("system", "developer"):
            spans.append(Span(start, stop, Priority.SYSTEM))
        elif role == "tool":
            spans += message_spans(start, stop, Priority.TOOLS)  # a document, as often as not
        elif index == last_user:
            text_stop = low + len(said.rstrip())
            found = _last_paragraphs(said.rstrip())
            paragraphs = [text_stop - len(end.lstrip()) for end in found]
            spans += question_spans(start, stop, [bisect_right(ends, at) for at in paragraphs])
    spans.append(Span(cursor, num_tokens, Priority.QUESTION))  # the answer's header
    return tuple(s for s in spans if s.stop > s.start)


def find_messages(
    tokenizer: Any,
    text: str,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    *,
    add_generation_prompt: bool = True,
) -> list[tuple[int, int, int]]:
    """(index, start, end) in characters of every message that the template shows, as it does.

    The template is rendered once more with a mark for each message: what stands between the marks
    is scaffolding, and walking the real text by it finds each message even where the template
    changed it. Nothing is found if the template treats marks otherwise than messages.
    """
    marks = [f"\ue000{i}\ue001" for i in range(len(messages))]
    marked = [{**m, "content": mark} for m, mark in zip(messages, marks, strict=True)]
    try:
        frame = render_chat(tokenizer, marked, tools, add_generation_prompt=add_generation_prompt)
    except RequestError:
        return []
    found = list(_MARK.finditer(frame))
    shown = [int(mark[1]) for mark in found]
    if len(shown) != len(set(shown)):  # a template that repeats messages
        return []
    ends = [0, *(mark.end() for mark in found)]
    starts = [*(mark.start() for mark in found), len(frame)]
    pieces = [frame[low:high] for low, high in zip(ends, starts, strict=True)]

    places: list[tuple[int, int, int]] = []
    if not shown or not text.startswith(pieces[0]):
        return places
    at = len(pieces[0])
    for i, after in zip(shown, pieces[1:], strict=True):
        end = _message_end(text, at, messages[i]["content"], after, is_last=i == shown[-1])
        if end < at:
            return []
        places.append((i, at, end))
        at = end + len(after)
    return places


def _message_end(text: str, at: int, content: str, after: str, *, is_last: bool) -> int:
    for said in (content, content.strip(), content.lstrip(), content.rstrip()):
        if text.startswith(said + after, at):
            return at + len(said)
    # the template rewrote it: what follows tells where it ends
    return len(text) - len(after) if is_last else text.find(after, at)


def _last_paragraphs(text: str) -> list[str]:
    """The text from its last paragraph on, from the one before it on, and so on; some of them.

    What leaves no more than a word or two such as "Answer:" is no paragraph.
    """
    end = text[-_END_CHARS:]
    starts = [match.end() for match in BLANK_LINE.finditer(end)]
    ends = [end[start:] for start in reversed(starts)]
    found = [end for end in ends if len(end.strip()) >= _SHORTEST_QUESTION]
    return found[:_MOST_PARAGRAPHS] or [end]


def encode(tokenizer: Any, text: str, *, add_special_tokens: bool) -> Any:
    """The text's `tokenizers.Encoding`."""
    # a batch of one: unlike `encode`, it lets go of the interpreter lock while it works
    backend = tokenizer.backend_tokenizer
    return backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]


def decode(tokenizer: Any, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
    """The text of these tokens."""
    backend = tokenizer.backend_tokenizer  # a batch of one, as above
    text: str = backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
    return text


def render_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    *,
    add_generation_prompt: bool = True,
) -> str:
    """Messages through the model's chat template, up to where the answer begins unless told not to.

    `tools`: only for a template that takes them. Raises `RequestError` if there is no template, or
    if it refuses the messages.
    """
    if tokenizer.chat_template is None:
        raise RequestError(
            "messages: this model has no chat template; send a prompt (/v1/completions)",
            param="messages",
        )
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    except Exception as error:  # templates raise whatever their author chose
        raise RequestError(
            f"messages: the model's chat template refuses them: {error}", param="messages"
        ) from error
    return text
