"""vLLM's fields that say where the answer to messages begins."""

from __future__ import annotations

from pydantic import Field, ValidationInfo, field_validator

from gemserve.api.requests.base_bodies import Body
from gemserve.errors import RequestError, shown
from gemserve.prompting.answer_start import CONTINUES, AnswerStart

_HEADER = "add_generation_prompt"


class AnswerStartBody(Body):
    """By default an answer begins behind the chat template's own beginning of one.

    `add_generation_prompt` false: without that. `continue_final_message`: it goes on with the last
    message.
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(
        default=None, description="true: only if add_generation_prompt is false or left out."
    )

    @field_validator(CONTINUES)
    @classmethod
    def _check_header(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and info.data.get(_HEADER):
            raise ValueError(f"not with {_HEADER}=true, which begins a new message")
        return value

    @property
    def answer_start(self) -> AnswerStart:
        if self.continue_final_message:
            return "within"
        return "behind" if self.add_generation_prompt is False else "header"


def check_no_answer_start(body: AnswerStartBody) -> None:
    """Raise `RequestError` for these fields beside a prompt, behind which an answer begins."""
    for name in (_HEADER, CONTINUES):
        value = getattr(body, name)
        if value is not None:
            raise RequestError(f"{name}={shown(value)}: only with messages", param=name)
