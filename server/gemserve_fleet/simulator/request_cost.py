"""What one request costs a replica, in seconds and bytes, for each way of reading its document."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from gemserve.accelerators import Device
from gemserve.config import DEFAULT_METHOD
from gemserve.contract.filter_options import MAX_QUESTION_TOKENS
from gemserve.cost import ModelShape
from gemserve.filtering.method_cost import reading_bytes
from gemserve.filtering.methods import METHODS
from gemserve_fleet.replicas.routing import Reading, TokenCosts

# Among so many answers a router divides a decode step, to say what a token of an answer costs. The
# replica counts as full, because another answer adds little to a step. Divided among 8, a few
# answers look like a queue, and documents are sent away from it (docs/log/several-machines.md).
_STREAMS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCost:
    """What a request costs.

    A document is cached in pieces: its segments, or the whole. `read_s`: seconds for a piece that
    is not cached; `cached_s`: for one that is; `rest_s`: for what is read in any case, the
    `kept_tokens` among it.
    `reading_bytes`, `decoding_bytes`: of keys and values that the request itself holds.

    A decode step of b sequences takes `step_s` + b · `sequence_s`, or b · `products_s` if that is
    more: it reads weights, keys and values, and it computes.
    """

    reading: Reading
    num_pieces: int
    piece_tokens: int
    kept_tokens: int
    read_s: float
    cached_s: float
    rest_s: float
    piece_bytes: int
    reading_bytes: int
    decoding_bytes: int
    answer_tokens: int
    step_s: float
    sequence_s: float
    products_s: float

    @property
    def peak_bytes(self) -> int:
        return max(self.reading_bytes, self.decoding_bytes)

    @property
    def filtered_token_s(self) -> float:
        """Seconds for a token of a piece: the unit of a router's queues."""
        return self.read_s / self.piece_tokens

    def reading_s(self, num_cached: int) -> float:
        """Seconds until the first token, alone on a replica that has `num_cached` pieces."""
        return (
            (self.num_pieces - num_cached) * self.read_s + num_cached * self.cached_s + self.rest_s
        )

    def decode_step_s(self, num_sequences: int) -> float:
        return max(self.step_s + num_sequences * self.sequence_s, num_sequences * self.products_s)

    def token_costs(self) -> TokenCosts:
        """What a router compares, in tokens of a piece."""
        unit = self.filtered_token_s
        return TokenCosts(
            full=self.rest_s / self.kept_tokens / unit if self.kept_tokens else 1.0,
            answered=self.decode_step_s(_STREAMS) / _STREAMS / unit,
            cached=self.cached_s / self.piece_tokens / unit,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSpeeds:
    """Speeds of one replica as they were measured, in place of those by FLOPs and bytes.

    `read`: tokens per second of a pass through all layers; `filtered`: of a filter pass; `decode`:
    steps per second. None: by FLOPs or bytes.
    """

    read: float | None = None
    filtered: float | None = None
    decode: float | None = None


NO_SPEEDS = MeasuredSpeeds()


def request_cost(
    shape: ModelShape,
    device: Device,
    reading: Reading,
    *,
    num_tokens: int,
    keep: int,
    max_tokens: int,
    layer: int,
    segment_size: int | None,
    weight_bytes: int,
    speeds: MeasuredSpeeds = NO_SPEEDS,
) -> RequestCost:
    """The cost of one prompt of `num_tokens` tokens with an answer of `max_tokens`.

    `layer`: the filter layer. `segment_size`: the most tokens of a segment, for reading "windows".
    `weight_bytes`: what a decode step reads of the model. All but the question, of
    `MAX_QUESTION_TOKENS`, is in the document.
    """
    is_whole = reading == "whole"
    num_pieces = (
        ceil(num_tokens / segment_size) if reading == "windows" and segment_size is not None else 1
    )
    piece = ceil(num_tokens / num_pieces)
    question = min(MAX_QUESTION_TOKENS, piece)
    speed = speeds.read if is_whole else speeds.filtered
    if speed is None:
        read_s, cached_s = _piece_seconds(shape, device, reading, piece, question, layer)
    else:
        read_s, cached_s = piece / speed, question / speed
    kept = num_tokens if is_whole else min(keep, num_tokens)
    rest_s = shape.head() / device.flops
    if not is_whole:
        kept_s = shape.prefill_chunk(0, kept) / device.flops
        rest_s += kept_s if speeds.read is None else kept / speeds.read
    sequence_s = shape.kept_bytes(kept + max_tokens) / device.bandwidth
    step_s = weight_bytes / device.bandwidth
    products_s = (2.0 * shape.num_layers * shape.layer_params + shape.head()) / device.flops
    if speeds.decode is not None:
        step_s, sequence_s, products_s = 1 / speeds.decode, 0.0, 0.0
    decoding = shape.kept_bytes(kept + max_tokens, kept if is_whole else 0)
    held = (
        decoding
        if is_whole
        else reading_bytes(
            shape, DEFAULT_METHOD, num_tokens, layer, segment_size if reading == "windows" else None
        )
    )
    return RequestCost(
        reading=reading,
        num_pieces=num_pieces,
        piece_tokens=piece,
        kept_tokens=0 if is_whole else kept,
        read_s=read_s,
        cached_s=min(cached_s, read_s),
        rest_s=rest_s,
        piece_bytes=shape.kept_bytes(piece) if is_whole else shape.filter_bytes(piece, layer),
        reading_bytes=held,
        decoding_bytes=decoding,
        answer_tokens=max_tokens,
        step_s=step_s,
        sequence_s=sequence_s,
        products_s=products_s,
    )


def _piece_seconds(
    shape: ModelShape, device: Device, reading: Reading, piece: int, question: int, layer: int
) -> tuple[float, float]:
    """Seconds for a piece, by FLOPs: if it is not cached, and if it is."""
    if reading == "whole":
        whole = shape.prefill_chunk(0, piece)
        return whole / device.flops, shape.prefill_chunk(piece - question, question) / device.flops
    selector = METHODS[DEFAULT_METHOD].selector
    assert selector is not None
    if reading == "windows":  # the question follows each
        before, read = piece, piece + question
    else:
        before, read = piece - question, piece
    scoring = selector.score_flops(shape, read)
    asked = shape.filter_chunk(before, question, layer) + scoring
    return (shape.filter_chunk(0, read, layer) + scoring) / device.flops, asked / device.flops
