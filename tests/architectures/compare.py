"""Compares gemserve's passes of a tiny model with transformers' own forward, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from gemserve.cost import filter_units
from gemserve.errors import ConfigError, ModelError
from gemserve.model.cpu.cpu_step import with_cpu_step
from gemserve.model.families.config_check import check_config
from gemserve.model.families.head_sizes import fit
from gemserve.model.families.planned_reach import planned_reaches
from gemserve.model.loading.compatibility import check_servable
from gemserve.model.passes.causal_model import CausalModel
from gemserve.model.passes.kv import DecodeBatch
from gemserve.model.passes.query_tap import FilterTap
from gemserve_kernels import merge, raw_scores
from gemserve_kernels.attention import reference_attention, sink_part
from tests.architectures import families

LENGTH, CHUNKS = 201, ((0, 50), (50, 130), (130, 183))  # the last tokens are decoded
NEIGHBOUR = 90  # how many tokens shorter the other sequence of a batch is
KEPT = 16  # tokens that a filter keeps
LIMIT = 2e-3  # of log-probabilities in float32
_RECORDING = "test-recording"


@dataclass(frozen=True, kw_only=True)
class Compared:
    """How a model's passes differ from its own forward: largest differences of log-probabilities.

    `filter`: largest difference of a filter pass's queries and keys, as a share of the largest
    number; None: no layer sees all tokens. `half`: bfloat16 against the own float32 forward, as a
    multiple of what the own bfloat16 forward differs from it. `has_step`: the compiled decode step
    is used. `states`: how many layers keep a recurrent or convolutional state.
    """

    name: str
    states: int
    reaches: tuple[str, ...]
    prefill: float
    chunks: float
    decode: float
    neighbour: float
    filter: float | None
    half: float
    has_step: bool

    @property
    def is_equal(self) -> bool:
        differences = (self.prefill, self.chunks, self.decode, self.neighbour, self.filter or 0.0)
        return max(differences) <= LIMIT and self.half <= 3.0


def compare(family: str, **changes: Any) -> Compared:
    """Raises `ModelError` if the model is refused."""
    check_config(families.served_config(family, **changes))
    hf = families.build(family, **changes)
    ids = torch.randint(3, families.VOCAB, (LENGTH,), generator=_generator()).tolist()
    model = CausalModel(hf)
    check_servable(model)
    _check_plan(family, model, **changes)
    expected = _own_logprobs(hf, ids)
    prefill, _ = _read(model, ids, ((0, LENGTH),), decoded=0)
    chunks, neighbour = _read(model, ids, CHUNKS, decoded=LENGTH - CHUNKS[-1][1])
    _, of_neighbour = neighbour
    stop = CHUNKS[-1][1]
    last = LENGTH - 1 - NEIGHBOUR
    return Compared(
        name=type(hf).__name__,
        states=len(model.states.layers),
        reaches=tuple(map(str, model.reaches)),
        prefill=_difference(prefill, expected),
        chunks=_difference(chunks[:stop], expected[:stop]),
        decode=_difference(chunks[stop:], expected[stop:]),
        neighbour=_difference(of_neighbour[-1:], expected[last : last + 1]),
        filter=_compare_filter(model, ids),
        has_step=_has_step(model),  # before the weights are rounded
        half=_compare_half(hf, ids, expected),
    )


def _check_plan(family: str, model: CausalModel, **changes: Any) -> None:
    """`gemserve plan` counts what the layers see without having weights."""
    with torch.device("meta"):
        bare = AutoModelForCausalLM.from_config(families.served_config(family, **changes))
    assert planned_reaches(bare) == model.reaches


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def _median_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().amax(-1).median())


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max())


@torch.inference_mode()
def _own_logprobs(hf: Any, ids: Sequence[int]) -> torch.Tensor:
    before, hf.config._attn_implementation = hf.config._attn_implementation, "eager"
    try:
        logits = hf(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    finally:
        hf.config._attn_implementation = before
    return logits.float().log_softmax(-1)


def _read(
    model: CausalModel, ids: Sequence[int], chunks: Sequence[tuple[int, int]], *, decoded: int
) -> tuple[torch.Tensor, tuple[int, torch.Tensor]]:
    """Log-probabilities of all tokens, the last ones decoded beside a shorter sequence."""
    units = 2 * model.num_layers * LENGTH
    memory = model.new_memory(2 * units)
    places = model.new_states(2)
    states = [places.take(), places.take()] if model.has_states else []
    state, beside_state = states or (None, None)
    kv, other = (
        memory.kv(at, num_layers=model.num_layers, capacity=LENGTH, is_sliding=True)
        for at in (0, units)
    )
    outs: list[torch.Tensor] = []
    for low, high in chunks:
        out = model.prefill_chunk(
            ids[low:high],
            start=low,
            kv=kv,
            rope_tokens=LENGTH,
            is_last=True,
            is_scored=True,
            state=state,
        )
        assert out is not None
        outs.append(out)
    begin, beside = LENGTH - decoded, torch.zeros(0, outs[0].shape[-1])
    if decoded:
        before = ids[: begin - NEIGHBOUR]
        model.prefill_chunk(
            before, start=0, kv=other, rope_tokens=LENGTH, is_last=False, state=beside_state
        )
    for slot in range(begin, LENGTH):
        slots = [slot, slot - NEIGHBOUR]
        kv.make_room(slot)
        batch = DecodeBatch(memory, [kv, other], slots=slots, positions=slots, states=states)
        both = model.decode([ids[s] for s in slots], batch, [LENGTH] * 2)
        outs.append(both[:1])
        beside = both[1:]
    return torch.cat(outs).log_softmax(-1), (LENGTH - 1 - NEIGHBOUR, beside.log_softmax(-1))


def _compare_filter(model: CausalModel, ids: Sequence[int]) -> float | None:
    """Queries and keys of a filter pass in chunks, against those of the own forward."""
    full = [i for i in range(model.num_layers) if model.window_of(i) is None]
    if not full:
        return None
    layer, units = full[-1], filter_units(full[-1])
    kv = model.new_memory(units * LENGTH).pass_kv(0, num_units=units, capacity=LENGTH)
    queries = model.new_query_tap([layer], range(LENGTH - 16, LENGTH))
    tap = FilterTap(layer=layer, queries=queries, num_tokens=LENGTH)
    state = model.new_states(1).take() if model.has_states else None
    for low, high in (*CHUNKS, (CHUNKS[-1][1], LENGTH)):
        model.filter_chunk(ids[low:high], start=low, kv=kv, tap=tap, state=state)
    query, key = _own_queries_and_keys(model, ids)[layer]
    ours = raw_scores(queries.of(layer)[:, -1], kv.keys(layer, LENGTH))
    assert _kept(ours) == _kept(raw_scores(query[:, -1], key)), "the filter keeps other tokens"
    own_q, own_k, _ = fit(query, key, key, *kv.head_sizes)
    pairs = ((queries.of(layer), own_q[:, -16:]), (kv.keys(layer, LENGTH), own_k))
    return max(_difference(a, b) / float(b.abs().max()) for a, b in pairs)


def _kept(scores: torch.Tensor) -> list[int]:
    """The tokens that GemFilter keeps of its text, without pooling."""
    return sorted(scores.topk(KEPT).indices.tolist())


def _own_queries_and_keys(
    model: CausalModel, ids: Sequence[int]
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """What each layer of the own forward hands to its attention function."""
    AttentionInterface.register(_RECORDING, _recording)
    found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    tokens = torch.tensor([ids])
    with model.attention_named(_RECORDING), torch.inference_mode():
        model.hf(input_ids=tokens, use_cache=False, record=found, reaches=model.reaches)
    return found


def _recording(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    record: dict[int, Any],
    reaches: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention with a mask by what the model is known to see, which the checks above compare."""
    record[module.layer_idx] = query[0], key[0]
    rows = torch.arange(query.shape[2])
    mask = (rows[None] <= rows[:, None]) & (
        rows[None] >= reaches[module.layer_idx].first(rows)[:, None]
    )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    size = max(key.shape[-1], value.shape[-1])
    q, k, v = fit(query[0], key[0], value[0], key.shape[1], size)
    part = reference_attention(q, k, v, scale=scale, mask=mask, softcap=softcap)
    parts = [part] if s_aux is None else [part, sink_part(s_aux, q)]
    out = merge(parts)[..., : value.shape[-1]]
    return out.transpose(0, 1)[None].contiguous(), None


def _compare_half(hf: Any, ids: Sequence[int], expected: torch.Tensor) -> float:
    """What bfloat16 adds through gemserve, as a multiple of what it adds anyway.

    Of all tokens' differences it takes the median: a router that decides otherwise for one token
    by a rounding error makes a large one.
    """
    half = hf.to(torch.bfloat16)
    own = _median_difference(_own_logprobs(half, ids), expected)
    model = CausalModel(half)
    check_servable(model)
    ours, _ = _read(model, ids, ((0, LENGTH),), decoded=0)
    return _median_difference(ours, expected) / max(own, 1e-3)


def _has_step(model: CausalModel) -> bool:
    try:
        return with_cpu_step(model, "on") is not model
    except ConfigError:
        return False


def find_reason(family: str, **changes: Any) -> str | None:
    """Why a family is refused, or None if it is not."""
    try:
        check_config(families.served_config(family, **changes))
        check_servable(CausalModel(families.build(family, **changes)))
    except ModelError as error:
        return str(error)
    return None
