"""The filter methods, by the name a request gives."""

from __future__ import annotations

from gemserve.filtering.blind import BlindSelector, Position, Uniform
from gemserve.filtering.gemfilter import GemFilter
from gemserve.filtering.selector import Selector
from gemserve.filtering.sieve import Sieve
from gemserve.filtering.snapkv import SnapKV
from gemserve.types import FilterMethod

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
