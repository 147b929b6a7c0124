"""Request body of /v1/adapters."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gemserve.api.requests.base_bodies import AdapterName, Body


class AdapterBody(Body):
    """A folder to load, `path`, relative to the server's adapter folder."""

    name: AdapterName
    path: Annotated[str, Field(min_length=1, max_length=4096)]
