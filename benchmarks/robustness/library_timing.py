"""Can a client tell by a reply, or by its time, what is in another key's libraries?

A server with two API keys is asked over HTTP, one request at a time. Key A has a library, and B
asks. Each question has kinds of trials in random order, of which `new` is what B sees of something
that nobody has:

- is there a library of this name? (`GET /v1/libraries/NAME`, and a chat that names it)
- has it a file of this name? (`GET /v1/libraries/NAME/files/PATH`)
- has somebody added this text? (`POST …/files?wait=true` of a text that A has added before)
- has somebody asked about it? (a chat that is answered from B's copy of a text, after A has asked
  the same of its own copy)

A two-sided Mann-Whitney test compares the times of each kind with those of `new`. `same_replies`:
do replies differ in nothing but the names and texts that B itself has sent, and in times? Of
answered chats these are what the report says of caches.

    python benchmarks/robustness/library_timing.py --n 100
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

import httpx

from benchmarks.robustness.cache_timing import mann_whitney
from benchmarks.shared import results
from benchmarks.shared.server_process import ServeProcess
from gemserve_client.load_test.traffic import COMMON_WORDS

_READY_S = 600.0
_CHEAP = 4  # times as many trials of requests that read nothing
_WARM_UP = 3
# what a reply says of the request itself, or of the moment
_OWN = re.compile(
    r'"(id|created|created_at|request_id|[a-z_]*_ms|ms|bytes|tokens|text|characters|file|lines)":'
    r'\s*("(\\.|[^"])*"|[\d.]+|\[[^]]*\])'
)
Trial = Callable[[], tuple[float, str]]


class Keys:
    """The clients of both keys, and the texts that they add."""

    def __init__(self, url: str, names: Sequence[str], model: str, seed: int) -> None:
        self.a, self.b = (
            httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=600)
            for key in names
        )
        self.model, self.rng = model, Random(seed)
        self.count = 0

    def text(self, num_words: int) -> tuple[str, str]:
        """A text, and the word that nothing but it has."""
        self.count += 1
        word = f"q{self.rng.getrandbits(60):x}"
        words = self.rng.choices(COMMON_WORDS.split(), k=num_words)
        words[self.rng.randrange(num_words)] = f". The code of {word} is {self.count}."
        return " ".join(words), word

    def add(self, client: httpx.Client, text: str) -> tuple[float, str]:
        self.count += 1
        body = {"path": f"file-{self.count}", "text": text}
        return timed(lambda: client.post("/v1/libraries/own/files?wait=true", json=body))

    def ask(self, client: httpx.Client, library: str, word: str) -> tuple[float, str]:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": f"What is the code of {word}?"}],
            "max_tokens": 1,
            "temperature": 0,
            "filter": {"library": library, "candidates": 1, "keep": 64},
        }
        taken_s, said = timed(lambda: client.post("/v1/chat/completions", json=body), 404)
        of_caches = " ".join(re.findall(r'"cached_[a-z]+":\d+', said))
        return taken_s, of_caches or said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--n", type=int, default=100, help="trials of each kind (%(default)s)")
    parser.add_argument("--words", type=int, default=900, help="of a text")
    parser.add_argument("--seed", type=int, default=0)
    results.add_common(parser)
    arguments = parser.parse_args()
    rows = []
    with _keys(arguments) as keys:
        for client in (keys.a, keys.b):
            client.post("/v1/libraries", json={"name": "own"}).raise_for_status()
        keys.a.post("/v1/libraries", json={"name": "secret"}).raise_for_status()
        body = {"path": "plan.md", "text": keys.text(arguments.words)[0]}
        keys.a.post("/v1/libraries/secret/files?wait=true", json=body).raise_for_status()
        for question, kinds, count in (
            ("library's name", names(keys), _CHEAP * arguments.n),
            ("library in a chat", names_in_chat(keys), _CHEAP * arguments.n),
            ("file's name", files(keys), _CHEAP * arguments.n),
            ("added text", added(keys, arguments.words), arguments.n),
            ("asked text", asked(keys, arguments.words, arguments.n), arguments.n),
        ):
            rows += measure(question, kinds, count, keys.rng)
    load = "/".join(f"{value:.1f}" for value in os.getloadavg())
    rows.append({"question": "this machine", "load_average": load})
    results.finish("library_timing", arguments.device, rows, arguments.json)


def names(keys: Keys) -> Mapping[str, Trial]:
    def get(name: str) -> tuple[float, str]:
        return timed(lambda: keys.b.get(f"/v1/libraries/{name}"), 404, name)

    return {"new": lambda: get("nobody"), "another key": lambda: get("secret")}


def names_in_chat(keys: Keys) -> Mapping[str, Trial]:
    def ask(name: str) -> tuple[float, str]:
        taken_s, said = keys.ask(keys.b, name, "nothing")
        return taken_s, said.replace(name, "NAME")

    return {"new": lambda: ask("nobody"), "another key": lambda: ask("secret")}


def files(keys: Keys) -> Mapping[str, Trial]:
    def get(path: str) -> tuple[float, str]:
        return timed(lambda: keys.b.get(f"/v1/libraries/secret/files/{path}"), 404, path)

    return {"new": lambda: get("none.md"), "another key": lambda: get("plan.md")}


def added(keys: Keys, num_words: int) -> Mapping[str, Trial]:
    def trial(before: httpx.Client, is_same: bool) -> Trial:
        def run() -> tuple[float, str]:
            text, other = (keys.text(num_words)[0] for _ in range(2))
            keys.add(before, text)
            return keys.add(keys.b, text if is_same else other)

        return run

    return {
        "new": trial(keys.a, False),
        "another key": trial(keys.a, True),
        "same key": trial(keys.b, True),
    }


def asked(keys: Keys, num_words: int, count: int) -> Mapping[str, Trial]:
    """Both keys have the same texts; each is asked about in one trial."""
    texts = [keys.text(num_words) for _ in range(3 * (count + _WARM_UP))]
    for index, (text, _) in enumerate(texts):
        results.note(f"asked text: {index} of {len(texts)} added")
        for client in (keys.a, keys.b):
            keys.add(client, text)
    unused = [word for _, word in texts]

    def trial(before: httpx.Client | None) -> Trial:
        def run() -> tuple[float, str]:
            word = unused.pop()
            if before is not None:
                keys.ask(before, "own", word)
            return keys.ask(keys.b, "own", word)

        return run

    return {"new": trial(None), "another key": trial(keys.a), "same key": trial(keys.b)}


def timed(
    send: Callable[[], httpx.Response], status: int | None = None, name: str = ""
) -> tuple[float, str]:
    """Seconds, and the reply without what is of this request alone. `name`: what it asks for."""
    began_s = time.perf_counter()
    reply = send()
    taken_s = time.perf_counter() - began_s
    if reply.status_code not in (200, status):
        raise RuntimeError(f"status {reply.status_code}: {reply.text}")
    said = reply.text.replace(name, "NAME") if name else reply.text
    return taken_s, f"{reply.status_code} {_OWN.sub('', said)}"


def measure(
    question: str, kinds: Mapping[str, Trial], count: int, rng: Random
) -> list[dict[str, Any]]:
    """A row for each kind. `share_sooner`: of its pairs with `new`, those that it was sooner in."""
    for trial in list(kinds.values()) * _WARM_UP:
        trial()
    order = [kind for kind in kinds for _ in range(count)]
    rng.shuffle(order)
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    replies: dict[str, set[str]] = {kind: set() for kind in kinds}
    for index, kind in enumerate(order):
        results.note(f"{question}: {index} of {len(order)}")
        taken_s, said = kinds[kind]()
        times[kind].append(taken_s)
        replies[kind].add(said)
    rows = []
    for kind in kinds:
        row: dict[str, Any] = {
            "question": question,
            "kind": kind,
            "n": len(times[kind]),
            "median_ms": round(1e3 * statistics.median(times[kind]), 3),
            "quartiles_ms": [
                round(1e3 * each, 3) for each in statistics.quantiles(times[kind], n=4)[::2]
            ],
        }
        if kind != "new":
            row["share_sooner"], row["p_value"] = mann_whitney(times[kind], times["new"])
            row["same_replies"] = replies[kind] <= replies["new"]
            if not row["same_replies"]:
                row["differs"] = min(replies[kind] - replies["new"])[:300]
        rows.append(row)
    return rows


@contextmanager
def _keys(arguments: argparse.Namespace) -> Iterator[Keys]:
    """A server process that needs a key; the context ends it."""
    rng = Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        names = [f"key-{rng.getrandbits(128):x}" for _ in range(2)]
        key_file = Path(folder) / "keys"
        key_file.write_text("\n".join(names) + "\n")
        options = ["--model", arguments.model, "--device", arguments.device]
        options += ["--api-key-file", str(key_file), "--filter-min-tokens", "0"]
        options += ["--library-dir", str(Path(folder) / "libraries")]
        server = ServeProcess(options, Path(folder) / "server.log")
        try:
            server.wait_until_ready(_READY_S)
            keys = Keys(server.url, names, arguments.model, arguments.seed)
            with keys.a, keys.b:
                yield keys
        finally:
            server.stop(15)


if __name__ == "__main__":
    main()
