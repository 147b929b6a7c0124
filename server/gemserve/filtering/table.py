"""The filter methods, by the name a request gives."""

from __future__ import annotations

from gemserve.errors import RequestError
from gemserve.filtering.blind import BlindSelector, Position, Uniform
from gemserve.filtering.gemfilter import GemFilter
from gemserve.filtering.selector import Selector
from gemserve.filtering.sieve import Sieve
from gemserve.filtering.snapkv import SnapKV
from gemserve.types import FilterMethod, FilterParams

# They choose after a pass through the lower layers,
SELECTORS: dict[FilterMethod, Selector] = {
    "gemfilter": GemFilter(),
    "sieve": Sieve(),
}
# these before any pass,
BLIND: dict[FilterMethod, BlindSelector] = {
    "position": Position(),
    "random": Uniform(),
}
# and these, layer by layer, once all layers have read everything.
EVICTORS: dict[FilterMethod, SnapKV] = {
    "snapkv": SnapKV(),
}
# Methods that can tell how much of a prompt is worth keeping.
ADAPTIVE: tuple[FilterMethod, ...] = ("none", "sieve")


def check_adaptive(params: FilterParams) -> None:
    """Raise `RequestError` if the method cannot choose how much it keeps, but is to."""
    if params.is_adaptive and params.method not in ADAPTIVE:
        field = 'keep="auto"' if params.keep == "auto" else "fallback=true"
        raise RequestError(
            f"filter.{field}: only method sieve has it, not {params.method}",
            param=f"filter.{field.split('=')[0]}",
        )
