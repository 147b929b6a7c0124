"""What works on spans of one memory, against the memory that the engine gives its sequences."""

from __future__ import annotations

import torch

from gemserve.cost import ModelShape
from gemserve.model.kv import DecodeBatch, KVSpan, Memory
from gemserve_kernels import Spans, decode_attention, gather_tokens, write_tokens
from gemserve_kernels.backends import Reference

LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 16
LENGTHS, CAPACITIES = (5, 1, 9), (7, 3, 9)


def memory_of(seed: int) -> tuple[Memory, list[KVSpan]]:
    """Three sequences' spans, one behind the other, of random numbers."""
    shape = ModelShape(
        num_layers=LAYERS,
        num_heads=4,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        hidden_size=64,
        vocab_size=8,
        layer_params=1,
        qkv_params=1,
        element_bytes=4,
    )
    memory = Memory(2 * LAYERS * sum(CAPACITIES), shape, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    memory.rows.copy_(torch.randn(memory.rows.shape, generator=generator))
    starts = [2 * LAYERS * sum(CAPACITIES[:index]) for index in range(3)]
    return memory, [
        memory.kv(start, num_layers=LAYERS, capacity=capacity)
        for start, capacity in zip(starts, CAPACITIES, strict=True)
    ]


def spans_of(memory: Memory, spans: list[KVSpan]) -> Spans:
    table = [
        [*span.rows_of(0, memory.rows), length] for span, length in zip(spans, LENGTHS, strict=True)
    ]
    return Spans(
        rows=memory.rows, table=torch.tensor(table), kv_heads=KV_HEADS, longest=max(LENGTHS)
    )


def test_decode_step_equals_the_batch() -> None:
    new = torch.randn(2, KV_HEADS, 3, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    query = torch.randn(3, 4, HEAD_DIM, generator=torch.Generator().manual_seed(2))
    memory, views = memory_of(0)
    slots = [length - 1 for length in LENGTHS]
    batch = DecodeBatch(memory, views, slots=slots, positions=slots)
    other, other_views = memory_of(0)
    spans = spans_of(other, other_views)
    for layer in range(LAYERS):
        batch.write(layer, new[0], new[1])
        write_tokens(spans, new[0], new[1], layer=layer)
        assert torch.equal(memory.rows, other.rows)
        keys, values = batch.read(layer)
        expected = Reference().decode(query, keys, values, scale=0.3)
        part = decode_attention(query, spans, layer=layer, scale=0.3)
        torch.testing.assert_close(part.out.transpose(0, 1), expected)
        of_views = decode_attention(query, Spans.of_views(keys, values), layer=0, scale=0.3)
        torch.testing.assert_close(of_views.out.transpose(0, 1), expected)


def test_gathered_tokens_equal_a_packed_span() -> None:
    memory, spans = memory_of(0)
    other, other_spans = memory_of(0)
    generator = torch.Generator().manual_seed(3)
    chosen = torch.rand(LAYERS, KV_HEADS, 9, generator=generator).argsort(-1)[..., :4]
    chosen = chosen.sort(-1).values
    spans[0].pack(spans[2], chosen)
    source, target = (
        other.rows.as_strided(
            (LAYERS, 2, KV_HEADS, capacity, HEAD_DIM),
            (to_layer * HEAD_DIM, to_value * HEAD_DIM, to_head * HEAD_DIM, HEAD_DIM, 1),
            first * HEAD_DIM,
        )
        for capacity, (first, to_head, to_value, to_layer) in (
            (CAPACITIES[index], other_spans[index].rows_of(0, other.rows)) for index in (2, 0)
        )
    )
    gather_tokens(source, target, chosen)
    assert torch.equal(memory.rows, other.rows)


def test_empty_sequences_change_nothing() -> None:
    memory, views = memory_of(0)
    before = memory.rows.clone()
    spans = spans_of(memory, views)
    spans.table[:, 4] = 0
    new = torch.ones(KV_HEADS, 3, HEAD_DIM)
    write_tokens(spans, new, new, layer=0)
    assert torch.equal(memory.rows, before)
    part = decode_attention(torch.ones(3, 4, HEAD_DIM), spans, layer=0, scale=1.0)
    assert part.out.abs().max() == 0
    assert bool((part.lse == -torch.inf).all())
