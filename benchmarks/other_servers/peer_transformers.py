"""Questions about documents on transformers' continuous batching with shared prefix blocks.

`peers.py` runs it, with a JSON file that holds a list of prompts for each document:

    python benchmarks/other_servers/peer_transformers.py PROMPTS.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

import psutil
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from benchmarks.other_servers.peer_servers import SMOLLM2
from gemserve.config import ModelConfig
from gemserve.model.loading.checkpoint import open_checkpoint

_PAGE_TOKENS = 256  # the default; only whole pages are shared
_CHUNK_TOKENS = 512
_ANSWER_TOKENS = 4
Seen = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--attention", default="sdpa", choices=("sdpa", "paged|eager"))
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--tokens", type=int, default=16_384, help="that there is memory for")
    arguments = parser.parse_args()
    checkpoint = open_checkpoint(ModelConfig(model=arguments.model))
    tokenizer = checkpoint.load_tokenizer()
    model = checkpoint.load_weights(torch.float32).eval()
    model.set_attn_implementation(arguments.attention)
    documents: list[list[str]] = json.loads(arguments.prompts.read_text())
    rows: list[list[Seen]] = []
    settings = ContinuousBatchingConfig(
        page_size=_PAGE_TOKENS,
        num_blocks=arguments.tokens // _PAGE_TOKENS,
        max_batch_tokens=_CHUNK_TOKENS,
        allow_block_sharing=True,
        use_cuda_graph=False,
        use_async_batching=False,
        auto_switch_to_flash=False,
    )
    drawing = GenerationConfig(max_new_tokens=_ANSWER_TOKENS, do_sample=False, eos_token_id=-1)
    with model.continuous_batching_context_manager(
        generation_config=drawing, continuous_batching_config=settings, warmup=False
    ) as manager:
        _ask(manager, tokenizer, "Say hello. " * 100)
        for prompts in documents:
            before = psutil.Process().memory_info().rss
            asked = [_ask(manager, tokenizer, prompt) for prompt in prompts]
            resident = psutil.Process().memory_info().rss
            memory = {"resident_bytes": resident, "resident_growth": resident - before}
            asked[-1]["memory"] = memory
            rows.append(asked)
    print(json.dumps(rows))


def _ask(manager: Any, tokenizer: Any, prompt: str) -> Seen:
    """One request alone, and the seconds until its first token arrives here."""
    message = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    began_s = time.perf_counter()
    name = manager.add_request(ids, max_new_tokens=_ANSWER_TOKENS, streaming=True, eos_token_id=-1)
    seen: Seen = {"prompt_tokens": len(ids), "cached_tokens": None}
    while True:
        result = manager.get_result(name, timeout=1)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("the generation thread has ended")
            continue
        if result.error is not None:
            raise RuntimeError(result.error)
        if result.generated_tokens:
            seen.setdefault("ttft_s", time.perf_counter() - began_s)
        if result.is_finished():
            return seen


if __name__ == "__main__":
    main()
