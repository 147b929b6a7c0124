"""How much sooner answers end with prompt-lookup decoding, and whether they are the same.

    python benchmarks/speed/prompt_lookup.py --model MODEL.gguf --sequences 1,4

Three kinds of answers, all greedy: *edits* change one thing in functions of Python's standard
library, *quotes* answer questions about real documents with the sentences that say so, and *free*
ones have nothing to copy from. The same prompts are answered without and with `--prompt-lookup`,
in turn. What counts is decoding alone: the steps after all prompts have been read.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

from benchmarks.quality.answer_cases import KINDS
from benchmarks.shared import results
from gemserve.config import EngineConfig
from gemserve.contract.events import Finished, TextDelta
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.llm import LLM
from gemserve.synthetic.code import stdlib_functions

EDITS = (
    "Rename the first parameter to `given` everywhere. Reply with the whole function.",
    "Add a docstring of one line. Reply with the whole function.",
    "Add type annotations. Reply with the whole function.",
    "Make it write a line to a logger when it begins. Reply with the whole function.",
)
FREE = (
    "Write a short story about a lighthouse keeper who finds a map.",
    "Explain how a suspension bridge carries its load.",
    "What should one know before keeping bees?",
    "Describe a city that stands on the back of a turtle.",
    "Why does the sky get red in the evening?",
    "Plan a week in the mountains for four friends.",
    "Write a letter to a landlord about a broken heater.",
    "How does a compiler allocate registers?",
)


def edits(count: int) -> Iterator[str]:
    sized = [text for text in stdlib_functions() if 600 <= len(text) <= 1500]
    for index in range(count):
        function = sized[index * len(sized) // count]
        yield f"```python\n{function}\n```\n\n{EDITS[index % len(EDITS)]}"


def quotes(count: int) -> Iterator[str]:
    """The paragraphs that answer a question, between others of the same document."""
    cases = [case for case in KINDS["real"]() if case.gold]
    for index in range(count):
        case = cases[index * len(cases) // count]
        at = case.document.find(case.gold[0])
        around = case.document[max(0, at - 1200) : at] if at >= 0 else ""
        text = "\n\n".join([around, *case.gold])
        yield f"{text}\n\n{case.question} Quote the sentences that say so, and then answer."


def free(count: int) -> Iterator[str]:
    for index in range(count):
        yield FREE[index % len(FREE)]


ANSWERS = {"edits": edits, "quotes": quotes, "free": free}


class Contestant:
    """A model with one setting of `--prompt-lookup`."""

    def __init__(self, model: str, lookup: Any) -> None:
        settings = EngineConfig(
            kv_memory_bytes=1 << 30,
            cache_memory=0.0,
            calibrate="off",
            min_chunk_tokens=2048,  # else how a prompt is cut depends on the time that it takes
        )
        self.name = lookup
        self._llm = LLM(model, replace(settings, prompt_lookup=lookup))
        self.tokens = self.proposed = self.accepted = 0
        self.seconds = 0.0
        self.answers: list[list[int]] = []

    def answer(self, texts: Sequence[str], max_tokens: int) -> None:
        """Answer these prompts together, and add up what that took."""
        core = self._llm.core
        answers: dict[Any, list[int]] = {}
        for number, text in enumerate(texts):
            prompt = self._llm.prompt([{"role": "user", "content": text}])
            request = Request(
                request_id=str(number),
                prompt_ids=prompt.ids,
                sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
                filter=FilterParams(method="none", keep=256),
            )
            answers[core.add(request)] = []
        while not core.is_idle:
            is_decoding = all(answers.values())
            started_s = time.perf_counter()
            events = core.step()
            if is_decoding:
                self.seconds += time.perf_counter() - started_s
            for job, event in events:
                if isinstance(event, TextDelta):
                    answers[job] += event.token_ids
                    self.tokens += is_decoding * len(event.token_ids)
                elif isinstance(event, Finished):
                    self.proposed += event.proposed_tokens
                    self.accepted += event.accepted_tokens
        self.answers += answers.values()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="default: %(default)s")
    parser.add_argument("--answers", default="edits,quotes,free", help="default: %(default)s")
    parser.add_argument("--lookups", default="off,auto", help="default: %(default)s")
    parser.add_argument("--sequences", type=results.numbers, default=[1], help="default: 1")
    parser.add_argument("--samples", type=int, default=8, help="prompts of each kind")
    parser.add_argument("--max-tokens", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="only the result line")
    arguments = parser.parse_args()
    contestants = [Contestant(arguments.model, each) for each in arguments.lookups.split(",")]
    rows = []
    for contestant in contestants:  # warm
        contestant.answer(list(free(2)), 16)
    for kind in arguments.answers.split(","):
        texts = list(ANSWERS[kind](arguments.samples))
        for count in arguments.sequences:
            for contestant in contestants:
                contestant.tokens = contestant.proposed = contestant.accepted = 0
                contestant.seconds, contestant.answers = 0.0, []
            for start in range(0, len(texts), count):
                some = texts[start : start + count]
                for contestant in contestants:
                    results.note(f"{kind}, {count} at once, {contestant.name}")
                    contestant.answer(some, arguments.max_tokens)
            for contestant in contestants:
                pairs = zip(contestant.answers, contestants[0].answers, strict=True)
                rows.append(
                    {
                        "answers": kind,
                        "sequences": count,
                        "lookup": contestant.name,
                        "n": len(texts),
                        "tokens_per_s": round(contestant.tokens / contestant.seconds, 1),
                        "proposed": contestant.proposed,
                        "accepted": contestant.accepted,
                        "tokens": contestant.tokens,
                        "same": sum(one == other for one, other in pairs),
                    }
                )
                if not arguments.json:
                    print(rows[-1], flush=True)
    results.finish("prompt_lookup", "cpu", rows, arguments.json)


if __name__ == "__main__":
    main()
