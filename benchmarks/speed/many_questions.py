"""How soon does the answer to each of ten questions about one document begin?

The questions go over HTTP to any server that speaks OpenAI's API, one after the other, so that a
server's cache can help with the later ones. Without `--url` a gemserve is started, with
`--serve-options`. A *way* is what the body says about the filter: `default` says nothing, as every
server understands it, `none` reads the whole prompt, and `keep=N` asks for that budget. Each way
and length has a document of its own, which no earlier question has left in a cache.

    python benchmarks/speed/many_questions.py --lengths 6000
    python benchmarks/speed/many_questions.py --url http://127.0.0.1:8000 --model NAME \
        --tokenizer smollm2 --ways default

A question that the server refuses, for instance because its prompt does not fit, becomes a row with
the reason, and ends its way at this length.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

import httpx

from benchmarks.shared import long_documents, results
from benchmarks.shared.server_process import ServeProcess
from benchmarks.shared.streamed_chat import stream_chat
from gemserve.config import ModelConfig
from gemserve.model.loading.checkpoint import open_checkpoint
from gemserve.synthetic.natural_facts import VOCABULARIES, draw_facts
from gemserve_lab.tasks.haystack import draw_filler, scatter

QUESTIONS = 10
_START_S = 900.0  # for loading and calibrating a model
_LENGTHS = "6000,16000,64000"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="of a running server (default: start gemserve)")
    parser.add_argument("--model", default="smollm2", help="its name (default: %(default)s)")
    parser.add_argument(
        "--tokenizer", help="a model that gemserve can open, to count tokens (default: --model)"
    )
    parser.add_argument("--serve-options", default="", help="further options of gemserve serve")
    parser.add_argument("--lengths", default=_LENGTHS, help="tokens (default: %(default)s)")
    parser.add_argument("--ways", default="default,none", help="default: %(default)s")
    parser.add_argument("--questions", type=int, default=QUESTIONS)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--limit-s", type=float, default=3600.0, help="of one answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="only the result line")
    arguments = parser.parse_args()
    name = arguments.tokenizer or arguments.model
    tokenizer = open_checkpoint(ModelConfig(model=name)).load_tokenizer()
    rows: list[dict[str, Any]] = []
    with (
        _server(arguments) as url,
        httpx.Client(base_url=url, timeout=arguments.limit_s) as http,
    ):
        _ask(http, arguments, "default", "Say hello.")  # warm-up
        for number, way in enumerate(arguments.ways.split(",")):
            for length in results.numbers(arguments.lengths):
                rng = Random(f"many questions {arguments.seed} {number} {length}")
                document, questions = draw_document(tokenizer, rng, length, arguments.questions)
                asked = _asked(http, arguments, way, length, document, questions)
                rows += [*asked, summary(way, length, asked)]
    results.finish("many_questions", "cpu", rows, arguments.json)


@contextmanager
def _server(arguments: argparse.Namespace) -> Iterator[str]:
    """The address of the given server, or of one that is started here."""
    if arguments.url:
        yield arguments.url.removesuffix("/").removesuffix("/v1")
        return
    with tempfile.TemporaryDirectory() as folder:
        options = ["--model", arguments.model, *shlex.split(arguments.serve_options)]
        server = ServeProcess(options, Path(folder, "log"))
        try:
            server.wait_until_ready(_START_S)
            yield server.url
        finally:
            server.stop(30)


def draw_document(
    tokenizer: Any, rng: Random, num_tokens: int, count: int
) -> tuple[str, list[str]]:
    """Prose of about `num_tokens` tokens with a natural fact for each of the questions."""
    relations = rng.sample(VOCABULARIES["evaluation"], count)
    problems = [draw_facts(rng, relation, 1, 0)[0] for relation in relations]
    facts = [(rng.random(), problem.statements[0]) for problem in problems]
    room = num_tokens - 30 * (count + 1)
    filler = draw_filler(tokenizer, long_documents.prose(num_tokens), room, rng, is_tight=True)
    return scatter(filler, facts), [problem.question for problem in problems]


def _asked(
    http: httpx.Client,
    arguments: argparse.Namespace,
    way: str,
    length: int,
    document: str,
    questions: Sequence[str],
) -> list[dict[str, Any]]:
    """A row for each question, up to the first one that is refused."""
    rows: list[dict[str, Any]] = []
    for number, question in enumerate(questions, 1):
        results.note(f"{way} {length} question {number}")
        row: dict[str, Any] = {"way": way, "document_tokens": length, "question": number}
        try:
            row |= _ask(http, arguments, way, f"{document}\n\n{question}")
        except (RuntimeError, httpx.HTTPError) as error:
            row["reason"] = f"{type(error).__name__}: {error}"[:300]
        rows.append(row)
        if not arguments.json:
            results.note("")
            print(row, flush=True)
        if "reason" in row:
            break
    return rows


def _ask(
    http: httpx.Client, arguments: argparse.Namespace, way: str, content: str
) -> dict[str, Any]:
    """Time to first token, the prompt's tokens, and how many of them a cache had."""
    body: dict[str, Any] = {
        "model": arguments.model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": arguments.max_tokens,
        "stream_options": {"include_usage": True},
        **filter_field(way),
    }
    ttft_s, chunks = stream_chat(http, body)
    usage = next((chunk["usage"] for chunk in chunks if chunk.get("usage")), {})
    report: dict[str, Any] = next((c["filter"] for c in chunks if c.get("filter")), {})
    details = usage.get("prompt_tokens_details") or {}
    return {
        "ttft_s": ttft_s,
        "prompt_tokens": usage.get("prompt_tokens"),
        "cached_tokens": details.get("cached_tokens", report.get("cached_tokens")),
        "kept_tokens": report.get("kept_tokens"),
        "filter_reason": report.get("reason"),
        "windows": report.get("windows"),
        "cached_windows": report.get("cached_windows"),
    }


def filter_field(way: str) -> dict[str, Any]:
    """What a body says about the filter. Raises `SystemExit` for an unknown way."""
    if way == "default":
        return {}
    if way == "none":
        return {"filter": {"method": "none"}}
    name, _, keep = way.partition("=")
    if name != "keep" or not keep:
        raise SystemExit(f"--ways: {way!r} must be default, none or keep=N")
    return {"filter": {"keep": int(keep)}}


def summary(way: str, length: int, asked: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first question's time beside the median and the longest of the later ones."""
    row: dict[str, Any] = {"way": way, "document_tokens": length, "summary": "all"}
    times = [one["ttft_s"] for one in asked if "ttft_s" in one]
    if len(times) < 2:
        return row | {"reason": asked[-1].get("reason")}
    later_s = statistics.median(times[1:])
    return row | {
        "first_s": times[0],
        "later_s": later_s,
        "longest_later_s": max(times[1:]),
        "all_s": sum(times),
        "first_to_later": times[0] / later_s,
    }


if __name__ == "__main__":
    main()
