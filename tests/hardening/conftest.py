"""The built-in model behind a whole server, for the failures that other servers had."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gemserve.api.serving import build_serving
from gemserve.config import EngineConfig, ModelConfig, ServerConfig
from gemserve.engine.build import build_core
from gemserve.engine.core import Core
from tests.compiled_step import compiled_step
from tests.loop_stalls import no_stalls
from tests.served import Served, served

MODEL = "builtin"


@pytest.fixture(scope="module", autouse=True)
def step_is_compiled(use_compiled_step: None) -> None:
    """As users meet it."""


@pytest.fixture(autouse=True)
def event_loops_are_free() -> Iterator[list[str]]:
    """No test here may find that an event loop works for 100 ms in one go."""
    with no_stalls() as found:
        yield found


@pytest.fixture(scope="session")
def builtin_core() -> Core:
    """The built-in model. One server at a time may use it."""
    config = EngineConfig(kv_memory_bytes=128 << 20, filter_min_tokens=256, filter_keep=256)
    with compiled_step():
        return build_core(ModelConfig(device="cpu", dtype="float32"), config)


@pytest.fixture(scope="module")
def builtin(builtin_core: Core) -> Iterator[Served]:
    """A server without keys."""
    serving = build_serving(builtin_core, model_name=MODEL, config=ServerConfig())
    with served(serving) as server:
        yield server
