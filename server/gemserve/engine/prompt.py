"""From text or messages to token ids, with the spans a filter should keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gemserve.errors import RequestError
from gemserve.filtering.spans import plain_spans, question_spans
from gemserve.types import Priority, Span

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids as the model sees them, and the spans worth protecting.

    `text` is what was tokenized and `encoding` its `tokenizers.Encoding`; both are empty for a
    prompt of ids.
    """

    ids: Sequence[int]
    protected: tuple[Span, ...]
    text: str = ""
    encoding: Any = None

    @property
    def offsets(self) -> Sequence[tuple[int, int]]:
        """Each token's half-open range of characters in `text`. Slow for a long prompt."""
        offsets: Sequence[tuple[int, int]] = self.encoding.offsets
        return offsets


def ids_prompt(tokenizer: Any, ids: Sequence[int]) -> Prompt:
    """A prompt of token ids, taken unaltered."""
    has_bos = len(ids) > 0 and ids[0] == tokenizer.bos_token_id
    return Prompt(ids, plain_spans(len(ids), has_bos))


def text_prompt(tokenizer: Any, text: str) -> Prompt:
    """A plain prompt, with the special tokens the tokenizer adds (BOS)."""
    encoding = _encode(tokenizer, text, add_special_tokens=True)
    ids = encoding.ids
    return Prompt(ids, ids_prompt(tokenizer, ids).protected, text, encoding)


def chat_prompt(tokenizer: Any, messages: Sequence[Message]) -> Prompt:
    """Messages through the model's chat template, ready for the answer.

    Raises `RequestError` if there is no template or it refuses the messages.
    """
    if tokenizer.chat_template is None:
        raise RequestError(
            "messages: this model has no chat template; use /v1/completions", param="messages"
        )
    text = _render(tokenizer, messages)
    encoding = _encode(tokenizer, text, add_special_tokens=False)
    places = find_messages(tokenizer, text, messages)
    return Prompt(encoding.ids, chat_spans(places, messages, encoding), text, encoding)


def chat_spans(
    places: Sequence[tuple[int, int, int]], messages: Sequence[Message], encoding: Any
) -> tuple[Span, ...]:
    """Protected token spans of a rendered chat: everything but the long middle of what was said.

    Template scaffolding, system and tool messages, and the last user turn (its ends, if it is the
    document itself). `places`: see `find_messages`; with none, as for a plain prompt.
    """
    num_tokens = len(encoding)
    if not places:
        return plain_spans(num_tokens, has_bos=True)
    last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    spans: list[Span] = [Span(0, 1, Priority.BOS)]
    cursor = 0
    for index, low, high in places:
        start, stop = _tokens_of(encoding, low, high)
        spans.append(Span(cursor, start, Priority.REST))  # scaffolding before the message
        role = messages[index]["role"]
        if role in ("system", "developer"):
            spans.append(Span(start, stop, Priority.SYSTEM))
        elif role == "tool":
            spans.append(Span(start, stop, Priority.TOOLS))
        elif index == last_user:
            spans += question_spans(start, stop)
        cursor = stop
    spans.append(Span(cursor, num_tokens, Priority.QUESTION))  # the answer's header
    return tuple(s for s in spans if s.stop > s.start)


def find_messages(
    tokenizer: Any, text: str, messages: Sequence[Message]
) -> list[tuple[int, int, int]]:
    """(index, start, end) in characters of every message that the template shows, in order.

    The template is rendered once more with a mark for each message: what stands between the marks
    is scaffolding, and walking the real text by it finds each message even where the template
    changed it. Nothing is found if the template treats marks otherwise than messages.
    """
    marks = [f"\ue000{i}\ue001" for i in range(len(messages))]
    marked = [{**m, "content": mark} for m, mark in zip(messages, marks, strict=True)]
    try:
        frame = _render(tokenizer, marked)
    except RequestError:
        return []
    shown = [i for i, mark in enumerate(marks) if frame.count(mark) == 1]
    pieces: list[str] = []
    for i in shown:
        before, mark, frame = frame.partition(marks[i])
        if not mark:
            return []
        pieces.append(before)
    pieces.append(frame)

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


def _tokens_of(encoding: Any, low: int, high: int) -> tuple[int, int]:
    """Tokens that hold the non-blank characters of low..high−1, half open."""
    start = next(
        (t for c in range(low, high) if (t := encoding.char_to_token(c)) is not None), None
    )
    if start is None:
        after = encoding.char_to_token(high)
        start = len(encoding) if after is None else after
        return start, start
    stop = next(
        t for c in range(high - 1, low - 1, -1) if (t := encoding.char_to_token(c)) is not None
    )
    return start, stop + 1


def _encode(tokenizer: Any, text: str, *, add_special_tokens: bool) -> Any:
    # a batch of one: unlike `encode`, it lets go of the interpreter lock while it works
    backend = tokenizer.backend_tokenizer
    return backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]


def _render(tokenizer: Any, messages: Sequence[Message]) -> str:
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # templates raise whatever their author chose
        raise RequestError(
            f"messages: the model's chat template refuses them: {error}", param="messages"
        ) from error
    return text
