"""The methods that an evaluation compares: those of requests, and some of its own.

`NAME:auto` and `NAME:fallback` are an adaptive method with those options, and `NAME:attention` is
one that does not rank by the question's words. `oracle` keeps the tokens that hold the answer.
`bm25` is what a user without a filter would do: rank passages by their words and keep as many as
fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gemserve.calibration.search.example import Example
from gemserve.config import find_segment_size
from gemserve.contract.filter_options import FilterParams, Keep, SegmentSize
from gemserve.engine.core import Core
from gemserve.filtering.methods import METHODS
from gemserve.filtering.protected_budget import reserve
from gemserve.filtering.snapkv import SnapKV

PASSAGE_TOKENS = 64


def oracle(tokenizer: Any, example: Example, keep: int) -> tuple[int, ...]:
    """The answer's tokens and the protected ones; everything, if nothing can be left out."""
    if not example.gold:
        return tuple(range(len(example.prompt.ids)))
    gold = [p for start, stop in example.gold for p in range(start, stop)]
    return filled(example, gold, keep)


def bm25(tokenizer: Any, example: Example, keep: int) -> tuple[int, ...]:
    """Passages of `PASSAGE_TOKENS` tokens; the best matches of the question's words come first."""
    import bm25s

    ids = list(example.prompt.ids)
    starts = range(0, len(ids), PASSAGE_TOKENS)
    texts = [tokenizer.decode(ids[s : s + PASSAGE_TOKENS]) for s in starts]
    words = bm25s.tokenize([*texts, example.question], show_progress=False, return_ids=False)
    ranked = list(range(len(texts)))
    if words[-1] and any(words[:-1]):  # bm25s fails on a question of stop words alone
        index = bm25s.BM25()
        index.index(words[:-1], show_progress=False)
        scores = index.get_scores(words[-1])
        ranked.sort(key=lambda i: -scores[i])
    wanted = [
        position
        for passage in ranked
        for position in range(starts[passage], min(len(ids), starts[passage] + PASSAGE_TOKENS))
    ]
    return filled(example, wanted, keep)


def filled(example: Example, wanted: Iterable[int], keep: int) -> tuple[int, ...]:
    """The protected positions and as many of those `wanted`, in their order, as `keep` allows."""
    num_tokens = len(example.prompt.ids)
    reserved = reserve(example.prompt.protected, num_tokens, keep)
    chosen = dict.fromkeys(reserved.positions)
    for position in wanted:
        if len(chosen) == len(reserved.firm) + keep:
            break
        chosen.setdefault(position)
    return tuple(sorted(chosen))


# Methods that choose positions outside of the engine.
CHOSEN_OUTSIDE: dict[str, Callable[[Any, Example, int], tuple[int, ...]]] = {
    "oracle": oracle,
    "bm25": bm25,
}
ADAPTIVE = tuple(
    f"{name}:{option}"
    for name, method in METHODS.items()
    if method.is_adaptive
    for option in ("auto", "fallback")
)
WORDLESS = tuple(f"{name}:attention" for name, method in METHODS.items() if method.has_words)
METHODS_COMPARED: tuple[str, ...] = (*METHODS, *ADAPTIVE, *WORDLESS, *CHOSEN_OUTSIDE)


def constants_of(name: str) -> str:
    """The constants of a method, which requests cannot set."""
    return repr(METHODS.get(name.partition(":")[0]))


def evictor_of(name: str) -> SnapKV | None:
    """What drops keys and values under this method, if it reads the whole prompt first."""
    method = METHODS.get(name)
    return None if method is None else method.evictor


def keep_of(name: str, keep: Keep) -> Keep:
    """The `keep` of a method that is compared at the budget `keep`."""
    return "auto" if name.endswith(":auto") else keep


def longest_prompt(core: Core, methods: Sequence[str]) -> int:
    """The most tokens of a prompt that all of these methods can read.

    Only in segments can a prompt be longer than the context.
    """
    config = core.config
    entries = [METHODS.get(name.partition(":")[0]) for name in methods]
    are_segments = all(entry is not None and entry.reads_segments for entry in entries)
    if are_segments and find_segment_size(config.filter_window, core.calibration) is not None:
        return config.max_prompt_tokens
    return config.max_pass_tokens


def params_of(name: str, keep: int | float, segment_size: SegmentSize = "auto") -> FilterParams:
    """The filter parameters of a method that is not in `CHOSEN_OUTSIDE`.

    `segment_size`: for methods that read segments.
    """
    method, _, option = name.partition(":")
    has_words = METHODS[method].has_words and option != "attention"
    return FilterParams(
        method=method,
        keep=keep_of(name, keep),
        fallback=option in ("auto", "fallback"),
        window=segment_size,
        lexical="auto" if has_words else "off",
        return_selection=True,
    )
