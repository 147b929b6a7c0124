"""A large model of random 4-bit blocks: does it load here, in what memory, how fast is it?

    python benchmarks/speed/random_model.py --folder /tmp/random --size 8b

A GGUF file with the shape of a known model is written to the folder, unless it is there. Its blocks
are random, so that its answers are nonsense; times and memory do not depend on the numbers.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

from benchmarks.shared import harness, peak_memory, results
from benchmarks.shared.timed_answers import answer
from gemserve.config import EngineConfig, ModelConfig
from gemserve.contract.filter_options import FilterOptions
from gemserve.engine.build import build_core
from gemserve.prompting.prompt import Prompt
from tests.model.gguf_files import add_tokenizer

# hidden size, inner size, layers, heads, key heads, vocabulary
SHAPES = {
    "tiny": (256, 512, 2, 4, 2, 4096),
    "tiny-moe": (256, 256, 2, 4, 2, 4096),
    "1.5b": (1536, 8960, 28, 12, 2, 151936),
    "7b-a1b": (2048, 1024, 16, 16, 16, 50304),
    "8b": (4096, 14336, 32, 32, 8, 128256),
    "30b-a3b": (2048, 768, 48, 32, 4, 151936),
}
EXPERTS = {"tiny-moe": (4, 2), "7b-a1b": (64, 8), "30b-a3b": (128, 8)}  # and how many are chosen
_EMBEDDING, _MATRIX = GGMLQuantizationType.Q6_K, GGMLQuantizationType.Q4_K
_BLOCK_BYTES = {_MATRIX: 144, _EMBEDDING: 210}
# bytes of a block's float16 factors, and factors that make weights of about 0.02
_FACTORS = {_MATRIX: ((0, 8e-5), (2, 6e-4)), _EMBEDDING: ((208, 2e-5),)}


def write(path: Path, size: str) -> None:
    hidden, inner, layers, heads, key_heads, vocab = SHAPES[size]
    keys = hidden // heads * key_heads
    rng = np.random.default_rng(0)
    experts, chosen = EXPERTS.get(size, (0, 0))
    writer = GGUFWriter(str(path), "qwen3moe" if experts else "llama")
    writer.add_context_length(32768)
    writer.add_block_count(layers)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_key_length(hidden // heads)
    writer.add_vocab_size(vocab)
    add_tokenizer(writer, vocab)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(chosen)
        writer.add_expert_feed_forward_length(inner)
    mark = "_exps" if experts else ""
    sizes = {
        "attn_q": (hidden, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, hidden),
        f"ffn_gate{mark}": (inner, hidden),
        f"ffn_up{mark}": (inner, hidden),
        f"ffn_down{mark}": (hidden, inner),
    }
    drawn: dict[tuple[int, ...], Any] = {}  # layers share their numbers, which says nothing here
    for name in ("token_embd", "output"):
        writer.add_tensor(
            f"{name}.weight", _draw(rng, _EMBEDDING, vocab, hidden), raw_dtype=_EMBEDDING
        )
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for layer in range(layers):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(hidden, np.float32))
        for name, shape in sizes.items():
            many = (experts,) if name.endswith("_exps") else ()
            if (*many, *shape) not in drawn:
                raw = _draw(rng, _MATRIX, *shape)
                drawn[*many, *shape] = np.broadcast_to(raw, (*many, *raw.shape)).copy()
            made = drawn[*many, *shape]
            writer.add_tensor(f"blk.{layer}.{name}.weight", made, raw_dtype=_MATRIX)
        if experts:
            for name in ("attn_q_norm", "attn_k_norm"):
                ones = np.ones(hidden // heads, np.float32)
                writer.add_tensor(f"blk.{layer}.{name}.weight", ones)
            router = rng.normal(0, 0.02, (experts, hidden)).astype(np.float32)
            writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", router)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _draw(rng: Any, kind: GGMLQuantizationType, outs: int, ins: int) -> Any:
    blocks = outs * ins // 256
    raw = rng.integers(0, 256, (blocks, _BLOCK_BYTES[kind]), dtype=np.uint8)
    for place, size in _FACTORS[kind]:
        factors = (rng.uniform(0.5, 1.5, blocks) * size).astype(np.float16)
        raw[:, place : place + 2] = factors.view(np.uint8).reshape(-1, 2)
    return raw.reshape(outs, -1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="for the file")
    parser.add_argument("--size", default="8b", choices=SHAPES)
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=32, help="drawn; default: %(default)s")
    parser.add_argument("--weights", default="auto", help="as of `serve` (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="only the result line")
    arguments = parser.parse_args()
    path = arguments.folder / f"{arguments.size}.gguf"
    if not path.exists():
        results.note(f"{path} is written")
        arguments.folder.mkdir(parents=True, exist_ok=True)
        write(path, arguments.size)
    started_s = time.monotonic()
    settings = EngineConfig(calibrate="off", kv_memory_bytes=1 << 30)
    config = ModelConfig(model=str(path), device="cpu", weights=arguments.weights)
    core = build_core(config, settings)
    start_s = time.monotonic() - started_s
    ids = harness.random_ids(arguments.prompt_tokens, core.model.vocab_size, 0)
    made = answer(core, Prompt(ids, ()), FilterOptions(method="none"), arguments.tokens)
    assert made.ttft_s is not None
    most = peak_memory.peak()
    row = {
        "size": arguments.size,
        "weights": arguments.weights,
        "file_mb": path.stat().st_size // 10**6,
        "start_s": round(start_s, 1),
        "resident_mb": peak_memory.mark() // 10**6,
        "most_resident_mb": most // 10**6,
        "ttft_s": round(made.ttft_s, 1),
        "tokens_per_s": round((arguments.tokens - 1) / (made.total_s - made.ttft_s), 2),
    }
    results.finish("random_model", "cpu", [row], arguments.json)


if __name__ == "__main__":
    main()
