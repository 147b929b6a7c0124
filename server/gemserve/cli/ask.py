"""`gemserve ask FILE… "QUESTION"`: one answer, offline."""

from __future__ import annotations

import argparse
import sys
import uuid
from pathlib import Path
from typing import Any

from gemserve.cli.adapter_inspect import MAX_BYTES
from gemserve.cli.options import (
    ENGINE_OPTIONS,
    MODEL_OPTIONS,
    add_options,
    read_options,
)
from gemserve.config import EngineConfig, ModelConfig
from gemserve.errors import AdapterError, GemserveError, PromptTooLong, RequestError
from gemserve.types import FilterReason, FilterReport

WHY: dict[FilterReason, str] = {
    "short_prompt": "it is short",
    "disabled": "there is no filter",
    "prompt_logprobs": "all of its tokens are scored",
    "diffuse_attention": "attention was diffuse",
    "widened": "attention was diffuse",
    "error": "the filter failed",
}


def add_command(commands: Any) -> None:
    parser = commands.add_parser("ask", help="answer one question about files, offline")
    parser.add_argument("files", nargs="+", metavar="FILE", help="text files; - is standard input")
    parser.add_argument("question", metavar="QUESTION")
    parser.add_argument("--max-tokens", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--show-kept", action="store_true", help="print the kept passages")
    # under the name of a server's setting: GEMSERVE_ADAPTER is that, and of another form
    parser.add_argument("--adapter", metavar="PATH", dest="adapters", help="an adapter's folder")
    add_options(parser, MODEL_OPTIONS, ENGINE_OPTIONS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from gemserve.evaluation.calibrated import build_calibrated_core
    from gemserve.prompting.prompt import chat_prompt, text_prompt
    from gemserve.types import (
        Filtered,
        FilterOptions,
        Finished,
        Request,
        SamplingParams,
        TextDelta,
    )

    if arguments.max_tokens < 1:
        raise RequestError(f"max_tokens={arguments.max_tokens}: must be at least 1", param=None)
    document = "\n\n".join(_read(name) for name in arguments.files)
    for name, text in (("FILE", document), ("QUESTION", arguments.question)):
        if not text.strip():
            raise RequestError(f"{name}: must not be empty", param=None)
    model = read_options(arguments, MODEL_OPTIONS, ModelConfig)
    engine = read_options(arguments, ENGINE_OPTIONS, EngineConfig)
    core = build_calibrated_core(model, engine)
    adapter = None if arguments.adapters is None else _load(arguments.adapters, core.model)
    text = f"{document}\n\n{arguments.question}"
    if core.tokenizer.chat_template is None:
        prompt = text_prompt(core.tokenizer, f"{text}\nAnswer:")
    else:
        prompt = chat_prompt(core.tokenizer, [{"role": "user", "content": text}])
    config = core.config
    assert config.max_prompt_tokens is not None
    taken = 0 if adapter is None else adapter.num_positions
    limit = min(config.max_prompt_tokens, core.model.context_tokens - taken - 1)
    if len(prompt.ids) > limit:
        raise PromptTooLong(tokens=len(prompt.ids), limit=limit, param="FILE")
    request = Request(
        request_id=uuid.uuid4().hex,
        prompt_ids=prompt.ids,
        sampling=SamplingParams(max_tokens=arguments.max_tokens, temperature=0.0),
        filter=core.planner.resolve(FilterOptions(return_selection=True)),
        protected=prompt.protected,
        code_blocks=prompt.code_blocks,
        question=prompt.question,
        adapter=adapter,
    )
    for event in core.run_alone(request):
        if isinstance(event, Filtered):
            report = event.report
            print(summary_of(report), file=sys.stderr)
            if arguments.show_kept and report.selection is not None:
                for start, stop in report.selection:
                    passage = core.tokenizer.decode(prompt.ids[start:stop])
                    print(f"[{start}:{stop}] {passage!r}", file=sys.stderr)
        elif isinstance(event, TextDelta):
            print(event.text, end="", flush=True)
        elif isinstance(event, Finished):
            print(flush=True)
            if event.reason == "length":
                print("the answer is cut: it reached --max-tokens", file=sys.stderr)
    return 0


def _load(path: str, model: Any) -> Any:
    from gemserve.adapters.table import load_adapter
    from gemserve.model.base import base_of

    try:
        return load_adapter(path, Path(path).resolve(), model, base_of(model), MAX_BYTES)
    except AdapterError as error:
        raise AdapterError(f"adapter={path}: {error}") from error


def _read(name: str) -> str:
    if name == "-":
        return sys.stdin.read()
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GemserveError(f"cannot read {name} as text: {error}") from error


def summary_of(report: FilterReport) -> str:
    """What the filter did, and where it did not choose, why: one line."""
    seen = "" if report.coverage is None else f"coverage {report.coverage:.2f}"
    if report.reason is not None:
        why = WHY[report.reason]
        seen = f" ({why}: {seen})" if seen else f" ({why})"
    else:
        seen = seen and f", {seen}"
    if not report.applied:
        return f"read all {report.prompt_tokens:,} tokens{seen}"
    layer = "" if report.layer is None else f" at layer {report.layer}"
    return (
        f"{report.method}{layer} kept {report.kept_tokens:,} of {report.prompt_tokens:,} tokens "
        f"in {report.filter_ms:,.0f} ms{seen}"
    )
