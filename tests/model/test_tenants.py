"""What the engine's whole core does with the keys of requests; its parts are tested without it."""

from __future__ import annotations

import pytest

from gemserve.config import EngineConfig
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.core import Core
from gemserve.model.passes.causal_model import CausalModel
from tests import models
from tests.cores import core_over
from tests.model.test_selection import NoText


def core_with_slots(count: int) -> Core:
    settings = EngineConfig(filter_method="none", max_running=count, kv_memory_bytes=16 << 20)
    return core_over(CausalModel(models.build("llama")), NoText(), settings, frozenset())


def request(tenant: bytes) -> Request:
    return Request(
        request_id="r",
        prompt_ids=[5, 6, 7],
        sampling=SamplingParams(max_tokens=50, temperature=0, ignore_eos=True),
        filter=FilterParams(method="none", keep=64),
        tenant=tenant,
    )


@pytest.mark.parametrize(("tenant", "running"), [(b"", 8), (b"key", 6)])
def test_only_a_key_leaves_slots_to_others(tenant: bytes, running: int) -> None:
    """The core gave requests without a key a name, too, and a quarter of the slots stayed empty."""
    core = core_with_slots(8)
    jobs = [core.add(request(tenant)) for _ in range(10)]
    core.step()
    assert core.num_running == running
    for job in jobs:
        core.cancel(job)
    core.close()


def test_who_waits_is_counted_by_the_names_that_requests_came_with() -> None:
    """They were counted by the cache's names, so that no key ever seemed to fill the queue."""
    core = core_with_slots(1)
    jobs = [core.add(request(tenant)) for tenant in (b"a", b"a", b"b")]
    core.step()
    assert core.waiting_of == {b"a": 1, b"b": 1}
    for job in jobs:
        core.cancel(job)
    assert not core.waiting_of
    core.close()
