"""`make demo`: hide a fact in a long document, ask for it unfiltered and filtered, compare."""

from __future__ import annotations

import argparse
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemserve.evaluation.prose import stdlib_sentences
from gemserve.evaluation.recall import Needle, draw_needles
from gemserve.model.loader import BUILTIN_PATH

START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 300.0
WHOLE, FILTERED = "filter: none", "the default filter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One answer, as the client saw it."""

    text: str
    ttft_s: float
    report: dict[str, Any]
    peak_kv_bytes: float
    decode_kv_bytes: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=7, help="default: %(default)s")
    arguments = parser.parse_args()

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BUILTIN_PATH)
    rng = random.Random(arguments.seed)
    (needle,) = draw_needles(rng, 1)
    with tempfile.TemporaryDirectory() as directory, _Server(Path(directory)) as server:
        document, place = _document(tokenizer, needle, arguments.tokens, rng)
        print(f'\nHidden {place:.0%} into the document:  "{needle.statement}"')
        print(f'Question:  "{needle.question}"\n')
        # a first short answer pays for what only happens once
        print(f"{'Warming up:':<32}", end="", flush=True)
        server.ask("The code for the lamp is 123.\n\nWhat is the code for the lamp?", "none")
        results: dict[str, Result] = {}
        for label, method in ((WHOLE, "none"), (FILTERED, None)):
            print(f"Asking with {label + ':':<20}", end="", flush=True)
            results[label] = server.ask(f"{document}\n\n{needle.question}", method)
        print()
        _print_table(results, needle.value)
        _print_kept(tokenizer, document, needle, results[FILTERED])
    return 0 if results[FILTERED].text.strip() == needle.value else 1


class _Server:
    """`gemserve serve` as a child process, on a free port."""

    def __init__(self, directory: Path) -> None:
        self._log = directory / "server.log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._url = f"http://127.0.0.1:{probe.getsockname()[1]}"

    def __enter__(self) -> _Server:
        import openai

        port = self._url.rsplit(":", 1)[1]
        command = [sys.executable, "-m", "gemserve.cli.main", "serve", "--port", port]
        print(f"$ gemserve serve --port {port}", flush=True)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "HF_HUB_OFFLINE": "1"}
            )
        self._client = openai.OpenAI(
            base_url=f"{self._url}/v1", api_key="none", timeout=ANSWER_TIMEOUT_S, max_retries=0
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                urllib.request.urlopen(f"{self._url}/ready", timeout=5).close()
                return self
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        self.__exit__()
        raise SystemExit(f"the server did not start:\n{self._log.read_text()}")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def ask(self, content: str, method: str | None) -> Result:
        """Stream one greedy answer through the `openai` client, printing it as it comes."""
        chosen: dict[str, Any] = {"return_selection": True}
        if method is not None:
            chosen["method"] = method
        before = self._kv_bytes()
        started_s = time.monotonic()
        ttft_s = 0.0
        text = ""
        report: dict[str, Any] = {}
        stream = self._client.chat.completions.create(
            model="builtin",
            messages=[{"role": "user", "content": content}],
            temperature=0,
            max_tokens=24,
            stream=True,
            extra_body={"filter": chosen},
        )
        for chunk in stream:
            report = report or (chunk.model_extra or {}).get("filter", {})
            delta = chunk.choices[0].delta.content if chunk.choices else None
            if delta:
                ttft_s = ttft_s or time.monotonic() - started_s
                text += delta
                print(delta, end="", flush=True)
        print()
        after = self._kv_bytes()
        return Result(
            text=text,
            ttft_s=ttft_s,
            report=report,
            peak_kv_bytes=after["peak"] - before["peak"],
            decode_kv_bytes=after["decode"] - before["decode"],
        )

    def _kv_bytes(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=10) as reply:
            text = reply.read().decode()
        sums = {"peak": 0.0, "decode": 0.0}
        pattern = r'^gemserve_request_kv_cache_bytes_sum\{stage="(\w+)"\} (\S+)$'
        for stage, value in re.findall(pattern, text, re.MULTILINE):
            sums[stage] = float(value)
        return sums


def _document(
    tokenizer: Any, needle: Needle, num_tokens: int, rng: random.Random
) -> tuple[str, float]:
    """At least `num_tokens` tokens of the standard library's documentation, the fact inside."""
    sentences = stdlib_sentences()
    start = rng.randrange(len(sentences))
    chosen: list[str] = []
    while not chosen or len(tokenizer.encode(" ".join(chosen))) < num_tokens:
        chosen += [sentences[(start + len(chosen) + i) % len(sentences)] for i in range(32)]
    at = rng.randrange(len(chosen) // 8, len(chosen) // 2)
    return " ".join([*chosen[:at], needle.statement, *chosen[at:]]), at / len(chosen)


def _print_table(results: dict[str, Result], answer: str) -> None:
    print(
        f"{'filter':<10}{'answer':<12}{'':<8}{'tokens read':>12}{'kept':>8}{'TTFT':>10}"
        f"{'speed-up':>10}{'KV peak':>11}{'KV decode':>11}"
    )
    baseline = results[WHOLE].ttft_s
    for result in results.values():
        verdict = "right" if result.text.strip() == answer else "wrong"
        print(
            f"{result.report['method']:<10}{result.text.strip() or '(empty)':<12}{verdict:<8}"
            f"{result.report['prompt_tokens']:>12,}{result.report['kept_tokens']:>8,}"
            f"{result.ttft_s:>9.2f}s{baseline / result.ttft_s:>9.1f}×"
            f"{_mib(result.peak_kv_bytes):>11}{_mib(result.decode_kv_bytes):>11}"
        )


def _print_kept(tokenizer: Any, document: str, needle: Needle, result: Result) -> None:
    """The kept passages, shortened, the one with the fact marked."""
    messages = [{"role": "user", "content": f"{document}\n\n{needle.question}"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    print("\nKept passages (those around the fact are marked):")
    for start, stop in result.report["selection"]:
        passage = " ".join(tokenizer.decode(ids[start:stop]).split())
        mark = "►" if needle.value in passage else " "
        shown = (
            passage if len(passage) <= 84 or mark == "►" else f"{passage[:40]} … {passage[-40:]}"
        )
        print(f" {mark} [{start:>6}, {stop:>6})  {shown}")


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


if __name__ == "__main__":
    sys.exit(main())
