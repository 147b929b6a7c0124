"""`options` of /api/chat and /api/generate: how tokens are drawn, in Ollama's names."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from gemserve.api.requests.base_bodies import (
    MAX_STOP_CHARS,
    MAX_STOPS,
    Body,
    SomeTextOr,
    TopP,
)
from gemserve.api.requests.integers import INTEGRAL, Count, Integer, Natural, Seed, TopK
from gemserve_dialects.ollama.values import because

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "stop")
_PENALTIES = {
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
# What a chat's field is called here, if it is wrong.
NAMES = {
    **{name: f"options.{name}" for name in _SAMPLING},
    **{chat: f"options.{name}" for name, chat in _PENALTIES.items()},
    "max_tokens": "options.num_predict",
}
Switch = bool | None
_DRAWN_OTHERWISE = because(
    "must be off: tokens are drawn by temperature, top_k, top_p, min_p and the penalties"
)
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class Options(Body):
    """What follows `frequency_penalty` has no effect: the server is configured when it starts.

    `num_predict` −1 or −2: as many tokens as fit, up to the server's default.
    """

    num_predict: Count | Annotated[Literal[-1, -2], INTEGRAL] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Seed | None = None
    stop: (
        SomeTextOr[_Stop, Annotated[list[_Stop], Field(max_length=MAX_STOPS, fail_fast=True)]]
        | None
    ) = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    num_ctx: Natural | None = None
    num_batch: Natural | None = None
    num_gpu: Integer | None = None
    main_gpu: Natural | None = None
    num_thread: Natural | None = None
    num_keep: Integer | None = None
    repeat_last_n: Integer | None = None
    numa: Switch = None
    low_vram: Switch = None
    f16_kv: Switch = None
    logits_all: Switch = None
    vocab_only: Switch = None
    use_mmap: Switch = None
    use_mlock: Switch = None
    penalize_newline: Switch = None
    mirostat_tau: Annotated[float, Field(ge=0, le=1e6)] | None = None
    mirostat_eta: Annotated[float, Field(ge=0, le=1e6)] | None = None
    # other ways to draw tokens, switched off
    mirostat: Annotated[Annotated[Literal[0], INTEGRAL] | None, _DRAWN_OTHERWISE] = None
    tfs_z: Annotated[Annotated[float, Field(ge=1, le=1)] | None, _DRAWN_OTHERWISE] = None
    typical_p: Annotated[Annotated[float, Field(ge=1, le=1)] | None, _DRAWN_OTHERWISE] = None

    @property
    def chat_fields(self) -> dict[str, Any]:
        count = self.num_predict
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        return {
            **{name: getattr(self, name) for name in _SAMPLING},
            **{chat: getattr(self, name) for name, chat in _PENALTIES.items()},
            "stop": stops,
            "max_tokens": None if count is None or count < 0 else count,
        }
