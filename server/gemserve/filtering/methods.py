"""The filter methods by the names that requests use, in one table.

Everything else follows from it: the names that the API, the command line and the OpenAPI document
list, which options a method takes, what it costs, and the messages about options that it lacks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gemserve.contract.filter_options import FilterMethod
from gemserve.errors import RequestError, shown
from gemserve.filtering.controls import BlindSelector, Position, Uniform
from gemserve.filtering.gemfilter import GemFilter
from gemserve.filtering.last_row_votes import LastRowVotes
from gemserve.filtering.selector import Selector
from gemserve.filtering.sieve import Sieve
from gemserve.filtering.snapkv import SnapKV


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How a method chooses, and which options it takes besides `keep`.

    At most one of the first three is set: `selector` chooses after a pass through the lower layers,
    `blind` before any pass, `evictor` drops keys and values once all layers have read everything.
    `protects`: it keeps what is always read, outside of the budget; the published methods do not.
    `is_adaptive`: the method can tell how much of a prompt is worth keeping (`keep: "auto"`,
    `fallback`). `has_pooling`: it takes `pooling`. `has_heads`: its selector scores by calibrated
    heads, which the option `heads` replaces. `repeats_question`: it watches the question's rows, so
    the filter pass reads a question in front of its document once more after the prompt.
    `has_words`: it ranks by the question's words, too, unless `lexical` says otherwise.
    `is_served`: requests may name it; others are for evaluations alone.
    """

    selector: Selector | None = None
    blind: BlindSelector | None = None
    evictor: SnapKV | None = None
    is_adaptive: bool = False
    has_pooling: bool = False
    protects: bool = False
    # these are not in the repr, by which an evaluation knows outcomes of other constants
    has_heads: bool = field(default=False, repr=False)
    repeats_question: bool = field(default=False, repr=False)
    has_words: bool = field(default=False, repr=False)
    is_served: bool = field(default=True, repr=False)

    @property
    def keeps_everything(self) -> bool:
        """Does it do nothing?"""
        return self.selector is None and self.blind is None and self.evictor is None

    @property
    def reads_segments(self) -> bool:
        """Can a prompt be read in segments? The option `window` says of which size."""
        return self.selector is not None and self.selector.reads_segments

    @property
    def has_layer(self) -> bool:
        """Does a filter layer choose? The option `layer` says which."""
        return self.selector is not None

    @property
    def has_selection(self) -> bool:
        """Do all layers keep the same tokens, so that a reply can show them?"""
        return self.evictor is None


METHODS: dict[FilterMethod, Method] = {
    "none": Method(),
    "gemfilter": Method(selector=GemFilter(), has_pooling=True),
    "sieve": Method(
        selector=Sieve(),
        protects=True,
        is_adaptive=True,
        has_heads=True,
        repeats_question=True,
        has_words=True,
    ),
    "snapkv": Method(evictor=SnapKV()),
    "position": Method(blind=Position(), protects=True),
    "random": Method(blind=Uniform(), protects=True),
    "fastkv": Method(selector=LastRowVotes(num_layers=1), is_served=False),
    "claa": Method(selector=LastRowVotes(num_layers=4), is_served=False),
}
SERVED_METHODS: tuple[FilterMethod, ...] = tuple(
    name for name, method in METHODS.items() if method.is_served
)


def find_method(name: FilterMethod) -> Method:
    """The method of this name. Raises `RequestError` with the names that requests may use."""
    if name not in METHODS:
        raise RequestError(
            f"filter.method={shown(name)}: must be one of {', '.join(SERVED_METHODS)}",
            param="filter.method",
        )
    return METHODS[name]


def selector_of(method: FilterMethod) -> Selector:
    """The selector of a method that has one."""
    selector = METHODS[method].selector
    assert selector is not None, method
    return selector
