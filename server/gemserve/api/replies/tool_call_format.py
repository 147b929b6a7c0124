"""What /v1/chat/completions sends if an answer may be, or must be, calls of tools."""

from __future__ import annotations

from collections import defaultdict

from gemserve.api.replies.chat_format import ChatFormat
from gemserve.api.replies.choice import Choice, attention_of
from gemserve.api.replies.failures import finish_reason
from gemserve.api.replies.logprobs import TokenTexts
from gemserve.api.replies.reply_types import ChatChoice, ChatMessage, ChatPart
from gemserve.api.replies.tool_call_reader import ToolCallReader
from gemserve.api.requests.tool_choice import ToolCallRules
from gemserve.types import Finished, TextDelta


class ToolCallFormat(ChatFormat):
    """Sends `tool_calls` in place of `content` if an answer consists of calls.

    Log-probabilities are those of the tokens as they were generated.
    """

    def __init__(self, vocabulary: TokenTexts, rules: ToolCallRules) -> None:
        super().__init__(vocabulary)
        self._readers: defaultdict[int, ToolCallReader] = defaultdict(lambda: ToolCallReader(rules))

    def choice(self, choice: Choice, finished: Finished) -> ChatChoice:
        reader = self._readers[choice.index]
        reader.push(choice.text)
        reader.finish()
        message: ChatMessage = {"role": "assistant", "content": reader.content, "refusal": None}
        if reader.calls:
            message["content"] = None
            message["tool_calls"] = [call.content for call in reader.calls]
        elif choice.cites:
            message["annotations"] = choice.annotations
        return {
            **super().choice(choice, finished),
            "message": message,
            "finish_reason": reader.finish_reason(finish_reason(finished)),
        }

    def first_part(self, choice: Choice) -> ChatPart:
        return self._part(choice, {"role": "assistant", "content": None})

    def text_part(self, choice: Choice, delta: TextDelta) -> ChatPart:
        message = self._readers[choice.index].push(delta.text)
        part = self._part(choice, message, self._logprobs(delta.logprobs))
        return {**part, **choice.id_extras(delta.token_ids)}

    def last_part(self, choice: Choice, finished: Finished) -> ChatPart:
        reader = self._readers[choice.index]
        rest = reader.finish()
        if choice.cites and not reader.calls:
            rest["annotations"] = choice.annotations
        part = self._part(choice, rest, reason=reader.finish_reason(finish_reason(finished)))
        return {**part, **attention_of(finished)}
