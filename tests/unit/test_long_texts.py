"""What counts of a text, before it is tokenized."""

from __future__ import annotations

from gemserve.api.requests.long_texts import count_chars, count_chat_bytes, count_chat_chars


def test_all_texts_of_a_chat_count() -> None:
    call = {"function": {"name": "f", "arguments": {"x": "y" * 100}}}
    message = {"role": "assistant", "content": "z" * 50, "tool_calls": [call]}
    assert count_chat_chars([message]) == 150 + 5 * 16
    assert count_chat_chars([], [{"a" * 20: ["b" * 30, 1, None]}], {"c" * 40: True}) == 90
    assert count_chars(["", "x"]) == 16


def test_bytes_count_and_not_characters() -> None:
    assert count_chat_bytes([{"content": "😀" * 50}]) == 200
