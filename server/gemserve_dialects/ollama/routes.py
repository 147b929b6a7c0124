"""Ollama's endpoints under `/api`: those that answer, and those that describe the model."""

from __future__ import annotations

import time
from typing import Any

from anyio import to_thread
from fastapi import Request, Response

import gemserve
from gemserve.api.replies.answer_reader import answer_rules
from gemserve.api.requests.engine_requests import EngineRequests
from gemserve.api.requests.json_body import parse_body
from gemserve.api.requests.model_names import ModelNames
from gemserve.api.requests.request_builder import RequestBuilder
from gemserve.api.requests.tool_choice import chat_call_rules
from gemserve.api.routes.completions import EXAMPLE_MESSAGES
from gemserve.api.routes.operation import Operation, Routes
from gemserve.api.routes.submission import Submitter, read_body
from gemserve.contract.adapters import LoadedAdapter
from gemserve_dialects.ollama import reply_types
from gemserve_dialects.ollama.body import AnsweredBody, GenerateBody, OllamaChatBody, ShowBody
from gemserve_dialects.ollama.errors import OllamaError
from gemserve_dialects.ollama.reply import loaded, ollama_reply, timestamp

# Clients look at it to know what they may send.
PROTOCOL_VERSION = "0.12.0"
CHAT = Operation(
    summary="Answer messages, in Ollama's form",
    body=OllamaChatBody,
    example={"messages": EXAMPLE_MESSAGES, "stream": False, "options": {"num_predict": 32}},
    reply=reply_types.ChatAnswer | reply_types.LoadedChat,
    line=reply_types.ChatLine,
    error=OllamaError,
    unavailable=OllamaError,
)
GENERATE = Operation(
    summary="Answer a prompt, in Ollama's form",
    body=GenerateBody,
    example={"prompt": "Hello", "stream": False, "options": {"num_predict": 32}},
    reply=reply_types.GeneratedAnswer | reply_types.LoadedPrompt,
    line=reply_types.GeneratedLine,
    error=OllamaError,
    unavailable=OllamaError,
)
SHOW = Operation(
    summary="Describe a model, in Ollama's form",
    body=ShowBody,
    reply=reply_types.ShownModel,
    error=OllamaError,
)
TAGS = Operation(
    summary="List the models, in Ollama's form", reply=reply_types.ModelList, error=OllamaError
)
VERSION = Operation(
    summary="The version of Ollama's protocol", reply=reply_types.Version, error=OllamaError
)


class _SaysNothing(Exception):
    """Raised where a request would be built, with a body that has no prompt."""

    def __init__(self, body: AnsweredBody) -> None:
        super().__init__("no prompt")
        self.body = body


def ollama_routes(
    submitter: Submitter, builder: RequestBuilder, models: ModelNames, model_type: str
) -> Routes:
    routes = Routes()
    started_at = timestamp(time.time())
    details: reply_types.Details = {
        "parent_model": "",
        "format": "",
        "family": model_type,
        "families": [model_type],
        "parameter_size": "",
        "quantization_level": "",
    }

    def build(
        body: OllamaChatBody | GenerateBody,
        request_id: str,
        adapter: LoadedAdapter | None = None,
    ) -> EngineRequests:
        if body.says_nothing:
            raise _SaysNothing(body)
        return builder.build_as_chat(body, request_id, adapter)

    async def answer(http: Request, body_type: type[AnsweredBody]) -> Response:
        arrived_s = time.monotonic()
        try:
            submission: Any = await submitter.submit(http, body_type, build)
        except _SaysNothing as nothing:
            return loaded(nothing.body)
        request = submission.reader.streams[0].request
        calls = chat_call_rules(submission.body.form.chat)
        rules = answer_rules(builder.tokenizer, request, calls)
        return await ollama_reply(submission.body, submission.reader, rules, arrived_s)

    def list_model(name: str) -> reply_types.ListedModel:
        return {
            "name": name,
            "model": name,
            "modified_at": started_at,
            "size": 0,
            "digest": "",
            "details": details,
        }

    def show(raw: bytes) -> reply_types.ShownModel:
        adapter = models.describe_adapter(parse_body(raw, ShowBody).shown)
        taken = 0 if adapter is None else adapter.num_positions
        template = builder.tokenizer.chat_template
        return {
            "license": "",
            "modelfile": "",
            "parameters": "",
            "template": template if isinstance(template, str) else "",
            "details": details,
            "model_info": {
                "general.architecture": model_type,
                f"{model_type}.context_length": builder.context_tokens - taken,
                f"{model_type}.vocab_size": builder.vocab_size,
            },
            "capabilities": ["completion", "tools"],
            "modified_at": started_at,
        }

    @routes.add("POST", "/api/chat", CHAT)
    async def post_chat(http: Request) -> Response:
        return await answer(http, OllamaChatBody)

    @routes.add("POST", "/api/generate", GENERATE)
    async def post_generate(http: Request) -> Response:
        return await answer(http, GenerateBody)

    @routes.add("POST", "/api/show", SHOW)
    async def post_show(http: Request) -> reply_types.ShownModel:
        raw = await read_body(http)
        return await to_thread.run_sync(show, raw)

    @routes.add("GET", "/api/tags", TAGS)
    async def get_tags() -> reply_types.ModelList:
        adapters = (f"{models.model}:{adapter.name}" for adapter in models.adapters.list())
        return {"models": [list_model(name) for name in (models.model, *adapters)]}

    @routes.add("GET", "/api/version", VERSION)
    async def get_version() -> reply_types.Version:
        return {"version": PROTOCOL_VERSION, "gemserve": gemserve.__version__}

    return routes
