"""Fields of chats that clients send as a habit, and that change nothing here.

Values that would have to change the answer are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from gemserve.api.requests.base_bodies import FEW, Body, TextOr


class PredictedText(Body):
    type: Literal["text"]
    text: str


class Prediction(Body):
    """What the answer probably is. It would only make the answer come sooner."""

    type: Literal["content"]
    content: TextOr[Annotated[list[PredictedText], Field(fail_fast=True)]]


class ModerationStage(Body):
    """ "block" is refused: nothing would be blocked."""

    mode: Literal["score"]


class ModerationPolicy(Body):
    input: ModerationStage | None = None
    output: ModerationStage | None = None


class Moderation(Body):
    model: str
    policy: ModerationPolicy | None = None


class ChatFieldsWithoutEffect(Body):
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    verbosity: Literal["low", "medium", "high"] | None = None
    modalities: Annotated[list[Literal["text"]], FEW] | None = None
    prediction: Prediction | None = None
    moderation: Moderation | None = None
    audio: None = None
    web_search_options: None = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: Literal["none", "auto"] | None = None
