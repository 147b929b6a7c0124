"""Servers and a document for other projects' clients, and the table of what each of them can do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients import servers
from tests.clients.capability_table import CapabilityTable
from tests.clients.environments import Workers
from tests.fakes import FakeCore


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-table",
        action="store_true",
        help="write what each client can do into docs/clients.md",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--write-table"):
        config.pluginmanager.register(CapabilityTable())


@pytest.fixture
def url(core: FakeCore, tokenizer: Any) -> Iterator[str]:
    with servers.scripted(core, tokenizer, context_tokens=2000) as address:
        yield address


@pytest.fixture(scope="session")
def builtin_url() -> Iterator[str]:
    with servers.builtin() as address:
        yield address


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "notes.txt").write_text(servers.DOCUMENT, encoding="utf-8")
    return tmp_path


@pytest.fixture(scope="session")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    started = Workers(tmp_path_factory.mktemp("workers"))
    yield started
    started.close()
