"""Answers of two methods that read the whole prompt, `none` and an evicting one, from one prefill.

Decoding is greedy, one example at a time. The engine would give the same answers, but it would read
the prompt once for each method.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gemserve.engine.core import Core
from gemserve.engine.running.snapkv_eviction import evict
from gemserve.filtering.snapkv import SnapKV
from gemserve.model.passes.causal_model import CausalModel
from gemserve.model.passes.kv import DecodeBatch, KVSpan, Memory
from gemserve.model.passes.query_tap import QueryTap

_CHUNK_TOKENS = 512


def prefill(
    model: CausalModel,
    ids: Sequence[int],
    *,
    kv: KVSpan,
    rope_tokens: int,
    query_tap: QueryTap,
) -> torch.Tensor:
    """Run all layers on a prompt. Returns the last logits: [1, vocab].

    `kv` gets the keys and values, and `query_tap` the queries it collects. `rope_tokens`: see
    `CausalModel.prefill_chunk`.
    """
    logits = torch.empty(0, model.vocab_size)
    for low in range(0, len(ids), _CHUNK_TOKENS):
        chunk = ids[low : low + _CHUNK_TOKENS]
        is_last = low + len(chunk) == len(ids)
        last = model.prefill_chunk(
            chunk,
            start=low,
            kv=kv,
            rope_tokens=rope_tokens,
            is_last=is_last,
            query_tap=query_tap,
        )
        if last is not None:
            logits = last
    return logits


def answer_unfiltered(
    core: Core, ids: Sequence[int], max_tokens: int, evictor: SnapKV, keep: int
) -> tuple[list[int], list[int]]:
    """The answer from all keys, and the one after eviction of all but `keep` tokens.

    Answers are token ids without the end token. A `keep` that is not below the prompt's length
    evicts nothing.
    """
    model, num_tokens = core.model, len(ids)
    layers, capacity = model.num_layers, num_tokens + max_tokens
    memory = model.new_memory(2 * layers * capacity)
    kv = memory.kv(0, num_layers=layers, capacity=capacity)
    tap = model.new_query_tap(range(layers), evictor.rows(num_tokens))
    logits = prefill(model, ids, kv=kv, rope_tokens=capacity, query_tap=tap)
    first = int(logits[0].argmax())

    evicted: list[int] | None = None
    if keep < num_tokens:
        with torch.inference_mode():
            room = model.new_memory(2 * layers * (keep + max_tokens))
            packed = room.kv(0, num_layers=layers, capacity=keep + max_tokens)
            evict(evictor, tap, kv, num_tokens, keep, packed, model.backend)
        evicted = _decode(core, room, packed, first, keep, num_tokens, max_tokens)
    # this comes last, because decoding writes after the prompt's keys
    answer = _decode(core, memory, kv, first, num_tokens, num_tokens, max_tokens)
    return answer, answer if evicted is None else evicted


def _decode(
    core: Core,
    memory: Memory,
    kv: KVSpan,
    first: int,
    slot: int,
    position: int,
    max_tokens: int,
) -> list[int]:
    tokens: list[int] = []
    token = first
    while token not in core.eos_ids:
        tokens.append(token)
        if len(tokens) == max_tokens:
            break
        batch = DecodeBatch(memory, [kv], slots=[slot], positions=[position])
        logits = core.model.decode([token], batch, [position - len(tokens) + 1 + max_tokens])
        token = int(logits[0].argmax())
        slot, position = slot + 1, position + 1
    return tokens
