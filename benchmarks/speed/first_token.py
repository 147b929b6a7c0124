"""Time to the first token of one real model, whole and filtered, without a server.

    python benchmarks/speed/first_token.py --model BIG.gguf --reader SMALL.gguf \\
        --lengths 1024,4096 --ways 'none,self={"reader":"self"},reader={"reader":"reader"}'

Prompts are prose with a question behind it, of about so many tokens. All ways read a prompt before
the next one comes, and none finds what another one has left in the document cache. A *way* is a
name with the filter options of a request, as in `benchmarks/quality/answer_cases.py`, whose methods
outside of the engine are here, too: `bm25`, and `draft` with `--draft MODEL`. With `--picture FILE`
the times are drawn over the lengths.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from time import monotonic
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

from benchmarks.quality.answer_cases import OUTSIDE, Way, choose_outside, read_ways
from benchmarks.quality.draft_attention import DraftAttention
from benchmarks.shared import results
from benchmarks.shared.timed_answers import TimedAnswer, answer
from gemserve.calibration.search.example import Example
from gemserve.config import EngineConfig, ModelConfig
from gemserve.llm import LLM
from gemserve.prompting.prompt import Prompt
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


def first_token(llm: LLM, prompt: Prompt, way: Way, tenant: str) -> tuple[float, TimedAnswer]:
    """Seconds until something outside of the engine has chosen, and the answer from then on."""
    if way.method not in OUTSIDE:
        return 0.0, answer(llm.core, prompt, way.options, 1, tenant)
    example = Example(
        subtask="first token",
        num_tokens=len(prompt.ids),
        index=0,
        prompt=prompt,
        question=QUESTION.strip(),
        answers=(),
    )
    started_s = monotonic()
    positions = choose_outside(llm, example, way)
    taken_s = monotonic() - started_s
    kept = Prompt([prompt.ids[position] for position in positions], ())
    return taken_s, answer(llm.core, kept, way.options, 1, tenant)


def draw(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Seconds to the first token over the prompt's length, a line for each way."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    drawing, axis = plt.subplots(figsize=(7, 4.2))
    for way in dict.fromkeys(row["way"] for row in rows):
        some = [row for row in rows if row["way"] == way]
        axis.plot([r["tokens"] for r in some], [r["ttft_s"] for r in some], "o-", label=way)
    axis.set(xscale="log", yscale="log", xlabel="tokens of the prompt")
    axis.set_ylabel("seconds to the first token")
    axis.grid(visible=True, which="both", alpha=0.2)
    axis.legend(fontsize=8)
    axis.set_title(title, fontsize=8)
    drawing.tight_layout()
    drawing.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="default: %(default)s")
    parser.add_argument("--reader", help="a model that reads for it")
    parser.add_argument("--draft", help="a model whose answer's attention chooses")
    parser.add_argument("--lengths", type=results.numbers, default=[1024, 4096])
    parser.add_argument("--ways", default="none,default", help="default: %(default)s")
    parser.add_argument("--weights", default="auto", help="auto,dense (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--picture", type=Path, help="a file for the picture")
    parser.add_argument("--title", default="", help="of the picture")
    parser.add_argument("--json", action="store_true", help="only the result line")
    arguments = parser.parse_args()
    if arguments.draft is not None:
        OUTSIDE["draft"] = DraftAttention(arguments.draft)
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
            first_token(llm, warm, way, f"warm {way.name}")
    rounds = product(arguments.lengths, range(arguments.repeats), ways, llms.items())
    for length, repeat, way, (weights, llm) in rounds:
        results.note(f"{length} tokens, {way.name}, weights {weights}")
        prompt = llm.prompt(text_of(llm, length))
        chosen_s, made = first_token(llm, prompt, way, f"{length} {way.name} {repeat}")
        row = {
            "tokens": len(prompt.ids),
            "way": way.name,
            "weights": weights,
            "ttft_s": round(chosen_s + (made.ttft_s or made.total_s), 2),
            "choose_s": round(chosen_s + made.choose_s, 2),
            "kept": made.report.kept_tokens,
            "reason": made.report.reason,
            "windows": made.report.windows,
            "reader": made.report.reader,
        }
        if not arguments.json:
            print(row, flush=True)
        rows.append(row)
    if arguments.picture is not None:
        draw(rows, arguments.title, arguments.picture)
    results.finish("first_token", "cpu", rows, arguments.json)


if __name__ == "__main__":
    main()
