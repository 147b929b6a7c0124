"""The `filter` object of a request."""

from __future__ import annotations

from typing import Literal, TypedDict

FilterMethod = Literal["none", "gemfilter", "sieve", "snapkv", "position", "random"]


class Filter(TypedDict, total=False):
    """How a prompt is filtered; what is left out is up to the server.

    `keep`: tokens, or a fraction of the prompt in (0, 1), or "auto". `layer`: 0-based.
    """

    method: FilterMethod
    keep: int | float | Literal["auto"]
    fallback: bool
    layer: int | Literal["auto"]
    pooling: Literal["mean", "max"]
    return_selection: bool


FilterParam = Filter | FilterMethod
