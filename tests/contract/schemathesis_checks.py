"""Loaded by Schemathesis: which refusals of a request that fits the document are right."""

from __future__ import annotations

import os
import re
from typing import Any

import schemathesis

MODEL, ADAPTER, FOLDER = "org/random", "always-there", "support"
LIBRARY, FILE = "always-there", "a.md"
DOCUMENT = os.environ.get("GEMSERVE_TEST_DOCUMENT", "")
NO_DOCUMENT = "doc-" + "0" * 32
# Fields with limits that no schema tells: tokens, the vocabulary, the model's layers, and what
# depends on another field.
GUIDED = (
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
LIMITED = {
    "/v1/completions": {
        *("prompt", "max_tokens", "min_tokens", "n", "best_of", "logit_bias", "stop_token_ids"),
        *("filter", "response_format", *GUIDED),
    },
    "/v1/chat/completions": {
        *("messages", "max_tokens", "max_completion_tokens", "min_tokens", "logit_bias"),
        *("stop_token_ids", "filter", "response_format", "tools", "tool_choice", "top_logprobs"),
        *(*GUIDED, "continue_final_message"),
    },
    "/v1/responses": {
        *("input", "max_output_tokens", "min_tokens", "logit_bias", "stop_token_ids", "filter"),
        *("text", "tools", "tool_choice", "top_logprobs"),
    },
    "/v1/responses/input_tokens": {"input", "filter", "text", "tools", "tool_choice"},
    "/v1/messages": {
        *("messages", "max_tokens", "filter", "output_config", "output_format", "tools"),
        "tool_choice",
    },
    "/v1/messages/count_tokens": {
        *("messages", "filter", "output_config", "output_format", "tools", "tool_choice"),
    },
    "/api/chat": {"messages", "options", "filter", "format", "tools"},
    "/api/generate": {"prompt", "options", "filter", "format"},
    "/v1/filter": {
        *("prompt", "messages", "filter", "tools", "continue_final_message"),
        "add_generation_prompt",
    },
    **{
        path: {"query", "documents", "truncate_prompt_tokens"}
        for path in ("/v1/rerank", "/rerank", "/v2/rerank")
    },
    **{
        path: {
            *("text_1", "text_2", "data_1", "data_2", "queries", "documents", "items"),
            "truncate_prompt_tokens",
        }
        for path in ("/v1/score", "/score")
    },
    "/v1/documents": {"text", "ttl", "filter", "file"},
    "/v1/documents/text": {"file"},
    "/v1/libraries": {"name"},  # there may be one of this name
    "/v1/libraries/{library}/files": {"file", "path"},
    "/tokenize": {"tools", "messages", "continue_final_message", "add_generation_prompt"},
    "/detokenize": {"tokens"},
    "/v1/adapters": {"path"},
}


@schemathesis.hook
def before_call(
    ctx: schemathesis.HookContext, case: schemathesis.Case, kwargs: dict[str, Any]
) -> None:
    """Let a request that fits the document name what is there: a pattern is all it tells.

    None may load or unload the adapter that the others name, or delete the document or library.
    """
    for name, value in list((case.headers or {}).items()):
        if not value.isascii():  # Schemathesis makes such headers where a path takes any character
            del case.headers[name]
    body = case.body if isinstance(case.body, dict) else {}
    is_good = case.meta is not None and case.meta.generation.mode.is_positive
    if is_good:
        _name_document(body)
    if case.method == "DELETE" and case.path_parameters.get("document_id") == DOCUMENT:
        case.path_parameters["document_id"] = NO_DOCUMENT
    if case.path.startswith("/v1/libraries/{library}"):
        names = case.path_parameters
        is_whole = case.path == "/v1/libraries/{library}"
        if case.method == "DELETE" and names.get("library") == LIBRARY:
            names["library"] = "another"
        elif is_good and not (case.method == "DELETE" and is_whole):
            names["library"] = LIBRARY
        if case.method == "DELETE" and names.get("path") == FILE:
            names["path"] = "another"
    if case.path.startswith("/v1/adapters"):
        for names in (body, case.path_parameters):
            if names.get("name") == ADAPTER:
                names["name"] = "another"
        if is_good and "path" in body:
            body["path"] = FOLDER
    elif is_good:
        if "name" in case.path_parameters:
            case.path_parameters["name"] = _present(case.path_parameters["name"])
        if isinstance(body.get("model"), str):
            body["model"] = _present(body["model"])
        if body.get("adapter") is not None:
            body["adapter"] = ADAPTER


def _name_document(value: Any) -> None:
    """Put the stored document's id wherever a body names one."""
    for member in value if isinstance(value, list) else ():
        _name_document(member)
    for name, member in list(value.items()) if isinstance(value, dict) else ():
        if name in ("file_id", "document") and isinstance(member, str):
            value[name] = DOCUMENT
        elif name == "library" and member is not None:
            value[name] = LIBRARY
        else:
            _name_document(member)


def _present(model: str) -> str:
    return MODEL if model == MODEL else f"{MODEL}:{ADAPTER}"


@schemathesis.check
def a_refusal_names_a_limited_field(
    ctx: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case
) -> None:
    """Stands in for the status 400 that `positive_data_acceptance` is told to expect."""
    meta = case.meta
    if response.status_code != 400 or meta is None or not meta.generation.mode.is_positive:
        return
    error = response.json()["error"]
    # errors in Anthropic's and in Ollama's form have messages that begin with the field
    message = error if isinstance(error, str) else error["message"]
    param = error["param"] if "param" in error else re.split("[:=]", message)[0]
    field = None if param is None else param.split(".")[0]
    too_long = ("maximum context length", "prompt is too long", "exceed context limit")
    if any(words in message for words in too_long) and "param" not in error:
        field = "prompt" if case.path == "/api/generate" else "messages"
    limited = LIMITED.get(case.path, set())
    assert field in limited, f"{case.path} refused {param}: {response.text[:300]}"
