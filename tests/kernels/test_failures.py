"""Memory that compiled code cannot have is an exception of Python, and not the process's end."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from gemserve.model.cpu.cpu_step import with_cpu_step
from gemserve_kernels import blocks, cpu_step, native_library, reading
from gemserve_kernels.attention_backends import NativeCpu
from gemserve_kernels.blocks import FORMATS, Blocks, BlockWeight
from tests.compiled_step import compiled_step, needs_compiler
from tests.kernels.test_blocks import draw
from tests.model.test_cpu_step_adapters import make
from tests.model.test_cpu_step_models import build
from tests.step_prompts import Prompts

pytestmark = needs_compiler
HEADER = Path(__file__).parent / "failing_new.h"


@pytest.fixture(autouse=True)
def _compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """GCC with `failing_new.h`, and without optimisation, which would take most of the time."""
    monkeypatch.setenv(
        "CXX", f"""sh -c 'exec g++ "$@" -O0 -Wl,-Bsymbolic -include "{HEADER}"' g++"""
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    with compiled_step():
        yield
    torch.set_num_threads(threads)


@contextmanager
def failing(source: Path, first: int, count: int) -> Iterator[None]:
    library = native_library.open_library(source)
    library.fail_allocations(first, count)
    try:
        yield
    finally:
        library.fail_allocations(0, 0)


def first_that_succeeds(
    source: Path, count: int, call: Callable[[], torch.Tensor]
) -> tuple[int, torch.Tensor]:
    """How many calls fail, each by `count` allocations, one later than before; and the result."""
    for first in itertools.count():
        with suppress(MemoryError), failing(source, first, count):
            return first, call()
    raise AssertionError


def check(source: Path, least: int, call: Callable[[], torch.Tensor]) -> None:
    """Each allocation of a call fails alone, and with all that follow: in one thread, and in all.

    `least`: the number of allocations, at the least.
    """
    expected = call()
    for count in (1, 1 << 30):
        failed, found = first_that_succeeds(source, count, call)
        assert failed >= least
        assert torch.equal(found, expected)
        assert torch.equal(call(), expected)


def some_blocks(outs: int = 48, ins: int = 64) -> Blocks:
    return Blocks(FORMATS[4], draw(FORMATS[4], outs, ins), outs, ins)


def test_products_and_rows_in_blocks() -> None:
    made = some_blocks()
    x, ids = torch.randn(3, 64), torch.tensor([1, 40])
    check(blocks.SOURCE, 4, lambda: made.products(x, None))
    check(blocks.SOURCE, 1, lambda: made.rows(ids, torch.float32))
    check(blocks.SOURCE, 0, lambda: made.numbers(torch.float32))


def test_attention_of_prompts() -> None:
    obstacle = NativeCpu().find_obstacle(torch.device("cpu"), torch.bfloat16, 64)
    if obstacle is not None:
        pytest.skip(obstacle)
    native, query = reading.open_reading(), torch.randn(2, 9, 64).bfloat16()
    check(reading.SOURCE, 2, lambda: native.part(query, query, query, scale=1, is_causal=True).out)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt_oss"])
def test_a_step(family: str, tmp_path: Path) -> None:
    """With an adapter, norms of heads, experts and windows, and weights in blocks."""
    model = build(family)
    weight = BlockWeight(some_blocks(*model.hf.lm_head.weight.shape), torch.float32)
    model.hf.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    stepping = with_cpu_step(model, "on")
    adapter = make(tmp_path, "ntk", stepping)
    prompts = Prompts(model, [3, 40], [adapter] * 2)
    check(cpu_step.SOURCE, 20, lambda: prompts.decode(stepping))


def test_what_else_is_thrown_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"gemserve_block_products: vector::"):
        some_blocks()._call("block_products", None, -1, None, 0, None, 1)
