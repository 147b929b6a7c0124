"""What /v1/chat/completions sends, whole or in chunks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from gemserve.api.replies.answer_reader import AnswerRules, Piece, Reader
from gemserve.api.replies.call_forms import Call
from gemserve.api.replies.choice import ReplyChoice, attention_of
from gemserve.api.replies.failures import finish_reason
from gemserve.api.replies.logprobs import TokenTexts, chat_logprobs
from gemserve.api.replies.reply_types import (
    CallPart,
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
    ToolCall,
    Usage,
)
from gemserve.contract.events import Finished, PromptScored, TextDelta, TokenLogprob


class ChatFormat:
    """Implements `ChoiceFormat`. Log-probabilities are those of all tokens of an answer."""

    id_prefix = "chatcmpl"
    chars_per_parsed: int | None = 16  # each may begin a call, which is looked for

    def __init__(self, vocabulary: TokenTexts, rules: AnswerRules) -> None:
        self._vocabulary, self._rules = vocabulary, rules
        self._readers: defaultdict[int, Reader] = defaultdict(rules.reader)
        self._num_chars: Counter[int] = Counter()  # of the contents that were streamed

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

    def choice(self, choice: ReplyChoice, finished: Finished) -> ChatChoice:
        reader = self._readers[choice.index]
        said = _delta([*reader.push(choice.text), *reader.finish()], 0)
        message: ChatMessage = {
            "role": "assistant",
            "content": said.get("content") or (None if reader.calls else ""),
            "refusal": None,
        }
        if "reasoning_content" in said:
            message["reasoning_content"] = said["reasoning_content"]
        if reader.calls:
            message["tool_calls"] = [_whole_call(call) for call in reader.calls]
        if choice.cites and not reader.calls:
            message["annotations"] = choice.annotations(len(message["content"] or ""))
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": self._reason(reader, finished),
            **attention_of(finished),
            **choice.id_extras(choice.token_ids),
        }

    def first_part(self, choice: ReplyChoice) -> ChatPart:
        content = "" if self._rules.calls is None else None
        return self._part(choice, {"role": "assistant", "content": content})

    def prompt_part(self, choice: ReplyChoice, scored: PromptScored) -> ChatPart:
        raise AssertionError("chats are not echoed")

    def text_part(self, choice: ReplyChoice, delta: TextDelta) -> ChatPart:
        reader = self._readers[choice.index]
        num_calls = len(reader.calls)
        said = _delta(reader.push(delta.text), num_calls)
        self._num_chars[choice.index] += len(said.get("content") or "")
        if not said and self._rules.calls is None:
            said = {"content": ""}
        part = self._part(choice, said, self._logprobs(delta.logprobs))
        return {**part, **choice.id_extras(delta.token_ids)}

    def idle_part(self, choice: ReplyChoice) -> ChatPart:
        return self._part(choice, {})

    def last_part(self, choice: ReplyChoice, finished: Finished) -> ChatPart:
        reader = self._readers[choice.index]
        num_calls = len(reader.calls)
        rest = _delta(reader.finish(), num_calls)
        if choice.cites and not reader.calls:
            num_chars = self._num_chars[choice.index] + len(rest.get("content") or "")
            rest["annotations"] = choice.annotations(num_chars)
        part = self._part(choice, rest, reason=self._reason(reader, finished))
        return {**part, **attention_of(finished)}

    def _reason(self, reader: Reader, finished: Finished) -> ChatFinishReason:
        return self._rules.finish_reason(finish_reason(finished), has_calls=bool(reader.calls))

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        return chat_logprobs(self._vocabulary, tokens) if tokens else None

    @staticmethod
    def _part(
        choice: ReplyChoice,
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


def _delta(pieces: Sequence[Piece], num_calls: int) -> Delta:
    """The pieces as a stream's delta. `num_calls`: so many calls came before."""
    text = "".join(piece.text for piece in pieces if piece.kind == "text")
    thinking = "".join(piece.text for piece in pieces if piece.kind == "thinking")
    delta: Delta = {}
    if thinking:
        delta["reasoning_content"] = thinking
    if text:
        delta["content"] = text
    calls: list[CallPart] = []
    for piece in pieces:
        if piece.call is not None:
            calls.append(_first_part(piece.call, piece.text, num_calls + len(calls)))
        elif piece.kind == "call":
            calls.append({"index": num_calls - 1, "function": {"arguments": piece.text}})
    if calls:
        delta["tool_calls"] = calls
    return delta


def _first_part(call: Call, arguments: str, index: int) -> CallPart:
    return {
        "index": index,
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def _whole_call(call: Call) -> ToolCall:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
