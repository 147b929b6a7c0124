"""gemserve beside other servers on this machine: vLLM's CPU build and llama.cpp, over HTTP.

All servers have the same model and get the same prompts in the same order. gemserve and llama.cpp
serve the GGUF file of `--model` itself; vLLM, and the contestants with `bf16` in their names, serve
its weights in bfloat16. The servers are asked in turn, one at a time; a signal holds the others
still meanwhile. After it each one answers a short prompt before its time is taken, since the system
may have taken pages of a server that stood still. For every measure they are started anew, with
room for its prompts and streams. Prefix caches are off, and every prompt is a document of its own,
except for `documents`. `make peers` installs the other servers; `--llama-server` adds a llama.cpp
that was built for this processor.

    make peers
    python benchmarks/peers.py --lengths 1024,4096,6000 --streams 1,8,16 --mixed 8
    python benchmarks/peers.py --model FILE.gguf --llama-server PATH --measures ttft,decode,memory
    python benchmarks/peers.py --measures documents --documents 6000

- ttft: seconds from the request to the first text of its answer, at each prompt length.
- decode: output tokens per second of so many streams together, while all of them generate.
- mixed: requests per second of 4,096-token prompts with so many always in progress, and the gaps
  between the pieces of their answers.
- memory: of each server, after it has answered the prompts of each other measure, and the seconds
  from its start to its first answer.
- documents: seconds to the first text of the first and of further questions about one document,
  with all caches on, and the memory of the servers.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository root

import httpx

from benchmarks.other_servers import peer_documents, peer_models
from benchmarks.other_servers.peer_servers import (
    CONTESTANTS,
    NATIVE,
    SMOLLM2,
    Contestant,
    Room,
    Server,
    Setup,
)
from benchmarks.shared import results
from gemserve.calibration.search.example import ExampleDraw
from gemserve.config import ModelConfig
from gemserve.errors import ModelError
from gemserve.model.loading.checkpoint import open_checkpoint
from gemserve_client.load_test.streamed_request import Client, Record
from gemserve_client.load_test.traffic import Job
from gemserve_lab.tasks.needle import SUBTASKS

_MEASURES = ("ttft", "decode", "mixed", "memory", "documents")
_FIRST_PORT = 8460
_TIMEOUT_S = 3600.0
_MIXED_TOKENS = 4096
_SHORT_TOKENS = 256
_TTFT_TOKENS = 2
_WARM_UP = "Nothing is asked here. " * 200
_WARM_UP_TOKENS = 1100  # with the chat template's, by most tokenizers
_SPARE_TOKENS = 128  # prompts differ a little from the length that is asked for
_CONTEXT_STEP = 256


def main() -> None:
    parser = _parser()
    arguments = parser.parse_args()
    known = [
        name
        for name in dict.fromkeys((*CONTESTANTS, *peer_documents.NAMES))
        if name != NATIVE or arguments.llama_server is not None
    ]
    names = known if arguments.contestants is None else arguments.contestants.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        also = " (it needs --llama-server)" if unknown[0] == NATIVE else ""
        parser.error(f"--contestants: {unknown[0]!r} is none of {', '.join(known)}{also}")
    measures = arguments.measures.split(",")
    if not set(measures) <= set(_MEASURES):
        parser.error(f"--measures: {arguments.measures!r}: must be of {', '.join(_MEASURES)}")
    setup = Setup(
        model=arguments.model, models=arguments.models, llama_server=arguments.llama_server
    )
    try:
        peer_models.gguf_file(setup.model)
    except ModelError as error:
        parser.error(f"--model: {error}")
    setup.models.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which stops the servers
    rows: list[dict[str, Any]] = []
    contestants = [CONTESTANTS[name] for name in names if name in CONTESTANTS]
    for measured, room in rooms(measures, arguments).items():
        rows += _contest(contestants, setup, measured, room, arguments)
    if "documents" in measures:
        prompts = Prompts(setup.model)
        documents = [prompts.make(n, 9000 + i) for i, n in enumerate(arguments.documents)]
        context = context_of(max(arguments.documents), 0)
        rows += peer_documents.measure(names, documents, setup, context, _FIRST_PORT)
    results.finish("peers", "cpu", rows, arguments.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=SMOLLM2, help="a GGUF file; default: %(default)s")
    parser.add_argument("--contestants", help="default: all whose programs are known")
    parser.add_argument("--measures", default=",".join(_MEASURES))
    parser.add_argument("--lengths", type=results.numbers, default=[1024, 2048, 4096, 6000, 7900])
    parser.add_argument("--streams", type=results.numbers, default=[1, 8, 16])
    parser.add_argument("--mixed", type=results.numbers, default=[4, 16])
    parser.add_argument("--documents", type=results.numbers, default=[6000], help="their tokens")
    parser.add_argument("--decode-tokens", type=int, default=192)
    parser.add_argument("--answer-tokens", type=int, default=32, help="of a mixed request")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "peers")
    parser.add_argument("--llama-server", type=Path, help=f"the program of {NATIVE!r}")
    results.add_common(parser)
    return parser


def rooms(measures: Sequence[str], arguments: argparse.Namespace) -> dict[str, Room]:
    """What servers have room for, by what they are started for. `memory` alone starts them, too."""
    short = context_of(_SHORT_TOKENS, arguments.decode_tokens)
    mixed = context_of(_MIXED_TOKENS, arguments.answer_tokens)
    all_rooms = {
        "ttft": Room(1, context_of(max(arguments.lengths, default=0), _TTFT_TOKENS)),
        "decode": Room(max(arguments.streams, default=1), short),
        "mixed": Room(max(arguments.mixed, default=1), mixed),
    }
    chosen = {measured: room for measured, room in all_rooms.items() if measured in measures}
    return chosen or ({"start": Room(1, short)} if "memory" in measures else {})


def context_of(prompt_tokens: int, answer_tokens: int) -> int:
    """The tokens that a server needs for one stream."""
    tokens = max(prompt_tokens, _WARM_UP_TOKENS) + answer_tokens + _SPARE_TOKENS
    return -(-tokens // _CONTEXT_STEP) * _CONTEXT_STEP


def _contest(
    contestants: Sequence[Contestant],
    setup: Setup,
    measured: str,
    room: Room,
    arguments: argparse.Namespace,
) -> list[dict[str, Any]]:
    """One measure of all servers, which are held still between their turns."""
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        for index, name in enumerate(dict.fromkeys(c.server for c in contestants)):
            results.note(f"starting {name}")
            servers[name] = Server(name, setup, room, _FIRST_PORT + index)
            stack.callback(servers[name].stop)
        contest = Contest(contestants, servers, arguments.repeats, Prompts(setup.model), setup.name)
        if measured == "ttft":
            rows += contest.ttft(arguments.lengths)
        if measured == "decode":
            rows += contest.decode(arguments.streams, arguments.decode_tokens)
        if measured == "mixed":
            rows += contest.mixed(arguments.mixed, arguments.answer_tokens)
        if "memory" in arguments.measures.split(","):
            rows += _memory(servers, measured, peer_models.gguf_file(setup.model))
    return rows


def _memory(servers: dict[str, Server], measured: str, file: Path) -> list[dict[str, Any]]:
    rows = []
    for name, server in servers.items():
        row = {
            "measured": "memory",
            "after": measured,
            "server": name,
            "resident_bytes": server.resident_bytes(),
            "file_bytes": file.stat().st_size,
            "ready_s": server.ready_s,
        }
        rows.append(row)
        results.note("")
        print(row, flush=True)
    return rows


@dataclass(frozen=True, slots=True)
class Contest:
    """All contestants, each asked the same in every round."""

    contestants: Sequence[Contestant]
    servers: dict[str, Server]
    repeats: int
    prompts: Prompts
    model: str

    def ttft(self, lengths: Sequence[int]) -> list[dict[str, Any]]:
        rows = []
        for length in lengths:

            def read(contestant: Contestant, turn: int, length: int = length) -> Figures:
                (record,) = self._ask(
                    contestant, _jobs([self.prompts.make(length, turn)], _TTFT_TOKENS)
                )
                return {"ttft_s": record.ttft_s or float("nan")}

            rows += self._rounds({"measured": "ttft", "tokens": length}, read)
        return rows

    def decode(self, streams: Sequence[int], num_tokens: int) -> list[dict[str, Any]]:
        rows = []
        for count in streams:

            def generate(contestant: Contestant, turn: int, count: int = count) -> Figures:
                texts = [self.prompts.make(_SHORT_TOKENS, 100 * turn + i) for i in range(count)]
                jobs = _jobs(texts, num_tokens)
                return _decode_rate(self._ask(contestant, jobs, {"ignore_eos": True}))

            rows += self._rounds({"measured": "decode", "streams": count}, generate)
        return rows

    def mixed(self, concurrencies: Sequence[int], num_tokens: int) -> list[dict[str, Any]]:
        rows = []
        for count in concurrencies:

            def load(contestant: Contestant, turn: int, count: int = count) -> Figures:
                texts = [
                    self.prompts.make(_MIXED_TOKENS, 1000 * turn + i) for i in range(2 * count)
                ]
                jobs = _jobs(texts, num_tokens)
                began_s = time.perf_counter()
                records = self._ask(contestant, jobs, {"ignore_eos": True}, at_once=count)
                seconds = time.perf_counter() - began_s
                gaps = sorted(gap for record in records for gap in record.gaps_s)
                return {
                    "requests_per_s": len(jobs) / seconds,
                    "gap_p99_s": gaps[len(gaps) * 99 // 100],
                }

            rows += self._rounds({"measured": "mixed", "streams": count}, load)
        return rows

    def _rounds(
        self, labels: dict[str, Any], measure: Callable[[Contestant, int], Figures]
    ) -> list[dict[str, Any]]:
        """Medians of each contestant's figures, and of the first one also the spread."""
        figures: dict[str, list[Figures]] = {c.name: [] for c in self.contestants}
        for turn in range(self.repeats):
            for contestant in self.contestants:
                results.note(" ".join(map(str, [*labels.values(), turn, contestant.name])))
                figures[contestant.name].append(measure(contestant, turn))
        rows = []
        for name, rounds in figures.items():
            row: dict[str, Any] = {**labels, "contestant": name}
            for index, key in enumerate(rounds[0]):
                values = [measured[key] for measured in rounds]
                row[key] = statistics.median(values)
                if index == 0:
                    row |= {"least": min(values), "most": max(values)}
            rows.append(row)
            results.note("")
            print(row, flush=True)
        return rows

    def _ask(
        self,
        contestant: Contestant,
        jobs: Sequence[Job],
        fields: dict[str, Any] | None = None,
        at_once: int | None = None,
    ) -> list[Record]:
        server = self.servers[contestant.server]
        body = {**contestant.fields, **(fields or {})}
        with server.running():
            asyncio.run(_send(server.url, self.model, _jobs([_WARM_UP], 2), body, 1))
            records = asyncio.run(_send(server.url, self.model, jobs, body, at_once or len(jobs)))
        for record in records:
            if record.error is not None:
                raise RuntimeError(f"{contestant.name}: {record.error}: {record.message}")
        return records


Figures = dict[str, float]


class Prompts:
    """Questions about documents of natural prose, each different from all others."""

    def __init__(self, model: str) -> None:
        self._tokenizer = open_checkpoint(ModelConfig(model=model)).load_tokenizer()

    def make(self, num_tokens: int, index: int) -> str:
        """A prompt of `num_tokens` tokens, with the chat template's."""
        draw = ExampleDraw(seed=index, num_tokens=num_tokens, index=0, samples=1)
        example = SUBTASKS["natural"](self._tokenizer, draw)
        return f"{example.document}\n\n{example.question}"


def _jobs(texts: Sequence[str], max_tokens: int) -> list[Job]:
    return [Job(index=i, prompt=text, max_tokens=max_tokens) for i, text in enumerate(texts)]


async def _send(
    url: str, model: str, jobs: Sequence[Job], fields: dict[str, Any], at_once: int
) -> list[Record]:
    """Send all jobs, at most `at_once` in progress; return what was seen of each."""
    common = {
        "model": model,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    turn = asyncio.Semaphore(at_once)
    records = [Record(index=job.index) for job in jobs]
    async with httpx.AsyncClient(base_url=url, timeout=None) as http:
        client = Client(http, chat=True, timeout_s=_TIMEOUT_S, fields={**common, **fields})
        origin_s = time.perf_counter()

        async def send(job: Job, record: Record) -> None:
            async with turn:
                await client.send(job, record, origin_s)

        await asyncio.gather(*map(send, jobs, records))
    return records


def _decode_rate(records: Sequence[Record]) -> Figures:
    """Tokens per second while all streams generate: from the last first text to the first end.

    Servers read several prompts in different orders, and time for reading would else be counted.
    """
    began_s = max(map(_first_text_s, records))
    ended_s = min(record.ended_s or 0.0 for record in records)
    tokens = 0.0
    for record in records:
        arrived_s = list(accumulate(record.gaps_s, initial=_first_text_s(record)))
        inside = sum(began_s < at_s <= ended_s for at_s in arrived_s)
        tokens += inside * record.output_tokens / len(arrived_s)
    if ended_s <= began_s:
        raise RuntimeError("a stream has ended before the last has begun: more --decode-tokens")
    return {"tokens_per_s": tokens / (ended_s - began_s)}


def _first_text_s(record: Record) -> float:
    return record.started_s + (record.ttft_s or 0.0)


if __name__ == "__main__":
    main()
