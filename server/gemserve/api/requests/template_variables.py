"""`chat_template_kwargs`: variables of the model's chat template, such as `enable_thinking`."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from gemserve.errors import RequestError

MAX_VARIABLES = 32
MAX_BYTES = 16 << 10
# The server passes these itself, or they change how it renders a chat.
RESERVED = (
    "add_generation_prompt",
    "additional_special_tokens",
    "chat_template",
    "continue_final_message",
    "conversation",
    "conversations",
    "documents",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "sanitize_control_tokens",
    "self",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
)
_SUFFIX = "_token"  # the tokenizer's control tokens, as templates name them


def _check(variables: dict[str, Any]) -> dict[str, Any]:
    for name in variables:
        if name in RESERVED or name.endswith(_SUFFIX):
            raise ValueError(f"the server itself sets {name}")
    if len(variables) > MAX_VARIABLES:
        raise ValueError(f"has {len(variables)} entries, the limit is {MAX_VARIABLES}")
    size = len(json.dumps(variables))
    if size > MAX_BYTES:
        raise ValueError(f"has {size} bytes, the limit is {MAX_BYTES}")
    return variables


TemplateVariables = Annotated[
    dict[str, Any],
    AfterValidator(_check),
    Field(
        json_schema_extra={
            "maxProperties": MAX_VARIABLES,
            "propertyNames": {
                "not": {"anyOf": [{"enum": list(RESERVED)}, {"pattern": f"{_SUFFIX}$"}]}
            },
        }
    ),
]


def check_no_variables(variables: dict[str, Any] | None) -> None:
    """Raise `RequestError` for variables beside a prompt, which no template renders."""
    if variables is not None:
        field = "chat_template_kwargs"
        raise RequestError(f"{field}: only with messages", param=field)
