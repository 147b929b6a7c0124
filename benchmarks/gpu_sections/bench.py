"""What sections share: the device, problem sizes, one model, and what earlier sections found."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from gpu_sections.machine import Machine
from gpu_sections.plan import Scale
from gpu_sections.record import Figures, read_json
from gpu_sections.variants import Variant, how_served


@dataclass
class Bench:
    """`folder` holds the sections' files."""

    machine: Machine
    scale: Scale
    folder: Path
    _served: dict[str, dict[str, str]] = field(default_factory=dict)

    def found(self, section: str, labels: dict[str, Any], name: str) -> float | None:
        """A figure of a section that has run, by its row's labels; None: there is none."""
        for row in (read_json(self.folder / f"{section}.json") or {"rows": []})["rows"]:
            if row["status"] == "measured" and labels.items() <= row["labels"].items():
                value: float | None = row["figures"].get(name, {}).get("value")
                return value
        return None

    def ceiling(self, name: str) -> float | None:
        """Measured: bytes per second of `copy`, FLOPs per second of `bf16` and `fp8`."""
        return self.found("ceilings", {"ceiling": name}, "rate")

    def chunk_tokens(self) -> int:
        """The chunk size that was fastest; the engine's own, if that was not measured."""
        from gemserve.config import EngineConfig

        for tokens in self.scale.chunk_sizes:
            if self.found("chunks", {"max_chunk_tokens": tokens}, "is_fastest") == 1:
                return tokens
        return EngineConfig().max_chunk_tokens

    @cached_property
    def hf(self) -> Any:
        """A transformers model of random weights, made on the device."""
        from transformers import AutoModelForCausalLM, LlamaConfig

        config = LlamaConfig(**self.scale.model)
        torch.manual_seed(0)
        with self.machine.device:
            model = AutoModelForCausalLM.from_config(config, dtype=self.machine.dtype)
        self.machine.synchronize()
        return model.eval().requires_grad_(False)

    @cached_property
    def shape(self) -> Any:
        """The model's `ModelShape`."""
        return self.causal().shape

    @cached_property
    def tokenizer(self) -> Any:
        import harness

        return harness.NoText(self.scale.model["vocab_size"])

    def causal(self, variant: Variant | None = None) -> Any:
        """gemserve's view of the model; all of these share its weights."""
        from gemserve.model.causal import CausalModel

        return CausalModel(self.hf, **({} if variant is None else variant.model))

    def core(self, variant: Variant, *, kv_bytes: int, chunk_tokens: int | None = None) -> Any:
        """An engine core that filters every prompt it is asked to."""
        from gemserve.config import EngineConfig
        from gemserve.engine.build import assemble
        from gemserve.model.loader import Loaded

        loaded = Loaded(
            model=self.causal(variant),
            tokenizer=self.tokenizer,
            eos_ids=frozenset(),
            source="random weights",
            name="random weights",
        )
        settings: dict[str, Any] = {
            "filter_min_tokens": 0,
            "filter_layer": self.scale.filter_layer,
            "filter_keep": self.scale.keep,
            "kv_memory_bytes": kv_bytes,
            "max_chunk_tokens": chunk_tokens or self.chunk_tokens(),
        }
        return assemble(loaded, EngineConfig(**settings | dict(variant.engine)))

    def served(self, variant: Variant) -> dict[str, str]:
        """What an engine chooses by itself, as labels; none if it cannot be built."""
        if variant.name not in self._served:
            try:
                core = self.core(variant, kv_bytes=self.shape.kept_bytes(64))
                self._served[variant.name] = how_served(core)
            except Exception:  # whoever measures it will meet it again, and say so
                self._served[variant.name] = {}
        return self._served[variant.name]

    def kv_bytes(self, method: Any, tokens: int, max_tokens: int) -> int:
        """What one request holds at its peak."""
        shape, layer = self.shape, self.scale.filter_layer
        if method == "none":
            return shape.kept_bytes(tokens + max_tokens)
        reading = shape.reading_bytes(method, tokens, layer)
        return max(reading, shape.kept_bytes(self.scale.keep + max_tokens))

    def ids(self, count: int, seed: int) -> list[int]:
        import harness

        return harness.random_ids(count, self.scale.model["vocab_size"], seed)

    def request(
        self, method: Any, ids: list[int], max_tokens: int, *, selects_only: bool = False
    ) -> Any:
        from gemserve.types import FilterParams, Request, SamplingParams

        return Request(
            request_id="gpu",
            prompt_ids=ids,
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
            filter=FilterParams(method=method, keep=self.scale.keep),
            selects_only=selects_only,
        )

    def time_request(self, core: Any, request: Any) -> Figures:
        """One request alone: seconds to its first token and to its end, and memory."""
        from gemserve.types import Finished, TextDelta

        machine, ended = self.machine, None
        machine.synchronize()
        machine.reset_peak()
        drawn_s: list[float] = []
        started_s = time.perf_counter()
        core.add(request)
        while not core.is_idle:
            for _, event in core.step():
                if isinstance(event, TextDelta):
                    machine.synchronize()
                    drawn_s.append(time.perf_counter() - started_s)
                if isinstance(event, Finished):
                    ended = event
        machine.synchronize()
        total_s = time.perf_counter() - started_s
        if ended is None or ended.error is not None:
            raise RuntimeError(f"the request ended with {ended and ended.error}")
        figures: dict[str, tuple[float | None, str]] = {"total": (total_s, "s")}
        if drawn_s:
            figures["ttft"] = (drawn_s[0], "s")
        if len(drawn_s) > 1:
            figures["generation"] = (drawn_s[-1] - drawn_s[0], "s")
            steps = (later - earlier for earlier, later in pairwise(drawn_s))
            figures["step"] = (statistics.median(steps), "s")
        return figures | {
            "peak_memory": (machine.peak_bytes(), "bytes"),
            "peak_kv": (ended.peak_kv_bytes, "bytes"),
            "decode_kv": (ended.decode_kv_bytes, "bytes"),
        }

    def warm_up(self, core: Any, method: Any) -> None:
        """Let an engine core learn its pace, and the device's libraries their choices."""
        tokens = self.scale.warm_up_tokens
        self.time_request(core, self.request(method, self.ids(tokens, 1), 2))


def share(value: float, ceiling: float | None) -> float | None:
    """None: the ceiling is not known."""
    return None if not ceiling else value / ceiling
