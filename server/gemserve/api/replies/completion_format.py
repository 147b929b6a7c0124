"""What the two completion endpoints put on the wire, whole or in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from gemserve.api.replies.logprobs import CompletionLogprobs, Vocabulary, chat_logprobs
from gemserve.types import FilterReport, Finished, PromptScored, TextDelta, TokenLogprob

Json = dict[str, Any]


@dataclass(slots=True)
class Choice:
    """One of a reply's choices, as far as its events have come.

    `echo`: what its text begins with. `first_token`: of its prompt.
    """

    index: int
    echo: str
    first_token: int
    text: list[str] = field(default_factory=list)
    scored: PromptScored | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    report: FilterReport | None = None
    finished: Finished | None = None


class Format(Protocol):
    """One reply's entries of `choices`."""

    prefix: str
    whole_object: str
    chunk_object: str

    def whole(self, choice: Choice) -> Json:
        """Of a choice that has finished."""
        ...

    def opening(self, choice: Choice) -> Json:
        """Of its first chunk, which carries the filter report."""
        ...

    def echo(self, choice: Choice) -> Json:
        """Of the chunk that repeats a prompt whose tokens are scored."""
        ...

    def delta(self, choice: Choice, delta: TextDelta) -> Json: ...

    def closing(self, choice: Choice) -> Json: ...


class CompletionFormat:
    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def whole(self, choice: Choice) -> Json:
        assert choice.finished is not None
        parts = [] if choice.scored is None else self._prompt_parts(choice, choice.scored)
        if choice.logprobs:
            parts.append(self._of(choice).of(choice.logprobs))
        text = choice.echo + "".join(choice.text)
        return self._entry(choice, text, _joined(parts), choice.finished.reason)

    def opening(self, choice: Choice) -> Json:
        return self._entry(choice, choice.echo)

    def echo(self, choice: Choice) -> Json:
        assert choice.scored is not None
        return self._entry(choice, "", _joined(self._prompt_parts(choice, choice.scored)))

    def delta(self, choice: Choice, delta: TextDelta) -> Json:
        parts = [self._of(choice).of(delta.logprobs)] if delta.logprobs else []
        return self._entry(choice, delta.text, _joined(parts))

    def closing(self, choice: Choice) -> Json:
        assert choice.finished is not None
        return self._entry(choice, "", None, choice.finished.reason)

    def _of(self, choice: Choice) -> CompletionLogprobs:
        return self._logprobs.setdefault(
            choice.index, CompletionLogprobs(self._vocabulary, choice.echo)
        )

    def _prompt_parts(self, choice: Choice, scored: PromptScored) -> list[Json]:
        written = self._of(choice)
        return [written.opening(choice.first_token), written.of(scored.logprobs)]

    @staticmethod
    def _entry(
        choice: Choice, text: str, logprobs: Json | None = None, reason: str | None = None
    ) -> Json:
        return {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": reason,
        }


class ChatFormat:
    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def whole(self, choice: Choice) -> Json:
        assert choice.finished is not None
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
            "logprobs": self._scored(choice.logprobs),
            "finish_reason": choice.finished.reason,
        }

    def opening(self, choice: Choice) -> Json:
        return self._chunk(choice, {"role": "assistant", "content": ""})

    def echo(self, choice: Choice) -> Json:
        raise AssertionError("chats are not echoed")

    def delta(self, choice: Choice, delta: TextDelta) -> Json:
        return self._chunk(choice, {"content": delta.text}, self._scored(delta.logprobs))

    def closing(self, choice: Choice) -> Json:
        assert choice.finished is not None
        return self._chunk(choice, {}, None, choice.finished.reason)

    def _scored(self, logprobs: Sequence[TokenLogprob]) -> Json | None:
        return chat_logprobs(self._vocabulary, logprobs) if logprobs else None

    @staticmethod
    def _chunk(
        choice: Choice, delta: Json, logprobs: Json | None = None, reason: str | None = None
    ) -> Json:
        return {
            "index": choice.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": reason,
        }


def filter_json(report: FilterReport) -> Json:
    """The response's `filter` object."""
    return {**asdict(report), "filter_ms": round(report.filter_ms, 3)}


def usage_json(prompt_tokens: int, completion_tokens: int) -> Json:
    """Token counts; the prompt's are what the client sent, not what the filter kept."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _joined(parts: Sequence[Json]) -> Json | None:
    """`logprobs` objects of consecutive tokens as one."""
    if not parts:
        return None
    return {name: [entry for part in parts for entry in part[name]] for name in parts[0]}
