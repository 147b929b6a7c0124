"""Can a client tell by the time to first token that another key's prompt is cached?

A server with two API keys is asked over HTTP, one request at a time. A trial is two requests: the
first one puts a document into the cache, the second one is timed. There are three kinds of trials,
in random order:

- new: key A asks about a document, then B about one that nobody has asked about.
- another key: A asks about a document, then B asks exactly the same.
- same key: B asks about a document, then B asks exactly the same. This shows what a hit looks like.

A two-sided Mann-Whitney test compares the times of each kind with those of new documents.

    python benchmarks/robustness/cache_timing.py --n 200
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

import httpx

from benchmarks.shared import results
from benchmarks.shared.server_process import ServeProcess
from benchmarks.shared.streamed_chat import stream_chat
from gemserve_client.load_test.traffic import COMMON_WORDS

_READY_S = 600.0
_KINDS = ("new", "another key", "same key")
_WARM_UP = 10  # requests of each key that are not counted
Seen = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--n", type=int, default=200, help="trials of each kind (%(default)s)")
    parser.add_argument("--words", type=int, default=600, help="of a document")
    parser.add_argument("--seed", type=int, default=0)
    results.add_common(parser)
    arguments = parser.parse_args()
    rng = Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        keys = [f"key-{rng.getrandbits(128):x}" for _ in range(2)]
        key_file = Path(folder) / "keys"
        key_file.write_text("\n".join(keys) + "\n")
        log = Path(folder) / "server.log"
        with (
            _server(arguments, key_file, log) as url,
            _client(url, keys[0]) as a,
            _client(url, keys[1]) as b,
        ):
            seen = _trials(arguments, rng, a, b)
    rows = [_row(kind, seen[kind], seen["new"]) for kind in _KINDS]
    load = "/".join(f"{value:.1f}" for value in os.getloadavg())
    rows.append({"prompt": "this machine", "load_average": load})
    results.finish("cache_timing", arguments.device, rows, arguments.json)


def _trials(
    arguments: argparse.Namespace, rng: Random, a: httpx.Client, b: httpx.Client
) -> dict[str, list[Seen]]:
    """What the second request of every trial has seen, by the trial's kind."""
    for client in (a, b) * _WARM_UP:
        _ask(client, arguments.model, _document(rng, arguments.words))
    seen: dict[str, list[Seen]] = {kind: [] for kind in _KINDS}
    order = [kind for kind in _KINDS for _ in range(arguments.n)]
    rng.shuffle(order)
    for index, kind in enumerate(order):
        results.note(f"{index} of {len(order)}")
        document, other = (_document(rng, arguments.words) for _ in range(2))
        _ask(b if kind == "same key" else a, arguments.model, document)
        timed = other if kind == "new" else document
        seen[kind].append(_ask(b, arguments.model, timed))
    return seen


def _row(kind: str, seen: Sequence[Seen], new: Sequence[Seen]) -> Seen:
    """`share_sooner`: of the pairs of this kind and new, those in which this kind was sooner."""
    times, of_new = ([s["ttft_s"] for s in some] for some in (seen, new))
    row: Seen = {
        "prompt": kind,
        "n": len(times),
        "median_ttft_s": statistics.median(times),
        "quartiles_s": [round(q, 4) for q in statistics.quantiles(times, n=4)[::2]],
        "prompt_tokens": round(statistics.mean(s["prompt_tokens"] for s in seen)),
        "most_cached_tokens": max(s["cached_tokens"] for s in seen),
    }
    if kind != "new":
        row["share_sooner"], row["p_value"] = mann_whitney(times, of_new)
    return row


def _document(rng: Random, num_words: int) -> str:
    words = rng.choices(COMMON_WORDS.split(), k=num_words)
    code = "".join(rng.choices("0123456789", k=5))
    place = rng.randrange(num_words)
    return f"{' '.join(words[:place])}. The code is {code}. {' '.join(words[place:])}."


def _ask(client: httpx.Client, model: str, document: str) -> Seen:
    """Seconds to the first text of the answer, and the token counts that the reply reports."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"{document}\n\nWhat is the code?"}],
        "max_tokens": 1,
        "temperature": 0,
        "ignore_eos": True,
        "filter": {"method": "sieve", "keep": 64},
    }
    ttft_s, chunks = stream_chat(client, body)
    report = next(chunk["filter"] for chunk in chunks if chunk.get("filter"))
    return {"ttft_s": ttft_s, **{name: report[name] for name in ("prompt_tokens", "cached_tokens")}}


@contextmanager
def _server(arguments: argparse.Namespace, key_file: Path, log: Path) -> Iterator[str]:
    """A server process that needs a key; the context ends it."""
    options = ["--model", arguments.model, "--device", arguments.device]
    options += ["--api-key-file", str(key_file), "--filter-min-tokens", "0"]
    server = ServeProcess(options, log)
    try:
        server.wait_until_ready(_READY_S)
        yield server.url
    finally:
        server.stop(15)


def _client(url: str, key: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=600)


def mann_whitney(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Tell two samples apart by their ranks, with the normal approximation.

    Returns the share of pairs in which the first sample is below the second, and the two-sided
    p-value. Equal values count half. The p-value is corrected for them and for continuity. It is
    good for samples of ten and more.
    """
    sizes = len(first), len(second)
    marked = sorted([(value, 0) for value in first] + [(value, 1) for value in second])
    rank, sum_of_first, ties = 0, 0.0, 0
    for _, group in groupby(marked, key=lambda item: item[0]):
        members = [sample for _, sample in group]
        middle = rank + (len(members) + 1) / 2  # equal values share their ranks' mean
        sum_of_first += middle * members.count(0)
        rank += len(members)
        ties += len(members) ** 3 - len(members)
    pairs, total = sizes[0] * sizes[1], sum(sizes)
    above = sum_of_first - sizes[0] * (sizes[0] + 1) / 2
    variance = pairs / 12 * (total + 1 - ties / (total * (total - 1)))
    distance = max(0.0, abs(above - pairs / 2) - 0.5)
    p_value = math.erfc(distance / math.sqrt(2 * variance)) if variance > 0 else 1.0
    return 1 - above / pairs, p_value


if __name__ == "__main__":
    main()
