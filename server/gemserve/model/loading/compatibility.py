"""Checks that gemserve's attention gives a loaded model's own results."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from gemserve.errors import ModelError
from gemserve.model.passes.causal_model import CausalModel
from gemserve.model.passes.kv import DecodeBatch
from gemserve_kernels.blocks import TILE, BlockWeight, has_blocks

_TOKENS = 48
_PIECE = 1 << 24  # numbers of a weight that are summed at once, perhaps in a copy
_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
# float32 differs only by the order of summation. Half precision has 8 to 11 bits: so loose a bound
# shows kernels that are wrong, and the comparison in float32 shows models that are
_TOLERANCE = {torch.float32: 2e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
# Products with weights in blocks round what they take to bytes. On random tokens logits of real
# models differ by up to 0.22 of the largest, in bfloat16 with ordinary weights by 0.12.
_TOLERANCE_OF_BLOCKS = 4e-1


def check_servable(model: CausalModel) -> None:
    """Compare a chunked pass and a decode step with the model's own forward on random tokens.

    A model in half precision is compared in float32, too, as far as its kinds of layers go, unless
    several ranks have it together. Raises `ModelError` with the reason if they differ. What
    gemserve's attention does not support (ALiBi, non-causal layers …) must not be served wrongly.
    """
    name = type(model.hf).__name__
    try:
        _check_weights(model.hf)
        if model.has_states and not model.is_rope_fixed:
            raise ModelError(
                "its layers keep a recurrent state, and its rotary embedding depends on a "
                "sequence's length; it may have one of these only"
            )
        _compare(model, _TOLERANCE_OF_BLOCKS if has_blocks(model.hf) else _TOLERANCE[model.dtype])
        layer = next((i for i in range(model.num_layers) if model.window_of(i) is None), None)
        if layer is not None:
            model.filter_pass_of(_random_ids(model), layer)
        # a rank's weights are parts, which transformers' own hooks multiply
        if (model.dtype != torch.float32 and model.shard is None) or has_blocks(model.hf):
            _compare(model.in_float32(), _TOLERANCE[torch.float32])
    except ModelError as error:
        raise ModelError(f"{name} cannot be served: {error}") from error
    except _ERRORS as error:
        raise ModelError(f"{name} cannot be served: {type(error).__name__}: {error}") from error


def _check_weights(hf: Any) -> None:
    """Raise `ModelError` with the name of a weight that has numbers that are not finite."""
    for name, weight in hf.named_parameters():
        if not weight.is_floating_point():
            continue
        here = weight.to_local() if hasattr(weight, "to_local") else weight
        pieces: Iterable[torch.Tensor]
        if isinstance(here, BlockWeight):
            pieces = here.pieces(max(1, _PIECE // here.shape[-1] // TILE) * TILE)
        else:
            pieces = here.detach().flatten().split(_PIECE)
        if not all(piece.sum(dtype=torch.float32).isfinite() for piece in pieces):
            raise ModelError(
                f"its weight {name} has numbers that are not finite: the checkpoint is damaged"
            )


def _compare(model: CausalModel, tolerance: float) -> None:
    """Raise `ModelError` if gemserve's passes and the model's own forward differ.

    `tolerance`: of the largest logit.
    """
    ids = _random_ids(model)
    expected = _reference_logits(model, ids)
    if not expected.isfinite().all():
        raise ModelError("it gives logits that are not finite: its weights may be damaged")
    limit = tolerance * max(1.0, float(expected.abs().max()))
    difference = _difference(model, ids, expected, split=_TOKENS // 3)
    if difference <= limit:  # which NaN is not
        return
    if model.has_states and _difference(model, ids, expected, split=0) <= limit:
        raise ModelError(
            "its layers go on from a recurrent state by one token at a time only, and begin anew "
            "with every chunk of a prompt"
        )
    kind = str(model.dtype).removeprefix("torch.")
    raise ModelError(
        f"its logits through gemserve's attention differ from its own by {difference:.3g} in "
        f"{kind}, the limit is {limit:.3g}"
    )


def _difference(model: CausalModel, ids: list[int], expected: torch.Tensor, split: int) -> float:
    """The largest difference of the last token's logits, decoded and read as a prompt.

    The prompt is read in two chunks, or in one if `split` is 0.
    """
    whole = model.new_memory(2 * model.num_layers * _TOKENS)
    whole.rows.zero_()  # old values would hide a write to the wrong place
    kv = whole.kv(0, num_layers=model.num_layers, capacity=_TOKENS)
    state = model.new_states(1).take() if model.has_states else None

    def read(low: int, high: int) -> torch.Tensor | None:
        return model.prefill_chunk(
            ids[low:high], start=low, kv=kv, rope_tokens=_TOKENS, is_last=True, state=state
        )

    if split:
        read(0, split)
    read(split, _TOKENS - 1)
    # so that the last token's keys are not there already
    states = () if state is None else (state,)
    last = [_TOKENS - 1]
    step = DecodeBatch(whole, [kv], slots=last, positions=last, states=states)
    decoded = model.decode(ids[-1:], step, [_TOKENS])
    if split and model.has_states:  # they have gone on
        read(0, split)
    actual = read(split, _TOKENS)
    assert actual is not None
    return float((torch.cat([actual, decoded]) - expected).abs().max())


def check_filter_pass(model: CausalModel, layer: int) -> None:
    """Run a filter pass up to `layer`. Raises `ModelError` with the reason if it cannot be run."""
    try:
        keys = model.filter_pass_of(_random_ids(model), layer).keys(layer, _TOKENS)
    except (TypeError, RuntimeError, AttributeError, ValueError) as error:
        raise ModelError(
            f"{type(model.hf).__name__}: the filter pass fails: {type(error).__name__}: {error}"
        ) from error
    if not keys.isfinite().all():
        raise ModelError(f"{type(model.hf).__name__}: the filter pass gives keys that overflow")


def _random_ids(model: CausalModel) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    ids: list[int] = torch.randint(0, model.vocab_size, (_TOKENS,), generator=generator).tolist()
    return ids


@torch.inference_mode()
def _reference_logits(model: CausalModel, ids: list[int]) -> Any:
    tokens = torch.tensor([ids], device=model.device)
    with model.attention_named("eager"):
        return model.runnable()(input_ids=tokens, use_cache=False).logits[0, -1].float()
