"""A library without a model: keys are drawn from the tokens, by a reader that counts them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from gemserve.contract.events import Finished
from gemserve.contract.filter_plan import KeysRead
from gemserve.contract.prompt_parts import TokenArray
from gemserve.contract.requests import Request
from gemserve_library.adding import Added, FileSource, add_files
from gemserve_library.identity import Identity
from gemserve_library.library import Library
from gemserve_library.vectors import VectorRequests

IDENTITY = Identity(
    model="fake",
    weights="0123456789abcdef",
    tokenizer="0123456789abcdef",
    layer=2,
    heads=((1, 0), (2, 1)),
    num_key_heads=2,
    head_dim=4,
    anchor=(1, 2),
    window=256,
)


class FakeRequests(VectorRequests):
    """Requests that are nothing but their tokens."""

    def for_keys(self, segments: Any) -> Any:
        return list(segments)


class FakeReader:
    """Reads segments: `num_tokens` so far. `fails_after`: so many requests."""

    def __init__(self, fails_after: int | None = None) -> None:
        self.num_tokens = self.num_requests = 0
        self._fails_after = fails_after

    def __call__(self, request: Any) -> Finished:
        if self._fails_after == self.num_requests:
            return Finished(reason="error", completion_tokens=0, error="the power failed")
        self.num_requests += 1
        self.num_tokens += sum(map(len, request))
        keys = KeysRead(segments=tuple(keys_of_tokens(tokens) for tokens in request))
        return Finished(reason="stop", completion_tokens=0, vectors=keys)


def keys_of_tokens(tokens: TokenArray) -> Any:
    """Keys [2, tokens, 4] that depend on each token alone."""
    angles = np.outer(tokens, np.arange(1, 9)).astype(np.float32)
    return np.sin(angles).reshape(len(tokens), 2, 4).transpose(1, 0, 2).copy()


def open_library(folder: Path) -> Library:
    """The library in a folder; a new one if there is none."""
    if not folder.exists():
        return Library.create(folder, IDENTITY)
    return Library(folder, IDENTITY)


def add(
    library: Library,
    tokenizer: Any,
    sources: Iterable[FileSource],
    run: Callable[[Request], Finished] | None = None,
) -> Added:
    requests = FakeRequests(planner=None, identity=IDENTITY)  # type: ignore[arg-type]
    *_, done = add_files(library, requests, tokenizer, run or FakeReader(), sources)
    return done


def text_source(path: str, text: str) -> FileSource:
    return FileSource(path, text.encode)


def paragraphs(count: int, word: str = "river") -> str:
    """A text of paragraphs that all differ."""
    return "\n\n".join(
        f"Paragraph {i} tells of the {word} and of the {i * i} houses beside it, and of nobody who "
        f"has counted them since the year {1000 + 7 * i}."
        for i in range(count)
    )
