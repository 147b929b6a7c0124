"""Time to first token: each filter method against reading everything, and that against SDPA.

`bound` is FLOPs(none) / FLOPs(method), second pass included; `fraction_of_bound` is how much of it
was reached. `sieve` reads the prompt in one pass, `windows` is the same in windows of `--window`
tokens. `reader` is a small model of `--reader-shape` that chooses in windows, and then this one
reads what was kept; both times are added. transformers' own SDPA prefill of the same weights runs
beside, so that a slow `none` cannot flatter the rest. With `--new-tokens` above 1 an answer is
generated and timed, too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository root

import torch

from benchmarks.shared import harness, results
from gemserve.cli.options import read_bytes
from gemserve.engine.core import Core
from gemserve.filtering.method_cost import prompt_flops
from gemserve.model.passes.causal_model import CausalModel

SDPA = "transformers_sdpa"
_MOST_TOKENS = 1 << 21  # of a prompt, for methods that read it in windows
SEGMENTS = "windows"  # `sieve`, which reads the prompt in segments
READER = "reader"  # the same by a small model


@dataclass(kw_only=True)
class Contestant:
    """One method of one variant at one length; `variant` None is transformers' own prefill."""

    labels: dict[str, Any]
    method: str
    length: int
    variant: str | None
    chunk_tokens: int | None
    samples: list[dict[str, Any]] = field(default_factory=list)
    has_failed: bool = False

    def median(self, name: str) -> float | None:
        values = [sample[name] for sample in self.samples if sample.get(name) is not None]
        return statistics.median(values) if values else None


class Race:
    """The contestants on one model. They take turns, so that they share what the machine does."""

    def __init__(self, arguments: argparse.Namespace, rows: results.Rows) -> None:
        self.options, self.rows = arguments, rows
        self.hf = harness.random_llama(
            arguments.device, shape=arguments.shape, dtype=arguments.dtype
        )
        self.shape = CausalModel(self.hf).shape
        self.layer = harness.SHAPES[arguments.shape].filter_layer
        self.sdpa = harness.twin(self.hf)
        self.reader: Core | None = None
        if READER in arguments.methods.split(","):
            reader = harness.random_llama(
                arguments.device, shape=arguments.reader_shape, dtype=arguments.dtype
            )
            self.reader = harness.build_core(
                reader,
                shape=arguments.reader_shape,
                kv_memory_bytes=arguments.kv_memory,
                max_prompt_tokens=_MOST_TOKENS,
            )
        self.is_sdpa_warm = False
        self.cores: dict[tuple[Any, ...], tuple[Core, set[str]]] = {}  # and methods warmed up
        self.contestants = [
            contestant
            for length in results.numbers(arguments.lengths)
            for contestant in self._at(length)
        ]

    def run(self) -> None:
        for repeat in range(self.options.repeats):
            for contestant in self.contestants:
                if contestant.has_failed or (repeat > 0 and self.rows.left_s <= 0):
                    continue  # what it has stands
                sample = partial(self._sample, contestant)
                contestant.has_failed = not self.rows.attempt(contestant.labels, sample)
                if self.options.fit_kv:
                    self.cores.clear()
                    results.free(self.options.device)
        for contestant in self.contestants:  # again, as the last samples of `none` are known now
            if contestant.samples and not contestant.has_failed:
                self.rows.put(contestant.labels, self._figures(contestant))

    def _at(self, length: int) -> list[Contestant]:
        made: list[Contestant] = []
        methods = self.options.methods.split(",")
        if "none" not in methods and not self.options.without_none:
            methods.insert(0, "none")
        if not self.options.skip_sdpa:
            labels = {"method": SDPA, "prompt_tokens": length, "variant": "transformers"}
            made.append(
                Contestant(
                    labels=labels, method=SDPA, length=length, variant=None, chunk_tokens=None
                )
            )
        chunks = results.numbers(self.options.chunk_tokens) if self.options.chunk_tokens else [None]
        for name in self.options.variants.split(","):
            variant = harness.VARIANTS[name]
            obstacle = variant.find_obstacle(self.options.device)
            for method in variant.methods or methods:
                labels = {"method": method, "prompt_tokens": length, "variant": name}
                if obstacle is not None:
                    self.rows.put(labels, {"reason": obstacle})
                    continue
                for chunk in chunks:
                    if len(chunks) > 1:
                        labels = labels | {"max_chunk_tokens": chunk}
                    made.append(
                        Contestant(
                            labels=labels,
                            method=method,
                            length=length,
                            variant=name,
                            chunk_tokens=chunk,
                        )
                    )
        return made

    def _core(self, contestant: Contestant) -> Core:
        """An engine core, warmed up; with `--fit-kv`, whose pool just holds the request."""
        options, kv_bytes = self.options, self.options.kv_memory
        if options.fit_kv:
            length, new, keep = contestant.length, options.new_tokens, options.keep
            method, segment_size = self._method_of(contestant.method)
            kv_bytes = max(
                harness.request_bytes(
                    self.shape, method, tokens, new, keep, self.layer, segment_size
                )
                for tokens in (length, options.warm_up_tokens)
            )
        key = (contestant.variant, contestant.chunk_tokens, kv_bytes)
        if key not in self.cores:
            chunk = contestant.chunk_tokens
            core = harness.build_core(
                self.hf,
                shape=options.shape,
                variant=contestant.variant or "default",
                kv_memory_bytes=kv_bytes,
                max_prompt_tokens=_MOST_TOKENS,
                **({} if chunk is None else {"max_chunk_tokens": chunk}),
            )
            self.cores[key] = (core, set())
        core, warmed = self.cores[key]
        if contestant.method not in warmed:
            self._time(core, contestant.method, options.warm_up_tokens, 2)
            warmed.add(contestant.method)
        return core

    def _sample(self, contestant: Contestant) -> dict[str, Any]:
        """Take one more sample, and return the figures of all."""
        if contestant.variant is None:
            contestant.samples.append(self._prefill(contestant.length))
        else:
            core = self._core(contestant)
            contestant.labels |= harness.served_labels(core, contestant.variant)
            found = self._time(core, contestant.method, contestant.length, self.options.new_tokens)
            contestant.samples.append(found)
        return self._figures(contestant)

    def _method_of(self, name: str) -> tuple[str, int | None]:
        """A contestant's method in this model, and the size of its segments."""
        if name == READER:
            return "none", None
        return ("sieve", self.options.window) if name == SEGMENTS else (name, None)

    def _time(self, core: Core, method: Any, length: int, new_tokens: int) -> dict[str, Any]:
        ids = harness.random_ids(length, core.model.vocab_size, seed=length)
        if method == READER:
            return self._time_with_reader(core, ids, new_tokens)
        served, segment_size = self._method_of(method)
        asked = harness.request(
            ids, served, self.options.keep, new_tokens, segment_size=segment_size or "off"
        )
        return harness.time_request(core, asked, self.options.device)

    def _time_with_reader(self, core: Core, ids: list[int], new_tokens: int) -> dict[str, Any]:
        assert self.reader is not None
        keep, device = self.options.keep, self.options.device
        read = [token % self.reader.model.vocab_size for token in ids]
        looks = harness.request(
            read, "sieve", keep, 1, selects_only=True, segment_size=self.options.window
        )
        chosen_s = harness.time_request(self.reader, looks, device)["total_s"]
        kept = harness.request(ids[:keep], "none", keep, new_tokens)
        found = harness.time_request(core, kept, device)
        return found | {name: chosen_s + found[name] for name in ("ttft_s", "total_s")}

    @torch.inference_mode()
    def _prefill(self, length: int) -> dict[str, Any]:
        """Read the whole prompt with transformers, up to the logits of its last token."""
        device = self.options.device
        ids = harness.random_ids(length, self.hf.config.vocab_size, seed=length)
        if not self.is_sdpa_warm:
            warm_up = torch.tensor([ids[: self.options.warm_up_tokens]], device=device)
            self.sdpa(input_ids=warm_up)
            self.is_sdpa_warm = True
        results.synchronize(device)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        started_s = time.perf_counter()
        tokens = torch.tensor([ids], device=device)
        self.sdpa(input_ids=tokens, use_cache=True, logits_to_keep=1).logits.argmax().item()
        taken_s = time.perf_counter() - started_s
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
        return {"ttft_s": taken_s, "peak_memory_bytes": peak}

    def _figures(self, contestant: Contestant) -> dict[str, Any]:
        """Medians of a contestant's samples, beside those of `none` at the same length."""
        ttft_s = contestant.median("ttft_s")
        none_s = next(
            (
                other.median("ttft_s")
                for other in self.contestants
                if (other.method, other.length) == ("none", contestant.length) and other.samples
            ),
            None,
        )
        ratio = none_s / ttft_s if none_s and ttft_s else None
        method: Any = "none" if contestant.variant is None else contestant.method
        length, keep = contestant.length, self.options.keep
        flops = self._flops(method, length)
        full = prompt_flops(self.shape, "none", length, keep, self.layer)
        bound = None if contestant.variant is None else full / flops
        found = {
            "ttft_s": ttft_s,
            "ratio_to_none": ratio,
            "bound": bound,
            "fraction_of_bound": ratio / bound if ratio and bound else None,
            "peak_kv_bytes": contestant.median("peak_kv_bytes"),
            "peak_memory_bytes": contestant.median("peak_memory_bytes"),
            "prompt_flops": flops,
            "flops_to_none": flops / full,
            "samples": len(contestant.samples),
        }
        if method in ("sieve", "gemfilter", SEGMENTS):
            found["layers_to_none"] = self.layer / self.shape.num_layers
        if self.options.new_tokens > 1 and contestant.variant is not None:
            for name in ("generation_s", "step_s", "total_s", "decode_kv_bytes"):
                found[name] = contestant.median(name)
        return found

    def _flops(self, method: str, length: int) -> float:
        keep, window = self.options.keep, self.options.window
        if method != READER:
            served, segment_size = self._method_of(method)
            return prompt_flops(self.shape, served, length, keep, self.layer, segment_size)
        assert self.reader is not None
        shape, layer = (
            self.reader.model.shape,
            harness.SHAPES[self.options.reader_shape].filter_layer,
        )
        looking = prompt_flops(shape, "sieve", length, keep, layer, window)
        of_kept, own_kept = (s.prefill_chunk(0, keep) + s.head() for s in (shape, self.shape))
        return looking - of_kept + own_kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="4096,16384,32768", help="default: %(default)s")
    parser.add_argument(
        "--methods", default=f"none,gemfilter,sieve,{SEGMENTS}", help="default: %(default)s"
    )
    parser.add_argument("--window", type=int, default=2048, help="tokens (default: %(default)s)")
    parser.add_argument("--reader-shape", choices=harness.SHAPES, default="small")
    parser.add_argument("--without-none", action="store_true", help="nothing to compare with")
    parser.add_argument("--keep", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--new-tokens", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--kv-memory", type=read_bytes, default="8GiB", help="default: %(default)s")
    parser.add_argument("--fit-kv", action="store_true", help="a pool just large enough, each time")
    parser.add_argument("--skip-sdpa", action="store_true", help="do not run transformers")
    harness.add_shape_option(parser)
    harness.add_dtype_option(parser)
    harness.add_variants_option(parser)
    harness.add_prompt_options(parser)
    results.add_row_options(parser)
    arguments = parser.parse_args()
    rows = results.Rows(arguments)
    Race(arguments, rows).run()
    results.finish("ttft", arguments.device, rows, arguments.json)


if __name__ == "__main__":
    main()
