"""A chat's reply that may be, or must be, calls of tools."""

from __future__ import annotations

from collections import defaultdict

from gemserve.api.replies.completion_format import ChatFormat, Choice, Json
from gemserve.api.replies.logprobs import Vocabulary
from gemserve.api.replies.tool_call_reader import CallReader, CallRules
from gemserve.types import TextDelta


class CallFormat(ChatFormat):
    """`message.tool_calls` in place of `content`, where an answer has calls.

    Log-probabilities are those of the tokens as they were generated.
    """

    def __init__(self, vocabulary: Vocabulary, rules: CallRules) -> None:
        super().__init__(vocabulary)
        self._readers: defaultdict[int, CallReader] = defaultdict(lambda: CallReader(rules))

    def whole(self, choice: Choice) -> Json:
        assert choice.finished is not None
        reader = self._readers[choice.index]
        reader.push("".join(choice.text))
        reader.finish()
        entry = super().whole(choice)
        if reader.calls:
            calls = [call.content for call in reader.calls]
            entry["message"] |= {"content": None, "tool_calls": calls}
        else:
            entry["message"]["content"] = reader.content
        return {**entry, "finish_reason": reader.finish_reason(choice.finished.reason)}

    def opening(self, choice: Choice) -> Json:
        return self._chunk(choice, {"role": "assistant", "content": None})

    def delta(self, choice: Choice, delta: TextDelta) -> Json:
        said = self._readers[choice.index].push(delta.text)
        return self._chunk(choice, said, self._scored(delta.logprobs))

    def closing(self, choice: Choice) -> Json:
        assert choice.finished is not None
        reader = self._readers[choice.index]
        rest = reader.finish()
        return self._chunk(choice, rest, None, reader.finish_reason(choice.finished.reason))
