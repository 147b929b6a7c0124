"""Loaded by Schemathesis: which refusals of a request that fits the document are right."""

from __future__ import annotations

import schemathesis

# Fields with limits that no schema tells: tokens, the vocabulary, the model's layers, and what
# depends on another field.
LIMITED = {
    "/v1/completions": {
        *("prompt", "max_tokens", "min_tokens", "n", "best_of", "logit_bias", "stop_token_ids"),
        *("filter", "response_format"),
    },
    "/v1/chat/completions": {
        *("messages", "max_tokens", "max_completion_tokens", "min_tokens", "logit_bias"),
        *("stop_token_ids", "filter", "response_format", "tools", "tool_choice", "top_logprobs"),
    },
    "/v1/responses": {
        *("input", "max_output_tokens", "min_tokens", "logit_bias", "stop_token_ids", "filter"),
    },
    "/v1/filter": {"prompt", "messages", "filter"},
    "/tokenize": set(),
    "/detokenize": {"tokens"},
}


@schemathesis.check
def a_refusal_names_a_limited_field(
    ctx: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case
) -> None:
    """Stands in for the status 400 that `positive_data_acceptance` is told to expect."""
    meta = case.meta
    if response.status_code != 400 or meta is None or not meta.generation.mode.is_positive:
        return
    param = response.json()["error"]["param"]
    field = None if param is None else param.split(".")[0]
    limited = LIMITED.get(case.path, set())
    assert field in limited, f"{case.path} refused {param}: {response.text[:300]}"
