"""Time to first token of further questions about a document, with and without the document cache.

Questions are asked one after the other, then the turns of a conversation, then some questions with
prompts that are read whole, then all questions at once about a changed document. Both engines have
the same weights. Answers and choices of the first `--compared` questions and turns, and of the last
of each, are compared with those of the engine without a cache.

    python benchmarks/cache.py --model smollm2 --tokens 7000 --keep 512
    python benchmarks/cache.py --model random --tokens 32768 --keep 1024 --compared 2
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository root

from benchmarks.shared import harness, results
from gemserve.config import EngineConfig
from gemserve.contract.events import Filtered, TextDelta
from gemserve.contract.filter_options import FilterMethod, FilterParams
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.core import Core
from gemserve.llm import LLM
from gemserve.prompting.prompt import chat_prompt
from gemserve.synthetic.prose import stdlib_sentences

THINGS = (
    "violin",
    "lantern",
    "ladder",
    "compass",
    "kettle",
    "map",
    "anchor",
    "mirror",
    "drum",
    "key",
)
WHOLE = "question read whole"
Seen = dict[str, Any]
_LOAD = os.getloadavg()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2", help="or random: the benchmark model")
    parser.add_argument("--tokens", type=int, default=7000, help="of the document")
    parser.add_argument("--keep", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=8, help="of an answer")
    parser.add_argument(
        "--whole", type=int, default=3, help="questions to ask of prompts that are read whole"
    )
    parser.add_argument(
        "--compared", type=int, default=10, help="answers to compare with a cold engine's"
    )
    results.add_common(parser)
    arguments = parser.parse_args()
    warm, cold, questions, turns = _prepared(arguments)
    rows: list[Seen] = []
    whole = questions[: arguments.whole]
    for name, prompts in (("question", questions), ("turn", turns), (WHOLE, whole)):
        if len(prompts) < 2:
            continue
        asked = [
            _asked(name, number, ids, warm, cold, arguments)
            for number, ids in enumerate(prompts, 1)
        ]
        plural = "questions read whole" if name == WHOLE else f"{name}s"
        rows += [*asked, _summary(plural, asked)]
        if name == "question":
            rows.append(_memory(warm, len(questions[0])))
    rows.append(_at_once(questions, arguments, warm))
    rows.append({"summary": "load average", "before_and_after": [_LOAD, os.getloadavg()]})
    results.finish("cache", arguments.device, rows, arguments.json)


def _prepared(arguments: argparse.Namespace) -> tuple[Core, Core, list[list[int]], list[list[int]]]:
    """An engine with a cache, one without, ten prompts about a document, and ten turns about it."""
    settings: dict[str, Any] = {"filter_min_tokens": 0, "kv_memory_bytes": 6 << 30}
    if arguments.model == "random":
        model = harness.random_llama(arguments.device)
        warm, cold = (
            harness.build_core(model, kv_memory_bytes=6 << 30, cache_memory=share)
            for share in (0.5, 0.0)
        )
        size = model.config.vocab_size
        document = harness.random_ids(arguments.tokens, size, 0)
        questions = [document + harness.random_ids(24, size, seed) for seed in range(1, 11)]
        turns = [document + harness.random_ids(60 * turn, size, 99) for turn in range(1, 11)]
        return warm, cold, questions, turns
    llm = LLM(arguments.model, EngineConfig(**settings, cache_memory=0.5))
    other = LLM(arguments.model, EngineConfig(**settings, cache_memory=0.0))
    text = _document(llm, arguments.tokens)
    asked = [f"Where is the {thing} kept?" for thing in THINGS]
    first = [{"role": "user", "content": f"{text}\n\n{question}"} for question in asked]
    questions = [list(chat_prompt(llm.tokenizer, [message]).ids) for message in first]
    history: list[Any] = []
    turns = []
    for message, question in zip(first, asked, strict=True):
        said = message if not history else {"role": "user", "content": question}
        history.append(said)
        turns.append(list(chat_prompt(llm.tokenizer, history).ids))
        history.append({"role": "assistant", "content": "The text does not say."})
    return llm.core, other.core, questions, turns


def _document(llm: LLM, num_tokens: int) -> str:
    """Sentences of the standard library's documentation, about `num_tokens` tokens."""
    sentences = stdlib_sentences()
    text = " ".join(sentences[: num_tokens // 8])
    encoded = llm.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ends = [high for _, high in encoded["offset_mapping"]]
    return text[: ends[min(num_tokens, len(ends)) - 1]]


def _request(
    ids: Sequence[int], arguments: argparse.Namespace, method: FilterMethod = "sieve"
) -> Request:
    question = (len(ids) - 24, len(ids))
    return Request(
        request_id="benchmark",
        prompt_ids=ids,
        sampling=SamplingParams(max_tokens=arguments.max_tokens, temperature=0.0, ignore_eos=True),
        filter=FilterParams(method=method, keep=arguments.keep, return_selection=True),
        question=(question,),
    )


def _answer(
    core: Core, ids: Sequence[int], arguments: argparse.Namespace, method: FilterMethod
) -> Seen:
    """One request alone: its time to first token, and all that must not depend on a cache."""
    seen: Seen = {"ttft_s": None, "cached": 0, "answer": []}
    started_s = time.perf_counter()
    for event in core.run_alone(_request(ids, arguments, method)):
        if isinstance(event, Filtered):
            seen["cached"] = event.report.cached_tokens
            seen["answer"].append(event.report.selection)
        elif isinstance(event, TextDelta):
            seen["ttft_s"] = seen["ttft_s"] or time.perf_counter() - started_s
            seen["answer"] += event.token_ids
    return seen


def _asked(
    name: str,
    number: int,
    ids: list[int],
    warm: Core,
    cold: Core,
    arguments: argparse.Namespace,
) -> Seen:
    """The row of one question or turn, and its answer beside a cold engine's if that is wanted."""
    results.note(f"{name} {number}")
    method: FilterMethod = "none" if name == WHOLE else "sieve"
    seen = _answer(warm, ids, arguments, method)
    row: Seen = {name: number, "prompt_tokens": len(ids), "cached_tokens": seen["cached"]}
    row |= {"ttft_s": seen["ttft_s"], "cold_ttft_s": None, "same_answer": None}
    if number <= arguments.compared or number == len(THINGS):
        expected = _answer(cold, ids, arguments, method)
        row["cold_ttft_s"] = expected["ttft_s"]
        row["same_answer"] = seen["answer"] == expected["answer"]
    if not arguments.json:
        print(row, flush=True)
    return row


def _summary(name: str, asked: list[Seen]) -> Seen:
    """The first, and the median of the later ones."""
    first_s = asked[0]["ttft_s"]
    later_s = statistics.median(row["ttft_s"] for row in asked[1:])
    cold_s = [row["cold_ttft_s"] for row in asked if row["cold_ttft_s"] is not None]
    return {
        "summary": name,
        "first_s": first_s,
        "later_s": later_s,
        "last_s": asked[-1]["ttft_s"],
        "cold_s": statistics.median(cold_s),
        "first_to_later": first_s / later_s,
        "cold_to_later": statistics.median(cold_s) / later_s,
        "compared": len(cold_s),
        "same_answers": sum(row["same_answer"] is True for row in asked),
    }


def _memory(core: Core, num_tokens: int) -> Seen:
    """What the cache holds of one document, beside the plan and a cache of all layers."""
    shape, layer = core.model.shape, core.calibration.layer
    held = round(core.cache_usage_ratio * core.num_units) * shape.unit_bytes
    whole = shape.kept_bytes(num_tokens)
    return {
        "summary": "memory",
        "cache_bytes": held,
        "planned_bytes": shape.filter_bytes(num_tokens, layer),
        "all_layers_bytes": whole,
        "of_all_layers": held / whole,
        "r_of_m": layer / shape.num_layers,
    }


def _at_once(prompts: list[list[int]], arguments: argparse.Namespace, core: Core) -> Seen:
    """All questions at once, about a document that the cache does not know."""
    results.note("all at once")
    changed = [[*ids[:1], ids[1] + 1, *ids[2:]] for ids in prompts]
    read = core.cache_counts.query_tokens - core.cache_counts.hit_tokens
    most_held, started_s = 0, time.perf_counter()
    for ids in changed:
        core.add(_request(ids, arguments))
    while not core.is_idle:
        core.step()
        most_held = max(most_held, core.kv_bytes_used)
    seconds = time.perf_counter() - started_s
    read = core.cache_counts.query_tokens - core.cache_counts.hit_tokens - read
    return {
        "summary": f"{len(prompts)} at once",
        "total_s": seconds,
        "tokens_filtered": read,
        "tokens_sent": sum(map(len, prompts)),
        "passes": read / len(prompts[0]),
        "most_kv_bytes": most_held,  # of requests, besides what only the cache owns
    }


if __name__ == "__main__":
    main()
