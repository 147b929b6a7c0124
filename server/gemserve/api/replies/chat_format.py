"""What /v1/chat/completions sends, whole or in chunks."""

from __future__ import annotations

from collections.abc import Sequence

from gemserve.api.replies.choice import Choice, attention_of
from gemserve.api.replies.failures import finish_reason
from gemserve.api.replies.logprobs import TokenTexts, chat_logprobs
from gemserve.api.replies.reply_types import (
    Chat,
    ChatChoice,
    ChatChunk,
    ChatFinishReason,
    ChatLogprobs,
    ChatMessage,
    ChatPart,
    ChunkExtras,
    Delta,
    FilterObject,
    PromptIds,
    ReplyHead,
    Usage,
)
from gemserve.types import Finished, PromptScored, TextDelta, TokenLogprob


class ChatFormat:
    """Implements `ChoiceFormat` for answers that are text."""

    id_prefix = "chatcmpl"

    def __init__(self, vocabulary: TokenTexts) -> None:
        self._vocabulary = vocabulary

    def reply(
        self,
        head: ReplyHead,
        choices: list[ChatChoice],
        usage: Usage,
        filters: Sequence[FilterObject],
        prompt: PromptIds,
    ) -> Chat:
        return {
            **head,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage,
            "filter": filters[0],
            **prompt,
        }

    def chunk(
        self, head: ReplyHead, parts: list[ChatPart], extras: ChunkExtras, prompt: PromptIds
    ) -> ChatChunk:
        return {**head, "object": "chat.completion.chunk", "choices": parts, **extras, **prompt}

    def choice(self, choice: Choice, finished: Finished) -> ChatChoice:
        message: ChatMessage = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.cites:
            message["annotations"] = choice.annotations
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": finish_reason(finished),
            **attention_of(finished),
            **choice.id_extras(choice.token_ids),
        }

    def first_part(self, choice: Choice) -> ChatPart:
        return self._part(choice, {"role": "assistant", "content": ""})

    def prompt_part(self, choice: Choice, scored: PromptScored) -> ChatPart:
        raise AssertionError("chats are not echoed")

    def text_part(self, choice: Choice, delta: TextDelta) -> ChatPart:
        part = self._part(choice, {"content": delta.text}, self._logprobs(delta.logprobs))
        return {**part, **choice.id_extras(delta.token_ids)}

    def idle_part(self, choice: Choice) -> ChatPart:
        return self._part(choice, {})

    def last_part(self, choice: Choice, finished: Finished) -> ChatPart:
        delta: Delta = {"annotations": choice.annotations} if choice.cites else {}
        part = self._part(choice, delta, reason=finish_reason(finished))
        return {**part, **attention_of(finished)}

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        return chat_logprobs(self._vocabulary, tokens) if tokens else None

    @staticmethod
    def _part(
        choice: Choice,
        delta: Delta,
        logprobs: ChatLogprobs | None = None,
        reason: ChatFinishReason | None = None,
    ) -> ChatPart:
        return {
            "index": choice.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": reason,
        }
