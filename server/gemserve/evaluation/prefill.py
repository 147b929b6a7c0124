"""The chunked prefill that evaluation and calibration share, outside of the engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gemserve.model.causal_model import CausalModel
from gemserve.model.kv import KVSpan
from gemserve.model.query_tap import QueryTap
from gemserve.model.recurrent_state import SequenceState

_CHUNK_TOKENS = 512


def prefill(
    model: CausalModel,
    ids: Sequence[int],
    *,
    kv: KVSpan,
    rope_tokens: int,
    query_tap: QueryTap,
    start: int = 0,
    state: SequenceState | None = None,
) -> torch.Tensor:
    """Run all layers on tokens `start`… of a prompt. Returns the last logits: [1, vocab].

    `kv` holds the keys and values of the tokens before `start` and gets those of the others.
    `query_tap` gets the queries it collects. `rope_tokens`, `state`: see
    `CausalModel.prefill_chunk`. If `start` is the prompt's end, nothing runs, and there are no
    logits: [0, vocab].
    """
    logits = torch.empty(0, model.vocab_size)
    for low in range(start, len(ids), _CHUNK_TOKENS):
        chunk = ids[low : low + _CHUNK_TOKENS]
        is_last = low + len(chunk) == len(ids)
        last = model.prefill_chunk(
            chunk,
            start=low,
            kv=kv,
            rope_tokens=rope_tokens,
            is_last=is_last,
            query_tap=query_tap,
            state=state,
        )
        if last is not None:
            logits = last
    return logits
