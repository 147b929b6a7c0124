"""Control tokens that mark calls and thinking in an answer, and that its reader has to see."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

NO_MARKERS: Mapping[int, str] = {}
# Tokenizers call these special, so that decoding leaves them out.
MARKERS = frozenset(
    (
        *("<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>"),
        *("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>", "<|eom_id|>"),
        *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
        *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    )
)
# These mean something else in other families, so they count only beside the first one.
HARMONY = (
    *("<|channel|>", "<|message|>", "<|constrain|>"),
    *("<|start|>", "<|end|>", "<|call|>", "<|return|>"),
)


def shown_markers(tokenizer: Any, end_ids: Collection[int]) -> dict[int, str]:
    """The special tokens that are markers, by id. Those that end an answer are not among them."""
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    special = {index: token.content for index, token in added.items() if token.special}
    wanted = MARKERS | set(HARMONY if HARMONY[0] in special.values() else ())
    return {i: text for i, text in special.items() if text in wanted and i not in end_ids}
