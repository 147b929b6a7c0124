"""What the benchmarks of the engine share: random models, engine cores, and timed requests."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.shared import results
from gemserve.config import EngineConfig
from gemserve.contract.events import Finished, TextDelta
from gemserve.contract.filter_options import FilterMethod, FilterParams, SegmentSize
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.build import assemble
from gemserve.engine.core import Core
from gemserve.filtering.method_cost import reading_bytes
from gemserve.model.loading.loader import LoadedModel
from gemserve.model.passes.causal_model import CausalModel

_MEMORY_SHARE = 0.85  # of a GPU's free memory, for a KV pool
_LLAMA_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model of random weights, as fields of a `LlamaConfig`, and its filter layer."""

    filter_layer: int
    config: Mapping[str, Any]


SHAPES = {
    "small": Shape(
        filter_layer=4,
        config={
            "vocab_size": 8192,
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 16,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
    ),
    "llama-8b": Shape(  # Llama-3.1-8B, with room for an answer after 131,072 tokens
        filter_layer=13,
        config={
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072 + 4096,
            "rope_parameters": _LLAMA_ROPE | {"original_max_position_embeddings": 8192},
        },
    ),
    "qwen-32b": Shape(  # Qwen3-32B, with room for an answer after 131,072 tokens
        filter_layer=26,
        config={
            "vocab_size": 151936,
            "hidden_size": 5120,
            "intermediate_size": 25600,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 131072 + 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "qwen-0.5b": Shape(  # Qwen2.5-0.5B; the layer is that of its calibration
        filter_layer=6,
        config={
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "tiny": Shape(
        filter_layer=1,
        config={
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 1024,
            "rope_parameters": _LLAMA_ROPE | {"original_max_position_embeddings": 128},
        },
    ),
}
FILTER_LAYER = SHAPES["small"].filter_layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way of serving: fields of `EngineConfig`, and the filter methods that it is about."""

    engine: Mapping[str, Any] = field(default_factory=dict)
    methods: tuple[str, ...] | None = None  # None: all
    needs_cuda: bool = False

    def find_obstacle(self, device: str) -> str | None:
        """Return why it cannot be measured here, or None."""
        unknown = sorted(set(self.engine) - {known.name for known in fields(EngineConfig)})
        if unknown:
            return f"skipped: not available: EngineConfig has no {', '.join(unknown)}"
        if self.needs_cuda and device != "cuda":
            return "skipped: not available: needs a CUDA device"
        return None


VARIANTS = {
    "default": Variant(),
    "eager": Variant(engine={"cuda_graphs": "off"}, needs_cuda=True),
    "fp8 filter": Variant(engine={"filter_precision": "fp8"}, methods=("sieve",), needs_cuda=True),
    "fp8 windows": Variant(
        engine={"filter_precision": "fp8"}, methods=("windows",), needs_cuda=True
    ),
}


class NoText:
    """A tokenizer for random weights: one word a token, nothing that stops."""

    def __init__(self, vocab_size: int) -> None:
        from tokenizers import Tokenizer, decoders, models

        words = {f"t{i} ": i for i in range(vocab_size)}
        self.backend_tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0 "))
        self.backend_tokenizer.decoder = decoders.Fuse()


def add_shape_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="small", help="default: %(default)s")


def add_variants_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--variants", default="default", help=f"of {', '.join(VARIANTS)} (default: %(default)s)"
    )


def add_dtype_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype",
        type=_dtype,
        metavar="{float32,bfloat16}",
        help="of weights and KV cache (default: float32 on a CPU, bfloat16 on a GPU)",
    )


def _dtype(name: str) -> torch.dtype:
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in dtypes:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(dtypes)}")
    return dtypes[name]


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """The options of benchmarks that read prompts."""
    parser.add_argument(
        "--warm-up-tokens", type=int, default=2048, help="of a first prompt (%(default)s)"
    )
    parser.add_argument("--chunk-tokens", default="", help="at most, of one pass over a prompt")


def random_llama(
    device: str, *, seed: int = 0, shape: str = "small", dtype: torch.dtype | None = None
) -> Any:
    """A transformers model with random weights, made on the device.

    `dtype`: float32 on a CPU and bfloat16 on a GPU if not given.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(**SHAPES[shape].config)
    dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)


def twin(model: Any) -> Any:
    """The same weights under transformers' own SDPA attention."""
    config = type(model.config).from_dict(model.config.to_dict())
    with torch.device("meta"):
        other = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    other.load_state_dict(model.state_dict(), assign=True)
    other.tie_weights()
    other.model.rotary_emb = model.model.rotary_emb
    return other.eval().requires_grad_(False)


def build_core(
    model: Any, *, shape: str = "small", variant: str = "default", **settings: Any
) -> Core:
    """An engine core over `model` that filters every prompt it is asked to."""
    given: dict[str, Any] = {"filter_min_tokens": 0, "filter_layer": SHAPES[shape].filter_layer}
    given |= {"cache_memory": 0.0}  # the same prompt is timed again and again
    given |= {"prompt_lookup": "off"}  # small models repeat themselves
    config = EngineConfig(**given | {"calibrate": "off"} | settings | VARIANTS[variant].engine)
    loaded = LoadedModel(
        model=CausalModel(model),
        tokenizer=NoText(model.config.vocab_size),
        eos_ids=frozenset(),
        source="random weights",
        name="random weights",
    )
    return assemble(loaded, config)


def served_labels(core: Core, variant: str) -> dict[str, str]:
    """How an engine core serves: the variant, and what the engine has chosen by itself."""
    graphs = "on" if core.has_graphs else "off"
    name = core.model.backend.name
    return {
        "variant": variant,
        "dtype": dtype_name(core),
        "attention_backend": name,
        "cuda_graphs": graphs,
    }


def dtype_name(core: Core) -> str:
    """Of the weights: "float32" or "bfloat16"."""
    return str(core.model.hf.dtype).removeprefix("torch.")


def pool_bytes(wanted: int, device: str) -> int:
    """Bytes for a KV pool: those wanted, or most of what a GPU has left."""
    if device != "cuda":
        return wanted
    return min(wanted, int(_MEMORY_SHARE * torch.cuda.mem_get_info()[0]))


def request_bytes(
    shape: Any,
    method: Any,
    tokens: int,
    new: int,
    keep: int,
    layer: int,
    segment_size: int | None = None,
) -> int:
    """KV bytes that one request holds at its peak. `shape`: the model's `ModelShape`."""
    if method == "none":
        return int(shape.kept_bytes(tokens + new))
    reading = reading_bytes(shape, method, tokens, layer, segment_size)
    return int(max(reading, shape.kept_bytes(keep + new)))


def random_ids(count: int, vocab_size: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (count,), generator=generator).tolist()


def request(
    ids: list[int],
    method: FilterMethod,
    keep: int,
    max_tokens: int,
    *,
    selects_only: bool = False,
    segment_size: SegmentSize = "off",
) -> Request:
    return Request(
        request_id="benchmark",
        prompt_ids=ids,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        filter=FilterParams(method=method, keep=keep, window=segment_size),
        selects_only=selects_only,
    )


def time_request(core: Core, asked: Request, device: str) -> dict[str, Any]:
    """Run one request alone. Return the seconds to its tokens, and the memory it took."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    drawn_s: list[float] = []
    ended: Finished | None = None
    results.synchronize(device)
    started_s = time.perf_counter()
    for event in core.run_alone(asked):
        if isinstance(event, TextDelta):
            results.synchronize(device)
            drawn_s.append(time.perf_counter() - started_s)
        elif isinstance(event, Finished):
            ended = event
    results.synchronize(device)
    total_s = time.perf_counter() - started_s
    if ended is None or ended.error is not None:
        raise RuntimeError(f"the request ended with {ended and ended.error}")
    gaps_s = [later - earlier for earlier, later in pairwise(drawn_s)]
    return {
        "ttft_s": drawn_s[0] if drawn_s else None,
        "total_s": total_s,
        "generation_s": drawn_s[-1] - drawn_s[0] if gaps_s else None,
        "step_s": statistics.median(gaps_s) if gaps_s else None,
        "peak_kv_bytes": ended.peak_kv_bytes,
        "decode_kv_bytes": ended.decode_kv_bytes,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
    }
