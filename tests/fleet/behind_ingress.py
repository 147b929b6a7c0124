"""Runs other tests of the API behind an ingress with one replica.

    python -m pytest -p tests.fleet.behind_ingress tests/api

What they ask goes through the relay, and what they expect must be the same. Only metrics have a
label more.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests import fakes
from tests.fakes import Api, FakeCore
from tests.fleet.in_process import fleet_of


@asynccontextmanager
async def api_over(core: FakeCore, tokenizer: Any, **settings: Any) -> AsyncIterator[Api]:
    async with fleet_of(tokenizer, core, **settings) as fleet:
        yield Api(core, fleet["r0"].serving, fleet.client)


def parse_metrics(text: str) -> dict[str, float]:
    """`name{labels}` to value, without the label `replica`."""
    lines = re.sub(r'\{replica="\w+"\}|,replica="\w+"', "", text)
    return _parse_metrics(lines)


_parse_metrics = fakes.parse_metrics
fakes.api_over = api_over  # type: ignore[assignment]
fakes.parse_metrics = parse_metrics
