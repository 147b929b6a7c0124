"""Text that was found elsewhere, in front of the question that is asked about it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gemserve.contract.prompt_parts import Excerpt
from gemserve.contract.reports import SearchReport
from gemserve.prompting.excerpt_tokens import Excerpts

BETWEEN = "\n\n"  # excerpts that are not neighbours
# Tags say where the documents end, so that what stands beside them is always read.
_OPENING, _CLOSING = "<documents>\n", "\n</documents>\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answerable:
    """What a question should be asked behind, and how it was found.

    `segment_size`: the most tokens of an excerpt, which is a segment of its own.
    """

    excerpts: Excerpts
    searched: SearchReport
    segment_size: int

    @property
    def file_ids(self) -> tuple[str, ...]:
        """The files that the excerpts are of, each once."""
        return tuple(dict.fromkeys(part.file_id for part in self.excerpts.parts))

    def only(self, ranks: Collection[int]) -> Answerable:
        """What is left if only these excerpts were read."""
        excerpts = self.excerpts
        texts, places, parts = list[str](), list[tuple[int, int]](), list[Excerpt]()
        at = end = 0
        for (low, high), part in zip(excerpts.places, excerpts.parts, strict=True):
            if part.rank not in ranks:
                continue
            if parts and low != end:  # it does not go on where the last one has ended
                texts.append(BETWEEN)
                at += len(BETWEEN)
            texts.append(excerpts.text[low:high])
            places.append((at, at + high - low))
            parts.append(part)
            at, end = at + high - low, high
        left = Excerpts(text="".join(texts), places=tuple(places), parts=tuple(parts))
        return replace(self, excerpts=left, searched=replace(self.searched, read=len(parts)))

    def in_front_of(self, text: str) -> str:
        """A user's text behind the excerpts."""
        if not self.excerpts.text:
            return text
        return f"{_OPENING}{self.excerpts.text}{_CLOSING}{text}"

    def in_messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """A chat in which the excerpts are in front of what its last user said."""
        changed = [*messages]
        for index in range(len(changed) - 1, -1, -1):
            message = changed[index]
            if message.get("role") == "user" and isinstance(message.get("content"), str):
                changed[index] = {**message, "content": self.in_front_of(message["content"])}
                return changed
        return [{"role": "user", "content": self.in_front_of("").rstrip()}, *changed]
