"""How many tokens a reply took and kept: `usage`, the `filter` object, and headers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from gemserve.api.replies.reply_types import FilterObject, Usage
from gemserve.types import FilterReport

PROMPT_TOKENS_HEADER, KEPT_TOKENS_HEADER = "X-Gemserve-Prompt-Tokens", "X-Gemserve-Kept-Tokens"


def filter_object(report: FilterReport) -> FilterObject:
    return {**asdict(report), "filter_ms": round(report.filter_ms, 3)}


def usage_object(prompt_tokens: int, completion_tokens: int) -> Usage:
    """`prompt_tokens` counts what the client sent, not what the filter kept."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def token_headers(reports: Sequence[FilterReport]) -> dict[str, str]:
    """The headers of a reply to prompts with these reports."""
    return {
        PROMPT_TOKENS_HEADER: str(sum(report.prompt_tokens for report in reports)),
        KEPT_TOKENS_HEADER: str(sum(report.kept_tokens for report in reports)),
    }
