"""Time to the first token of further questions about a document, and after an edit of it.

    python benchmarks/speed/further_questions.py --model BIG.gguf --reader SMALL.gguf \\
        --tokens 8192 --ways 'none,self={"reader":"self"},reader={"reader":"reader"}'

Each way asks about a document that nobody has read, asks another question, asks that question of
the document with a changed sentence in its middle, and then of the first document again. The ways
find nothing of one another's in the document cache. A *way* is a name with the filter options of a
request, as in `benchmarks/quality/answer_cases.py`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

from benchmarks.quality.answer_cases import read_ways
from benchmarks.shared import results
from benchmarks.shared.timed_answers import answer
from benchmarks.speed.first_token import QUESTION, text_of
from gemserve.config import EngineConfig
from gemserve.llm import LLM

ANOTHER = "\n\nWhat happens to an exception that nobody handles?"


def asked_in_turn(document: str) -> dict[str, str]:
    """The prompts, by what is new in them."""
    middle = document.index(". ", len(document) // 2) + 2
    changed = f"{document[:middle]}Here the text was changed. {document[middle:]}"
    return {
        "a new document": document + QUESTION,
        "another question": document + ANOTHER,
        "a changed sentence": changed + ANOTHER,
        "the first document again": document + QUESTION,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="default: %(default)s")
    parser.add_argument("--reader", help="a model that reads for it")
    parser.add_argument("--tokens", type=int, default=4096, help="of the document")
    parser.add_argument("--ways", default="none,default", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="only the result line")
    arguments = parser.parse_args()
    settings = EngineConfig(filter_min_tokens=512, kv_memory_bytes=3 << 30)
    llm = LLM(arguments.model, replace(settings, reader=arguments.reader))
    prompts = asked_in_turn(text_of(llm, arguments.tokens).removesuffix(QUESTION))
    warm, rows = llm.prompt(text_of(llm, 600)), []
    for way in read_ways(arguments.ways):
        answer(llm.core, warm, way.options, 2, f"warm {way.name}")
        for new, text in prompts.items():
            results.note(f"{way.name}, {new}")
            prompt = llm.prompt(text)
            made = answer(llm.core, prompt, way.options, 1, way.name)
            row = {
                "way": way.name,
                "new": new,
                "tokens": len(prompt.ids),
                "cached": made.report.cached_tokens,
                "kept": made.report.kept_tokens,
                "reason": made.report.reason,
                "choose_s": round(made.choose_s, 2),
                "ttft_s": round(made.ttft_s or made.total_s, 2),
            }
            if not arguments.json:
                print(row, flush=True)
            rows.append(row)
    results.finish("further_questions", "cpu", rows, arguments.json)


if __name__ == "__main__":
    main()
