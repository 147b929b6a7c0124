"""Gives a prompt the tokens of a reader that has another tokenizer than the model that answers.

The reader sees documents and question in its own frame, its chat template. What its tokens stand
for in the other model's prompt follows from where both are in the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gemserve.contract.prompt_parts import StandsFor, WrittenText
from gemserve.contract.requests import Request
from gemserve.errors import RequestError
from gemserve.prompting.encoding import IntArray, token_edges
from gemserve.prompting.prompt import Prompt, chat_prompt, text_prompt

_JOINT = "\n\n"  # between two documents, and in front of the question
_END_TOKENS = 64  # of a prompt without a question, which say what is wanted


@dataclass(frozen=True, slots=True)
class ReaderText:
    """Requests as a reader with this tokenizer sees them."""

    tokenizer: Any

    def __call__(self, request: Request, documents: Sequence[tuple[int, int]]) -> Request:
        """The request with the reader's tokens: see `Request.stands_for`.

        `documents`: the ranges of its tokens that are to be looked at. Raises `RequestError` for a
        prompt of token ids, and if the reader's chat template changes the text.
        """
        written = request.written
        if written is None:
            raise _refusal("it has other tokens than the model, and so needs a prompt of text")
        parts = _Parts.of(documents, written)
        prompt = self._prompt(parts.text + _JOINT + _question(request, written))
        stripped = parts.text.strip()
        at = prompt.text.find(stripped) if stripped else 0
        if at < 0:
            raise _refusal("its chat template changes the text")
        starts, stops = token_edges(prompt.encoding)
        moved = at - (len(parts.text) - len(parts.text.lstrip()))
        stands_for = parts.tokens_at(starts - moved, stops - moved, written)
        return replace(
            request,
            **{**prompt.fields, "messages": None, "searched": None, "written": None},
            documents=(),
            stands_for=stands_for,
        )

    def _prompt(self, text: str) -> Prompt:
        if self.tokenizer.chat_template is None:
            return text_prompt(self.tokenizer, text)
        return chat_prompt(self.tokenizer, [{"role": "user", "content": text}])


@dataclass(frozen=True, slots=True)
class _Parts:
    """The documents of a prompt in one `text`.

    `at`: where each begins in it. `starts`: where it begins in the prompt's text. `sizes`: their
    characters. All are [documents].
    """

    text: str
    at: IntArray
    starts: IntArray
    sizes: IntArray

    @staticmethod
    def of(documents: Sequence[tuple[int, int]], written: WrittenText) -> _Parts:
        starts, stops = written.starts, written.stops
        edges = [(int(starts[low]), int(stops[high - 1])) for low, high in documents]
        texts = [written.text[low:high] for low, high in edges]
        sizes = np.array([len(text) for text in texts], dtype=np.int64)
        at = np.cumsum(sizes + len(_JOINT)) - sizes - len(_JOINT)
        return _Parts(_JOINT.join(texts), at, np.array([low for low, _ in edges], np.int64), sizes)

    def tokens_at(self, starts: IntArray, stops: IntArray, written: WrittenText) -> StandsFor:
        """The prompt's tokens that have these characters of `text`, if any: half-open ranges."""
        size = len(self.text)
        low, high = starts.clip(0, size), stops.clip(0, size)
        if not len(self.at):
            low = high = np.zeros_like(low)
            return StandsFor(starts=low, stops=high)
        first = self._in_prompt(low)
        last = self._in_prompt(np.maximum(high - 1, low)) + 1
        tokens = written.stops.searchsorted(first, side="right")
        ends = written.starts.searchsorted(last, side="left")
        is_there = (high > low) & (ends > tokens)
        return StandsFor(starts=tokens * is_there, stops=ends * is_there)

    def _in_prompt(self, characters: IntArray) -> IntArray:
        """Where characters of `text` are in the prompt's text; of a joint, the nearest one."""
        part = (self.at.searchsorted(characters, side="right") - 1).clip(0)
        within = np.minimum(characters - self.at[part], np.maximum(self.sizes[part] - 1, 0))
        found: IntArray = self.starts[part] + within
        return found


def _question(request: Request, written: WrittenText) -> str:
    """What is asked; without a question the prompt's end says what is wanted."""
    num_tokens = len(request.prompt_ids)
    ranges = request.question or ((max(0, num_tokens - _END_TOKENS), num_tokens),)
    edges = [(int(written.starts[low]), int(written.stops[high - 1])) for low, high in ranges]
    return " ".join(written.text[low:high].strip() for low, high in edges)


def _refusal(why: str) -> RequestError:
    return RequestError(
        f"filter.reader=reader: {why}; filter.reader=self has the model itself look",
        param="filter.reader",
    )
