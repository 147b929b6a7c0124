"""The load test's command line: its flags, their limits, and one line for each mistake."""

from __future__ import annotations

import argparse
import json
import math
import os
import secrets
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Literal, NoReturn, TypeVar

import httpx

from gemserve_client.address import redact
from gemserve_client.load_test.metrics import Slo
from gemserve_client.load_test.traffic import ArrivalKind, Lengths, read_lengths

MAX_REQUESTS = 100_000
MAX_CONCURRENCY = 10_000
MAX_RATE = 10_000
MAX_POINTS = 64
MAX_SECONDS = 7 * 86_400
MAX_FILE_BYTES = 256 << 20
MAX_SEED = (1 << 31) - 1
SECRET_FLAGS = ("--api-key",)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All options of a load test. Exactly one of `rates` and `concurrencies` is empty.

    `name` begins every message.
    """

    name: str
    url: str
    requests: int
    rates: tuple[float, ...]
    concurrencies: tuple[int, ...]
    arrivals: ArrivalKind
    ramp_s: float
    prompt_tokens: Lengths
    max_tokens: Lengths
    words: tuple[str, ...] | None
    endpoint: Literal["chat", "completions"]
    model: str | None
    api_key: str | None
    extra_body: dict[str, Any]
    ignore_eos: bool
    temperature: float
    timeout_s: float
    max_seconds: float
    slo: Slo
    seed: int
    label: str | None
    device: str | None
    out: Path | None
    json_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two result files to set side by side."""

    name: str
    before: Path
    after: Path
    out: Path | None
    json_only: bool


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print one line with the flag, the value and the limit, and exit with status 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def read_options(words: Sequence[str], program: str) -> Options | Comparison:
    """Parse and check the arguments. A mistake ends the program with status 2."""
    parser = make_parser(PurePath(program).name)
    given = parser.parse_args(words)
    if given.compare is not None:
        before, after = given.compare
        return Comparison(
            name=parser.prog, before=before, after=after, out=given.out, json_only=given.json
        )
    if given.url is None or given.requests is None:
        parser.error("needs --url and --requests (or --compare A.json B.json)")
    if (given.rate is None) == (given.concurrency is None):
        parser.error("needs one of --rate and --concurrency")
    if given.rate is not None and given.ramp:
        parser.error(f"argument --ramp: {given.ramp:g} s has no effect with --rate")
    return Options(
        name=parser.prog,
        url=given.url,
        requests=given.requests,
        rates=given.rate or (),
        concurrencies=given.concurrency or (),
        arrivals=given.arrivals,
        ramp_s=given.ramp,
        prompt_tokens=given.prompt_tokens,
        max_tokens=given.max_tokens,
        words=given.prompt_file,
        endpoint=given.endpoint,
        model=given.model,
        api_key=given.api_key,
        extra_body=given.extra_body,
        ignore_eos=given.ignore_eos,
        temperature=given.temperature,
        timeout_s=given.timeout,
        max_seconds=given.max_seconds,
        slo=Slo(ttft_ms=given.slo_ttft_ms, tpot_ms=given.slo_tpot_ms),
        seed=secrets.randbelow(MAX_SEED + 1) if given.seed is None else given.seed,
        label=given.label,
        device=given.device,
        out=given.out,
        json_only=given.json,
    )


def command_line(program: str, words: Sequence[str]) -> str:
    """The arguments as they were typed, without secrets."""
    shown: list[str] = []
    hides_next = False
    for word in words:
        flag, equals, _ = word.partition("=")
        # argparse accepts any unambiguous beginning of a flag
        is_secret = len(flag) > 3 and any(name.startswith(flag) for name in SECRET_FLAGS)
        shown.append("***" if hides_next else f"{flag}=***" if is_secret and equals else word)
        hides_next = is_secret and not equals
    return redact(f"{program} {shlex.join(shown)}")


def make_parser(name: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=name,
        description="Load test of any OpenAI-compatible server: TTFT, TPOT, ITL, E2E, goodput.",
        epilog="Lengths are N, LOW:HIGH (uniform) or MEAN~SD (normal). Several values of --rate or "
        "--concurrency, with commas, give one row each.",
    )
    add = parser.add_argument
    add(
        "--url",
        type=_url,
        default=os.environ.get("GEMSERVE_URL"),
        help="the server's address, with or without /v1; default: GEMSERVE_URL",
    )
    add("--requests", type=_number(int, 1, MAX_REQUESTS), metavar="N", help="requests per point")
    _add_traffic(parser.add_argument_group("traffic").add_argument)
    _add_requests(parser.add_argument_group("requests").add_argument)
    _add_results(parser.add_argument_group("results").add_argument)
    return parser


def _add_traffic(add: Callable[..., object]) -> None:
    number = _number
    add("--rate", type=_several(number(float, 1e-6, MAX_RATE)), metavar="R", help="requests/s")
    add(
        "--concurrency", type=_several(number(int, 1, MAX_CONCURRENCY)), metavar="C", help="at once"
    )
    add("--arrivals", choices=("poisson", "constant"), default="poisson", help="with --rate")
    add("--ramp", type=number(float, 0, MAX_SECONDS), default=0.0, metavar="SECONDS")
    add("--prompt-tokens", type=_checked(read_lengths), default="512", metavar="LENGTHS")
    add("--max-tokens", type=_checked(read_lengths), default="128", metavar="LENGTHS")
    add("--prompt-file", type=_words, metavar="FILE", help="words for prompts, in its order")
    add(
        "--seed",
        type=number(int, 0, MAX_SEED),
        help="the same seed sends the same prompts, which a server may have cached; default: "
        "another one for each run, which --out's result names",
    )


def _add_requests(add: Callable[..., object]) -> None:
    number = _number
    add("--endpoint", choices=("chat", "completions"), default="chat")
    add("--model", help="default: the first that the server lists")
    add(
        "--api-key",
        type=_key,
        default=os.environ.get("GEMSERVE_API_KEY"),
        help="default: GEMSERVE_API_KEY, which no process list shows",
    )
    add("--extra-body", type=_object, default="{}", metavar="JSON", help="more fields, or others")
    add("--ignore-eos", action="store_true", help="send ignore_eos: answers of full length")
    add("--temperature", type=number(float, 0, 2), default=0.0)
    add("--timeout", type=number(float, 0.001, MAX_SECONDS), default=600.0, metavar="SECONDS")
    add("--max-seconds", type=number(float, 0.001, MAX_SECONDS), default=3600.0, metavar="SECONDS",
        help="bound of the whole run; default: %(default)g")  # fmt: skip


def _add_results(add: Callable[..., object]) -> None:
    number = _number
    add("--slo-ttft-ms", type=number(float, 0, math.inf), metavar="MS", help="limit for goodput")
    add("--slo-tpot-ms", type=number(float, 0, math.inf), metavar="MS", help="limit for goodput")
    add("--label", help="a name for this run")
    add("--device", help="a description of the server's device, for the result")
    add("--out", type=_folder, metavar="DIR", help="write CSV, JSON, pictures and report.html")
    add("--json", action="store_true", help="only the result line")
    add("--compare", nargs=2, type=Path, metavar=("A.json", "B.json"), help="two result.json")


def _checked(read: Callable[[str], T]) -> Callable[[str], T]:
    """A reader like `read` whose ValueError also shows the value."""

    def checked(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} {error}") from None

    return checked


def _number(kind: Callable[[str], T], low: float, high: float) -> Callable[[str], T]:
    def read(text: str) -> T:
        noun = "a whole number" if kind is int else "a number"
        limit = f"of at least {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"
        try:
            value: Any = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or math.isinf(value):
            raise ValueError(f"must be {noun} {limit}")
        return value

    return _checked(read)


def _several(read: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    def read_all(text: str) -> tuple[T, ...]:
        values = tuple(map(read, text.split(",")))
        if len(values) > MAX_POINTS:
            raise argparse.ArgumentTypeError(f"{len(values)} values: at most {MAX_POINTS}")
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"{text!r} names a value twice")
        return values

    return read_all


def _url(text: str) -> str:
    try:
        url = httpx.URL(text)
        is_good = url.scheme in ("http", "https") and bool(url.host) and not url.query
    except httpx.InvalidURL:
        is_good = False
    if not is_good:
        raise argparse.ArgumentTypeError(f"{text!r} must look like http://HOST:PORT")
    return text.rstrip("/").removesuffix("/v1")


def _key(text: str) -> str:
    if not (text.isascii() and text.isprintable()):
        raise argparse.ArgumentTypeError("must be printable ASCII")  # not shown: it is secret
    return text


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON object")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _words(text: str) -> tuple[str, ...]:
    path = Path(text)
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise argparse.ArgumentTypeError(f"{text}: at most {MAX_FILE_BYTES >> 20} MiB")
        words = tuple(path.read_text(encoding="utf-8").split())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise argparse.ArgumentTypeError(f"{text}: {reason}") from None
    if not words:
        raise argparse.ArgumentTypeError(f"{text}: holds no words")
    return words


def _folder(text: str) -> Path:
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: is not a folder")
    return path
