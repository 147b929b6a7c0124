"""Time to the first token of one real model, whole and filtered, without a server.

    python benchmarks/speed/first_token.py --model BIG.gguf --reader SMALL.gguf \\
        --lengths 1024,4096 --ways 'none,self={"reader":"self"},reader={"reader":"reader"}'

Prompts are prose with a question behind it, of about so many tokens. All ways read a prompt before
the next one comes, and none finds what another one has left in the document cache. A *way* is a
name with the filter options of a request, as in `benchmarks/quality/answer_cases.py`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

from benchmarks.quality.answer_cases import read_ways
from benchmarks.shared import results
from benchmarks.shared.timed_answers import answer
from gemserve.config import EngineConfig, ModelConfig
from gemserve.llm import LLM
from gemserve.synthetic.prose import topics_sentences

QUESTION = "\n\nWho may stop a running task?"


def text_of(llm: LLM, num_tokens: int) -> str:
    """Prose of so many tokens, with the question behind it."""
    encode = llm.tokenizer.backend_tokenizer.encode
    taken, left = [], num_tokens
    for sentence in cycle(topics_sentences()):
        left -= len(encode(f" {sentence}", add_special_tokens=False).ids)
        if left < 0:
            break
        taken.append(sentence)
    return " ".join(taken) + QUESTION


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="default: %(default)s")
    parser.add_argument("--reader", help="a model that reads for it")
    parser.add_argument("--lengths", type=results.numbers, default=[1024, 4096])
    parser.add_argument("--ways", default="none,default", help="default: %(default)s")
    parser.add_argument("--weights", default="auto", help="auto,dense (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="only the result line")
    arguments = parser.parse_args()
    settings = EngineConfig(filter_min_tokens=512, kv_memory_bytes=3 << 30, cache_memory=0.0)
    engine = replace(settings, reader=arguments.reader)
    llms = {
        weights: LLM(ModelConfig(model=arguments.model, weights=weights), engine)
        for weights in arguments.weights.split(",")
    }
    ways, rows = read_ways(arguments.ways), []
    for llm in llms.values():
        warm = llm.prompt(text_of(llm, 600))
        for way in ways:
            answer(llm.core, warm, way.options, 2, f"warm {way.name}")
    rounds = product(arguments.lengths, range(arguments.repeats), ways, llms.items())
    for length, repeat, way, (weights, llm) in rounds:
        results.note(f"{length} tokens, {way.name}, weights {weights}")
        prompt = llm.prompt(text_of(llm, length))
        made = answer(llm.core, prompt, way.options, 1, f"{length} {way.name} {repeat}")
        row = {
            "tokens": len(prompt.ids),
            "way": way.name,
            "weights": weights,
            "ttft_s": round(made.ttft_s or made.total_s, 2),
            "choose_s": round(made.choose_s, 2),
            "kept": made.report.kept_tokens,
            "reason": made.report.reason,
            "windows": made.report.windows,
            "reader": made.report.reader,
        }
        if not arguments.json:
            print(row, flush=True)
        rows.append(row)
    results.finish("first_token", "cpu", rows, arguments.json)


if __name__ == "__main__":
    main()
