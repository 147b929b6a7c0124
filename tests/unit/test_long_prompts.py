"""Texts of many tokens: encoded in pieces, with breaks at any length, whatever is in them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemserve.contract.filter_options import MAX_QUESTION_TOKENS
from gemserve.contract.filter_plan import Segment
from gemserve.contract.prompt_parts import TextBreaks
from gemserve.filtering.segment_cuts import cut_segments, document_ranges
from gemserve.prompting import encoding as encodings
from gemserve.prompting import text_breaks
from gemserve.prompting.encoding import TokenOffsets, encode
from gemserve.prompting.prompt import chat_prompt, text_prompt
from gemserve.prompting.text_breaks import find_breaks

ROOT = Path(__file__).parents[2]
LONGEST = 4 * encodings._PIECE  # characters of a text that is encoded as one


def repeated(text: str, num_chars: int = LONGEST + 40_000) -> str:
    return (text * (num_chars // len(text) + 1))[:num_chars]


def mixed() -> str:
    rng = random.Random(0)
    characters = "ab .\n\r\t0é中😀한'<|>"
    return "".join(rng.choices(characters, k=LONGEST + 9000))


TEXTS = {
    "markdown": repeated((ROOT / "docs" / "architecture.md").read_text()),
    "code": repeated((ROOT / "server/gemserve/engine/worker.py").read_text()),
    "CJK": repeated(
        "请问，第三章讲了什么？答案在这里！\n\n「好。」然后走了……\n- 一 😀。\n두 번째.\r\n"
    ),
    "mixed": mixed(),
    "one word": repeated("hello "),
    "no breaks": repeated("the quick brown fox "),
    "no blanks": repeated("a"),
    "newlines": "\n" * (LONGEST + 1),
    "blanks": " " * (LONGEST + 1),
    "control tokens": repeated("<|user|>hi<|end|>"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_in_pieces_has_the_tokens_of_the_whole(name: str, tokenizer: Any) -> None:
    text = TEXTS[name]
    found = encode(tokenizer, text, add_special_tokens=True)
    assert isinstance(found, TokenOffsets)
    whole = tokenizer.backend_tokenizer.encode(text, add_special_tokens=True)
    assert found.ids == whole.ids
    assert found.offsets == whole.offsets
    assert found.token_to_chars(1000) == whole.token_to_chars(1000)


def test_a_word_longer_than_a_piece_is_encoded_as_one(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces that never agree, as with a tokenizer that counts from a word's beginning."""
    monkeypatch.setattr(encodings._Piece, "joint", lambda *_: None)
    text = TEXTS["markdown"]
    whole = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    assert encode(tokenizer, text, add_special_tokens=False).ids == whole.ids


@pytest.mark.parametrize("name", ["markdown", "code", "CJK", "mixed", "no breaks"])
def test_breaks_of_pieces_are_those_of_the_whole(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = TEXTS[name]
    starts = np.arange(len(text), dtype=np.int64)
    found = find_breaks([(0, text)], starts)
    monkeypatch.setattr(text_breaks, "_PIECE", 1 << 40)
    assert found == find_breaks([(0, text)], starts)


def segments_of(prompt: Any, size: int = 256) -> tuple[Segment, ...]:
    ids = np.array(prompt.ids, dtype=np.int64)
    ranges = document_ranges(prompt.protected, prompt.question, len(ids))
    return cut_segments(ids, ranges, prompt.breaks, size, prompt.anchor)


def check(segments: Sequence[Segment], ranges: Sequence[tuple[int, int]], size: int) -> None:
    """The segments are the ranges, in their order, and none is longer than `size`."""
    covered = [p for start, stop in ranges for p in range(start, stop)]
    assert [p for w in segments for p in range(w.start, w.stop)] == covered
    assert all(0 < w.stop - w.start <= size for w in segments)


@pytest.mark.parametrize("name", ["one word", "no breaks", "no blanks", "newlines", "blanks"])
def test_a_text_without_breaks_is_cut_into_whole_segments(name: str, tokenizer: Any) -> None:
    prompt = text_prompt(tokenizer, TEXTS[name] + "\n\nWhat does the third page say?")
    ranges = document_ranges(prompt.protected, prompt.question, len(prompt.ids))
    segments = segments_of(prompt)
    check(segments, ranges, 256)
    assert len(segments) <= 8 * len(prompt.ids) // 256


def test_many_short_messages_are_read_together(tokenizer: Any) -> None:
    roles = ["user", "assistant"]
    messages = [{"role": roles[i % 2], "content": f"Note {i}: it rained."} for i in range(500)]
    asked = "In which of these notes did it snow, " + "or hail, " * 12 + "and who said so?"
    prompt = chat_prompt(tokenizer, [*messages, {"role": "user", "content": asked}])
    assert 0 < sum(b - a for a, b in prompt.question) <= MAX_QUESTION_TOKENS
    segments = segments_of(prompt)
    ranges = document_ranges(prompt.protected, prompt.question, len(prompt.ids))
    check(segments, ranges, 256)
    assert len(segments) < 500 / 4


def test_a_question_longer_than_a_segment_is_no_segment(tokenizer: Any) -> None:
    asked = " ".join(f"And is item {i} red?" for i in range(200))
    text = repeated("It rained in Paris.\n\n", 40_000) + asked
    prompt = chat_prompt(tokenizer, [{"role": "user", "content": text}])
    assert 0 < sum(b - a for a, b in prompt.question) <= MAX_QUESTION_TOKENS
    for segment in segments_of(prompt):
        assert not any(segment.start < b and segment.stop > a for a, b in prompt.question)


def test_a_document_of_control_tokens_stays_text(tokenizer: Any) -> None:
    text = repeated("<|user|>hi<|end|>") + "\n\nWhat is this?"
    prompt = chat_prompt(tokenizer, [{"role": "user", "content": text}])
    short = chat_prompt(tokenizer, [{"role": "user", "content": "What is this?"}])
    control = set(tokenizer.backend_tokenizer.get_added_tokens_decoder())
    count = sum(token in control for token in prompt.ids)
    assert count == sum(token in control for token in short.ids)
    starts, ends = prompt.encoding.starts, prompt.encoding.ends
    assert (np.diff(starts) >= 0).all()
    assert len(starts) == len(ends) == len(prompt.ids)
    check(
        segments_of(prompt),
        document_ranges(prompt.protected, prompt.question, len(prompt.ids)),
        256,
    )


def test_an_anchor_of_any_length_is_part_of_the_name() -> None:
    tokens = np.arange(1000, dtype=np.int64)
    names = [
        {w.name for w in cut_segments(tokens, [(0, 1000)], TextBreaks(), 256, range(n))}
        for n in (0, 1, 64, 500)
    ]
    assert all(not one & other for i, one in enumerate(names) for other in names[:i])
