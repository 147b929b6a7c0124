"""Requests with every field that coding agents send, as recorded from them; the texts are others.

Claude Code 2.1.197, Codex 0.169.0 (for a model it does not know, and for two that it knows) and
opencode 1.18.33, each with a call of a tool and its result.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.described import Described
from tests.fakes import CHAT, FILTERED, MODEL, Api

pytestmark = pytest.mark.anyio
Json = dict[str, Any]
ARGUMENTS: Json = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
    "required": ["command"],
    "additionalProperties": False,
}
CACHED = {"cache_control": {"type": "ephemeral"}}
USE = {"type": "tool_use", "id": "t1", "name": "Bash", "input": {"command": "ls"}}
GIVEN = {"type": "tool_result", "tool_use_id": "t1", "content": "a.txt", "is_error": False}
CLAUDE_CODE: Json = {
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>The date.</system-reminder>"},
                {"type": "text", "text": "List the files."},
            ],
        },
        {"role": "system", "content": "These agents are there."},
        {"role": "assistant", "content": [USE]},
        {"role": "user", "content": [{**GIVEN, **CACHED}]},
    ],
    "system": [
        {"type": "text", "text": "Version 1."},
        {"type": "text", "text": "You are an agent.", **CACHED},
    ],
    "tools": [{"name": "Bash", "description": "Runs it.", "input_schema": ARGUMENTS}],
    "metadata": {"user_id": '{"device_id":"d","account_uuid":"","session_id":"s"}'},
    "max_tokens": 32_000,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}
WITH_THINKING: Json = {**CLAUDE_CODE, "thinking": {"budget_tokens": 31_999, "type": "enabled"}}
SMALL: Json = {
    **{k: v for k, v in CLAUDE_CODE.items() if k not in ("context_management", "output_config")},
    "thinking": {"type": "disabled"},
    "temperature": 1,
}
ADD = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
    },
}
SKY = {"type": "namespace", "name": "mcp__sky", "description": "Tools.", "tools": [ADD]}
EXEC = {"type": "custom", "name": "exec", "description": "Runs JavaScript.", "format": {}}
LARK = {"type": "grammar", "syntax": "lark", "definition": "start: /(.|\\n)+/"}


def said(role: str, text: str) -> Json:
    return {
        "type": "message",
        "id": f"msg_{role}",
        "role": role,
        "content": [{"type": "input_text", "text": text}],
    }


CODEX: Json = {
    "stream": True,
    "input": [
        said("developer", "You are an agent."),
        said("developer", "These skills are there."),
        said("user", "<environment_context></environment_context>"),
        said("user", "List the files."),
        {
            "type": "function_call",
            "status": "completed",
            "id": "fc_1",
            "name": "add",
            "namespace": "mcp__sky",
            "arguments": '{"a": 1}',
            "call_id": "c1",
        },
        {
            "type": "function_call_output",
            "id": "fco_1",
            "call_id": "c1",
            "output": [{"type": "input_text", "text": "Wall time: 0 s"}],
        },
    ],
    "tools": [
        {**ADD, "name": "exec_command", "parameters": ARGUMENTS},
        SKY,
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "client_metadata": {"session_id": "s", "x-codex-turn-metadata": "{}"},
}
SEARCH = {
    "type": "tool_search",
    "execution": "client",
    "description": "Finds tools.",
    "parameters": {"type": "object", "properties": {"limit": {"type": "number"}}},
}
CODEX_WITH_SEARCH: Json = {
    **CODEX,
    "input": [
        *CODEX["input"],
        {
            "type": "custom_tool_call",
            "id": "ctc_1",
            "status": "completed",
            "call_id": "c2",
            "name": "apply_patch",
            "input": "*** Begin Patch\n",
        },
        {"type": "custom_tool_call_output", "id": "x", "call_id": "c2", "output": "Exit code: 0"},
        {
            "type": "tool_search_call",
            "id": "ts_1",
            "call_id": "c3",
            "status": "completed",
            "execution": "client",
            "arguments": {"query": "add"},
        },
        {
            "type": "tool_search_output",
            "id": "tso_1",
            "call_id": "c3",
            "status": "completed",
            "execution": "client",
            "tools": [{**SKY, "tools": [{**ADD, "defer_loading": True}]}],
        },
    ],
    "tools": [
        {**EXEC, "name": "apply_patch", "format": LARK},
        SEARCH,
        {"type": "web_search", "search_content_types": ["text", "image"]},
    ],
    "reasoning": {"effort": "medium"},
    "text": {"verbosity": "low"},
}
FUNCTIONS = {"type": "namespace", "name": "functions", "description": ""}
CODEX_WITH_CODE: Json = {
    **{k: v for k, v in CODEX.items() if k != "tools"},
    "input": [
        {
            "type": "additional_tools",
            "id": "at_1",
            "role": "developer",
            "tools": [{**FUNCTIONS, "tools": [{**EXEC, "format": LARK}]}],
        },
        *CODEX["input"][:4],
    ],
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "context": "all_turns"},
    "text": {"verbosity": "low"},
}
BASH = {"name": "bash", "description": "Runs it.", "parameters": ARGUMENTS}
CALLED = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
OPENCODE: Json = {
    "messages": [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": "List the files."},
        {"role": "assistant", "content": "", "tool_calls": [CALLED]},
        {"role": "tool", "tool_call_id": "c1", "content": "a.txt"},
    ],
    "max_tokens": 256,
    "tools": [{"type": "function", "function": BASH}],
    "tool_choice": "auto",
    "stream": True,
    "stream_options": {"include_usage": True},
}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", CLAUDE_CODE),
        ("/v1/messages", WITH_THINKING),
        ("/v1/messages", SMALL),
        ("/v1/responses", CODEX),
        ("/v1/responses", CODEX_WITH_SEARCH),
        ("/v1/responses", CODEX_WITH_CODE),
        (CHAT, OPENCODE),
    ],
)
@pytest.mark.parametrize("answer", ["Done.", '{"name": "Bash", "arguments": {"command": "ls"}}'])
async def test_what_agents_send_is_answered(api: Api, path: str, body: Json, answer: str) -> None:
    described = Described((await api.client.get("/openapi.json")).json())
    api.core.script = (FILTERED, answer)
    body = {"model": "fake", **body}
    headers = {"anthropic-beta": "claude-code-20250219,context-management-2025-06-27"}
    assert described.accepts(path, body)
    for stream in (True, False):
        if path == CHAT and not stream:
            body = {k: v for k, v in body.items() if k != "stream_options"}
        sent = {**body, "stream": stream}
        reply = await api.client.post(path, json=sent, headers=headers, params={"beta": "true"})
        assert reply.status_code == 200, reply.text
        described.check(reply)


@pytest.mark.parametrize(
    "system",
    [
        "x-anthropic-billing-header: cc_version=2.1.330.714;\nBe brief.",
        [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.330.5a4;"},
            {"type": "text", "text": "Be brief."},
        ],
    ],
)
async def test_a_line_for_anthropic_s_accounts_is_left_out(api: Api, system: Any) -> None:
    """It was the first line of the prompt, and differed, so no conversation began like another."""
    for sent in (system, "Be brief."):
        user = {"role": "user", "content": "Hi"}
        body = {"model": MODEL, "max_tokens": 9, "system": sent, "messages": [user]}
        reply = await api.client.post("/v1/messages", json=body)
        assert reply.status_code == 200, reply.text
    first, second = (request.prompt_ids for request in api.core.requests)
    assert list(first) == list(second)
