"""Attention parts and their merge against plain attention over everything at once."""

from __future__ import annotations

import pytest
import torch

from gemserve_kernels import Partial, join, merge
from gemserve_kernels.attention import reference_attention
from gemserve_kernels.attention_backends import AtenCpu, Attention, Reference

CPU = AtenCpu()
SHAPES = [(1, 1, 16), (4, 4, 32), (8, 2, 64), (8, 1, 80), (6, 3, 128)]


def qkv(
    heads: int, kv_heads: int, head_dim: int, queries: int, keys: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(heads * 1000 + keys)
    shapes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    q, k, v = (torch.randn(*s, head_dim, generator=generator).to(dtype) for s in shapes)
    return q, k, v


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys", [1, 2, 63, 257])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_cpu_part_equals_reference(
    heads: int, kv_heads: int, head_dim: int, keys: int, is_causal: bool, dtype: torch.dtype
) -> None:
    queries = keys if is_causal else 5
    q, k, v = qkv(heads, kv_heads, head_dim, queries, keys, dtype)
    ours = CPU.part(q, k, v, scale=0.2, is_causal=is_causal)
    theirs = Reference().part(q, k, v, scale=0.2, is_causal=is_causal)
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    assert ours.out.shape == theirs.out.shape == q.shape
    assert ours.lse.dtype == torch.float32
    torch.testing.assert_close(ours.out, theirs.out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(ours.lse, theirs.lse, atol=tolerance * 5, rtol=tolerance)


@pytest.mark.parametrize("cut", [1, 40, 96])
def test_past_and_chunk_merge_to_causal_attention(cut: int) -> None:
    q, k, v = qkv(8, 2, 32, 97, 97, torch.float32)
    whole = CPU.part(q, k, v, scale=0.3, is_causal=True).out[:, cut:]
    past = CPU.part(q[:, cut:], k[:, :cut], v[:, :cut], scale=0.3, is_causal=False)
    chunk = CPU.part(q[:, cut:], k[:, cut:], v[:, cut:], scale=0.3, is_causal=True)
    torch.testing.assert_close(merge([past, chunk]), whole, atol=2e-6, rtol=1e-5)
    joined, alone = join([past, chunk]), CPU.part(q, k, v, scale=0.3, is_causal=True)
    torch.testing.assert_close(joined.out, whole, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(joined.lse, alone.lse[:, cut:])


@pytest.mark.parametrize("kernel", [CPU, Reference()])
def test_several_sequences_are_each_alone(kernel: Attention) -> None:
    queries, keys = (5, 1, 33), (5, 40, 64)
    q, k, v = qkv(8, 2, 32, sum(queries), sum(keys), torch.float32)
    found = kernel.several(q, k, v, queries, keys, scale=0.3)
    first_q = first_k = 0
    for num_queries, num_keys in zip(queries, keys, strict=True):
        rows, seen = slice(first_q, first_q + num_queries), slice(first_k, first_k + num_keys)
        mask = torch.ones(num_keys, num_keys, dtype=torch.bool).tril()[-num_queries:]
        alone = reference_attention(q[:, rows], k[:, seen], v[:, seen], scale=0.3, mask=mask)
        torch.testing.assert_close(found.out[:, rows], alone.out, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(found.lse[:, rows], alone.lse)
        first_q, first_k = rows.stop, seen.stop


def test_merge_survives_scores_that_overflow_exp() -> None:
    """exp(ℓ) of a single part overflows float32 above 88; only differences may be exponentiated."""
    out = torch.tensor([[[1.0]]]), torch.tensor([[[3.0]]])
    for shift in (-300.0, 0.0, 300.0):
        parts = [Partial(o, torch.tensor([[shift]])) for o in out]
        assert merge(parts).item() == pytest.approx(2.0)
    far = [Partial(out[0], torch.tensor([[300.0]])), Partial(out[1], torch.tensor([[-300.0]]))]
    assert merge(far).item() == pytest.approx(1.0)


def test_no_keys_is_an_assertion_not_a_crash() -> None:
    """torch's kernel divides by the number of keys and kills the process."""
    q, k, v = qkv(2, 2, 16, 3, 0, torch.float32)
    with pytest.raises(AssertionError):
        CPU.part(q, k, v, scale=1.0, is_causal=False)
    with pytest.raises(AssertionError, match="no keys"):
        merge([])


def test_softcap_and_mask_of_the_reference() -> None:
    q, k, v = qkv(2, 1, 8, 4, 6, torch.float32)
    mask = torch.ones(4, 6, dtype=torch.bool).tril(2)
    scores = 5.0 * torch.tanh(torch.einsum("hqd,kd->hqk", q, k[0]) * 0.7 / 5.0)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    part = reference_attention(q, k, v, scale=0.7, mask=mask, softcap=5.0)
    torch.testing.assert_close(part.out, weights @ v[0])
