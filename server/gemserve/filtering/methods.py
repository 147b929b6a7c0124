"""The filter methods by the names that requests use, in one table."""

from __future__ import annotations

from dataclasses import dataclass

from gemserve.filtering.controls import BlindSelector, Position, Uniform
from gemserve.filtering.gemfilter import GemFilter
from gemserve.filtering.selector import Selector
from gemserve.filtering.sieve import Sieve
from gemserve.filtering.snapkv import SnapKV
from gemserve.filtering.window_votes import WindowVotes
from gemserve.types import FilterMethod


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How a method chooses, and which options it takes besides `keep`.

    At most one of the first three is set: `selector` chooses after a pass through the lower layers,
    `blind` before any pass, `evictor` drops keys and values once all layers have read everything.
    `is_adaptive`: the method can tell how much of a prompt is worth keeping (`keep: "auto"`,
    `fallback`).
    """

    selector: Selector | None = None
    blind: BlindSelector | None = None
    evictor: SnapKV | None = None
    is_adaptive: bool = False
    has_pooling: bool = False


METHODS: dict[FilterMethod, Method] = {
    "none": Method(),
    "sieve": Method(selector=Sieve(), is_adaptive=True),
    "gemfilter": Method(selector=GemFilter(), has_pooling=True),
    "snapkv": Method(evictor=SnapKV()),
    "position": Method(blind=Position()),
    "random": Method(blind=Uniform()),
    # only evaluations can name these, for comparison
    "fastkv": Method(selector=WindowVotes(num_layers=1)),
    "claa": Method(selector=WindowVotes(num_layers=4)),
}


def selector_of(method: FilterMethod) -> Selector:
    """The selector of a method that has one."""
    selector = METHODS[method].selector
    assert selector is not None, method
    return selector
