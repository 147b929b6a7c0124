"""Memory that moves down by any number of units is as it was, and takes no longer for few."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from gemserve.model.passes import kv
from gemserve.model.passes.kv import Memory
from tests.fakes import SHAPE

SMALL = replace(SHAPE, num_kv_heads=1, head_dim=2)
UNIT_BYTES = 2 * 4


def memory_of(num_units: int) -> Memory:
    """Every number in it is another one."""
    memory = Memory(num_units, SMALL, torch.float32, torch.device("cpu"))
    memory.rows.copy_(torch.arange(2.0 * num_units).view(-1, 2))
    return memory


@pytest.mark.parametrize("apart", [1, 99, 100, 101, 250, 900, 1500])
def test_what_moves_is_as_it_was(apart: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv, "_PIECE_BYTES", 100 * UNIT_BYTES)
    memory = memory_of(3000)
    before = memory.rows.clone()
    memory.move(20 + apart, 20, 950)
    expected = torch.cat([before[:20], before[20 + apart : 970 + apart], before[970:]])
    assert torch.equal(memory.rows, expected)


def test_a_move_by_one_unit_takes_no_longer() -> None:
    """It was copied unit by unit: where memory was moved together over a tiny gap, seconds."""
    memory = memory_of(500_000)
    expected = memory.rows[1:].clone()
    began_s = time.process_time()
    memory.move(1, 0, 499_999)
    assert time.process_time() - began_s < 0.5
    assert torch.equal(memory.rows[:-1], expected)
