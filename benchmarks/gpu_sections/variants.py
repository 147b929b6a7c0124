"""The ways of serving that are measured: the list to add to when the engine gets another option."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from gemserve import config
from gemserve.config import EngineConfig
from gemserve.types import FilterMethod

NOT_AVAILABLE = "skipped: not available"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Settings beyond the defaults, and what is measured with them.

    `engine`: fields of `EngineConfig`; `model`: keywords of `CausalModel`. `methods`: whose time to
    first token is measured; `decodes`, `serves`: whether decoding and requests per second are.
    `needs_cuda`: the CPU has nothing of the kind.
    """

    name: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    methods: tuple[FilterMethod, ...] = ()
    decodes: bool = False
    serves: bool = False
    needs_cuda: bool = False

    def find_obstacle(self, *, is_cuda: bool) -> str | None:
        """Why this engine, or this device, cannot be asked for it."""
        unknown = sorted(set(self.engine) - {known.name for known in fields(EngineConfig)})
        if unknown:
            return f"{NOT_AVAILABLE}: EngineConfig has no {', '.join(unknown)}"
        if self.needs_cuda and not is_cuda:
            return f"{NOT_AVAILABLE}: needs a CUDA device"
        return None


# `none` and `sieve` first: they are measured at every length before any other method is.
VARIANTS = (
    Variant(
        name="default",
        methods=("none", "sieve", "gemfilter", "snapkv"),
        decodes=True,
        serves=True,
    ),
    Variant(name="eager", engine={"cuda_graphs": "off"}, decodes=True, needs_cuda=True),
    Variant(
        name="fp8 filter",
        engine={"filter_precision": "fp8"},
        methods=("sieve",),
        serves=True,
        needs_cuda=True,
    ),
)


def how_served(core: Any) -> dict[str, str]:
    """What an engine core has chosen by itself, as labels of everything measured with it."""
    return {
        "attention_backend": core.model.backend.name,
        # an engine that has no graphs does not know the word
        "cuda_graphs": "on" if getattr(core, "has_graphs", False) else "off",
    }


def backend_names() -> tuple[str, ...]:
    """Attention backends worth asking for, whether or not they can be had here."""
    named = getattr(config, "ATTENTION_BACKENDS", ("aten-cpu", "aten-cuda"))
    # the plain form holds every score at once: 64 GiB of one layer at 32,768 tokens
    return tuple(name for name in named if name not in ("auto", "reference"))
