"""The compiled attention of prompts, beside plain torch in float32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gemserve_kernels import Partial
from gemserve_kernels.attention_backends import NativeCpu, Reference
from tests.compiled_step import compiled_step


@pytest.fixture(scope="module", autouse=True)
def compiled() -> Iterator[None]:
    with compiled_step():
        obstacle = NativeCpu().find_obstacle(torch.device("cpu"), torch.bfloat16, 64)
        if obstacle is not None:
            pytest.skip(obstacle)
        yield


def made(heads: int, count: int, dim: int, seed: int, size: float = 1.0) -> torch.Tensor:
    """Of tokens first, as layers make queries, so that heads are not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(count, heads, dim, generator=generator) * size
    return numbers.to(torch.bfloat16).transpose(0, 1)


def both(
    heads: int, kv_heads: int, dim: int, queries: int, keys: int, is_causal: bool, size: float = 1.0
) -> tuple[Partial, Partial]:
    query = made(heads, queries, dim, 1, size)
    key, value = made(kv_heads, keys, dim, 2, size), made(kv_heads, keys, dim, 3)
    scale = dim**-0.5
    got = NativeCpu().part(query, key, value, scale=scale, is_causal=is_causal)
    wide = (t.float() for t in (query, key, value))
    return got, Reference().part(*wide, scale=scale, is_causal=is_causal)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(9, 3, 64), (4, 1, 256), (8, 8, 80), (6, 2, 48), (2, 2, 16), (16, 1, 96), (8, 2, 128)],
)
@pytest.mark.parametrize(
    ("queries", "keys", "is_causal"),
    [
        *((1, 1, True), (1, 513, False), (7, 70, False), (47, 64, False), (49, 1025, False)),
        *((48, 48, True), (511, 511, True), (513, 513, True), (1100, 1100, True)),
    ],
)
def test_it_is_attention(
    heads: int, kv_heads: int, dim: int, queries: int, keys: int, is_causal: bool
) -> None:
    """Sizes end below, at and above a tile, a panel and a block."""
    got, exact = both(heads, kv_heads, dim, queries, keys, is_causal)
    assert (got.out.dtype, got.lse.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(got.lse, exact.lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.out.float(), exact.out, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("size", [8.0, 30.0])
def test_sharp_attention_and_large_scores(size: float) -> None:
    """Scores of up to thousands, where one key has all of the weight."""
    got, exact = both(4, 2, 64, 100, 100, True, size)
    torch.testing.assert_close(got.lse, exact.lse, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(got.out.float(), exact.out, rtol=0.02, atol=0.02)


def test_a_query_has_the_same_bits_whatever_is_beside_it() -> None:
    """Where a chunk begins, and who else is read, must not change a token's row."""
    query, key, value = made(6, 150, 64, 1), made(2, 700, 64, 2), made(2, 700, 64, 3)
    kernel = NativeCpu()
    whole = kernel.part(query, key, value, scale=0.125, is_causal=False)
    for first, count in ((0, 1), (5, 6), (47, 2), (100, 50)):
        some = slice(first, first + count)
        alone = kernel.part(query[:, some], key, value, scale=0.125, is_causal=False)
        assert torch.equal(alone.out, whole.out[:, some])
        assert torch.equal(alone.lse, whole.lse[:, some])


def test_keys_beyond_the_last_are_not_read() -> None:
    """The last panel is padded: what lies behind the keys in memory must not count."""
    query, room = made(4, 20, 64, 1), made(2, 200, 64, 2)
    key, value = room[:, :70], room[:, 70:140]
    before = NativeCpu().part(query, key, value, scale=0.125, is_causal=False)
    room[:, 140:] = torch.nan
    kept = key.clone(), value.clone()
    after = NativeCpu().part(query, *kept, scale=0.125, is_causal=False)
    assert torch.equal(before.out, after.out)
    assert not before.out.isnan().any()


def test_numbers_that_are_none_are_not_hidden() -> None:
    query, key, value = made(2, 60, 64, 1), made(2, 60, 64, 2), made(2, 60, 64, 3)
    query[0, 7, 3] = torch.nan
    out = NativeCpu().part(query, key, value, scale=0.125, is_causal=True).out
    assert out[0, 7].isnan().all()
    assert not out[1].isnan().any()
    assert not out[0, :7].isnan().any()


def test_any_number_of_threads_gives_the_same() -> None:
    query, key, value = made(9, 300, 64, 1), made(3, 300, 64, 2), made(3, 300, 64, 3)
    threads, outs = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            outs.append(NativeCpu().part(query, key, value, scale=0.125, is_causal=True).out)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(out, outs[0]) for out in outs)
