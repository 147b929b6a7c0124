"""How many tokens a reply took and kept: `usage`, the `filter` object, and headers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from gemserve.api.replies.choice import ReplyChoice
from gemserve.api.replies.reply_types import FilterObject, Usage
from gemserve.contract.reports import FilterReport
from gemserve.contract.requests import Request

PROMPT_TOKENS_HEADER, KEPT_TOKENS_HEADER = "X-Gemserve-Prompt-Tokens", "X-Gemserve-Kept-Tokens"
MAX_TOKENS_HEADER = "X-Gemserve-Max-Tokens"  # the most that the answer may have
FILTER_HEADER = "X-Gemserve-Filter"  # the `filter` object as JSON, without what may be long


def filter_object(report: FilterReport) -> FilterObject:
    # not `asdict` of the whole, which copies each of thousands of messages and ranges
    return {
        **_flat(report),
        "filter_ms": round(report.filter_ms, 3),
        "messages": report.messages and [*map(_flat, report.messages)],
        "searched": report.searched and _flat(report.searched),
        "sources": report.sources and [*map(_flat, report.sources)],
        "scores": report.scores and asdict(report.scores),
    }


def num_parts(report: FilterReport) -> int:
    """How many parts the `filter` object has that take as long to write as a scored token."""
    passages = () if report.scores is None else report.scores.passages
    several = (report.messages, report.selection, report.sources, passages)
    return sum(len(each or ()) for each in several)


def _flat(report: Any) -> dict[str, Any]:
    """The fields of a report, as they are."""
    return {name: getattr(report, name) for name in type(report).__slots__}


def usage_object(reports: Sequence[FilterReport], choices: Sequence[ReplyChoice]) -> Usage:
    """Usage of a reply to prompts with these reports, and with these choices until now.

    `prompt_tokens` counts what the client sent, not what the filter kept.
    """
    completion_tokens = sum(choice.completion_tokens for choice in choices)
    prompt_tokens = sum(report.prompt_tokens for report in reports)
    cached_tokens = sum(map(cached_tokens_of, reports))
    usage: Usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": cached_tokens,
            "kept_tokens": sum(report.kept_tokens for report in reports),
            "protected_tokens": sum(report.protected_tokens for report in reports),
        },
    }
    if reports and (difference := reports[0].first_difference) is not None:
        usage["prompt_tokens_details"]["first_difference"] = difference
    if proposed := sum(choice.proposed_tokens for choice in choices):
        accepted = sum(choice.accepted_tokens for choice in choices)
        usage["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": proposed - accepted,
        }
    return usage


def cached_tokens_of(report: FilterReport) -> int:
    """Prompt tokens that were not read again.

    If the fallback read the prompt whole, the report was made before that: it counts as none.
    """
    has_fallen_back = report.reason in ("diffuse_attention", "error")
    return 0 if has_fallen_back else report.cached_tokens


def token_headers(reports: Sequence[FilterReport]) -> dict[str, str]:
    """The headers of a reply to prompts with these reports; of one prompt, with its report."""
    headers = {
        PROMPT_TOKENS_HEADER: str(sum(report.prompt_tokens for report in reports)),
        KEPT_TOKENS_HEADER: str(sum(report.kept_tokens for report in reports)),
    }
    if len(reports) == 1:
        # a selection may have thousands of ranges, and proxies limit headers
        report = replace(reports[0], selection=None, scores=None, messages=None, sources=None)
        headers[FILTER_HEADER] = json.dumps(filter_object(report))
    return headers


def answer_headers(reports: Sequence[FilterReport], requests: Sequence[Request]) -> dict[str, str]:
    """The headers of a reply that answers these requests; none until it is known what was kept."""
    if not reports:
        return {}
    most = min(request.sampling.max_tokens for request in requests)
    return {**token_headers(reports), MAX_TOKENS_HEADER: str(most)}
