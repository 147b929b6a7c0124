"""What products with weights in blocks change: a model's logits beside those of float32.

    python benchmarks/quality/weights_in_blocks.py --model MODEL.gguf
    python benchmarks/quality/weights_in_blocks.py --model FOLDER \\
        --ways 'int8 bfloat16,int4 bfloat16'

Each way reads the same texts, passages of Python's language reference. Against the dequantised
model in float32 are reported the mean and the largest Kullback-Leibler divergence of a token's
distribution, and for how many tokens the likeliest next one is the same. bfloat16 with ordinary
weights is the scale: what rounding the arithmetic costs without blocks.
"""

from __future__ import annotations

import argparse
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

from benchmarks.quality.answer_cases import draw_prose
from benchmarks.shared import results
from gemserve.config import ModelConfig
from gemserve.model.loading.loader import load

WAYS: dict[str, dict[str, Any]] = {
    "dense float32": {"weights": "dense", "dtype": "float32"},
    "dense bfloat16": {"weights": "dense", "dtype": "bfloat16"},
    "blocks float32": {"weights": "auto", "dtype": "float32"},
    "blocks bfloat16": {"weights": "auto", "dtype": "bfloat16"},
    "int8 bfloat16": {"quantise": "int8", "dtype": "bfloat16"},
    "int4 bfloat16": {"quantise": "int4", "dtype": "bfloat16"},
}
_SENTENCES = 60  # more than a text has tokens for


@torch.inference_mode()
def distributions(model: str, way: str, texts: int, tokens: int) -> list[torch.Tensor]:
    """For each text, the logarithms of all probabilities [tokens, vocab], float16."""
    loaded = load(ModelConfig(model=model, device="cpu", **WAYS[way]))
    found = []
    for index in range(texts):
        text = " ".join(islice(draw_prose(f"text {index}"), _SENTENCES))
        ids = loaded.tokenizer(text)["input_ids"][:tokens]
        with loaded.model.attention_named("eager"):
            read = loaded.model.runnable()(input_ids=torch.tensor([ids]), use_cache=False)
        found.append(torch.log_softmax(read.logits[0].float(), dim=-1).half())
        results.note(f"{way}: text {index + 1} of {texts}")
    return found


def compare(found: list[torch.Tensor], exact: list[torch.Tensor]) -> dict[str, float]:
    pairs = [(e.float(), f.float()) for e, f in zip(exact, found, strict=True)]
    lost = torch.cat([(e.exp() * (e - f)).sum(-1) for e, f in pairs])
    same = torch.cat([(e.argmax(-1) == f.argmax(-1)).float() for e, f in pairs])
    return {
        "tokens": len(lost),
        "kl_mean": round(float(lost.mean()), 5),
        "kl_most": round(float(lost.max()), 3),
        "same_first": round(float(same.mean()), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="default: %(default)s")
    parser.add_argument("--texts", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=256, help="of a text; default: %(default)s")
    parser.add_argument(
        "--ways", default="dense bfloat16,blocks float32,blocks bfloat16", help="%(default)s"
    )
    parser.add_argument("--json", action="store_true", help="only the result line")
    arguments = parser.parse_args()
    exact = distributions(arguments.model, "dense float32", arguments.texts, arguments.tokens)
    rows = []
    for way in arguments.ways.split(","):
        if way not in WAYS:
            raise SystemExit(f"--ways: {way!r} must be among {', '.join(WAYS)}")
        found = distributions(arguments.model, way, arguments.texts, arguments.tokens)
        rows.append({"way": way} | compare(found, exact))
    results.finish("weights_in_blocks", "cpu", rows, arguments.json)


if __name__ == "__main__":
    main()
