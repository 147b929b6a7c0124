"""What every operation takes and answers: bodies are the models that check them (`schemas`, …),
replies are types of their own (`replies`, `reply_events`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gemserve.api.replies import reply_types
from gemserve.api.replies.response_types import AnyEvent, Response
from gemserve.api.requests.base_bodies import (
    AdapterBody,
    Body,
    CompletionBody,
    DetokenizeBody,
    SelectionBody,
    TokenizeBody,
)
from gemserve.api.requests.chat_body import ChatBody
from gemserve.api.requests.responses_body import ResponsesBody

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """`example`: of a body, beside its model. `event`: what the data of a stream's events is.

    `reply` None: a plain text. `unavailable`: the reply with status 503. `is_admin`: where there
    are keys, it needs an administrator's.
    """

    summary: str
    body: type[Body] | None = None
    example: Json = field(default_factory=dict)
    reply: Any = None
    event: Any = None
    unavailable: Any = None
    links: Json | None = None
    is_admin: bool = False


_MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
OPERATIONS: dict[str, Operation] = {
    "POST /v1/completions": Operation(
        summary="Complete prompts",
        body=CompletionBody,
        example={"prompt": "The capital of France is", "max_tokens": 8},
        reply=reply_types.Completion,
        event=reply_types.CompletionChunk | reply_types.Error,
        unavailable=reply_types.Error,
    ),
    "POST /v1/chat/completions": Operation(
        summary="Answer messages",
        body=ChatBody,
        example={"messages": _MESSAGES, "max_tokens": 32},
        reply=reply_types.Chat,
        event=reply_types.ChatChunk | reply_types.Error,
        unavailable=reply_types.Error,
    ),
    "POST /v1/responses": Operation(
        summary="Answer, as a response",
        body=ResponsesBody,
        example={"input": _MESSAGES, "max_output_tokens": 32},
        reply=Response,
        event=AnyEvent,
        unavailable=reply_types.Error,
    ),
    "POST /v1/filter": Operation(
        summary="Tell what would be kept of a prompt",
        body=SelectionBody,
        example={"messages": _MESSAGES, "filter": {"keep": 64, "return_selection": True}},
        reply=reply_types.Selection,
        unavailable=reply_types.Error,
    ),
    "POST /tokenize": Operation(
        summary="Tokenize a prompt or messages",
        body=TokenizeBody,
        example={"prompt": "Hello"},
        reply=reply_types.Tokens,
        links={
            "text": {
                "operationId": "post_detokenize",
                "requestBody": {"tokens": "$response.body#/tokens"},
            }
        },
    ),
    "POST /detokenize": Operation(
        summary="Turn tokens into text",
        body=DetokenizeBody,
        example={"tokens": [72, 105]},
        reply=reply_types.Text,
    ),
    "GET /tokenizer_info": Operation(
        summary="Describe the tokenizer", reply=reply_types.TokenizerInfo
    ),
    "GET /v1/models": Operation(
        summary="List the model that is served, and it with each adapter",
        reply=reply_types.Models,
        links={
            "model": {
                "operationId": "get_v1_models_name",
                "parameters": {"name": "$response.body#/data/0/id"},
            }
        },
    ),
    "GET /v1/models/{name}": Operation(summary="Describe the model", reply=reply_types.Model),
    "GET /v1/adapters": Operation(summary="List the adapters", reply=reply_types.Adapters),
    "POST /v1/adapters": Operation(
        summary="Load an adapter, in place of one with its name",
        body=AdapterBody,
        example={"name": "support", "path": "support"},
        reply=reply_types.Adapter,
        unavailable=reply_types.Error,
        is_admin=True,
    ),
    "DELETE /v1/adapters/{name}": Operation(
        summary="Unload an adapter", reply=reply_types.AdapterDeleted, is_admin=True
    ),
    "GET /health": Operation(
        summary="Does the engine live?", reply=reply_types.Alive, unavailable=reply_types.NotAlive
    ),
    "GET /ready": Operation(
        summary="Does the server take requests?",
        reply=reply_types.Alive,
        unavailable=reply_types.NotAlive,
    ),
    "GET /version": Operation(summary="The server's version", reply=reply_types.Version),
    "GET /metrics": Operation(summary="Prometheus metrics"),
}
