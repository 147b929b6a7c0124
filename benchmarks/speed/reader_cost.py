"""What share of reading a prompt whole is left, if the model itself or a small reader looks first?

Floating-point operations by the cost model: the looking model's lower layers over the prompt in
windows, and all layers of the model that answers over what is kept. Shapes are those of published
models; layers are those that the calibrations of these or of like models chose.

    python benchmarks/speed/reader_cost.py --json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

from benchmarks.shared import results
from gemserve.calibration.files import Calibration
from gemserve.cost import ModelShape
from gemserve.filtering.method_cost import prompt_flops

LENGTHS = (32_768, 131_072, 1_048_576)
KEEP = 1024


def dense(
    layers: int, heads: int, kv_heads: int, head_dim: int, hidden: int, mlp: int, vocab: int
) -> ModelShape:
    """A decoder with gated MLPs of `mlp` numbers, those that a token goes through."""
    qkv = hidden * head_dim * (heads + 2 * kv_heads)
    return ModelShape(
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=hidden,
        vocab_size=vocab,
        layer_params=qkv + heads * head_dim * hidden + 3 * hidden * mlp,
        qkv_params=qkv,
        element_bytes=2,
    )


# a shape, and the layer that looks: measured for the first two, else two fifths of the depth
MODELS = {
    "Qwen2.5 0.5B": (dense(24, 14, 2, 64, 896, 4864, 151_936), 6),
    "Qwen2.5 1.5B": (dense(28, 12, 2, 128, 1536, 8960, 151_936), 11),
    "Llama 3.1 8B": (dense(32, 32, 8, 128, 4096, 14_336, 128_256), 13),
    "Qwen2.5 32B": (dense(64, 40, 8, 128, 5120, 27_648, 152_064), 26),
    "Llama 3.1 70B": (dense(80, 64, 8, 128, 8192, 28_672, 128_256), 32),
    # eight experts of 768 numbers for each token
    "Qwen3 30B-A3B": (dense(48, 32, 4, 128, 2048, 8 * 768, 151_936), 19),
}
READERS = ("Qwen2.5 0.5B", "Qwen2.5 1.5B")


def looking(shape: ModelShape, layer: int, length: int) -> float:
    """FLOPs of the passes over segments, without what is kept."""
    segment_size = Calibration.USUAL_SEGMENT
    kept = shape.prefill_chunk(0, KEEP) + shape.head()
    return prompt_flops(shape, "sieve", length, KEEP, layer, segment_size) - kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="only the result line")
    arguments = parser.parse_args()
    rows = []
    for name, (shape, layer) in MODELS.items():
        for length in LENGTHS:
            whole = prompt_flops(shape, "none", length, KEEP, 0)
            kept = shape.prefill_chunk(0, KEEP) + shape.head()
            row = {"answers": name, "tokens": length}
            ways = {"itself": (shape, layer)} | {reader: MODELS[reader] for reader in READERS}
            for way, (reading, depth) in ways.items():
                row[way] = round((looking(reading, depth, length) + kept) / whole, 4)
            rows.append(row)
    results.finish("reader_cost", "cost model", rows, arguments.json)


if __name__ == "__main__":
    main()
