"""One choice of a reply while its events come, and the form that an endpoint gives to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol, TypeVar

from gemserve.api.replies.reply_types import (
    AttentionExtras,
    Chat,
    ChatChunk,
    ChunkExtras,
    Completion,
    CompletionChunk,
    FilterObject,
    ReplyHead,
    Usage,
)
from gemserve.types import (
    Event,
    Filtered,
    FilterReport,
    Finished,
    PromptScored,
    TextDelta,
    TokenLogprob,
)

ChoiceT = TypeVar("ChoiceT")
PartT = TypeVar("PartT")


@dataclass(slots=True)
class Choice:
    """What is known of a choice so far.

    `echo`: the text it begins with. `first_token`: the first one of its prompt.
    """

    index: int
    echo: str
    first_token: int
    texts: list[str] = field(default_factory=list)
    scored: PromptScored | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    report: FilterReport | None = None
    completion_tokens: int = 0

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def num_scored(self) -> int:
        """How many tokens have log-probabilities."""
        return len(self.logprobs) + (0 if self.scored is None else len(self.scored.logprobs))

    def add(self, event: Event) -> None:
        if isinstance(event, Filtered):
            self.report = event.report
        elif isinstance(event, PromptScored):
            self.scored = event
        elif isinstance(event, TextDelta):
            self.texts.append(event.text)
            self.logprobs += event.logprobs
            self.completion_tokens += len(event.token_ids)
        else:
            self.completion_tokens = event.completion_tokens


def attention_of(finished: Finished) -> AttentionExtras:
    """What the answer attended to, if the request asked for that."""
    if finished.attention is None:
        return {}
    return {"attention": asdict(finished.attention)}


class ChoiceFormat(Protocol[ChoiceT, PartT]):
    """How an endpoint writes a finished choice, and the parts of one in the chunks of a stream."""

    id_prefix: str

    def reply(
        self,
        head: ReplyHead,
        choices: list[ChoiceT],
        usage: Usage,
        filters: Sequence[FilterObject],
    ) -> Completion | Chat:
        """A whole reply. `filters` has one object for each prompt."""
        ...

    def chunk(
        self, head: ReplyHead, parts: list[PartT], extras: ChunkExtras
    ) -> CompletionChunk | ChatChunk: ...

    def choice(self, choice: Choice, finished: Finished) -> ChoiceT: ...

    def first_part(self, choice: Choice) -> PartT:
        """The part of the first chunk, which has the filter report."""
        ...

    def prompt_part(self, choice: Choice, scored: PromptScored) -> PartT:
        """The log-probabilities of a prompt that is echoed."""
        ...

    def text_part(self, choice: Choice, delta: TextDelta) -> PartT: ...

    def last_part(self, choice: Choice, finished: Finished) -> PartT: ...
