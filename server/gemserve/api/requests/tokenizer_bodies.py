"""Request bodies of /tokenize and /detokenize."""

from __future__ import annotations

from pydantic import ConfigDict

from gemserve.api.requests import field_schemas
from gemserve.api.requests.answer_start_body import AnswerStartBody
from gemserve.api.requests.base_bodies import Body
from gemserve.api.requests.chat_body import Messages, Tools
from gemserve.api.requests.integers import TokenIds
from gemserve.api.requests.template_variables import TemplateVariables


class TokenizerBody(Body):
    """The fields of the tokenizer's endpoints. `model` is optional: vLLM's clients may omit it."""

    model: str | None = None


class TokenizeBody(TokenizerBody, AnswerStartBody):
    model_config = ConfigDict(
        json_schema_extra=field_schemas.either(
            {
                "prompt": {},
                "messages": None,
                "tools": None,
                "add_generation_prompt": None,
                "continue_final_message": None,
                "chat_template_kwargs": None,
            },
            {"messages": {}, "prompt": None},
        )
    )
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: TemplateVariables | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    return_offsets: bool = False


class DetokenizeBody(TokenizerBody):
    tokens: TokenIds
