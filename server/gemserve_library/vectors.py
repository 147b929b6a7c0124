"""What a library asks the engine for: keys of segments, and queries of a question.

Both are ordinary requests, which end when they are read. So they wait in the queue, pause for
streams, and count for the key that sent them.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gemserve.config import EngineConfig, ModelConfig, ServerConfig, served_name
from gemserve.contract.events import Finished
from gemserve.contract.filter_plan import KeysRead, QueriesRead, Segment, key_heads
from gemserve.contract.prompt_parts import TokenArray
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.core import Core
from gemserve.errors import LibraryError, RequestError
from gemserve.filtering.planner import FilterPlanner
from gemserve.model.base_model import hash_tokenizer, hash_weights
from gemserve.prompting.segment_anchor import segment_anchor
from gemserve_library.identity import Identity

LOW_PRIORITY = 1  # answers go first
USUAL_SEGMENT = 1536
NO_HEADS = "no heads of this model are known to find facts; run gemserve calibrate first"

# runs one request to its end
Run = Callable[[Request], Finished]


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorRequests:
    """Makes requests for one model. `identity`: what their keys depend on."""

    planner: FilterPlanner
    identity: Identity

    @property
    def key_head_of(self) -> tuple[int, ...]:
        """For each head that finds facts, the number of the key head that it reads."""
        shape, heads = self.planner.of_documents.shape, self.identity.heads
        pairs = key_heads(heads, shape.num_heads, shape.num_kv_heads)
        of = [(layer, head * shape.num_kv_heads // shape.num_heads) for layer, head in heads]
        return tuple(pairs.index(pair) for pair in of)

    def for_keys(self, segments: Sequence[TokenArray]) -> Request:
        """A request for the keys of segments, which are read together."""
        placed, at = [], 0
        for tokens in segments:
            placed.append(Segment(start=at, stop=at + len(tokens), name=b""))
            at += len(tokens)
        anchor = self.identity.anchor
        return Request(
            request_id=f"index-{uuid.uuid4().hex}",
            prompt_ids=np.concatenate(segments).tolist(),
            sampling=SamplingParams(max_tokens=1),
            filter=self.planner.params_of_documents,
            priority=LOW_PRIORITY,
            vectors_only="keys",
            plan=self.planner.index_plan(placed, anchor, self.identity.window),
        )

    def for_question(self, request: Request) -> Request:
        """A request for the queries of another one's question, as if it were asked alone."""
        ids, plan = self.planner.question_plan(request)
        return Request(
            request_id=f"{request.request_id}-question",
            prompt_ids=ids,
            sampling=SamplingParams(max_tokens=1),
            filter=self.planner.params_of_documents,
            priority=request.priority,
            tenant=request.tenant,
            cache_salt=request.cache_salt,
            begin_within_s=request.begin_within_s,
            vectors_only="queries",
            plan=plan,
        )


def keys_of(finished: Finished) -> KeysRead:
    """Raises `LibraryError` if the model failed, or its keys are no numbers."""
    if not isinstance(finished.vectors, KeysRead):
        raise LibraryError(f"a window could not be read: {finished.error or finished.reason}")
    if not all(np.isfinite(keys).all() for keys in finished.vectors.segments):
        raise LibraryError("a window could not be read: its keys are not finite")
    return finished.vectors


def queries_of(finished: Finished) -> QueriesRead:
    """Raises `LibraryError` if the model failed."""
    if not isinstance(finished.vectors, QueriesRead):
        raise LibraryError(f"the question could not be read: {finished.error or finished.reason}")
    return finished.vectors


def identity_of(
    planner: FilterPlanner, tokenizer: object, *, model: str, weights: str, tokenizer_hash: str
) -> Identity:
    """What keys of this model depend on. Raises `RequestError` if it has no calibrated heads."""
    calibration, shape = planner.calibration, planner.shape
    if calibration.heads is None:
        raise RequestError(
            f"library: {NO_HEADS}",
            param="filter.library",
        )
    context = planner.context_tokens
    # of a short context half is left for the question and the answer
    segment_size = min(calibration.window or USUAL_SEGMENT, max(context - 512, context // 2))
    return Identity(
        model=model,
        weights=weights,
        tokenizer=tokenizer_hash,
        layer=calibration.layer,
        heads=calibration.heads,
        num_key_heads=len(key_heads(calibration.heads, shape.num_heads, shape.num_kv_heads)),
        head_dim=shape.head_dim,
        anchor=segment_anchor(tokenizer),
        window=segment_size,
    )


def vector_requests(core: Core, model: str) -> VectorRequests | None:
    """What libraries of this model ask the engine for; None: its heads are not calibrated.

    `model`: its name, for people who look at a library that another model has read.
    """
    reading = core.reads_with
    if reading.calibration.heads is None:
        return None
    identity = identity_of(
        reading.planner,
        core.tokenizer,
        model=model if reading is core else f"the reader {_reader_name(core.config)}",
        weights=hash_weights(reading.model.hf, rounded=True),
        tokenizer_hash=hash_tokenizer(core.tokenizer),
    )
    return VectorRequests(planner=core.planner, identity=identity)


def _reader_name(config: EngineConfig) -> str:
    assert config.reader is not None
    return served_name(ModelConfig(model=config.reader), ServerConfig())
