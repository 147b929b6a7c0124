"""The `filter` object of a request, and the one of a reply."""

from __future__ import annotations

from typing import Literal, TypedDict

from openai import BaseModel

FilterMethod = Literal["none", "gemfilter", "sieve", "snapkv", "position", "random"]
FilterReason = Literal["short_prompt", "disabled", "diffuse_attention", "widened"]


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


class FilterReport(BaseModel):
    """What the filter did.

    `selection`: the kept tokens as half-open ranges, if they were asked for. `coverage`: the share
    of attention that they get, where the method tells.
    """

    method: FilterMethod
    applied: bool
    reason: FilterReason | None = None
    layer: int | None = None
    prompt_tokens: int
    kept_tokens: int
    cached_tokens: int
    filter_ms: float
    selection: list[list[int]] | None = None
    coverage: float | None = None
