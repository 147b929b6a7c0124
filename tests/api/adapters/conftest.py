"""A server over a folder of two adapters."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gemserve.adapters.adapter_store import AdapterStore
from gemserve.model.passes.causal_model import CausalModel
from tests import adapters, models
from tests.api.adapters.adapter_requests import (
    MIB,
    SELECTION,
)
from tests.fakes import (
    CHAT,
    COMPLETIONS,
    Api,
    FakeCore,
    api_over,
)


@pytest.fixture(scope="module")
def model() -> CausalModel:
    return CausalModel(models.build("llama"))


@pytest.fixture
def root(tmp_path: Path, model: CausalModel) -> Path:
    folder = tmp_path / "root"
    adapters.write(folder / "good", "prefix", model)
    adapters.write(folder / "ntk", "ntk", model)
    return folder


@pytest.fixture
async def served(tokenizer: Any, model: CausalModel, root: Path) -> AsyncIterator[Api]:
    store = AdapterStore(model, root, MIB)
    async with api_over(
        FakeCore(), tokenizer, adapters=store, adapter_dir=str(root), keep_alive_s=0.05
    ) as api:
        yield api


@pytest.fixture(params=[COMPLETIONS, CHAT, SELECTION])
def path(request: pytest.FixtureRequest) -> str:
    """Where a request goes. `tests/dialects/adapters` has another endpoint, for the same tests."""
    return str(request.param)
