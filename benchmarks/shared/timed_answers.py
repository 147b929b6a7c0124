"""Greedy answers of an engine core under the server's defaults, and when their parts were ready."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from typing import Any

from gemserve.contract.events import Filtered, Finished, TextDelta
from gemserve.contract.filter_options import FilterOptions
from gemserve.contract.reports import FilterReport
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.core import Core
from gemserve.filtering.context_limits import ContextLimits
from gemserve.prompting.prompt import Prompt

HAS_SEGMENTS = any(field.name == "window" for field in fields(FilterOptions))


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAnswer:
    """`choose_s`: until the filter has chosen. `ttft_s`: until the first token, if there is one."""

    text: str
    report: FilterReport
    choose_s: float
    ttft_s: float | None
    total_s: float
    peak_kv_bytes: int


def filter_options(segment_size: int | str | None = None, **given: Any) -> FilterOptions:
    """A request's options. `segment_size` None: the field is left out, as old servers want it."""
    if segment_size is not None and HAS_SEGMENTS:
        given["window"] = segment_size
    return FilterOptions(**given, return_selection=True)


def answer(
    core: Core,
    prompt: Prompt,
    options: FilterOptions,
    max_tokens: int,
    tenant: str = "",
    *,
    selects_only: bool = False,
) -> TimedAnswer:
    """Answer one prompt while nothing else runs. Tenants share nothing in the document cache.

    `selects_only`: the answer is empty, and the request ends when the filter has chosen.

    Raises `RequestError` where a server would refuse, and `RuntimeError` if the engine fails.
    """
    limits = ContextLimits(
        planner=core.planner,
        params=core.planner.resolve(options),
        num_tokens=len(prompt.ids),
        protected=prompt.protected,
        longest=core.config.max_prompt_tokens,
    )
    limits.check_prompt("messages")
    limits.check_answer(max_tokens, "max_tokens", "messages")
    asked = Request(
        request_id="benchmark",
        **prompt.fields,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        filter=limits.params,
        tenant=tenant.encode(),
        selects_only=selects_only,
    )
    started_s = time.monotonic()
    report, choose_s, ttft_s, text = None, 0.0, None, ""
    for event in core.run_alone(asked):
        if isinstance(event, Filtered):
            report, choose_s = event.report, event.filtered_s - started_s
        elif isinstance(event, TextDelta):
            ttft_s = ttft_s or time.monotonic() - started_s
            text += event.text
        elif isinstance(event, Finished):
            ended = event
    if ended.error is not None or report is None:
        raise RuntimeError(f"the request failed: {ended.error}")
    return TimedAnswer(
        text=text,
        report=report,
        choose_s=choose_s,
        ttft_s=ttft_s,
        total_s=time.monotonic() - started_s,
        peak_kv_bytes=ended.peak_kv_bytes,
    )
