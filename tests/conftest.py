"""Fixtures for every test. Nothing here reaches beyond this machine."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
# Only the tests of compiled code compile it: `CXX=g++ make test` uses it in all tests.
os.environ.setdefault("CXX", "no-compiler")
if not torch.cuda.is_available():
    # Triton's kernels run in its interpreter then: it asks once, when it is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests import fakes


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def user_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Calibrations that the machine's user has made are not read, and none are left behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The built-in model's tokenizer; shared, so change a copy."""
    from transformers import AutoTokenizer

    from gemserve.model.loader import BUILTIN_PATH

    return AutoTokenizer.from_pretrained(BUILTIN_PATH)


@pytest.fixture
def core() -> fakes.FakeCore:
    return fakes.FakeCore()


@pytest.fixture
async def api(core: fakes.FakeCore, tokenizer: Any) -> AsyncIterator[fakes.Api]:
    """A fresh application over `core`, in process."""
    async with fakes.api_over(core, tokenizer) as opened:
        yield opened


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a CUDA device, tests marked `gpu` are skipped."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
