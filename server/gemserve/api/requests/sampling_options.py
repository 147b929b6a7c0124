"""The sampling options of a body, as the engine's `SamplingParams`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gemserve.api.requests.base_bodies import SamplingBody
from gemserve.contract.sampling import SamplingParams
from gemserve.errors import RequestError, shown

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
# These are passed on as they are. One that is not given keeps the default of SamplingParams.
_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
)


def read_sampling(body: SamplingBody, max_tokens: int, vocab_size: int) -> SamplingParams:
    """Sampling options with their defaults. Raises `RequestError` for an unknown token id."""
    given = {name: getattr(body, name) for name in _FIELDS}
    bias: list[tuple[int, float]] = []
    for key, value in (body.logit_bias or {}).items():
        if not _TOKEN_ID.fullmatch(key):
            raise RequestError(
                f"logit_bias.{key[:40]}: not a token id", param=f"logit_bias.{key[:40]}"
            )
        bias.append((int(key), value))
    check_ids([token for token, _ in bias], "logit_bias", vocab_size)
    check_ids(body.stop_token_ids or [], "stop_token_ids", vocab_size)
    if body.min_tokens is not None and body.min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens={body.min_tokens}: more than max_tokens={max_tokens}",
            param="min_tokens",
        )
    return SamplingParams(
        max_tokens=max_tokens,
        logit_bias=tuple(bias),
        stop=tuple(body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        **{name: value for name, value in given.items() if value is not None},
    )


def check_ids(ids: Sequence[int], field: str, vocab_size: int) -> None:
    """Raise `RequestError` for an id outside the model's vocabulary."""
    for index, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{field}.{index}={shown(token)}: not a token id; the vocabulary has "
                f"{vocab_size}, so 0 to {vocab_size - 1}",
                param=field,
            )
