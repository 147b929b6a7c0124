"""`gemserve ask FILE… "QUESTION"`: answer questions about files without a server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemserve.cli.adapter_inspect import MAX_BYTES
from gemserve.cli.options import (
    ENGINE_OPTIONS,
    MODEL_OPTIONS,
    add_options,
    read_options,
)
from gemserve.cli.progress_line import ProgressLine
from gemserve.config import EngineConfig, ModelConfig
from gemserve.contract.filter_plan import FilterReason
from gemserve.contract.reports import FilterReport
from gemserve.errors import AdapterError, GemserveError, RequestError, shown
from gemserve.files.file_text import MOST_BYTES, NoText, read_bytes, text_of

if TYPE_CHECKING:
    from gemserve.llm import LLM, Passage
    from gemserve.prompting.prompt import Prompt

WHY: dict[FilterReason, str] = {
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

_SHOWN_SOURCES = 5


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "ask",
        help="answer questions about files, offline",
        usage="%(prog)s [OPTION …] [FILE …] QUESTION",
    )
    # one list, so that a missing FILE or QUESTION is told by `_split`
    parser.add_argument(
        "words",
        nargs="*",
        metavar="[FILE …] QUESTION",
        help="files (what libraries read; - is standard input), and what is asked about them",
    )
    parser.add_argument(
        "--also",
        metavar="QUESTION",
        action="append",
        default=[],
        help="a further question, for which the files are not read again; may be repeated",
    )
    parser.add_argument(
        "--interactive",
        action="store_true",
        help="answer further questions, one a line of standard input",
    )
    parser.add_argument("--max-tokens", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--show-kept", action="store_true", help="print the kept passages")
    parser.add_argument("--adapter", metavar="PATH", help="an adapter's folder")
    add_options(parser, MODEL_OPTIONS, ENGINE_OPTIONS)
    parser.set_defaults(run=run)


def run(
    arguments: argparse.Namespace,
    prompts_of: Callable[[LLM], Callable[[str], Prompt]] | None = None,
) -> int:
    """Answer. `prompts_of`: makes prompts with text from elsewhere in front of the question."""
    files, question = _split(arguments.words, needs_files=prompts_of is None)
    if arguments.max_tokens < 1:
        raise RequestError(f"max_tokens={arguments.max_tokens}: must be at least 1", param=None)
    if arguments.interactive and "-" in files:
        raise RequestError(
            "--interactive: reads questions from standard input, so no FILE can be -", param=None
        )
    document = "\n\n".join(_read(name) for name in files)
    questions = [question, *arguments.also]
    for name, text in (("FILE", document), *(("QUESTION", question) for question in questions)):
        if not text.strip() and (name == "QUESTION" or files):
            raise RequestError(f"{name}: must not be empty", param=None)
    from gemserve.llm import LLM  # takes seconds: what is wrong above is told at once

    model = read_options(arguments, MODEL_OPTIONS, ModelConfig)
    engine = read_options(arguments, ENGINE_OPTIONS, EngineConfig)
    with LLM(model, engine) as llm:
        adapter = None if arguments.adapter is None else _load(arguments.adapter, llm.core.model)
        prompt_of = llm.prompt if prompts_of is None else prompts_of(llm)
        for question in chain(questions, _read_questions() if arguments.interactive else ()):
            text = f"{document}\n\n{question}" if document else question
            text = text if llm.has_chat_template else f"{text}\nAnswer:"
            _answer(llm, prompt_of(text), arguments, adapter)
    return 0


def _split(words: Sequence[str], *, needs_files: bool) -> tuple[Sequence[str], str]:
    """The files and the question. Raises `RequestError` if one is missing."""
    how = 'gemserve ask FILE… "QUESTION", or gemserve ask --library NAME "QUESTION"'
    if not words:
        raise RequestError(f"there is no QUESTION: {how}", param=None)
    *files, question = words
    if files or not needs_files:
        return files, question
    if Path(question).is_file():
        raise RequestError(f"there is no QUESTION about the file {question}: {how}", param=None)
    raise RequestError(f"there is no FILE to ask {shown(question)} about: {how}", param=None)


def _read_questions() -> Iterator[str]:
    """The lines of standard input, without empty ones."""
    while True:
        if sys.stdin.isatty():
            print("question: ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def _answer(llm: LLM, prompt: Prompt, arguments: argparse.Namespace, adapter: Any) -> None:
    """Print an answer as it is generated, and on standard error what the filter did."""
    from gemserve.contract.events import Filtered, Finished, TextDelta
    from gemserve.contract.filter_options import FilterOptions
    from gemserve.contract.sampling import SamplingParams

    sampling = SamplingParams(max_tokens=arguments.max_tokens, temperature=0.0)
    options = FilterOptions(return_selection=True)
    line = ProgressLine()
    report: FilterReport | None = None
    for event in llm.stream(
        prompt, sampling, filter=options, adapter=adapter, field="FILE", on_progress=line.show
    ):
        line.clear()
        if isinstance(event, Filtered):
            report = event.report
            print(summary_of(report), file=sys.stderr)
            if report.found is False:
                print(
                    "nothing was found that answers this; do not trust the answer", file=sys.stderr
                )
            if arguments.show_kept:
                _show_kept(event.report, llm.passages(prompt, event.report))
        elif isinstance(event, TextDelta):
            print(event.text, end="", flush=True)
        elif isinstance(event, Finished):
            print(flush=True)
            if event.error is not None:
                raise GemserveError(f"the request failed: {event.error}")
            if event.reason == "length":
                print("the answer is cut: it reached --max-tokens", file=sys.stderr)
    if report is not None and report.sources is not None:
        _show_sources(report)


def _show_sources(report: FilterReport) -> None:
    """Where what was kept comes from, one line for each place, the best first."""
    lines: dict[str, None] = {}
    for source in report.sources or ():
        where = source.file
        if source.lines is not None:
            where += f":{source.lines[0]}-{source.lines[1]}"
        if source.pages is not None:
            first, last = source.pages
            where += f", page {first}" if first == last else f", pages {first} to {last}"
        lines[where + (f" ({source.heading})" if source.heading else "")] = None
    if not lines:
        print("no sources: nothing was found", file=sys.stderr)
        return
    print("sources, the best first:", file=sys.stderr)
    for text in [*lines][:_SHOWN_SOURCES]:
        print(f"  {text}", file=sys.stderr)
    if len(lines) > _SHOWN_SOURCES:
        print(f"  and {len(lines) - _SHOWN_SOURCES} more", file=sys.stderr)


def _show_kept(report: FilterReport, passages: Sequence[Passage]) -> None:
    if not report.applied:
        print("the model reads the whole prompt: all of its text is kept", file=sys.stderr)
        return
    for kept in passages:
        print(f"[{kept.start}:{kept.stop}] {kept.text!r}", file=sys.stderr)


def _load(path: str, model: Any) -> Any:
    from gemserve.adapters.kinds import load_adapter
    from gemserve.model.base_model import base_of

    try:
        return load_adapter(path, Path(path).resolve(), model, base_of(model), MAX_BYTES)
    except AdapterError as error:
        raise AdapterError(f"adapter={path}: {error}") from error


def _read(name: str) -> str:
    """The text of a file, read as libraries read it."""
    try:
        content = _read_input() if name == "-" else read_bytes(Path(name))
        return text_of(content, name).text if content.strip() else ""
    except NoText as error:
        raise GemserveError(f"{name}: {error}") from error


def _read_input() -> bytes:
    """The bytes of standard input. Raises `NoText` if there are too many."""
    content = sys.stdin.buffer.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise NoText(f"has more than {MOST_BYTES:,} bytes, the limit; split it")
    return content


def summary_of(report: FilterReport) -> str:
    """One line: what the filter did or, if it chose nothing, why."""
    note = "" if report.coverage is None else f"coverage {report.coverage:.2f}"
    if report.reason is not None:
        why = WHY[report.reason]
        note = f" ({why}: {note})" if note else f" ({why})"
    else:
        note = note and f", {note}"
    if not report.applied:
        return f"read all {report.prompt_tokens:,} tokens{note}"
    layer = "" if report.layer is None else f" at layer {report.layer}"
    cached = f"; {report.cached_tokens:,} were read before" if report.cached_tokens else ""
    if report.windows:
        found = report.cached_windows
        cached = f"; {report.windows:,} windows" + (f", {found:,} read before" if found else "")
    return (
        f"{report.method}{layer} kept {report.kept_tokens:,} of {report.prompt_tokens:,} tokens "
        f"in {report.filter_ms:,.0f} ms{note}{cached}"
    )
