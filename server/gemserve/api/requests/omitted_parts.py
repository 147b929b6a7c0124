"""What another server's history has and this one cannot read: one line of text in its place.

So a conversation that has an image somewhere goes on. What the user has sent last is refused: its
answer would be made up.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Discriminator, Field
from pydantic.config import JsonDict

from gemserve.api.requests.served_types import of_type, type_of

OMITTED = "omitted"  # the tag's type
_THOUGHTS = ("thinking", "redacted_thinking", "reasoning", "reasoning_text", "summary_text")
_NAMES = {
    "image_url": "image",
    "input_image": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
    "input_file": "file",
}


def omitted(kind: str) -> str:
    """The line in place of something of this type."""
    return f"[{_NAMES.get(kind, kind.replace('_', ' '))} omitted: this model reads text only]"


class OmittedPart(BaseModel):
    """A part of a type that is not read. What else it has is not looked at."""

    model_config = ConfigDict(extra="ignore", strict=True)
    type: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]

    @property
    def is_thought(self) -> bool:
        """How another model came to its answer is left out of the prompt, without a line."""
        return self.type in _THOUGHTS

    @property
    def text(self) -> str:
        return omitted(self.type)


def but_not(*served: str) -> JsonDict:
    """For `json_schema_extra` of a class whose types are all but these."""
    return {"not": {"properties": {"type": {"enum": [*served]}}}}


def or_omitted(served: Collection[str]) -> Discriminator:
    """For a union with a tag `of_type` for each that is `served`, and one for "omitted".

    A member without a type is taken for the first one, whose error then names what is missing.
    """
    first = next(iter(served))

    def tag(value: object) -> str:
        kind = type_of(value)
        if not isinstance(kind, str):
            kind = first
        return of_type(kind if kind in served else OMITTED).tag

    return Discriminator(tag)


def first_of_last_turn(roles: Sequence[str]) -> int:
    """The number of the first message behind all that assistants and tools have said."""
    said = [index for index, role in enumerate(roles) if role in ("assistant", "tool")]
    return said[-1] + 1 if said else 0
