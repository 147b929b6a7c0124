"""What a replica's settings say about how it reads long prompts, for the router."""

from __future__ import annotations

from gemserve.calibration.files import Calibration
from gemserve.config import ResolvedEngineConfig, find_segment_size
from gemserve.contract.filter_options import kept_count
from gemserve.cost import ModelShape
from gemserve.filtering.methods import METHODS
from gemserve_fleet.replicas.routing import ModelReading, Reading, TokenCosts

_TYPICAL_TOKENS = 8_192  # of a prompt, where a share of it is kept
# A queue counts each token of an answer as one, whatever it costs.
_ANSWERED = 1.0


def model_reading(
    config: ResolvedEngineConfig, calibration: Calibration, shape: ModelShape, *, has_cache: bool
) -> ModelReading:
    """How prompts are read that name no filter of their own. Costs are by counted FLOPs.

    `has_cache`: whether there is a document cache.
    """
    method = METHODS[config.filter_method]
    if method.keeps_everything or method.selector is None:
        # the unit is then a token that all layers read, of which queues consist
        costs = TokenCosts(full=1.0, answered=_ANSWERED)
        return ModelReading(reading="whole", costs=costs, has_cache=has_cache)
    segment_size = (
        find_segment_size(config.filter_window, calibration) if method.reads_segments else None
    )
    kept = min(_TYPICAL_TOKENS, kept_count(config.filter_keep, _TYPICAL_TOKENS))
    costs = TokenCosts.of_shape(
        shape,
        layer=config.filter_layer,
        segment_size=_TYPICAL_TOKENS if segment_size is None else segment_size,
        kept=kept,
        answered=_ANSWERED,
    )
    reading: Reading = "one_pass" if segment_size is None else "windows"
    return ModelReading(reading=reading, costs=costs, kept_tokens=kept, has_cache=has_cache)
