"""The core's endpoints and those of the other protocols in one server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.api.test_openapi import GOOD as OF_THE_CORE
from tests.dialects.test_openapi_of_protocols import GOOD as OF_OTHER_PROTOCOLS
from tests.openapi_checks import check_keys

pytestmark = pytest.mark.anyio


async def test_a_key_has_one_quota_for_all_protocols(tokenizer: Any, tmp_path: Path) -> None:
    await check_keys(tokenizer, tmp_path, {**OF_THE_CORE, **OF_OTHER_PROTOCOLS})
