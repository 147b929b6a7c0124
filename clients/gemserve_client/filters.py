"""The `filter` object of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict


class Filter(TypedDict, total=False):
    """How a prompt is filtered. The server fills in what is left out.

    `method` is one of the server's; it refuses other names, and says which it has. `keep` is a
    number of tokens, a fraction of the prompt in (0, 1), or "auto". `layer` counts from 0, and
    so do the [layer, head] pairs of `heads`. Instead of a `Filter`, a request may give the name of
    a method alone.

    ```python
    filter: Filter = {"method": "sieve", "keep": 0.1, "return_selection": True}
    ```
    """

    method: str
    keep: int | float | Literal["auto"]
    fallback: bool
    layer: int | Literal["auto"]
    heads: Sequence[Sequence[int]]
    pooling: Literal["mean", "max"]
    return_selection: bool
    return_scores: bool | Literal["exact", "heads"]
    return_attention: bool


FilterParam = Filter | str
