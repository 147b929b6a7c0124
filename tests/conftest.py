"""Fixtures for every test. Nothing here reaches beyond this machine."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
# Of each process, and read when torch is imported. `make test` has several processes already, and
# threads that wait for each other's tiny tensors cost more than the work.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# `use_compiled_step` lets some tests find the compiler. `CXX=g++ make test`: all of them.
os.environ.setdefault("CXX", "no-compiler")

import torch

if not torch.cuda.is_available():
    # Triton's kernels run in its interpreter then: it asks once, when it is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests import fakes
from tests.compiled_step import compiled_step, share_compiled


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """A test that runs `gemserve serve` here would have the next ones' logs printed, too."""
    loggers = [logging.getLogger(name) for name in ("gemserve", "gemserve.loading")]
    before = [(log.handlers[:], log.level, log.propagate) for log in loggers]
    yield
    for log, (handlers, level, propagate) in zip(loggers, before, strict=True):
        log.handlers[:], log.propagate = handlers, propagate
        log.setLevel(level)


@pytest.fixture(autouse=True)
def compiler_as_before() -> Iterator[None]:
    """Two fixtures that set CXX, one within the other, may end in the order in which they began."""
    before = os.environ["CXX"]
    yield
    os.environ["CXX"] = before


@pytest.fixture(scope="session", autouse=True)
def user_cache(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Calibrations that the machine's user has made are not read, and none are left behind."""
    cache, folder = tmp_path_factory.mktemp("cache"), tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        folder = folder.parent  # of all processes that `pytest -n` starts
    share_compiled(cache, folder / "compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        yield


@pytest.fixture(scope="module")
def use_compiled_step() -> Iterator[None]:
    """The module's engines use the compiled decode step, if there is a compiler."""
    with compiled_step():
        yield


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The built-in model's tokenizer; shared, so change a copy."""
    from transformers import AutoTokenizer

    from gemserve.model.loading.loader import BUILTIN_PATH

    return AutoTokenizer.from_pretrained(BUILTIN_PATH)


@pytest.fixture
def core() -> fakes.FakeCore:
    return fakes.FakeCore()


@pytest.fixture
async def api(core: fakes.FakeCore, tokenizer: Any) -> AsyncIterator[fakes.Api]:
    """A fresh application over `core`, in process."""
    async with fakes.api_over(core, tokenizer) as opened:
        yield opened


def pytest_collection_finish() -> None:
    """What is imported stays: looking at it again in each garbage collection would take a while."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a CUDA device, tests marked `gpu` are skipped."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
