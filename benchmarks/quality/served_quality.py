"""Right answers and time to first token of a running server, by filter, over natural facts.

Prompts go through HTTP in turn: every example is asked with every filter before the next one, so
that the filters share whatever else the machine does. Filters are `none`, `sieve` and the other
served methods, each with `@KEEP` (a fraction, a count or auto) where the server's default is not
wanted, and `!` behind it for `fallback: false`; `bm25@KEEP` and `oracle@KEEP` choose here, and send
the kept tokens' ids to be read whole. Outcomes are appended to a file, from which a
stopped run goes on. The server should have no document cache: otherwise a prompt's second filter
finds what the first has read, and its time to first token says nothing.

    gemserve serve --model smollm2 --cache-memory 0 &
    python benchmarks/quality/served_quality.py --url http://127.0.0.1:8000 --lengths 2048,4096 \
        --samples 100,50 --filters none,sieve,sieve@0.0625 --out outcomes.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

from openai import OpenAI

from benchmarks.shared import results
from gemserve.calibration.search.example import Example, ExampleDraw, recall
from gemserve.config import ModelConfig
from gemserve.json_lines import parse_objects
from gemserve.model.loading.checkpoint import open_checkpoint
from gemserve_lab.compare import compare
from gemserve_lab.methods_compared import CHOSEN_OUTSIDE
from gemserve_lab.metrics import score_answer
from gemserve_lab.run import Outcome
from gemserve_lab.tasks.needle import SUBTASKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smollm2", help="whose tokenizer counts")
    parser.add_argument("--subtask", default="natural")
    parser.add_argument("--lengths", default="2048,4096")
    parser.add_argument("--samples", default="10,10")
    parser.add_argument("--filters", default="none,sieve")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    lengths = [int(part) for part in arguments.lengths.split(",")]
    samples = [int(part) for part in arguments.samples.split(",")]
    tokenizer = open_checkpoint(ModelConfig(model=arguments.model)).load_tokenizer()
    client = OpenAI(base_url=f"{arguments.url}/v1", api_key="none", timeout=600, max_retries=0)
    done = _read(arguments.out)
    filters = arguments.filters.split(",")
    found: list[dict[str, Any]] = []
    for length, count in zip(lengths, samples, strict=True):
        for index in range(count):
            draw = ExampleDraw(seed=arguments.seed, num_tokens=length, index=index, samples=count)
            key = (arguments.subtask, length, count, index, arguments.seed)
            example: Example | None = None
            for name in filters:
                if (*key, name) not in done:
                    example = example or SUBTASKS[arguments.subtask](tokenizer, draw)
                    ask = _ask_chosen if _method(name) in CHOSEN_OUTSIDE else _ask
                    row = ask(client, tokenizer, arguments, example, name)
                    row |= {"key": [*key, name]}
                    done[(*key, name)] = row
                    _append(arguments.out, row)
                found.append(done[(*key, name)])
    rows = [_row(found, length, name) for length in lengths for name in filters]
    for row in rows:
        print(row)
    _print_pairs(found, filters)
    results.finish("served_quality", "cpu", rows, arguments.json)


def _ask(
    client: OpenAI, tokenizer: Any, arguments: argparse.Namespace, example: Example, name: str
) -> dict[str, Any]:
    """One greedy streamed answer: score, recall, TTFT and what the server reports."""
    content = f"{example.document}\n\n{example.question}"
    started_s = time.monotonic()
    stream = client.chat.completions.create(
        model=arguments.model,
        messages=[{"role": "user", "content": content}],
        temperature=0,
        max_tokens=arguments.max_tokens,
        stream=True,
        extra_body={"filter": _filter(name)},
    )
    deltas = (
        ((chunk.model_extra or {}).get("filter", {}), chunk.choices[0].delta.content)
        for chunk in stream
        if chunk.choices
    )
    return _read_stream(deltas, example, started_s)


def _ask_chosen(
    client: OpenAI, tokenizer: Any, arguments: argparse.Namespace, example: Example, name: str
) -> dict[str, Any]:
    """The same for what is chosen outside of the server and read whole."""
    started_s = time.monotonic()
    keep = int(name.partition("@")[2])
    kept = CHOSEN_OUTSIDE[_method(name)](tokenizer, example, keep)
    stream = client.completions.create(
        model=arguments.model,
        prompt=[example.prompt.ids[position] for position in kept],
        temperature=0,
        max_tokens=arguments.max_tokens,
        stream=True,
        extra_body={"filter": {"method": "none"}},
    )
    deltas = (
        ((chunk.model_extra or {}).get("filter", {}), chunk.choices[0].text)
        for chunk in stream
        if chunk.choices
    )
    row = _read_stream(deltas, example, started_s)
    return row | {"recall": recall(example.gold, [(position, position + 1) for position in kept])}


def _read_stream(
    deltas: Iterable[tuple[dict[str, Any], str | None]], example: Example, started_s: float
) -> dict[str, Any]:
    ttft_s, text = 0.0, ""
    report: dict[str, Any] = {}
    for filtered, delta in deltas:
        report = report or filtered
        if delta:
            ttft_s = ttft_s or time.monotonic() - started_s
            text += delta
    selection = report.pop("selection", None)
    return {
        "score": score_answer(text, example),
        "recall": None if selection is None else recall(example.gold, selection),
        "ttft_s": round(ttft_s, 4),
        "text": text,
        **report,
    }


def _method(name: str) -> str:
    return name.removesuffix("!").partition("@")[0]


def _filter(name: str) -> dict[str, Any]:
    method, _, keep = name.removesuffix("!").partition("@")
    chosen: dict[str, Any] = {"method": method, "return_selection": method != "snapkv"}
    if keep:
        chosen["keep"] = keep if keep == "auto" else float(keep) if "." in keep else int(keep)
    if name.endswith("!"):
        chosen["fallback"] = False
    return chosen


def _row(found: list[dict[str, Any]], length: int, name: str) -> dict[str, Any]:
    own = [row for row in found if row["key"][1] == length and row["key"][-1] == name]
    times = sorted(row["ttft_s"] for row in own)
    recalls = [row["recall"] for row in own if row["recall"] is not None]
    return {
        "filter": name,
        "prompt_tokens": length,
        "n": len(own),
        "score": round(sum(row["score"] for row in own) / len(own), 4),
        "recall": round(sum(recalls) / len(recalls), 4) if recalls else None,
        "kept_tokens": round(sum(row["kept_tokens"] for row in own) / len(own)),
        "ttft_s": times[len(times) // 2],
        "fallbacks": sum(row["reason"] in ("diffuse_attention", "widened") for row in own),
    }


def _print_pairs(found: list[dict[str, Any]], filters: list[str]) -> None:
    """Every filter against the first one, over all lengths."""
    outcomes = [_outcome(row) for row in found]
    first, *others = filters
    for name in others:
        c = compare(outcomes, first, name)
        print(f"{first} − {name}: {c.difference:+.3f} (95% {c.low:+.3f} to {c.high:+.3f}, n={c.n})")


def _outcome(row: dict[str, Any]) -> Outcome:
    subtask, length, samples, index, _, name = row["key"]
    blank = Outcome(
        subtask=subtask,
        prompt_tokens=length,
        samples=samples,
        index=index,
        method="",
        keep=16,
        score=row["score"],
        recall=row["recall"],
        kept_tokens=row["kept_tokens"],
        depth=None,
        text=row["text"],
    )
    return replace(blank, method=name)


def _read(path: Path | None) -> dict[tuple[Any, ...], dict[str, Any]]:
    if path is None or not path.exists():
        return {}
    return {tuple(row["key"]): row for _, row in parse_objects(path.read_bytes())}


def _append(path: Path | None, row: dict[str, Any]) -> None:
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
