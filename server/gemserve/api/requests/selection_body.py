"""Request body of /v1/filter."""

from __future__ import annotations

from pydantic import ConfigDict

from gemserve.api.requests import field_schemas
from gemserve.api.requests.answer_start_body import AnswerStartBody
from gemserve.api.requests.base_bodies import FilteringBody
from gemserve.api.requests.chat_body import Messages, Tools
from gemserve.api.requests.completion_body import PromptField
from gemserve.api.requests.document_reference import DocumentReference
from gemserve.api.requests.template_variables import TemplateVariables


class SelectionBody(FilteringBody, AnswerStartBody):
    """A prompt or messages to be filtered, and not answered.

    `document` stands in front of a prompt that is a text, never in front of token ids.
    """

    model_config = ConfigDict(
        json_schema_extra=field_schemas.either(
            {
                "prompt": {},
                "document": None,
                "messages": None,
                "tools": None,
                "chat_template_kwargs": None,
                "add_generation_prompt": None,
                "continue_final_message": None,
            },
            {
                "prompt": field_schemas.TEXT_PROMPT,
                "document": {},
                "messages": None,
                "tools": None,
                "chat_template_kwargs": None,
                "add_generation_prompt": None,
                "continue_final_message": None,
            },
            {"messages": {}, "prompt": None, "document": None},
        )
    )
    prompt: PromptField | None = None
    document: DocumentReference | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: TemplateVariables | None = None
