"""The server over a folder of adapters, and the endpoint that the tests here ask."""

from __future__ import annotations

import pytest

from tests.api.adapters.adapter_requests import RESPONSES
from tests.api.adapters.conftest import model, root, served

__all__ = ["model", "path", "root", "served"]


@pytest.fixture
def path() -> str:
    return RESPONSES
