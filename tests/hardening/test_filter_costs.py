"""What filtering costs on a whole server: operations are counted, because times vary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop

from gemserve.engine.core import Core
from tests.fakes import CHAT, COMPLETIONS, wait_for
from tests.served import KEEP, Served, prose

QUESTION = "What is the code for the lamb?"


@pytest.fixture(scope="module")
def core(builtin_core: Core, builtin: Served) -> Core:
    """What works behind the server."""
    return builtin_core


@contextmanager
def counted_flops(core: Core, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The floating-point operations of the engine's steps until the end of the context."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def flops_of(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_flop(query, key, value))

    counter = FlopCounterMode(display=False, custom_mapping={attention: flops_of})
    counts: list[float] = []
    original = core.step

    def step() -> Any:
        with counter:
            emitted = original()
        counts.append(float(counter.get_total_flops()))
        return emitted

    with monkeypatch.context() as patch:
        patch.setattr(core, "step", step)
        yield counts


@pytest.mark.slow
def test_the_advantage_grows_with_the_prompt(
    builtin: Served, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass that chooses grew faster than the prompt; counted in operations, not in time."""
    rng = Random(7)
    shares = []
    for length in (1024, 2048, 4096):
        costs = []
        for method in ("sieve", "none"):
            prompt = [rng.randrange(300, 4000) for _ in range(length)]
            options = "none" if method == "none" else {**KEEP, "keep": 256}
            with counted_flops(core, monkeypatch) as counts:
                builtin.ask(COMPLETIONS, prompt=prompt, max_tokens=1, filter=options)
            costs.append(sum(counts))
        shares.append(costs[0] / costs[1])
    assert all(longer < shorter for shorter, longer in pairwise(shares)), shares
    assert shares[-1] < 0.4  # 2 of 8 layers and half of a third run, and 256 tokens are read


def test_a_hit_in_the_cache_costs_less_than_a_miss(
    builtin: Served, core: Core, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hits were slower than reading the prompt again."""
    text = prose(tokenizer, 2000, seed=8)
    costs = []
    for question in (QUESTION, "What is the code for the ship?"):
        with counted_flops(core, monkeypatch) as counts:
            reply = builtin.ask("/v1/filter", prompt=f"{text}\n\n{question}", filter=KEEP)
        costs.append(sum(counts))
    assert reply["filter"]["cached_tokens"] > 1500
    assert costs[1] < 0.3 * costs[0]


def test_every_request_gives_its_memory_back(builtin: Served, core: Core, tokenizer: Any) -> None:
    """Keys and values of the filter pass were never freed."""
    text = prose(tokenizer, 700, seed=9)
    for index, method in enumerate(("sieve", "gemfilter", "snapkv", "none", "random")):
        messages = [{"role": "user", "content": f"{index} {text}"}]
        builtin.ask(CHAT, messages=messages, max_tokens=4, filter=method)
    connection = builtin.send(COMPLETIONS, prompt=" ".join([text] * 20), filter="sieve")
    wait_for(lambda: builtin.metrics()["kv_cache_usage_ratio"] > 0, 30)
    connection.close()
    wait_for(lambda: builtin.metrics()["kv_cache_usage_ratio"] == 0, 30)
    wait_for(lambda: builtin.serving.engine.num_running == 0, 30)
    core.check_integrity()
