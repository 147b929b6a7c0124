"""Time to first token of further questions about a document, with and without the document cache.

Ten questions are asked one after the other, then all at once, then as the turns of a conversation.
Both engines have the same weights. Every answer is compared with that of the one without a cache.

    python benchmarks/cache.py --model smollm2 --tokens 7000 --keep 512
    python benchmarks/cache.py --model random --tokens 32768
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import harness
import results

from gemserve.config import EngineConfig
from gemserve.engine.core import Core
from gemserve.llm import LLM
from gemserve.prompting.prompt import chat_prompt
from gemserve.synthetic.prose import stdlib_sentences
from gemserve.types import Filtered, FilterParams, Request, SamplingParams, TextDelta

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
Seen = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2", help="or random: the benchmark model")
    parser.add_argument("--tokens", type=int, default=7000, help="of the document")
    parser.add_argument("--keep", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=8, help="of an answer")
    results.add_common(parser)
    arguments = parser.parse_args()
    warm, cold, questions, turns = _prepared(arguments)
    rows = []
    for name, prompts in (("questions", questions), ("turns", turns)):
        pairs = []
        for index, ids in enumerate(prompts):
            results.note(f"{name} {index + 1}")
            pairs.append([_answer(core, ids, arguments) for core in (warm, cold)])
        rows.append(_row(name, pairs))
    held = warm.cache_usage_ratio * warm.config.kv_memory_bytes
    whole = warm.model.shape.kept_bytes(len(questions[0]))
    rows.append({"asked": "memory", "cache_bytes": held, "of_all_layers": held / whole})
    rows.append(_at_once(questions, arguments, warm))
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


def _request(ids: Sequence[int], arguments: argparse.Namespace) -> Request:
    question = (len(ids) - 24, len(ids))
    return Request(
        request_id="benchmark",
        prompt_ids=ids,
        sampling=SamplingParams(max_tokens=arguments.max_tokens, temperature=0.0, ignore_eos=True),
        filter=FilterParams(method="sieve", keep=arguments.keep, return_selection=True),
        question=(question,),
    )


def _answer(core: Core, ids: Sequence[int], arguments: argparse.Namespace) -> Seen:
    """One request alone: its time to first token, and all that must not depend on a cache."""
    seen: Seen = {"ttft_s": None, "cached": 0, "answer": []}
    started_s = time.perf_counter()
    for event in core.run_alone(_request(ids, arguments)):
        if isinstance(event, Filtered):
            seen["cached"] = event.report.cached_tokens
            seen["answer"].append(event.report.selection)
        elif isinstance(event, TextDelta):
            seen["ttft_s"] = seen["ttft_s"] or time.perf_counter() - started_s
            seen["answer"] += event.token_ids
    return seen


def _row(name: str, pairs: list[list[Seen]]) -> Seen:
    """The first of the prompts, and the median of the later ones, with and without a cache."""
    (first, first_cold), *later = pairs
    warm_s = statistics.median(warm["ttft_s"] for warm, _ in later)
    cold_s = statistics.median(cold["ttft_s"] for _, cold in later)
    return {
        "asked": name,
        "first_s": first["ttft_s"],
        "first_cold_s": first_cold["ttft_s"],
        "later_s": warm_s,
        "later_cold_s": cold_s,
        "last_s": later[-1][0]["ttft_s"],
        "first_to_later": first["ttft_s"] / warm_s,
        "cold_to_warm": cold_s / warm_s,
        "cached_tokens": later[-1][0]["cached"],
        "same_answers": sum(warm["answer"] == cold["answer"] for warm, cold in pairs),
    }


def _at_once(prompts: list[list[int]], arguments: argparse.Namespace, core: Core) -> Seen:
    """All questions at once, about a document that the cache does not know."""
    changed = [[*ids[:1], ids[1] + 1, *ids[2:]] for ids in prompts]
    read = core.cache_counts.query_tokens - core.cache_counts.hit_tokens
    started_s = time.perf_counter()
    for ids in changed:
        core.add(_request(ids, arguments))
    while not core.is_idle:
        core.step()
    seconds = time.perf_counter() - started_s
    read = core.cache_counts.query_tokens - core.cache_counts.hit_tokens - read
    return {
        "asked": "ten at once",
        "total_s": seconds,
        "tokens_filtered": read,
        "tokens_sent": sum(map(len, prompts)),
    }


if __name__ == "__main__":
    main()
