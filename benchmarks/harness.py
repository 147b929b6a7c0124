"""What the benchmark scripts share: the default model, one result line, progress."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig

import gemserve
from gemserve.calibration import Calibration
from gemserve.config import EngineConfig, resolve_engine
from gemserve.engine.core import Core
from gemserve.model.causal import CausalModel

FILTER_LAYER = 4


class NoText:
    """A tokenizer for random weights: one word a token, nothing that stops."""

    def __init__(self, vocab_size: int) -> None:
        from tokenizers import Tokenizer, decoders, models

        words = {f"t{i} ": i for i in range(vocab_size)}
        self.backend_tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0 "))
        self.backend_tokenizer.decoder = decoders.Fuse()


def random_llama(device: str, *, seed: int = 0) -> Any:
    """16 layers, hidden size 512, 8 query and 2 key heads, random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=16,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.to(device).eval().requires_grad_(False)


def twin(model: Any) -> Any:
    """The same weights under transformers' own SDPA attention."""
    config = type(model.config).from_dict(model.config.to_dict())
    with torch.device("meta"):
        other = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    other.load_state_dict(model.state_dict(), assign=True)
    other.tie_weights()
    other.model.rotary_emb = model.model.rotary_emb
    return other.eval().requires_grad_(False)


def build_core(model: Any, **settings: Any) -> Core:
    """An engine core over `model` that filters every prompt it is asked to."""
    causal = CausalModel(model)
    config = resolve_engine(
        EngineConfig(filter_min_tokens=0, filter_layer=FILTER_LAYER, **settings),
        Calibration(layer=FILTER_LAYER),
        num_layers=causal.num_layers,
        context_tokens=causal.context_tokens,
    )
    return Core(causal, NoText(model.config.vocab_size), config, eos_ids=frozenset())


def random_ids(count: int, vocab_size: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (count,), generator=generator).tolist()


def add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="only the result line")


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def note(text: str) -> None:
    """Progress, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def finish(name: str, device: str, rows: Sequence[dict[str, Any]], quiet: bool) -> None:
    """Print a table for people and, last, one JSON object for programs."""
    note("")
    if not quiet and rows:
        columns = list(dict.fromkeys(key for row in rows for key in row))
        cells = [columns, *([_cell(row.get(c)) for c in columns] for row in rows)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
        for line in cells:
            print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    result = {
        "benchmark": name,
        "device": torch.cuda.get_device_name() if device == "cuda" else _cpu_name(),
        "commit": _commit(),
        "versions": {
            "gemserve": gemserve.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "rows": list(rows),
    }
    print(json.dumps(result))


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cpu_name() -> str:
    return f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"


def _commit() -> str:
    root = Path(__file__).parent.parent
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
