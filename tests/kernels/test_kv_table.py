"""What works on spans of one memory, against the memory that the engine gives its sequences."""

from __future__ import annotations

import pytest
import torch

from gemserve.cost import ModelShape
from gemserve.model.passes.kv import DecodeBatch, DecodeStep, KVSpan, Memory
from gemserve_kernels import KVTable, decode_attention, select_backend, write_tokens

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


def spans_of(memory: Memory, spans: list[KVSpan], lengths: tuple[int, ...] = LENGTHS) -> KVTable:
    pairs = zip(spans, lengths, strict=True)
    table = [span.rows_of(length - 1, memory.rows) for span, length in pairs]
    return KVTable(
        rows=memory.rows, table=torch.tensor(table), kv_heads=KV_HEADS, longest=max(lengths)
    )


BACKEND = select_backend(torch.device("cpu"))


def test_a_batch_tells_the_device_where_everything_lies() -> None:
    memory, views = memory_of(0)
    batch = DecodeBatch(memory, views, slots=[4, 0, 8], positions=[4, 7, 8])
    assert batch.longest == 9
    numbers = torch.tensor(batch.numbers([11, 12, 13], batch.positions, size=4))
    step = DecodeStep.over(numbers, memory, 16)
    assert step.ids.tolist() == [[11, 12, 13, 0]]
    assert step.positions.tolist() == [[4, 7, 8, 0]]
    assert step.spans.table[:3].tolist() == spans_of(memory, views).table.tolist()
    assert step.spans.table[3].tolist() == [0] * 5
    assert (step.spans.longest, step.spans.num_sequences) == (16, 4)


@pytest.mark.parametrize("window", [None, 1, 4, 9])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("lengths", [LENGTHS, (0, 1, 9), (5, 0, 0)])
def test_the_cpu_s_decode_step_equals_the_plain_one(
    lengths: tuple[int, ...], softcap: float | None, window: int | None
) -> None:
    new = torch.randn(2, KV_HEADS, 3, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    query = torch.randn(3, 4, HEAD_DIM, generator=torch.Generator().manual_seed(2))
    memory, views = memory_of(0)
    spans = spans_of(memory, views, lengths)
    for layer in range(LAYERS):
        expected = memory.rows.clone()
        for (first, to_head, to_value, to_layer, length), key, value in zip(
            spans.places, new[0].transpose(0, 1), new[1].transpose(0, 1), strict=True
        ):
            for head in range(KV_HEADS * (length > 0)):
                row = first + layer * to_layer + head * to_head + length - 1
                expected[row], expected[row + to_value] = key[head], value[head]
        BACKEND.write(spans, new[0], new[1], layer=layer)
        assert torch.equal(memory.rows, expected)
        options = {"layer": layer, "scale": 0.3, "softcap": softcap, "window": window}
        ours, theirs = (
            decode(query, spans, **options) for decode in (BACKEND.decode, decode_attention)
        )
        torch.testing.assert_close(ours.out, theirs.out)
        torch.testing.assert_close(ours.lse, theirs.lse)


@pytest.mark.parametrize(("source", "target"), [(2, 0), (0, 0)])
def test_packed_spans_hold_the_chosen_tokens(source: int, target: int) -> None:
    """One by the backend's kernel, and one onto itself, which no kernel may do."""
    spans = memory_of(0)[1]
    generator = torch.Generator().manual_seed(3)
    length = CAPACITIES[source]
    chosen = torch.rand(LAYERS, KV_HEADS, length, generator=generator).argsort(-1)[..., :4]
    chosen = chosen.sort(-1).values
    expected = [
        [t.gather(1, chosen[layer].unsqueeze(-1).expand(-1, -1, HEAD_DIM)) for t in pair]
        for layer in range(LAYERS)
        for pair in [spans[source].read(layer, length)]
    ]
    spans[target].pack(spans[source], chosen, BACKEND)
    for layer in range(LAYERS):
        for ours, theirs in zip(spans[target].read(layer, 4), expected[layer], strict=True):
            assert torch.equal(ours, theirs)


def test_empty_sequences_change_nothing() -> None:
    memory, views = memory_of(0)
    before = memory.rows.clone()
    spans = spans_of(memory, views, (0, 0, 0))
    new = torch.ones(KV_HEADS, 3, HEAD_DIM)
    write_tokens(spans, new, new, layer=0)
    assert torch.equal(memory.rows, before)
    part = decode_attention(torch.ones(3, 4, HEAD_DIM), spans, layer=0, scale=1.0)
    assert part.out.abs().max() == 0
    assert bool((part.lse == -torch.inf).all())


@pytest.mark.parametrize("size", [1, 2, 4, 5, 16])
def test_the_newest_chunk_is_what_a_token_sees_within_its_chunk(size: int) -> None:
    """Chunks begin at multiples of their size in each sequence, whatever its length is."""
    memory, spans = memory_of(seed=3)
    whole = spans_of(memory, spans)
    newest = whole.newest_chunks(size)
    assert newest.longest == min(max(LENGTHS), size)
    query = torch.randn(3, 4, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    part = decode_attention(query, newest, layer=1, scale=0.25)
    for row, length in enumerate(LENGTHS):
        window = (length - 1) % size + 1
        alone = decode_attention(query, whole, layer=1, scale=0.25, window=window)
        torch.testing.assert_close(part.out[:, row], alone.out[:, row])
    empty = spans_of(memory, spans, (0, 1, 9)).newest_chunks(size)
    assert int(empty.table[0, 4]) == 0
