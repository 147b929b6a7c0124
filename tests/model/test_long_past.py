"""A chunk's attention over a long past, which is read in pieces."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch

from gemserve.model.families.reach import ALL
from gemserve.model.passes import attention
from gemserve.model.passes.attention import ChunkRows, ForwardContext
from gemserve.model.passes.kv import Memory
from gemserve_kernels import Partial, select_backend
from gemserve_kernels.attention import reference_attention
from tests.fakes import SHAPE

PAST, ROWS, PIECE = 2600, 8, 64


@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-3)], ids=["float32", "bfloat16"]
)
def test_few_parts_of_a_long_past_are_held_at_once(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, atol: float
) -> None:
    """There was one for each piece until the layer ended: 64 outputs for 128K tokens."""
    monkeypatch.setattr(attention, "_FEWEST_KEYS", PIECE)
    shape = replace(SHAPE, num_heads=4, num_kv_heads=2, head_dim=16)
    size, kv_size = (4, ROWS, 16), (2, PAST + ROWS, 16)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(size, generator=generator).to(dtype)
    key, value = (torch.randn(kv_size, generator=generator).to(dtype) for _ in range(2))
    layers = shape.num_kv_layers
    memory = Memory(2 * layers * (PAST + ROWS), shape, dtype, torch.device("cpu"))
    kv = memory.kv(0, num_layers=layers, capacity=PAST + ROWS)
    kv.write(0, 0, key[:, :PAST], value[:, :PAST])
    plain, outs, most = select_backend(torch.device("cpu")), [], 0

    def part(*tensors: torch.Tensor, **options: Any) -> Partial:
        nonlocal most
        made = plain.part(*tensors, **options)
        outs.append(ref(made.out))
        most = max(most, sum(out() is not None for out in outs))
        return made

    backend: Any = SimpleNamespace(part=part)
    context = ForwardContext(
        rows=ChunkRows(kv=kv, start=PAST), backend=backend, reaches=[ALL], piece=1
    )
    found, _ = attention.attention(
        SimpleNamespace(layer_idx=0),
        query[None],
        key[None, :, PAST:],
        value[None, :, PAST:],
        None,
        context=context,
    )
    assert len(outs) == 1 + -(-PAST // PIECE)
    assert most == 4
    mask = torch.ones(PAST + ROWS, PAST + ROWS, dtype=torch.bool).tril()[-ROWS:]
    wide = (tensor.float() for tensor in (query, key, value))
    expected = reference_attention(*wide, scale=16**-0.5, mask=mask).out.transpose(0, 1)
    assert found.dtype == dtype
    torch.testing.assert_close(found[0].float(), expected, atol=atol, rtol=0)
