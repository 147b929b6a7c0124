"""The filter methods, by the name a request gives."""

from __future__ import annotations

from gemserve.filtering.gemfilter import GemFilter
from gemserve.filtering.selector import Selector
from gemserve.filtering.sieve import Sieve
from gemserve.types import FilterMethod

SELECTORS: dict[FilterMethod, Selector] = {
    "gemfilter": GemFilter(),
    "sieve": Sieve(),
}
