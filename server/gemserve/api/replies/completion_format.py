"""What /v1/completions sends, whole or in chunks."""

from __future__ import annotations

from collections.abc import Sequence

from gemserve.api.replies.choice import ReplyChoice, attention_of
from gemserve.api.replies.failures import finish_reason
from gemserve.api.replies.logprobs import CompletionLogprobWriter, TokenTexts
from gemserve.api.replies.reply_types import (
    ChunkExtras,
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionLogprobs,
    CompletionPart,
    FilterObject,
    PromptIds,
    ReplyHead,
    Usage,
)
from gemserve.contract.events import Finished, PromptScored, TextDelta, TokenLogprob


class CompletionFormat:
    """Implements `ChoiceFormat`."""

    id_prefix = "cmpl"
    chars_per_parsed: int | None = None

    def __init__(self, vocabulary: TokenTexts) -> None:
        self._vocabulary = vocabulary
        self._writers: dict[int, CompletionLogprobWriter] = {}  # by a choice's index

    def reply(
        self,
        head: ReplyHead,
        choices: list[CompletionChoice],
        usage: Usage,
        filters: Sequence[FilterObject],
        prompt: PromptIds,
    ) -> Completion:
        return {
            **head,
            "object": "text_completion",
            "choices": choices,
            "usage": usage,
            "filter": filters[0] if len(filters) == 1 else list(filters),
        }

    def chunk(
        self, head: ReplyHead, parts: list[CompletionPart], extras: ChunkExtras, prompt: PromptIds
    ) -> CompletionChunk:
        """The prompt's ids are in the choice: there may be several prompts."""
        return {**head, "object": "text_completion", "choices": parts, **extras}

    def choice(self, choice: ReplyChoice, finished: Finished) -> CompletionChoice:
        return {
            "index": choice.index,
            "text": choice.echo + choice.text,
            "logprobs": self._logprobs(choice, choice.logprobs, choice.scored),
            "finish_reason": finish_reason(finished),
            **attention_of(finished),
            **choice.prompt_extras,
            **choice.id_extras(choice.token_ids),
        }

    def first_part(self, choice: ReplyChoice) -> CompletionPart:
        return {**self._part(choice, choice.echo), **choice.prompt_extras}

    def prompt_part(self, choice: ReplyChoice, scored: PromptScored) -> CompletionPart:
        return self._part(choice, "", self._logprobs(choice, (), scored))

    def text_part(self, choice: ReplyChoice, delta: TextDelta) -> CompletionPart:
        part = self._part(choice, delta.text, self._logprobs(choice, delta.logprobs))
        return {**part, **choice.id_extras(delta.token_ids)}

    def idle_part(self, choice: ReplyChoice) -> CompletionPart:
        return self._part(choice, "")

    def last_part(self, choice: ReplyChoice, finished: Finished) -> CompletionPart:
        part = self._part(choice, "")
        return {**part, "finish_reason": finish_reason(finished), **attention_of(finished)}

    def _logprobs(
        self,
        choice: ReplyChoice,
        tokens: Sequence[TokenLogprob],
        scored: PromptScored | None = None,
    ) -> CompletionLogprobs | None:
        """Of the prompt's tokens, if they are scored, and then of these; None for no tokens."""
        prompt = [] if scored is None else [(choice.first_token, None), *_with_ids(scored.logprobs)]
        written = [*prompt, *_with_ids(tokens)]
        if not written:
            return None
        writer = self._writers.get(choice.index)
        if writer is None:
            writer = CompletionLogprobWriter(self._vocabulary, choice.echo)
            self._writers[choice.index] = writer
        return writer.write(written)

    @staticmethod
    def _part(
        choice: ReplyChoice, text: str, logprobs: CompletionLogprobs | None = None
    ) -> CompletionPart:
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": None}


def _with_ids(tokens: Sequence[TokenLogprob]) -> list[tuple[int, TokenLogprob | None]]:
    return [(token.token_id, token) for token in tokens]
