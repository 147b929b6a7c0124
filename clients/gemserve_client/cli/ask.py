"""`gemserve-client ask FILE… "QUESTION"`: print answers on stdout as they arrive."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemserve_client.cli.connection import add_server_options, connected, first_model
from gemserve_client.cli.errors import Misused
from gemserve_client.cli.spinner import waiting
from gemserve_client.cli.text_files import read_text
from gemserve_client.filters import Filter

if TYPE_CHECKING:
    from openai.types.chat import (
        ChatCompletionContentPartParam,
        ChatCompletionMessageParam,
        ChatCompletionUserMessageParam,
    )

    from gemserve_client.client import GemserveClient
    from gemserve_client.replies import FilterReport, Progress

WHY: dict[str, str] = {
    "short_prompt": "it is short",
    "not_calibrated": "the model is not calibrated yet",
    "mostly_protected": "most of it is always read",
    "cached": "most of it was read whole before",
    "disabled": "there is no filter",
    "prompt_logprobs": "all of its tokens are scored",
    "diffuse_attention": "attention was diffuse",
    "widened": "attention was diffuse",
    "error": "the filter failed",
}


def add_command(commands: Any) -> None:
    parser = commands.add_parser("ask", help="answer questions about files", allow_abbrev=False)
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="text files, or ids of stored documents; - is standard input",
    )
    parser.add_argument("question", metavar="QUESTION")
    parser.add_argument(
        "--interactive",
        action="store_true",
        help="answer further questions, one a line of standard input",
    )
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--filter", metavar="METHOD", help="default: the server's")
    parser.add_argument("--keep", type=_keep, help="tokens, a fraction in (0, 1), or auto")
    parser.add_argument(
        "--window", type=_window, help="tokens of a window of the documents, auto, or off"
    )
    parser.add_argument("--adapter", metavar="NAME", help="of those the server lists")
    parser.add_argument(
        "--max-tokens", type=int, default=256, help="longest answer (default: %(default)s)"
    )
    parser.add_argument("--show-kept", action="store_true", help="print the kept passages")
    add_server_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    if arguments.interactive and "-" in arguments.files:
        raise Misused("--interactive: reads questions from standard input, so no FILE can be -")
    ids = [name for name in arguments.files if _is_stored(name)]
    texts = [read_text(name) for name in arguments.files if name not in ids]
    if not ids and not "".join(texts).strip():
        raise Misused("FILE: must not be empty")
    if not arguments.question.strip():
        raise Misused("QUESTION: must not be empty")
    with connected(arguments) as client:
        for question in _questions(arguments):
            message = _message(ids, texts, question)
            report = _answer(client, arguments, message)
            if arguments.show_kept and report is not None and report.applied:
                _show_kept(client, message, report)


def _is_stored(name: str) -> bool:
    """Is this the id of a stored document, and no file?"""
    return re.fullmatch("doc-[0-9a-f]{32}", name) is not None and not Path(name).exists()


def _message(
    ids: Sequence[str], texts: Sequence[str], question: str
) -> ChatCompletionUserMessageParam:
    """Documents and question with empty lines between them, the stored documents first."""
    text = "\n\n".join([*texts, question])
    if not ids:
        return {"role": "user", "content": text}
    content: list[ChatCompletionContentPartParam] = []
    for document_id in ids:  # the server puts a line end between two parts
        content.append({"type": "file", "file": {"file_id": document_id}})
        content.append({"type": "text", "text": ""})
    content[-1] = {"type": "text", "text": f"\n{text}"}
    return {"role": "user", "content": content}


def _questions(arguments: argparse.Namespace) -> Iterator[str]:
    yield arguments.question
    if not arguments.interactive:
        return
    while True:
        if sys.stdin.isatty():
            print("question: ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def _answer(
    client: GemserveClient, arguments: argparse.Namespace, message: ChatCompletionUserMessageParam
) -> FilterReport | None:
    """Print what the filter did on stderr, then the answer on stdout as it arrives."""
    with waiting("reading") as show:
        stream = client.chat.completions.create(
            model=arguments.model or first_model(client),
            messages=[message],
            temperature=0,
            stream=True,
            filter=_filter(arguments),
            adapter=arguments.adapter,
            max_tokens=arguments.max_tokens,
            progress=sys.stderr.isatty(),
        )
        first = next(stream, None)
        while first is not None and first.progress is not None:
            show(title_of(first.progress))
            first = next(stream, None)
    report, finish_reason = None, None
    with stream:
        for chunk in chain([first] if first else [], stream):
            if chunk.filter is not None:
                report = chunk.filter
                print(summary_of(report), file=sys.stderr, flush=True)
            for choice in chunk.choices:
                print(choice.delta.content or "", end="", flush=True)
                finish_reason = choice.finish_reason or finish_reason
    print(flush=True)
    if finish_reason == "length":
        print("the answer is cut: it reached --max-tokens", file=sys.stderr)
    return report


def title_of(progress: Progress) -> str:
    """What is under way, for a terminal."""
    if progress.phase == "queue":
        return "waiting for the server"
    share = progress.tokens / max(1, progress.total)
    left = "" if progress.eta_ms is None else f", about {progress.eta_ms / 1e3:.0f} s left"
    verb = "filtering" if progress.phase == "filter" else "reading"
    return f"{verb}: {progress.tokens:,} of {progress.total:,} tokens ({share:.0%}){left};"


def _filter(arguments: argparse.Namespace) -> Filter | None:
    given: Filter = {}
    if arguments.filter is not None:
        given["method"] = arguments.filter
    if arguments.keep is not None:
        given["keep"] = arguments.keep
    if arguments.window is not None:
        given["window"] = arguments.window
    if arguments.show_kept:
        given["return_selection"] = True
    return given or None


def _keep(text: str) -> int | float | str:
    """A count or fraction as a number, or "auto". The server checks the value itself."""
    if text == "auto":
        return text
    try:
        value = int(text) if text.isdecimal() else float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number or auto")
    return value


def _window(text: str) -> int | str:
    """A count of tokens, "auto" or "off". The server checks the value itself."""
    if text in ("auto", "off"):
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of tokens, auto or off")
    return int(text)


def summary_of(report: FilterReport) -> str:
    """One line: what the filter did or, if it chose nothing, why."""
    seen = "" if report.coverage is None else f"coverage {report.coverage:.2f}"
    if report.reason is not None:
        why = WHY.get(report.reason, report.reason)  # a reason that only a newer server knows
        seen = f" ({why}: {seen})" if seen else f" ({why})"
    else:
        seen = seen and f", {seen}"
    if not report.applied:
        return f"read all {report.prompt_tokens:,} tokens{seen}"
    layer = "" if report.layer is None else f" at layer {report.layer}"
    cached = f"; {report.cached_tokens:,} were read before" if report.cached_tokens else ""
    if report.windows:
        found = report.cached_windows
        cached = f"; {report.windows:,} windows" + (f", {found:,} read before" if found else "")
    return (
        f"{report.method}{layer} kept {report.kept_tokens:,} of {report.prompt_tokens:,} tokens "
        f"in {report.filter_ms:,.0f} ms{seen}{cached}"
    )


def _show_kept(
    client: GemserveClient, message: ChatCompletionMessageParam, report: FilterReport
) -> None:
    """Print each kept range on stderr. The server detokenizes them."""
    if report.selection is None:
        print(f"{report.method} keeps other passages in every layer", file=sys.stderr)
        return
    ids = _post(client, "tokenize", {"messages": [message]})["tokens"]
    for start, stop in report.selection:
        text = _post(client, "detokenize", {"tokens": ids[start:stop]})["prompt"]
        print(f"[{start}:{stop}] {text!r}", file=sys.stderr)


def _post(client: GemserveClient, name: str, body: dict[str, Any]) -> Any:
    """Send a request to an endpoint that is beside /v1 and not in it."""
    return client.post(str(client.base_url.join(f"../{name}")), cast_to=object, body=body)
