"""The `filter` object of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict


class Protect(TypedDict, total=False):
    """What of a chat is instruction, and what is document, if the server should not tell by itself.

    `messages` are the numbers of messages that are read whole, `documents` those of messages that
    are documents, both from 0. What stands between the two texts of a pair of `marks` is read
    whole.
    """

    messages: Sequence[int]
    documents: Sequence[int]
    marks: Sequence[Sequence[str]]


class Filter(TypedDict, total=False):
    """How a prompt is filtered. The server fills in what is left out.

    `method` is one of the server's; it refuses other names, and says which it has. `keep` is the
    budget for documents: a number of tokens, a fraction of them in (0, 1), or "auto". `layer`
    counts from 0, and so do the [layer, head] pairs of `heads`. `window` is the most tokens of a
    window in which documents are read, "auto", or "off": the prompt is read as one sequence.
    `lexical` is "auto", or "off": passages do not rank by the question's words, too. `reader` is
    "self", or "reader": the server's other model looks at the prompt. `library` names libraries of
    which the best windows are read, `candidates` of them, and no more than can be read in
    `max_seconds`. With `citations` the reply says which files it is from. Instead of a `Filter`, a
    request may give the name of a method alone.

    ```python
    filter: Filter = {"method": "sieve", "keep": 0.1, "return_selection": True}
    ```
    """

    method: str
    keep: int | float | Literal["auto"]
    fallback: bool
    layer: int | Literal["auto"]
    heads: Sequence[Sequence[int]]
    window: int | Literal["auto", "off"]
    lexical: Literal["auto", "off"]
    reader: Literal["self", "reader"]
    pooling: Literal["mean", "max"]
    library: str | Sequence[str]
    candidates: int
    max_seconds: float
    citations: bool
    protect: Protect
    return_selection: bool
    return_scores: bool | Literal["exact", "heads"]
    return_attention: bool


FilterParam = Filter | str
