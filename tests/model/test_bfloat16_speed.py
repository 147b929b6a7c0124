"""`--dtype auto` on a CPU: bfloat16's instructions do not tell whether they are faster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gemserve.config import ModelConfig
from gemserve.model.cpu import bfloat16_speed
from gemserve.model.loading import loader
from tests import models


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    bfloat16_speed.is_bfloat16_faster.cache_clear()
    yield
    bfloat16_speed.is_bfloat16_faster.cache_clear()


@pytest.mark.parametrize(
    ("has_amx", "has_instructions", "gain", "expected"),
    [
        (True, True, None, True),
        (False, False, None, False),
        (False, True, 4.6, True),
        (False, True, 0.6, False),
        (False, True, 1.2, False),  # elementwise operations would take it back
    ],
)
def test_what_is_known_is_not_measured(
    has_amx: bool,
    has_instructions: bool,
    gain: float | None,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[float] = []

    def measure() -> float:
        assert gain is not None
        measured.append(gain)
        return gain

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_instructions)
    monkeypatch.setattr(bfloat16_speed, "_measured_gain", measure)
    answers = {bfloat16_speed.is_bfloat16_faster() for _ in range(3)}
    assert answers == {expected}
    assert measured == ([] if gain is None else [gain]), "measured once in a process"


def test_both_types_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gain is of float32 over bfloat16, by the fastest round of each."""
    clock = iter([0.0, 9.0, 9.0, 14.0, 20.0, 26.0, 26.0, 29.0])  # 9 and 5 s, then 6 and 3
    monkeypatch.setattr(bfloat16_speed, "_ROUNDS", 2)
    monkeypatch.setattr(bfloat16_speed.time, "perf_counter", lambda: next(clock))
    assert bfloat16_speed._measured_gain() == 2.0


def test_ranks_get_the_name_of_what_auto_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank would measure for itself, and two could come to different types."""
    saved = models.config("llama")
    saved.dtype = torch.bfloat16
    saved.save_pretrained(tmp_path)
    config = ModelConfig(model=str(tmp_path), device="cpu")
    for is_faster, expected in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(loader, "is_bfloat16_faster", lambda answer=is_faster: answer)
        assert loader.with_dtype(config).dtype == expected
