"""One small request of an agent as each protocol writes it, by its path."""

from __future__ import annotations

from typing import Any

CALL = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"at": 7}'}}
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}},
}
RECORDED: dict[str, dict[str, Any]] = {
    "/v1/messages?beta=true": {
        "model": "m",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "Be brief."}],
        "tools": [{"name": "look_up", "input_schema": {"type": "object", "properties": {}}}],
        "messages": [
            {"role": "user", "content": "What is there?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "tool_use", "id": "c1", "name": "look_up", "input": {"at": 7}}
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "A lamp."}],
            },
        ],
    },
    "/v1/responses": {
        "model": "m",
        "instructions": "Be brief.",
        "tools": [{"name": "look_up", **TOOL["function"], "type": "function"}],
        "input": [
            {"role": "user", "content": "What is there?"},
            {
                "type": "function_call",
                "call_id": "c1",
                "name": "look_up",
                "arguments": '{"at": 7}',
            },
            {"type": "function_call_output", "call_id": "c1", "output": "A lamp."},
        ],
    },
    "/v1/chat/completions": {
        "model": "m",
        "tools": [TOOL],
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is there?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "A lamp."},
        ],
    },
}
