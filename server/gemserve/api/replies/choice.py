"""One choice of a reply while its events come, and the form that an endpoint gives to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol, TypeVar

from gemserve.api.replies.citations import url_citations
from gemserve.api.replies.large_replies import CHARS_PER_SCORED
from gemserve.api.replies.reply_types import (
    AttentionExtras,
    Chat,
    ChatChunk,
    ChunkExtras,
    Completion,
    CompletionChunk,
    FilterObject,
    PromptIds,
    ReplyHead,
    TokenIds,
    UrlCitation,
    Usage,
)
from gemserve.contract.events import (
    Event,
    Filtered,
    Finished,
    PromptScored,
    TextDelta,
    TokenLogprob,
)
from gemserve.contract.reports import FilterReport

_IDS_PER_SCORED = 100
ChoiceT = TypeVar("ChoiceT")
PartT = TypeVar("PartT")


@dataclass(slots=True)
class ReplyChoice:
    """What is known of a choice so far.

    `echo`: the text it begins with. `returns_ids`: the reply has the ids of its tokens. `cites`: it
    says where it comes from.
    """

    index: int
    echo: str
    prompt_ids: Sequence[int]
    returns_ids: bool = False
    cites: bool = False
    texts: list[str] = field(default_factory=list)
    num_chars: int = 0  # of these texts
    scored: PromptScored | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    report: FilterReport | None = None
    completion_tokens: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def num_scored(self) -> int:
        """How many tokens have log-probabilities, or ids and texts that take as long to write."""
        num_texts = (len(self.echo) + self.num_chars) // CHARS_PER_SCORED
        num_ids = len(self.prompt_ids) + len(self.token_ids) if self.returns_ids else 0
        num_prompt = 0 if self.scored is None else len(self.scored.logprobs)
        return len(self.logprobs) + num_prompt + num_texts + num_ids // _IDS_PER_SCORED

    @property
    def first_token(self) -> int:
        """The first one of its prompt."""
        return self.prompt_ids[0]

    @property
    def prompt_extras(self) -> PromptIds:
        return {"prompt_token_ids": list(self.prompt_ids)} if self.returns_ids else {}

    def id_extras(self, token_ids: Sequence[int]) -> TokenIds:
        return {"token_ids": list(token_ids)} if self.returns_ids else {}

    def annotations(self, num_chars: int) -> list[UrlCitation]:
        """Of a finished answer whose content has so many characters."""
        sources = None if self.report is None else self.report.sources
        return url_citations(sources or (), num_chars)

    def add(self, event: Event) -> None:
        if isinstance(event, Filtered):
            self.report = event.report
        elif isinstance(event, PromptScored):
            self.scored = event
        elif isinstance(event, TextDelta):
            self.texts.append(event.text)
            self.num_chars += len(event.text)
            self.logprobs += event.logprobs
            self.token_ids += event.token_ids
            self.completion_tokens += len(event.token_ids)
        else:
            self.completion_tokens = event.completion_tokens
            self.proposed_tokens = event.proposed_tokens
            self.accepted_tokens = event.accepted_tokens


def attention_of(finished: Finished) -> AttentionExtras:
    """What the answer attended to, if the request asked for that."""
    if finished.attention is None:
        return {}
    return {"attention": asdict(finished.attention)}


class ChoiceFormat(Protocol[ChoiceT, PartT]):
    """How an endpoint writes a finished choice, and the parts of one in the chunks of a stream.

    `chars_per_parsed`: so many characters of an answer take as long to take apart as a scored token
    to write; None: they are not taken apart.
    """

    id_prefix: str
    chars_per_parsed: int | None

    def reply(
        self,
        head: ReplyHead,
        choices: list[ChoiceT],
        usage: Usage,
        filters: Sequence[FilterObject],
        prompt: PromptIds,
    ) -> Completion | Chat:
        """A whole reply. `filters` has one object for each prompt; `prompt` is the first one."""
        ...

    def chunk(
        self, head: ReplyHead, parts: list[PartT], extras: ChunkExtras, prompt: PromptIds
    ) -> CompletionChunk | ChatChunk:
        """`prompt`: of the choice whose first chunk it is."""
        ...

    def choice(self, choice: ReplyChoice, finished: Finished) -> ChoiceT: ...

    def first_part(self, choice: ReplyChoice) -> PartT:
        """The part of the first chunk, which has the filter report."""
        ...

    def prompt_part(self, choice: ReplyChoice, scored: PromptScored) -> PartT:
        """The log-probabilities of a prompt that is echoed."""
        ...

    def text_part(self, choice: ReplyChoice, delta: TextDelta) -> PartT: ...

    def idle_part(self, choice: ReplyChoice) -> PartT:
        """A part that says nothing, for a pause."""
        ...

    def last_part(self, choice: ReplyChoice, finished: Finished) -> PartT: ...
